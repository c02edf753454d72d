"""A candidate prepared for a signature: the copies of its operands, its launch, and the copies of its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from ..device import driver
from ..spec import layouts
from ..spec.declaration import REFERENCE, Candidate, Launch, OpSpec, Problem, compile_options
from ..spec.layouts import Layout
from ..spec.operands import Call, Outputs, Value
from ..spec.packing import chunks_of
from . import launcher
from .tally import UNROUTED

Tensors = Sequence["torch.Tensor | None"]


class Prepared:
    """Runs a candidate for calls of one signature; whatever follows from the signature is settled when it is made.

    Args:
        spec: The op.
        problem: Key and chip.
        candidate: What to run.
        call: A call of the signature. Only the shapes and strides of its tensors count, and which of them are None.
        bare: Whether operands arrive in the plan's layouts and results stay in them, so that nothing is copied.
    """

    __slots__ = (
        "BT",
        "candidate",
        "contiguous",
        "device",
        "direct",
        "launch",
        "moves",
        "name",
        "nt_operand",
        "packed",
        "proven",
        "restore",
        "tally",
    )

    def __init__(self, spec: OpSpec, problem: Problem, candidate: Candidate, call: Call, *, bare: bool = False) -> None:
        self.candidate = candidate
        self.tally = UNROUTED  # counts its calls
        self.proven = False  # whether it has run once: kernels compile and fail at their first launch
        self.launch: Launch = (
            (spec.by_reference or by_reference)(spec, problem, call.options)
            if candidate.variant == REFERENCE
            else bind_candidate(spec, problem, candidate)
        )
        self.BT = problem.BT
        self.name = spec.name
        self.packed = call.cu_seqlens is not None
        by_chunk = [i for i, (o, t) in enumerate(zip(spec.operands, call.tensors)) if t is not None and "NT" in o.dims]
        self.nt_operand = by_chunk[0] if by_chunk else None
        device = present(call.tensors[0]).device
        self.device = device if driver.several(device) else None
        self.contiguous = tuple(
            i
            for i, (operand, tensor) in enumerate(zip(spec.operands, call.tensors))
            if tensor is not None and not operand.time_axis and not tensor.is_contiguous()
        )
        self.moves: tuple[tuple[int, Layout], ...] = ()
        self.restore: tuple[int, ...] = ()
        if not bare:
            numbered = enumerate(zip(spec.operands, call.tensors))
            arriving = [(i, o.name, t) for i, (o, t) in numbered if t is not None and o.time_axis]
            wanted = {
                name: candidate.plan[name] if spec.moves_inputs else layouts.as_read(layouts.arrival(tensor))
                for _, name, tensor in arriving
            }
            self.moves = tuple(
                (i, wanted[name]) for i, name, tensor in arriving if layouts.must_move(tensor, wanted[name])
            )
            self.restore = tuple(i for i, out in enumerate(spec.outputs) if candidate.plan.t_contig(out.name))
        # Whether the launch takes a call's arguments as they come and its results go back as they are.
        self.direct = not (self.contiguous or self.moves or self.restore or self.packed or self.device)

    def __call__(
        self,
        tensors: Tensors,
        scalars: tuple[float | None, ...],
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> Outputs:
        if self.contiguous or self.moves:
            tensors = self.arrange(tensors)
        if self.packed and cu_seqlens is not None:
            chunk_indices = chunks_of(cu_seqlens, chunk_indices, self.BT, present(tensors[0]).shape[1])
        if self.packed and self.nt_operand is not None:
            self.check_chunks(tensors, chunk_indices)
        if self.device is None or driver.is_current(self.device):
            results = self.launch(*tensors, *scalars, cu_seqlens, chunk_indices)
        else:
            with self.on_device():
                results = self.launch(*tensors, *scalars, cu_seqlens, chunk_indices)
        if self.restore:
            results = self.row_major(results)
        return results

    def check_chunks(self, tensors: Tensors, chunk_indices: torch.Tensor | None) -> None:
        """Refuse states for another number of chunks than the packed batch has, a number that no signature holds."""
        assert self.nt_operand is not None
        given = present(tensors[self.nt_operand]).shape[1]
        wanted = present(chunk_indices).shape[0]
        if given != wanted:
            raise ValueError(f"{self.name}: wanted NT={wanted} chunks of cu_seqlens, got states for {given}")

    def on_device(self) -> AbstractContextManager[object]:
        """A context in which the operands' device is the current one."""
        return nullcontext() if self.device is None else driver.guard(self.device)

    def arrange(self, tensors: Tensors) -> Tensors:
        """The operands as the kernel reads them: time-axis operands in the plan's layouts, all others row-major."""
        if not self.contiguous and not self.moves:
            return tensors
        arranged = list(tensors)
        for i in self.contiguous:
            arranged[i] = present(arranged[i]).contiguous()
        for i, layout in self.moves:
            arranged[i] = layouts.relayout(present(arranged[i]), layout)
        return arranged

    def row_major(self, results: Outputs) -> Outputs:
        """The results, with every time-axis tensor among them copied to row-major."""
        back = list(results)
        for i in self.restore:
            tensor = back[i]
            if tensor is not None:
                back[i] = layouts.relayout(tensor, Layout.STRIDE_HV)
        return tuple(back)


def bind_candidate(spec: OpSpec, problem: Problem, candidate: Candidate) -> Launch:
    """The launch of a candidate, its kernels compiled with the options that it carries."""
    variant, options = compile_options(candidate.variant)
    with launcher.compiling(options):
        return spec.bind(problem, replace(candidate, variant=variant))


def by_reference(spec: OpSpec, problem: Problem, options: tuple[Value, ...]) -> Launch:
    """The oracle as a launch: its results as row-major tensors of the dtypes that the op's have."""
    default = bind_candidate(spec, problem, spec.default(problem.key, problem.chip))

    def launch(*arguments: Any) -> Outputs:
        count = len(spec.operands)
        call = Call(tensors=arguments[:count], options=options, scalars=arguments[count:-2], cu_seqlens=arguments[-2])
        with launcher.recording():
            alike = default(*arguments)
        found = spec.reference(**spec.arguments(call))
        results = found if isinstance(found, tuple) else (found,)
        return tuple(
            None if result is None or like is None else result.to(like.dtype).contiguous()
            for result, like in zip(results, alike, strict=True)
        )

    return launch


def present(tensor: torch.Tensor | None) -> torch.Tensor:
    """A tensor that is not None, for type checkers."""
    assert tensor is not None
    return tensor


def copies(prepared: Prepared, call: Call, results: Outputs) -> Callable[[], object] | None:
    """A function that makes only the copies of time-axis tensors that a prepared call makes; None where it makes none.

    Args:
        prepared: The candidate.
        call: Its arguments.
        results: Results of its launch, in the plan's layouts.
    """
    if not prepared.moves and not prepared.restore:
        return None
    moves = [(present(call.tensors[i]), layout) for i, layout in prepared.moves]
    backs = [tensor for i in prepared.restore if (tensor := results[i]) is not None]

    def copy() -> None:
        for tensor, layout in moves:
            layouts.relayout(tensor, layout)
        for tensor in backs:
            layouts.relayout(tensor, Layout.STRIDE_HV)

    return copy
