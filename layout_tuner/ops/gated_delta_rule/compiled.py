"""`chunk_gated_delta_rule` as a custom operator with autograd, for calls that torch traces, transforms or watches.

As for every op (see `tracing`), the candidate is chosen while a call is traced and stands in the graph as its ticket.
That makes the layout of what the forward leaves for the backward a fact of the graph. What the operators return is
found by running the chain once on tensors without memory; its shapes are written in the sizes of the call.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...device import driver
from ...launch import launcher
from ...launch.prepared import present
from ...spec import layouts, watched
from ...spec.layouts import Layout
from ...spec.packing import chunks_of as packed_chunks
from ...spec.packing import stand_in
from .. import tracing
from ..tickets import Bound, Size, bound, fix, note, ticket
from . import arguments
from .chain import Chain, Inputs, Saved
from .spec import SPEC

# Where a tensor that the backward needs comes from, if it is an input that the forward left as it was.
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
SOURCES = {**{name: name for name in INPUTS}, "raw_g": "g"}
IN_LAYOUT = ("g", "beta")
MADE = {"A": "B T HV BT", "q_rstd": "B T H", "k_rstd": "B T H"}  # no input's shape


def traced_chain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
    cp_context: object | None,
    use_gate_in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gated_delta_rule` while torch traces, transforms or watches it."""
    flags = (
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
        use_gate_in_kernel,
    )
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    tunable = False
    if not torch.compiler.is_dynamo_compiling():
        named = {**dict(zip(INPUTS, inputs)), "cu_seqlens": cu_seqlens, "chunk_indices": chunk_indices}
        tracing.require_seen(SPEC, named)
        tunable = tracing.real(list(named.values()))
    arguments.check(inputs, (*flags, chunk_size), scale, cu_seqlens, cu_seqlens_cpu, chunk_indices, cp_context)
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    A_log = None if A_log is None else A_log.reshape(-1)
    dt_bias = None if dt_bias is None else dt_bias.reshape(-1)
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    note((*inputs, None, None, cu_seqlens, chunk_indices))
    fix(SPEC.name, inputs)
    options = (*flags, operator.index(chunk_size), grad)
    said = ticket(SPEC.name, options, (scale is not None,), tunable)
    results = chain_op(*inputs, cu_seqlens, chunk_indices, cu_seqlens_cpu, scale, said)
    return results[0], results[1] if output_final_state else None


def chain_of(said: str) -> tuple[Bound, Chain]:
    """The chain that a ticket names."""
    what = bound(said)
    assert isinstance(what.launch, Chain)
    return what, what.launch


def chunks_of(
    what: Bound, cu_seqlens: Tensor | None, chunk_indices: Tensor | None, tokens: int, cu_seqlens_cpu: Tensor | None
) -> Tensor | None:
    """The chunks of a packed batch, as the caller gave them or made from its sequence starts."""
    if cu_seqlens is None:
        return None
    return packed_chunks(cu_seqlens, chunk_indices, what.BT, tokens, cu_seqlens_cpu)


def arranged(chain: Chain, inputs: Sequence[Tensor | None]) -> list[Any]:
    """The inputs as the chain takes them: row-major, and gates in the layouts that they arrived in while traced."""
    form = chain.problem.form
    made: list[Any] = []
    for operand, tensor in zip(SPEC.operands, inputs):
        if tensor is None:
            made.append(None)
        elif operand.time_axis:
            arrives = layouts.as_read(form.arrival(operand.name) or Layout.STRIDE_HV)
            made.append(layouts.in_layout(tensor, arrives))
        else:
            made.append(tensor.contiguous())
    return made


def turned(chain: Chain, name: str, tensor: Tensor) -> Tensor:
    """A gate between its shape and one that is row-major whatever its layout: operators return plain memory."""
    return tensor.transpose(1, 2) if name in IN_LAYOUT and chain.layout is Layout.T_CONTIG else tensor


