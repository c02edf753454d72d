"""What kernels read and write in Triton's interpreter: every address of a launch beside the tensors it was handed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from triton.runtime import interpreter

from layout_tuner.ascend.candidates import named_arguments
from layout_tuner.launch.launcher import LaunchRecord

Addresses = numpy.ndarray[Any, Any]
# (what is done, bytes of an element, addresses, those that are not masked) -> those that may be touched
See = Callable[[str, int, Addresses, Addresses], Addresses]


@contextmanager
def seen_by(see: See) -> Iterator[None]:
    """Loads and stores touch what `see` leaves of their masks; what a load may not touch is 0."""
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        left = see("load", size, pointers.data, mask.data)
        return load(self, pointers, interpreter.TensorHandle(left, mask.dtype), *rest)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        left = see("store", size, pointers.data, mask.data)
        return store(self, pointers, value, interpreter.TensorHandle(left, mask.dtype), *rest)

    builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
    try:
        yield
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store


def outside(record: LaunchRecord) -> list[str]:
    """Run a recorded launch; what it reads or writes beside the tensors it was handed, none of which is touched."""
    given = {name: x for name, x in named_arguments(record).items() if isinstance(x, torch.Tensor)}
    extents = [(x.data_ptr(), x.data_ptr() + span(x) * x.element_size()) for x in given.values()]
    found: list[str] = []

    def see(what: str, size: int, addresses: Addresses, mask: Addresses) -> Addresses:
        inside = numpy.zeros_like(mask)
        for first, end in extents:
            inside |= (addresses >= first) & (addresses <= end - size)
        stray = addresses[mask & ~inside]
        if len(stray):
            far = min(
                ((abs(int(stray[0]) - edge), int(stray[0]) - edge, name) for name, extent in zip(given, extents)
                 for edge in extent)
            )  # fmt: skip
            found.append(f"{record.kernel.__name__}: {what} {far[1]:+d} bytes from an end of {far[2]}")
        return mask & inside

    with seen_by(see):
        record.kernel[(record.grid,)](*record.arguments, **record.constants)
    return found


def span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last of a tensor, both counted."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) if tensor.numel() else 0


@dataclass(eq=False)
class Nowhere:
    """Stands for a tensor without memory where the interpreter takes a tensor's address."""

    name: str
    dtype: torch.dtype
    address: int
    bytes: int

    def data_ptr(self) -> int:
        return self.address

    def untyped_storage(self) -> "Nowhere":
        return self

    def cpu(self) -> "Nowhere":
        return self

    def new_empty(self, *_: object, **__: object) -> "Nowhere":
        return self

    def set_(self, *_: object) -> "Nowhere":
        return self

    def copy_(self, *_: object) -> "Nowhere":
        return self

    def storage_offset(self) -> int:
        return 0

    size = stride = storage_offset


def ends(*bounds: Any) -> list[int]:
    """The first and the last of a range, in place of all of it."""
    every = range(*[int(bound) for bound in bounds])
    return sorted({every[0], every[-1]}) if every else []


def reached(record: LaunchRecord, monkeypatch: Any) -> dict[str, tuple[int, int, int]]:
    """The bytes that a recorded launch would touch of each tensor without memory, had it one program.

    Every loop takes its first and its last turn only. What lies outside every tensor counts for the last one.

    Returns:
        First byte touched, the byte after the last one touched, and how many there are, by argument.
    """
    arguments, tensors = [], []
    for name, value in named_arguments(record).items():
        if isinstance(value, torch.Tensor):
            # Far enough apart that no wrong address of one tensor lies in another.
            tensors.append(Nowhere(name, value.dtype, (len(tensors) + 1) << 44, span(value) * value.element_size()))
            value = tensors[-1]
        arguments.append(value)
    touched: dict[str, tuple[int, int, int]] = {}

    def see(_: str, size: int, addresses: Addresses, mask: Addresses) -> Addresses:
        for address in (addresses[mask].min(), addresses[mask].max()) if mask.any() else ():
            tensor = min(tensors, key=lambda x: abs(int(address) - x.address))
            at = int(address) - tensor.address
            first, last, _ = touched.get(tensor.name, (at, at + size, 0))
            touched[tensor.name] = min(first, at), max(last, at + size), tensor.bytes
        return numpy.zeros_like(mask)

    for module in {record.kernel.fn.__module__}:
        monkeypatch.setattr(f"{module}.range", ends, raising=False)
    with seen_by(see):
        record.kernel[(1,)](*arguments, **record.constants)
    return touched
