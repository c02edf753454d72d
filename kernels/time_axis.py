"""Addresses: where a chunk lies, and where its time-axis operands lie in either layout.

A layout changes addresses, never shapes and never arithmetic. A time-axis tensor (`g`, `beta`, `dg`,
`dbeta`) has the logical shape `[B, T, HV]`; element `(b, t, h)` of it lies at

    stride-HV     b * T * HV + t * HV + h
    T-contiguous  b * HV * T + h * T + t

Packed batches have B = 1; sequence n covers the tokens `cu_seqlens[n] .. cu_seqlens[n + 1]`. Every kernel
keeps three numbers apart: `T`, the total the host passes (a stride), `length`, the tokens of one sequence
(a bound), and `bos`, the sequence's first token counted over the whole storage (a base). Token offsets
inside a kernel (`i_t * BT + ...`) are relative to `bos`.

Lists that describe a packed batch may have changed since the host saw them: through memory shared with numpy, by a
custom kernel, in a graph's replay. Whatever they hold, each number read from one is brought into its bounds here, so
that no kernel reads or writes beside its tensors.
"""

import triton
import triton.language as tl


@triton.jit
def load_bounded(p_x, first, last):
    """A number of a list, int32, no less than `first` and then no more than `last`."""
    return tl.minimum(tl.maximum(tl.load(p_x).to(tl.int32), first), last)


@triton.jit
def locate_tokens(i_n, cu_seqlens, T):
    """First token and number of tokens of sequence `i_n` of a packed batch, both int32; the first is always there."""
    bos = load_bounded(cu_seqlens + i_n, 0, T)
    eos = load_bounded(cu_seqlens + i_n + 1, bos, T)
    return tl.minimum(bos, T - 1), eos - bos


