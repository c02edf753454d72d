"""Gradients with respect to queries, keys, `w` and the gate: the formulas, and what their kernels share.

With ds = scale * tril(do v^T * exp2(G[t] - G[s])), h the state at the chunk's start and dh the gradient of the state
at its end, one head of one chunk gives

    dq_h = scale * exp2(G) * (do h^T)            dk_h = exp2(G_last - G) * (v dh^T)
    dq = dq_h + ds k                             dk = dk_h + ds^T q                        dw = -dv h^T
    dG = rowsum(dq_h * q) + rowsum(E) - rowsum(dk_h * k) - colsum(E)                       E = strict_tril(ds * q k^T)
    dG[last] += exp2(G_last) * sum(h * dh) + sum(dk_h * k)

E leaves out the diagonal, which cancels in exact arithmetic: kept, it would be all of dG where a chunk has one token.

One task of the kernels for dq and dk is one chunk of one query head: it walks the value heads of the group and sums dq
and dk on chip, so that no partial sum goes through memory. ds enters dq and dk linearly, hence its sum over the group
is multiplied once.

    dqkwg_full   `[BT, BT]` tiles of ds; dG, if any, from products of h and dh with q and k (`dg`)
    dqkwg_rows   `[BT, BT]` tiles of ds; dG from the rows of dq_h and dk_h, which it forms anyway
    dqkwg_sub    `[BC, BC]` tiles of ds on and below the diagonal; dG left to the kernel in `dg`

Both ways to dG are sums of the same numbers in another order. Which is cheaper depends on what a chip can keep: `rows`
needs one row of dG for each head of the group while it walks K, `full` needs two products more.
"""

import triton
import triton.language as tl

from .state import load_state
from .time_axis import load_chunk, load_columns, token_pointer


@triton.jit
def chunk_gate(
    g,
    g_gamma,
    i_b,
    i_t,
    bos,
    i_h,
    o_r,
    m_r,
    T,
    HV: tl.constexpr,
    BT: tl.constexpr,
    USE_G: tl.constexpr,
    USE_G_GAMMA: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
):
    """G at the rows `o_r` of chunk `i_t`, fp32, 0 where `m_r` does not hold."""
    b_G = tl.zeros([o_r.shape[0]], dtype=tl.float32)
    if USE_G:
        b_G += load_chunk(g, i_b, i_t, bos, i_h, o_r, m_r, T, HV, BT, G_T_CONTIG)
    if USE_G_GAMMA:
        b_G += tl.where(m_r, tl.load(g_gamma + i_h).to(tl.float32) * (o_r + 1).to(tl.float32), 0.0)
    return b_G


@triton.jit
def gate_at(
    g,
    g_gamma,
    i_b,
    i_t,
    bos,
    i_h,
    row,
    T,
    HV: tl.constexpr,
    BT: tl.constexpr,
    USE_G: tl.constexpr,
    USE_G_GAMMA: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
):
    """G at one row of chunk `i_t`, a scalar; where the chunk has no token, of one that is there."""
    x = 0.0
    if USE_G:
        t = tl.maximum(i_t * BT + row, 0)
        x += tl.load(token_pointer(g, i_b, t, bos, i_h, T, HV, G_T_CONTIG)).to(tl.float32)
    if USE_G_GAMMA:
        x += tl.load(g_gamma + i_h).to(tl.float32) * (row + 1).to(tl.float32)
    return x


@triton.jit
def state_tile(
    p_s,
    o_k,
    o_v,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
):
    """`load_state`, without a mask where the tiles divide the state."""
    if K % BK == 0 and V % BV == 0:
        if STATE_V_FIRST:
            b_s = tl.trans(tl.load(p_s + o_v[:, None] * K + o_k[None, :]))
        else:
            b_s = tl.load(p_s + o_k[:, None] * V + o_v[None, :])
    else:
        b_s = load_state(p_s, o_k, o_v, K, V, STATE_V_FIRST)
    return b_s


@triton.jit
def scores(
    p_do,
    p_v,
    b_G_row,
    b_G_col,
    o_row,
    o_col,
    m_row,
    m_col,
    scale,
    HV: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """ds for rows t = `o_row` and columns s = `o_col`, fp32, 0 where s > t."""
    b_s = tl.zeros([o_row.shape[0], o_col.shape[0]], dtype=tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_v = (o_v < V)[None, :]
        b_do = tl.load(p_do + o_row[:, None] * (HV * V) + o_v[None, :], mask=m_row[:, None] & m_v, other=0.0)
        b_v = tl.load(p_v + o_col[:, None] * (HV * V) + o_v[None, :], mask=m_col[:, None] & m_v, other=0.0)
        b_s += tl.dot(b_do, tl.trans(b_v), input_precision=DOT_PRECISION)
    # Above the diagonal the difference may be large and positive: mask before exp2, not after.
    m_s = (o_row[:, None] >= o_col[None, :]) & m_row[:, None]
    b_x = tl.where(m_s, b_G_row[:, None] - b_G_col[None, :], 0.0)
    return tl.where(m_s, b_s * tl.exp2(b_x) * scale, 0.0)


@triton.jit
def query_key_products(
    p_q,
    p_k,
    o_row,
    o_col,
    m_row,
    m_col,
    H: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """q k^T for rows t = `o_row` and columns s = `o_col`, fp32."""
    b_P = tl.zeros([o_row.shape[0], o_col.shape[0]], dtype=tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = (o_k < K)[None, :]
        b_q = tl.load(p_q + o_row[:, None] * (H * K) + o_k[None, :], mask=m_row[:, None] & m_k, other=0.0)
        b_k = tl.load(p_k + o_col[:, None] * (H * K) + o_k[None, :], mask=m_col[:, None] & m_k, other=0.0)
        b_P += tl.dot(b_q, tl.trans(b_k), input_precision=DOT_PRECISION)
    return b_P


@triton.jit
def products_with_start(
    do,
    dv,
    p_h,
    i_x,
    o_c,
    o_k,
    m_t,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    USE_DW: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """`(do h^T, dv h^T)` of one head of a chunk for the columns `o_k`, fp32; the second is 0 without USE_DW.

    The head's first row of `do` and `dv` lies `i_x` elements in.
    """
    b_dqh = tl.zeros([o_c.shape[0], BK], dtype=tl.float32)
    b_dwh = tl.zeros([o_c.shape[0], BK], dtype=tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_h = state_tile(p_h, o_k, o_v, K, V, BK, BV, STATE_V_FIRST)
        b_do = load_columns(do + i_x, o_c, o_v, m_t, HV * V, V, BV, V)
        b_dqh += tl.dot(b_do, tl.trans(b_h), input_precision=DOT_PRECISION)
        if USE_DW:
            b_dv = load_columns(dv + i_x, o_c, o_v, m_t, HV * V, V, BV, V)
            b_dwh += tl.dot(b_dv, tl.trans(b_h), input_precision=DOT_PRECISION)
    return b_dqh, b_dwh


@triton.jit
def product_with_scores(
    b_S,
    b_x,
    COMPUTED_RIGHT: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """S x, fp32. COMPUTED_RIGHT forms it as (x^T S^T)^T, so that S, which was computed, is the right operand.

    Triton 3.4 to 3.7.0 on Hopper feeds a computed left operand from registers, and its transpose comes out wrong.
    """
    if COMPUTED_RIGHT:
        b_out = tl.trans(tl.dot(tl.trans(b_x), tl.trans(b_S), input_precision=DOT_PRECISION))
    else:
        b_out = tl.dot(b_S, b_x, input_precision=DOT_PRECISION)
    return b_out
