"""A chain's place in autograd: the backward runs the chain that its forward chose and looks nothing up."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch import router
from ...errors import UnsupportedProblemError
from ...launch.prepared import Prepared
from ...spec.declaration import OpSpec
from ...spec.operands import Outputs, Value
from ...spec.packing import written
from ...spec.watched import settled
from .chain import Chain, Scalars

TWICE = (
    "its gradients cannot be differentiated again, so create_graph=True (gradient penalties, Hessians, optimizers that "
    "use them) is not served: detach what goes through this op, or leave create_graph off"
)


def call(
    spec: OpSpec,
    inputs: tuple[Tensor | None, ...],
    options: tuple[Value, ...],
    scalars: Scalars = (),
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> Outputs:
    """Run the chain that the router chooses for a call, with gradients where an input wants one.

    Args:
        spec: The op.
        inputs: Its operands without the gradients of its outputs.
        options: Its options without the last, which says whether gradients are wanted.
        scalars: Its numbers.
        cu_seqlens: Sequence starts of a packed batch.
        chunk_indices: Its chunks, where the caller has them.
    """
    grad = torch.is_grad_enabled() and True in [x is not None and x.requires_grad for x in inputs]
    kind = inputs[0].device.type if inputs[0] is not None else "cpu"
    said = _Call(spec, (*options, grad), scalars, cu_seqlens, chunk_indices, kind)
    if grad:
        outputs: Outputs = _Function.apply(said, *inputs)  # type: ignore[no-untyped-call]
        return outputs
    return _forward(said, inputs)[0]


class _Call(NamedTuple):
    """What a call says beside its tensors, and the kind of device they are on."""

    spec: OpSpec
    options: tuple[Value, ...]
    scalars: Scalars
    cu_seqlens: Tensor | None
    chunk_indices: Tensor | None
    kind: str

    def versions(self) -> list[object]:
        """What changes when what describes a packed batch is written to."""
        return [written(tensor) for tensor in (self.cu_seqlens, self.chunk_indices) if tensor is not None]


def _forward(said: _Call, inputs: Sequence[Tensor | None]) -> tuple[Outputs, tuple[Chain[Any], Any]]:
    """Run the forward of what the router chooses; the chosen chain runs the backward too."""
    packed = (said.cu_seqlens, said.chunk_indices)

    def run(prepared: Prepared) -> tuple[Outputs, tuple[Chain[Any], Any]]:
        chain: Any = prepared.launch  # a `Chain`; asking an abstract class whether it is costs more than a comparison
        arranged = prepared.arrange(inputs)
        with prepared.on_device():
            outputs, saved = chain.forward(arranged, said.scalars, packed)
        return outputs, (chain, saved)

    operands = (*inputs, *said.spec.withheld)
    return router.call_by(said.spec, run, operands, said.options, said.scalars, *packed)


class _Function(torch.autograd.Function):
    """The chain for autograd."""

    @staticmethod
    def forward(ctx: Any, said: _Call, *inputs: Tensor | None) -> Outputs:
        with without_autocast(said.kind):
            outputs, (chain, saved) = _forward(said, inputs)
        ctx.save_for_backward(*saved)
        ctx.chain, ctx.said, ctx.versions = chain, said, said.versions()
        ctx.set_materialize_grads(False)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in inputs]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Outputs:
        if not torch.is_grad_enabled():
            return _Function.gradients(ctx, grads)
        # With `create_graph` the gradients may be differentiated themselves. They depend on the inputs also where
        # nothing that arrives here requires a gradient, as the ones of a sum: torch's `once_differentiable` would hand
        # those on as constants. They are constants where only inputs vary that the outputs are linear in.
        spec: OpSpec = ctx.said.spec
        varies = [operand.name for operand, wants in zip(spec.operands, ctx.needs_input_grad[1:]) if wants]
        linear = set(varies) <= set(ctx.chain.linear)
        if not linear or True in [x is not None and x.requires_grad for x in grads]:
            raise UnsupportedProblemError(spec.name, [TWICE])
        with torch.no_grad():
            return _Function.gradients(ctx, grads)

    @staticmethod
    def gradients(ctx: Any, grads: Sequence[Tensor | None]) -> Outputs:
        """Gradients of what `forward` took."""
        said: _Call = ctx.said
        chain: Chain[Any] = ctx.chain
        saved = chain.saved_type._make(ctx.saved_tensors)
        with without_autocast(said.kind):
            first, *others = [settled(grad) for grad in grads]
            if first is None:
                first = torch.zeros_like(getattr(saved, chain.output_like))
            if said.versions() != ctx.versions:
                raise RuntimeError(
                    f"{said.spec.name}: cu_seqlens or chunk_indices were written to between forward and backward: "
                    "hand over a copy"
                )
            packed = (said.cu_seqlens, said.chunk_indices)
            wanted = ctx.needs_input_grad[1:]
            gradients = chain.backward_or_default(saved, (first, *others), wanted, said.scalars, packed)
        cast = [
            gradient if gradient is None or gradient.dtype is dtype else gradient.to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes)
        ]
        return (None, *cast)


def without_autocast(kind: str) -> AbstractContextManager[object]:
    """Turns autocast off for a kind of device, where it is on: entering its context takes longer than a launch."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
