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

import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    "copy_cost",
    "install",
    "installed",
    "launch_cost",
    "launches",
    "now_ms",
    "properties",
    "reset",
    "set_properties",
    "sync_count",
    "unsupported_reason",
    "use_wall_clock",
    "without_execution",
]

TORCH = "2.13"
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
    _installed = True


def attach_triton() -> None:
    """Makes the simulated device Triton's active one; kernels run on it through the interpreter.

    Raises:
        RuntimeError: Triton was imported without TRITON_INTERPRET=1.
    """
    triton_bridge.attach()


def reset() -> None:
    """Back to the state after installation: wall clock, no costs, full memory, device 0, its default stream."""
    use_wall_clock(True)
    copy_cost(0.0)
    triton_bridge.costs.clear()
    triton_bridge.launches.clear()
    torch.ops.npu_sim.set_capturing(False)
    set_properties()
    for index in range(device_api.device_count()):
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


@contextmanager
def capture() -> Iterator[None]:
    """A graph capture as far as host code can tell: the flag is set, and waiting for the device is an error."""
    torch.ops.npu_sim.set_capturing(True)
    try:
        yield
    finally:
        torch.ops.npu_sim.set_capturing(False)
