"""Small questions to this Triton: whether it computes a dot and rounds it, and where the address helpers point."""

import triton
import triton.language as tl

from .time_axis import time_axis_offset, time_axis_stride


@triton.jit
def dot_probe(
    a,
    b,
    product,
    stored,
    N: tl.constexpr,
):
    """product = a @ b for row-major `[N, N]` tiles, stored a second time in the dtype of `stored`."""
    o = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    b_product = tl.dot(tl.load(a + o), tl.load(b + o))
    tl.store(product + o, b_product)
    tl.store(stored + o, b_product.to(stored.dtype.element_ty))


@triton.jit
def cast_probe(
    x,
    stored,
    N: tl.constexpr,
):
    """stored = x, cast to the dtype of `stored`."""
    o = tl.arange(0, N)
    tl.store(stored + o, tl.load(x + o).to(stored.dtype.element_ty))


@triton.jit
def offset_probe(
    found,
    i_b,
    bos,
    i_h,
    T,
    HV: tl.constexpr,
    T_CONTIG: tl.constexpr,
):
    """Where a head of a sequence starts in a time-axis tensor, and the elements between two of its tokens."""
    tl.store(found, time_axis_offset(i_b, bos, i_h, T, HV, T_CONTIG))
    tl.store(found + 1, time_axis_stride(HV, T_CONTIG))
