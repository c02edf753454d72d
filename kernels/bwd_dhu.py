"""Gradient of the chunk states of the gated delta rule, and the corrected gradient of the values.

One head of one sequence, dS being the gradient with respect to the state, walked from the last chunk to the first:

    dh[c] = dS                                                       at the end of the chunk; dht at the last
    dv2   = dv + exp2(G_last - G) * (k dS)
    dS    = exp2(G_last) dS + q^T (scale * exp2(G) * do) - w^T dv2   at its start; dh0 at the first

`gk`, a gate per key channel, decays the state alone: dS = diag(exp2(gk_last)) dS + ... The walk is sequential over
the chunks of a sequence, parallel over sequences, value heads and tiles of V.
"""

import triton
import triton.language as tl

from .channels import load_row
from .state import first_state, load_rows, locate_walk, state_offset, store_state
from .time_axis import chunk_pointer, clear_outside_rows, load_token, load_tokens


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def chunk_gated_delta_rule_bwd_dhu(
    q,
    k,
    w,
    do,
    dv,
    g,
    gk,
    dht,
    dh,
    dv2,
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
    USE_GK: tl.constexpr,
    USE_FINAL_STATE_GRADIENT: tl.constexpr,
    STORE_INITIAL_STATE_GRADIENT: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    GK_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    PREFETCH: tl.constexpr,
    JOIN_PRODUCTS: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """One task walks one sequence at one value head and one tile of V; the tile `[BK, BV]` of dS never leaves the chip.

    q, k `[B, T, H, K]`, w `[B, T, HV, K]`, do, dv `[B, T, HV, V]`, g `[B, T, HV]` and gk `[B, T, HV, K]` (base 2,
    cumulative in the chunk; each in either layout), dht `[N, HV, K, V]`; writes dh `[B, NT, HV, K, V]`,
    dv2 `[B, T, HV, V]`, dh0 `[N, HV, K, V]`. States are `[..., V, K]` with STATE_V_FIRST. N counts sequences (B when
    dense), `BK` >= K. With JOIN_PRODUCTS the two products of a chunk meet in an accumulator of their own (a matrix unit
    that cannot start from the vector unit's tile then sends one tile back, not two), else they add onto dS itself.
    """
    if IS_VARLEN:
        clear_outside_rows(dv2, cu_seqlens, T, N, HV * V, BV)
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
            store_state(dh + state_offset(boc + i_t, i_h, HV, K, V), b_dh, o_k, o_v, K, V, STATE_V_FIRST)

            b_k = load_rows(k + (first * H + i_h // (HV // H)) * K, o_c, o_k, tokens, K, H * K, PREFETCH)
            b_dv = tl.dot(b_k, b_dh.to(b_k.dtype), input_precision=DOT_PRECISION)
            b_do = load_rows(do + (first * HV + i_h) * V, o_c, o_v, tokens, V, HV * V, PREFETCH)
            # Gating do rather than q leaves q as loaded and touches the narrower tile.
            b_dos = b_do.to(tl.float32) * scale
            if USE_G:
                p_g = chunk_pointer(g, i_b, i_t, bos, i_h, T, HV, BT, G_T_CONTIG)
                b_g_last = load_token(p_g, tokens - 1, HV, G_T_CONTIG)
                b_g = load_tokens(p_g, o_c, m_t, HV, G_T_CONTIG)
                b_dv *= tl.exp2(tl.where(m_t, b_g_last - b_g, 0.0))[:, None]
                b_dos *= tl.exp2(b_g)[:, None]
                # A vector: Ascend sends a scalar's exp2 through global memory. No `where`: bishengir 1.2.0 fails on A5.
                b_dh *= tl.exp2(b_g_last * m_k.to(tl.float32))[:, None]
            if USE_GK:
                p_gk = chunk_pointer(gk, i_b, i_t, bos, i_h, T, HV, BT, GK_T_CONTIG, K)
                gk_stride: tl.constexpr = K if GK_T_CONTIG else HV * K
                b_gk = load_row(p_gk, tokens - 1, tokens, o_k, K, gk_stride)
                b_dh *= tl.exp2(b_gk)[:, None]

            b_dv += load_rows(dv + (first * HV + i_h) * V, o_c, o_v, tokens, V, HV * V, PREFETCH).to(tl.float32)
            p_dv2 = dv2 + (first * HV + i_h) * V
            tl.store(
                p_dv2 + o_c[:, None] * (HV * V) + o_v[None, :],
                b_dv.to(dv2.dtype.element_ty),
                mask=m_t[:, None] & m_v[None, :],
            )

            b_q = load_rows(q + (first * H + i_h // (HV // H)) * K, o_c, o_k, tokens, K, H * K, PREFETCH)
            b_w = load_rows(w + (first * HV + i_h) * K, o_c, o_k, tokens, K, HV * K, PREFETCH)
            if JOIN_PRODUCTS:
                b_sum = tl.dot(tl.trans(b_q), b_dos.to(b_q.dtype), input_precision=DOT_PRECISION)
                b_dh += tl.dot(tl.trans(b_w), (-b_dv).to(b_w.dtype), b_sum, input_precision=DOT_PRECISION)
            else:
                b_dh = tl.dot(tl.trans(b_q), b_dos.to(b_q.dtype), b_dh, input_precision=DOT_PRECISION)
                b_dh = tl.dot(tl.trans(b_w), (-b_dv).to(b_w.dtype), b_dh, input_precision=DOT_PRECISION)

        if STORE_INITIAL_STATE_GRADIENT:
            store_state(dh0 + state_offset(i_n, i_h, HV, K, V), b_dh, o_k, o_v, K, V, STATE_V_FIRST)
