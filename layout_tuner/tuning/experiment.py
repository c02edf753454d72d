"""An op's candidates as the tuner sees them: callables on synthetic arguments, checked against the oracle."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..device import driver, interpreter
from ..launch.prepared import Prepared, copies
from ..spec.declaration import Candidate, OpSpec, Problem
from ..spec.keys import Key
from ..spec.operands import Call, Outputs
from .binaries import binary_of, may_vary
from .checking import Checker
from .inputs import synthesize
from .tuner import Check, Measurement, Runs, Trial


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
        oracle_limit: Bytes the oracle may take; larger problems are compared in part, see `checking`.
    """

    def __init__(
        self,
        spec: OpSpec,
        key: Key,
        device: torch.device,
        call: Call | None = None,
        problem: Problem | None = None,
        oracle_limit: int | None = None,
    ) -> None:
        interpreter.require_running(spec.name, key.dtype, device)
        self.spec = spec
        self._call = call
        self.device = device
        self.problem = problem or Problem(key=key, chip=driver.chip(device))
        self.key = key
        self.oracle_limit = sys.maxsize if oracle_limit is None else oracle_limit
        self.default = spec.default(key, self.problem.chip)

    @functools.cached_property
    def call(self) -> Call:
        """The arguments every candidate runs on."""
        return self._call or synthesize(self.spec, self.key, self.device)

    @functools.cached_property
    def checker(self) -> Checker:
        """Compares results, and knows what was right so far."""
        return Checker(self.spec, self.key, self.call, self.oracle_limit)

    @property
    def wanted(self) -> Outputs:
        """The oracle's results for what it sees."""
        return self.checker.wanted

    @property
    def term_rms(self) -> Mapping[str, float]:
        """Root mean square of the terms of outputs that can cancel."""
        return self.checker.term_rms

    def trials(self, known: Mapping[tuple[str, str], Measurement] | None = None) -> list[Trial]:
        """Every candidate of the key.

        Args:
            known: Earlier measurements that are still believed, by id and revision; these are not tried again.
        """
        return [
            Trial(
                id=candidate.id,
                revision=candidate.revision,
                prepare=functools.partial(self.prepare, candidate),
                known=(known or {}).get((candidate.id, candidate.revision)),
                binary=functools.partial(binary_of, self.spec, self.problem, candidate, self.device),
            )
            for candidate in self.spec.candidates(self.key, buffers=self.problem.chip.buffers)
        ]

    def prepare(self, candidate: Candidate) -> Runs:
        """Make a candidate ready; its kernels compile at their first run, here or in the check."""
        with torch.no_grad(), driver.guard(self.device):
            return self.prepared(candidate)

    def prepared(self, candidate: Candidate) -> Runs:
        """A candidate made ready, while its device is the current one."""
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
        """Run a candidate into poisoned memory and compare its outputs with the oracle, then bits with others'.

        Where a device may give other results for the same, bits are compared with those of further runs before that.
        """
        candidate = prepared.candidate
        with torch.no_grad(), driver.guard(self.device):
            results = self.run_poisoned(prepared)
            for _ in range(further_runs(self.device)):
                name = self.checker.differing(self.run_poisoned(prepared), results)
                if name is not None:
                    check = self.checker.against_oracle(results)
                    return replace(check, exact=False, differs=f"{name}: other bits when it runs again")
            return self.checker.compare(candidate, results, default=candidate == self.default)

    def run_poisoned(self, prepared: Prepared) -> Outputs:
        """A candidate's results, in memory that was NaN before."""
        call = self.call
        with PoisonedAllocations():
            results = prepared(call.tensors, call.scalars, call.cu_seqlens, call.chunk_indices)
        driver.synchronize(self.device)
        return results

    def compare(self, got: Outputs) -> Check:
        """The output that is worst against its tolerance."""
        return self.checker.against_oracle(got)


def further_runs(device: torch.device) -> int:
    """How often a candidate runs again when it is checked: races between the cores and pipes of an NPU show at times.

    In the interpreter, which has no races, once.
    """
    if not may_vary(device):
        return 0
    return 1 if interpreter.interpreting() else 2
