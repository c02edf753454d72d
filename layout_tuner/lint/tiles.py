"""Rules on what is done with a tile: LT004 indexing, LT005 taking apart, LT006 int64, LT007 masks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .findings import Finding
from .kernels import TAKEN_APART, Noted, argument
from .reporting import at


def indexed(noted: Noted) -> Iterator[Finding]:
    """LT004: an index of a tile other than a whole axis or a new one."""
    if noted.what != "subscript" or not any(value.is_tile and value.items is None for value in noted.values[0]):
        return
    assert isinstance(noted.node, ast.Subscript)
    index = noted.node.slice
    for each in index.elts if isinstance(index, ast.Tuple) else [index]:
        whole = isinstance(each, ast.Slice) and each.lower is each.upper is each.step is None
        new = isinstance(each, ast.Constant) and (each.value is None or each.value is Ellipsis)
        if not whole and not new:
            yield at(noted, "LT004", f"{ast.unparse(noted.node)} indexes a tile: Ascend's front end rejects that")
            return


def taken_apart(noted: Noted) -> Iterator[Finding]:
    """LT005: a tile that is reshaped, split or joined."""
    if noted.what in TAKEN_APART:
        yield at(noted, "LT005", f"{noted.what} changes the layout of a tile: look at what it compiles to")


def wide_comparison(noted: Noted) -> Iterator[Finding]:
    """LT006: a comparison of a tile in which one side is int64."""
    if noted.what != "comparison":
        return
    every = [value for values in noted.values for value in values]
    if any(value.is_tile for value in every) and any(value.wide for value in every):
        yield at(
            noted,
            "LT006",
            f"{ast.unparse(noted.node)} compares a tile in int64: it is computed one element at a time",
        )


def masked(noted: Noted) -> Iterator[Finding]:
    """LT007: a load that leaves masked elements undefined."""
    if noted.what != "load" or not any(value.is_tile for value in noted.values[0]):
        return
    assert isinstance(noted.node, ast.Call)
    if any(keyword.arg is None for keyword in noted.node.keywords):
        return
    mask = argument(noted.node, 1, "mask")
    if mask is None or (isinstance(mask, ast.Constant) and mask.value is None):
        return
    if argument(noted.node, 2, "other") is None:
        tensor = next((value.tensor for value in noted.values[0] if value.tensor), None)
        yield at(
            noted,
            "LT007",
            f"{tensor or 'a tensor'} is loaded with a mask and without other: what is masked is undefined",
            tensor=tensor,
        )
