"""An op's candidates as the tuner sees them: callables on synthetic arguments, checked against the oracle."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from . import device as devices
from . import numerics
from .inputs import synthesize
from .keys import Key
from .prepare import Prepared, copies
from .registry import Call, Candidate, OpSpec, Outputs, Problem, dtype_name
from .tuner import Check, Runs, Trial


class PoisonedAllocations(TorchFunctionMode):
    """Fills what `torch.empty` and its kin allocate with NaN, so that an element nobody writes shows."""

    ALLOCATIONS = frozenset(
        {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided}
    )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in self.ALLOCATIONS and made.is_floating_point():
            made.fill_(float("nan"))
        return made


class Experiment:
    """A key's candidates on one set of synthetic arguments.

    Args:
        spec: The op.
        key: The key, T as it is tuned.
        device: Where to run.
        call: Arguments of the key; None makes them.
        problem: The key on the device; None makes it, with every other op at its default variant.
    """

    def __init__(
        self,
        spec: OpSpec,
        key: Key,
        device: torch.device,
        call: Call | None = None,
        problem: Problem | None = None,
    ) -> None:
        devices.require_running(spec.name, key.dtype, device)
        self.spec = spec
        self._call = call
        self.device = device
        self.problem = problem or Problem(key=key, chip=devices.chip(device))
        self.key = key

    @functools.cached_property
    def call(self) -> Call:
        """The arguments every candidate runs on."""
        return self._call or synthesize(self.spec, self.key, self.device)

    @functools.cached_property
    def wanted(self) -> tuple[torch.Tensor | None, ...]:
        """The oracle's results."""
        return as_tuple(self.spec.reference(**self.spec.arguments(self.call)))

    @functools.cached_property
    def term_rms(self) -> Mapping[str, float]:
        """Root mean square of the terms of outputs that can cancel."""
        if self.spec.term_rms is None:
            return {}
        return {name: float(value) for name, value in self.spec.term_rms(**self.spec.arguments(self.call)).items()}

    def trials(self) -> list[Trial]:
        """Every candidate of the key."""
        return [
            Trial(id=candidate.id, revision=candidate.revision, prepare=functools.partial(self.prepare, candidate))
            for candidate in self.spec.candidates(self.key)
        ]

    def prepare(self, candidate: Candidate) -> Runs:
        """Make a candidate ready; its kernels compile at their first run, which is the check."""
        call = self.call
        whole = Prepared(self.spec, self.problem, candidate, call)
        arguments = (call.scalars, call.cu_seqlens, call.chunk_indices)
        kernel = relayout = None
        if whole.moves or whole.restore:
            arranged = replace(call, tensors=tuple(whole.arrange(call.tensors)))
            bare = Prepared(self.spec, self.problem, candidate, arranged, bare=True)
            kernel = functools.partial(bare, arranged.tensors, *arguments)
            relayout = copies(whole, call, kernel())
        return Runs(
            end_to_end=functools.partial(whole, call.tensors, *arguments),
            kernel=kernel,
            relayout=relayout,
            check=functools.partial(self.check, whole),
        )

    def check(self, prepared: Prepared) -> Check:
        """Run into poisoned memory and compare every output with the oracle; the worst counts."""
        return self.compare(self.run_poisoned(prepared))

    def run_poisoned(self, prepared: Prepared) -> Outputs:
        """A candidate's results, in memory that was NaN before."""
        call = self.call
        with PoisonedAllocations():
            results = prepared(call.tensors, call.scalars, call.cu_seqlens, call.chunk_indices)
        devices.synchronize(self.device)
        return results

    def compare(self, got: Outputs) -> Check:
        """The output that is worst against its tolerance."""
        worst = Check(error=0.0, limit=numerics.FP32_TOLERANCE, output="")
        for output, tensor, wanted in zip(self.spec.outputs, got, self.wanted, strict=True):
            if (tensor is None) != (wanted is None):
                return Check(error=float("inf"), limit=0.0, output=output.name)
            if tensor is None or wanted is None:
                continue
            # A result rounded to 16 bits is no closer than that, whatever it was computed from.
            dtype = dtype_name(tensor) if tensor.element_size() == 2 else self.key.dtype
            check = Check(
                error=numerics.error(tensor, wanted, self.term_rms.get(output.name, 0.0)),
                limit=numerics.tolerance(
                    dtype, devices.interpreting(), self.spec.tolerances.get(output.name), self.spec.truncations
                ),
                output=output.name,
            )
            if check.error / check.limit >= worst.error / worst.limit:
                worst = check
        return worst


def as_tuple(results: object) -> tuple[torch.Tensor | None, ...]:
    """An oracle's results as a tuple."""
    return tuple(results) if isinstance(results, tuple) else (results,)  # type: ignore[return-value]
