"""Rules on where the elements of a tile lie: LT001 along time, LT002 the innermost dimension."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .findings import Finding
from .kernels import Noted
from .reporting import at
from .values import UNKNOWN, Term

HEADS = re.compile(r"(H|HV|HQ|HK|NH|[Hh]eads|(num|n)_?(\w+_)?heads?|nheads?(_\w+)?|H_\w+)\Z")
# What kernels call the distance between two tokens.
TIME_STRIDE = re.compile(r"(stride|(s|stride)_(\w+_)?(t|l|tok|token|seq|time)|stride[tl])\Z")
NUMBER = re.compile(r"\d+\Z")


def along_time(noted: Noted) -> Iterator[Finding]:
    """LT001: the one axis of a tile is a number of heads apart from element to element."""
    if noted.what not in ("load", "store"):
        return
    strided: list[tuple[str | None, Term, str]] = []
    contiguous = False
    for value in noted.values[0]:
        own = [place for place, axis in enumerate(value.axes or ()) if axis is not None]
        if len(own) != 1 or value.axes is None:
            continue
        stride = value.axes[own[0]]
        assert stride is not None
        if stride == ():
            contiguous = True
        elif any(HEADS.match(name) or TIME_STRIDE.match(name) for name in stride):
            strided.append((value.tensor, stride, value.extents[own[0]] if value.extents else ""))
    if not strided:
        return
    tensor, stride, extent = strided[0]
    name = tensor or "a tensor"
    text = "*".join(stride)
    count = extent or "n"
    if noted.what == "store":
        cost = f"{count} bursts of one element instead of one burst of {count}"
    else:
        cost = f"{count} bursts of one element and {count} x 32 bytes of UB instead of one burst"
        known = all(name in noted.constants or NUMBER.match(name) for name in stride)
        cost += (
            ", then a deinterleave" if known else "; the stride is no constexpr, so there is not even a deinterleave"
        )
    else_ = "; another branch has it contiguous" if contiguous else ""
    done = "written" if noted.what == "store" else "read"
    yield at(
        noted,
        "LT001",
        f"{name} is {done} along time with stride {text}: {cost}{else_}",
        tensor=tensor,
    )


def innermost(noted: Noted) -> Iterator[Finding]:
    """LT002: elements of the last dimension of a block pointer do not lie side by side."""
    if noted.what != "block pointer":
        return
    for value in noted.values[0]:
        axes = value.axes or ()
        if len(axes) < 2 or axes[-1] in ((), UNKNOWN) or axes[-1] is None or () not in axes:
            continue
        text = "*".join(axes[-1])
        yield at(
            noted,
            "LT002",
            f"the innermost dimension of a block of {value.tensor or 'a tensor'} has stride {text} and another one has"
            " stride 1: a load and a transpose in UB",
            tensor=value.tensor,
        )
        return
