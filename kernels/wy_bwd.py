"""Gradients through u = A (beta * v) and w = A (beta * exp2(G) * k), where A = (I + M)^-1 comes from k, beta and G.

    dA = du (beta * v)^T + dw (beta * exp2(G) * k)^T            dM = -strict_tril(A^T dA A^T)
    t_u = A^T du        t_w = A^T dw        P = k k^T        E[t,s] = exp2(G[t] - G[s])
    dv = beta * t_u                         X = beta[t] * dM * E
    dk = beta * exp2(G) * t_w + (X + X^T) k
    dbeta = sum_V(t_u * v) + exp2(G) * sum_K(t_w * k) + rowsum(dM * E * P)
    dG = beta * exp2(G) * sum_K(t_w * k) + rowsum(X * P) - colsum(X * P)

beta and exp2(G) scale rows of v and k, and rows are what tiles are reduced over, so dA is formed transposed:

    C_w = exp2(G) * k dw^T        C = v du^T + C_w
    dA^T = beta * C        W = A dA^T        A^T dA A^T = A^T W^T
    rowsum(A^T * C) = sum_V(t_u * v) + exp2(G) * sum_K(t_w * k)
    rowsum(A^T * C_w) = exp2(G) * sum_K(t_w * k)

Gates and beta multiply fp32 `[BT, BT]` tiles, never an operand of a product.

One task is one chunk of one query head. It walks the value heads of the group once for all that belongs to one head,
adding up X, then once more for t_w, so that dk is summed on chip. P is formed for each head anew, from the loads of
k dw^T: no tile but X stays alive from head to head. X lies below the diagonal and X^T above it, so that their sum is
a choice, exact in any dtype.

A computed tile is the right operand of every product it enters: Triton 3.4 to 3.7.0 on Hopper feeds a computed left
operand from registers, and some of these products come out wrong.
"""

import triton
import triton.language as tl

