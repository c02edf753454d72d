"""What becomes `torch.npu`: the names and meanings of torch_npu's device module that host code uses.

Not simulated: graphs (only the flag that a stream is capturing), the profiler, memory pools.
"""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

# Tells a simulated device from a real one: no timing taken on it may ever be mistaken for an NPU's.
is_simulated = True

DeviceLike = torch.device | str | int | None


@dataclass(frozen=True, kw_only=True)
class Properties:
    """Properties of every simulated device, named as in torch_npu; the defaults are an Ascend 910B3's."""

    name: str = "Ascend910B3"
    total_memory: int = 64 << 30
    cube_core_num: int = 20
    vector_core_num: int = 40
    L2_cache_size: int = 192 << 20


properties = Properties()
# Names that older torch_npu does not know: its properties lack them.
hidden: tuple[str, ...] = ()
# Whether the questions for versions fail, as where CANN's or the driver's files are not where they are looked for.
versions_fail = False


def device_index(device: DeviceLike = None) -> int:
    """The index of a device as callers name it; None is the current one."""
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "npu":
            raise ValueError(f"expected an npu device, got {device}")
        device = device.index
    index = torch.accelerator.current_device_index() if device is None else device
    if not 0 <= index < device_count():
        raise AssertionError(f"invalid device id {index}: there are {device_count()}")
    return index


def device_count() -> int:
    return int(torch.ops.npu_sim.device_count())


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return bool(torch.ops.npu_sim.is_initialized())


def init() -> None:
    torch.ops.npu_sim.lazy_init()


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return bool(torch.ops.npu_sim.in_bad_fork())


def current_device() -> int:
    init()
    return device_index()


def set_device(device: DeviceLike) -> None:
    torch.accelerator.set_device_index(device_index(device))


def device(device: DeviceLike) -> torch.accelerator.device_index:
    """A context in which `device` is the current one."""
    return torch.accelerator.device_index(device_index(device))


def get_device_properties(device: DeviceLike = None) -> Properties | types.SimpleNamespace:
    init()
    device_index(device)
    if not hidden:
        return properties
    return types.SimpleNamespace(**{name: value for name, value in asdict(properties).items() if name not in hidden})


def get_device_name(device: DeviceLike = None) -> str:
    return get_device_properties(device).name


def synchronize(device: DeviceLike = None) -> None:
    torch.accelerator.synchronize(device_index(device))


# ---- Streams and events


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    """A function, where torch_npu has a class: torch times no event of a subclass."""
    return torch.Event("npu", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


class Stream(torch.Stream):
    """A stream; without ids a new one."""

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **ids: int) -> "Stream":
        if ids:
            return super().__new__(cls, **ids)
        return super().__new__(cls, device=torch.device("npu", device_index(device)), priority=priority)

    @property
    def npu_stream(self) -> int:
        return self.stream_id


def _wrap(found: torch.Stream, stream_id: int) -> Stream:
    return Stream(stream_id=stream_id, device_index=found.device_index, device_type=found.device_type)


def current_stream(device: DeviceLike = None) -> Stream:
    found = torch.accelerator.current_stream(device_index(device))
    return _wrap(found, found.stream_id)


def default_stream(device: DeviceLike = None) -> Stream:
    return _wrap(torch.accelerator.current_stream(device_index(device)), 0)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """A context in which `stream` is the current one; None changes nothing."""
    before = current_stream()
    if stream is not None:
        set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def is_current_stream_capturing() -> bool:
    return bool(torch.ops.npu_sim.is_capturing())


# ---- Memory


def memory_allocated(device: DeviceLike = None) -> int:
    return torch.accelerator.memory_allocated(device_index(device))


def max_memory_allocated(device: DeviceLike = None) -> int:
    return torch.accelerator.max_memory_allocated(device_index(device))


def memory_reserved(device: DeviceLike = None) -> int:
    """What is allocated and what is kept to be handed out again."""
    return memory_allocated(device) + int(torch.ops.npu_sim.cached(device_index(device)))


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    torch.accelerator.reset_peak_memory_stats(device_index(device))


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Free and total bytes."""
    init()
    free, total = torch.accelerator.get_memory_info(device_index(device))
    return free, total


def empty_cache() -> None:
    torch.ops.npu_sim.empty_cache()


# ---- Random numbers, autocast, versions


def manual_seed(seed: int) -> None:
    torch.ops.npu_sim.manual_seed(device_index(), int(seed))


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        torch.ops.npu_sim.manual_seed(index, int(seed))


def initial_seed() -> int:
    return int(torch.ops.npu_sim.initial_seed(device_index()))


def get_rng_state(device: DeviceLike = "npu") -> torch.Tensor:
    return torch.ops.npu_sim.rng_state(device_index(device))


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = "npu") -> None:
    torch.ops.npu_sim.set_rng_state(device_index(device), new_state)


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def _cann_version(module: str = "CANN") -> str:
    if versions_fail:
        raise RuntimeError("get_cann_version: ascend_toolkit_install.info is not found")
    return {"CANN": "8.3.RC1", "DRIVER": "25.3.0"}.get(module, "")


# Whether products may round fp32 operands to HF32; nothing here does.
matmul = types.SimpleNamespace(allow_hf32=False)
utils = types.SimpleNamespace(get_cann_version=_cann_version)
