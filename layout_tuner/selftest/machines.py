"""What a machine is: its versions, variables, caches and device, and whether they are known to go together."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from layout_tuner.cache.filesystem import file_system
from layout_tuner.cache.places.opening import default_path

from .. import config, installation
from .findings import REPORT, Finding, State

if TYPE_CHECKING:
    import torch

    from ..config import Config

GIB = 1 << 30
PACKAGES = ("torch", "torch_npu", "triton", "triton-ascend", "ascendnpu-ir", "numpy", "pybind11", "fla-core")
# Variables that change what runs, or how long it takes.
VARIABLES = (
    "ASCEND_*", "CANN_*", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "FLA_*", "LAYOUT_TUNER_*", "NPU_*",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF", "TASK_QUEUE_ENABLE", "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "TRITON_*",
)  # fmt: skip
# Of those, the ones under which no time means anything.
SLOW = {"ASCEND_LAUNCH_BLOCKING": "1", "CUDA_LAUNCH_BLOCKING": "1", "TASK_QUEUE_ENABLE": "0",
        "TRITON_ENABLE_TASKQUEUE": "0"}  # fmt: skip


def fact(name: str, seen: str) -> Finding:
    """A fact of the machine."""
    return Finding(group="machine", name=name, state="fact", seen=seen)


# -- without torch ---------------------------------------------------------------------------------------------


def at_hand(settings: Config) -> Iterator[Finding]:
    """What can be said of a machine without importing torch."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    system = f"{platform.system()} {platform.release()} {platform.machine()}, {cores} cores"
    yield fact("system", f"{system}, Python {platform.python_version()}")
    versions = [(name, installation.version(name)) for name in PACKAGES]
    yield fact("packages", ", ".join(f"{name} {found}" for name, found in versions if found))
    for fault in installation.faults():
        yield Finding(group="machine", name=fault.subject, state="wrong", seen=fault.text, cure=fault.cure)
    yield from variables()
    place = Path(settings.cache.path) if settings.cache.path else default_path()
    yield folder("decisions", place, "" if place.exists() else "not there yet", "[cache] path on a local disk")
    stated = config.variables_like("TRITON_CACHE_DIR").get("TRITON_CACHE_DIR")
    home = Path(stated) if stated else Path.home() / ".triton" / "cache"
    size = f"{sum(1 for _ in home.iterdir())} entries" if home.is_dir() else "not there yet"
    yield folder("Triton's cache", home, size, "TRITON_CACHE_DIR on a local disk, one for each host")


def variables() -> Iterator[Finding]:
    """The variables in force."""
    found = config.variables_like(*VARIABLES)
    yield fact("variables", ", ".join(f"{name}={value}" for name, value in found.items()) or "none of ours or theirs")
    for name, value in found.items():
        if SLOW.get(name) == value:
            seen = f"{name}={value}: launches wait for each other, so that times are not the device's alone"
            yield Finding(group="machine", name="variables", state="doubt", seen=seen, cure=f"unset {name} to measure")


def folder(name: str, place: Path, seen: str, cure: str) -> Finding:
    """Where something is kept, and on what kind of file system."""
    kind = file_system(place)
    text = f"{shown(place)} ({', '.join(filter(None, [kind.name, seen]))})"
    state: State = "fact" if kind.local else "doubt"
    return Finding(
        group="machine", name=name, state=state, seen=text, cure="" if kind.local else f"not a local disk: {cure}"
    )


def shown(place: Path) -> str:
    """A path without the name of whose home it lies in."""
    home = Path.home()
    return f"~/{place.relative_to(home)}" if place.is_relative_to(home) else str(place)


# -- with it ---------------------------------------------------------------------------------------------------


def facts(device: torch.device, picked: bool) -> Iterator[Finding]:
    """What the device is; `picked` where nobody named it, so that an NPU beside torch_npu should have been found."""
    from ..device.environment import environment

    known = environment(device).facts
    if device.type == "cpu":
        npu = installation.version("torch_npu")
        seen = "the CPU: kernels run in Triton's interpreter, whose times say nothing of a device"
        if npu and picked:
            cure = "look at npu-smi info, at whether a container has /dev/davinci*, at TORCH_DEVICE_BACKEND_AUTOLOAD"
            seen = f"the CPU, in Triton's interpreter: torch_npu {npu} sees no NPU"
            yield Finding(group="machine", name="device", state="wrong", seen=seen, cure=cure)
        else:
            yield fact("device", seen)
    else:
        yield fact("device", device_text(device))
    left_out = {"device", "model", "cube programs", "vector programs", "torch", "triton", "triton-ascend", "torch_npu"}
    yield fact(
        "environment", ", ".join([environment(device).id] + [f"{k} {v}" for k, v in known.items() if k not in left_out])
    )
    if device.type == "npu":
        yield from npu_software(known)


def npu_software(known: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the versions around an NPU are known to go together, and its launches reach it."""
    from ..device import software

    ascend, cann = installation.version("triton-ascend"), known.get("cann", "")
    pair = f"triton-ascend {ascend or '(none)'} and CANN {cann}"
    goes_with = software.PAIRS.get(installation.release(ascend))
    if goes_with is not None and installation.release(cann).startswith(goes_with):
        yield fact("pair", f"{pair}: a known pair")
    else:
        pairs = ", ".join(f"{name} with CANN {each}" for name, each in software.PAIRS.items())
        seen = software.pair_fault(ascend, cann) or f"{pair}: no known pair (known: {pairs})"
        yield Finding(group="machine", name="pair", state="doubt", seen=seen, cure="install a known pair, or go on")
    for refusal in software.refusals():
        yield Finding(group="machine", name="variables", state="wrong", seen=refusal, cure="unset it")


def device_text(device: torch.device) -> str:
    """Model, cores, caches and memory of an accelerator."""
    from ..device import driver

    chip = driver.chip(device)
    if device.type == "npu":
        cores = f"{chip.cube_programs} cube and {chip.vector_programs} vector cores"
    else:
        cores = f"{chip.cores} multiprocessors"
    free, total = memory(device)
    parts = [f"{device} {chip.name}", cores, f"L2 {driver.cache_bytes(device) >> 20} MiB"]
    parts += [f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"] if total else []
    parts += ["simulated"] if driver.simulated(device.type) else []
    return ", ".join(parts)


def memory(device: torch.device) -> tuple[int, int]:
    """Free and all memory in bytes; zeros where nobody says."""
    from ..device import driver

    return driver.memory_bytes(device) or (0, 0)


def afterwards(device: torch.device, before: int) -> Finding:
    """Whether the device is as it was."""
    from ..device import driver

    if device.type == "cpu":
        return Finding(group="device", name="afterwards", state="skipped", seen="a CPU stays what it is")
    if not driver.answers(device):
        return Finding(group="device", name="afterwards", state="dead", seen="the device does not answer", cure=RESET)
    free, _ = memory(device)
    seen = f"the device answers a new process; {free / GIB:.1f} GiB free, {before / GIB:.1f} before"
    return Finding(group="device", name="afterwards", state="right", seen=seen)


RESET = f"end what runs on it (npu-smi info or nvidia-smi), reset it where that does not help, and {REPORT}"
