"""The record of everything that a function does to tensors: its launches, its allocations and what torch does between.

The function runs on tensors without memory, so that recording costs nothing on a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import direct, launcher

BLOCK = 512  # torch's allocators hand out multiples of it
ALLOCATIONS = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)


@dataclass(eq=False)
class Memory:
    """An allocation that the function's tensors lie in.

    Attributes:
        bytes: Its size, rounded up as allocators do.
        whole: The tensor that it was allocated as.
        given: Whether the caller handed it in.
        made: Whether it is the result of an operator of torch, which allocates it.
        owner: The tensor that has to exist for it; None as long as only addresses in it are used.
        first: The step that uses it first; -1: no step uses it.
        last: The step that uses it last; the number of steps, for a result.
        name: What the generated text calls the tensor that owns it.
    """

    bytes: int
    whole: View
    given: bool = False
    made: bool = False
    owner: View | None = None
    first: int = -1
    last: int = -1
    name: str = ""

    def use(self, step: int) -> None:
        """Note that a step uses it; steps come in order."""
        self.first = step if self.first < 0 else self.first
        self.last = step


class View(NamedTuple):
    """A tensor, as a part of the memory that it lies in. Its offset counts elements from the start of the memory."""

    memory: Memory
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Launched:
    """A step that launches a kernel. A tensor among its arguments is recorded as a `View`."""

    bound: launcher.BoundKernel
    grid: int
    arguments: tuple[Any, ...]
    facts: direct.Facts


@dataclass(frozen=True)
class Worked:
    """A step that an operator of torch does between launches. Its result is None where it writes in place."""

    function: Callable[..., object]
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    result: View | None


class UnpreparedError(Exception):
    """The function does something that cannot be repeated from a record."""


class Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context around a function, which records everything that the function does to tensors without memory.

    Args:
        index: Index of the device that the tensors stand for.
        given: The function's tensors.
    """

    def __init__(self, index: int, given: Sequence[Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.index = index
        self.steps: list[Launched | Worked] = []
        self.memories: dict[int, Memory] = {}
        # Kept alive: the storage of a freed tensor would give its address, which tells memories apart, to another one.
        self.alive: list[Tensor] = []
        for tensor in given:
            if tensor is not None:
                self.remember(tensor).given = True

    def remember(self, tensor: Tensor) -> Memory:
        """Record the memory of a new tensor."""
        storage = tensor.untyped_storage()
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        memory = Memory(size, None)  # type: ignore[arg-type]
        self.memories[storage._cdata] = memory
        memory.whole = self.view(tensor)
        self.alive.append(tensor)
        return memory

    def knows(self, tensor: Tensor) -> bool:
        """Whether the memory of a tensor is recorded."""
        return tensor.untyped_storage()._cdata in self.memories

    def view(self, tensor: Tensor) -> View:
        """A tensor as a view of its memory."""
        memory = self.memories[tensor.untyped_storage()._cdata]
        return View(memory, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def own(self, tensor: Tensor) -> View:
        """The view of a tensor that the next step uses and that has to exist then, not only its address."""
        view = self.view(tensor)
        memory, whole = view.memory, view.memory.whole
        memory.use(len(self.steps))
        if memory.owner is None:
            covers = view.offset == 0 and view.dtype is whole.dtype and math.prod(view.shape) == math.prod(whole.shape)
            memory.owner = view if covers else whole
        return view

    def launched(self, record: launcher.LaunchRecord) -> None:
        """Record a launch."""
        bound = launcher.bind(record.kernel, **record.constants)
        known = None if bound.parameters is None else direct.facts(bound.parameters, record.arguments)
        if known is None or record.grid < 1:
            raise UnpreparedError
        arguments = tuple([self.view(x) if isinstance(x, Tensor) else x for x in record.arguments])
        for argument in arguments:
            if isinstance(argument, View):
                argument.memory.use(len(self.steps))
        self.steps.append(Launched(bound, record.grid, arguments, (self.index, known[1])))

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        if func in ALLOCATIONS:
            self.remember(result)
            return result
        in_place = func._schema.is_mutable
        results = result if isinstance(result, (list, tuple)) else [result]
        if not in_place and all(isinstance(x, Tensor) and self.knows(x) for x in results):
            return result  # a view
        nested = [x for values in args if isinstance(values, (list, tuple)) for x in values] + list(named.values())
        hidden = any(isinstance(x, (Tensor, torch.device)) for x in nested)
        if not isinstance(result, Tensor) or self.knows(result) != in_place or hidden:
            raise UnpreparedError
        arguments = tuple([self.own(x) if isinstance(x, Tensor) else x for x in args])
        made = None
        if not in_place:
            self.remember(result).made = True
            made = self.own(result)
        # A method of a tensor costs less than an operator of torch.
        method = getattr(Tensor, func._schema.name.removeprefix("aten::"), func)
        self.steps.append(Worked(method, arguments, named, made))
        return result
