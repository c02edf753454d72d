"""Scores within a chunk, with a decay for each key channel.

    Aqk[t, s] = scale * (sum over c of q[t, c] * k[s, c] * exp2(G[t, c] - G[s, c]))       s <= t, else 0
    M[t, s]   = beta[t] * (sum over c of k[t, c] * k[s, c] * exp2(G[t, c] - G[s, c]))     s < t, else 0

The decay depends on t, s and c, so that it is a factor of neither operand unless a reference row of G parts it. One
task is 16 rows of one chunk at one head, a strip: against all rows before them with the strip's first row as the
reference, which makes both factors at most 1, and among each other as `kda_decay` says.
"""

import triton
import triton.language as tl

from .channels import load_channels, load_row
from .kda_decay import as_factor, earlier_factor, later_factor, load_references, pairs
from .time_axis import chunk_pointer, clear_outside_rows, load_time_axis, locate_chunk


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def chunk_kda_scores(
    q,
    k,
    g,
    beta,
    Aqk,
    M,
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
    DIAGONAL: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    BETA_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """q, k `[B, T, H, K]`, g `[B, T, HV, K]` (base 2, cumulative in the chunk) and beta `[B, T, HV]`, each in either
    layout; writes Aqk and M `[B, T, HV, BT]`. TASKS = chunks * HV * BT / 16.
    """
    if IS_VARLEN:
        clear_outside_rows(Aqk, cu_seqlens, T, N, HV * BT, BT)
    g_stride: tl.constexpr = K if G_T_CONTIG else HV * K
    dtype: tl.constexpr = k.dtype.element_ty
    LEVELS: tl.constexpr = 4 if DIAGONAL == "halves" else 1
    o_r = tl.arange(0, 16)
    o_s = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_s = i_task % (BT // 16)
        i_ch = i_task // (BT // 16)
        i_h = i_ch % HV
        i_b, i_t, bos, length = locate_chunk(i_ch // HV, cu_seqlens, chunk_indices, T, NT, N, BT, IS_VARLEN)
        tokens = tl.minimum(length - i_t * BT, BT)
        first = tl.cast(bos + i_t * BT, tl.int64)
        o_t = i_s * 16 + o_r
        m_t = o_t < tokens
        # A strip without tokens has no past either: its reference would be 0, and factors overflow.
        m_past = o_s < tl.where(i_s * 16 < tokens, i_s * 16, 0)
        p_q = q + (first * H + i_h // (HV // H)) * K
        p_k = k + (first * H + i_h // (HV // H)) * K
        p_g = chunk_pointer(g, i_b, i_t, bos, i_h, T, HV, BT, G_T_CONTIG, K)
        p_beta = chunk_pointer(beta, i_b, i_t, bos, i_h, T, HV, BT, BETA_T_CONTIG)

        b_q_past = tl.zeros([16, BT], dtype=tl.float32)
        b_k_past = tl.zeros([16, BT], dtype=tl.float32)
        b_Aqk = tl.zeros([16, 16], dtype=tl.float32)
        b_M = tl.zeros([16, 16], dtype=tl.float32)
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            b_q_in = load_channels(p_q, o_t, o_k, m_t, K, H * K)
            b_k_in = load_channels(p_k, o_t, o_k, m_t, K, H * K)
            b_q = b_q_in.to(tl.float32)
            b_k = b_k_in.to(tl.float32)
            b_G = load_channels(p_g, o_t, o_k, m_t, K, g_stride).to(tl.float32)
            if BT > 16:
                b_R = load_row(p_g, i_s * 16, tokens, o_k, K, g_stride)[None, :]
                b_ks = load_channels(p_k, o_s, o_k, m_past, K, H * K).to(tl.float32)
                b_Gs = load_channels(p_g, o_s, o_k, m_past, K, g_stride).to(tl.float32)
                b_ks = tl.trans((b_ks * tl.exp2(tl.where(m_past[:, None], b_R - b_Gs, 0.0))).to(dtype))
                b_gate = tl.exp2(tl.where(m_t[:, None], b_G - b_R, 0.0))
                b_q_past += tl.dot((b_q * b_gate).to(dtype), b_ks, input_precision=DOT_PRECISION)
                b_k_past += tl.dot((b_k * b_gate).to(dtype), b_ks, input_precision=DOT_PRECISION)
            if DIAGONAL == "columns":
                for i_c in range(0, tl.minimum(16, tokens - i_s * 16)):
                    b_kc = load_row(p_k, i_s * 16 + i_c, tokens, o_k, K, H * K)
                    b_Gc = load_row(p_g, i_s * 16 + i_c, tokens, o_k, K, g_stride)
                    m_c = m_t & (o_r >= i_c)
                    b_kc = tl.exp2(tl.where(m_c[:, None], b_G - b_Gc[None, :], 0.0)) * b_kc[None, :]
                    b_one = tl.where(o_r == i_c, 1.0, 0.0)[None, :]
                    b_Aqk += tl.sum(b_q * b_kc, axis=1)[:, None] * b_one
                    b_M += tl.sum(b_k * b_kc, axis=1)[:, None] * b_one
            else:
                m_same = o_r[:, None] == o_r[None, :]
                b_Aqk += tl.where(m_same, tl.dot(b_q_in, tl.trans(b_k_in), input_precision=DOT_PRECISION), 0.0)
                for level in tl.static_range(LEVELS):
                    b_R = load_references(p_g, i_s, o_k, tokens, level, K, g_stride, DIAGONAL)
                    b_later = later_factor(b_G, b_R, m_t, level, DIAGONAL)
                    b_ks = b_k * earlier_factor(b_G, b_R, m_t, level, DIAGONAL)
                    b_ks = tl.trans(as_factor(b_ks, dtype, DIAGONAL))
                    b_qt = as_factor(b_q * b_later, dtype, DIAGONAL)
                    b_kt = as_factor(b_k * b_later, dtype, DIAGONAL)
                    m_pair = pairs(level, DIAGONAL)
                    b_Aqk += tl.where(m_pair, tl.dot(b_qt, b_ks, input_precision=DOT_PRECISION), 0.0)
                    b_M += tl.where(m_pair, tl.dot(b_kt, b_ks, input_precision=DOT_PRECISION), 0.0)

        beta_stride: tl.constexpr = 1 if BETA_T_CONTIG else HV
        b_beta = load_time_axis(p_beta + i_s * 16 * beta_stride, o_r, m_t, HV, BETA_T_CONTIG).to(tl.float32)[:, None]
        p_Aqk = Aqk + (first * HV + i_h) * BT
        p_M = M + (first * HV + i_h) * BT
        b_Aqk = tl.where(o_r[:, None] >= o_r[None, :], b_Aqk * scale, 0.0)
        b_M = tl.where(o_r[:, None] > o_r[None, :], b_M * b_beta, 0.0)
        o_A = o_t[:, None] * (HV * BT) + i_s * 16 + o_r[None, :]
        tl.store(p_Aqk + o_A, b_Aqk.to(Aqk.dtype.element_ty), mask=m_t[:, None])
        tl.store(p_M + o_A, b_M, mask=m_t[:, None])
        if BT > 16:
            o_A = o_t[:, None] * (HV * BT) + o_s[None, :]
            m_A = m_t[:, None] & (o_s < i_s * 16)[None, :]
            tl.store(p_Aqk + o_A, (b_q_past * scale).to(Aqk.dtype.element_ty), mask=m_A)
            tl.store(p_M + o_A, b_k_past * b_beta, mask=m_A)
            # Above the diagonal, counted from the first column there: Ascend's compiler takes masks of prefixes only.
            o_A += i_s * 16 + 16
            m_A = m_t[:, None] & (o_s < BT - 16 - i_s * 16)[None, :]
            tl.store(p_Aqk + o_A, tl.zeros([16, BT], dtype=Aqk.dtype.element_ty), mask=m_A)
            tl.store(p_M + o_A, tl.zeros([16, BT], dtype=tl.float32), mask=m_A)
