"""Gradients with respect to queries, keys and `w` from `[BC, BC]` tiles, on and below the diagonal.

For the rows r of one sub-block, G, ds, h and dh as in `dqkwg`, and c running over sub-blocks:

    dq[r] = sum over heads of dq_h[r]  +  sum over c <= r of S[r, c] k[c]                  S = sum over heads of ds
    dk[r] = sum over heads of dk_h[r]  +  sum over c >= r of S[c, r]^T q[c]                dw[r] = -dv[r] h^T

ds is 0 where c > r, so those sub-blocks are never formed. A tile of ds needs (BC / BT)^2 of the memory that a whole one
takes, and is formed anew for each tile of K and for dq and dk apart: fewer bytes on chip, more work. dG is left to
`dg.chunk_bwd_dg`.
"""

import triton
import triton.language as tl

from .dqkwg import chunk_gate, gate_at, scores
from .state import load_state, state_offset
from .time_axis import clear_outside_rows, locate_chunk


@triton.jit
def group_scores(
    do,
    v,
    g,
    g_gamma,
    i_b,
    i_t,
    bos,
    first,
    left,
    i_h,
    o_row,
    o_col,
    scale,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    USE_G: tl.constexpr,
    USE_G_GAMMA: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """The sum of ds over the value heads of query head `i_h`, for rows t = `o_row` and columns s = `o_col`, fp32."""
    m_row = o_row < left
    m_col = o_col < left
    R: tl.constexpr = HV // H
    b_S = tl.zeros([o_row.shape[0], o_col.shape[0]], dtype=tl.float32)
    for i_r in range(0, R):
        i_hv = i_h * R + i_r
        b_G_row = chunk_gate(g, g_gamma, i_b, i_t, bos, i_hv, o_row, m_row, T, HV, BT, USE_G, USE_G_GAMMA, G_T_CONTIG)
        b_G_col = chunk_gate(g, g_gamma, i_b, i_t, bos, i_hv, o_col, m_col, T, HV, BT, USE_G, USE_G_GAMMA, G_T_CONTIG)
        p_do = do + (first * HV + i_hv) * V
        p_v = v + (first * HV + i_hv) * V
        b_S += scores(p_do, p_v, b_G_row, b_G_col, o_row, o_col, m_row, m_col, scale, HV, V, BV, DOT_PRECISION)
    return b_S


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def chunk_bwd_dqkwg_sub(
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
    BC: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    USE_G: tl.constexpr,
    USE_G_GAMMA: tl.constexpr,
    USE_DW: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """One task is one chunk of one query head, TASKS = chunks * H.

    q, k `[B, T, H, K]`, v (the corrected values), do and dv `[B, T, HV, V]`, h and dh `[B, NT, HV, K, V]`
    (`[..., V, K]` with STATE_V_FIRST), g `[B, T, HV]` (base 2, cumulative in the chunk, either layout), g_gamma `[HV]`
    (base 2, per token); writes dq, dk `[B, T, H, K]` and, with USE_DW, dw `[B, T, HV, K]`.
    """
    if IS_VARLEN:
        clear_outside_rows(dq, cu_seqlens, T, N, H * K, BK)
        clear_outside_rows(dk, cu_seqlens, T, N, H * K, BK)
        if USE_DW:
            clear_outside_rows(dw, cu_seqlens, T, N, HV * K, BK)
    o_c = tl.arange(0, BC)
    R: tl.constexpr = HV // H
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_c = i_task // H
        i_h = i_task % H
        i_b, i_t, bos, length = locate_chunk(i_c, cu_seqlens, chunk_indices, T, NT, N, BT, IS_VARLEN)
        first = tl.cast(bos + i_t * BT, tl.int64)
        left = length - i_t * BT
        last = tl.minimum(BT, left) - 1
        p_q = q + (first * H + i_h) * K
        p_k = k + (first * H + i_h) * K

        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            m_k = (o_k < K)[None, :]
            for i_row in tl.static_range(0, BT, BC):
                o_row = i_row + o_c
                m_row = o_row < left
                m_rk = m_row[:, None] & m_k
                o_rk = o_row[:, None] * (H * K) + o_k[None, :]

                b_dq = tl.zeros([BC, BK], dtype=tl.float32)
                b_dk = tl.zeros([BC, BK], dtype=tl.float32)
                for i_r in range(0, R):
                    i_hv = i_h * R + i_r
                    p_do = do + (first * HV + i_hv) * V
                    p_v = v + (first * HV + i_hv) * V
                    p_h = h + state_offset(i_c, i_hv, HV, K, V)
                    p_dh = dh + state_offset(i_c, i_hv, HV, K, V)
                    b_dqh = tl.zeros([BC, BK], dtype=tl.float32)
                    b_dkh = tl.zeros([BC, BK], dtype=tl.float32)
                    b_dwh = tl.zeros([BC, BK], dtype=tl.float32)
                    for i_v in range(0, V, BV):
                        o_v = i_v + tl.arange(0, BV)
                        m_v = m_row[:, None] & (o_v < V)[None, :]
                        o_rv = o_row[:, None] * (HV * V) + o_v[None, :]
                        b_h = load_state(p_h, o_k, o_v, K, V, STATE_V_FIRST)
                        b_do = tl.load(p_do + o_rv, mask=m_v, other=0.0)
                        b_dqh += tl.dot(b_do, tl.trans(b_h), input_precision=DOT_PRECISION)
                        if USE_DW:
                            b_dv = tl.load(dv + (first * HV + i_hv) * V + o_rv, mask=m_v, other=0.0)
                            b_dwh += tl.dot(b_dv, tl.trans(b_h), input_precision=DOT_PRECISION)
                        b_dh = load_state(p_dh, o_k, o_v, K, V, STATE_V_FIRST)
                        b_v = tl.load(p_v + o_rv, mask=m_v, other=0.0)
                        b_dkh += tl.dot(b_v, tl.trans(b_dh), input_precision=DOT_PRECISION)
                    if USE_DW:
                        p_dw = dw + (first * HV + i_hv) * K + o_row[:, None] * (HV * K) + o_k[None, :]
                        tl.store(p_dw, (-b_dwh).to(dw.dtype.element_ty), mask=m_rk)
                    b_G = chunk_gate(
                        g, g_gamma, i_b, i_t, bos, i_hv, o_row, m_row, T, HV, BT, USE_G, USE_G_GAMMA, G_T_CONTIG
                    )
                    G_last = gate_at(g, g_gamma, i_b, i_t, bos, i_hv, last, T, HV, BT, USE_G, USE_G_GAMMA, G_T_CONTIG)
                    b_dq += b_dqh * (tl.exp2(b_G) * scale)[:, None]
                    b_dk += b_dkh * tl.where(m_row, tl.exp2(tl.where(m_row, G_last - b_G, 0.0)), 0.0)[:, None]

                for i_col in tl.static_range(0, i_row + BC, BC):
                    b_S = group_scores(
                        do, v, g, g_gamma, i_b, i_t, bos, first, left, i_h, i_row + o_c, i_col + o_c, scale, T,
                        H, HV, V, BT, BV, USE_G, USE_G_GAMMA, G_T_CONTIG, DOT_PRECISION,
                    )  # fmt: skip
                    m_ck = (i_col + o_c < left)[:, None] & m_k
                    b_k = tl.load(p_k + (i_col + o_c)[:, None] * (H * K) + o_k[None, :], mask=m_ck, other=0.0)
                    b_dq += tl.dot(b_S.to(b_k.dtype), b_k, input_precision=DOT_PRECISION)
                tl.store(dq + (first * H + i_h) * K + o_rk, b_dq.to(dq.dtype.element_ty), mask=m_rk)

                for i_col in tl.static_range(i_row, BT, BC):
                    b_S = group_scores(
                        do, v, g, g_gamma, i_b, i_t, bos, first, left, i_h, i_col + o_c, i_row + o_c, scale, T,
                        H, HV, V, BT, BV, USE_G, USE_G_GAMMA, G_T_CONTIG, DOT_PRECISION,
                    )  # fmt: skip
                    m_ck = (i_col + o_c < left)[:, None] & m_k
                    b_q = tl.load(p_q + (i_col + o_c)[:, None] * (H * K) + o_k[None, :], mask=m_ck, other=0.0)
                    b_dk += tl.dot(tl.trans(b_S.to(b_q.dtype)), b_q, input_precision=DOT_PRECISION)
                tl.store(dk + (first * H + i_h) * K + o_rk, b_dk.to(dk.dtype.element_ty), mask=m_rk)
