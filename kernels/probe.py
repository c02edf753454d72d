"""Small questions to this Triton: whether it adds, multiplies and rounds, and where the address helpers point."""

import triton
import triton.language as tl

from .time_axis import time_axis_offset, time_axis_stride


@triton.jit(do_not_specialize=["n"])
def add_probe(
    x,
    y,
    total,
    n,
    BLOCK: tl.constexpr,
):
    """total = x + y for vectors of `n` elements, `BLOCK` of them in each program."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    tl.store(total + o, tl.load(x + o, mask=m) + tl.load(y + o, mask=m), mask=m)


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
    b_product = tl.dot(tl.load(a + o), tl.load(b + o), input_precision="ieee")
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