@functools.lru_cache(maxsize=4096)
def saved_dtypes(said: str) -> dict[str, torch.dtype]:
    """What the forward of a ticket makes for the backward, by name; all else that it saves is an input."""
    what, chain = chain_of(said)
    call = what.call
    (scale,) = call.scalars
    with watched.apart(), launcher.recording():
        chunks = None if call.cu_seqlens is None else stand_in(call.cu_seqlens, what.BT)
        inputs = call.tensors[: len(INPUTS)]
        _, _, saved = chain.forward(Inputs._make(arranged(chain, inputs)), scale, call.cu_seqlens, chunks)
    return {
        name: tensor.dtype
        for name, tensor in zip(Saved._fields, saved)
        if tensor is not None and not any(tensor is given for given in inputs)
    }


def dims_of(what: Bound, name: str) -> list[str]:
    """The dimensions of a tensor that the forward leaves for the backward."""
    source = SOURCES.get(name)
    dims = MADE.get(name) or next(operand.dims for operand in SPEC.operands if operand.name == source)
    return what.symbols(dims.split())


def kept(chain: Chain, saved: Saved, inputs: Sequence[Tensor | None], made: Mapping[str, object]) -> list[Tensor]:
    """What the forward made for the backward; an empty tensor for what is an input or absent.

    Args:
        chain: The chain.
        saved: All that the backward needs.
        inputs: The operator's inputs, which it may not return.
        made: Names of what is kept, a fact of the graph.
    """
    results: list[Tensor] = []
    for name, tensor in zip(Saved._fields, saved):
        if name not in made:
            results.append(present(inputs[0]).new_empty(0))
            continue
        plain = turned(chain, name, present(tensor)).contiguous()
        results.append(tracing.owned(plain, [*inputs, *results]))
    return results


@torch.library.custom_op("layout_tuner::chunk_gated_delta_rule", mutates_args=())
def chain_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_indices: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    scale: float | None,
    said: str,
) -> list[Tensor]:
    """A traced `chunk_gated_delta_rule`: output, final state or an empty tensor, and with gradients what is `kept`."""
    what, chain = chain_of(said)
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    with torch.autocast(q.device.type, enabled=False), driver.guard(what.device):
        chunks = chunks_of(what, cu_seqlens, chunk_indices, q.shape[1], cu_seqlens_cpu)
        o, final_state, saved = chain.forward(Inputs._make(arranged(chain, inputs)), scale, cu_seqlens, chunks)
        results = [o, q.new_empty(0) if final_state is None else final_state]
        return [*results, *kept(chain, saved, inputs, saved_dtypes(said))] if chain.grad else results


@chain_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_indices: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    scale: float | None,
    said: str,
) -> list[Tensor]:
    what, chain = chain_of(said)
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    sizes = what.sizes(inputs, cu_seqlens, chunk_indices)

    def shape(dims: str) -> list[Size]:
        return what.shape(what.symbols(dims.split()), sizes)

    last = q.new_empty(0)
    if what.problem.form.flag("output_final_state"):
        last = q.new_empty(shape("N HV K V"), dtype=torch.float32)
    results = [q.new_empty(shape("B T HV V")), last]
    if chain.grad:
        made = saved_dtypes(said)
        for name in Saved._fields:
            dims = dims_of(what, name) if name in made else []
            if name in IN_LAYOUT and chain.layout is Layout.T_CONTIG and dims:
                dims = [dims[0], dims[2], dims[1]]
            results.append(q.new_empty(what.shape(dims, sizes), dtype=made[name]) if dims else q.new_empty(0))
    return results


@torch.library.custom_op("layout_tuner::chunk_gated_delta_rule_bwd", mutates_args=())
def chain_bwd_op(
    saved: Sequence[Tensor | None],
    do: Tensor | None,
    dht: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_indices: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    scale: float | None,
    wanted: Sequence[bool],
    said: str,
) -> list[Tensor]:
    """Gradients of the inputs of a traced call; an empty tensor for each that is not wanted."""
    what, chain = chain_of(said)
    fields: dict[str, Any] = {}
    for name, x in zip(Saved._fields, saved):
        # An input that the forward left as it was may lie otherwise by now: a compiler is free to move it.
        fields[name] = x if x is None or name in (*IN_LAYOUT, "raw_g") else x.contiguous()
        if x is not None and name in IN_LAYOUT:
            fields[name] = turned(chain, name, x)
    back = Saved(**fields)
    with torch.autocast(what.device.type, enabled=False), driver.guard(what.device):
        chunks = chunks_of(what, cu_seqlens, chunk_indices, back.v.shape[1], cu_seqlens_cpu)
        output = torch.zeros_like(back.v) if do is None else do
        found = chain.backward_or_default(back, output, dht, wanted, scale, cu_seqlens, chunks)
    results: list[Tensor] = []
    for gradient in found:
        made = back.v.new_empty(0) if gradient is None else gradient
        results.append(tracing.owned(made, [*saved, do, dht, *results]))
    return results


