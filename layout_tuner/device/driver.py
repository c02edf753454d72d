"""Asks the device and its driver; no other module asks torch.npu, torch.cuda or Triton's driver."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .. import config
from ..errors import ConfigError

# Programs launched per core: an NPU core runs one program at a time; a multiprocessor hides latency with several.
PROGRAMS_PER_CORE = {"npu": 1, "cuda": 32, "cpu": 1}
INTERPRETED_PROGRAMS = 4
ACCELERATORS = ("npu", "cuda")
# An Ascend 910B's second-level cache, of which torch_npu before 7.2 says nothing.
MOST_CACHE_BYTES = {"npu": 192 << 20}
# NPUs for which triton-ascend does not ask its compiler for multi-buffering.
BUFFERS_NOT = re.compile(r"Ascend(950|910_95)")


@dataclass(frozen=True, kw_only=True)
class Chip:
    """What launches and tile choices need to know of a device.

    Attributes:
        kind: `npu`, `cuda` or `cpu`.
        name: Model, as the driver names it.
        cube_programs: How many programs to launch of a kernel that is bound by the matrix unit.
        vector_programs: How many programs to launch of a kernel that is bound by the vector units.
        cores: Cube cores of an NPU, multiprocessors of a GPU.
        buffers: Whether its compiler multi-buffers unless told not to, so that kernels without that are candidates too.
    """

    kind: str
    name: str
    cube_programs: int
    vector_programs: int
    cores: int = 1
    buffers: bool = False

    @property
    def tiles(self) -> str:
        """The family of tile choices: `cuda`, or `ascend` for an NPU and for the interpreter."""
        return "cuda" if self.kind == "cuda" else "ascend"


class Event(Protocol):
    """A point in a stream's work, whose time the device notes."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any) -> float: ...


def resolve(name: str | None = None) -> torch.device:
    """The device of that name; without a name the machine's accelerator, else the CPU.

    Args:
        name: `npu`, `cuda:1`, `cpu`, ...; None picks. A simulated device is never picked by itself.

    Raises:
        ConfigError: No such device here.
    """
    if name is None:
        for kind in ACCELERATORS:
            module = getattr(torch, kind, None)
            if module is not None and module.is_available() and not simulated(kind):
                return torch.device(kind, module.current_device())
        return torch.device("cpu")
    try:
        device = torch.device(name)
        if device.type == "cpu":
            return device
        module = torch.get_device_module(device)
        available = module.is_available()
        count = module.device_count() if available else 0
    except (RuntimeError, AttributeError) as error:
        raise ConfigError(f"device {name!r}: {str(error).splitlines()[0]}") from error
    if not available:
        raise ConfigError(f"device {name!r}: torch {torch.__version__} sees no such device on this machine")
    index = module.current_device() if device.index is None else device.index
    if index >= count:
        raise ConfigError(f"device {name!r}: this machine has {count} of them, numbered from 0")
    return torch.device(device.type, index)


def named(name: str) -> torch.device:
    """The device of a full name; imports the library that adds its kind to torch where torch does not."""
    kind = name.partition(":")[0]
    if kind != "cpu" and not hasattr(torch, kind):
        importlib.import_module(f"torch_{kind}")
    return torch.device(name)


