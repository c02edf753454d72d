"""A dot of two small tiles, to find out whether this Triton computes it."""

import triton
import triton.language as tl


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