@triton.jit
def locate_chunk(
    i_c,
    cu_seqlens,
    chunk_indices,
    T,
    NT,
    N,
    BT: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """The chunk with running number `i_c`: its batch row, its number in the sequence, where that lies.

    Dense batches number their chunks `i_b * NT + i_t`; packed ones list them in `chunk_indices [NT, 2]` as
    (sequence, chunk of the sequence). A chunk that its sequence does not have begins where that ends: it has no token.

    Returns:
        `(i_b, i_t, bos, length)`: batch row (0 when packed), chunk of the sequence, first token of the sequence in the
        storage (`i_b * T`, int64, when dense), tokens of the sequence; the rest int32.
    """
    if IS_VARLEN:
        i_n = load_bounded(chunk_indices + i_c * 2, 0, N - 1)
        bos, length = locate_tokens(i_n, cu_seqlens, T)
        i_t = load_bounded(chunk_indices + i_c * 2 + 1, 0, tl.cdiv(length, BT))
        i_b = 0
    else:
        i_b = i_c // NT
        i_t = i_c % NT
        bos = tl.cast(i_b, tl.int64) * T
        length = T
    return i_b, i_t, bos, length


@triton.jit
def time_axis_offset(
    i_b,
    bos,
    i_h,
    T,
    HV: tl.constexpr,
    T_CONTIG: tl.constexpr,
):
    """Elements (int64) from the start of a time-axis tensor to the first token of a sequence at head `i_h`.

    `bos` counts tokens over the whole storage, so that `bos - i_b * T` is the sequence's start within its
    batch row: 0 when dense, `cu_seqlens[n]` when packed.
    """
    if T_CONTIG:
        offset = tl.cast(i_b * HV + i_h, tl.int64) * T + (bos - tl.cast(i_b, tl.int64) * T)
    else:
        offset = tl.cast(bos, tl.int64) * HV + i_h
    return offset


@triton.jit
def time_axis_stride(HV: tl.constexpr, T_CONTIG: tl.constexpr):
    """Elements between two tokens of one head: a compile-time constant, or Ascend loads element by element."""
    if T_CONTIG:
        stride: tl.constexpr = 1
    else:
        stride: tl.constexpr = HV
    return stride


@triton.jit
def clear_rows(
    p_out,
    first,
    last,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Zero the tokens `first .. last` of a row-major tensor of `ROW` elements a token, spread over all programs.

    The tokens outside every sequence of a packed batch lie before `cu_seqlens[0]` and after `cu_seqlens[N]`,
    nowhere else: sequences follow one another. No chunk covers them, so nothing else would write them.
    """
    for t in range(first + tl.program_id(0), last, tl.num_programs(0)):
        for i_e in range(0, ROW, BLOCK):
            o_e = i_e + tl.arange(0, BLOCK)
            zero = tl.zeros([BLOCK], dtype=p_out.dtype.element_ty)
            tl.store(p_out + tl.cast(t, tl.int64) * ROW + o_e, zero, mask=o_e < ROW)


@triton.jit
def clear_outside_rows(
    p_out,
    cu_seqlens,
    T,
    N,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Zero every token of a packed row-major output `[1, T, ROW]` that no sequence covers."""
    clear_rows(p_out, 0, load_bounded(cu_seqlens, 0, T), ROW, BLOCK)
    clear_rows(p_out, load_bounded(cu_seqlens + N, 0, T), T, ROW, BLOCK)


@triton.jit
def clear_time_axis(
    p_out,
    first,
    last,
    T,
    HV: tl.constexpr,
    T_CONTIG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Zero the tokens `first .. last` of a packed time-axis tensor, in bursts along its contiguous axis."""
    if T_CONTIG:
        for i_h in range(tl.program_id(0), HV, tl.num_programs(0)):
            p_head = p_out + tl.cast(i_h, tl.int64) * T
            for i_t in range(first, last, BLOCK):
                o_t = i_t + tl.arange(0, BLOCK)
                zero = tl.zeros([BLOCK], dtype=p_out.dtype.element_ty)
                tl.store(p_head + o_t, zero, mask=o_t < last)
    else:
        clear_rows(p_out, first, last, HV, BLOCK)


@triton.jit
def clear_outside_time_axis(
    p_out,
    cu_seqlens,
    T,
    N,
    HV: tl.constexpr,
    T_CONTIG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Zero every token of a packed time-axis output `[1, T, HV]` that no sequence covers, in either layout."""
    clear_time_axis(p_out, 0, load_bounded(cu_seqlens, 0, T), T, HV, T_CONTIG, BLOCK)
    clear_time_axis(p_out, load_bounded(cu_seqlens + N, 0, T), T, T, HV, T_CONTIG, BLOCK)


@triton.jit
def load_time_axis(
    p_x,
    o_t,
    m_t,
    HV: tl.constexpr,
    T_CONTIG: tl.constexpr,
):
    """Tokens `o_t` of one head, counted from `p_x`; 0 where `m_t` does not hold."""
    if T_CONTIG:
        b_x = tl.load(p_x + o_t, mask=m_t, other=0.0)
    else:
        # bishengir 1.2.0 gives each element of a strided load 32 bytes of on-chip memory, and then each element of
        # what is computed from it. The sum over rows of 32 bytes, of which the first column is read, stops that.
        o_x = tl.arange(0, 8)
        b_x = tl.load(p_x + o_t[:, None] * HV + o_x[None, :], mask=m_t[:, None] & (o_x == 0)[None, :], other=0.0)
        b_x = tl.sum(b_x, axis=1)
    return b_x


@triton.jit
def store_time_axis(
    p_x,
    o_t,
    b_x,
    m_t,
    HV: tl.constexpr,
    T_CONTIG: tl.constexpr,
):
    """Store tokens `o_t` of one head, counted from `p_x`, where `m_t` holds."""
    b_x = b_x.to(p_x.dtype.element_ty)
    if T_CONTIG:
        tl.store(p_x + o_t, b_x, mask=m_t)
    else:
        # As above, and then each element of the tile that it was summed from: only the first column is stored.
        o_x = tl.arange(0, 8)
        b_x = tl.broadcast_to(b_x[:, None], [b_x.shape[0], 8])
        tl.store(p_x + o_t[:, None] * HV + o_x[None, :], b_x, mask=m_t[:, None] & (o_x == 0)[None, :])