from .time_axis import clear_outside_rows, clear_outside_time_axis, load_chunk, load_columns, locate_chunk, store_chunk


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def prepare_wy_repr_bwd_full(
    k,
    v,
    beta,
    A,
    dw,
    du,
    g,
    dk,
    dv,
    dbeta,
    dg,
    cu_seqlens,
    chunk_indices,
    T,
    NT,
    N,
    TASKS,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
    BD: tl.constexpr,
    USE_G: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    BETA_T_CONTIG: tl.constexpr,
    DG_T_CONTIG: tl.constexpr,
    DB_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    RELOAD_LEFT: tl.constexpr,
    TIME_IN_COLUMNS: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """k `[B, T, H, K]`, v and du `[B, T, HV, V]`, dw `[B, T, HV, K]`, A `[B, T, HV, BT]`, beta and g `[B, T, HV]`
    (g base 2, cumulative in the chunk; each in either layout); writes dk `[B, T, H, K]`, dv `[B, T, HV, V]`, dbeta and
    dg `[B, T, HV]` (each in either layout).

    One loop walks v and du and, in step with them, k and dw. RELOAD_LEFT loads a tile again for each product that it is
    the left operand of: triton-ascend 3.2 may overwrite a left operand. TIME_IN_COLUMNS stores dbeta and dg as
    `store_time_axis` does, without which they take more memory than an Ascend core has; a GPU takes a few more
    instructions for it.
    """
    if IS_VARLEN:
        clear_outside_rows(dk, cu_seqlens, T, N, H * K, BE)
        clear_outside_rows(dv, cu_seqlens, T, N, HV * V, BE)
        clear_outside_time_axis(dbeta, cu_seqlens, T, N, HV, DB_T_CONTIG, BT)
        if USE_G:
            clear_outside_time_axis(dg, cu_seqlens, T, N, HV, DG_T_CONTIG, BT)
    R: tl.constexpr = HV // H
    WIDEST: tl.constexpr = K if K > V else V
    o_c = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_h = i_task % H
        i_b, i_t, bos, length = locate_chunk(i_task // H, cu_seqlens, chunk_indices, T, NT, N, BT, IS_VARLEN)
        first = tl.cast(bos + i_t * BT, tl.int64)
        m_t = i_t * BT + o_c < length
        p_k = k + (first * H + i_h) * K
        o_A = o_c[:, None] * (HV * BT) + o_c[None, :]

        b_X = tl.zeros([BT, BT], dtype=tl.float32)
        for i_r in range(0, R):
            i_hv = i_h * R + i_r
            p_A = A + (first * HV + i_hv) * BT + o_A
            p_v = v + (first * HV + i_hv) * V
            p_du = du + (first * HV + i_hv) * V
            p_dw = dw + (first * HV + i_hv) * K
            p_dv = dv + (first * HV + i_hv) * V
            b_beta = load_chunk(beta, i_b, i_t, bos, i_hv, o_c, m_t, T, HV, BT, BETA_T_CONTIG)
            b_G = tl.zeros([BT], dtype=tl.float32)
            if USE_G:
                b_G += load_chunk(g, i_b, i_t, bos, i_hv, o_c, m_t, T, HV, BT, G_T_CONTIG)

            b_C = tl.zeros([BT, BT], dtype=tl.float32)
            b_Cw = tl.zeros([BT, BT], dtype=tl.float32)
            b_P = tl.zeros([BT, BT], dtype=tl.float32)
            for i_e in range(0, WIDEST, BE):
                o_e = i_e + tl.arange(0, BE)
                b_du = load_columns(p_du, o_c, o_e, m_t, HV * V, V, BE, WIDEST)
                b_v = load_columns(p_v, o_c, o_e, m_t, HV * V, V, BE, WIDEST)
                # Kept in registers across the loop, A would spill.
                b_A = tl.load(p_A, mask=m_t[:, None], other=0.0)
                b_C += tl.dot(b_v, tl.trans(b_du), input_precision=DOT_PRECISION)
                b_tu = tl.dot(tl.trans(b_A), b_du, input_precision=DOT_PRECISION)
                b_dw = load_columns(p_dw, o_c, o_e, m_t, HV * K, K, BE, WIDEST)
                b_k = load_columns(p_k, o_c, o_e, m_t, H * K, K, BE, WIDEST)
                b_k_left = b_k
                if RELOAD_LEFT:
                    b_k_left = load_columns(p_k, o_c, o_e, m_t, H * K, K, BE, WIDEST)
                b_P += tl.dot(b_k_left, tl.trans(b_k), input_precision=DOT_PRECISION)
                b_Cw += tl.dot(b_k, tl.trans(b_dw), input_precision=DOT_PRECISION)
                b_dv = b_tu * b_beta[:, None]
                m_v = m_t[:, None] & (o_e < V)[None, :]
                tl.store(p_dv + o_c[:, None] * (HV * V) + o_e[None, :], b_dv.to(dv.dtype.element_ty), mask=m_v)

            b_A = tl.load(p_A, mask=m_t[:, None], other=0.0)
            b_At = tl.trans(b_A)
            b_Cw *= tl.exp2(b_G)[:, None]
            b_cw = tl.sum(b_At * b_Cw, axis=1)
            b_C += b_Cw
            b_dbeta = tl.sum(b_At * b_C, axis=1)
            b_dAt = tl.where(o_c[:, None] < o_c[None, :], b_C * b_beta[:, None], 0.0).to(k.dtype.element_ty)
            if RELOAD_LEFT:
                b_A = tl.load(p_A, mask=m_t[:, None], other=0.0)
                b_At = tl.trans(tl.load(p_A, mask=m_t[:, None], other=0.0))
            b_W = tl.dot(b_A, b_dAt, input_precision=DOT_PRECISION).to(k.dtype.element_ty)
            b_dM = tl.dot(b_At, tl.trans(b_W), input_precision=DOT_PRECISION)
            m_M = (o_c[:, None] > o_c[None, :]) & m_t[:, None]
            b_x = b_G[:, None] - b_G[None, :]
            b_M = tl.where(m_M, -b_dM * tl.exp2(tl.where(m_M, b_x, 0.0)), 0.0)
            b_row = tl.sum(b_M * b_P, axis=1)
            b_M *= b_beta[:, None]
            b_col = tl.sum(b_M * b_P, axis=0)
            b_X += b_M
            b_dbeta += b_row
            store_chunk(dbeta, b_dbeta, i_b, i_t, bos, i_hv, o_c, m_t, T, HV, BT, DB_T_CONTIG, TIME_IN_COLUMNS)
            if USE_G:
                b_dG = (b_cw + b_row) * b_beta - b_col
                store_chunk(dg, b_dG, i_b, i_t, bos, i_hv, o_c, m_t, T, HV, BT, DG_T_CONTIG, TIME_IN_COLUMNS)

        b_Z = b_X.to(k.dtype.element_ty)
        b_Z = tl.where(o_c[:, None] > o_c[None, :], b_Z, tl.trans(b_Z))
        for i_k in range(0, K, BD):
            o_k = i_k + tl.arange(0, BD)
            b_dk = tl.zeros([BT, BD], dtype=tl.float32)
            for i_r in range(0, R):
                i_hv = i_h * R + i_r
                b_A = tl.load(A + (first * HV + i_hv) * BT + o_A, mask=m_t[:, None], other=0.0)
                b_dw = load_columns(dw + (first * HV + i_hv) * K, o_c, o_k, m_t, HV * K, K, BD, K)
                b_s = load_chunk(beta, i_b, i_t, bos, i_hv, o_c, m_t, T, HV, BT, BETA_T_CONTIG)
                if USE_G:
                    b_s *= tl.exp2(load_chunk(g, i_b, i_t, bos, i_hv, o_c, m_t, T, HV, BT, G_T_CONTIG))
                b_dk += tl.dot(tl.trans(b_A), b_dw, input_precision=DOT_PRECISION) * b_s[:, None]
            b_k = load_columns(p_k, o_c, o_k, m_t, H * K, K, BD, K)
            b_dk += tl.trans(tl.dot(tl.trans(b_k), b_Z, input_precision=DOT_PRECISION))
            m_k = m_t[:, None] & (o_k < K)[None, :]
            p_dk = dk + (first * H + i_h) * K + o_c[:, None] * (H * K) + o_k[None, :]
            tl.store(p_dk, b_dk.to(dk.dtype.element_ty), mask=m_k)
