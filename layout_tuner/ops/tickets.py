"""Tickets: the choice for a call that torch traces, transforms or watches, written down as a text.

A ticket holds the facts of the call and the candidate. It is all that an operator needs to bind its launches, in this
process or in another that loads the compiled graph. B and T of a later call may differ from those of the ticket: a
graph serves every length, with the choice made for the length that it was traced with.
"""

from __future__ import annotations

import functools
import json
import operator
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.comptime import comptime

from ..device import driver, interpreter
from ..dispatch import router
from ..errors import UnsupportedProblemError
from ..launch.prepared import bind_candidate
from ..spec import registry, watched
from ..spec.declaration import Candidate, Launch, OpSpec, Problem
from ..spec.operands import Call, Value, dtype_name

Tensors = Sequence["Tensor | None"]
Facts = tuple[tuple[int, ...], tuple[int, ...], str, str]  # shape, strides, dtype, device
Size = Any  # a number, or what a compiler calls it

FREE = ("B", "T", "N", "NT")  # sizes that no kernel is compiled for
UNKNOWN = 4096  # stands for a size of which nobody knows anything while it is traced


# -- the facts of a call ---------------------------------------------------------------------------------------


class _Noted(threading.local):
    """What was noted of the tensors of the call that this thread traces."""

    facts: list[Facts | None]


_noted = _Noted()


def number(size: Any) -> int:
    """A size, or what it is at the moment where it is known by name only; nothing is fixed by asking."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else UNKNOWN


def facts(tensor: Tensor) -> Facts:
    """The facts of a tensor that a choice depends on."""
    shape, strides = tuple(map(number, tensor.shape)), tuple(map(number, tensor.stride()))
    return shape, strides, dtype_name(tensor), str(tensor.device)


def _begin(_: Any) -> None:
    _noted.facts = []


def _note(context: Any) -> None:
    variable = context.get_local("tensor")
    _noted.facts.append(None if variable.is_python_constant() else facts(variable.as_fake()))


def _nothing() -> None:
    """Eager code runs this in place of a note: `note` takes its notes in another way."""


def note(tensors: Tensors) -> None:
    """Note the facts of a call's tensors for its ticket, without fixing a size; a compiler runs the notes itself."""
    if torch.compiler.is_dynamo_compiling():
        comptime(_begin, _nothing)
        for tensor in tensors:  # noqa: B007  the note looks for it
            comptime(_note, _nothing)
    else:
        with watched.apart():
            _noted.facts = [None if x is None else facts(x) for x in tensors]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def fixed(op: str, count: int) -> tuple[tuple[int, ...], ...]:
    """Which dimensions of each of an op's operands have sizes that kernels are compiled for."""
    operands = registry.lookup(op).operands[:count]
    return tuple(tuple(i for i, symbol in enumerate(x.dims.split()) if symbol not in FREE) for x in operands)


def fix(op: str, tensors: Tensors) -> None:
    """Make the sizes that kernels are compiled for facts of the graph: asking for them as indices does that."""
    for tensor, dims in zip(tensors, fixed(op, len(tensors))):
        if tensor is not None:
            for i in dims:
                if i < tensor.dim():
                    operator.index(tensor.shape[i])


# -- the ticket ------------------------------------------------------------------------------------------------


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def ticket(op: str, options: tuple[Value, ...], scalars: tuple[bool, ...], tunable: bool = False) -> str:
    """Check a call whose tensors were noted, choose its candidate, and write the choice down.

    Args:
        op: Name of the op.
        options: The options of the call.
        scalars: Whether each of its numbers is given.
        tunable: Whether the tensors are in memory, so that tuning is possible.

    Raises:
        TypeError, ValueError, UnsupportedProblemError: As the op does.
    """
    spec = registry.lookup(op)
    noted = _noted.facts + [None] * (len(spec.operands) + 2 - len(_noted.facts))
    names = [*[operand.name for operand in spec.operands], "cu_seqlens", "chunk_indices"]
    first = next(fact[3] for fact in noted if fact is not None)
    elsewhere = [
        f"{name}: wanted device {first}, got {fact[3]}"
        for name, fact in zip(names, noted)
        if fact is not None and fact[3] != first
    ]
    if elsewhere:
        raise ValueError(f"{op}: " + "; ".join(elsewhere))
    said = {"op": op, "tensors": noted, "options": options, "scalars": scalars}
    call = call_of(spec, said)
    with watched.apart():
        key, device = spec.key(call), torch.device(first)
        candidate = spec.candidates(key)[0].id
        if device.type != "meta":
            interpreter.require_running(op, key.dtype, device)
            choice = router.current().choose(spec, key, device, tracing=not tunable)
            if choice.source == "reference":
                raise UnsupportedProblemError(op, [f"{choice.reason}; a compiled graph takes kernels only"])
            candidate = choice.candidate.id
    return json.dumps({**said, "candidate": candidate}, sort_keys=True)


