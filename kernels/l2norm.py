"""Rows of queries and keys scaled to length 1, and the gradient through that.

    y  = r x,   r = rsqrt(sum(x * x) + eps)
    dx = r (dy - y sum(y * dy))

A row is one head of one token; one task is a block of rows. Rows of tokens outside every sequence of a packed batch
get zeros, whatever the input holds there.
"""

import triton
import triton.language as tl

from .time_axis import load_bounded


@triton.jit
def _covered(
    o_r,
    cu_seqlens,
    rows,
    N,
    H: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """Which of the rows `o_r` there are and belong to a sequence: sequences follow one another without gaps."""
    m_r = o_r < rows
    if IS_VARLEN:
        bos = load_bounded(cu_seqlens, 0, rows // H)
        eos = load_bounded(cu_seqlens + N, 0, rows // H)
        m_r = (o_r >= bos * H) & (o_r < eos * H)
    return m_r


@triton.jit(do_not_specialize=["N", "rows", "TASKS"])
def l2norm_fwd(
    x,
    y,
    r,
    cu_seqlens,
    eps,
    N,
    rows,
    TASKS,
    H: tl.constexpr,
    K: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """x `[B, T, H, K]` as `rows` = B * T * H rows; writes y, alike, and r `[B, T, H]`, fp32."""
    o_k = tl.arange(0, BK)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        o_i = tl.arange(0, BR)
        first = i_task * BR
        m_in = first + o_i < rows
        m_row = _covered(first + o_i, cu_seqlens, rows, N, H, IS_VARLEN)
        offset = tl.cast(first, tl.int64) * K
        b_x = tl.load(
            x + offset + o_i[:, None] * K + o_k[None, :], mask=m_row[:, None] & (o_k < K)[None, :], other=0.0
        ).to(tl.float32)
        b_r = tl.rsqrt(tl.sum(b_x * b_x, axis=1) + eps)
        tl.store(
            y + offset + o_i[:, None] * K + o_k[None, :],
            (b_x * b_r[:, None]).to(y.dtype.element_ty),
            mask=m_in[:, None] & (o_k < K)[None, :],
        )
        tl.store(r + first + o_i, tl.where(m_row, b_r, 0.0), mask=m_in)


@triton.jit(do_not_specialize=["N", "rows", "TASKS"])
def l2norm_bwd(
    y,
    r,
    dy,
    dx,
    cu_seqlens,
    N,
    rows,
    TASKS,
    H: tl.constexpr,
    K: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """y, dy `[B, T, H, K]`, r `[B, T, H]` as `l2norm_fwd` wrote them; writes dx `[B, T, H, K]`."""
    o_k = tl.arange(0, BK)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        o_i = tl.arange(0, BR)
        first = i_task * BR
        m_in = first + o_i < rows
        m_row = _covered(first + o_i, cu_seqlens, rows, N, H, IS_VARLEN)
        m_x = m_row[:, None] & (o_k < K)[None, :]
        offset = tl.cast(first, tl.int64) * K
        b_y = tl.load(y + offset + o_i[:, None] * K + o_k[None, :], mask=m_x, other=0.0).to(tl.float32)
        b_dy = tl.load(dy + offset + o_i[:, None] * K + o_k[None, :], mask=m_x, other=0.0).to(tl.float32)
        b_r = tl.load(r + first + o_i, mask=m_row, other=0.0)
        b_dx = b_r[:, None] * (b_dy - b_y * tl.sum(b_y * b_dy, axis=1)[:, None])
        tl.store(
            dx + offset + o_i[:, None] * K + o_k[None, :],
            b_dx.to(dx.dtype.element_ty),
            mask=m_in[:, None] & (o_k < K)[None, :],
        )
