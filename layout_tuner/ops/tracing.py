"""Every op as a custom operator, for calls that torch traces, transforms or watches; made from its declaration.

A compiler cannot look into a launch, so such a call becomes an operator. Which candidate it runs is decided while it is
traced and stands in the graph as a text, the ticket: the facts of the call and the candidate. A ticket is all that an
operator needs to bind its launches, in this process or in another that loads the compiled graph. B and T may differ
from those of the ticket: a graph serves every length, with the choice made for the length that it was traced with.

What an operator returns is found by running its launch once on tensors without memory, with the launches recorded;
shapes are then written in the sizes of the call, which a compiler may know by name only.
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
from torch._C._dynamo import eval_frame
from torch._dynamo.comptime import comptime

from ..device import driver, interpreter
from ..dispatch import router
from ..errors import PackingError
from ..launch import launcher
from ..launch.prepared import present
from ..spec import layouts, packing, registry, watched
from ..spec.declaration import Candidate, Launch, OpSpec, Problem
from ..spec.layouts import Layout
from ..spec.operands import Call, Outputs, Value, dtype_name
from ..spec.packing import chunks_of, prepare_chunk_indices, stand_in

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
    """What a decision depends on."""
    shape, strides = tuple(map(number, tensor.shape)), tuple(map(number, tensor.stride()))
    return shape, strides, dtype_name(tensor), str(tensor.device)


def _begin(_: Any) -> None:
    _noted.facts = []


def _note(context: Any) -> None:
    variable = context.get_local("tensor")
    _noted.facts.append(None if variable.is_python_constant() else facts(variable.as_fake()))


def _nothing() -> None:
    """What eager code does in place of a note, which it takes in another way."""


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
    """Check a call whose tensors were noted, decide, and write the decision down.

    Args:
        op: Name of the op.
        options: Of the call.
        scalars: Which of its numbers are given.
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
            candidate = router.current().choose(spec, key, device, tracing=not tunable).candidate.id
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
    """What a ticket names.

    Attributes:
        spec: The op.
        call: The call that was traced, on tensors without memory.
        problem: Its key, on the chip.
        candidate: What to run.
        launch: It, bound.
        device: Where.
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
        """The sizes of a call by symbol; without NT where nobody knows how many chunks a packed batch has."""
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
    """What a ticket names; a candidate that is no longer there gives way to the default.

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
        known = {candidate.id: candidate for candidate in spec.candidates(key)}
        candidate = known.get(read["candidate"]) or spec.default(key, chip)
        launch = spec.bind(problem, candidate)
    return Bound(spec=spec, call=call, problem=problem, candidate=candidate, launch=launch, device=device)


# -- an op -----------------------------------------------------------------------------------------------------


def whole(what: Bound, operands: Sequence[Tensor]) -> list[Tensor | None]:
    """An op's operands from those that its operator was handed, which are those that are there."""
    rest = iter(operands)
    return [None if x is None else next(rest) for x in what.call.tensors]


def arranged(what: Bound, tensors: Tensors) -> list[Tensor | None]:
    """The operands as the kernel wants them: row-major, and time-axis operands in the plan's layouts."""
    plan = what.candidate.plan
    return [
        x if x is None else layouts.in_layout(x, plan[operand.name]) if operand.time_axis else x.contiguous()
        for operand, x in zip(what.spec.operands, tensors)
    ]


@functools.lru_cache(maxsize=4096)
def outline(said: str) -> tuple[tuple[list[str], torch.dtype] | None, ...]:
    """Symbols and dtype of every output of the call that a ticket describes; None for one that it has not."""
    what = bound(said)
    call, outputs = what.call, what.spec.outputs
    with watched.apart(), launcher.recording():
        chunks = None if call.cu_seqlens is None else stand_in(call.cu_seqlens, what.BT)
        made = what.launch(*arranged(what, call.tensors), *call.scalars, call.cu_seqlens, chunks)
    return tuple(
        None if x is None else (what.symbols(what.spec.shape_of(output)), x.dtype) for output, x in zip(outputs, made)
    )