def call_of(spec: OpSpec, said: Mapping[str, Any]) -> Call:
    """The call that a ticket describes, on tensors without memory."""
    with watched.apart():
        *tensors, cu_seqlens, chunk_indices = [None if fact is None else like(fact) for fact in said["tensors"]]
    return Call(
        tensors=tuple(tensors),
        options=tuple(said["options"]),
        scalars=tuple([1.0 if given else None for given in said["scalars"]]),
        cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices,
    )


def like(fact: Facts) -> Tensor:
    """A tensor of these facts, without memory."""
    return torch.empty_strided(fact[0], fact[1], dtype=getattr(torch, fact[2]), device="meta")


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A ticket, read.

    Attributes:
        spec: The op.
        call: The call that was traced, on tensors without memory.
        problem: Its key, on the chip.
        candidate: The candidate to run.
        launch: Its launch.
        device: The device to run on.
    """

    spec: OpSpec
    call: Call
    problem: Problem
    candidate: Candidate
    launch: Launch
    device: torch.device

    @property
    def BT(self) -> int:
        """Tokens of a chunk."""
        return self.problem.BT

    def sizes(self, tensors: Tensors, cu_seqlens: Tensor | None, chunk_indices: Tensor | None) -> dict[str, Size]:
        """The sizes of a call by symbol; NT is missing where nobody knows how many chunks a packed batch has."""
        v_first, sizes = self.problem.form.flag("state_v_first"), {"BT": self.BT}
        for operand, tensor in zip(self.spec.operands, tensors):
            if tensor is not None:
                for symbol, size in zip(operand.shape_symbols(v_first), tensor.shape):
                    sizes.setdefault(symbol, size)
        if cu_seqlens is None:
            sizes |= {"N": sizes["B"], "NT": -(-sizes["T"] // self.BT)}
        else:
            sizes["N"] = cu_seqlens.shape[0] - 1
        if chunk_indices is not None:
            sizes["NT"] = chunk_indices.shape[0]
        return sizes

    def shape(self, symbols: Sequence[str], sizes: Mapping[str, Size]) -> list[Size]:
        """A shape in the sizes of a call."""
        return [sizes[symbol] if symbol in sizes else int(symbol) for symbol in symbols]

    def symbols(self, dims: Sequence[str]) -> list[str]:
        """The dimensions of an output as the form has it: states may have V ahead of K."""
        *rest, last = dims
        state = dims[-2:] == ["K", "V"] and ("N" in dims or "NT" in dims)
        return [*rest[:-1], "V", "K"] if state and self.problem.form.flag("state_v_first") else [*rest, last]


@functools.lru_cache(maxsize=4096)
def bound(said: str) -> Bound:
    """Read a ticket. Where its candidate does not exist any more, the default takes its place.

    Args:
        said: The ticket.
    """
    read = json.loads(said)
    spec = registry.lookup(read["op"])
    with watched.apart():
        call, active = call_of(spec, read), router.current()
        device = torch.device(next(fact[3] for fact in read["tensors"] if fact is not None))
        here = torch.device("cpu") if device.type == "meta" else device
        key, chip = spec.key(call), driver.chip(here)

        def variant_of(stage: OpSpec, stage_key: Any) -> str | None:
            return active.stored_variant(stage, stage_key, here)

        problem = Problem(key=key, chip=chip, variant_of=variant_of)
        known = {candidate.id: candidate for candidate in spec.candidates(key, buffers=chip.buffers)}
        candidate = known.get(read["candidate"]) or spec.default(key, chip)
        launch = bind_candidate(spec, problem, candidate)
    return Bound(spec=spec, call=call, problem=problem, candidate=candidate, launch=launch, device=device)
