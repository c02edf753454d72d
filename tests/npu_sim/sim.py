"""Steers the simulated `npu` device: its installation, clock, costs, memory and faults.

    sim.install(devices=2)             # once per process, before anything uses torch.device("npu")
    sim.attach_triton()                # Triton kernels run on it through the interpreter
    sim.use_wall_clock(False)          # time is what the test says it is
    sim.launch_cost("dv_local_*", 2.0, G_T_CONTIG=True)
    sim.launch_cost("dv_local_*", 3.0, G_T_CONTIG=False)
    sim.copy_cost(0.5)                 # a device-to-device copy: a relayout through torch
    ...
    sim.reset()

The simulation renames PyTorch's PrivateUse1 backend for the whole process, so its tests need a process of their
own. It says nothing about a real NPU's speed, numerics, buffer limits or races between streams.
"""

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch

from . import build, device_api, triton_bridge
from .device_api import Properties
from .triton_bridge import Cost, Launch

__all__ = [
    "Launch",
    "Properties",
    "advance",
    "attach_triton",
    "capture",
    "compile_to",
    "copy_cost",
    "hide_properties",
    "install",
    "installed",
    "launch_cost",
    "launch_fault",
    "launch_hang",
    "launches",
    "now_ms",
    "properties",
    "recycled_memory",
    "reset",
    "set_properties",
    "stop_queue",
    "sync_count",
    "unsupported_reason",
    "use_wall_clock",
    "without_execution",
    "without_versions",
]

TORCH = "2.13"

# What torch_npu 2.7 says of a queue whose kernel failed, and of one whose kernel did not end.
SOURCE = "build/CMakeFiles/torch_npu.dir/compiler_depend.ts"
_SAID = (
    "synchronize:{source}:484 NPU function error: AclrtSynchronizeDeviceWithTimeout, error code is {code}\n"
    "[ERROR] 2026-01-01-12:00:00 (PID:{pid}, Device:{device}, RankID:-1) ERR00100 PTA call acl api failed\n"
    "[Error]: {meaning}\n"
    "        Rectify the fault based on the error information in the ascend log.\n"
    "EZ9999: Inner Error!"
)
AICORE = 507015, "The aicore execution is abnormal."
TIMEOUT = 507014, "The aicore execution times out."
# After so long the runtime gives a kernel up.
OP_TIMEOUT_S = 547.0
_installed = False


def unsupported_reason() -> str | None:
    """Why the device cannot be simulated here, or None where it can."""
    if torch.__version__.split(".")[:2] != TORCH.split("."):
        wanted = f"the simulated npu device is written against torch {TORCH}'s C++ interfaces"
        return f"{wanted}; this is torch {torch.__version__}"
    if not sys.platform.startswith("linux"):
        return f"the simulated npu device needs Linux; this is {sys.platform}"
    if build.compiler() is None:
        return "the simulated npu device needs a C++ compiler; none was found (tried $CXX, c++, g++)"
    return None


def installed() -> bool:
    """Whether this process has the simulated device."""
    return _installed


def install(devices: int = 1) -> None:
    """Gives this process `devices` simulated devices named npu; compiles them where that is not done yet.

    Raises:
        RuntimeError: It cannot be simulated here, or the process already has another PrivateUse1 backend.
    """
    global _installed
    if _installed:
        if devices != device_api.device_count():
            raise RuntimeError(f"installed with {device_api.device_count()} devices; a process cannot change that")
        return
    if reason := unsupported_reason():
        raise RuntimeError(reason)
    if (name := torch._C._get_privateuse1_backend_name()) != "privateuseone":
        raise RuntimeError(f"this process already has the PrivateUse1 backend {name!r}")
    torch.ops.load_library(str(build.library()))
    torch.utils.rename_privateuse1_backend("npu")
    torch.ops.npu_sim.install(devices, device_api.properties.total_memory)
    torch._register_device_module("npu", device_api)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    atexit.register(_wait_at_exit)
    _installed = True


def _wait_at_exit() -> None:
    """The end of a process waits for its devices, as torch_npu's does."""
    for index in range(device_api.device_count()):
        torch.ops.npu_sim.wait_for_the_end(index)


def attach_triton() -> None:
    """Makes the simulated device Triton's active one; kernels run on it through the interpreter.

    Raises:
        RuntimeError: Triton was imported without TRITON_INTERPRET=1.
    """
    triton_bridge.attach()


def reset() -> None:
    """Back to the state after installation, and devices work again, as after a restart of the process."""
    use_wall_clock(True)
    copy_cost(0.0)
    triton_bridge.costs.clear()
    triton_bridge.launches.clear()
    triton_bridge.faults.clear()
    triton_bridge.compilation = 0
    torch.ops.npu_sim.recycle(False)
    device_api.hidden, device_api.versions_fail = (), False
    torch.ops.npu_sim.set_capturing(False)
    set_properties()
    for index in range(device_api.device_count()):
        torch.ops.npu_sim.revive(index)
        device_api.set_stream(device_api.default_stream(index))
        device_api.reset_peak_memory_stats(index)
    device_api.set_device(0)