def guard(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device the current one within a `with`: a launch goes to the current device, wherever its tensors are."""
    if device.type == "cpu":
        return nullcontext()
    made: AbstractContextManager[object] = torch.get_device_module(device).device(device.index)
    return made


def several(device: torch.device) -> bool:
    """Whether the machine has several devices of a kind, so that the current one may be another than the tensors'."""
    return device.type not in ("cpu", "meta") and torch.get_device_module(device).device_count() > 1


def is_current(device: torch.device) -> bool:
    """Whether a device is the current one, to which launches go."""
    index: int = torch.get_device_module(device).current_device()
    return index == device.index


def simulated(kind: str) -> bool:
    """Whether a kind of device is simulated; a simulation sets `is_simulated` on its torch module."""
    return bool(getattr(getattr(torch, kind, None), "is_simulated", False))


@functools.cache
def chip(device: torch.device) -> Chip:
    """The name and cores of a device; the driver is asked once."""
    if device.type == "cpu":
        return Chip(kind="cpu", name="cpu", cube_programs=INTERPRETED_PROGRAMS, vector_programs=INTERPRETED_PROGRAMS)
    properties = torch.get_device_module(device).get_device_properties(device)
    per_core = PROGRAMS_PER_CORE.get(device.type, 1)
    if device.type == "npu":
        cube, vector = npu_cores(device, properties)
    else:
        cube = vector = properties.multi_processor_count
    return Chip(
        kind=device.type,
        name=properties.name,
        cube_programs=cube * per_core,
        vector_programs=vector * per_core,
        cores=cube,
        buffers=device.type == "npu" and not BUFFERS_NOT.match(properties.name) and is_ascends_triton(),
    )


def is_ascends_triton() -> bool:
    """Whether the installed Triton is Ascend's."""
    return triton_distribution()[0] == "triton-ascend"


def npu_cores(device: torch.device, properties: Any) -> tuple[int, int]:
    """The numbers of an NPU's cube and vector cores: torch_npu's where it knows them, else those of Triton's driver."""
    cube, vector = getattr(properties, "cube_core_num", 0), getattr(properties, "vector_core_num", 0)
    if cube and vector:
        return cube, vector
    from triton.runtime import driver

    cores = driver.active.utils.get_device_properties(device.index or 0)
    return cores["num_aicore"], cores["num_vectorcore"]


def event(device: torch.device) -> Event:
    """A timing event of the device: `record()`, then, after `synchronize`, `start.elapsed_time(end)` in ms."""
    made: Event = torch.get_device_module(device).Event(enable_timing=True)
    return made


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Within it torch multiplies fp32 matrices of a kind of device in fp32, whatever else the user allows.

    Against an oracle with TF32's or HF32's ten bits every right kernel would be wrong.
    """
    if device.type == "npu":
        exact: bool | str = False
        places, name = getattr(torch.get_device_module(device), "matmul", None), "allow_hf32"
    else:
        places = torch.backends.cuda.matmul
        name, exact = ("fp32_precision", "ieee") if hasattr(places, "fp32_precision") else ("allow_tf32", False)
    if device.type not in ACCELERATORS or not hasattr(places, name):
        yield
        return
    before = getattr(places, name)
    setattr(places, name, exact)
    try:
        yield
    finally:
        setattr(places, name, before)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def capturing(device: torch.device) -> bool:
    """Whether the current stream is recording a graph; meanwhile nothing can be timed, and allocations belong to it."""
    if device.type == "cpu":
        return False
    ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return bool(ask and ask())


def free_bytes(device: torch.device) -> int | None:
    """Bytes of device memory that this process can still allocate; None where the backend cannot tell.

    Memory that torch holds in its own cache counts as free.
    """
    module = torch.get_device_module(device) if device.type != "cpu" else None
    ask = getattr(module, "mem_get_info", None)
    if module is None or ask is None:
        return None
    return int(ask(device)[0] + module.memory_reserved(device) - module.memory_allocated(device))


def memory_bytes(device: torch.device) -> tuple[int, int] | None:
    """Free and all memory of the device, whoever uses it, in bytes; None where nobody says."""
    ask = getattr(torch.get_device_module(device), "mem_get_info", None) if device.type != "cpu" else None
    if ask is None:
        return None
    free, total = ask(device)
    return int(free), int(total)


def cache_bytes(device: torch.device) -> int:
    """Bytes of the device's second-level cache; where the backend cannot tell, the most that any device has."""
    if device.type == "cpu":
        return 0
    properties = torch.get_device_module(device).get_device_properties(device)
    return int(getattr(properties, "L2_cache_size", 0) or MOST_CACHE_BYTES.get(device.type, 64 << 20))


def forked(device: torch.device) -> bool:
    """Whether this process was forked from one that had used the device: a child cannot use it."""
    if device.type == "cpu":
        return False
    ask = getattr(torch.get_device_module(device), "_is_in_bad_fork", None)
    return bool(ask and ask())


def identity(device: torch.device) -> str:
    """A text that tells a device from others of its model, whatever their indices; may be empty."""
    if device.type == "cpu":
        return ""
    return str(getattr(torch.get_device_module(device).get_device_properties(device), "uuid", ""))


def multi_process() -> bool:
    """Whether this process is one of several ranks: ranks that tune apart would wait for each other for ever."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def release(device: torch.device) -> None:
    """Return cached memory to the device after an allocation failed."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


# -- what went wrong -----------------------------------------------------------------------------------------------

# torch_npu 7.x raises a plain RuntimeError; 207001 is CANN's code for memory it cannot allocate.
_OUT_OF_MEMORY = re.compile(
    r"\b(NPU|CUDA) out of memory|error code is 207001|(CUDA error|Triton Error \[\w+\]): out of memory|_ALLOC_FAILED\b"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"
)
# How torch_npu, CANN, torch's CUDA and Triton's launchers name an error of the runtime.
_FAULTED = re.compile(
    r"(NPU|OPS|ACL) function error|\bERR\d{5}\b|The Inner error is reported|error code(?: is|:)? ?\d{6}\b"
    r"|CUDA error: |Triton Error \["
)
# Of those, what ends a process's use of the device: CANN's codes of the runtime and of cores that stopped, CUDA's
# errors that stay.
_LOST = re.compile(
    r"error code(?: is|:)? ?507\d{3}\b|The Inner error is reported|core (execution|exception) is abnormal"
    r"|(CUDA error|Triton Error \[\w+\]): (an illegal|misaligned|device-side assert|unspecified launch"
    r"|the launch timed out|hardware|invalid program counter|uncorrectable)"
)


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the device's memory, or the host's, is too small."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def faulted(error: BaseException) -> bool:
    """Whether an exception comes from the device's runtime and is no lack of memory."""
    accelerator = getattr(torch, "AcceleratorError", None)
    if accelerator is not None and isinstance(error, accelerator):
        return True
    return lost(error) or _FAULTED.search(str(error)) is not None


def lost(error: BaseException) -> bool:
    """Whether an exception means that this process can use the device no more."""
    return _LOST.search(str(error)) is not None


def answers(device: torch.device) -> bool:
    """Whether the device still computes: it is sent a number that it never held, and has to return it plus one.

    It waits for all earlier work, so on a hung device it does not return.
    """
    number = secrets.randbelow(1 << 30)
    return int((torch.tensor([number], dtype=torch.int32, device=device) + 1).item()) == number + 1


def triton_distribution() -> tuple[str, str]:
    """Name and version of the installed Triton: `triton.__version__` does not tell `triton-ascend` from `triton`."""
    for name in ("triton-ascend", "triton"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "triton", "none"


# -- Triton's driver -------------------------------------------------------------------------------------------


def launch_target() -> str:
    """The name of Triton's backend: `cuda`, `npu`, ...; empty where Triton finds no device."""
    from triton.runtime import driver

    try:
        return str(driver.active.get_current_target().backend)
    except RuntimeError:
        return ""


@functools.cache
def launches_on(kind: str) -> bool:
    """Whether Triton has a driver for a kind of device: an NPU's wants a Triton of its own, and CANN's variables."""
    target = launch_target()
    return target == kind if kind == "npu" else target != ""


def launch_index() -> int:
    """Index of the device that Triton would launch on now."""
    from triton.runtime import driver

    return int(driver.active.get_current_device())


def raw_stream() -> Callable[[int], int]:
    """A function from the index of a device to its current stream, as Triton's launchers take it.

    On an NPU asking for that drains torch's queue at every launch, so it is asked for once for each stream: launchers
    go through that queue, in whose order they stay. One that was told to pass it by has to find it empty.
    """
    from triton.runtime import driver

    made: Callable[[int], int] = driver.active.get_current_stream
    queued = config.variables(("TRITON_ENABLE_TASKQUEUE",)).get("TRITON_ENABLE_TASKQUEUE", "true")
    current = getattr(getattr(sys.modules.get("torch_npu"), "_C", None), "_npu_getCurrentStream", None)
    if launch_target() != "npu" or current is None or queued.lower() not in ("true", "1"):
        return made
    known: dict[object, int] = {}

    def stream(index: int) -> int:
        which = current(index)
        raw = known.get(which)
        if raw is None:
            raw = known[which] = made(index)
        return raw

    return stream
