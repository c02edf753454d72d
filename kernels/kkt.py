"""The triangular system of a chunk.

    M[t, s] = beta[t] * <k[t], k[s]> * exp2(G[t] - G[s])        s < t, both in one chunk; 0 elsewhere

One task is one chunk of one query head: the product of the keys is formed once and serves the value heads of the
group, which differ in `beta` and `G` alone.
"""

import triton
import triton.language as tl

from .time_axis import clear_outside_rows, load_chunk, locate_chunk


@triton.jit
def key_product(
    p_k,
    o_row,
    o_col,
    m_row,
    m_col,
    K_ROW: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """<k[t], k[s]> for rows t and columns s."""
    b_M = tl.zeros([o_row.shape[0], o_col.shape[0]], dtype=tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = (o_k < K)[None, :]
        b_row = tl.load(p_k + o_row[:, None] * K_ROW + o_k[None, :], mask=m_row[:, None] & m_k, other=0.0)
        b_col = tl.load(p_k + o_col[:, None] * K_ROW + o_k[None, :], mask=m_col[:, None] & m_k, other=0.0)
        b_M += tl.dot(b_row, tl.trans(b_col), input_precision=DOT_PRECISION)
    return b_M


@triton.jit
def decayed(
    b_M,
    b_beta,
    b_g_row,
    b_g_col,
    m_M,
    USE_G: tl.constexpr,
):
    """The product times beta of its row and the decay from column to row where `m_M` holds, 0 elsewhere."""
    b_M *= b_beta[:, None]
    if USE_G:
        # Above the diagonal the difference may be large and positive: mask before exp2, not only after.
        b_M *= tl.exp2(tl.where(m_M, b_g_row[:, None] - b_g_col[None, :], 0.0))
    return tl.where(m_M, b_M, 0.0)


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def chunk_scaled_dot_kkt_fwd(
    k,
    g,
    beta,
    A,
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
    USE_G: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    BETA_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """k `[B, T, H, K]`, g (base 2, cumulative in the chunk) and beta `[B, T, HV]` in either layout; writes M to A.

    A is `[B, T, HV, BT]`; TASKS = chunks * H.
    """
    if IS_VARLEN:
        clear_outside_rows(A, cu_seqlens, T, N, HV * BT, BT)
    group: tl.constexpr = HV // H
    o_t = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_h = i_task % H
        i_b, i_t, bos, length = locate_chunk(i_task // H, cu_seqlens, chunk_indices, T, NT, N, BT, IS_VARLEN)
        first = tl.cast(bos + i_t * BT, tl.int64)
        m_t = i_t * BT + o_t < length
        b_kk = key_product(k + (first * H + i_h) * K, o_t, o_t, m_t, m_t, H * K, K, BK, DOT_PRECISION)
        for i_v in range(i_h * group, i_h * group + group):
            b_beta = load_chunk(beta, i_b, i_t, bos, i_v, o_t, m_t, T, HV, BT, BETA_T_CONTIG)
            b_g = tl.zeros([BT], dtype=tl.float32)
            if USE_G:
                b_g = load_chunk(g, i_b, i_t, bos, i_v, o_t, m_t, T, HV, BT, G_T_CONTIG)
            # A row past the end has no gate of its own, and the difference could overflow.
            m_M = m_t[:, None] & (o_t[:, None] > o_t[None, :])
            b_M = decayed(b_kk, b_beta, b_g, b_g, m_M, USE_G)
            p_A = A + (first * HV + i_v) * BT + o_t[:, None] * (HV * BT) + o_t[None, :]
            tl.store(p_A, b_M.to(A.dtype.element_ty), mask=m_t[:, None])
