"""Small questions to this Triton: whether it computes a dot, and where the address helpers point."""

import triton
import triton.language as tl

from .time_axis import time_axis_offset, time_axis_stride


@triton.jit
def dot_probe(
    a,
    b,
    product,
    N: tl.constexpr,
):
    """product = a @ b for row-major `[N, N]` tiles."""
    o = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(product + o, tl.dot(tl.load(a + o), tl.load(b + o)))


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
