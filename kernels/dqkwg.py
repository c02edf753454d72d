"""Gradients with respect to queries, keys, `w` and the gate, from the chunk's own values and the states at its ends.

With ds = scale * tril(do v^T * exp2(G[t] - G[s])), h the state at the chunk's start and dh the gradient of the state
at its end, one head of one chunk gives

    dq_h = scale * exp2(G) * (do h^T)            dk_h = exp2(G_last - G) * (v dh^T)
    dq = dq_h + ds k                             dk = dk_h + ds^T q                        dw = -dv h^T
    dG = rowsum(dq_h * q) + rowsum(E) - rowsum(dk_h * k) - colsum(E)                       E = strict_tril(ds * q k^T)
    dG[last] += exp2(G_last) * sum(h * dh) + sum(dk_h * k)

E leaves out the diagonal, which cancels in exact arithmetic: kept, it would be all of dG where a chunk has one token.

One task is one chunk of one query head: it walks the value heads of the group and sums dq and dk on chip, so that no
partial sum goes through memory. ds enters dq and dk linearly, hence its sum over the group is multiplied once.

`chunk_bwd_dqkwg_full` forms `[BT, BT]` tiles; `chunk_bwd_dqkwg_sub` forms `[BC, BC]` tiles on and below the diagonal;
`chunk_bwd_dg` computes dG alone, for a caller that wants the other two without it. It uses
rowsum(dq_h * q) = scale * exp2(G) * rowsum(do * (q h)) and likewise for k, so that no `[BT, K]` tile is formed.
"""

import triton
import triton.language as tl

from .state import load_state, state_offset
from .time_axis import (
    clear_outside_rows,
    clear_outside_time_axis,
    load_chunk,
    load_columns,
    locate_chunk,
    store_chunk,
    token_pointer,
)


@triton.jit
def _gate(
    g,
    g_gamma,
    i_b,
    i_t,
    bos,
    i_h,
    o_r,
    m_r,
    T,
    HV: tl.constexpr,
    BT: tl.constexpr,
    USE_G: tl.constexpr,
    USE_G_GAMMA: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
):
    """G at the rows `o_r` of chunk `i_t`, fp32, 0 where `m_r` does not hold."""
    b_G = tl.zeros([o_r.shape[0]], dtype=tl.float32)
    if USE_G:
        b_G += load_chunk(g, i_b, i_t, bos, i_h, o_r, m_r, T, HV, BT, G_T_CONTIG)
    if USE_G_GAMMA:
        b_G += tl.where(m_r, tl.load(g_gamma + i_h).to(tl.float32) * (o_r + 1).to(tl.float32), 0.0)
    return b_G


@triton.jit
def _gate_at(
    g,
    g_gamma,
    i_b,
    i_t,
    bos,
    i_h,
    row,
    T,
    HV: tl.constexpr,
    BT: tl.constexpr,
    USE_G: tl.constexpr,
    USE_G_GAMMA: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
):
    """G at one row of chunk `i_t`, a scalar; where the chunk has no token, of one that is there."""
    x = 0.0
    if USE_G:
        t = tl.maximum(i_t * BT + row, 0)
        x += tl.load(token_pointer(g, i_b, t, bos, i_h, T, HV, G_T_CONTIG)).to(tl.float32)
    if USE_G_GAMMA:
        x += tl.load(g_gamma + i_h).to(tl.float32) * (row + 1).to(tl.float32)
    return x


@triton.jit
def _state(
    p_s,
    o_k,
    o_v,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
):
    """`load_state`, without a mask where the tiles divide the state."""
    if K % BK == 0 and V % BV == 0:
        if STATE_V_FIRST:
            b_s = tl.trans(tl.load(p_s + o_v[:, None] * K + o_k[None, :]))
        else:
            b_s = tl.load(p_s + o_k[:, None] * V + o_v[None, :])
    else:
        b_s = load_state(p_s, o_k, o_v, K, V, STATE_V_FIRST)
    return b_s


@triton.jit
def _add_row(
    b_rows,
    b_first,
    b_second,
    b_x,
    i_r,
    o_g,
    GROUP: tl.constexpr,
):
    """Adds `b_x` to row `i_r`. Two rows are kept apart: Triton sends a row of a tile through shared memory."""
    if GROUP <= 2:
        b_first += tl.where(i_r == 0, b_x, 0.0)
        if GROUP == 2:
            b_second += tl.where(i_r == 1, b_x, 0.0)
    else:
        b_rows += tl.where(o_g[:, None] == i_r, b_x[None, :], 0.0)
    return b_rows, b_first, b_second


