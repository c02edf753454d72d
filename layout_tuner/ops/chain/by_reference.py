"""A chain by its oracle, for a key of which no kernel is right: slow, in plain torch, forward and backward."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...launch.prepared import bind_candidate, by_reference
from ...spec.declaration import Launch, OpSpec, Problem
from ...spec.operands import Call, Outputs, Value
from .chain import Chain, Packed, Scalars


class ChainByReference(Chain[Any]):
    """Computes what a chain does from the op's oracle; its inputs as they came are all that it saves.

    Args:
        spec: The op.
        problem: Key and chip of the whole op.
        options: Of the call.
    """

    def __init__(self, spec: OpSpec, problem: Problem, options: tuple[Value, ...]) -> None:
        default = bind_candidate(spec, problem, spec.default(problem.key, problem.chip))
        assert isinstance(default, Chain)
        super().__init__(problem, default.layout)
        self.saved_type = namedtuple("Saved", [x.name for x in spec.operands[: self.inputs]])  # type: ignore[misc]
        self.output_like, self.linear = default.output_like, default.linear  # type: ignore[misc]
        self.options = options
        self.whole: Launch = by_reference(spec, problem, options)

    def forward(self, inputs: Sequence[Any], scalars: Scalars, packed: Packed) -> tuple[Outputs, Any]:
        """As `launch_forward`: an oracle launches nothing that could be prepared."""
        return self.launch_forward(inputs, scalars, packed)

    def launch_forward(self, inputs: Sequence[Any], scalars: Scalars, packed: Packed) -> tuple[Outputs, Any]:
        """The outputs without gradients, and the inputs."""
        saved = self.saved_type._make(inputs)
        first, *others = self.computed(inputs, (), scalars, packed)[: self.results]
        assert first is not None
        return (first.to(getattr(saved, self.output_like).dtype).contiguous(), *others), saved

    def backward_or_default(
        self, saved: Any, grads: Sequence[Tensor | None], wanted: Sequence[bool], scalars: Scalars, packed: Packed
    ) -> Outputs:
        """As `launch_backward`: nothing stands in for the oracle."""
        return self.launch_backward(saved, grads, wanted, scalars, packed)

    def launch_backward(
        self, saved: Any, grads: Sequence[Tensor | None], wanted: Sequence[bool], scalars: Scalars, packed: Packed
    ) -> Outputs:
        """Gradients of the inputs that `wanted` names."""
        gradients = self.computed(saved, grads, scalars, packed)[self.results :]
        return tuple([gradient if wants else None for gradient, wants in zip(gradients, wanted, strict=True)])

    def computed(
        self, inputs: Sequence[Any], grads: Sequence[Tensor | None], scalars: Scalars, packed: Packed
    ) -> Outputs:
        """All that the oracle says: the outputs, and gradients of the inputs where those of outputs are given."""
        later = (*grads, *[None] * (len(self.spec.operands) - self.inputs - len(grads)))
        *options, _ = self.options  # the last says whether gradients are wanted
        call = Call(tensors=(*inputs, *later), options=(*options, bool(grads)), scalars=scalars, cu_seqlens=packed[0])
        with torch.no_grad():
            found: Any = self.spec.reference(**self.spec.arguments(call))
        results: Outputs = found
        return results

    def __call__(self, *arguments: Any) -> Outputs:
        """As the other launches of the op."""
        return self.whole(*arguments)
