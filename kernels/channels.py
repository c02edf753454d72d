"""Addresses of tensors with channels, `[B, T, HV, D]`, whose layout along time is a choice.

The channels of a token stay together in both layouts; only the distance between two tokens of a head changes, and
with it where a head begins:

    stride-HV     ((b * T + t) * HV + h) * D + c
    T-contiguous  ((b * HV + h) * T + t) * D + c

So the address is that of a `[B, T, HV]` tensor times D, plus the channel. Kernels write the distance of two tokens
themselves, `D if T_CONTIG else HV * D`: triton-ascend 3.2 takes what a function returns for a value, not a constant.
"""

import triton
import triton.language as tl

from .time_axis import clear_rows, load_bounded


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


@triton.jit
def clear_channels(
    p_out,
    first,
    last,
    T,
    HV: tl.constexpr,
    D: tl.constexpr,
    T_CONTIG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Zero the tokens `first .. last` of a packed tensor with channels."""
    if T_CONTIG:
        for i_h in range(tl.program_id(0), HV, tl.num_programs(0)):
            for t in range(first, last):
                p_row = p_out + (tl.cast(i_h, tl.int64) * T + t) * D
                for i_c in range(0, D, BLOCK):
                    o_c = i_c + tl.arange(0, BLOCK)
                    zero = tl.zeros([BLOCK], dtype=p_out.dtype.element_ty)
                    tl.store(p_row + o_c, zero, mask=o_c < D)
    else:
        clear_rows(p_out, first, last, HV * D, BLOCK)


@triton.jit
def clear_outside_channels(
    p_out,
    cu_seqlens,
    T,
    N,
    HV: tl.constexpr,
    D: tl.constexpr,
    T_CONTIG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Zero every token of a packed output `[1, T, HV, D]` that no sequence covers, in either layout."""
    clear_channels(p_out, 0, load_bounded(cu_seqlens, 0, T), T, HV, D, T_CONTIG, BLOCK)
    clear_channels(p_out, load_bounded(cu_seqlens + N, 0, T), T, T, HV, D, T_CONTIG, BLOCK)
