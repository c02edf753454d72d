"""What was prepared in this process, by the signature of its call."""

from __future__ import annotations

import torch

from ..launch.guards import Fits, Run, Signature, fitting, guard, running
from ..launch.prepared import Prepared
from ..spec.declaration import OpSpec


class Known:
    """A signature that was prepared and has run, with the test whether a call has it.

    Args:
        spec: The op.
        signature: The signature.
        prepared: What runs it.
        tensors: The operands of a call that has it.

    Attributes:
        fits: The test.
        run: The test and, where it passes, the launch.
    """

    __slots__ = ("fits", "prepared", "run", "signature")

    def __init__(
        self, spec: OpSpec, signature: Signature, prepared: Prepared, tensors: tuple[torch.Tensor | None, ...]
    ) -> None:
        check = guard(tensors)
        launch = prepared.launch if prepared.direct else prepared
        self.fits: Fits = fitting(spec, signature, check)
        self.run: Run = running(spec, signature, check, launch, spread=prepared.direct, tally=prepared.tally)
        self.signature = signature
        self.prepared = prepared


class Memory(dict[Signature, Prepared]):
    """What was prepared, by signature, and shortcuts to it; clearing it forgets all.

    Attributes:
        last: The last call of each op.
        by_shape: The last call of an op with that shape of the main tensor.
        bound: What packed batches of one bucket share.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[OpSpec, Known] = {}
        self.by_shape: dict[tuple[OpSpec, object], Known] = {}
        self.bound: dict[tuple[object, ...], Prepared] = {}

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self.last.clear()
        self.by_shape.clear()
        self.bound.clear()
