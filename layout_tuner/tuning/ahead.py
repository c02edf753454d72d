"""Compile a key's kernels in parallel processes, into Triton's cache on the disk, before anything runs.

What a candidate launches is recorded on tensors without values, as `ascend` does, and each kernel that differs is
compiled as its first launch would. A kernel that fails to compile here fails again at its launch, where the error is
blamed on its candidate.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..device import driver
from ..launch import launcher
from ..launch.direct import Constant
from ..launch.prepared import Prepared
from ..processes import die_with_parent
from ..spec.declaration import Candidate, OpSpec, Problem
from .inputs import synthesize

log = logging.getLogger(__name__)

MOST_PROCESSES = 8


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A kernel to compile.

    Attributes:
        module, name: Where it is.
        arguments: Run-time arguments in its order, a dtype for a tensor.
        constants: Compile-time constants, and options of the compiler.
    """

    module: str
    name: str
    arguments: tuple[Any, ...]
    constants: tuple[tuple[str, Constant], ...]


def processes() -> int:
    """How many compilers run at a time: half of the cores that this process may use, at most `MOST_PROCESSES`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_PROCESSES, cores // 2))


def units(spec: OpSpec, problem: Problem, candidates: Iterable[Candidate]) -> list[Unit]:
    """Every kernel that candidates launch, each once."""
    call = synthesize(spec, problem.key, "meta")
    arguments = (call.tensors, call.scalars, call.cu_seqlens, call.chunk_indices)
    units: dict[str, Unit] = {}
    for candidate in candidates:
        try:
            with launcher.recording() as records:
                Prepared(spec, problem, candidate, call)(*arguments)
        except Exception as error:  # it will be this candidate's when it is tried
            log.info("%s: not compiled ahead: %s", candidate.id, error)
        for record in records:
            if type(record.kernel).__name__ == "JITFunction":
                unit = unit_of(record)
                units.setdefault(repr(unit), unit)
    return list(units.values())


def unit_of(record: launcher.LaunchRecord) -> Unit:
    """The kernel to compile for a launch."""
    function = record.kernel.fn
    return Unit(
        module=function.__module__,
        name=function.__name__,
        arguments=tuple(x.dtype if isinstance(x, torch.Tensor) else x for x in record.arguments),
        constants=(*record.constants.items(), *record.options.items()),
    )


def begin(parent: int) -> None:
    """Prepare a compiling process: it runs at low priority and ends with the process that started it."""
    die_with_parent(parent)
    os.nice(10)


def compile_unit(unit: Unit, device: str) -> None:
    """Compile a kernel for a device, by its name."""
    kernel = getattr(importlib.import_module(unit.module), unit.name)
    with driver.guard(driver.named(device)):
        kernel.warmup(*unit.arguments, grid=(1,), **dict(unit.constants))


def compile_ahead(wanted: list[Unit], device: torch.device, seconds: float, announce: Callable[[float], None]) -> int:
    """Compile kernels in processes of their own, and say how many are ready.

    Args:
        wanted: The kernels.
        device: For which device.
        seconds: How long all of it may take; what is not done by then is left to its first launch.
        announce: Is told how long that may take.
    """
    if len(wanted) < 2:
        return 0
    announce(seconds)
    pool = concurrent.futures.ProcessPoolExecutor(
        min(processes(), len(wanted)),
        multiprocessing.get_context("spawn"),
        initializer=begin,
        initargs=(os.getpid(),),
    )
    futures = [pool.submit(compile_unit, unit, str(device)) for unit in wanted]
    done, late = concurrent.futures.wait(futures, seconds)
    pool.shutdown(wait=False, cancel_futures=True)
    errors = [error for future in done if (error := future.exception()) is not None]
    for error in errors:
        log.info("not compiled ahead: %s: %s", type(error).__name__, error)
    ready = len(wanted) - len(errors) - len(late)
    log.info("%d kernels compiled ahead, %d not", ready, len(wanted) - ready)
    return ready