def operate(
    given: list[Tensor], scalars: list[float], cu_seqlens: Tensor | None, chunk_indices: Tensor | None, said: str
) -> list[Tensor]:
    """Run the call that a ticket describes; an empty tensor for an output that it has not."""
    what, rest = bound(said), iter(scalars)
    operands = whole(what, given)
    numbers = [None if scalar is None else next(rest) for scalar in what.call.scalars]
    chunks = chunk_indices
    if cu_seqlens is not None:
        chunks = chunks_of(cu_seqlens, chunk_indices, what.BT, present(operands[0]).shape[1])
        for operand, x in zip(what.spec.operands, operands):
            if x is not None and "NT" in operand.dims.split() and x.shape[1] != chunks.shape[0]:
                raise PackingError(
                    f"{what.spec.name}: {operand.name}: wanted NT={chunks.shape[0]} chunks of cu_seqlens, got "
                    f"states for {x.shape[1]}"
                )
    with driver.guard(what.device):
        made: Outputs = what.launch(*arranged(what, operands), *numbers, cu_seqlens, chunks)
        results: list[Tensor] = []
        for output, x in zip(what.spec.outputs, made):
            if x is None:
                x = present(operands[0]).new_empty(0)
            elif what.candidate.plan.t_contig(output.name):
                x = layouts.relayout(x, Layout.STRIDE_HV)
            results.append(owned(x, [*operands, *results]))
    return results


def owned(result: Tensor, others: Tensors) -> Tensor:
    """A result with memory of its own: an operator may not return what it was given, nor the same memory twice."""
    memory = result.untyped_storage()._cdata
    shared = any(x is not None and x.untyped_storage()._cdata == memory for x in others)
    return result.clone() if shared else result.contiguous()


def pretend(
    given: list[Tensor], scalars: list[float], cu_seqlens: Tensor | None, chunk_indices: Tensor | None, said: str
) -> list[Tensor]:
    """What `operate` returns, without values."""
    what, made, main = bound(said), outline(said), given[0]
    sizes = what.sizes(whole(what, given), cu_seqlens, chunk_indices)
    if "NT" not in sizes and any(each is not None and "NT" in each[0] for each in made):
        sizes["NT"] = unknown_count(what.spec.name, main)
    return [
        main.new_empty(0) if each is None else main.new_empty(what.shape(each[0], sizes), dtype=each[1])
        for each in made
    ]


def unknown_count(op: str, beside: Tensor) -> Size:
    """A number of chunks that is in the values of `cu_seqlens`.

    Raises:
        ValueError: A tensor on the `meta` device beside it, where nobody has a name for it.
    """
    if watched.is_meta(beside):
        raise ValueError(f"{op}: cu_seqlens on the meta device say nothing about chunks: give chunk_indices")
    return torch.library.get_ctx().new_dynamic_size()


SCHEMA = "(Tensor[] given, float[] scalars, Tensor? cu_seqlens, Tensor? chunk_indices, str said) -> Tensor[]"


@functools.cache
def operator_of(op: str) -> Any:
    """The custom operator of an op, `layout_tuner::<op>`."""
    made = torch.library.custom_op(f"layout_tuner::{op}", operate, mutates_args=(), schema=SCHEMA)
    made.register_fake(pretend)
    return made


@torch.library.custom_op("layout_tuner::prepare_chunk_indices", mutates_args=())
def chunk_indices_op(cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None, tokens: int | None) -> Tensor:
    """A traced `prepare_chunk_indices`."""
    return prepare_chunk_indices(cu_seqlens, chunk_size, cu_seqlens_cpu, tokens).clone()


@chunk_indices_op.register_fake
def _(cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None, tokens: int | None) -> Tensor:
    return cu_seqlens.new_empty((unknown_count("prepare_chunk_indices", cu_seqlens), 2))


@torch.library.custom_op("layout_tuner::prepare_chunk_offsets", mutates_args=())
def chunk_offsets_op(cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None) -> Tensor:
    """A traced `prepare_chunk_offsets`."""
    return packing.prepare_chunk_offsets(cu_seqlens, chunk_size, cu_seqlens_cpu).clone()


@chunk_offsets_op.register_fake
def _(cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None) -> Tensor:
    return cu_seqlens.new_empty(cu_seqlens.shape, dtype=torch.int64)


# -- in place of what is called --------------------------------------------------------------------------------


