"""A kernel with its compile-time constants bound, launched with the run-time arguments in order.

Every launch of this project passes here, and none names `num_warps` or `num_stages`. The first launch with arguments
of some kind goes through Triton, which compiles; the next ones launch what it compiled, see `direct`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..device import driver, interpreter
from ..device.failures import classify, first_line
from ..errors import REFUSAL, REFUSED
from ..forking import ProcessLock, in_child
from . import direct
from .direct import Constant, DirectLaunch

log = logging.getLogger(__name__)

# How often a compiler may crash over one kernel before that is its failure.
CRASHES = 2


@dataclass(frozen=True, kw_only=True)
class LaunchRecord:
    """A launch that was recorded instead of run.

    Attributes:
        kernel: The jitted function.
        grid: Programs.
        arguments: Run-time arguments in the kernel's order: tensors, numbers or None.
        constants: Compile-time constants by name.
        options: Options of the compiler by name.
    """

    kernel: Any
    grid: int
    arguments: tuple[Any, ...]
    constants: Mapping[str, Constant]
    options: Mapping[str, bool] = field(default_factory=dict)


Handler = Callable[[LaunchRecord], None]

_intercepting = threading.local()
_interceptors = 0  # of all threads: one global is all that a launch asks while nobody intercepts
_interceptors_lock = ProcessLock()


@in_child
def _count_anew() -> None:
    """Counts, in a child, only what the thread that forked intercepts: the other threads are not there any more."""
    global _interceptors
    _interceptors = getattr(_intercepting, "depth", 0)


@contextmanager
def intercepting(handler: Handler) -> Iterator[None]:
    """Call `handler` with each launch of this thread, at once and in order, instead of running it."""
    global _interceptors
    previous = getattr(_intercepting, "handler", None)
    depth = getattr(_intercepting, "depth", 0)
    _intercepting.handler, _intercepting.depth = handler, depth + 1
    with _interceptors_lock:
        _interceptors += 1
    try:
        yield
    finally:
        with _interceptors_lock:
            _interceptors -= 1
        _intercepting.handler, _intercepting.depth = previous, depth


def intercepted() -> bool:
    """Whether any thread intercepts launches."""
    return _interceptors > 0


@contextmanager
def recording() -> Iterator[list[LaunchRecord]]:
    """Record this thread's launches instead of running them; tensors may be on the `meta` device."""
    records: list[LaunchRecord] = []
    with intercepting(records.append):
        yield records


