"""Classifies failures: the class says for how long a failure is believed, and a line of text says why it happened.

The class comes from the exception's type and from codes that runtimes print, never from words in free text: torch_npu
puts the name of its own source file, `compiler_depend.ts`, into every error.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from typing import Literal

from . import driver

Failure = Literal["", "compile", "crash", "overflow", "memory", "timeout", "wrong", "device"]

# Triton's and triton-ascend's own exceptions, by the names of their classes: the modules that hold them differ.
COMPILERS = frozenset({"CompilationError", "MLIRCompilationError", "PTXASError"})
RESOURCES = "OutOfResources"
# What LLVM's passes of Triton raise, a plain RuntimeError.
PASSES_FAILED = "PassManager::run failed"
# bishengir's plan of on-chip memory that does not fit.
OVERFLOW = re.compile(r"\boverflow, requires \d+ bits while \d+ bits available")
# How programs and those that call them say that a signal ended one.
CRASHED = re.compile(
    r"died with <Signals\.|raised SIG[A-Z]+|PLEASE submit a bug report|Stack dump:|failed with error code (-\d|13[0-9])"
)
# Statuses with which a shell, or a compiler that calls another, passes on a signal that its child died of.
ENDED_BY = (signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL, signal.SIGSEGV)
SIGNALLED = frozenset(128 + number for number in ENDED_BY)
# Lines of a compiler's report that say nothing: triton-ascend's frame, and where Triton begins to quote the source.
FRAME = re.compile(r"^///-+\[(ERROR|INFO)\]|encounters error:$")
PLACE = re.compile(r"^at \d+:\d+:$")


def classify(error: BaseException) -> Failure:
    """The class of a failure.

    `compile`, `overflow`: a compiler refused the kernel. `crash`: a compiler, or the process that tried a candidate,
    was ended by a signal. `memory`: device or host had too little. `timeout`: it did not end in time. `device`: all
    else, such as a fault of the device, of a file system or of its caches; that says nothing about a candidate.
    """
    chain = tuple(causes(error))
    if any(driver.out_of_memory(each) for each in chain):
        return "memory"
    if any(isinstance(each, subprocess.TimeoutExpired) or timed_out(each) for each in chain):
        return "timeout"
    if any(isinstance(each, OSError) or driver.faulted(each) for each in chain):
        return "device"
    if any(crashed(each) for each in chain):
        return "crash"
    kinds = {name for each in chain for name in triton_types(each)}
    if RESOURCES in kinds:
        return "overflow"
    if kinds & COMPILERS:
        return "overflow" if any(OVERFLOW.search(str(each)) for each in chain) else "compile"
    return "compile" if any(str(each) == PASSES_FAILED for each in chain) else "device"


def fatal(error: BaseException) -> bool:
    """Whether an exception means that this process can use the device no more."""
    return any(driver.lost(each) for each in causes(error))


def causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and its causes, outermost first; triton-ascend wraps what the stages of its compiler raise."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (cause.__context__ if triton_types(cause) else None)


def triton_types(error: BaseException) -> set[str]:
    """The names of those classes of an exception that Triton defines."""
    return {kind.__name__ for kind in type(error).__mro__ if kind.__module__.partition(".")[0] == "triton"}


def timed_out(error: BaseException) -> bool:
    """Whether an exception is a `TimeoutError` of ours; one with an `errno` comes from a file system or a network."""
    return isinstance(error, TimeoutError) and error.errno is None


def crashed(error: BaseException) -> bool:
    """Whether a signal ended a compiler: one of its own faults, or one that somebody sent."""
    if isinstance(error, subprocess.CalledProcessError):
        said = error.stderr if isinstance(error.stderr, str) else (error.stderr or b"").decode(errors="replace")
        return error.returncode < 0 or error.returncode in SIGNALLED or bool(CRASHED.search(said))
    return bool(triton_types(error) & COMPILERS and CRASHED.search(str(error)))


def first_line(error: BaseException) -> str:
    """The line of an error's text that says what went wrong, without frames of a traceback."""
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not FRAME.search(line)]
    if not lines:
        return "no message"
    if triton_types(error):
        told = [line for line in lines if OVERFLOW.search(line)] or [line for line in lines if "error:" in line]
        lines = told or lines
    if PLACE.match(lines[0]):  # then the source up to that place, and what is wrong with it
        return f"{lines[0]} {lines[-1]}"
    return lines[0]