# ---- Time


def use_wall_clock(on: bool) -> None:
    """Whether device time passes by itself, or only through `advance` and the costs."""
    torch.ops.npu_sim.use_wall_clock(on)


def advance(ms: float) -> None:
    """Lets device time pass."""
    torch.ops.npu_sim.advance(ms)


def now_ms() -> float:
    """The device's clock, in ms since no particular moment."""
    return float(torch.ops.npu_sim.now_ms())


def launch_cost(kernel: str, ms: Cost, **constexprs: object) -> None:
    """Says how much device time a Triton launch takes.

    Args:
        kernel: Name of the kernel, with the wildcards of `fnmatch`.
        ms: Milliseconds, or a function of the `Launch` that returns them; it may raise, to make the launch fail.
        constexprs: Only launches with these values; names the kernel lacks never match.

    The newest cost that matches counts; a launch that matches none takes no time on a set clock.
    """
    triton_bridge.costs.insert(0, (kernel, constexprs, ms))


def compile_to(number: int) -> None:
    """What kernels are compiled to from now on: each number stands for other binaries of the same sources."""
    triton_bridge.compilation = number


def launch_fault(kernel: str, **constexprs: object) -> None:
    """A launch that the host sees succeed, and that stops its device's queue.

    The next call that queues something or waits raises, once. From then on everything given to the device is dropped
    in silence, memory keeps what it held and events never come, until `reset`.

    Args:
        kernel: As of `launch_cost`.
        constexprs: As of `launch_cost`.
    """
    triton_bridge.faults.insert(0, (kernel, constexprs, lambda launch: stop_queue(launch.device)))


def launch_hang(kernel: str, seconds: float = OP_TIMEOUT_S, **constexprs: object) -> None:
    """A launch that does not end for so long; then its queue stops as `launch_fault`'s.

    Args:
        kernel: As of `launch_cost`.
        seconds: Wall-clock time for which waits for the device last, the end of the process included.
        constexprs: As of `launch_cost`.
    """

    def hang(launch: Launch) -> None:
        torch.ops.npu_sim.occupy(launch.device, seconds, _text(launch.device, *TIMEOUT))

    triton_bridge.faults.insert(0, (kernel, constexprs, hang))


def stop_queue(device: int = 0, *, told: bool = False) -> None:
    """Stops a device's queue as a failing kernel does; `told` where somebody has had the error already."""
    torch.ops.npu_sim.fail(device, _text(device, *AICORE))
    if told:
        with suppress(RuntimeError):
            torch.ops.npu_sim.enter(device)


def _text(device: int, code: int, meaning: str) -> str:
    return _SAID.format(source=SOURCE, code=code, meaning=meaning, pid=os.getpid(), device=device)


def copy_cost(ms: float) -> None:
    """Says how much device time each device-to-device copy takes (`copy_`, `contiguous`, `clone`, `to`)."""
    torch.ops.npu_sim.set_copy_cost(ms)


def launches() -> list[Launch]:
    """The Triton launches on the device since the last `reset`, oldest first."""
    return list(triton_bridge.launches)


@contextmanager
def without_execution() -> Iterator[None]:
    """Launches take their time and compute nothing: for timing loops, whose results nobody reads."""
    triton_bridge.executing = False
    try:
        yield
    finally:
        triton_bridge.executing = True


def sync_count() -> int:
    """How often the host has waited for the device: synchronize, blocking copies, `item`."""
    return int(torch.ops.npu_sim.sync_count())


# ---- What the device is


def properties() -> Properties:
    """The properties of every simulated device."""
    return device_api.properties


def set_properties(**changed: int | str) -> None:
    """Sets properties; those not named get their default. `total_memory` also bounds what can be allocated."""
    device_api.properties = replace(Properties(), **changed)  # type: ignore[arg-type]
    torch.ops.npu_sim.set_total_memory(device_api.properties.total_memory)


def hide_properties(*names: str) -> None:
    """Lets the device's properties lack some, as older torch_npu's do; none brings all back."""
    device_api.hidden = names


@contextmanager
def recycled_memory() -> Iterator[None]:
    """Freed memory is handed out again with what it held, as by an allocator that caches."""
    torch.ops.npu_sim.recycle(True)
    try:
        yield
    finally:
        torch.ops.npu_sim.recycle(False)


@contextmanager
def without_versions() -> Iterator[None]:
    """Nobody can say which CANN and which driver there are."""
    device_api.versions_fail = True
    try:
        yield
    finally:
        device_api.versions_fail = False


@contextmanager
def capture() -> Iterator[None]:
    """A graph capture as far as host code can tell: the flag is set, and waiting for the device is an error."""
    torch.ops.npu_sim.set_capturing(True)
    try:
        yield
    finally:
        torch.ops.npu_sim.set_capturing(False)
