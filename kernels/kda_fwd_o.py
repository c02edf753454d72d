"""Output of a chunk from the state at its start and from its own values, with a decay for each key channel.

    o = scale * (exp2(G) * q) h + tril(A) v

A already has the scale. One task is one chunk of one value head and one tile of V. Both products are formed transposed:
a computed tile is then the right operand of each, and Triton 3.4 to 3.7.0 on Hopper gets some left ones wrong.
"""

import triton
import triton.language as tl

from .channels import load_channels, store_channels
from .state import load_state, state_offset
from .time_axis import chunk_pointer, clear_outside_rows, locate_chunk


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def chunk_gla_fwd_o_gk(
    q,
    v,
    g,
    A,
    h,
    o,
    cu_seqlens,
    chunk_indices,
    scale,
    T,
    NT,
    N,
    TASKS,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """q `[B, T, H, K]`, v `[B, T, HV, V]`, g `[B, T, HV, K]` (base 2, cumulative in the chunk, in either layout),
    A `[B, T, HV, BT]`, h `[B, NT, HV, K, V]` (`[..., V, K]` with STATE_V_FIRST); writes o `[B, T, HV, V]`.
    TASKS = chunks * HV * cdiv(V, BV). What A holds above the diagonal is not used.
    """
    if IS_VARLEN:
        clear_outside_rows(o, cu_seqlens, T, N, HV * V, BV)
    NV: tl.constexpr = (V + BV - 1) // BV
    g_stride: tl.constexpr = K if G_T_CONTIG else HV * K
    o_t = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_ch = i_task // NV
        i_c = i_ch // HV
        i_h = i_ch % HV
        i_b, i_t, bos, length = locate_chunk(i_c, cu_seqlens, chunk_indices, T, NT, N, BT, IS_VARLEN)
        first = tl.cast(bos + i_t * BT, tl.int64)
        row = first * HV + i_h
        m_t = i_t * BT + o_t < length
        o_v = (i_task % NV) * BV + tl.arange(0, BV)
        p_q = q + (first * H + i_h // (HV // H)) * K
        p_g = chunk_pointer(g, i_b, i_t, bos, i_h, T, HV, BT, G_T_CONTIG, K)
        p_h = h + state_offset(i_c, i_h, HV, K, V)

        b_o = tl.zeros([BV, BT], dtype=tl.float32)
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            b_q = load_channels(p_q, o_t, o_k, m_t, K, H * K)
            b_G = load_channels(p_g, o_t, o_k, m_t, K, g_stride).to(tl.float32)
            b_qg = (b_q.to(tl.float32) * tl.exp2(b_G)).to(b_q.dtype)
            b_h = load_state(p_h, o_k, o_v, K, V, STATE_V_FIRST).to(b_q.dtype)
            b_o += tl.dot(tl.trans(b_h), tl.trans(b_qg), input_precision=DOT_PRECISION)
        b_A = load_channels(A + row * BT, o_t, o_t, m_t, BT, HV * BT)
        b_A = tl.where(o_t[:, None] >= o_t[None, :], b_A, 0.0).to(b_A.dtype)
        b_v = load_channels(v + row * V, o_t, o_v, m_t, V, HV * V)
        # Vector work between the products into b_o: bishengir 1.2.0 does not compile one right after the other.
        b_o = b_o * scale
        b_o += tl.dot(tl.trans(b_v), tl.trans(b_A), input_precision=DOT_PRECISION)
        store_channels(o + row * V, o_t, o_v, m_t, tl.trans(b_o), V, HV * V)
