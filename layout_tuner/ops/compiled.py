"""The ops under `torch.compile`: custom operators with fake implementations and autograd.

A compiler cannot look into a launch, so a traced call becomes a custom operator. Which candidate it runs is decided
while it is traced and stands in the graph as a text, the ticket: key, device and candidate. A ticket is all that an
operator needs to bind its launches, in this process or in another that loads the compiled graph, and it makes the
layout of what the forward leaves for the backward a fact of the graph. Sizes are part of a key, so a graph serves one.

The fake implementations are the real ones with their launches recorded instead of run, so they allocate what a real
call allocates, in the same layouts.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import device as devices
from .. import launcher, layouts, registry, router
from ..keys import Key
from ..layouts import Layout
from ..packing import chunks_of, prepare_chunk_indices, stand_in
from ..prepare import present
from ..registry import Call, Candidate, Launch, OpSpec, Problem, Value
from . import gated_delta_rule
from .gated_delta_rule import Chain, Inputs, Saved

Facts = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]

# Where a tensor that the backward needs comes from, if it is an input that the forward left as it was.
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
SOURCES = {**{name: name for name in INPUTS}, "raw_g": "g"}
IN_LAYOUT = ("g", "beta")
PARAMETERS = ("dA_log", "ddt_bias")


# -- the decision, while tracing -------------------------------------------------------------------------------


def facts(tensor: Tensor | None) -> Facts | None:
    """What a decision depends on; asking for sizes as indices fixes them for the graph."""
    if tensor is None:
        return None
    shape = tuple([operator.index(size) for size in tensor.shape])
    strides = tuple([operator.index(stride) for stride in tensor.stride()])
    return shape, strides, tensor.dtype, tensor.device


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def ticket(
    op: str,
    operands: tuple[Facts | None, ...],
    options: tuple[Value, ...],
    cu_seqlens: Facts | None,
    chunk_indices: Facts | None,
) -> str:
    """Check a call as one that is not traced is checked, decide, and write the decision down.

    Raises:
        TypeError, ValueError, UnsupportedProblemError: As the op does.
    """
    spec = registry.lookup(op)
    given = [fact for fact in (*operands, cu_seqlens, chunk_indices) if fact is not None]
    found = sorted({str(fact[3]) for fact in given})
    if len(found) > 1:
        raise ValueError(f"{op}: wanted all tensors on one device, got {', '.join(found)}")
    call = Call(
        tensors=tuple(like(fact) for fact in operands),
        options=options,
        cu_seqlens=like(cu_seqlens),
        chunk_indices=like(chunk_indices),
    )
    key, device = spec.key(call), given[0][3]
    devices.require_running(op, key.dtype, device)
    choice = router.current().choose(spec, key, device, tracing=True)
    said = {"key": key.plain(), "candidate": choice.candidate.id, "device": str(device)}
    return json.dumps(said, sort_keys=True)


def like(fact: Facts | None) -> Tensor | None:
    """A tensor of these facts, without memory."""
    return None if fact is None else torch.empty_strided(fact[0], fact[1], dtype=fact[2], device="meta")


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a ticket names.

    Attributes:
        spec: The op.
        candidate: What to run.
        launch: It, bound.
        device: Where.
        BT: Tokens of a chunk.
    """

    spec: OpSpec
    candidate: Candidate
    launch: Launch
    device: torch.device
    BT: int

    def chunks(
        self, cu_seqlens: Tensor | None, chunk_indices: Tensor | None, cu_seqlens_cpu: Tensor | None = None
    ) -> Tensor | None:
        """The chunks of a packed batch, as the caller gave them or made from its sequence starts."""
        if cu_seqlens is None or chunk_indices is not None:
            return chunk_indices
        return prepare_chunk_indices(cu_seqlens, self.BT, cu_seqlens_cpu)

    def assumed_chunks(self, cu_seqlens: Tensor | None) -> Tensor | None:
        """The same for sequence starts without values."""
        return None if cu_seqlens is None else stand_in(cu_seqlens, self.BT)


