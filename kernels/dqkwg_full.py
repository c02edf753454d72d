"""Gradients with respect to queries, keys, `w` and the gate from `[BT, BT]` tiles; dG, if any, from the values.

The formulas are those of `dqkwg`, one task being one chunk of one query head:

    first pass over the heads    S = sum of ds,    dG = rowsum(E) - colsum(E) + `dg.dg_of_states`
    then for each tile of K      dk = sum of dk_h + S^T q,    dq = sum of dq_h + S k,    dw = -dv h^T

Each head's dG is complete, and stored, before the walk over K begins: nothing of it stays on chip. That is the way for
Ascend (triton-ascend 3.2 cannot hold a row per head across a loop over K), and for calls that want no dG on any chip.
"""

import triton
import triton.language as tl

from .dg import dg_of_states
from .dqkwg import (
    chunk_gate,
    gate_at,
    product_with_scores,
    products_with_start,
    query_key_products,
    scores,
    state_tile,
)
from .state import state_offset
from .time_axis import clear_outside_rows, clear_outside_time_axis, load_columns, locate_chunk, store_chunk


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def chunk_bwd_dqkwg_full(
    q,
    k,
    v,
    do,
    h,
    dh,
    dv,
    g,
    g_gamma,
    dq,
    dk,
    dw,
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
    USE_G: tl.constexpr,
    USE_G_GAMMA: tl.constexpr,
    USE_DW: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    DG_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    COMPUTED_RIGHT: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """One task is one chunk of one query head, TASKS = chunks * H.

    q, k `[B, T, H, K]`, v (the corrected values), do and dv `[B, T, HV, V]`, h and dh `[B, NT, HV, K, V]`
    (`[..., V, K]` with STATE_V_FIRST), g `[B, T, HV]` (base 2, cumulative in the chunk, either layout), g_gamma `[HV]`
    (base 2, per token); writes dq, dk `[B, T, H, K]`, with USE_DW dw `[B, T, HV, K]`, with USE_G dg `[B, T, HV]` (fp32,
    either layout). COMPUTED_RIGHT as in `product_with_scores`.
    """
    if IS_VARLEN:
        clear_outside_rows(dq, cu_seqlens, T, N, H * K, BK)
        clear_outside_rows(dk, cu_seqlens, T, N, H * K, BK)
        if USE_DW:
            clear_outside_rows(dw, cu_seqlens, T, N, HV * K, BK)
        if USE_G:
            clear_outside_time_axis(dg, cu_seqlens, T, N, HV, DG_T_CONTIG, BT)
    o_c = tl.arange(0, BT)
    R: tl.constexpr = HV // H
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_c = i_task // H
        i_h = i_task % H
        i_b, i_t, bos, length = locate_chunk(i_c, cu_seqlens, chunk_indices, T, NT, N, BT, IS_VARLEN)
        first = tl.cast(bos + i_t * BT, tl.int64)
        m_t = i_t * BT + o_c < length
        last = tl.minimum(BT, length - i_t * BT) - 1
        p_q = q + (first * H + i_h) * K
        p_k = k + (first * H + i_h) * K

        b_sum = tl.zeros([BT, BT], dtype=tl.float32)
        if USE_G:
            b_P = query_key_products(p_q, p_k, o_c, o_c, m_t, m_t, H, K, BK, DOT_PRECISION)
            b_P = tl.where(o_c[:, None] > o_c[None, :], b_P, 0.0)
        for i_r in range(0, R):
            i_hv = i_h * R + i_r
            b_G = chunk_gate(g, g_gamma, i_b, i_t, bos, i_hv, o_c, m_t, T, HV, BT, USE_G, USE_G_GAMMA, G_T_CONTIG)
            p_do = do + (first * HV + i_hv) * V
            p_v = v + (first * HV + i_hv) * V
            b_s = scores(p_do, p_v, b_G, b_G, o_c, o_c, m_t, m_t, scale, HV, V, BV, DOT_PRECISION)
            b_sum += b_s
            if USE_G:
                b_E = b_s * b_P
                b_dG = tl.sum(b_E, axis=1) - tl.sum(b_E, axis=0)
                G_last = gate_at(g, g_gamma, i_b, i_t, bos, i_hv, last, T, HV, BT, USE_G, USE_G_GAMMA, G_T_CONTIG)
                p_h = h + state_offset(i_c, i_hv, HV, K, V)
                p_dh = dh + state_offset(i_c, i_hv, HV, K, V)
                b_dG += dg_of_states(
                    p_q, p_k, p_do, p_v, p_h, p_dh, b_G, G_last, o_c, m_t, last, scale,
                    H, HV, K, V, BK, BV, STATE_V_FIRST, DOT_PRECISION,
                )  # fmt: skip
                store_chunk(dg, b_dG, i_b, i_t, bos, i_hv, o_c, m_t, T, HV, BT, DG_T_CONTIG, True)
        b_S = b_sum.to(q.dtype.element_ty)

        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            m_k = m_t[:, None] & (o_k < K)[None, :]
            o_qk = o_c[:, None] * (H * K) + o_k[None, :]

            b_dk = tl.zeros([BT, BK], dtype=tl.float32)
            for i_r in range(0, R):
                i_hv = i_h * R + i_r
                p_v = v + (first * HV + i_hv) * V
                p_dh = dh + state_offset(i_c, i_hv, HV, K, V)
                b_G = chunk_gate(g, g_gamma, i_b, i_t, bos, i_hv, o_c, m_t, T, HV, BT, USE_G, USE_G_GAMMA, G_T_CONTIG)
                G_last = gate_at(g, g_gamma, i_b, i_t, bos, i_hv, last, T, HV, BT, USE_G, USE_G_GAMMA, G_T_CONTIG)
                b_e = tl.where(m_t, tl.exp2(tl.where(m_t, G_last - b_G, 0.0)), 0.0)
                b_dkh = tl.zeros([BT, BK], dtype=tl.float32)
                for i_v in range(0, V, BV):
                    o_v = i_v + tl.arange(0, BV)
                    b_dh = state_tile(p_dh, o_k, o_v, K, V, BK, BV, STATE_V_FIRST)
                    b_v = load_columns(p_v, o_c, o_v, m_t, HV * V, V, BV, V)
                    b_dkh += tl.dot(b_v, tl.trans(b_dh), input_precision=DOT_PRECISION)
                b_dk += b_dkh * b_e[:, None]
            b_q = load_columns(p_q, o_c, o_k, m_t, H * K, K, BK, K)
            b_dk += product_with_scores(tl.trans(b_S), b_q, COMPUTED_RIGHT, DOT_PRECISION)
            tl.store(dk + (first * H + i_h) * K + o_qk, b_dk.to(dk.dtype.element_ty), mask=m_k)

            b_dq = tl.zeros([BT, BK], dtype=tl.float32)
            for i_r in range(0, R):
                i_hv = i_h * R + i_r
                i_x = (first * HV + i_hv) * V
                p_h = h + state_offset(i_c, i_hv, HV, K, V)
                b_G = chunk_gate(g, g_gamma, i_b, i_t, bos, i_hv, o_c, m_t, T, HV, BT, USE_G, USE_G_GAMMA, G_T_CONTIG)
                b_e = tl.exp2(b_G) * scale
                b_dqh, b_dwh = products_with_start(
                    do, dv, p_h, i_x, o_c, o_k, m_t,
                    HV, K, V, BK, BV, USE_DW, STATE_V_FIRST, DOT_PRECISION,
                )  # fmt: skip
                if USE_DW:
                    p_dw = dw + (first * HV + i_hv) * K
                    tl.store(p_dw + o_c[:, None] * (HV * K) + o_k[None, :], (-b_dwh).to(dw.dtype.element_ty), mask=m_k)
                b_dq += b_dqh * b_e[:, None]
            b_k = load_columns(p_k, o_c, o_k, m_t, H * K, K, BK, K)
            b_dq += product_with_scores(b_S, b_k, COMPUTED_RIGHT, DOT_PRECISION)
            tl.store(dq + (first * H + i_h) * K + o_qk, b_dq.to(dq.dtype.element_ty), mask=m_k)
