"""Gradient with respect to the gate, from the values: no `[BT, K]` tile is formed, and no row has to be kept.

`dqkwg` has dG in terms of dq_h and dk_h. Both are products with a state, and so are their sums over K with q and k:

    rowsum(dq_h * q) = scale * exp2(G) * rowsum(do * (q h))
    rowsum(dk_h * k) = exp2(G_last - G) * rowsum(v * (k dh))

`dg_of_states` adds these up for one value head, with sum(h * dh); `chunk_bwd_dg` adds E to them and stores dG, for a
caller whose other kernel forms dq, dk and dw alone.
"""

import triton
import triton.language as tl

from .dqkwg import chunk_gate, gate_at, query_key_products, scores
from .state import load_state, state_offset
from .time_axis import clear_outside_time_axis, locate_chunk, store_chunk


@triton.jit
def dg_of_states(
    p_q,
    p_k,
    p_do,
    p_v,
    p_h,
    p_dh,
    b_G,
    G_last,
    o_c,
    m_t,
    last,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """What the states at both ends of a chunk add to dG of one value head: all of it but E."""
    b_qq = tl.zeros([o_c.shape[0]], dtype=tl.float32)
    b_kk = tl.zeros([o_c.shape[0]], dtype=tl.float32)
    b_hh = tl.zeros([BV], dtype=tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_v = m_t[:, None] & (o_v < V)[None, :]
        b_qh = tl.zeros([o_c.shape[0], BV], dtype=tl.float32)
        b_kdh = tl.zeros([o_c.shape[0], BV], dtype=tl.float32)
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            m_k = m_t[:, None] & (o_k < K)[None, :]
            b_h = load_state(p_h, o_k, o_v, K, V, STATE_V_FIRST)
            b_dh = load_state(p_dh, o_k, o_v, K, V, STATE_V_FIRST)
            b_hh += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), axis=0)
            b_q = tl.load(p_q + o_c[:, None] * (H * K) + o_k[None, :], mask=m_k, other=0.0)
            b_qh += tl.dot(b_q, b_h, input_precision=DOT_PRECISION)
            b_k = tl.load(p_k + o_c[:, None] * (H * K) + o_k[None, :], mask=m_k, other=0.0)
            b_kdh += tl.dot(b_k, b_dh, input_precision=DOT_PRECISION)
        b_do = tl.load(p_do + o_c[:, None] * (HV * V) + o_v[None, :], mask=m_v, other=0.0)
        b_qq += tl.sum(b_qh * b_do.to(tl.float32), axis=1)
        b_v = tl.load(p_v + o_c[:, None] * (HV * V) + o_v[None, :], mask=m_v, other=0.0)
        b_kk += tl.sum(b_kdh * b_v.to(tl.float32), axis=1)
    b_kk *= tl.where(m_t, tl.exp2(tl.where(m_t, G_last - b_G, 0.0)), 0.0)
    dG_last = tl.exp2(G_last) * tl.sum(b_hh, axis=0) + tl.sum(b_kk, axis=0)
    return b_qq * (tl.exp2(b_G) * scale) - b_kk + tl.where(o_c == last, dG_last, 0.0)


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def chunk_bwd_dg(
    q,
    k,
    v,
    do,
    h,
    dh,
    g,
    dg,
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
    DG_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """dG alone; one task is one chunk of one value head, TASKS = chunks * HV.

    q, k `[B, T, H, K]`, v (the corrected values) and do `[B, T, HV, V]`, h and dh `[B, NT, HV, K, V]` (`[..., V, K]`
    with STATE_V_FIRST), g `[B, T, HV]` (base 2, cumulative in the chunk); writes dg `[B, T, HV]` in fp32. g and dg in
    either layout.
    """
    if IS_VARLEN:
        clear_outside_time_axis(dg, cu_seqlens, T, N, HV, DG_T_CONTIG, BT)
    o_c = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_c = i_task // HV
        i_h = i_task % HV
        i_b, i_t, bos, length = locate_chunk(i_c, cu_seqlens, chunk_indices, T, NT, N, BT, IS_VARLEN)
        first = tl.cast(bos + i_t * BT, tl.int64)
        m_t = i_t * BT + o_c < length
        last = tl.minimum(BT, length - i_t * BT) - 1
        p_q = q + (first * H + i_h // (HV // H)) * K
        p_k = k + (first * H + i_h // (HV // H)) * K
        p_do = do + (first * HV + i_h) * V
        p_v = v + (first * HV + i_h) * V
        p_h = h + state_offset(i_c, i_h, HV, K, V)
        p_dh = dh + state_offset(i_c, i_h, HV, K, V)
        b_G = chunk_gate(g, None, i_b, i_t, bos, i_h, o_c, m_t, T, HV, BT, True, False, G_T_CONTIG)
        G_last = gate_at(g, None, i_b, i_t, bos, i_h, last, T, HV, BT, True, False, G_T_CONTIG)

        b_E = scores(p_do, p_v, b_G, b_G, o_c, o_c, m_t, m_t, scale, HV, V, BV, DOT_PRECISION)
        b_E *= query_key_products(p_q, p_k, o_c, o_c, m_t, m_t, H, K, BK, DOT_PRECISION)
        b_E = tl.where(o_c[:, None] > o_c[None, :], b_E, 0.0)
        b_dG = tl.sum(b_E, axis=1) - tl.sum(b_E, axis=0)

        b_dG += dg_of_states(
            p_q, p_k, p_do, p_v, p_h, p_dh, b_G, G_last, o_c, m_t, last, scale,
            H, HV, K, V, BK, BV, STATE_V_FIRST, DOT_PRECISION,
        )  # fmt: skip
        store_chunk(dg, b_dG, i_b, i_t, bos, i_h, o_c, m_t, T, HV, BT, DG_T_CONTIG, True)