@triton.jit
def _scores(
    p_do,
    p_v,
    b_G_row,
    b_G_col,
    o_row,
    o_col,
    m_row,
    m_col,
    scale,
    HV: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """ds for rows t = `o_row` and columns s = `o_col`, fp32, 0 where s > t."""
    b_s = tl.zeros([o_row.shape[0], o_col.shape[0]], dtype=tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_v = (o_v < V)[None, :]
        b_do = tl.load(p_do + o_row[:, None] * (HV * V) + o_v[None, :], mask=m_row[:, None] & m_v, other=0.0)
        b_v = tl.load(p_v + o_col[:, None] * (HV * V) + o_v[None, :], mask=m_col[:, None] & m_v, other=0.0)
        b_s += tl.dot(b_do, tl.trans(b_v), input_precision=DOT_PRECISION)
    # Above the diagonal the difference may be large and positive: mask before exp2, not after.
    m_s = (o_row[:, None] >= o_col[None, :]) & m_row[:, None]
    b_x = tl.where(m_s, b_G_row[:, None] - b_G_col[None, :], 0.0)
    return tl.where(m_s, b_s * tl.exp2(b_x) * scale, 0.0)


@triton.jit
def _scores_of_group(
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
        b_G_row = _gate(g, g_gamma, i_b, i_t, bos, i_hv, o_row, m_row, T, HV, BT, USE_G, USE_G_GAMMA, G_T_CONTIG)
        b_G_col = _gate(g, g_gamma, i_b, i_t, bos, i_hv, o_col, m_col, T, HV, BT, USE_G, USE_G_GAMMA, G_T_CONTIG)
        p_do = do + (first * HV + i_hv) * V
        p_v = v + (first * HV + i_hv) * V
        b_S += _scores(p_do, p_v, b_G_row, b_G_col, o_row, o_col, m_row, m_col, scale, HV, V, BV, DOT_PRECISION)
    return b_S


@triton.jit
def _products(
    p_q,
    p_k,
    o_row,
    o_col,
    m_row,
    m_col,
    H: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """q k^T for rows t = `o_row` and columns s = `o_col`, fp32."""
    b_P = tl.zeros([o_row.shape[0], o_col.shape[0]], dtype=tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = (o_k < K)[None, :]
        b_q = tl.load(p_q + o_row[:, None] * (H * K) + o_k[None, :], mask=m_row[:, None] & m_k, other=0.0)
        b_k = tl.load(p_k + o_col[:, None] * (H * K) + o_k[None, :], mask=m_col[:, None] & m_k, other=0.0)
        b_P += tl.dot(b_q, tl.trans(b_k), input_precision=DOT_PRECISION)
    return b_P


@triton.jit
def _dg_of_states(
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
    GROUP: tl.constexpr,
    USE_G: tl.constexpr,
    USE_G_GAMMA: tl.constexpr,
    USE_DW: tl.constexpr,
    USE_DG: tl.constexpr,
    DG_FROM_VALUES: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    DG_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    COMPUTED_RIGHT: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """q, k `[B, T, H, K]`, v (the corrected values), do and dv `[B, T, HV, V]`, h and dh `[B, NT, HV, K, V]`
    (`[..., V, K]` with STATE_V_FIRST), g `[B, T, HV]` (base 2, cumulative in the chunk, either layout), g_gamma `[HV]`
    (base 2, per token); writes dq, dk `[B, T, H, K]`, dw `[B, T, HV, K]`, dg `[B, T, HV]` (fp32, either layout).

    GROUP is HV / H rounded up to a power of two. DG_FROM_VALUES forms dG in the first pass over the heads, as
    `chunk_bwd_dg` does: two more products, but no row per head to keep (which triton-ascend 3.2 cannot hold across a
    loop over K). COMPUTED_RIGHT makes ds the right operand of both its products:
    Triton 3.4 to 3.7.0 on Hopper feeds a computed left operand from registers, and its transpose comes out wrong.
    """
    if IS_VARLEN:
        clear_outside_rows(dq, cu_seqlens, T, N, H * K, BK)
        clear_outside_rows(dk, cu_seqlens, T, N, H * K, BK)
        if USE_DW:
            clear_outside_rows(dw, cu_seqlens, T, N, HV * K, BK)
        if USE_DG:
            clear_outside_time_axis(dg, cu_seqlens, T, N, HV, DG_T_CONTIG, BT)
    o_c = tl.arange(0, BT)
    o_g = tl.arange(0, GROUP)
    o_x = tl.arange(0, BK)
    # sum(h * dh) is the trace of h dh^T: a product more, but h then arrives as what a product reads, fetched ahead.
    HH_PRODUCT: tl.constexpr = q.dtype.element_ty != tl.float32
    HH: tl.constexpr = BK if HH_PRODUCT else BV
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
        b_dg = tl.zeros([GROUP, BT], dtype=tl.float32)
        b_dg0 = tl.zeros([BT], dtype=tl.float32)
        b_dg1 = tl.zeros([BT], dtype=tl.float32)
        if USE_DG:
            b_P = _products(p_q, p_k, o_c, o_c, m_t, m_t, H, K, BK, DOT_PRECISION)
            b_P = tl.where(o_c[:, None] > o_c[None, :], b_P, 0.0)
        for i_r in range(0, R):
            i_hv = i_h * R + i_r
            b_G = _gate(g, g_gamma, i_b, i_t, bos, i_hv, o_c, m_t, T, HV, BT, USE_G, USE_G_GAMMA, G_T_CONTIG)
            p_do = do + (first * HV + i_hv) * V
            p_v = v + (first * HV + i_hv) * V
            b_s = _scores(p_do, p_v, b_G, b_G, o_c, o_c, m_t, m_t, scale, HV, V, BV, DOT_PRECISION)
            b_sum += b_s
            if USE_DG:
                b_E = b_s * b_P
                b_dG = tl.sum(b_E, axis=1) - tl.sum(b_E, axis=0)
                if DG_FROM_VALUES:
                    G_last = _gate_at(g, g_gamma, i_b, i_t, bos, i_hv, last, T, HV, BT, USE_G, USE_G_GAMMA, G_T_CONTIG)
                    p_h = h + state_offset(i_c, i_hv, HV, K, V)
                    p_dh = dh + state_offset(i_c, i_hv, HV, K, V)
                    b_dG += _dg_of_states(
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
                        H,
                        HV,
                        K,
                        V,
                        BK,
                        BV,
                        STATE_V_FIRST,
                        DOT_PRECISION,
                    )
                    store_chunk(dg, b_dG, i_b, i_t, bos, i_hv, o_c, m_t, T, HV, BT, DG_T_CONTIG, True)
                else:
                    b_dg, b_dg0, b_dg1 = _add_row(b_dg, b_dg0, b_dg1, b_dG, i_r, o_g, GROUP)
        b_S = b_sum.to(q.dtype.element_ty)

        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            m_k = m_t[:, None] & (o_k < K)[None, :]
            o_qk = o_c[:, None] * (H * K) + o_k[None, :]

            b_dk = tl.zeros([BT, BK], dtype=tl.float32)
            for i_r in range(0, R):
                i_hv = i_h * R + i_r
                p_v = v + (first * HV + i_hv) * V
                p_h = h + state_offset(i_c, i_hv, HV, K, V)
                p_dh = dh + state_offset(i_c, i_hv, HV, K, V)
                b_G = _gate(g, g_gamma, i_b, i_t, bos, i_hv, o_c, m_t, T, HV, BT, USE_G, USE_G_GAMMA, G_T_CONTIG)
                G_last = _gate_at(g, g_gamma, i_b, i_t, bos, i_hv, last, T, HV, BT, USE_G, USE_G_GAMMA, G_T_CONTIG)
                b_e = tl.where(m_t, tl.exp2(tl.where(m_t, G_last - b_G, 0.0)), 0.0)
                if USE_DG and not DG_FROM_VALUES:
                    b_k = load_columns(p_k, o_c, o_k, m_t, H * K, K, BK, K)
                b_dkh = tl.zeros([BT, BK], dtype=tl.float32)
                b_hh = tl.zeros([BK, HH], dtype=tl.float32)
                for i_v in range(0, V, BV):
                    o_v = i_v + tl.arange(0, BV)
                    b_dh = _state(p_dh, o_k, o_v, K, V, BK, BV, STATE_V_FIRST)
                    b_v = load_columns(p_v, o_c, o_v, m_t, HV * V, V, BV, V)
                    b_dkh += tl.dot(b_v, tl.trans(b_dh), input_precision=DOT_PRECISION)
                    if USE_DG and not DG_FROM_VALUES:
                        b_h = _state(p_h, o_k, o_v, K, V, BK, BV, STATE_V_FIRST)
                        if HH_PRODUCT:
                            b_hh += tl.dot(b_h, tl.trans(b_dh), input_precision=DOT_PRECISION)
                        else:
                            b_hh += b_h.to(tl.float32) * b_dh.to(tl.float32)
                b_dkh *= b_e[:, None]
                if USE_DG and not DG_FROM_VALUES:
                    b_kk = tl.sum(b_dkh * b_k.to(tl.float32), axis=1)
                    if HH_PRODUCT:
                        b_hh = tl.where(o_x[:, None] == o_x[None, :], b_hh, 0.0)
                    dG_last = tl.exp2(G_last) * tl.sum(tl.sum(b_hh, axis=1), axis=0) + tl.sum(b_kk, axis=0)
                    b_dG = tl.where(o_c == last, dG_last, 0.0) - b_kk
                    b_dg, b_dg0, b_dg1 = _add_row(b_dg, b_dg0, b_dg1, b_dG, i_r, o_g, GROUP)
                b_dk += b_dkh
            b_q = load_columns(p_q, o_c, o_k, m_t, H * K, K, BK, K)
            if COMPUTED_RIGHT:
                b_dk += tl.trans(tl.dot(tl.trans(b_q), b_S, input_precision=DOT_PRECISION))
            else:
                b_dk += tl.dot(tl.trans(b_S), b_q, input_precision=DOT_PRECISION)
            tl.store(dk + (first * H + i_h) * K + o_qk, b_dk.to(dk.dtype.element_ty), mask=m_k)

            b_dq = tl.zeros([BT, BK], dtype=tl.float32)
            for i_r in range(0, R):
                i_hv = i_h * R + i_r
                p_do = do + (first * HV + i_hv) * V
                p_h = h + state_offset(i_c, i_hv, HV, K, V)
                b_G = _gate(g, g_gamma, i_b, i_t, bos, i_hv, o_c, m_t, T, HV, BT, USE_G, USE_G_GAMMA, G_T_CONTIG)
                b_e = tl.exp2(b_G) * scale
                if USE_DG and not DG_FROM_VALUES:
                    b_q = load_columns(p_q, o_c, o_k, m_t, H * K, K, BK, K)
                b_dqh = tl.zeros([BT, BK], dtype=tl.float32)
                b_dwh = tl.zeros([BT, BK], dtype=tl.float32)
                for i_v in range(0, V, BV):
                    o_v = i_v + tl.arange(0, BV)
                    b_h = _state(p_h, o_k, o_v, K, V, BK, BV, STATE_V_FIRST)
                    b_do = load_columns(p_do, o_c, o_v, m_t, HV * V, V, BV, V)
                    b_dqh += tl.dot(b_do, tl.trans(b_h), input_precision=DOT_PRECISION)
                    if USE_DW:
                        p_dv = dv + (first * HV + i_hv) * V
                        b_dv = load_columns(p_dv, o_c, o_v, m_t, HV * V, V, BV, V)
                        b_dwh += tl.dot(b_dv, tl.trans(b_h), input_precision=DOT_PRECISION)
                if USE_DW:
                    p_dw = dw + (first * HV + i_hv) * K
                    tl.store(p_dw + o_c[:, None] * (HV * K) + o_k[None, :], (-b_dwh).to(dw.dtype.element_ty), mask=m_k)
                b_dqh *= b_e[:, None]
                if USE_DG and not DG_FROM_VALUES:
                    b_dG = tl.sum(b_dqh * b_q.to(tl.float32), axis=1)
                    b_dg, b_dg0, b_dg1 = _add_row(b_dg, b_dg0, b_dg1, b_dG, i_r, o_g, GROUP)
                b_dq += b_dqh
            b_k = load_columns(p_k, o_c, o_k, m_t, H * K, K, BK, K)
            if COMPUTED_RIGHT:
                b_dq += tl.trans(tl.dot(tl.trans(b_k), tl.trans(b_S), input_precision=DOT_PRECISION))
            else:
                b_dq += tl.dot(b_S, b_k, input_precision=DOT_PRECISION)
            tl.store(dq + (first * H + i_h) * K + o_qk, b_dq.to(dq.dtype.element_ty), mask=m_k)

        if USE_DG and not DG_FROM_VALUES:
            if GROUP <= 2:
                store_chunk(dg, b_dg0, i_b, i_t, bos, i_h * R, o_c, m_t, T, HV, BT, DG_T_CONTIG, True)
                if GROUP == 2:
                    store_chunk(dg, b_dg1, i_b, i_t, bos, i_h * R + 1, o_c, m_t, T, HV, BT, DG_T_CONTIG, True)
            else:
                for i_r in range(0, R):
                    b_dG = tl.sum(tl.where(o_g[:, None] == i_r, b_dg, 0.0), axis=0)
                    store_chunk(dg, b_dG, i_b, i_t, bos, i_h * R + i_r, o_c, m_t, T, HV, BT, DG_T_CONTIG, True)


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
    """`[BC, BC]` tiles on and below the diagonal; operands as in `chunk_bwd_dqkwg_full`, dG left to `chunk_bwd_dg`."""
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
                    b_G = _gate(
                        g, g_gamma, i_b, i_t, bos, i_hv, o_row, m_row, T, HV, BT, USE_G, USE_G_GAMMA, G_T_CONTIG
                    )
                    G_last = _gate_at(g, g_gamma, i_b, i_t, bos, i_hv, last, T, HV, BT, USE_G, USE_G_GAMMA, G_T_CONTIG)
                    b_dq += b_dqh * (tl.exp2(b_G) * scale)[:, None]
                    b_dk += b_dkh * tl.where(m_row, tl.exp2(tl.where(m_row, G_last - b_G, 0.0)), 0.0)[:, None]

                for i_col in tl.static_range(0, i_row + BC, BC):
                    b_S = _scores_of_group(
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
                        i_row + o_c,
                        i_col + o_c,
                        scale,
                        T,
                        H,
                        HV,
                        V,
                        BT,
                        BV,
                        USE_G,
                        USE_G_GAMMA,
                        G_T_CONTIG,
                        DOT_PRECISION,
                    )
                    m_ck = (i_col + o_c < left)[:, None] & m_k
                    b_k = tl.load(p_k + (i_col + o_c)[:, None] * (H * K) + o_k[None, :], mask=m_ck, other=0.0)
                    b_dq += tl.dot(b_S.to(b_k.dtype), b_k, input_precision=DOT_PRECISION)
                tl.store(dq + (first * H + i_h) * K + o_rk, b_dq.to(dq.dtype.element_ty), mask=m_rk)

                for i_col in tl.static_range(i_row, BT, BC):
                    b_S = _scores_of_group(
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
                        i_col + o_c,
                        i_row + o_c,
                        scale,
                        T,
                        H,
                        HV,
                        V,
                        BT,
                        BV,
                        USE_G,
                        USE_G_GAMMA,
                        G_T_CONTIG,
                        DOT_PRECISION,
                    )
                    m_ck = (i_col + o_c < left)[:, None] & m_k
                    b_q = tl.load(p_q + (i_col + o_c)[:, None] * (H * K) + o_k[None, :], mask=m_ck, other=0.0)
                    b_dk += tl.dot(tl.trans(b_S.to(b_q.dtype)), b_q, input_precision=DOT_PRECISION)
                tl.store(dk + (first * H + i_h) * K + o_rk, b_dk.to(dk.dtype.element_ty), mask=m_rk)


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
    """dG alone; one task is one chunk of one value head. Operands as in `chunk_bwd_dqkwg_full`."""
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
        b_G = _gate(g, g, i_b, i_t, bos, i_h, o_c, m_t, T, HV, BT, True, False, G_T_CONTIG)
        G_last = _gate_at(g, g, i_b, i_t, bos, i_h, last, T, HV, BT, True, False, G_T_CONTIG)

        b_E = _scores(p_do, p_v, b_G, b_G, o_c, o_c, m_t, m_t, scale, HV, V, BV, DOT_PRECISION)
        b_E *= _products(p_q, p_k, o_c, o_c, m_t, m_t, H, K, BK, DOT_PRECISION)
        b_E = tl.where(o_c[:, None] > o_c[None, :], b_E, 0.0)
        b_dG = tl.sum(b_E, axis=1) - tl.sum(b_E, axis=0)

        b_dG += _dg_of_states(
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
            H,
            HV,
            K,
            V,
            BK,
            BV,
            STATE_V_FIRST,
            DOT_PRECISION,
        )
        store_chunk(dg, b_dG, i_b, i_t, bos, i_h, o_c, m_t, T, HV, BT, DG_T_CONTIG, True)