@functools.lru_cache(maxsize=4096)
def gradient_dtypes(said: str, wanted: tuple[bool, ...]) -> tuple[torch.dtype | None, ...]:
    """The dtypes of the gradients that `chain_bwd_op` returns; None for each that it does not."""
    what, chain = chain_of(said)
    call = what.call
    (scale,) = call.scalars
    with watched.apart(), launcher.recording():
        chunks = None if call.cu_seqlens is None else stand_in(call.cu_seqlens, what.BT)
        inputs = Inputs._make(arranged(chain, call.tensors[: len(INPUTS)]))
        o, last, saved = chain.forward(inputs, scale, call.cu_seqlens, chunks)
        found = chain.backward(saved, o, last, wanted, scale, call.cu_seqlens, chunks)
    return tuple(None if gradient is None else gradient.dtype for gradient in found)


@chain_bwd_op.register_fake
def _(
    saved: Sequence[Tensor | None],
    do: Tensor | None,
    dht: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_indices: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    scale: float | None,
    wanted: Sequence[bool],
    said: str,
) -> list[Tensor]:
    what = bound(said)
    named = dict(zip(Saved._fields, saved))
    back = present(named["v"])
    inputs = [named["q"], named["k"], back]
    sizes = what.sizes(inputs, cu_seqlens, chunk_indices)
    dtypes = gradient_dtypes(said, tuple(wanted))
    return [
        back.new_empty(0)
        if dtype is None
        else back.new_empty(what.shape(what.symbols(operand.dims.split()), sizes), dtype=dtype)
        for operand, dtype in zip(SPEC.operands, dtypes)
    ]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Save for the backward what the forward made, and those inputs that it left as they were."""
    *tensors, cu_seqlens, chunk_indices, cu_seqlens_cpu, scale, said = inputs
    ctx.scale, ctx.said = scale, said
    ctx.dtypes = [None if x is None else x.dtype for x in tensors]
    ctx.set_materialize_grads(False)
    _, chain = chain_of(said)
    if not chain.grad:
        return
    named = dict(zip(INPUTS, tensors))
    saved: list[Tensor | None] = []
    returned = saved_dtypes(said)
    for name, made in zip(Saved._fields, output[2:]):
        source = named.get(SOURCES.get(name, ""))
        if name in returned:
            saved.append(made)
        elif name in IN_LAYOUT and source is not None:
            saved.append(turned(chain, name, source))
        else:
            saved.append(source)
    ctx.save_for_backward(*saved, cu_seqlens, chunk_indices, cu_seqlens_cpu)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    *saved, cu_seqlens, chunk_indices, cu_seqlens_cpu = ctx.saved_tensors
    # torch settles single tensors and lists of tensors for an operator, and forgets lists in which some are None.
    saved = [watched.settled(x) for x in saved]
    wanted = [bool(wants) for wants in ctx.needs_input_grad[: len(INPUTS)]]
    do, dht = watched.settled(grads[0]), watched.settled(grads[1])
    found = chain_bwd_op(saved, do, dht, cu_seqlens, chunk_indices, cu_seqlens_cpu, ctx.scale, wanted, ctx.said)
    cast = [
        gradient.to(dtype) if wants else None for gradient, dtype, wants in zip(found, ctx.dtypes, wanted, strict=True)
    ]
    return (*cast, None, None, None, None, None)


chain_op.register_autograd(_backward, setup_context=_setup)
