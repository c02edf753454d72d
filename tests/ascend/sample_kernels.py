"""Small kernels whose counts are known by hand, and some that fail."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["TASKS"])
def scale_rows(x, y, factor, TASKS, N: tl.constexpr, STRIDE: tl.constexpr):
    """y[i, :] = factor * x[i * STRIDE : i * STRIDE + N * STRIDE : STRIDE], one row a task."""
    offsets = tl.arange(0, N)
    for i in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        values = tl.load(x + i * (N * STRIDE) + offsets * STRIDE)
        tl.store(y + i * N + offsets, values * factor)


@triton.jit(do_not_specialize=["n"])
def masked_product(a, b, c, n, N: tl.constexpr, DOT_PRECISION: tl.constexpr):
    """c = a b for `[n, N]` and `[N, N]`, fp32 accumulation."""
    i = tl.arange(0, N)
    left = tl.load(a + i[:, None] * N + i[None, :], mask=(i < n)[:, None], other=0.0)
    right = tl.load(b + i[:, None] * N + i[None, :])
    product = tl.dot(left, right, input_precision=DOT_PRECISION)
    tl.store(c + i[:, None] * N + i[None, :], product.to(c.dtype.element_ty), mask=(i < n)[:, None])


@triton.jit
def starts(x, y, offsets, N: tl.constexpr):
    """y[s : e] = x[s : e] for the sequence offsets[p] .. offsets[p + 1] of program p, N elements at a time."""
    start = tl.load(offsets + tl.program_id(0)).to(tl.int32)
    end = tl.load(offsets + tl.program_id(0) + 1).to(tl.int32)
    for first in range(start, end, N):
        at = first + tl.arange(0, N)
        values = tl.load(x + at, mask=at < end, other=0.0)
        tl.store(y + at, values, mask=at < end)


@triton.jit
def wide(x, N: tl.constexpr):
    """Needs N * N * 4 bytes several times over."""
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    values = tl.load(x + at)
    tl.store(x + at, tl.exp2(values) * values + tl.load(x + at + 7))


@triton.jit
def unknown_name(x, N: tl.constexpr):
    """Uses a name that does not exist."""
    values = tl.load(x + tl.arange(0, N))
    tl.store(x + tl.arange(0, N), values + missing)  # noqa: F821


@triton.jit
def wide_integers(x, y, n, N: tl.constexpr):
    """A comparison of 64-bit integers, which Ascend does one element at a time."""
    i = tl.arange(0, N).to(tl.int64)
    values = tl.load(x + tl.arange(0, N))
    tl.store(y + tl.arange(0, N), tl.where(i < n.to(tl.int64), values, 0.0))


@triton.jit
def added_products(a, b, c, d, out, HEADS: tl.constexpr):
    """out = a b + c d for `[16, 16]`, or `[HEADS, 16, 16]` where there are several."""
    i = tl.arange(0, 16)
    at = i[:, None] * 16 + i[None, :]
    if HEADS > 1:
        at = tl.arange(0, HEADS)[:, None, None] * 256 + at[None, :, :]
    total = tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee")
    total += tl.dot(tl.load(c + at), tl.load(d + at), input_precision="ieee")
    tl.store(out + at, total)
