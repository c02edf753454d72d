"""Chunk states of the gated delta rule, forward: the state at the start of every chunk, and the corrected values.

One head of one sequence, S being the running state `[K, V]`:

    h[c]  = S
    v_new = u - w S
    S     = exp2(G_last) S + k^T (exp2(G_last - G) * v_new)

`gk`, a gate per key channel, decays the state alone: S = diag(exp2(gk_last)) S + ... The walk is sequential over
the chunks of a sequence, parallel over sequences, value heads and tiles of V.
"""

import triton
import triton.language as tl

from .channels import load_row
from .state import first_state, load_rows, locate_walk, state_offset, store_state
from .time_axis import chunk_pointer, clear_outside_rows, load_token, load_tokens


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def chunk_gated_delta_rule_fwd_h(
    k,
    w,
    u,
    g,
    gk,
    h0,
    h,
    v_new,
    ht,
    cu_seqlens,
    chunk_offsets,
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
    USE_INITIAL_STATE: tl.constexpr,
    STORE_FINAL_STATE: tl.constexpr,
    SAVE_NEW_VALUE: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    GK_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    PREFETCH: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """One task walks one sequence at one value head and one tile of V; the state tile `[BK, BV]` never leaves the chip.

    k `[B, T, H, K]`, w `[B, T, HV, K]`, u `[B, T, HV, V]`, g `[B, T, HV]` and gk `[B, T, HV, K]` (base 2, cumulative
    in the chunk; each in either layout), h0 `[N, HV, K, V]`; writes h `[B, NT, HV, K, V]`, v_new `[B, T, HV, V]`,
    ht `[N, HV, K, V]`. States are `[..., V, K]` with STATE_V_FIRST. N counts sequences (B when dense), `BK` >= K.
    """
    if IS_VARLEN:
        if SAVE_NEW_VALUE:
            clear_outside_rows(v_new, cu_seqlens, T, N, HV * V, BV)
    o_c = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_n, i_h, o_v, i_b, bos, length, boc = locate_walk(
            i_task, cu_seqlens, chunk_offsets, T, NT, HV, V, BT, BV, IS_VARLEN
        )
        m_v = o_v < V

        b_h = first_state(h0, i_task, i_n, i_h, o_k, o_v, HV, K, V, USE_INITIAL_STATE, STATE_V_FIRST)
        for i_t in range(0, tl.cdiv(length, BT)):
            first = tl.cast(bos + i_t * BT, tl.int64)
            tokens = tl.minimum(length - i_t * BT, BT)
            m_t = o_c < tokens
            store_state(h + state_offset(boc + i_t, i_h, HV, K, V), b_h, o_k, o_v, K, V, STATE_V_FIRST)

            b_w = load_rows(w + (first * HV + i_h) * K, o_c, o_k, tokens, K, HV * K, PREFETCH)
            b_u = load_rows(u + (first * HV + i_h) * V, o_c, o_v, tokens, V, HV * V, PREFETCH)
            b_v = b_u.to(tl.float32) - tl.dot(b_w, b_h.to(b_w.dtype), input_precision=DOT_PRECISION)
            if SAVE_NEW_VALUE:
                p_v = v_new + (first * HV + i_h) * V
                tl.store(
                    p_v + o_c[:, None] * (HV * V) + o_v[None, :],
                    b_v.to(v_new.dtype.element_ty),
                    mask=m_t[:, None] & m_v[None, :],
                )

            if USE_G:
                p_g = chunk_pointer(g, i_b, i_t, bos, i_h, T, HV, BT, G_T_CONTIG)
                b_g_last = load_token(p_g, tokens - 1, HV, G_T_CONTIG)
                b_g = load_tokens(p_g, o_c, m_t, HV, G_T_CONTIG)
                b_v *= tl.exp2(tl.where(m_t, b_g_last - b_g, 0.0))[:, None]
                # A vector: Ascend sends a scalar's exp2 through global memory. No `where`: bishengir 1.2.0 fails on A5.
                b_h *= tl.exp2(b_g_last * m_k.to(tl.float32))[:, None]
            if USE_GK:
                p_gk = chunk_pointer(gk, i_b, i_t, bos, i_h, T, HV, BT, GK_T_CONTIG, K)
                gk_stride: tl.constexpr = K if GK_T_CONTIG else HV * K
                b_gk = load_row(p_gk, tokens - 1, tokens, o_k, K, gk_stride)
                b_h *= tl.exp2(b_gk)[:, None]
            if not (USE_G or USE_GK):
                # Changes nothing: bishengir 1.2.0 crashes without vector work between the state's use and its update.
                b_h = tl.where(tokens > 0, b_h, 0.0)

            b_k = load_rows(k + (first * H + i_h // (HV // H)) * K, o_c, o_k, tokens, K, H * K, PREFETCH)
            b_h += tl.dot(tl.trans(b_k), b_v.to(b_k.dtype), input_precision=DOT_PRECISION)

        if STORE_FINAL_STATE:
            store_state(ht + state_offset(i_n, i_h, HV, K, V), b_h, o_k, o_v, K, V, STATE_V_FIRST)
