"""Triton's own front half, binder and specialisation included, over kernels that are recorded instead of compiled."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import make_launcher
from triton.runtime import jit
from triton.runtime.driver import driver

from layout_tuner.launch import direct

STREAM = 77
# Of `chunk_bwd_dv_local_full`.
CONSTANTS: dict[str, Any] = dict(
    H=2, HV=4, K=16, V=16, BT=16, BK=16, BV=16, USE_G=True, USE_G_GAMMA=False, USE_A=False, G_T_CONTIG=False,
    IS_VARLEN=False, DOT_PRECISION="ieee",
)  # fmt: skip


@dataclass
class Launch:
    """A launch that arrived.

    Attributes:
        compiled: What was launched.
        arguments: The kernel's, as handed over.
        hooks: Profiler hooks handed over.
        triton: Whether Triton launched it, rather than we.
    """

    compiled: Any
    grid: int
    stream: int
    arguments: tuple[Any, ...]
    hooks: tuple[Any, Any]
    triton: bool


class Launcher:
    """Stands for Triton 3.6's CUDA launcher: checks what it is given as the generated C does, and records it."""

    global_scratch_size = 0
    profile_scratch_size = 0
    launch_cooperative_grid = False
    launch_pdl = False

    def __init__(self, compiled: Any, launches: list[Launch]) -> None:
        self.compiled = compiled
        self.launches = launches
        text = make_launcher({}, compiled.signature, None)
        self.format = re.search(r'PyArg_ParseTuple\(args, "(\w+)"', text).group(1)
        self.triton = False

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        self.triton = True
        self.launch(x, y, z, stream, function, False, False, None, None, *rest)
        self.triton = False

    def launch(self, *arguments: Any) -> None:
        assert len(arguments) == len(self.format)
        for kind, argument in zip(self.format, arguments, strict=True):
            if kind in "iLlKIp":
                assert isinstance(argument, int)
                assert kind != "i" or -(2**31) <= argument < 2**31
            if kind == "d":
                assert isinstance(argument, float)
        grid, y, z, stream, function, cooperative, dependent, _, _, metadata, _, enter, leave = arguments[:13]
        assert (y, z, cooperative, dependent) == (1, 1, False, False)
        assert (function, metadata) == (self.compiled.function, self.compiled.packed_metadata)
        self.launches.append(Launch(self.compiled, grid, stream, arguments[13:], (enter, leave), triton=self.triton))


@dataclass
class Triton:
    """What the stubbed Triton did.

    Attributes:
        compiles: Keys that were compiled, in order.
        launches: Launches, in order.
        index: Index of the current device; tensors on a CPU say -1.
    """

    compiles: list[str] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    index: int = -1

    # The driver.
    def get_current_device(self) -> int:
        return self.index

    def get_current_stream(self, index: int) -> int:
        return STREAM + index

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def compile(self, kernel: Any, key: str, signature: dict[str, str], device: int) -> Any:
        """Stands for a compiled kernel."""
        self.compiles.append(key)
        number = len(self.compiles)
        compiled = SimpleNamespace(
            key=key,
            signature=signature,
            device=device,
            function=1000 + number,
            packed_metadata=(4, 1, number),
            launch_metadata=lambda grid, stream, *arguments: {"name": kernel.__name__, "stream": stream},
        )
        compiled.run = Launcher(compiled, self.launches)
        kernel.device_caches[device][0][key] = compiled
        return compiled


def wanted(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], device: int = -1) -> str:
    """The key under which Triton itself would look for a kernel that fits these arguments."""
    binder = kernel.device_caches[device][4]
    _, specialization, options = binder(*arguments, **constants, debug=False, instrumentation_mode="")
    return jit.compute_cache_key({}, specialization, options)


def compilable(kernel: Any) -> jit.JITFunction:
    """A kernel that the tests' process made for the interpreter, as it is made for a device."""
    if isinstance(kernel, jit.JITFunction):
        return kernel
    return jit.JITFunction(kernel.fn, do_not_specialize=kernel.kwargs.get("do_not_specialize"))


@contextmanager
def stubbed() -> Iterator[Triton]:
    """Triton 3.6 for CUDA, down to where it would compile and launch."""
    made = Triton()
    compiled_by_triton = jit.JITFunction._do_compile

    def compile_instead(
        self: Any, key: str, signature: Any, device: int, constants: Any, options: Any, attributes: Any, warmup: bool
    ) -> Any:
        return made.compile(self, key, signature, device)

    previous = driver._active
    driver.set_active(made)
    direct.style.cache_clear()
    jit.JITFunction._do_compile = compile_instead
    try:
        yield made
    finally:
        jit.JITFunction._do_compile = compiled_by_triton
        driver._active = previous
        direct.style.cache_clear()


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous, one element after an aligned address."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    room[1:] = tensor.reshape(-1)
    return room[1:].view(tensor.shape)
