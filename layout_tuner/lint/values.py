"""What an expression of a kernel is to the linter: how far apart the elements of each axis of its tile lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Final

# A product of names and numbers, sorted; () is 1.
Term = tuple[str, ...]
UNKNOWN: Final[Term] = ("?",)


class _Unset:
    """A value that is no literal."""


UNSET: Final = _Unset()
# Alternatives that are kept of a name which several branches bind.
KEPT: Final = 6


@dataclass(frozen=True, kw_only=True)
class Value:
    """One thing that an expression may be.

    Attributes:
        tensor: The parameter whose address it starts from.
        term: A scalar as a product.
        axes: Stride of each axis of a tile, in elements: None for a broadcast axis. () for a scalar; None for a tile of
            unknown rank.
        extents: Text of the length of each axis, as far as it is known.
        wide: It is int64.
        literal: The Python value, where it is one.
        items: Elements of a tuple.
    """

    tensor: str | None = None
    term: Term = UNKNOWN
    axes: tuple[Term | None, ...] | None = ()
    extents: tuple[str, ...] = ()
    wide: bool = False
    literal: object = UNSET
    items: tuple[Alternatives, ...] | None = None

    @property
    def is_tile(self) -> bool:
        """Whether it has axes."""
        return self.axes is None or bool(self.axes)


Alternatives = tuple[Value, ...]
SCALAR: Final = Value()
TILE: Final = Value(axes=None)


def unique(values: list[Value]) -> Alternatives:
    """Alternatives without repetition, as many as are kept."""
    return tuple(dict.fromkeys(values))[:KEPT]


def times(left: Term, right: Term) -> Term:
    """A product."""
    if left == UNKNOWN or right == UNKNOWN:
        return UNKNOWN
    return tuple(sorted(left + right))


def plus(left: Value, right: Value) -> Value:
    """A sum: of offsets, or of an address and an offset."""
    tensor = left.tensor or right.tensor
    wide = left.wide or right.wide
    if not left.is_tile and not right.is_tile:
        return Value(tensor=tensor, wide=wide)
    axes, extents = _aligned(left, right)
    return Value(tensor=tensor, wide=wide, axes=axes, extents=extents)


def _aligned(left: Value, right: Value) -> tuple[tuple[Term | None, ...] | None, tuple[str, ...]]:
    """Axes and extents of a sum: an axis that one side lacks is as the other side has it."""
    if left.axes is None or right.axes is None:
        return None, ()
    rank = max(len(left.axes), len(right.axes))
    a = (None,) * (rank - len(left.axes)) + left.axes
    b = (None,) * (rank - len(right.axes)) + right.axes
    x = ("",) * (rank - len(left.extents)) + left.extents
    y = ("",) * (rank - len(right.extents)) + right.extents
    axes = tuple(q if p is None else p if q is None else UNKNOWN for p, q in zip(a, b))
    return axes, tuple(p or q for p, q in zip(x, y))


def multiplied(left: Value, right: Value) -> Value:
    """A product: a tile of offsets by a scalar stride keeps its axes."""
    wide = left.wide or right.wide
    if left.is_tile and right.is_tile:
        axes, extents = _aligned(left, right)
        known = None if axes is None else tuple(None if axis is None else UNKNOWN for axis in axes)
        return Value(axes=known, extents=extents, wide=wide)
    if right.is_tile:
        left, right = right, left
    if left.is_tile:
        axes = None if left.axes is None else tuple(None if a is None else times(a, right.term) for a in left.axes)
        return Value(axes=axes, extents=left.extents, wide=wide)
    return Value(term=times(left.term, right.term), wide=wide)


def computed(left: Value, right: Value) -> Value:
    """Whatever else is computed of two values, element by element."""
    if not left.is_tile and not right.is_tile:
        return Value(wide=left.wide or right.wide)
    axes, extents = _aligned(left, right)
    known = None if axes is None else tuple(None if axis is None else UNKNOWN for axis in axes)
    return Value(axes=known, extents=extents, wide=left.wide or right.wide)


def elementwise(value: Value) -> Value:
    """What a function makes of each element."""
    return replace(computed(value, SCALAR), wide=False)


def pairs(left: Alternatives, right: Alternatives) -> list[tuple[Value, Value]]:
    """All combinations."""
    return list(product(left, right))
