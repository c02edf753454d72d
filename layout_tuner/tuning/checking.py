"""Compares a candidate's results with the oracle's, within a bound of memory, and with other candidates' bit by bit.

A problem whose oracle would take more memory than it may is cut: the oracle sees some batch rows and some groups of
heads, the first and the last among them, whose addresses are the farthest. What it does not see is compared with the
results of a candidate that is right. Every element, seen or not, has to be finite: results are written to memory
that was NaN before.

Two layouts of one variant have to give the same bits, as a layout changes addresses and never arithmetic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..device import driver
from ..spec.declaration import Candidate, OpSpec
from ..spec.keys import Key
from ..spec.operands import Call, Output, Outputs, dtype_name
from . import memory, numerics
from .tuner import Check

WHOLE = ("B", "N")


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a problem that the oracle sees.

    Attributes:
        rows: Batch rows; None for all of them.
        groups: Heads of queries and keys with all value heads that read them; None for all of them.
        per_group: Value heads of a group.
    """

    rows: tuple[int, ...] | None = None
    groups: tuple[int, ...] | None = None
    per_group: int = 1

    @property
    def whole(self) -> bool:
        """Whether the part is the whole problem."""
        return self.rows is None and self.groups is None

    def of(self, tensor: torch.Tensor, symbols: Sequence[str], packed: bool) -> torch.Tensor:
        """The part of a tensor whose axes have these symbols."""
        for axis, symbol in enumerate(symbols):
            index: list[int] | None = None
            if symbol in WHOLE and not packed and self.rows is not None:
                index = list(self.rows)
            elif symbol == "H" and self.groups is not None:
                index = list(self.groups)
            elif symbol == "HV" and self.groups is not None:
                index = [group * self.per_group + i for group in self.groups for i in range(self.per_group)]
            if index is not None:
                tensor = tensor.index_select(axis, torch.tensor(index, device=tensor.device))
        return tensor


