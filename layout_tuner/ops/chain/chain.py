"""A chain bound to a problem: its forward, its backward, and how they run."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from ...device.failures import first_line
from ...errors import PackingError
from ...launch.prepared import bind_candidate
from ...launch.replay import Replayed
from ...spec import registry
from ...spec.declaration import Launch, Problem
from ...spec.layouts import Layout
from ...spec.operands import Outputs, Value
from .stages import Reads, Stage

log = logging.getLogger(__name__)

Scalars = tuple["float | None", ...]
Packed = tuple["Tensor | None", "Tensor | None"]  # cu_seqlens and chunk_indices


SavedT = TypeVar("SavedT", bound=tuple["Tensor | None", ...])


class Chain(ABC, Generic[SavedT]):
    """The stages of an op bound to one layout; called, it runs forward and, with gradients, backward.

    A subclass binds its stages in `__init__` with `stage` and writes `launch_forward` and `launch_backward`. Running,
    replaying from prepared lists, falling back and autograd (`autograd.call`) and the traced form (`compiled`) follow.

    Args:
        problem: Key and chip of the whole op.
        layout: Of the time-axis tensors between the stages.

    Attributes:
        saved_type: `NamedTuple` of what the forward leaves for the backward.
        sources: Of each of its fields that may be an input as it came, the input's name.
        made: Shapes of the fields that never are, in the symbols of `Operand.dims`.
        turning: Fields of shape `[B, T, HV]` that lie in the chain's layout.
        arriving: Fields on the time axis that lie as their input arrived.
        output_like: Field that has the shape and dtype of the first output.
        linear: Inputs that the outputs are linear in, taken together.
    """

    saved_type: ClassVar[type[Any]]
    sources: ClassVar[Mapping[str, str]]
    made: ClassVar[Mapping[str, str]] = {}
    turning: ClassVar[tuple[str, ...]] = ()
    arriving: ClassVar[tuple[str, ...]] = ()
    output_like: ClassVar[str]
    linear: ClassVar[tuple[str, ...]] = ()

    def __init__(self, problem: Problem, layout: Layout) -> None:
        self.problem, self.layout, self.BT = problem, layout, problem.BT
        spec = self.spec = registry.lookup(problem.key.op)
        differentiates = spec.gradient_option
        self.grad = differentiates is not None and problem.form.flag(differentiates.label)
        self.inputs = len([operand for operand in spec.operands if not operand.given_with])
        self.results = len(spec.outputs) - self.inputs if differentiates is not None else len(spec.outputs)
        self.instead: Chain[SavedT] | None = None
        self.dense_forward, self.dense_backward = Replayed(self._dense_forward), Replayed(self._dense_backward)

    def stage(
        self, op: str, reads: Reads | None = None, writes: Mapping[str, Layout] | None = None, **options: Value
    ) -> Launch:
        """The launch of a stage; the arguments are those of `Stage`."""
        return Stage(op, reads or {}, writes or {}, options).bind(self.problem, self.layout)

    @abstractmethod
    def launch_forward(self, inputs: Sequence[Any], scalars: Scalars, packed: Packed) -> tuple[Outputs, SavedT]:
        """The forward, stage by stage: the op's outputs without gradients, and what the backward needs."""

    @abstractmethod
    def launch_backward(
        self, saved: SavedT, grads: Sequence[Tensor | None], wanted: Sequence[bool], scalars: Scalars, packed: Packed
    ) -> Outputs:
        """Gradients of the inputs that `wanted` names, in their order; None for the others.

        Args:
            saved: What the forward left. Hooks may hand a time-axis tensor back in another layout.
            grads: Of the outputs, contiguous; only the first is always there.
            wanted: Which inputs' gradients.
            scalars: As the forward had them.
            packed: Likewise.
        """

    def forward(self, inputs: Sequence[Any], scalars: Scalars, packed: Packed) -> tuple[Outputs, SavedT]:
        """`launch_forward`, from a prepared list where the batch is not packed."""
        if packed[0] is None:
            made = self.dense_forward(tuple(inputs), scalars)
            return tuple(made[: self.results]), self.saved_type._make(made[self.results :])
        return self.launch_forward(inputs, scalars, packed)

    def _dense_forward(self, tensors: Sequence[Tensor | None], scalars: Scalars) -> Outputs:
        """The forward as a function of tensors."""
        outputs, saved = self.launch_forward(tensors, scalars, (None, None))
        return (*outputs, *saved)

    def backward(
        self, saved: SavedT, grads: Sequence[Tensor | None], wanted: Sequence[bool], scalars: Scalars, packed: Packed
    ) -> Outputs:
        """`launch_backward`, likewise."""
        grads = [None if grad is None else grad.contiguous() for grad in grads]
        if packed[0] is None:
            return tuple(self.dense_backward((*saved, *grads), tuple(wanted), scalars))
        return self.launch_backward(saved, grads, wanted, scalars, packed)

    def _dense_backward(self, tensors: Sequence[Tensor | None], wanted: Sequence[bool], scalars: Scalars) -> Outputs:
        """The backward as a function of tensors."""
        kept = len(self.saved_type._fields)
        saved = self.saved_type._make(tensors[:kept])
        return self.launch_backward(saved, tensors[kept:], wanted, scalars, (None, None))

    def backward_or_default(
        self, saved: SavedT, grads: Sequence[Tensor | None], wanted: Sequence[bool], scalars: Scalars, packed: Packed
    ) -> Outputs:
        """`backward`; where it fails, that of the default candidates, from then on.

        Raises:
            Exception: What the chain raised, where the default does not run either.
        """
        arguments = (saved, grads, wanted, scalars, packed)
        if self.instead is not None:
            return self.instead.backward(*arguments)
        try:
            return self.backward(*arguments)
        except Exception as error:
            if isinstance(error, PackingError):
                raise
            key, chip = self.problem.key, self.problem.chip
            instead = bind_candidate(self.spec, Problem(key=key, chip=chip), self.spec.default(key, chip))
            assert isinstance(instead, Chain)
            try:
                gradients: Outputs = instead.backward(*arguments)
            except Exception:
                raise error from None
            if not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
                log.warning("%s: the backward failed (%s): the default candidates run", key, first_line(error))
                self.instead = instead
            return gradients

    def __call__(self, *arguments: Any) -> Outputs:
        """Forward and, with gradients, backward, as the tuner runs it: the operands, then the rest."""
        operands, scalars = arguments[: len(self.spec.operands)], arguments[len(self.spec.operands) : -2]
        inputs, grads, packed = operands[: self.inputs], operands[self.inputs :], arguments[-2:]
        outputs, saved = self.forward(inputs, scalars, packed)
        if not self.grad:
            return (*outputs, *[None] * (len(self.spec.outputs) - len(outputs)))
        wanted = [tensor is not None for tensor in inputs]
        return (*outputs, *self.backward(saved, grads, wanted, scalars, packed))
