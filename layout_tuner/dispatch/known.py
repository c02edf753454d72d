"""The launches that this process prepared, by the signatures of their calls."""

from __future__ import annotations

import torch

from ..launch.guards import Fits, Run, Signature, fitting, guard, running
from ..launch.prepared import Prepared
from ..spec.declaration import OpSpec


class Known:
    """A signature whose launch is prepared and has run once, with the test whether a call has that signature.

    Args:
        spec: The op.
        signature: The signature.
        prepared: Its prepared launch.
        tensors: The operands of a call with that signature.

    Attributes:
        fits: The test.
        run: The test and, where a call passes it, the launch.
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
    """Prepared launches by signature, and shortcuts to them; clearing it forgets the shortcuts too.

    Attributes:
        last: For each op, the signature of its last call.
        by_shape: For each op and shape of the main tensor, the signature of the last such call.
        bound: Prepared launches that packed batches of one bucket share.
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
