"""Gradients of a chunk through its states, its w and u, and the inverse they are made with.

dh is the gradient of the state at the chunk's end, h the state at its start, du the gradient of u:

    dw = -du h^T        t_u = A^T du        t_w = A^T dw
    dq = scale * exp2(G) * (do h^T)
    dk_end = exp2(G_last - G) * (v_new dh^T)        dk = dk_end + beta * exp2(G) * t_w        dv = beta * t_u
    C = du v^T + dw (exp2(G) * k)^T
    dbeta[s] = sum over t of (A * C)[t, s]                          = sum_V(t_u * v) + sum_K(t_w * exp2(G) * k)
    dM = -stril(A^T stril(C * beta[s]) A^T)
    dG = q * dq - k * dk_end + beta * exp2(G) * k * t_w
    dG[last] += exp2(G_last) * sum_V(h * dh) + sum over t of k * dk_end

One task is one chunk of one value head: a walk over the values, then one over the channels with the values inside.
Sums over tokens and channels are products, which add in one order whatever the layouts are.
"""

import triton
import triton.language as tl

from .channels import load_channels, load_row, store_channels
from .kda_gate import column_sums, row_sums_of_parts
from .state import load_state, state_offset
from .time_axis import (
    chunk_pointer,
    clear_outside_rows,
    clear_outside_time_axis,
    load_time_axis,
    locate_chunk,
    store_time_axis,
)


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def chunk_kda_bwd_wy_dqkg_fused(
    q,
    k,
    v,
    v_new,
    g,
    beta,
    A,
    h,
    do,
    dh,
    du,
    dq,
    dk,
    dv,
    dbeta,
    dg,
    dM,
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
    BETA_T_CONTIG: tl.constexpr,
    DG_T_CONTIG: tl.constexpr,
    DB_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    GATED_PRECISION: tl.constexpr,
):
    """q, k `[B, T, H, K]`, v, v_new, do, du `[B, T, HV, V]`, g `[B, T, HV, K]` (base 2, cumulative in the chunk) and
    beta `[B, T, HV]` in either layout, A `[B, T, HV, BT]`, h, dh `[B, NT, HV, K, V]` (`[..., V, K]` if STATE_V_FIRST);
    writes dq, dk `[B, T, HV, K]` and dM `[B, T, HV, BT]` in fp32, dv `[B, T, HV, V]`, dbeta `[B, T, HV]` and dg
    `[B, T, HV, K]` in fp32 and in either layout. TASKS = chunks * HV.

    GATED_PRECISION is of products with dw, which is never rounded to 16 bits, and SPLIT as in `column_sums`.
    """
    if IS_VARLEN:
        clear_outside_rows(dq, cu_seqlens, T, N, HV * K, BK)
        clear_outside_rows(dk, cu_seqlens, T, N, HV * K, BK)
        clear_outside_rows(dv, cu_seqlens, T, N, HV * V, BV)
        clear_outside_rows(dM, cu_seqlens, T, N, HV * BT, BT)
        clear_outside_time_axis(dg, cu_seqlens, T, N, HV, DG_T_CONTIG, BK, K)
        clear_outside_time_axis(dbeta, cu_seqlens, T, N, HV, DB_T_CONTIG, BT)
    g_stride: tl.constexpr = K if G_T_CONTIG else HV * K
    dg_stride: tl.constexpr = K if DG_T_CONTIG else HV * K
    o_t = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_c = i_task // HV
        i_h = i_task % HV
        i_b, i_t, bos, length = locate_chunk(i_c, cu_seqlens, chunk_indices, T, NT, N, BT, IS_VARLEN)
        tokens = tl.minimum(length - i_t * BT, BT)
        m_t = o_t < tokens
        first = tl.cast(bos + i_t * BT, tl.int64)
        row = first * HV + i_h
        head = (first * H + i_h // (HV // H)) * K
        p_A = A + row * BT
        p_g = chunk_pointer(g, i_b, i_t, bos, i_h, T, HV, BT, G_T_CONTIG, K)
        p_dg = chunk_pointer(dg, i_b, i_t, bos, i_h, T, HV, BT, DG_T_CONTIG, K)
        p_beta = chunk_pointer(beta, i_b, i_t, bos, i_h, T, HV, BT, BETA_T_CONTIG)
        p_h = h + state_offset(i_c, i_h, HV, K, V)
        p_dh = dh + state_offset(i_c, i_h, HV, K, V)
        b_beta = load_time_axis(p_beta, o_t, m_t, HV, BETA_T_CONTIG).to(tl.float32)

        b_C = tl.zeros([BT, BT], dtype=tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            b_v = load_channels(v + row * V, o_t, o_v, m_t, V, HV * V)
            b_du = load_channels(du + row * V, o_t, o_v, m_t, V, HV * V)
            b_C += tl.dot(b_du, tl.trans(b_v), input_precision=DOT_PRECISION)
            # Loaded again after each product that it is the left operand of: Ascend's compiler may reuse its memory.
            b_du = load_channels(du + row * V, o_t, o_v, m_t, V, HV * V)
            b_A = load_channels(p_A, o_t, o_t, m_t, BT, HV * BT)
            b_tu = tl.dot(tl.trans(b_A), b_du, input_precision=DOT_PRECISION)
            store_channels(dv + row * V, o_t, o_v, m_t, b_tu * b_beta[:, None], V, HV * V)

        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            b_dq = tl.zeros([BT, BK], dtype=tl.float32)
            b_dk = tl.zeros([BT, BK], dtype=tl.float32)
            b_dw = tl.zeros([BT, BK], dtype=tl.float32)
            b_hdh = tl.zeros([BK], dtype=tl.float32)
            for i_v in range(0, V, BV):
                o_v = i_v + tl.arange(0, BV)
                b_h = load_state(p_h, o_k, o_v, K, V, STATE_V_FIRST)
                b_dh = load_state(p_dh, o_k, o_v, K, V, STATE_V_FIRST)
                if STATE_V_FIRST:
                    # Not turned: bishengir 1.2.0 does not compile the sum over a turned tile's columns.
                    b_hdh += tl.sum(tl.trans(b_h).to(tl.float32) * tl.trans(b_dh).to(tl.float32), axis=0)
                else:
                    b_hdh += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), axis=1)
                b_do = load_channels(do + row * V, o_t, o_v, m_t, V, HV * V)
                b_vn = load_channels(v_new + row * V, o_t, o_v, m_t, V, HV * V)
                b_du = load_channels(du + row * V, o_t, o_v, m_t, V, HV * V)
                b_dq += tl.dot(b_do, tl.trans(b_h), input_precision=DOT_PRECISION)
                b_dk += tl.dot(b_vn, tl.trans(b_dh), input_precision=DOT_PRECISION)
                b_dw += tl.dot(b_du, tl.trans(b_h), input_precision=DOT_PRECISION)

            b_q = load_channels(q + head, o_t, o_k, m_t, K, H * K).to(tl.float32)
            b_k = load_channels(k + head, o_t, o_k, m_t, K, H * K).to(tl.float32)
            b_G = load_channels(p_g, o_t, o_k, m_t, K, g_stride).to(tl.float32)
            b_last = load_row(p_g, tokens - 1, tokens, o_k, K, g_stride)
            b_gate = tl.exp2(b_G)
            b_kg = b_k * b_gate
            b_dw = -b_dw
            b_A = load_channels(p_A, o_t, o_t, m_t, BT, HV * BT).to(tl.float32)
            b_tw = tl.dot(tl.trans(b_A), b_dw, input_precision=GATED_PRECISION) * b_beta[:, None]
            b_C += tl.dot(b_dw, tl.trans(b_kg), input_precision=GATED_PRECISION)
            b_dq *= scale * b_gate
            b_dk *= tl.exp2(tl.where(m_t[:, None], b_last[None, :] - b_G, 0.0))
            b_kdk = b_k * b_dk
            b_dG = b_q * b_dq - b_kdk + b_kg * b_tw
            b_end = tl.where((o_t == tokens - 1)[:, None], 1.0, 0.0)
            if SPLIT:
                # ptxas 12.8 loses the addresses of the operands of products that fill every row.
                b_dG += b_end * row_sums_of_parts(tl.trans(b_kdk))[None, :]
            else:
                b_dG += column_sums(tl.broadcast_to(b_end, [BT, BT]), b_kdk, SPLIT)
            b_dG += b_end * (tl.exp2(b_last) * b_hdh)[None, :]
            store_channels(dq + row * K, o_t, o_k, m_t, b_dq, K, HV * K)
            store_channels(dk + row * K, o_t, o_k, m_t, b_dk + b_gate * b_tw, K, HV * K)
            store_channels(p_dg, o_t, o_k, m_t, b_dG, K, dg_stride)

        b_A = load_channels(p_A, o_t, o_t, m_t, BT, HV * BT)
        b_dbeta = tl.sum(b_A.to(tl.float32) * b_C, axis=0)
        p_dbeta = chunk_pointer(dbeta, i_b, i_t, bos, i_h, T, HV, BT, DB_T_CONTIG)
        store_time_axis(p_dbeta, o_t, b_dbeta, m_t, HV, DB_T_CONTIG)
        b_dA = tl.where(o_t[:, None] > o_t[None, :], b_C * b_beta[None, :], 0.0).to(b_A.dtype)
        # A computed tile is the right operand: Triton 3.4 to 3.7.0 on Hopper gets some left ones wrong.
        b_W = tl.dot(tl.trans(b_A), b_dA, input_precision=DOT_PRECISION).to(b_A.dtype)
        b_A = load_channels(p_A, o_t, o_t, m_t, BT, HV * BT)
        b_dM = tl.trans(tl.dot(b_A, tl.trans(b_W), input_precision=DOT_PRECISION))
        b_dM = tl.where(o_t[:, None] > o_t[None, :], -b_dM, 0.0)
        store_channels(dM + row * BT, o_t, o_t, m_t, b_dM, BT, HV * BT)
