"""The backward of the gated delta rule around one walk from the last chunk to the first: dS never leaves the chip.

With A and P of `fused_fwd`, x = beta * (v - exp2(G) * (k S)) and v_new = A x, one head of one sequence, dS being the
gradient with respect to the state at the end of a chunk (dht at the last, dh0 what is left at the first):

    du = P^T do + exp2(G_last - G) * (k dS)                     the gradient with respect to v_new
    dx = A^T du                                                 with respect to x
    dS = exp2(G_last) dS + q^T (scale * exp2(G) * do) - k^T (beta * exp2(G) * dx)

As (I + M) v_new = x, dM = -strict_tril(dx v_new^T): neither w nor its gradient is needed, nor A once more. What is
left is done chunk by chunk, E[t,s] being exp2(G[t] - G[s]), h the state at the chunk's start and y = -dx h^T:

    dv = beta * dx         X = beta[t] * dM * E         dk += beta * exp2(G) * y + (X + X^T) k
    dbeta = sum_V(dx * v) + exp2(G) * sum_K(y * k) + rowsum(dM * E * k k^T)
    dG += beta * exp2(G) * sum_K(y * k) + rowsum(X * k k^T) - colsum(X * k k^T)

`dqkwg` forms y, as the gradient of a w whose corrected values are dx, beside dq and what else dk and dG are made of.
"""

import triton
import triton.language as tl

