"""Cumulative sum of a gate within each chunk.

    out[t] = scale * (sum of g[s])        s <= t, or s >= t when reversed; s and t in one chunk

One task is one chunk of a block of heads. A stride-HV tensor is contiguous along its heads and a T-contiguous one
along time, so a tile is read in plain bursts of its own layout, summed as `[heads, time]`, and turned once more
where the output's layout differs. The sum is a product with a triangle of ones: a scan would be scalarised on Ascend
and could round differently from layout to layout; the product adds the same values in the same order in each.

A gate with channels, `[B, T, HV, S]`, is a stride-HV gate of HV * S heads.
"""

import triton
import triton.language as tl

from .time_axis import clear_outside_time_axis, locate_chunk, token_pointer

# A token's gate, natural log, whose decay is 0 in fp32 (2 ** -150): at or below it a state begins anew.
RESET = tl.constexpr(-104.0)


@triton.jit
def load_head_block(
    p_g,
    i_b,
    bos,
    first,
    length,
    o_t,
    i_h,
    o_h,
    T,
    HV: tl.constexpr,
    T_CONTIG: tl.constexpr,
):
    """The tile of heads `i_h + o_h` and tokens `first + o_t` of a sequence, `[heads, time]` in fp32, 0 past its ends.

    `o_h` counts the heads of a block: the product of any head with T may need 64 bits.
    """
    p_g = token_pointer(p_g, i_b, first, bos, i_h, T, HV, T_CONTIG)
    m_t = first + o_t < length
    m_h = i_h + o_h < HV
    if T_CONTIG:
        b_g = tl.load(p_g + o_h[:, None] * T + o_t[None, :], mask=m_h[:, None] & m_t[None, :], other=0.0).to(tl.float32)
    else:
        b_g = tl.load(p_g + o_t[:, None] * HV + o_h[None, :], mask=m_t[:, None] & m_h[None, :], other=0.0)
        b_g = tl.trans(b_g.to(tl.float32))
    return b_g


@triton.jit
def store_head_block(
    p_out,
    b_out,
    i_b,
    bos,
    first,
    length,
    o_t,
    i_h,
    o_h,
    T,
    HV: tl.constexpr,
    T_CONTIG: tl.constexpr,
):
    """Writes a `[heads, time]` tile to the addresses that `load_head_block` reads."""
    p_out = token_pointer(p_out, i_b, first, bos, i_h, T, HV, T_CONTIG)
    m_t = first + o_t < length
    m_h = i_h + o_h < HV
    if T_CONTIG:
        b_out = b_out.to(p_out.dtype.element_ty)
        tl.store(p_out + o_h[:, None] * T + o_t[None, :], b_out, mask=m_h[:, None] & m_t[None, :])
    else:
        b_out = tl.trans(b_out).to(p_out.dtype.element_ty)
        tl.store(p_out + o_t[:, None] * HV + o_h[None, :], b_out, mask=m_t[:, None] & m_h[None, :])


@triton.jit
def bounded(b_gate):
    """Gates of single tokens, none below RESET: the sums of later tokens would have no digits left for their own gates.

    A chunk's sum then ends above 64 * RESET, and what lies between its resets is summed to 2 ** -11 or better.
    """
    # Not a maximum, which may swallow NaN.
    return tl.where(b_gate < RESET, RESET, b_gate)


@triton.jit
def triangular_sum(
    b_g,
    o_t,
    REVERSE: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """Sums of the tile `[heads, time]` along time, up to and including each token, or from it on when reversed."""
    if REVERSE:
        m_sum = o_t[:, None] >= o_t[None, :]
    else:
        m_sum = o_t[:, None] <= o_t[None, :]
    return tl.dot(b_g, tl.where(m_sum, 1.0, 0.0), input_precision=DOT_PRECISION)


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def chunk_local_cumsum(
    g,
    out,
    cu_seqlens,
    chunk_indices,
    scale,
    T,
    NT,
    N,
    TASKS,
    HV: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    REVERSE: tl.constexpr,
    RESETS: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    OUT_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """Reads g `[B, T, HV]` and writes out `[B, T, HV]`, each in either layout; TASKS = chunks * cdiv(HV, BH).

    With RESETS g is a natural-log gate that may reset a state, `bounded`.
    """
    if IS_VARLEN:
        clear_outside_time_axis(out, cu_seqlens, T, N, HV, OUT_T_CONTIG, BH)
    head_blocks: tl.constexpr = (HV + BH - 1) // BH
    o_t = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_h = i_task % head_blocks * BH
        o_h = tl.arange(0, BH)
        i_b, i_t, bos, length = locate_chunk(i_task // head_blocks, cu_seqlens, chunk_indices, T, NT, N, BT, IS_VARLEN)
        b_g = load_head_block(g, i_b, bos, i_t * BT, length, o_t, i_h, o_h, T, HV, G_T_CONTIG)
        if RESETS:
            b_g = bounded(b_g)
        b_out = triangular_sum(b_g, o_t, REVERSE, DOT_PRECISION)
        store_head_block(out, b_out * scale, i_b, bos, i_t * BT, length, o_t, i_h, o_h, T, HV, OUT_T_CONTIG)
