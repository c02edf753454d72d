"""A chain as a custom operator with autograd, for calls that torch traces, transforms or watches.

As for every op (see `tracing`), the candidate is chosen while a call is traced and stands in the graph as its ticket.
That makes the layout of what the forward leaves for the backward a fact of the graph. What the operators return is
found by running the chain once on tensors without memory; its shapes are written in the sizes of the call.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...device import driver
from ...launch import launcher
from ...launch.prepared import present
from ...spec import layouts, registry, watched
from ...spec.declaration import OpSpec
from ...spec.layouts import Layout
from ...spec.operands import Operand, Outputs, Value
from ...spec.packing import chunks_of as packed_chunks
from ...spec.packing import stand_in
from .. import tracing
from ..tickets import Bound, bound, fix, note, ticket
from .chain import Chain, Packed, Scalars

PACKED = ("cu_seqlens", "chunk_indices", "cu_seqlens_cpu")


def operands_of(spec: OpSpec) -> tuple[Operand, ...]:
    """What a caller passes: the operands but for the gradients of outputs."""
    return tuple(operand for operand in spec.operands if not operand.given_with)


def traced(
    spec: OpSpec,
    inputs: tuple[Tensor | None, ...],
    options: tuple[Value, ...],
    scalars: Scalars = (),
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    tunable: bool = False,
) -> Outputs:
    """`autograd.call` while torch traces, transforms or watches it.

    Args:
        spec: The op, of which `trace` made an operator.
        inputs, options, scalars, cu_seqlens, chunk_indices: As `autograd.call` takes them.
        cu_seqlens_cpu: The sequence starts on the host, where the caller has them.
        tunable: Whether the tensors are in memory, so that tuning is possible.
    """
    grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    note((*inputs, *withheld(spec.name), cu_seqlens, chunk_indices))
    fix(spec.name, inputs)
    said = ticket(spec.name, (*options, grad), tuple([x is not None for x in scalars]), tunable)
    results = OPERATORS[spec.name](*inputs, cu_seqlens, chunk_indices, cu_seqlens_cpu, *scalars, said)
    has = outputs_of(said)
    return tuple([results[i] if has[i] else None for i in range(len(has))])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def withheld(op: str) -> tuple[None, ...]:
    """None for each operand of an op that no caller passes."""
    return registry.lookup(op).withheld


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def outputs_of(said: str) -> tuple[bool, ...]:
    """Which outputs the call of a ticket has."""
    return tuple(dtype is not None for dtype in made_by(said).outputs)


def chain_of(said: str) -> tuple[Bound, Chain[Any]]:
    """The chain that a ticket names."""
    what = bound(said)
    assert isinstance(what.launch, Chain)
    return what, what.launch


def packed_of(what: Bound, lists: Sequence[Tensor | None], tokens: int) -> Packed:
    """Sequence starts and chunks of a packed batch, as the caller gave them or made from its sequence starts."""
    cu_seqlens, chunk_indices, cu_seqlens_cpu = lists
    if cu_seqlens is None:
        return None, None
    return cu_seqlens, packed_chunks(cu_seqlens, chunk_indices, what.BT, tokens, cu_seqlens_cpu)


def arranged(chain: Chain[Any], inputs: Sequence[Tensor | None]) -> list[Any]:
    """The inputs as the chain takes them: row-major, and gates in the layouts that they arrived in while traced."""
    form = chain.problem.form
    made: list[Any] = []
    for operand, tensor in zip(chain.spec.operands, inputs):
        if tensor is None:
            made.append(None)
        elif operand.time_axis:
            arrives = layouts.as_read(form.arrival(operand.name) or Layout.STRIDE_HV)
            made.append(layouts.in_layout(tensor, arrives))
        else:
            made.append(tensor.contiguous())
    return made


def turned(chain: Chain[Any], name: str, tensor: Tensor) -> Tensor:
    """A gate between its shape and one that is row-major whatever its layout: operators return plain memory."""
    return tensor.transpose(1, 2) if name in chain.turning and chain.layout is Layout.T_CONTIG else tensor


class Made(NamedTuple):
    """What the forward of a ticket returns: dtypes of its outputs, and of what it makes for the backward by name."""

    outputs: tuple[torch.dtype | None, ...]
    saved: dict[str, torch.dtype]


@functools.lru_cache(maxsize=4096)
def made_by(said: str) -> Made:
    """The forward of a ticket, run on tensors without memory; all else that it saves is an input."""
    what, chain = chain_of(said)
    inputs = what.call.tensors[: chain.inputs]
    outputs, saved = pretended_forward(what, chain)
    return Made(
        tuple(None if x is None else x.dtype for x in outputs),
        {
            name: tensor.dtype
            for name, tensor in zip(saved._fields, saved)
            if tensor is not None and not any(tensor is given for given in inputs)
        },
    )


def pretended_forward(what: Bound, chain: Chain[Any]) -> tuple[Outputs, Any]:
    """The forward of the call that was traced, on tensors without memory."""
    call = what.call
    with watched.apart(), launcher.recording():
        chunks = None if call.cu_seqlens is None else stand_in(call.cu_seqlens, what.BT)
        inputs = arranged(chain, call.tensors[: chain.inputs])
        return chain.forward(inputs, call.scalars, (call.cu_seqlens, chunks))


def dims_of(what: Bound, chain: Chain[Any], name: str) -> list[str]:
    """The dimensions of a tensor that the forward leaves for the backward."""
    source = chain.sources.get(name)
    dims = chain.made.get(name) or next(operand.dims for operand in what.spec.operands if operand.name == source)
    symbols = what.symbols(dims.split()) if len(dims.split()) > 1 else dims.split()
    turns = name in chain.turning and chain.layout is Layout.T_CONTIG
    return [symbols[0], symbols[2], symbols[1], *symbols[3:]] if turns else symbols


def kept(chain: Chain[Any], saved: Any, inputs: Sequence[Tensor | None], made: Mapping[str, object]) -> list[Tensor]:
    """What the forward made for the backward; an empty tensor for what is an input or absent.

    Args:
        chain: The chain.
        saved: All that the backward needs.
        inputs: The operator's inputs, which it may not return.
        made: Names of what is kept, a fact of the graph.
    """
    results: list[Tensor] = []
    for name, tensor in zip(saved._fields, saved):
        if name not in made:
            results.append(present(inputs[0]).new_empty(0))
            continue
        plain = turned(chain, name, present(tensor)).contiguous()
        results.append(tracing.owned(plain, [*inputs, *results]))
    return results


def split(spec: OpSpec, arguments: Sequence[Any]) -> tuple[list[Tensor | None], list[Tensor | None], Scalars, str]:
    """Inputs, lists of a packed batch, numbers and ticket of an operator's arguments."""
    count = len(operands_of(spec))
    *scalars, said = arguments[count + len(PACKED) :]
    return list(arguments[:count]), list(arguments[count : count + len(PACKED)]), tuple(scalars), said


