"""Tiles of tensors with channels: rows of tokens, columns of channels, from where `time_axis.chunk_pointer` points.

Serves row-major tensors as well, whose rows are as far apart in either layout. Kernels write the distance of two tokens
of a time-axis tensor themselves, `C if T_CONTIG else HV * C`: triton-ascend 3.2 takes what a function returns for a
value, not a constant.
"""

import triton
import triton.language as tl


@triton.jit
def load_channels(
    p_x,
    o_r,
    o_c,
    m_r,
    D: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Rows `o_r`, `STRIDE` elements apart, columns `o_c` of D; 0 where `m_r` does not hold and outside D."""
    return tl.load(p_x + o_r[:, None] * STRIDE + o_c[None, :], mask=m_r[:, None] & (o_c < D)[None, :], other=0.0)


@triton.jit
def load_row(
    p_x,
    row,
    tokens,
    o_c,
    D: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Row `row` of `tokens` in fp32; 0 where there is no such row and outside D."""
    columns = tl.where((row >= 0) & (row < tokens), D, 0)
    return tl.load(p_x + row * STRIDE + o_c, mask=o_c < columns, other=0.0).to(tl.float32)


@triton.jit
def store_channels(
    p_x,
    o_r,
    o_c,
    m_r,
    b_x,
    D: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Writes what `load_channels` reads, cast to the dtype of the storage."""
    m_x = m_r[:, None] & (o_c < D)[None, :]
    tl.store(p_x + o_r[:, None] * STRIDE + o_c[None, :], b_x.to(p_x.dtype.element_ty), mask=m_x)