from .state import first_state, load_rows, locate_walk, state_offset, store_state
from .time_axis import (
    chunk_pointer,
    clear_outside_rows,
    clear_outside_time_axis,
    load_chunk,
    load_time_axis,
    load_token,
    load_tokens,
    locate_chunk,
    store_chunk,
    store_time_axis,
)


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def chunk_gated_delta_rule_bwd_walk(
    q,
    k,
    do,
    g,
    beta,
    A,
    P,
    dht,
    dh,
    dx,
    dh0,
    cu_seqlens,
    chunk_offsets,
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
    USE_FINAL_STATE_GRADIENT: tl.constexpr,
    STORE_INITIAL_STATE_GRADIENT: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    BETA_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    PREFETCH: tl.constexpr,
    RELOAD_LEFT: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """One task walks one sequence at one value head and one tile of V; the tile `[BK, BV]` of dS never leaves the chip.

    q, k `[B, T, H, K]`, do `[B, T, HV, V]`, g (base 2, cumulative in the chunk) and beta `[B, T, HV]` in either layout,
    A and P `[B, T, HV, BT]`, dht `[N, HV, K, V]`; writes dh `[B, NT, HV, K, V]`, dS at the end of each chunk, dx
    `[B, T, HV, V]` and dh0 `[N, HV, K, V]`. dh is `[..., K, V]` always, dht and dh0 are `[..., V, K]` with
    STATE_V_FIRST. N counts sequences (B when dense), `BK` >= K. RELOAD_LEFT as in `fused_fwd`.
    """
    if IS_VARLEN:
        clear_outside_rows(dx, cu_seqlens, T, N, HV * V, BV)
    o_c = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_n, i_h, o_v, i_b, bos, length, boc = locate_walk(
            i_task, cu_seqlens, chunk_offsets, T, NT, HV, V, BT, BV, IS_VARLEN
        )
        m_v = o_v < V

        b_dh = first_state(dht, i_task, i_n, i_h, o_k, o_v, HV, K, V, USE_FINAL_STATE_GRADIENT, STATE_V_FIRST)
        chunks = tl.cdiv(length, BT)
        for i_c in range(0, chunks):
            i_t = chunks - 1 - i_c
            first = tl.cast(bos + i_t * BT, tl.int64)
            tokens = tl.minimum(length - i_t * BT, BT)
            m_t = o_c < tokens
            store_state(dh + state_offset(boc + i_t, i_h, HV, K, V), b_dh, o_k, o_v, K, V, False)

            p_k = k + (first * H + i_h // (HV // H)) * K
            b_k = load_rows(p_k, o_c, o_k, tokens, K, H * K, PREFETCH)
            b_du = tl.dot(b_k, b_dh.to(b_k.dtype), input_precision=DOT_PRECISION)
            b_beta = load_chunk(beta, i_b, i_t, bos, i_h, o_c, m_t, T, HV, BT, BETA_T_CONTIG)
            b_do = load_rows(do + (first * HV + i_h) * V, o_c, o_v, tokens, V, HV * V, PREFETCH)
            # Gating do rather than q leaves q as loaded and touches the narrower tile.
            b_dos = b_do.to(tl.float32) * scale
            if USE_G:
                p_g = chunk_pointer(g, i_b, i_t, bos, i_h, T, HV, BT, G_T_CONTIG)
                b_g_last = load_token(p_g, tokens - 1, HV, G_T_CONTIG)
                b_g = load_tokens(p_g, o_c, m_t, HV, G_T_CONTIG)
                b_du *= tl.exp2(tl.where(m_t, b_g_last - b_g, 0.0))[:, None]
                b_dos *= tl.exp2(b_g)[:, None]
                b_beta *= tl.exp2(b_g)
                # A vector: Ascend sends a scalar's exp2 through global memory. No `where`: bishengir 1.2.0 fails on A5.
                b_dh *= tl.exp2(b_g_last * m_k.to(tl.float32))[:, None]
            else:
                # Changes nothing: bishengir 1.2.0 crashes without vector work between the state's use and its update.
                b_dh = tl.where(tokens > 0, b_dh, 0.0)
            b_P = load_rows(P + (first * HV + i_h) * BT, o_c, o_c, tokens, BT, HV * BT, PREFETCH)
            b_du += tl.dot(tl.trans(b_P), b_do, input_precision=DOT_PRECISION)
            b_A = load_rows(A + (first * HV + i_h) * BT, o_c, o_c, tokens, BT, HV * BT, PREFETCH)
            b_dx = tl.dot(tl.trans(b_A), b_du.to(b_A.dtype), input_precision=DOT_PRECISION)
            p_dx = dx + (first * HV + i_h) * V
            tl.store(
                p_dx + o_c[:, None] * (HV * V) + o_v[None, :],
                b_dx.to(dx.dtype.element_ty),
                mask=m_t[:, None] & m_v[None, :],
            )

            b_q = load_rows(q + (first * H + i_h // (HV // H)) * K, o_c, o_k, tokens, K, H * K, PREFETCH)
            if RELOAD_LEFT:
                b_k = load_rows(p_k, o_c, o_k, tokens, K, H * K, PREFETCH)
            b_dxs = -b_beta[:, None] * b_dx
            b_dh += tl.dot(tl.trans(b_q), b_dos.to(b_q.dtype), input_precision=DOT_PRECISION)
            b_dh += tl.dot(tl.trans(b_k), b_dxs.to(b_k.dtype), input_precision=DOT_PRECISION)

        if STORE_INITIAL_STATE_GRADIENT:
            store_state(dh0 + state_offset(i_n, i_h, HV, K, V), b_dh, o_k, o_v, K, V, STATE_V_FIRST)


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def chunk_bwd_inverse(
    k,
    v,
    beta,
    v_new,
    y,
    g,
    dx,
    dk,
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
    BK: tl.constexpr,
    BV: tl.constexpr,
    USE_G: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    BETA_T_CONTIG: tl.constexpr,
    DG_T_CONTIG: tl.constexpr,
    DB_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    RELOAD_LEFT: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """k `[B, T, H, K]`, v and v_new `[B, T, HV, V]`, y `[B, T, HV, K]`, beta and g `[B, T, HV]` (g base 2, cumulative
    in the chunk; each in either layout); writes dbeta `[B, T, HV]`, adds to dk `[B, T, H, K]` and dg `[B, T, HV]`,
    and turns dx `[B, T, HV, V]` into dv where it lies.

    One task is one chunk of one query head: it walks the value heads of the group, so that dk is summed on chip.
    """
    if IS_VARLEN:
        clear_outside_time_axis(dbeta, cu_seqlens, T, N, HV, DB_T_CONTIG, BT)
    R: tl.constexpr = HV // H
    o_c = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_h = i_task % H
        i_b, i_t, bos, length = locate_chunk(i_task // H, cu_seqlens, chunk_indices, T, NT, N, BT, IS_VARLEN)
        first = tl.cast(bos + i_t * BT, tl.int64)
        m_t = i_t * BT + o_c < length
        p_k = k + (first * H + i_h) * K
        m_M = (o_c[:, None] > o_c[None, :]) & m_t[:, None]

        b_kk = tl.zeros([BT, BT], dtype=tl.float32)
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            m_k = m_t[:, None] & (o_k < K)[None, :]
            b_k = tl.load(p_k + o_c[:, None] * (H * K) + o_k[None, :], mask=m_k, other=0.0)
            b_right = b_k
            if RELOAD_LEFT:
                b_right = tl.load(p_k + o_c[:, None] * (H * K) + o_k[None, :], mask=m_k, other=0.0)
            b_kk += tl.dot(b_k, tl.trans(b_right), input_precision=DOT_PRECISION)

        b_X = tl.zeros([BT, BT], dtype=tl.float32)
        for i_r in range(0, R):
            i_hv = i_h * R + i_r
            b_beta = load_chunk(beta, i_b, i_t, bos, i_hv, o_c, m_t, T, HV, BT, BETA_T_CONTIG)
            b_dM = tl.zeros([BT, BT], dtype=tl.float32)
            b_tv = tl.zeros([BT], dtype=tl.float32)
            for i_v in range(0, V, BV):
                o_v = i_v + tl.arange(0, BV)
                m_v = m_t[:, None] & (o_v < V)[None, :]
                o_x = (first * HV + i_hv) * V + o_c[:, None] * (HV * V) + o_v[None, :]
                b_dx = tl.load(dx + o_x, mask=m_v, other=0.0)
                b_n = tl.load(v_new + o_x, mask=m_v, other=0.0)
                b_v = tl.load(v + o_x, mask=m_v, other=0.0)
                b_x = b_dx.to(tl.float32)
                b_tv += tl.sum(b_x * b_v.to(tl.float32), axis=1)
                tl.store(dx + o_x, (b_x * b_beta[:, None]).to(dx.dtype.element_ty), mask=m_v)
                b_dM += tl.dot(b_dx, tl.trans(b_n), input_precision=DOT_PRECISION)
            b_yk = tl.zeros([BT], dtype=tl.float32)
            for i_k in range(0, K, BK):
                o_k = i_k + tl.arange(0, BK)
                m_k = m_t[:, None] & (o_k < K)[None, :]
                b_k = tl.load(p_k + o_c[:, None] * (H * K) + o_k[None, :], mask=m_k, other=0.0).to(tl.float32)
                o_y = (first * HV + i_hv) * K + o_c[:, None] * (HV * K) + o_k[None, :]
                b_yk += tl.sum(tl.load(y + o_y, mask=m_k, other=0.0).to(tl.float32) * b_k, axis=1)
            b_M = -b_dM
            if USE_G:
                b_g = load_chunk(g, i_b, i_t, bos, i_hv, o_c, m_t, T, HV, BT, G_T_CONTIG)
                b_yk *= tl.exp2(b_g)
                # Above the diagonal the difference may be large and positive: mask before exp2, not after.
                b_M *= tl.exp2(tl.where(m_M, b_g[:, None] - b_g[None, :], 0.0))
            b_M = tl.where(m_M, b_M, 0.0)
            b_row = tl.sum(b_M * b_kk, axis=1)
            b_M *= b_beta[:, None]
            b_X += b_M
            store_chunk(dbeta, b_tv + b_yk + b_row, i_b, i_t, bos, i_hv, o_c, m_t, T, HV, BT, DB_T_CONTIG, True)
            if USE_G:
                b_dG = (b_yk + b_row) * b_beta - tl.sum(b_M * b_kk, axis=0)
                p_dg = chunk_pointer(dg, i_b, i_t, bos, i_hv, T, HV, BT, DG_T_CONTIG)
                b_dG += load_time_axis(p_dg, o_c, m_t, HV, DG_T_CONTIG)
                store_time_axis(p_dg, o_c, b_dG, m_t, HV, DG_T_CONTIG)

        b_Z = b_X.to(k.dtype.element_ty)
        b_Z = tl.where(o_c[:, None] > o_c[None, :], b_Z, tl.trans(b_Z))
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            m_k = m_t[:, None] & (o_k < K)[None, :]
            p_dk = dk + (first * H + i_h) * K + o_c[:, None] * (H * K) + o_k[None, :]
            b_dk = tl.load(p_dk, mask=m_k, other=0.0).to(tl.float32)
            for i_r in range(0, R):
                i_hv = i_h * R + i_r
                b_s = load_chunk(beta, i_b, i_t, bos, i_hv, o_c, m_t, T, HV, BT, BETA_T_CONTIG)
                if USE_G:
                    b_s *= tl.exp2(load_chunk(g, i_b, i_t, bos, i_hv, o_c, m_t, T, HV, BT, G_T_CONTIG))
                o_y = (first * HV + i_hv) * K + o_c[:, None] * (HV * K) + o_k[None, :]
                b_dk += tl.load(y + o_y, mask=m_k, other=0.0).to(tl.float32) * b_s[:, None]
            b_k = tl.load(p_k + o_c[:, None] * (H * K) + o_k[None, :], mask=m_k, other=0.0)
            # A computed tile is the right operand: Triton 3.4 to 3.7.0 on Hopper gets some left ones wrong.
            b_dk += tl.trans(tl.dot(tl.trans(b_k), b_Z, input_precision=DOT_PRECISION))
            tl.store(p_dk, b_dk.to(dk.dtype.element_ty), mask=m_k)