@functools.lru_cache(maxsize=4096)
def bound(said: str) -> Bound:
    """What a ticket names; a candidate that is no longer there gives way to the default.

    Args:
        said: The ticket.
    """
    read = json.loads(said)
    key, device = Key.of(read["key"]), torch.device(read["device"])
    spec, chip, active = registry.lookup(key.op), devices.chip(device), router.current()

    def variant_of(stage: OpSpec, stage_key: Key) -> str | None:
        return active.stored_variant(stage, stage_key, device)

    problem = Problem(key=key, chip=chip, variant_of=variant_of)
    known = {candidate.id: candidate for candidate in spec.candidates(key)}
    candidate = known.get(read["candidate"]) or spec.default(key, chip)
    return Bound(spec=spec, candidate=candidate, launch=spec.bind(problem, candidate), device=device, BT=problem.BT)


def rows(tensor: Tensor | None) -> Tensor | None:
    """The tensor, row-major."""
    return None if tensor is None else tensor.contiguous()


# -- chunk_bwd_dv_local ----------------------------------------------------------------------------------------


def traced_dv_local(
    q: Tensor,
    k: Tensor,
    do: Tensor,
    g: Tensor | None,
    g_gamma: Tensor | None,
    A: Tensor | None,
    scale: float | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    chunk_indices: Tensor | None,
) -> Tensor:
    """`chunk_bwd_dv_local` while a compiler traces it."""
    if g is not None and g_gamma is not None:
        raise ValueError("chunk_bwd_dv_local: g, g_gamma: wanted at most one of them, got both")
    if A is not None:
        g = g_gamma = None
    operands = tuple([facts(x) for x in (q, k, do, g, g_gamma, A)])
    said = ticket("chunk_bwd_dv_local", operands, (chunk_size,), facts(cu_seqlens), facts(chunk_indices))
    made: Tensor = dv_local_op(q, k, do, g, g_gamma, A, scale, cu_seqlens, chunk_indices, said)
    return made


@torch.library.custom_op("layout_tuner::chunk_bwd_dv_local", mutates_args=())
def dv_local_op(
    q: Tensor,
    k: Tensor,
    do: Tensor,
    g: Tensor | None,
    g_gamma: Tensor | None,
    A: Tensor | None,
    scale: float | None,
    cu_seqlens: Tensor | None,
    chunk_indices: Tensor | None,
    said: str,
) -> Tensor:
    """A traced `chunk_bwd_dv_local`."""
    what = bound(said)
    gate = None if g is None else layouts.relayout(g, what.candidate.plan["g"])
    chunks = None if cu_seqlens is None else chunks_of(cu_seqlens, chunk_indices, what.BT, q.shape[1])
    with devices.guard(what.device):
        (dv,) = what.launch(rows(q), rows(k), rows(do), gate, rows(g_gamma), rows(A), scale, cu_seqlens, chunks)
    return present(dv)


@dv_local_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    do: Tensor,
    g: Tensor | None,
    g_gamma: Tensor | None,
    A: Tensor | None,
    scale: float | None,
    cu_seqlens: Tensor | None,
    chunk_indices: Tensor | None,
    said: str,
) -> Tensor:
    return do.new_empty(do.shape)


# -- chunk_gated_delta_rule ------------------------------------------------------------------------------------


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
    """`chunk_gated_delta_rule` while a compiler traces it."""
    flags = (
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
        use_gate_in_kernel,
    )
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    gated_delta_rule.check(inputs, (*flags, chunk_size), scale, cu_seqlens, cu_seqlens_cpu, chunk_indices, cp_context)
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    A_log = None if A_log is None else A_log.reshape(-1)
    dt_bias = None if dt_bias is None else dt_bias.reshape(-1)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    operands = (*[facts(x) for x in inputs], None, None)
    options = (*flags, chunk_size, grad)
    said = ticket("chunk_gated_delta_rule", operands, options, facts(cu_seqlens), facts(chunk_indices))
    results = chain_op(*inputs, cu_seqlens, chunk_indices, cu_seqlens_cpu, scale, said)
    return results[0], results[1] if output_final_state else None


def chain_of(said: str) -> tuple[Bound, Chain]:
    """The chain that a ticket names."""
    what = bound(said)
    assert isinstance(what.launch, Chain)
    return what, what.launch


def arranged(what: Bound, inputs: Sequence[Tensor | None]) -> list[Any]:
    """The inputs as the chain takes them: row-major, and a gate that lies in neither layout too."""
    made: list[Any] = []
    for operand, tensor in zip(what.spec.operands, inputs):
        if tensor is None or (operand.time_axis and layouts.arrival(tensor) is not Layout.OTHER):
            made.append(tensor)
        else:
            made.append(tensor.contiguous())
    return made


