"""Gradient of the chunk output with respect to the values, within each chunk.

    dv[t] = sum over s >= t of  scale * <k[t], q[s]> * exp2(G[s] - G[t]) * do[s]        s and t in one chunk

One task is one chunk of one value head. `chunk_bwd_dv_local_full` forms the whole `[BT, BT]` tile of the product
at once; `chunk_bwd_dv_local_sub` forms it in `[BC, BC]` tiles, skips those below the diagonal, and so needs a
fraction of the on-chip memory at the price of reading `q` and `do` about `(BT / BC + 1) / 2` times.

Both hold the tile transposed (row t, column s), so that it is the left operand of the product with `do`. A caller
that has the forward's `A [B, T, HV, BT]` (scale and gate already in it) passes it in place of the product and the
decay; only the causal mask is applied to it then.
"""

import triton
import triton.language as tl

from .time_axis import chunk_pointer, clear_outside_rows, load_chunk, load_time_axis, locate_chunk


@triton.jit
def _decay(
    b_g_row,
    b_g_col,
    b_gamma,
    o_row,
    o_col,
    m_A,
    USE_G: tl.constexpr,
    USE_G_GAMMA: tl.constexpr,
):
    """exp2(G[s] - G[t]) for rows t and columns s where `m_A` holds, 0 elsewhere."""
    b_x = tl.zeros([o_row.shape[0], o_col.shape[0]], dtype=tl.float32)
    if USE_G:
        b_x += b_g_col[None, :] - b_g_row[:, None]
    if USE_G_GAMMA:
        b_x += b_gamma * (o_col[None, :] - o_row[:, None]).to(tl.float32)
    # Below the diagonal the difference may be large and positive: mask before exp2, not after.
    return tl.where(m_A, tl.exp2(tl.where(m_A, b_x, 0.0)), 0.0)