def operate(spec: OpSpec, *arguments: Any) -> list[Tensor]:
    """A traced call: its outputs, an empty tensor for each that it has not, and with gradients what is `kept`."""
    inputs, lists, scalars, said = split(spec, arguments)
    what, chain = chain_of(said)
    first = present(inputs[0])
    with torch.autocast(first.device.type, enabled=False), driver.guard(what.device):
        packed = packed_of(what, lists, first.shape[1])
        outputs, saved = chain.forward(arranged(chain, inputs), scalars, packed)
        results = [first.new_empty(0) if x is None else x for x in outputs]
        return [*results, *kept(chain, saved, inputs, made_by(said).saved)] if chain.grad else results


def pretend(spec: OpSpec, *arguments: Any) -> list[Tensor]:
    """What `operate` returns, without values."""
    inputs, (cu_seqlens, chunk_indices, _), _, said = split(spec, arguments)
    (what, chain), made, first = chain_of(said), made_by(said), present(inputs[0])
    sizes = what.sizes(inputs, cu_seqlens, chunk_indices)

    def empty(dims: Sequence[str], dtype: torch.dtype | None) -> Tensor:
        return first.new_empty(0) if dtype is None else first.new_empty(what.shape(dims, sizes), dtype=dtype)

    results = [empty(what.symbols(spec.shape_of(output)), dtype) for output, dtype in zip(spec.outputs, made.outputs)]
    if chain.grad:
        for name in chain.saved_type._fields:
            dtype = made.saved.get(name)
            results.append(empty([] if dtype is None else dims_of(what, chain, name), dtype))
    return results


def operate_backward(
    saved: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    cu_seqlens: Tensor | None,
    chunk_indices: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    scalars: Sequence[float],
    wanted: Sequence[bool],
    said: str,
) -> list[Tensor]:
    """Gradients of the inputs of a traced call; an empty tensor for each that is not wanted."""
    what, chain = chain_of(said)
    fields: dict[str, Any] = {}
    for name, x in zip(chain.saved_type._fields, saved):
        # An input that the forward left as it was may lie otherwise by now: a compiler is free to move it.
        in_layout = name in chain.turning or name in chain.arriving
        fields[name] = turned(chain, name, x) if x is not None and name in chain.turning else x
        if x is not None and not in_layout:
            fields[name] = x.contiguous()
    back = chain.saved_type(**fields)
    like = present(getattr(back, chain.output_like))
    with torch.autocast(what.device.type, enabled=False), driver.guard(what.device):
        packed = packed_of(what, (cu_seqlens, chunk_indices, cu_seqlens_cpu), like.shape[1])
        first, *others = grads
        first = torch.zeros_like(like) if first is None else first
        found = chain.backward_or_default(back, (first, *others), wanted, numbers(what, scalars), packed)
    results: list[Tensor] = []
    for gradient in found:
        made = like.new_empty(0) if gradient is None else gradient
        results.append(tracing.owned(made, [*saved, *grads, *results]))
    return results


def numbers(what: Bound, given: Sequence[float]) -> Scalars:
    """A call's numbers from those that are given."""
    rest = iter(given)
    return tuple(None if scalar is None else next(rest) for scalar in what.call.scalars)


