"""Small questions to a device, each of which something in this product stands on."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from layout_tuner.kernels import probe

from ..device import driver, interpreter
from ..device.failures import classify, first_line
from ..launch import launcher
from ..tuning import numerics
from .findings import REPORT, Finding

ELEMENTS = 1 << 16
BLOCK = 1024
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Launches whose cost is taken together, and how often.
LAUNCHES, BATCHES = 200, 5
EVENTS_MS = 20.0

found = functools.partial(Finding, group="device")


def vector_add(device: torch.device) -> Finding:
    """One kernel of one program for each block of a vector."""
    x, y = (torch.arange(ELEMENTS, dtype=torch.float32, device=device) + i for i in range(2))
    total = torch.full_like(x, float("nan"))
    start = time.monotonic()
    add(x, y, total)
    driver.synchronize(device)
    first_s = time.monotonic() - start
    wrong = int((total != x + y).sum())
    if wrong:
        seen = f"{wrong} of {ELEMENTS} elements are wrong"
        cure = f"no kernel can be right then: compare the versions above with a machine that works, and {REPORT}"
        return found(name="vector add", state="wrong", seen=seen, cure=cure)
    return found(name="vector add", state="right", seen=f"{ELEMENTS} elements; the first launch took {first_s:.2f} s")


def add(x: torch.Tensor, y: torch.Tensor, total: torch.Tensor) -> None:
    """Launch the sum of two vectors."""
    launcher.bind(probe.add_probe, BLOCK=BLOCK)(x.numel() // BLOCK, x, y, total, x.numel())


def product(device: torch.device) -> Finding:
    """One `tl.dot` of each dtype, which an NPU computes in its cube unit."""
    interpreter.require_running("selftest", "float32", device)
    wrong = []
    for dtype in DTYPES:
        name = dtype_name(dtype)
        generator = torch.Generator("cpu").manual_seed(0)
        a, b = (torch.randn(64, 64, generator=generator, dtype=torch.float32, device="cpu").to(dtype) for _ in range(2))
        wanted = a.double() @ b.double()
        result = torch.full((64, 64), float("nan"), dtype=torch.float32, device=device)
        stored = torch.full((64, 64), float("nan"), dtype=dtype, device=device)
        launcher.bind(probe.dot_probe, N=64)(1, a.to(device), b.to(device), result, stored)
        for got, limit in ((result, numerics.FP32_TOLERANCE), (stored, numerics.tolerance(name))):
            error = numerics.error(got.cpu(), wanted)
            if error > limit:
                wrong.append(f"{name}: error {error:.1e} of {limit:.1e} allowed")
    if wrong:
        return found(name="product", state="wrong", seen="; ".join(wrong), cure=REPORT)
    return found(name="product", state="right", seen="tl.dot of fp32, fp16 and bf16")


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name of a dtype."""
    return str(dtype).removeprefix("torch.")


def event_pair(device: torch.device) -> Finding:
    """Two events around work whose length the host knows."""
    if device.type == "cpu":
        return found(name="events", state="skipped", seen="a CPU has none")
    work = torch.empty(1 << 26, dtype=torch.uint8, device=device)
    count = 8
    while True:
        driver.synchronize(device)
        first, last = driver.event(device), driver.event(device)
        start = time.perf_counter()
        first.record()
        for _ in range(count):
            work.fill_(1)
        last.record()
        driver.synchronize(device)
        wall_ms = (time.perf_counter() - start) * 1e3
        if wall_ms > EVENTS_MS or count >= 1 << 16:
            break
        count *= 2
    ready, elapsed_ms = last.query(), first.elapsed_time(last)
    seen = f"{elapsed_ms:.3g} ms between two events, {wall_ms:.3g} ms by the host's clock"
    # The host waits a little longer than the device works; another unit would be a thousand times off.
    if ready and 0.1 * wall_ms < elapsed_ms < 1.1 * wall_ms:
        return found(name="events", state="right", seen=seen)
    seen = seen if ready else "an event does not say that it is done, after the device was"
    cure = f"nothing can be measured: set [tuning] on_miss = 'default', and {REPORT}"
    return found(name="events", state="wrong", seen=seen, cure=cure)


def equality(device: torch.device) -> Finding:
    """Bits of each dtype compared as the tuner compares them, and the NaN that it looks for."""
    wrong = []
    for dtype in DTYPES:
        name = dtype_name(dtype)
        bits = torch.int32 if dtype.itemsize == 4 else torch.int16
        host = torch.randn(1000, generator=torch.Generator("cpu").manual_seed(1), dtype=torch.float32, device="cpu").to(
            dtype
        )
        host[7] = float("nan")
        other = host.clone()
        other.view(bits)[-1] ^= 1
        one, same, differs = (tensor.to(device) for tensor in (host, host.clone(), other))
        if not numerics.identical(one, same):
            wrong.append(f"{name}: equal bits differ")
        if numerics.identical(one, differs):
            wrong.append(f"{name}: another bit is not seen")
        if numerics.finite(one) or not numerics.finite(one[8:]):
            wrong.append(f"{name}: isfinite does not find NaN")
    if wrong:
        cure = f"candidates cannot be checked: set [tuning] on_miss = 'default', and {REPORT}"
        return found(name="equality", state="wrong", seen="; ".join(wrong), cure=cure)
    return found(name="equality", state="right", seen="bits and NaN of fp32, fp16 and bf16")


def out_of_memory(device: torch.device) -> Finding:
    """How the device says that it has no memory; asks for four times what it has, which it refuses at once."""
    total = (driver.memory_bytes(device) or (0, 1 << 48))[1]
    try:
        torch.empty(4 * total, dtype=torch.uint8, device=device)
    except Exception as error:
        kind = classify(error)
        seen = f"{kind}: {type(error).__name__}: {first_line(error)[:200]}"
        if kind == "memory":
            return found(name="out of memory", state="right", seen=seen)
        return found(name="out of memory", state="wrong", seen=seen, cure=f"it is not known as such: {REPORT}")
    return found(name="out of memory", state="doubt", seen=f"{4 * total >> 30} GiB were not refused", cure=REPORT)


def host_cost(device: torch.device) -> Finding:
    """What a launch costs the host, here and through Triton's own path."""
    x, y, total = (torch.zeros(BLOCK, dtype=torch.float32, device=device) for _ in range(3))
    bound = launcher.bind(probe.add_probe, BLOCK=BLOCK)
    interpreted = interpreter.interpreting()
    launches, batches = (2, 1) if interpreted else (LAUNCHES, BATCHES)
    paths: dict[str, Callable[..., object]] = {"a launch": bound, "through Triton": bound.plain}
    costs = {}
    for name, path in paths.items():
        taken = []
        for _ in range(batches + 1):
            driver.synchronize(device)
            start = time.perf_counter()
            for _ in range(launches):
                path(1, x, y, total, BLOCK)
            taken.append((time.perf_counter() - start) / launches * 1e6)
        costs[name] = min(taken[1:])
    seen = ", ".join(f"{name} {us:,.1f} us" for name, us in costs.items())
    return found(name="host cost", state="fact", seen=f"{seen} in the interpreter" if interpreted else seen)


PROBES: dict[str, Callable[[torch.device], Finding]] = {
    "vector add": vector_add,
    "product": product,
    "events": event_pair,
    "equality": equality,
    "out of memory": out_of_memory,
    "host cost": host_cost,
}