@triton.jit
def _product(
    p_q,
    p_k,
    p_A,
    o_row,
    o_col,
    m_row,
    m_col,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    USE_A: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """scale * <k[t], q[s]> for rows t and columns s, or that tile of the caller's A (`A[s, t]`), transposed."""
    if USE_A:
        b_A = tl.load(
            p_A + o_col[:, None] * (HV * BT) + o_row[None, :],
            mask=m_col[:, None] & m_row[None, :],
            other=0.0,
        )
        b_A = tl.trans(b_A.to(tl.float32))
    else:
        b_A = tl.zeros([o_row.shape[0], o_col.shape[0]], dtype=tl.float32)
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            m_k = o_k < K
            b_k = tl.load(p_k + o_row[:, None] * (H * K) + o_k[None, :], mask=m_row[:, None] & m_k[None, :], other=0.0)
            b_q = tl.load(p_q + o_col[:, None] * (H * K) + o_k[None, :], mask=m_col[:, None] & m_k[None, :], other=0.0)
            b_A += tl.dot(b_k, tl.trans(b_q), input_precision=DOT_PRECISION)
        b_A = b_A * scale
    return b_A


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def chunk_bwd_dv_local_full(
    q,
    k,
    do,
    g,
    g_gamma,
    A,
    dv,
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
    USE_G: tl.constexpr,
    USE_G_GAMMA: tl.constexpr,
    USE_A: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """The whole `[BT, BT]` tile at once.

    q, k `[B, T, H, K]`, do `[B, T, HV, V]`, g `[B, T, HV]` (base 2, cumulative in the chunk, either layout),
    g_gamma `[HV]` (base 2, per token), A `[B, T, HV, BT]` in place of q, k and the gates; writes dv `[B, T, HV, V]`.
    """
    if IS_VARLEN:
        clear_outside_rows(dv, cu_seqlens, T, N, HV * V, BV)
    o_c = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_h = i_task % HV
        i_b, i_t, bos, length = locate_chunk(i_task // HV, cu_seqlens, chunk_indices, T, NT, N, BT, IS_VARLEN)
        first = tl.cast(bos + i_t * BT, tl.int64)
        p_q = q + (first * H + i_h // (HV // H)) * K
        p_k = k + (first * H + i_h // (HV // H)) * K
        p_do = do + (first * HV + i_h) * V
        p_dv = dv + (first * HV + i_h) * V
        p_A = A
        if USE_A:
            p_A = A + (first * HV + i_h) * BT
        m_t = i_t * BT + o_c < length

        b_g = tl.zeros([BT], dtype=tl.float32)
        if USE_G:
            b_g = load_chunk(g, i_b, i_t, bos, i_h, o_c, m_t, T, HV, BT, G_T_CONTIG)
        b_gamma = 0.0
        if USE_G_GAMMA:
            b_gamma = tl.load(g_gamma + i_h).to(tl.float32)

        b_A = _product(p_q, p_k, p_A, o_c, o_c, m_t, m_t, scale, H, HV, K, BT, BK, USE_A, DOT_PRECISION)
        m_A = (o_c[:, None] <= o_c[None, :]) & m_t[None, :]
        b_A *= _decay(b_g, b_g, b_gamma, o_c, o_c, m_A, USE_G, USE_G_GAMMA)
        b_A = b_A.to(do.dtype.element_ty)

        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            m_v = m_t[:, None] & (o_v < V)[None, :]
            b_do = tl.load(p_do + o_c[:, None] * (HV * V) + o_v[None, :], mask=m_v, other=0.0)
            b_dv = tl.dot(b_A, b_do, input_precision=DOT_PRECISION)
            tl.store(p_dv + o_c[:, None] * (HV * V) + o_v[None, :], b_dv.to(dv.dtype.element_ty), mask=m_v)


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def chunk_bwd_dv_local_sub(
    q,
    k,
    do,
    g,
    g_gamma,
    A,
    dv,
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
    BC: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    USE_G: tl.constexpr,
    USE_G_GAMMA: tl.constexpr,
    USE_A: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """`[BC, BC]` tiles on and above the diagonal; operands as in `chunk_bwd_dv_local_full`."""
    if IS_VARLEN:
        clear_outside_rows(dv, cu_seqlens, T, N, HV * V, BV)
    o_c = tl.arange(0, BC)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_h = i_task % HV
        i_b, i_t, bos, length = locate_chunk(i_task // HV, cu_seqlens, chunk_indices, T, NT, N, BT, IS_VARLEN)
        first = tl.cast(bos + i_t * BT, tl.int64)
        p_q = q + (first * H + i_h // (HV // H)) * K
        p_k = k + (first * H + i_h // (HV // H)) * K
        p_do = do + (first * HV + i_h) * V
        p_dv = dv + (first * HV + i_h) * V
        p_A = A
        if USE_A:
            p_A = A + (first * HV + i_h) * BT
        p_g = g
        if USE_G:
            p_g = chunk_pointer(g, i_b, i_t, bos, i_h, T, HV, BT, G_T_CONTIG)
        b_gamma = 0.0
        if USE_G_GAMMA:
            b_gamma = tl.load(g_gamma + i_h).to(tl.float32)

        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            m_v = o_v < V
            for i_r in tl.static_range(0, BT, BC):
                o_row = i_r + o_c
                m_row = i_t * BT + o_row < length
                b_g_row = tl.zeros([BC], dtype=tl.float32)
                if USE_G:
                    b_g_row = load_time_axis(p_g, o_row, m_row, HV, G_T_CONTIG).to(tl.float32)
                b_dv = tl.zeros([BC, BV], dtype=tl.float32)
                for i_s in tl.static_range(i_r, BT, BC):
                    o_col = i_s + o_c
                    m_col = i_t * BT + o_col < length
                    b_g_col = tl.zeros([BC], dtype=tl.float32)
                    if USE_G:
                        b_g_col = load_time_axis(p_g, o_col, m_col, HV, G_T_CONTIG).to(tl.float32)
                    b_A = _product(
                        p_q, p_k, p_A, o_row, o_col, m_row, m_col, scale, H, HV, K, BT, BK, USE_A, DOT_PRECISION
                    )
                    m_A = (o_row[:, None] <= o_col[None, :]) & m_col[None, :]
                    b_A *= _decay(b_g_row, b_g_col, b_gamma, o_row, o_col, m_A, USE_G, USE_G_GAMMA)
                    b_do = tl.load(
                        p_do + o_col[:, None] * (HV * V) + o_v[None, :], mask=m_col[:, None] & m_v[None, :], other=0.0
                    )
                    b_dv += tl.dot(b_A.to(do.dtype.element_ty), b_do, input_precision=DOT_PRECISION)
                tl.store(
                    p_dv + o_row[:, None] * (HV * V) + o_v[None, :],
                    b_dv.to(dv.dtype.element_ty),
                    mask=m_row[:, None] & m_v[None, :],
                )
