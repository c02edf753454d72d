"""Addresses of chunk states: where one head's `[K, V]` state lies, in either order of its two axes.

States are kept `[..., HV, K, V]`, or `[..., HV, V, K]` with `STATE_V_FIRST`. Kernels see them as `[BK, BV]` tiles
in both cases: a V-first tile moves through memory in its own order and is turned on chip.
"""

import triton
import triton.language as tl

from .time_axis import load_bounded, locate_tokens


@triton.jit
def locate_sequence(
    i_n,
    cu_seqlens,
    chunk_offsets,
    T,
    NT,
    BT: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """Sequence `i_n`: its batch row, its first token and first chunk in the storage, its length.

    A packed sequence ends where the NT chunks end that there are states for, whatever the lists hold.

    Returns:
        `(i_b, bos, length, boc)`: batch row (0 when packed), first token (`i_b * T`, int64, when dense), tokens, first
        chunk (`i_b * NT` when dense); the rest int32.
    """
    if IS_VARLEN:
        i_b = 0
        bos, length = locate_tokens(i_n, cu_seqlens, T)
        boc = load_bounded(chunk_offsets + i_n, 0, NT)
        length = tl.minimum(length, (NT - boc) * BT)
    else:
        i_b = i_n
        bos = tl.cast(i_n, tl.int64) * T
        length = T
        boc = i_n * NT
    return i_b, bos, length, boc


@triton.jit
def locate_walk(
    i_task,
    cu_seqlens,
    chunk_offsets,
    T,
    NT,
    HV: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """What task `i_task` walks: one sequence at one value head, with the `BV` columns of its state that stay on chip.

    Neighbouring tasks have neighbouring columns, then neighbouring heads: they read the same q, k and w.

    Returns:
        `(i_n, i_h, o_v, i_b, bos, length, boc)`: sequence, value head, columns `[BV]`; the rest as `locate_sequence`.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_nh = i_task // NV
    i_n = i_nh // HV
    i_h = i_nh % HV
    i_b, bos, length, boc = locate_sequence(i_n, cu_seqlens, chunk_offsets, T, NT, BT, IS_VARLEN)
    o_v = (i_task % NV) * BV + tl.arange(0, BV)
    return i_n, i_h, o_v, i_b, bos, length, boc


@triton.jit
def state_offset(
    i_s,
    i_h,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """Elements (int64) from the start of a state tensor to state number `i_s` (a chunk or a sequence) at head `i_h`."""
    return (tl.cast(i_s, tl.int64) * HV + i_h) * (K * V)


@triton.jit
def zero_state(i_task, o_k, o_v):
    """A tile `[BK, BV]` of zeros to begin a walk from, fp32."""
    # Zeros that depend on the task: a constant tile would stay in Ascend's unified buffer beside the state (3.2).
    return tl.zeros([o_k.shape[0], o_v.shape[0]], dtype=tl.float32) + ((o_v + i_task).to(tl.float32) * 0.0)[None, :]


@triton.jit
def load_state(
    p_s,
    o_k,
    o_v,
    K: tl.constexpr,
    V: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
):
    """The tile `[BK, BV]` of the state at `p_s`, zero outside `K` and `V`, in the dtype it is stored in."""
    if STATE_V_FIRST:
        b_s = tl.trans(
            tl.load(
                p_s + o_v[:, None] * K + o_k[None, :],
                mask=(o_v < V)[:, None] & (o_k < K)[None, :],
                other=0.0,
            )
        )
    else:
        b_s = tl.load(
            p_s + o_k[:, None] * V + o_v[None, :],
            mask=(o_k < K)[:, None] & (o_v < V)[None, :],
            other=0.0,
        )
    return b_s


@triton.jit
def first_state(
    p_s,
    i_task,
    i_n,
    i_h,
    o_k,
    o_v,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    GIVEN: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
):
    """The tile `[BK, BV]` that a walk begins from, fp32: of sequence `i_n` at head `i_h` of `p_s` if GIVEN, else 0."""
    if GIVEN:
        b_s = load_state(p_s + state_offset(i_n, i_h, HV, K, V), o_k, o_v, K, V, STATE_V_FIRST).to(tl.float32)
    else:
        b_s = zero_state(i_task, o_k, o_v)
    return b_s


@triton.jit
def store_state(
    p_s,
    b_s,
    o_k,
    o_v,
    K: tl.constexpr,
    V: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
):
    """Stores the tile `[BK, BV]` of a state at `p_s`, cast to the dtype of the storage."""
    b_out = b_s.to(p_s.dtype.element_ty)
    if STATE_V_FIRST:
        tl.store(
            p_s + o_v[:, None] * K + o_k[None, :],
            tl.trans(b_out),
            mask=(o_v < V)[:, None] & (o_k < K)[None, :],
        )
    else:
        tl.store(
            p_s + o_k[:, None] * V + o_v[None, :],
            b_out,
            mask=(o_k < K)[:, None] & (o_v < V)[None, :],
        )


@triton.jit
def load_rows(
    p_x,
    o_c,
    o_e,
    tokens,
    E: tl.constexpr,
    STRIDE: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Rows `o_c` of a chunk of `tokens` tokens, `STRIDE` elements apart, columns `o_e`, zero outside.

    Triton keeps three copies of what a loop loads for a product, to fetch ahead. Without PREFETCH it keeps one:
    it looks for such loads in the loop's own block only, and a chunk always has a token.
    """
    m_x = (o_c < tokens)[:, None] & (o_e < E)[None, :]
    if PREFETCH:
        b_x = tl.load(p_x + o_c[:, None] * STRIDE + o_e[None, :], mask=m_x, other=0.0)
    else:
        b_x = tl.zeros([o_c.shape[0], o_e.shape[0]], dtype=p_x.dtype.element_ty)
        if tokens > 0:
            b_x = tl.load(p_x + o_c[:, None] * STRIDE + o_e[None, :], mask=m_x, other=0.0)
    return b_x
