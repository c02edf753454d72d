"""Output of the gated delta rule, chunk by chunk: from the state at the start of the chunk, and from its own values.

    o = scale * ( (exp2(G) * q) h  +  tril(q k^T * exp2(G[t] - G[s])) v )        tril keeps s <= t

One task is one chunk of one value head and one tile of V.
"""

import triton
import triton.language as tl

from .state import load_state, state_offset
from .time_axis import clear_outside_rows, load_chunk, locate_chunk


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def chunk_fwd_o(
    q,
    k,
    v,
    h,
    g,
    g_gamma,
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
    USE_G: tl.constexpr,
    USE_G_GAMMA: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """q, k `[B, T, H, K]`, v `[B, T, HV, V]`, h `[B, NT, HV, K, V]` (`[..., V, K]` with STATE_V_FIRST), g `[B, T, HV]`
    (base 2, cumulative in the chunk, either layout), g_gamma `[HV]` (base 2, per token); writes o `[B, T, HV, V]`.
    """
    if IS_VARLEN:
        clear_outside_rows(o, cu_seqlens, T, N, HV * V, BV)
    NV: tl.constexpr = (V + BV - 1) // BV
    o_c = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_ch = i_task // NV
        i_c = i_ch // HV
        i_h = i_ch % HV
        i_b, i_t, bos, length = locate_chunk(i_c, cu_seqlens, chunk_indices, T, NT, N, BT, IS_VARLEN)
        first = tl.cast(bos + i_t * BT, tl.int64)
        m_t = i_t * BT + o_c < length
        o_v = (i_task % NV) * BV + tl.arange(0, BV)
        m_v = m_t[:, None] & (o_v < V)[None, :]
        p_q = q + (first * H + i_h // (HV // H)) * K
        p_k = k + (first * H + i_h // (HV // H)) * K
        p_h = h + state_offset(i_c, i_h, HV, K, V)

        b_v = tl.load(v + (first * HV + i_h) * V + o_c[:, None] * (HV * V) + o_v[None, :], mask=m_v, other=0.0)
        b_o = tl.zeros([BT, BV], dtype=tl.float32)
        b_A = tl.zeros([BT, BT], dtype=tl.float32)
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            m_k = m_t[:, None] & (o_k < K)[None, :]
            b_q = tl.load(p_q + o_c[:, None] * (H * K) + o_k[None, :], mask=m_k, other=0.0)
            b_k = tl.load(p_k + o_c[:, None] * (H * K) + o_k[None, :], mask=m_k, other=0.0)
            b_h = load_state(p_h, o_k, o_v, K, V, STATE_V_FIRST)
            b_A += tl.dot(b_k, tl.trans(b_q), input_precision=DOT_PRECISION)
            b_o += tl.dot(b_q, b_h.to(b_q.dtype), input_precision=DOT_PRECISION)

        m_A = o_c[:, None] <= o_c[None, :]
        b_G = tl.zeros([BT], dtype=tl.float32)
        if USE_G:
            b_G += load_chunk(g, i_b, i_t, bos, i_h, o_c, m_t, T, HV, BT, G_T_CONTIG)
        if USE_G_GAMMA:
            b_G += tl.load(g_gamma + i_h).to(tl.float32) * (o_c + 1).to(tl.float32)
        if USE_G or USE_G_GAMMA:
            b_o *= tl.exp2(b_G)[:, None]
            # Above the diagonal the difference may be large and positive: mask before exp2, not after.
            b_A *= tl.exp2(tl.where(m_A & m_t[None, :], b_G[None, :] - b_G[:, None], 0.0))
        else:
            # Vector work between the two products into b_o: bishengir 1.2.0 does not compile one right after the other.
            b_o = tl.where(m_t[:, None], b_o, 0.0)
        b_A = tl.where(m_A, b_A, 0.0)

        b_o += tl.dot(tl.trans(b_A.to(b_v.dtype)), b_v, input_precision=DOT_PRECISION)
        p_o = o + (first * HV + i_h) * V
        tl.store(p_o + o_c[:, None] * (HV * V) + o_v[None, :], (b_o * scale).to(o.dtype.element_ty), mask=m_v)
