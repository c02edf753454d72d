"""A kernel with its compile-time constants bound, launched with the run-time arguments in order.

Every launch of this project passes here, and none names `num_warps` or `num_stages`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

REFUSED = ("num_warps", "num_stages")
Constant = bool | int | float | str


@dataclass(frozen=True, kw_only=True)
class LaunchRecord:
    """A launch that was recorded instead of run.

    Attributes:
        kernel: The jitted function.
        grid: Programs.
        arguments: Run-time arguments in the kernel's order: tensors, numbers or None.
        constants: Compile-time constants by name.
    """

    kernel: Any
    grid: int
    arguments: tuple[Any, ...]
    constants: Mapping[str, Constant]


_recording = threading.local()


@contextmanager
def recording() -> Iterator[list[LaunchRecord]]:
    """Record this thread's launches instead of running them; tensors may be on the `meta` device."""
    records: list[LaunchRecord] = []
    previous = getattr(_recording, "records", None)
    _recording.records = records
    try:
        yield records
    finally:
        _recording.records = previous


class BoundKernel:
    """A kernel with its constants: `bound(grid, *run_time_arguments)` launches it on the current stream."""

    __slots__ = ("constants", "kernel")

    def __init__(self, kernel: Any, constants: Mapping[str, Constant]) -> None:
        self.kernel = kernel
        self.constants = dict(constants)

    def __call__(self, grid: int, *arguments: Any) -> None:
        records = getattr(_recording, "records", None)
        if records is not None:
            records.append(
                LaunchRecord(kernel=self.kernel, grid=grid, arguments=arguments, constants=self.constants)
            )
            return
        if grid > 0:
            self.kernel[(grid,)](*arguments, **self.constants)


def bind(kernel: Any, **constants: Constant) -> BoundKernel:
    """Bind a kernel's compile-time constants.

    Raises:
        ValueError: `num_warps` or `num_stages` among them: neither exists on an Ascend NPU, and no configuration of
            this project sets them.
    """
    refused = [name for name in REFUSED if name in constants]
    if refused:
        raise ValueError(f"{' and '.join(refused)} cannot be set: no launch of this project carries them")
    return BoundKernel(kernel, constants)
