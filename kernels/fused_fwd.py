"""The forward of the gated delta rule in one walk over the chunks: the state never leaves the chip.

With A = (I + M)^-1 of each chunk at hand (`intra.kkt_solve`), one head of one sequence, S being the running state
`[K, V]`:

    P     = scale * tril(q k^T * exp2(G[t] - G[s]))          tril keeps s <= t; `chunk_scores`, all chunks side by side
    x     = beta * (v - exp2(G) * (k S))
    v_new = A x                                              what `recompute_w_u` and `fwd_h` form as u - w S
    o     = scale * exp2(G) * (q S)  +  P v_new
    S     = exp2(G_last) S + k^T (exp2(G_last - G) * v_new)

Neither w nor u is needed, and the walk writes nothing but o and the last state. The backward walks the same way for
the states and v_new, and has no use for o. The walk is sequential over the chunks of a sequence, parallel over
sequences, value heads and tiles of V.

P is formed ahead and not in the walk: there it would be a fourth product in a row of dependent ones, once for each
tile of V, and its tile would take the registers that the state needs.
"""

import triton
import triton.language as tl

from .state import first_state, load_rows, locate_walk, state_offset, store_state
from .time_axis import chunk_pointer, clear_outside_rows, load_chunk, load_token, load_tokens, locate_chunk


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def chunk_scores(
    q,
    k,
    g,
    P,
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
    BT: tl.constexpr,
    BK: tl.constexpr,
    USE_G: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """q, k `[B, T, H, K]`, g `[B, T, HV]` (base 2, cumulative in the chunk, either layout); writes P `[B, T, HV, BT]`.

    One task is one chunk of one query head and all of its value heads; TASKS = chunks * H. Rows that no sequence covers
    are not written: no walk reads them.
    """
    o_c = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_h = i_task % H
        i_b, i_t, bos, length = locate_chunk(i_task // H, cu_seqlens, chunk_indices, T, NT, N, BT, IS_VARLEN)
        first = tl.cast(bos + i_t * BT, tl.int64)
        m_t = i_t * BT + o_c < length
        b_s = tl.zeros([BT, BT], dtype=tl.float32)
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            o_x = (first * H + i_h) * K + o_c[:, None] * (H * K) + o_k[None, :]
            m_k = m_t[:, None] & (o_k < K)[None, :]
            b_q = tl.load(q + o_x, mask=m_k, other=0.0)
            b_k = tl.load(k + o_x, mask=m_k, other=0.0)
            b_s += tl.dot(b_q, tl.trans(b_k), input_precision=DOT_PRECISION)
        m_P = (o_c[:, None] >= o_c[None, :]) & m_t[:, None]
        b_s = tl.where(m_P, b_s * scale, 0.0)
        for i_r in range(0, HV // H):
            i_hv = i_h * (HV // H) + i_r
            b_P = b_s
            if USE_G:
                b_g = load_chunk(g, i_b, i_t, bos, i_hv, o_c, m_t, T, HV, BT, G_T_CONTIG)
                # Above the diagonal the difference may be large and positive: mask before exp2, not after.
                b_P = b_s * tl.exp2(tl.where(m_P, b_g[:, None] - b_g[None, :], 0.0))
            p_P = P + (first * HV + i_hv) * BT
            tl.store(p_P + o_c[:, None] * (HV * BT) + o_c[None, :], b_P.to(P.dtype.element_ty), mask=m_t[:, None])


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def chunk_gated_delta_rule_fwd_walk(
    q,
    k,
    v,
    g,
    beta,
    A,
    P,
    h0,
    o,
    h,
    v_new,
    ht,
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
    USE_INITIAL_STATE: tl.constexpr,
    STORE_OUTPUT: tl.constexpr,
    STORE_STATES: tl.constexpr,
    STORE_FINAL_STATE: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    BETA_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    PREFETCH: tl.constexpr,
    RELOAD_LEFT: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """One task walks one sequence at one value head and one tile of V; the state tile `[BK, BV]` never leaves the chip.

    q, k `[B, T, H, K]`, v `[B, T, HV, V]`, g (base 2, cumulative in the chunk) and beta `[B, T, HV]` in either layout,
    A and P `[B, T, HV, BT]`, h0 `[N, HV, K, V]`; writes o `[B, T, HV, V]` or, with STORE_STATES, h
    `[B, NT, HV, K, V]` and v_new `[B, T, HV, V]`; and ht `[N, HV, K, V]`. h is `[..., K, V]` always, h0 and ht are
    `[..., V, K]` with STATE_V_FIRST. N counts sequences (B when dense), `BK` >= K. RELOAD_LEFT loads k again where it
    is a left operand for the second time: triton-ascend 3.2 may overwrite a left operand.
    """
    if IS_VARLEN:
        if STORE_OUTPUT:
            clear_outside_rows(o, cu_seqlens, T, N, HV * V, BV)
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
            m_o = m_t[:, None] & m_v[None, :]
            o_o = o_c[:, None] * (HV * V) + o_v[None, :]
            if STORE_STATES:
                store_state(h + state_offset(boc + i_t, i_h, HV, K, V), b_h, o_k, o_v, K, V, False)

            p_k = k + (first * H + i_h // (HV // H)) * K
            b_k = load_rows(p_k, o_c, o_k, tokens, K, H * K, PREFETCH)
            b_S = b_h.to(b_k.dtype)
            b_x = tl.dot(b_k, b_S, input_precision=DOT_PRECISION)
            b_beta = load_chunk(beta, i_b, i_t, bos, i_h, o_c, m_t, T, HV, BT, BETA_T_CONTIG)
            if USE_G:
                p_g = chunk_pointer(g, i_b, i_t, bos, i_h, T, HV, BT, G_T_CONTIG)
                b_g_last = load_token(p_g, tokens - 1, HV, G_T_CONTIG)
                b_g = load_tokens(p_g, o_c, m_t, HV, G_T_CONTIG)
                b_x *= tl.exp2(b_g)[:, None]
            b_v = load_rows(v + (first * HV + i_h) * V, o_c, o_v, tokens, V, HV * V, PREFETCH)
            b_x = b_beta[:, None] * (b_v.to(tl.float32) - b_x)
            b_A = load_rows(A + (first * HV + i_h) * BT, o_c, o_c, tokens, BT, HV * BT, PREFETCH)
            b_u = tl.dot(b_A, b_x.to(b_A.dtype), input_precision=DOT_PRECISION)

            if STORE_STATES:
                tl.store(v_new + (first * HV + i_h) * V + o_o, b_u.to(v_new.dtype.element_ty), mask=m_o)
            if STORE_OUTPUT:
                p_q = q + (first * H + i_h // (HV // H)) * K
                b_q = load_rows(p_q, o_c, o_k, tokens, K, H * K, PREFETCH)
                b_o = tl.dot(b_q, b_S, input_precision=DOT_PRECISION) * scale
                if USE_G:
                    b_o *= tl.exp2(b_g)[:, None]
                b_P = load_rows(P + (first * HV + i_h) * BT, o_c, o_c, tokens, BT, HV * BT, PREFETCH)
                b_o += tl.dot(b_P, b_u.to(b_P.dtype), input_precision=DOT_PRECISION)
                tl.store(o + (first * HV + i_h) * V + o_o, b_o.to(o.dtype.element_ty), mask=m_o)

            if USE_G:
                b_u *= tl.exp2(tl.where(m_t, b_g_last - b_g, 0.0))[:, None]
                # A vector: Ascend sends a scalar's exp2 through global memory. No `where`: bishengir 1.2.0 fails on A5.
                b_h *= tl.exp2(b_g_last * m_k.to(tl.float32))[:, None]
            else:
                # Changes nothing: bishengir 1.2.0 crashes without vector work between the state's use and its update.
                b_h = tl.where(tokens > 0, b_h, 0.0)
            if RELOAD_LEFT:
                b_k = load_rows(p_k, o_c, o_k, tokens, K, H * K, PREFETCH)
            b_h += tl.dot(tl.trans(b_k), b_u.to(b_k.dtype), input_precision=DOT_PRECISION)

        if STORE_FINAL_STATE:
            store_state(ht + state_offset(i_n, i_h, HV, K, V), b_h, o_k, o_v, K, V, STATE_V_FIRST)
