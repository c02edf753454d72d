"""Every op as a custom operator, for calls that torch traces, transforms or watches; made from its declaration.

A compiler cannot look into a launch, so such a call becomes an operator. Which candidate it runs is decided while it is
traced, and stands in the graph as a ticket (see `tickets`).

What an operator returns is found by running its launch once on tensors without memory, with the launches recorded;
shapes are then written in the sizes of the call, which a compiler may know by name only.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame

from ..device import driver
from ..dispatch import router
from ..errors import PackingError
from ..launch import launcher
from ..launch.prepared import present
from ..spec import layouts, packing, registry, watched
from ..spec.declaration import OpSpec
from ..spec.layouts import Layout
from ..spec.operands import Outputs, Value
from ..spec.packing import chunks_of, prepare_chunk_indices, stand_in
from .tickets import Bound, Size, Tensors, bound, fix, note, ticket

# -- an op -----------------------------------------------------------------------------------------------------


def whole(what: Bound, operands: Sequence[Tensor]) -> list[Tensor | None]:
    """All operands of an op, from those that its operator was handed: the ones that are not None."""
    rest = iter(operands)
    return [None if x is None else next(rest) for x in what.call.tensors]


def arranged(what: Bound, tensors: Tensors) -> list[Tensor | None]:
    """The operands as the kernel reads them: time-axis operands in the plan's layouts, all others row-major."""
    plan = what.candidate.plan
    return [
        x if x is None else layouts.in_layout(x, plan[operand.name]) if operand.time_axis else x.contiguous()
        for operand, x in zip(what.spec.operands, tensors)
    ]


@functools.lru_cache(maxsize=4096)
def outline(said: str) -> tuple[tuple[list[str], torch.dtype] | None, ...]:
    """Symbols and dtype of every output of the call that a ticket describes; None for an output it does not have."""
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
    """Run the call that a ticket describes. An output that it does not have is an empty tensor."""
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
    """A number of chunks that only the values of `cu_seqlens` tell.

    Raises:
        ValueError: The tensor beside it is on the `meta` device, where no compiler has a name for the number.
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
    """`router.call` for tensors without memory, and for calls that torch transforms or watches.

    Raises:
        TypeError: A tensor is of a kind that no operator sees through.
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
    faults = watched.faults(dict(named))
    faults += [
        f"{name}: wanted a tensor, got {type(x).__name__}"
        for name, x in named.items()
        if x is not None and not isinstance(x, Tensor)
    ]
    if faults:
        raise TypeError(f"{spec.name}: " + "; ".join(faults))


def real(tensors: Tensors) -> bool:
    """Whether tensors have values, so that candidates can be tried and timed on them."""
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
    OPERATORS.update({spec.name: operator_of(spec.name) for spec in specs if not spec.is_chain})
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
