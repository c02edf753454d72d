"""Affine maps of MLIR: parsed once, evaluated on integers.

    affine_map<(d0)[s0, s1] -> ((-d0 + s1) ceildiv s0, 4)>

`floordiv` and `ceildiv` round toward minus and plus infinity, `mod` has the sign of the divisor, as in Python.
"""

import functools
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

_TOKEN: Final = re.compile(r"\s*(->|[-+*()\[\],]|[A-Za-z_]\w*|\d+)")
_Expression = Callable[[Sequence[int]], int]
_Item = TypeVar("_Item")
_PRODUCTS: Final[dict[str, Callable[[int, int], int]]] = {
    "*": operator.mul,
    "floordiv": operator.floordiv,
    "ceildiv": lambda a, b: -(-a // b),
    "mod": operator.mod,
}


@dataclass(frozen=True)
class AffineMap:
    """A map from dimensions and symbols to integers."""

    text: str
    inputs: int
    results: tuple[_Expression, ...]

    def __call__(self, *values: int) -> tuple[int, ...]:
        """The results for the dimensions, then the symbols."""
        if len(values) != self.inputs:
            raise ValueError(f"affine_map<{self.text}> takes {self.inputs} values, got {len(values)}")
        return tuple(result(values) for result in self.results)


@functools.lru_cache(maxsize=4096)
def parse_affine_map(text: str) -> AffineMap:
    """The map of the text between `affine_map<` and `>`.

    Raises:
        ValueError: not an affine map.
    """
    return _Parser(text).parse()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[str] = _TOKEN.findall(text)
        if "".join(self._tokens) != "".join(text.split()):
            raise ValueError(f"not an affine map: {text!r}")
        self._tokens.append("")
        self._at = 0
        self._names: dict[str, int] = {}

    def parse(self) -> AffineMap:
        self._inputs("(", ")")
        if self._next() == "[":
            self._inputs("[", "]")
        self._expect("->")
        results = self._list("(", ")", self._sum)
        self._expect("")
        return AffineMap(self._text, len(self._names), tuple(results))

    def _next(self) -> str:
        return self._tokens[self._at]

    def _take(self) -> str:
        token = self._next()
        self._at += 1
        return token

    def _expect(self, token: str) -> None:
        if self._take() != token:
            raise ValueError(f"not an affine map: {self._text!r}: wanted {token!r}")

    def _list(self, opening: str, closing: str, item: Callable[[], _Item]) -> list[_Item]:
        self._expect(opening)
        items: list[_Item] = []
        while self._next() != closing:
            if items:
                self._expect(",")
            items.append(item())
        self._expect(closing)
        return items

    def _inputs(self, opening: str, closing: str) -> None:
        for name in self._list(opening, closing, self._take):
            self._names[name] = len(self._names)

    def _sum(self) -> _Expression:
        left = self._product()
        while self._next() in ("+", "-"):
            apply = operator.add if self._take() == "+" else operator.sub
            left = _binary(apply, left, self._product())
        return left

    def _product(self) -> _Expression:
        left = self._unary()
        while self._next() in _PRODUCTS:
            left = _binary(_PRODUCTS[self._take()], left, self._unary())
        return left

    def _unary(self) -> _Expression:
        token = self._take()
        if token == "-":
            operand = self._unary()
            return lambda values: -operand(values)
        if token == "(":
            inner = self._sum()
            self._expect(")")
            return inner
        if token.isdigit():
            number = int(token)
            return lambda values: number
        if token not in self._names:
            raise ValueError(f"not an affine map: {self._text!r}: unknown {token!r}")
        place = self._names[token]
        return lambda values: values[place]


def _binary(apply: Callable[[int, int], int], left: _Expression, right: _Expression) -> _Expression:
    return lambda values: apply(left(values), right(values))