def turned(what: Chain, name: str, tensor: Tensor) -> Tensor:
    """A gate between its shape and one that is row-major whatever its layout: operators return plain memory."""
    return tensor.transpose(1, 2) if name in IN_LAYOUT and what.layout is Layout.T_CONTIG else tensor


def kept(what: Chain, saved: Saved, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """What the forward made for the backward; an empty tensor for what is an input or absent.

    Args:
        what: The chain.
        saved: All that the backward needs.
        inputs: The operator's inputs, which it may not return.
    """
    made = []
    for name, tensor in zip(Saved._fields, saved):
        if tensor is None or any(tensor is given for given in inputs):
            made.append(present(inputs[0]).new_empty(0))
        else:
            made.append(turned(what, name, tensor))
    return made


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
    with torch.autocast(q.device.type, enabled=False), devices.guard(what.device):
        chunks = what.chunks(cu_seqlens, chunk_indices, cu_seqlens_cpu)
        o, final_state, saved = chain.forward(Inputs._make(arranged(what, inputs)), scale, cu_seqlens, chunks)
        results = [o, q.new_empty(0) if final_state is None else final_state]
        return [*results, *kept(chain, saved, inputs)] if chain.grad else results


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
    chunks = what.assumed_chunks(cu_seqlens)
    with launcher.recording():
        o, final_state, saved = chain.forward(Inputs._make(arranged(what, inputs)), scale, cu_seqlens, chunks)
        results = [o, q.new_empty(0) if final_state is None else final_state]
        return [*results, *kept(chain, saved, inputs)] if chain.grad else results


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
    what, _ = chain_of(said)
    with torch.autocast(what.device.type, enabled=False), devices.guard(what.device):
        chunks = what.chunks(cu_seqlens, chunk_indices, cu_seqlens_cpu)
        return gradients(said, saved, do, dht, cu_seqlens, chunks, scale, wanted)


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
    what, _ = chain_of(said)
    chunks = what.assumed_chunks(cu_seqlens)
    with launcher.recording():
        return gradients(said, saved, do, dht, cu_seqlens, chunks, scale, wanted)


def gradients(
    said: str,
    saved: Sequence[Tensor | None],
    do: Tensor | None,
    dht: Tensor | None,
    cu_seqlens: Tensor | None,
    chunks: Tensor | None,
    scale: float | None,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """The chain's backward on what an operator was handed."""
    _, chain = chain_of(said)
    fields: dict[str, Any] = {
        name: None if x is None else turned(chain, name, x) for name, x in zip(Saved._fields, saved)
    }
    back = Saved(**fields)
    output = torch.zeros_like(back.v) if do is None else do
    found = chain.backward(back, output, dht, wanted, scale, cu_seqlens, chunks)
    return [
        # The gradients of the gate's parameters are rows of one tensor, which an operator may not return.
        back.q.new_empty(0) if gradient is None else gradient.clone() if name in PARAMETERS else gradient
        for name, gradient in zip(found._fields, found)
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
    for name, made in zip(Saved._fields, output[2:]):
        source = named.get(SOURCES.get(name, ""))
        if made.numel():
            saved.append(made)
        elif name in IN_LAYOUT and source is not None:
            saved.append(turned(chain, name, source))
        else:
            saved.append(source)
    ctx.save_for_backward(*saved, cu_seqlens, chunk_indices, cu_seqlens_cpu)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    *saved, cu_seqlens, chunk_indices, cu_seqlens_cpu = ctx.saved_tensors
    wanted = [bool(wants) for wants in ctx.needs_input_grad[: len(INPUTS)]]
    do, dht = grads[0], grads[1]
    found = chain_bwd_op(saved, do, dht, cu_seqlens, chunk_indices, cu_seqlens_cpu, ctx.scale, wanted, ctx.said)
    cast = [
        gradient.to(dtype) if wants else None for gradient, dtype, wants in zip(found, ctx.dtypes, wanted, strict=True)
    ]
    return (*cast, None, None, None, None, None)


chain_op.register_autograd(_backward, setup_context=_setup)
