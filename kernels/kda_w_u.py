"""The WY representation of a chunk with a decay for each key channel, and its gated queries and keys.

    u = A (beta * v)        w = A (beta * exp2(G) * k)        qg = exp2(G) * q        kg = exp2(G_last - G) * k

One task is one chunk of one value head.
"""

import triton
import triton.language as tl

from .channels import load_channels, load_row, store_channels
from .time_axis import chunk_pointer, clear_outside_rows, load_time_axis, locate_chunk


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def recompute_w_u_fwd_kda(
    q,
    k,
    v,
    beta,
    A,
    g,
    w,
    u,
    qg,
    kg,
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
    STORE_QG: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    BETA_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """q, k `[B, T, H, K]`, v `[B, T, HV, V]`, A `[B, T, HV, BT]`, g `[B, T, HV, K]` (base 2, cumulative in the chunk)
    and beta `[B, T, HV]` in either layout; writes w, kg and with STORE_QG qg `[B, T, HV, K]`, u `[B, T, HV, V]`.
    TASKS = chunks * HV.
    """
    if IS_VARLEN:
        clear_outside_rows(w, cu_seqlens, T, N, HV * K, BK)
        clear_outside_rows(kg, cu_seqlens, T, N, HV * K, BK)
        clear_outside_rows(u, cu_seqlens, T, N, HV * V, BV)
        if STORE_QG:
            clear_outside_rows(qg, cu_seqlens, T, N, HV * K, BK)
    g_stride: tl.constexpr = K if G_T_CONTIG else HV * K
    o_t = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_h = i_task % HV
        i_b, i_t, bos, length = locate_chunk(i_task // HV, cu_seqlens, chunk_indices, T, NT, N, BT, IS_VARLEN)
        tokens = tl.minimum(length - i_t * BT, BT)
        m_t = o_t < tokens
        first = tl.cast(bos + i_t * BT, tl.int64)
        row = first * HV + i_h
        head = (first * H + i_h // (HV // H)) * K
        p_g = chunk_pointer(g, i_b, i_t, bos, i_h, T, HV, BT, G_T_CONTIG, K)
        p_beta = chunk_pointer(beta, i_b, i_t, bos, i_h, T, HV, BT, BETA_T_CONTIG)
        b_beta = load_time_axis(p_beta, o_t, m_t, HV, BETA_T_CONTIG).to(tl.float32)[:, None]
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            b_k = load_channels(k + head, o_t, o_k, m_t, K, H * K).to(tl.float32)
            b_G = load_channels(p_g, o_t, o_k, m_t, K, g_stride).to(tl.float32)
            b_last = load_row(p_g, tokens - 1, tokens, o_k, K, g_stride)
            b_gate = tl.exp2(b_G)
            b_kg = b_k * tl.exp2(tl.where(m_t[:, None], b_last[None, :] - b_G, 0.0))
            store_channels(kg + row * K, o_t, o_k, m_t, b_kg, K, HV * K)
            if STORE_QG:
                b_q = load_channels(q + head, o_t, o_k, m_t, K, H * K).to(tl.float32)
                store_channels(qg + row * K, o_t, o_k, m_t, b_q * b_gate, K, HV * K)
            # A again for each product: Ascend's compiler may reuse a left operand's memory once it is read.
            b_A = load_channels(A + row * BT, o_t, o_t, m_t, BT, HV * BT)
            b_k = (b_k * b_gate * b_beta).to(b_A.dtype)
            b_w = tl.dot(b_A, b_k, input_precision=DOT_PRECISION)
            store_channels(w + row * K, o_t, o_k, m_t, b_w, K, HV * K)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            b_v = load_channels(v + row * V, o_t, o_v, m_t, V, HV * V).to(tl.float32)
            b_A = load_channels(A + row * BT, o_t, o_t, m_t, BT, HV * BT)
            b_u = tl.dot(b_A, (b_v * b_beta).to(b_A.dtype), input_precision=DOT_PRECISION)
            store_channels(u + row * V, o_t, o_v, m_t, b_u, V, HV * V)
