"""The inverse of a chunk's triangular system straight from keys, decay and beta.

    M[t, s] = beta[t] * <k[t], k[s]> * exp2(G[t] - G[s])        s < t, else 0
    A       = (I + M)^-1

`kkt` and `solve_tril` in one: M stays on chip in fp32, so that of the two `[B, T, HV, BT]` tensors only A, in k's
dtype, goes to memory. One task is one chunk of a block of value heads, its M cut into blocks of 16.
"""

import triton
import triton.language as tl

from .local_cumsum import load_head_block
from .solve_tril import solve_blocks
from .time_axis import clear_outside_rows, locate_chunk


@triton.jit
def _load_keys(
    p_k,
    i: tl.constexpr,
    o_h,
    o_k,
    length,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
):
    """Rows 16 * i .. 16 * i + 15 of the chunk for the query heads of value heads `o_h`, `[heads, 16, columns]`."""
    o_r = i * 16 + tl.arange(0, 16)
    m_k = (o_h < HV)[:, None, None] & (o_r < length)[None, :, None] & (o_k < K)[None, None, :]
    o_head = (o_h // (HV // H) * K)[:, None, None]
    return tl.load(p_k + o_head + o_r[None, :, None] * (H * K) + o_k[None, None, :], mask=m_k, other=0.0)


@triton.jit
def _block(
    b_kk,
    b_beta,
    b_g_row,
    b_g_col,
    m_row,
    USE_G: tl.constexpr,
):
    """A block of M from its key products; `m_row` tells which rows exist."""
    b_M = b_kk * b_beta[:, :, None]
    if USE_G:
        # A row past the end has no gate of its own, and the difference could overflow: mask before exp2.
        b_M *= tl.exp2(tl.where(m_row[None, :, None], b_g_row[:, :, None] - b_g_col[:, None, :], 0.0))
    return b_M


@triton.jit
def _diagonal_block(
    b_kk,
    b_beta,
    b_g,
    m_row,
    USE_G: tl.constexpr,
):
    """A block of M on the diagonal."""
    o_c = tl.arange(0, 16)
    # A row past the end has no gate of its own, as in `_block`.
    m_M = (m_row[:, None] & (o_c[:, None] > o_c[None, :]))[None, :, :]
    b_M = b_kk * b_beta[:, :, None]
    if USE_G:
        b_M *= tl.exp2(tl.where(m_M, b_g[:, :, None] - b_g[:, None, :], 0.0))
    return tl.where(m_M, b_M, 0.0)


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def kkt_solve(
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
    BH: tl.constexpr,
    BK: tl.constexpr,
    USE_G: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    BETA_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr,
):
    """k `[B, T, H, K]`, g (base 2, cumulative in the chunk) and beta `[B, T, HV]` in either layout; writes A.

    A `[B, T, HV, BT]`, lower triangular with ones on the diagonal. TASKS = chunks * cdiv(HV, BH), BH at least 2.
    """
    if IS_VARLEN:
        clear_outside_rows(A, cu_seqlens, T, N, HV * BT, BT)
    head_blocks: tl.constexpr = (HV + BH - 1) // BH
    o_c = tl.arange(0, 16)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_b, i_t, bos, length = locate_chunk(i_task // head_blocks, cu_seqlens, chunk_indices, T, NT, N, BT, IS_VARLEN)
        rows = length - i_t * BT
        i_h = i_task % head_blocks
        o_b = tl.arange(0, BH)
        o_h = i_h * BH + o_b
        first = tl.cast(bos + i_t * BT, tl.int64)
        p_k = k + first * (H * K)

        b_00 = tl.zeros([BH, 16, 16], dtype=tl.float32)
        b_10 = tl.zeros([BH, 16, 16], dtype=tl.float32)
        b_11 = tl.zeros([BH, 16, 16], dtype=tl.float32)
        b_20 = tl.zeros([BH, 16, 16], dtype=tl.float32)
        b_21 = tl.zeros([BH, 16, 16], dtype=tl.float32)
        b_22 = tl.zeros([BH, 16, 16], dtype=tl.float32)
        b_30 = tl.zeros([BH, 16, 16], dtype=tl.float32)
        b_31 = tl.zeros([BH, 16, 16], dtype=tl.float32)
        b_32 = tl.zeros([BH, 16, 16], dtype=tl.float32)
        b_33 = tl.zeros([BH, 16, 16], dtype=tl.float32)
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            b_k0 = _load_keys(p_k, 0, o_h, o_k, rows, H, HV, K)
            b_k0_t = tl.permute(b_k0, (0, 2, 1))
            b_00 += tl.dot(b_k0, b_k0_t, input_precision=DOT_PRECISION)
            if BT > 16:
                b_k1 = _load_keys(p_k, 1, o_h, o_k, rows, H, HV, K)
                b_k1_t = tl.permute(b_k1, (0, 2, 1))
                b_10 += tl.dot(b_k1, b_k0_t, input_precision=DOT_PRECISION)
                b_11 += tl.dot(b_k1, b_k1_t, input_precision=DOT_PRECISION)
            if BT > 32:
                b_k2 = _load_keys(p_k, 2, o_h, o_k, rows, H, HV, K)
                b_k2_t = tl.permute(b_k2, (0, 2, 1))
                b_20 += tl.dot(b_k2, b_k0_t, input_precision=DOT_PRECISION)
                b_21 += tl.dot(b_k2, b_k1_t, input_precision=DOT_PRECISION)
                b_22 += tl.dot(b_k2, b_k2_t, input_precision=DOT_PRECISION)
                b_k3 = _load_keys(p_k, 3, o_h, o_k, rows, H, HV, K)
                b_30 += tl.dot(b_k3, b_k0_t, input_precision=DOT_PRECISION)
                b_31 += tl.dot(b_k3, b_k1_t, input_precision=DOT_PRECISION)
                b_32 += tl.dot(b_k3, b_k2_t, input_precision=DOT_PRECISION)
                b_33 += tl.dot(b_k3, tl.permute(b_k3, (0, 2, 1)), input_precision=DOT_PRECISION)

        for i in tl.static_range(BT // 16):
            first_row = i_t * BT + i * 16
            m_row = i * 16 + o_c < rows
            b_beta = load_head_block(beta, i_b, bos, first_row, length, o_c, i_h * BH, o_b, T, HV, BETA_T_CONTIG)
            b_g = tl.zeros([BH, 16], dtype=tl.float32)
            if USE_G:
                b_g = load_head_block(g, i_b, bos, first_row, length, o_c, i_h * BH, o_b, T, HV, G_T_CONTIG)
            if i == 0:
                b_00 = _diagonal_block(b_00, b_beta, b_g, m_row, USE_G)
                b_g0 = b_g
            if i == 1:
                b_10 = _block(b_10, b_beta, b_g, b_g0, m_row, USE_G)
                b_11 = _diagonal_block(b_11, b_beta, b_g, m_row, USE_G)
                b_g1 = b_g
            if i == 2:
                b_20 = _block(b_20, b_beta, b_g, b_g0, m_row, USE_G)
                b_21 = _block(b_21, b_beta, b_g, b_g1, m_row, USE_G)
                b_22 = _diagonal_block(b_22, b_beta, b_g, m_row, USE_G)
                b_g2 = b_g
            if i == 3:
                b_30 = _block(b_30, b_beta, b_g, b_g0, m_row, USE_G)
                b_31 = _block(b_31, b_beta, b_g, b_g1, m_row, USE_G)
                b_32 = _block(b_32, b_beta, b_g, b_g2, m_row, USE_G)
                b_33 = _diagonal_block(b_33, b_beta, b_g, m_row, USE_G)

        solve_blocks(
            A + first * (HV * BT),
            b_00,
            b_10,
            b_11,
            b_20,
            b_21,
            b_22,
            b_30,
            b_31,
            b_32,
            b_33,
            i_h,
            rows,
            HV,
            BT,
            BH,
            False,
            SOLVE_PRECISION,
        )