def part_of(spec: OpSpec, key: Key, limit: int) -> Part:
    """The largest part of a problem that the oracle can see within `limit` bytes; at least one group of one row.

    A result that is summed over the batch, as a parameter's gradient, needs every row.
    """
    rows, groups = key.B, max(key.H or key.HV, 1)
    per_group = max(key.HV, 1) // groups
    unit = max(1, memory.oracle_bytes(spec, key) // (rows * groups))
    if rows * groups * unit <= limit:
        return Part(per_group=per_group)
    per_row = all(set(WHOLE) & set(spec.shape_of(output)) for output in memory.returned(spec, key))
    affordable = max(1, limit // unit)
    if not per_row or rows == 1:
        return Part(groups=spread(groups, max(1, affordable // rows)), per_group=per_group)
    some = min(groups, max(1, math.isqrt(affordable)))
    chosen_rows = min(rows, max(1, affordable // some))
    some = min(groups, max(some, affordable // chosen_rows))
    return Part(rows=spread(rows, chosen_rows), groups=spread(groups, some), per_group=per_group)


def spread(n: int, some: int) -> tuple[int, ...] | None:
    """`count` numbers below n, evenly spread, the last always among them, the first if there are two; None for all."""
    if some >= n:
        return None
    if some == 1:
        return (n - 1,)
    return tuple(round(i * (n - 1) / (some - 1)) for i in range(some))


class Checker:
    """Compares candidates of one key.

    Args:
        spec: The op.
        key: The key.
        call: The arguments that every candidate runs on.
        limit: Bytes that the oracle may take.
    """

    def __init__(self, spec: OpSpec, key: Key, call: Call, limit: int) -> None:
        self.spec = spec
        self.key = key
        self.call = call
        self.part = part_of(spec, key, limit)
        self.default: tuple[str, Outputs] | None = None
        self.variant: tuple[Candidate, Outputs] | None = None

    @property
    def device(self) -> torch.device:
        """Where the arguments are."""
        return next(tensor.device for tensor in self.call.tensors if tensor is not None)

    @functools.cached_property
    def seen(self) -> Call:
        """The part of the arguments that the oracle sees."""
        if self.part.whole:
            return self.call
        v_first = any(
            option.turns_states and value is True for option, value in zip(self.spec.options, self.call.options)
        )
        tensors = [
            None if tensor is None else self.part.of(tensor, operand.shape_symbols(v_first), self.key.varlen)
            for operand, tensor in zip(self.spec.operands, self.call.tensors)
        ]
        return replace(self.call, tensors=tuple(tensors))

    @functools.cached_property
    def wanted(self) -> Outputs:
        """The oracle's results for what it sees."""
        with driver.exact_products(self.device):
            return as_tuple(self.spec.reference(**self.spec.arguments(self.seen)))

    @functools.cached_property
    def term_rms(self) -> Mapping[str, float]:
        """Root mean square of the terms of outputs that can cancel."""
        if self.spec.term_rms is None:
            return {}
        wanted = {output.name: tensor for output, tensor in zip(self.spec.outputs, self.wanted, strict=True)}
        with driver.exact_products(self.device):
            found = self.spec.term_rms(wanted, **self.spec.arguments(self.seen))
        return {name: float(value) for name, value in found.items()}

    def compare(self, candidate: Candidate, got: Outputs, *, default: bool) -> Check:
        """How a candidate's results compare; those of a right one are kept for the candidates after it.

        Args:
            candidate: Whose they are.
            got: All of them, row-major.
            default: Whether it is the default, with which bits are compared.
        """
        check = self.against_oracle(got)
        if not check.right:
            return check
        others = [kept for kept in (self.default, self.variant) if kept is not None]
        if not self.part.whole and others:
            check = self.against(got, others[0][1], check)
            if not check.right:
                return check
        check = self.bits(candidate, got, check)
        if check.right:
            self.keep(candidate, got, default)
        return check

    def keep(self, candidate: Candidate, got: Outputs, default: bool) -> None:
        """Remember the default's results, and those of the first layout of another variant at a time."""
        if default:
            self.default = (candidate.id, got)
            self.variant = None
        elif self.variant is None or self.variant[0].variant != candidate.variant:
            same = self.default is not None and variant_of(self.default[0]) == candidate.variant
            self.variant = None if same else (candidate, got)

    def against_oracle(self, got: Outputs) -> Check:
        """The output that is worst against its tolerance."""
        worst = Check(error=0.0, limit=numerics.FP32_TOLERANCE, output="")
        for output, tensor, wanted in zip(self.spec.outputs, got, self.wanted, strict=True):
            if (tensor is None) != (wanted is None):
                return Check(error=math.inf, limit=0.0, output=output.name)
            if tensor is None or wanted is None:
                continue
            seen = tensor
            if not self.part.whole:
                if not numerics.finite(tensor):
                    return Check(error=math.inf, limit=self.limit_of(output, tensor), output=output.name)
                seen = self.part.of(tensor, self.spec.shape_of(output), self.key.varlen)
            error = numerics.error(seen, wanted, self.term_rms.get(output.name, 0.0))
            worst = worse(worst, Check(error=error, limit=self.limit_of(output, tensor), output=output.name))
        return worst

    def against(self, got: Outputs, right: Outputs, check: Check) -> Check:
        """The check, or a worse one of the elements that the oracle does not see, by a right candidate's results.

        Each of two right results may be its tolerance away from the truth, so twice that is allowed.
        """
        for output, tensor, other in zip(self.spec.outputs, got, right, strict=True):
            if tensor is None or other is None:
                continue
            error = numerics.disagreement(tensor, other, self.term_rms.get(output.name, 0.0))
            own = Check(error=error, limit=2 * self.limit_of(output, tensor), output=f"{output.name} beyond the oracle")
            if not own.right:
                return own
            check = worse(check, replace(own, output=output.name))
        return check

    def bits(self, candidate: Candidate, got: Outputs, check: Check) -> Check:
        """The check, with `exact` and `differs` filled in."""
        exact = None
        if self.default is not None:
            exact = self.differing(got, self.default[1]) is None
            if not exact and variant_of(self.default[0]) == candidate.variant:
                return self.broken(got, self.default[0], self.default[1], check)
        kept = self.variant if self.variant is not None and self.variant[0].variant == candidate.variant else None
        if kept is not None and self.differing(got, kept[1]) is not None:
            return self.broken(got, kept[0].id, kept[1], check)
        return replace(check, exact=exact)

    def broken(self, got: Outputs, other: str, right: Outputs, check: Check) -> Check:
        """The check with the output named in which a layout changes bits."""
        name = self.differing(got, right)
        return replace(check, exact=False, differs=f"{name}: not the bits of {other}, though only the layout differs")

    def differing(self, got: Outputs, right: Outputs) -> str | None:
        """The first output of which a bit differs; None where none does."""
        for output, tensor, other in zip(self.spec.outputs, got, right, strict=True):
            if tensor is not None and other is not None and not numerics.identical(tensor, other):
                return output.name
        return None

    def limit_of(self, output: Output, tensor: torch.Tensor) -> float:
        """Largest error allowed for an output."""
        # A result rounded to 16 bits is no closer than that, whatever it was computed from.
        dtype = dtype_name(tensor) if tensor.element_size() == 2 else self.key.dtype
        own = self.spec.tolerances.get(output.name)
        return numerics.tolerance(dtype, own)


def worse(one: Check, other: Check) -> Check:
    """Whichever check is nearer to its limit, or farther beyond it."""
    return other if other.error / other.limit >= one.error / one.limit else one


def variant_of(candidate: str) -> str:
    """The variant in a candidate's id."""
    return candidate.partition("/")[0]


def as_tuple(results: object) -> Outputs:
    """An oracle's results as a tuple."""
    return tuple(results) if isinstance(results, tuple) else (results,)  # type: ignore[return-value]
