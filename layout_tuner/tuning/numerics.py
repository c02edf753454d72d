"""How far a result is from the oracle, and how far it may be.

The error is the root mean square of the difference over that of the oracle's result. Where a result is a difference of
sums, which may cancel, the root mean square of the summed terms takes its place if it is larger; the op says how large
its terms are. Where the oracle's result is zero throughout, the result must be zero. A NaN or an infinity that the
oracle's result lacks is an infinite error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

# Elements of a large result that are compared at a time.
PIECE = 1 << 24
FP32_TOLERANCE = 1e-4
# 16-bit inputs against an fp32 or better oracle.
SIXTEEN_BIT_TOLERANCE = 0.006


def rms(tensor: torch.Tensor) -> float:
    """Root mean square of all elements, 0 for an empty tensor."""
    if tensor.numel() == 0:
        return 0.0
    wide = tensor.detach().to(torch.float32)
    return float(wide.square().mean().sqrt())


def error(got: torch.Tensor, wanted: torch.Tensor, term_rms: float = 0.0) -> float:
    """Relative error of a result.

    Args:
        got: The result, any dtype and strides.
        wanted: The oracle's result, same shape.
        term_rms: Root mean square of the terms summed into it, where they may cancel.

    Returns:
        `rms(got - wanted) / max(rms(wanted), term_rms)`; 0 where both are zero, infinity where `got` is not finite
        or is not zero though every term is.
    """
    if got.shape != wanted.shape:
        return float("inf")
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    wide = wanted.dtype if wanted.dtype == torch.float64 else torch.float32
    difference = rms(got.to(wide) - wanted.to(wide))
    size = max(rms(wanted), term_rms)
    if size == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / size


def pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tensors of one shape, a bounded number of elements at a time."""
    yield from zip(*[torch.split(tensor.detach().reshape(-1), PIECE) for tensor in tensors])


def finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite, in bounded memory."""
    return all(bool(torch.isfinite(part).all()) for (part,) in pieces(tensor))


def disagreement(got: torch.Tensor, right: torch.Tensor, term_rms: float = 0.0) -> float:
    """`error` of a result against another one, in bounded memory."""
    if got.shape != right.shape or not finite(got):
        return float("inf")
    difference = size = 0.0
    for ours, theirs in pieces(got, right):
        wide = theirs.to(torch.float32)
        size += float(wide.square().sum())
        difference += float((ours.to(torch.float32) - wide).square().sum())
    mean = max(1, right.numel())
    size, difference = max(math.sqrt(size / mean), term_rms), math.sqrt(difference / mean)
    if size == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / size


def identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether every bit of two results is the same, in bounded memory."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(one.element_size(), one.dtype)
    return all(torch.equal(a.view(bits), b.view(bits)) for a, b in pieces(one, other))


def tolerance(dtype: str, own: float | None = None) -> float:
    """Largest error allowed for results computed from inputs of `dtype`, on a device and in the interpreter.

    Args:
        dtype: Of the op's main tensor, by torch's name.
        own: The op's own tolerance for 16-bit inputs, else the common one.
    """
    if dtype == "float32":
        return FP32_TOLERANCE
    return SIXTEEN_BIT_TOLERANCE if own is None else own