@functools.lru_cache(maxsize=4096)
def gradient_dtypes(said: str, wanted: tuple[bool, ...]) -> tuple[torch.dtype | None, ...]:
    """The dtypes of the gradients that the backward returns; None for each that it does not."""
    what, chain = chain_of(said)
    call = what.call
    with watched.apart(), launcher.recording():
        chunks = None if call.cu_seqlens is None else stand_in(call.cu_seqlens, what.BT)
        outputs, saved = pretended_forward(what, chain)
        grads = outputs[: len(what.spec.withheld)]
        found = chain.backward(saved, grads, wanted, call.scalars, (call.cu_seqlens, chunks))
    return tuple(None if gradient is None else gradient.dtype for gradient in found)


def pretend_backward(
    saved: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    cu_seqlens: Tensor | None,
    chunk_indices: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    scalars: Sequence[float],
    wanted: Sequence[bool],
    said: str,
) -> list[Tensor]:
    """What `operate_backward` returns, without values."""
    what, chain = chain_of(said)
    named = dict(zip(chain.saved_type._fields, saved))
    back = present(named[chain.output_like])
    # Where an input is among what is saved its sizes are the call's; one that lies turned says none.
    inputs = [None if operand.name in chain.turning else named.get(operand.name) for operand in what.spec.operands]
    sizes = what.sizes(inputs, cu_seqlens, chunk_indices)
    return [
        back.new_empty(0)
        if dtype is None
        else back.new_empty(what.shape(operand.shape_symbols(what.spec.v_first(what.problem.form)), sizes), dtype=dtype)
        for operand, dtype in zip(what.spec.operands, gradient_dtypes(said, tuple(wanted)))
    ]


def _setup(spec: OpSpec, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Save for the backward what the forward made, and those inputs that it left as they were."""
    tensors, lists, scalars, said = split(spec, inputs)
    ctx.scalars, ctx.said = [x for x in scalars if x is not None], said
    ctx.dtypes = [None if x is None else x.dtype for x in tensors]
    ctx.set_materialize_grads(False)
    _, chain = chain_of(said)
    if not chain.grad:
        return
    named = dict(zip([operand.name for operand in operands_of(spec)], tensors))
    saved: list[Tensor | None] = []
    returned = made_by(said).saved
    for name, made in zip(chain.saved_type._fields, output[chain.results :]):
        source = named.get(chain.sources.get(name, ""))
        if name in returned:
            saved.append(made)
        elif name in chain.turning and source is not None:
            saved.append(turned(chain, name, source))
        else:
            saved.append(source)
    ctx.save_for_backward(*saved, *lists)


def _backward(spec: OpSpec, ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    *saved, cu_seqlens, chunk_indices, cu_seqlens_cpu = ctx.saved_tensors
    count = len(operands_of(spec))
    wanted = [bool(wants) for wants in ctx.needs_input_grad[:count]]
    # torch settles single tensors and lists of tensors for an operator, and forgets lists in which some are None.
    saved = [watched.settled(x) for x in saved]
    given = [watched.settled(x) for x in grads[: len(spec.withheld)]]
    lists = (cu_seqlens, chunk_indices, cu_seqlens_cpu)
    found = BACKWARDS[spec.name](saved, given, *lists, ctx.scalars, wanted, ctx.said)
    cast = [
        gradient.to(dtype) if wants else None for gradient, dtype, wants in zip(found, ctx.dtypes, wanted, strict=True)
    ]
    return (*cast, *[None] * (len(PACKED) + len(spec.scalars) + 1))


BACKWARD_SCHEMA = (
    "(Tensor?[] saved, Tensor?[] grads, Tensor? cu_seqlens, Tensor? chunk_indices, Tensor? cu_seqlens_cpu, "
    "float[] scalars, bool[] wanted, str said) -> Tensor[]"
)
OPERATORS: dict[str, Any] = {}
BACKWARDS: dict[str, Any] = {}


def trace(spec: OpSpec) -> None:
    """Make the operators `layout_tuner::<op>` and `layout_tuner::<op>_bwd` of a chain."""
    tensors = [f"Tensor{'?' if operand.optional else ''} {operand.name}" for operand in operands_of(spec)]
    others = [*[f"Tensor? {name}" for name in PACKED], *[f"float? {name}" for name in spec.scalars], "str said"]
    schema = f"({', '.join([*tensors, *others])}) -> Tensor[]"
    forward = torch.library.custom_op(
        f"layout_tuner::{spec.name}", functools.partial(operate, spec), mutates_args=(), schema=schema
    )
    forward.register_fake(functools.partial(pretend, spec))
    backward = torch.library.custom_op(
        f"layout_tuner::{spec.name}_bwd", operate_backward, mutates_args=(), schema=BACKWARD_SCHEMA
    )
    backward.register_fake(pretend_backward)
    forward.register_autograd(functools.partial(_backward, spec), setup_context=functools.partial(_setup, spec))
    OPERATORS[spec.name], BACKWARDS[spec.name] = forward, backward
