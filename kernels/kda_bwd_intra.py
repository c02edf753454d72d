"""Gradients through a chunk's scores, with a decay for each key channel.

With D[t, s] = exp2(G[t] - G[s]), per channel, and the gradients dA of q's scores and dM of the system's matrix:

    a[t]   = sum over s < t of dA[t, s] * k[s] * D[t, s]
    row[t] = sum over s < t of dM[t, s] * k[s] * D[t, s]
    col[s] = sum over t > s of (dA[t, s] * q[t] + dM[t, s] * beta[t] * k[t]) * D[t, s]

    dq    += a + dA[t, t] * k                       dbeta += sum over channels of row * k
    dk    += beta * row + col + dA[t, t] * q        dG    += q * a + k * (beta * row - col)

A token's own score, s = t, has no decay: its terms in dG cancel, and are left out.

One task is one strip of 16 rows of one chunk at one head. What lies before it is taken against the first row of its
gate, what follows against its last, which makes every factor at most 1, and the strip itself as `kda_decay` says.
"""

import triton
import triton.language as tl

from .channels import load_channels, load_row, store_channels
from .kda_decay import earlier_factor, later_factor, load_references, pairs
from .time_axis import (
    chunk_pointer,
    clear_outside_rows,
    clear_outside_time_axis,
    load_time_axis,
    locate_chunk,
    store_time_axis,
)


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def chunk_kda_bwd_intra(
    q,
    k,
    g,
    beta,
    dA,
    dM,
    dq,
    dk,
    dbeta,
    dg,
    dq_out,
    dk_out,
    dbeta_out,
    dg_out,
    cu_seqlens,
    chunk_indices,
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
    DG_T_CONTIG: tl.constexpr,
    DB_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """q, k `[B, T, H, K]`, g `[B, T, HV, K]` (base 2, cumulative in the chunk) and beta `[B, T, HV]` in either layout,
    dA and dM `[B, T, HV, BT]`; adds onto dq, dk, dg `[B, T, HV, K]` and dbeta `[B, T, HV]` and writes the sums, which
    may be the same memory; dg and dbeta in either layout, the sums in the same. TASKS = chunks * HV * BT / 16.

    What dA holds above the diagonal, and dM on it and above, is not used.
    """
    if IS_VARLEN:
        clear_outside_rows(dq_out, cu_seqlens, T, N, HV * K, BK)
        clear_outside_rows(dk_out, cu_seqlens, T, N, HV * K, BK)
        clear_outside_time_axis(dg_out, cu_seqlens, T, N, HV, DG_T_CONTIG, BK, K)
        clear_outside_time_axis(dbeta_out, cu_seqlens, T, N, HV, DB_T_CONTIG, BT)
    g_stride: tl.constexpr = K if G_T_CONTIG else HV * K
    dg_stride: tl.constexpr = K if DG_T_CONTIG else HV * K
    beta_stride: tl.constexpr = 1 if BETA_T_CONTIG else HV
    db_stride: tl.constexpr = 1 if DB_T_CONTIG else HV
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
        row = first * HV + i_h
        begin = i_s * 16
        o_t = begin + o_r
        m_t = o_t < tokens
        # A strip without tokens has no past either: its reference would be 0, and factors overflow.
        m_past = o_s < tl.where(begin < tokens, begin, 0)
        o_next = begin + 16 + o_s
        m_next = o_next < tokens
        head = (first * H + i_h // (HV // H)) * K
        p_g = chunk_pointer(g, i_b, i_t, bos, i_h, T, HV, BT, G_T_CONTIG, K)
        p_dg = chunk_pointer(dg, i_b, i_t, bos, i_h, T, HV, BT, DG_T_CONTIG, K)
        p_dg_out = chunk_pointer(dg_out, i_b, i_t, bos, i_h, T, HV, BT, DG_T_CONTIG, K)
        p_beta = chunk_pointer(beta, i_b, i_t, bos, i_h, T, HV, BT, BETA_T_CONTIG)
        b_beta = load_time_axis(p_beta + begin * beta_stride, o_r, m_t, HV, BETA_T_CONTIG).to(tl.float32)
        o_A = o_t[:, None] * (HV * BT) + begin + o_r[None, :]
        # Whole rows are loaded and the rest selected: Ascend's compiler takes masks of rectangles only.
        b_dA = tl.load(dA + row * BT + o_A, mask=m_t[:, None], other=0.0).to(tl.float32)
        b_dM = tl.load(dM + row * BT + o_A, mask=m_t[:, None], other=0.0).to(tl.float32)
        b_own = tl.sum(tl.where(o_r[:, None] == o_r[None, :], b_dA, 0.0), axis=1)
        b_dA = tl.where(o_r[:, None] > o_r[None, :], b_dA, 0.0)
        b_dM = tl.where(o_r[:, None] > o_r[None, :], b_dM, 0.0)

        b_db = tl.zeros([16, 16], dtype=tl.float32)
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            b_q = load_channels(q + head, o_t, o_k, m_t, K, H * K).to(tl.float32)
            b_k = load_channels(k + head, o_t, o_k, m_t, K, H * K).to(tl.float32)
            b_G = load_channels(p_g, o_t, o_k, m_t, K, g_stride).to(tl.float32)
            b_a = tl.zeros([16, BK], dtype=tl.float32)
            b_row = tl.zeros([16, BK], dtype=tl.float32)
            b_col = tl.zeros([16, BK], dtype=tl.float32)
            if BT > 16:
                # The rows before the strip.
                b_R = load_row(p_g, begin, tokens, o_k, K, g_stride)[None, :]
                b_x = load_channels(k + head, o_s, o_k, m_past, K, H * K).to(tl.float32)
                b_Gx = load_channels(p_g, o_s, o_k, m_past, K, g_stride).to(tl.float32)
                b_x *= tl.exp2(tl.where(m_past[:, None], b_R - b_Gx, 0.0))
                o_x = o_t[:, None] * (HV * BT) + o_s[None, :]
                m_x = m_t[:, None] & m_past[None, :]
                b_dAx = tl.load(dA + row * BT + o_x, mask=m_x, other=0.0).to(tl.float32)
                b_dMx = tl.load(dM + row * BT + o_x, mask=m_x, other=0.0).to(tl.float32)
                b_gate = tl.exp2(tl.where(m_t[:, None], b_G - b_R, 0.0))
                b_a += tl.dot(b_dAx, b_x, input_precision=DOT_PRECISION) * b_gate
                b_row += tl.dot(b_dMx, b_x, input_precision=DOT_PRECISION) * b_gate
                # The rows after it.
                b_R = load_row(p_g, tl.minimum(begin + 15, tokens - 1), tokens, o_k, K, g_stride)[None, :]
                b_x = load_channels(k + head, o_next, o_k, m_next, K, H * K).to(tl.float32)
                b_y = load_channels(q + head, o_next, o_k, m_next, K, H * K).to(tl.float32)
                b_Gx = load_channels(p_g, o_next, o_k, m_next, K, g_stride).to(tl.float32)
                b_Gx = tl.exp2(tl.where(m_next[:, None], b_Gx - b_R, 0.0))
                b_next = load_time_axis(p_beta, o_next, m_next, HV, BETA_T_CONTIG).to(tl.float32)
                o_x = o_next[:, None] * (HV * BT) + o_t[None, :]
                m_x = m_next[:, None] & m_t[None, :]
                b_dAx = tl.load(dA + row * BT + o_x, mask=m_x, other=0.0).to(tl.float32)
                b_dMx = tl.load(dM + row * BT + o_x, mask=m_x, other=0.0).to(tl.float32)
                b_c = tl.dot(tl.trans(b_dAx), b_y * b_Gx, input_precision=DOT_PRECISION)
                b_c += tl.dot(tl.trans(b_dMx), b_x * b_Gx * b_next[:, None], input_precision=DOT_PRECISION)
                b_col += b_c * tl.exp2(tl.where(m_t[:, None], b_R - b_G, 0.0))
            # The strip itself.
            if DIAGONAL == "columns":
                for i_c in range(0, tl.minimum(16, tokens - begin)):
                    # Row i_c as the earlier one of every pair, then as the later one.
                    b_kc = load_row(k + head, begin + i_c, tokens, o_k, K, H * K)[None, :]
                    b_qc = load_row(q + head, begin + i_c, tokens, o_k, K, H * K)[None, :]
                    b_Gc = load_row(p_g, begin + i_c, tokens, o_k, K, g_stride)[None, :]
                    b_one = tl.where(o_r == i_c, 1.0, 0.0)
                    b_D = b_kc * tl.exp2(tl.where((m_t & (o_r > i_c))[:, None], b_G - b_Gc, 0.0))
                    b_a += tl.sum(b_dA * b_one[None, :], axis=1)[:, None] * b_D
                    b_row += tl.sum(b_dM * b_one[None, :], axis=1)[:, None] * b_D
                    b_D = tl.exp2(tl.where((o_r < i_c)[:, None], b_Gc - b_G, 0.0))
                    p_row = row * BT + (begin + i_c) * (HV * BT) + begin
                    b_dAc = tl.load(dA + p_row + o_r, mask=o_r < i_c, other=0.0).to(tl.float32)[:, None]
                    b_dMc = tl.load(dM + p_row + o_r, mask=o_r < i_c, other=0.0).to(tl.float32)[:, None]
                    b_betac = tl.load(p_beta + (begin + i_c) * beta_stride).to(tl.float32)
                    b_col += (b_dAc * b_qc + b_dMc * (b_kc * b_betac)) * b_D
            else:
                for level in tl.static_range(LEVELS):
                    b_R = load_references(p_g, i_s, o_k, tokens, level, K, g_stride, DIAGONAL)
                    b_later = later_factor(b_G, b_R, m_t, level, DIAGONAL)
                    b_earlier = earlier_factor(b_G, b_R, m_t, level, DIAGONAL)
                    m_pair = pairs(level, DIAGONAL)
                    b_dAx = tl.where(m_pair, b_dA, 0.0)
                    b_dMx = tl.where(m_pair, b_dM, 0.0)
                    b_x = b_k * b_earlier
                    b_a += tl.dot(b_dAx, b_x, input_precision=DOT_PRECISION) * b_later
                    b_row += tl.dot(b_dMx, b_x, input_precision=DOT_PRECISION) * b_later
                    b_c = tl.dot(tl.trans(b_dAx), b_q * b_later, input_precision=DOT_PRECISION)
                    b_x = b_k * b_later * b_beta[:, None]
                    b_c += tl.dot(tl.trans(b_dMx), b_x, input_precision=DOT_PRECISION)
                    b_col += b_c * b_earlier

            b_x = load_channels(dq + row * K, o_t, o_k, m_t, K, HV * K).to(tl.float32)
            store_channels(dq_out + row * K, o_t, o_k, m_t, b_x + (b_a + b_own[:, None] * b_k), K, HV * K)
            b_x = load_channels(dk + row * K, o_t, o_k, m_t, K, HV * K).to(tl.float32)
            b_br = b_row * b_beta[:, None]
            store_channels(dk_out + row * K, o_t, o_k, m_t, b_x + (b_br + b_col + b_own[:, None] * b_q), K, HV * K)
            b_x = load_channels(p_dg, o_t, o_k, m_t, K, dg_stride).to(tl.float32)
            store_channels(p_dg_out, o_t, o_k, m_t, b_x + (b_q * b_a + b_k * (b_br - b_col)), K, dg_stride)
            # A product with ones adds in one order whatever the layouts are.
            b_ones = tl.full([BK, 16], 1.0, dtype=tl.float32)
            b_db += tl.dot(b_row * b_k, b_ones, input_precision=DOT_PRECISION)

        p_db = chunk_pointer(dbeta, i_b, i_t, bos, i_h, T, HV, BT, DB_T_CONTIG) + begin * db_stride
        p_db_out = chunk_pointer(dbeta_out, i_b, i_t, bos, i_h, T, HV, BT, DB_T_CONTIG) + begin * db_stride
        b_x = load_time_axis(p_db, o_r, m_t, HV, DB_T_CONTIG).to(tl.float32)
        b_x += tl.sum(tl.where(o_r[None, :] == 0, b_db, 0.0), axis=1)
        store_time_axis(p_db_out, o_r, b_x, m_t, HV, DB_T_CONTIG)
