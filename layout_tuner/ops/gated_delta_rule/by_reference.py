"""The chain by its oracle, for a key of which no kernel is right: slow, in plain torch, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...launch.prepared import by_reference
from ...spec.declaration import Launch, OpSpec, Problem
from ...spec.operands import Value
from .chain import Chain, Gradients, Inputs, Saved


class ChainByReference(Chain):
    """Computes what a chain does from the op's oracle, for callers of a chain.

    Args:
        spec: The op.
        problem: Key and chip of the whole op.
        options: Of the call.
    """

    def __init__(self, spec: OpSpec, problem: Problem, options: tuple[Value, ...]) -> None:
        self.spec, self.problem = spec, problem
        self.options = {option.name: value for option, value in zip(spec.options, options)}
        self.whole: Launch = by_reference(spec, problem, options)

    def forward(
        self, inputs: Inputs, scale: float | None, cu_seqlens: Tensor | None, chunk_indices: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Saved]:
        """Output and final state; the inputs as they are serve the backward."""
        o, final_state, *_ = self.computed(inputs, None, None, scale, cu_seqlens)
        q, k, v, g, beta, A_log, dt_bias, initial_state = inputs
        assert o is not None
        nothing = v.new_empty(0)
        saved = Saved(q, k, v, g, beta, nothing, initial_state, None, None, None, A_log, dt_bias)
        return o.to(v.dtype).contiguous(), final_state, saved

    def backward_or_default(
        self,
        saved: Saved,
        do: Tensor,
        dht: Tensor | None,
        wanted: Sequence[bool],
        scale: float | None,
        cu_seqlens: Tensor | None,
        chunk_indices: Tensor | None,
    ) -> Gradients:
        """Gradients of the inputs that `wanted` names; nothing stands in for the oracle."""
        s = saved
        inputs = Inputs(s.q, s.k, s.v, s.g, s.beta, s.A_log, s.dt_bias, s.initial_state)
        _, _, *gradients = self.computed(inputs, do, dht, scale, cu_seqlens)
        found = Gradients._make(gradients)
        of = dict(zip(Inputs._fields, wanted)) | {"h0": wanted[Inputs._fields.index("initial_state")]}
        return Gradients._make(
            tensor if of[name.removeprefix("d")] else None for name, tensor in found._asdict().items()
        )

    def computed(
        self, inputs: Inputs, do: Tensor | None, dht: Tensor | None, scale: float | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """All that the oracle says: output, final state, and gradients where `do` is given."""
        named: dict[str, Any] = inputs._asdict() | self.options | {"grad": do is not None, "scale": scale}
        with torch.no_grad():
            found: Any = self.spec.reference(**named, do=do, dht=dht, cu_seqlens=cu_seqlens)
        results: tuple[Tensor | None, ...] = found
        return results

    def __call__(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        """As the other launches of the op."""
        return self.whole(*arguments)