def traced(
    spec: OpSpec,
    tensors: tuple[Tensor | None, ...],
    options: tuple[Value, ...],
    scalars: tuple[float | None, ...],
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> Outputs:
    """`router.call` while a compiler traces it."""
    note((*tensors, cu_seqlens, chunk_indices))
    fix(spec.name, tensors)
    chosen = tuple([x if isinstance(x, (bool, str)) else operator.index(x) for x in options])
    said = ticket(spec.name, chosen, tuple([x is not None for x in scalars]))
    numbers = [float(x) for x in scalars if x is not None]
    given = [x for x in tensors if x is not None]
    made = OPERATORS[spec.name](given, numbers, cu_seqlens, chunk_indices, said)
    has = outputs_of(said)
    return tuple([made[i] if has[i] else None for i in range(len(has))])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def outputs_of(said: str) -> tuple[bool, ...]:
    """Which outputs the call of a ticket has."""
    return tuple(each is not None for each in outline(said))


def called_elsewhere(
    spec: OpSpec,
    tensors: tuple[Tensor | None, ...],
    options: tuple[Value, ...],
    scalars: tuple[float | None, ...],
    cu_seqlens: Tensor | None,
    chunk_indices: Tensor | None,
) -> Outputs:
    """The same for a call on tensors that are not in memory, or that torch transforms or watches.

    Raises:
        TypeError: Tensors of a kind that no operator sees through.
    """
    numbers = router.as_floats(spec, scalars)
    given = (*tensors, cu_seqlens, chunk_indices)
    names = [*[operand.name for operand in spec.operands], "cu_seqlens", "chunk_indices"]
    require_seen(spec, dict(zip(names, given)))
    note(given)
    said = ticket(spec.name, options, tuple([x is not None for x in scalars]), real(given))
    present_ones, known = [x for x in tensors if x is not None], [x for x in numbers if x is not None]
    made = operator_of(spec.name)(present_ones, known, cu_seqlens, chunk_indices, said)
    return tuple([x if has else None for x, has in zip(made, outputs_of(said))])


def require_seen(spec: OpSpec, named: Mapping[str, Any]) -> None:
    """Refuse what is no tensor, or one of a kind that no operator sees through.

    Raises:
        TypeError: Names each of them.
    """
    found = watched.faults(dict(named))
    found += [
        f"{name}: wanted a tensor, got {type(x).__name__}"
        for name, x in named.items()
        if x is not None and not isinstance(x, Tensor)
    ]
    if found:
        raise TypeError(f"{spec.name}: " + "; ".join(found))


def real(tensors: Tensors) -> bool:
    """Whether tensors have values, so that what is found out with them holds."""
    pretended = any(x is not None and (x.is_meta or type(x).__name__ in watched.STAND_INS) for x in tensors)
    return not pretended and not watched.faking()


def traced_chunks(
    cu_seqlens: Tensor,
    chunk_indices: Tensor | None,
    chunk_size: int,
    tokens: int,
    cu_seqlens_cpu: Tensor | None = None,
) -> Tensor:
    """`chunks_of` while a compiler traces it."""
    if chunk_indices is not None:
        return chunk_indices
    return traced_chunk_indices(cu_seqlens, chunk_size, cu_seqlens_cpu, tokens)


def traced_chunk_indices(
    cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None, tokens: int | None = None
) -> Tensor:
    """`prepare_chunk_indices` while a compiler traces it."""
    made: Tensor = chunk_indices_op(cu_seqlens, chunk_size, cu_seqlens_cpu, tokens)
    return made


def traced_chunk_offsets(cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """`prepare_chunk_offsets` while a compiler traces it."""
    made: Tensor = chunk_offsets_op(cu_seqlens, chunk_size, cu_seqlens_cpu)
    return made


OPERATORS: dict[str, Any] = {}


def trace_all() -> None:
    """Make an operator of every op but those that have one of their own, and let compilers and the router find it."""
    specs = [registry.lookup(name) for name in registry.names()]
    OPERATORS.update({spec.name: operator_of(spec.name) for spec in specs if spec.gradient_option is None})
    for function, instead in (
        (router.call, traced),
        (packing.chunks_of, traced_chunks),
        (packing.prepare_chunk_indices, traced_chunk_indices),
        (packing.prepare_chunk_offsets, traced_chunk_offsets),
    ):
        torch.compiler.substitute_in_graph(function)(instead)
        # Where a graph breaks at one of them it runs as it is, and all that it calls: `torch.compiler.disable` says the
        # same, but its wrapper costs every call.
        if hasattr(eval_frame, "set_code_exec_strategy"):  # not in torch before 2.7
            skip = eval_frame._FrameAction.SKIP
            eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    router.elsewhere = called_elsewhere