class BoundKernel:
    """A kernel with its constants: `bound(grid, *run_time_arguments)` launches it on the current stream.

    The arguments' device has to be the current one.

    Args:
        kernel: The jitted function.
        constants: Its compile-time constants.
        options: Options of the compiler.

    Attributes:
        direct: Launches arguments like those of the newest launch, and returns whether they were like them.
        variants: Such a function for each kind of arguments that was launched; None where Triton has to launch them.
        names: For each kind of arguments what `direct.Style.names` gives for the kernel compiled for them.
        parameters: The kernel's run-time parameters; None while unknown, and where only Triton can launch it.
        style: How this process launches directly; None likewise.
    """

    __slots__ = ("constants", "direct", "kernel", "names", "options", "parameters", "style", "variants")

    def __init__(self, kernel: Any, constants: Mapping[str, Constant], options: Mapping[str, bool]) -> None:
        self.kernel = kernel
        self.constants = dict(constants)
        self.options = options
        self.variants: dict[direct.Facts, DirectLaunch | None] = {}
        self.names: dict[direct.Facts, Mapping[str, Any] | None] = {}
        self.direct: DirectLaunch = self.first
        self.parameters: list[Any] | None = None
        self.style: direct.Style | None = None

    def __call__(self, grid: int, *arguments: Any) -> None:
        if (_interceptors and self.intercept(grid, arguments)) or self.direct(grid, *arguments):
            return
        self.launch(grid, arguments)

    def intercept(self, grid: int, arguments: tuple[Any, ...]) -> bool:
        """Hand the launch to this thread's handler, if there is one; returns whether there is."""
        handler: Handler | None = getattr(_intercepting, "handler", None)
        if handler is None:
            return False
        handler(
            LaunchRecord(
                kernel=self.kernel, grid=grid, arguments=arguments, constants=self.constants, options=self.options
            )
        )
        return True

    def first(self, grid: int, *arguments: Any) -> bool:
        """Find out, at the first launch, how this kernel is launched; Triton makes this launch itself."""
        if interpreter.interpreted(self.kernel):
            direct.say_interpreted()
            self.direct = self.interpreted
            return self.interpreted(grid, *arguments)
        if type(self.kernel).__name__ == "JITFunction":
            self.style = direct.style()
            self.parameters = direct.run_time_parameters(self.kernel, self.constants)
        self.direct = not_yet if self.style and self.parameters else self.plain
        return False

    def interpreted(self, grid: int, *arguments: Any) -> bool:
        """Launch in Triton's interpreter, one thread at a time."""
        with interpreter.interpreter_lock:
            return self.plain(grid, *arguments)

    def plain(self, grid: int, *arguments: Any) -> bool:
        """Launch through Triton."""
        if grid > 0:
            self.through_triton(grid, arguments)
        return True

    def through_triton(self, grid: int, arguments: tuple[Any, ...]) -> Any:
        """Launch through Triton, which may compile. A compiler that crashes, as Ascend's does at times, runs again.

        Where the compiler crashed nothing was launched, so that no launch happens twice.
        """
        named = self.constants if interpreter.interpreted(self.kernel) else {**self.constants, **self.options}
        for _ in range(CRASHES):
            try:
                return self.kernel[(grid,)](*arguments, **named)
            except Exception as error:
                if classify(error) != "crash":
                    raise
                log.warning("the compiler of %s crashed, trying again: %s", self.kernel, first_line(error))
        return self.kernel[(grid,)](*arguments, **named)

    def launch(self, grid: int, arguments: tuple[Any, ...]) -> None:
        """Launch arguments of another kind than the last ones: directly where the kind is known, else by Triton."""
        if grid <= 0:
            return
        known = None
        if self.style is not None and self.parameters is not None:
            known = direct.facts(self.parameters, arguments)
        if known is None:
            self.plain(grid, *arguments)
            return
        variant = self.variants.get(known)
        if variant is not None and variant(grid, *arguments):
            self.direct = variant
            return
        compiled = self.through_triton(grid, arguments)
        if known not in self.variants and compiled is not None and known[0] == driver.launch_index():
            self.keep(known, compiled)

    def keep(self, known: direct.Facts, compiled: Any) -> None:
        """From now on, launch arguments with these facts directly."""
        assert self.style is not None
        names = self.names[known] = self.style.names(compiled)
        made = None
        if names is not None:
            made = direct.direct_launch(self.style, self.kernel, self.constants, known, names)
        self.variants[known] = made
        if made is not None:
            self.direct = made


def not_yet(grid: int, *arguments: Any) -> bool:
    """The direct launch of a kernel that has not been compiled yet: it launches nothing."""
    return False


_bound: dict[tuple[object, ...], BoundKernel] = {}
_compiling = threading.local()


@contextmanager
def compiling(options: Mapping[str, bool]) -> Iterator[None]:
    """Give what this thread binds these options of the compiler too."""
    before = getattr(_compiling, "options", {})
    _compiling.options = {**before, **options}
    try:
        yield
    finally:
        _compiling.options = before


def bind(kernel: Any, **constants: Constant) -> BoundKernel:
    """Bind a kernel's compile-time constants. The same kernel and constants give the same object every time.

    Raises:
        ValueError: `num_warps` or `num_stages` is among the constants: neither exists on an Ascend NPU, and no
            configuration of this project sets them.
    """
    refused = [name for name in REFUSED if name in constants]
    if refused:
        raise ValueError(f"{' and '.join(refused)}: {REFUSAL}")
    options: Mapping[str, bool] = getattr(_compiling, "options", {})
    if type(kernel).__name__ != "JITFunction":  # nothing is compiled that could be kept
        return BoundKernel(kernel, constants, options)
    # True, 1 and 1.0 are equal but not the same constant.
    same = (id(kernel), *options.items(), *((name, type(value), value) for name, value in constants.items()))
    bound = _bound.get(same)
    if bound is None or bound.kernel is not kernel:
        bound = _bound[same] = BoundKernel(kernel, constants, options)
    return bound
