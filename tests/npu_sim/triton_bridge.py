"""Runs Triton kernels on the simulated device, through Triton's interpreter.

The interpreter loads and stores through raw addresses. Those of the simulated device cannot be dereferenced, so
its loads, stores and atomics are given translated ones, checked element by element: a kernel that touches memory
outside a live allocation of its device fails, where plain host memory would hide that.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import SimpleNamespace

import numpy as np
import torch

from . import device_api


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of a Triton kernel on the simulated device."""

    kernel: str
    grid: tuple[int, ...]
    constexprs: Mapping[str, object]
    device: int


Cost = float | Callable[[Launch], float]

costs: list[tuple[str, Mapping[str, object], Cost]] = []
# What befalls launches: of a kernel, with constants, and what is done with the device then.
faults: list[tuple[str, Mapping[str, object], Callable[[Launch], None]]] = []
launches: list[Launch] = []
executing = True
# What a kernel is compiled to depends on it: Ascend's compiler gives one binary today and another tomorrow.
compilation = 0


def attach() -> None:
    """Makes the simulated device Triton's active one. A second call does nothing."""
    import triton
    from triton.runtime import driver, interpreter

    if isinstance(interpreter._interpreter, _LoadStoreUnit):
        return
    # Triton decides at a kernel's decoration, its own library's included, whether that kernel is interpreted.
    if not isinstance(triton.language.cdiv, interpreter.InterpretedFunction):
        raise RuntimeError("Triton was imported without TRITON_INTERPRET=1, which the simulated device needs")
    interpreter._interpreter = unit = _LoadStoreUnit(interpreter._interpreter)
    driver.set_active(_Driver())
    _redirect(interpreter.GridExecutor, unit)
    _compile(interpreter.InterpretedFunction)


class _LoadStoreUnit:
    """Stands for the interpreter's native module: the same functions, on device addresses where a device is set."""

    def __init__(self, native: object) -> None:
        self._native = native
        self.on_device = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._native, name)

    def load(self, addresses, mask, other, dtype):
        return self._native.load(self._host(addresses, mask, dtype.itemsize), mask, other, dtype)

    def store(self, addresses, value, mask):
        return self._native.store(self._host(addresses, mask, value.dtype.itemsize), value, mask)

    def atomic_rmw(self, op, addresses, value, mask, semantics):
        return self._native.atomic_rmw(op, self._host(addresses, mask, value.dtype.itemsize), value, mask, semantics)

    def atomic_cas(self, addresses, compared, value, semantics):
        mask = np.ones(np.shape(addresses), dtype=bool)
        return self._native.atomic_cas(self._host(addresses, mask, value.dtype.itemsize), compared, value, semantics)

    def _host(self, addresses, mask, element_bytes):
        if not self.on_device:
            return addresses
        # Copies: the interpreter hands out read-only broadcasts.
        translated = np.array(addresses, dtype=np.int64, order="C")
        active = np.array(np.broadcast_to(mask, translated.shape), dtype=bool, order="C")
        torch.ops.npu_sim.translate(torch.from_numpy(translated), torch.from_numpy(active), element_bytes)
        return translated.view(np.uint64)

    @contextmanager
    def device_memory(self) -> Iterator[None]:
        before, self.on_device = self.on_device, True
        try:
            yield
        finally:
            self.on_device = before


def _redirect(executor: type, unit: _LoadStoreUnit) -> None:
    """Lets launches with npu tensors run on device memory; others stay as they were."""
    to_host, from_host, run = executor._init_args_hst, executor._restore_args_dev, executor.__call__

    def init_args(self, args, kwargs):
        return (list(args), kwargs) if unit.on_device else to_host(self, args, kwargs)

    def restore_args(self, *args):
        if not unit.on_device:
            from_host(self, *args)

    def call(self, *args, **kwargs):
        device = _launch_device([*args, *kwargs.values()])
        if device is None:
            return run(self, *args, **kwargs)
        launch = _describe(self, args, kwargs, device)
        # The error of an earlier launch is told here, or it has been told and this launch is dropped without a word.
        runs = torch.ops.npu_sim.enter(device)
        launches.append(launch)
        torch.ops.npu_sim.advance(_cost_ms(launch))
        fault = next((act for pattern, wanted, act in faults if _matches(launch, pattern, wanted)), None)
        if fault is not None and runs:
            fault(launch)
        elif executing and runs:
            with unit.device_memory():
                run(self, *args, **kwargs)
        return None

    executor._init_args_hst, executor._restore_args_dev, executor.__call__ = init_args, restore_args, call


def _compile(function: type) -> None:
    """Lets a kernel that is compiled without being launched have a binary."""
    run = function.run

    def compiled_or_run(self, *args, grid, warmup, **kwargs):
        if not warmup:
            return run(self, *args, grid=grid, warmup=False, **kwargs)
        return SimpleNamespace(kernel=repr((compilation, self.fn.__name__, sorted(kwargs.items()))).encode())

    function.run = compiled_or_run


def _launch_device(arguments: list[object]) -> int | None:
    """The device a launch runs on, or None where no argument lies on the simulated device."""
    tensors = [argument for argument in _leaves(arguments) if isinstance(argument, torch.Tensor)]
    devices = {tensor.device for tensor in tensors}
    if not any(device.type == "npu" for device in devices):
        return None
    current = torch.device("npu", device_api.current_device())
    for position, tensor in enumerate(tensors):
        if tensor.device.type != "npu":
            raise ValueError(f"tensor argument {position} cannot be accessed from Triton: it lies on {tensor.device}")
        if tensor.device != current:
            raise RuntimeError(f"a launch on {current} was given memory of {tensor.device}: set the device first")
    return current.index


def _leaves(arguments: object) -> Iterator[object]:
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from _leaves(argument)
        else:
            yield getattr(argument, "base", argument)  # reinterpreted tensors and tensor descriptors


def _describe(executor, args, kwargs, device: int) -> Launch:
    values = {**dict(zip(executor.arg_names, args, strict=False)), **kwargs}
    constexprs = {name: getattr(values[name], "value", values[name]) for name in executor.constexprs if name in values}
    grid = executor.grid(values) if callable(executor.grid) else executor.grid
    return Launch(kernel=executor.fn.__name__, grid=tuple(grid), constexprs=constexprs, device=device)


def _matches(launch: Launch, pattern: str, wanted: Mapping[str, object]) -> bool:
    return fnmatchcase(launch.kernel, pattern) and wanted.items() <= launch.constexprs.items()


def _cost_ms(launch: Launch) -> float:
    for pattern, wanted, ms in costs:
        if _matches(launch, pattern, wanted):
            return ms(launch) if callable(ms) else ms
    return 0.0


class _Driver:
    """What Triton's autotuner, its benchmark helper and launchers ask of the active driver."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {
            "num_aicore": device_api.properties.cube_core_num,
            "num_vectorcore": device_api.properties.vector_core_num,
        }
    )

    def get_current_device(self) -> int:
        return device_api.current_device()

    def set_current_device(self, device: int) -> None:
        device_api.set_device(device)

    def get_current_stream(self, device: int | None = None) -> int:
        return device_api.current_stream(device).npu_stream

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("npu", device_api.properties.name, 0)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("npu", device_api.current_device())

    def get_device_interface(self):
        return device_api

    def get_benchmarker(self):
        from triton.testing import do_bench

        return do_bench

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(1, dtype=torch.int32, device="npu")

    def clear_cache(self, cache: torch.Tensor) -> None:
        cache.zero_()
