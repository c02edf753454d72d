"""A GatedDeltaNet layer of flash-linear-attention, forward and backward, with and without `enable`.

    python bench/fla_layer.py [--shapes 2x2048/4/64,4x4096/16/128] [--jobs 16] [--cache FILE] [--json FILE]

Both run in one process on the same layer, in interleaved rounds, after tuning and warm-up: device time, and wall-clock
time of `--steps` steps. Before them stands what was routed where and why: for every op that was compared, the time of
ours and of the library's, and what the comparison with the oracle said of each. Each line is printed as soon as it is
known.

The library tries many configurations of each kernel at its first call, which takes minutes, most of them compiling.
`--jobs` shares the compiling among processes of their own first; what they compile is found again on the disk.

The library refuses its gated backward on Hopper with Triton 3.4 to 3.7.0, whose results are wrong there. Here that
guard is lifted, so that there is something to compare with. Without an accelerator there is nothing to time and the
exit status is 2; it is 1 where a step is slower with `enable` by more than is allowed.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from layout_tuner.cache.places.opening import open_store

import layout_tuner
from layout_tuner.device import driver
from layout_tuner.integrations import fla as integration
from layout_tuner.tuning.timing import EventTimer, Timer, time_rounds

# B, T, H, HV, head dimension of keys and of values, by a name that says B, T, H and the dimension.
SHAPES = {
    f"{B}x{T}/{H}/{head_dim}": (B, T, H, 2 * H, head_dim)
    for (B, T), H, head_dim in itertools.product([(2, 2048), (4, 4096)], [4, 8, 16], [64, 128])
}
CHOSEN = "2x2048/4/64,4x4096/16/128,2x2048/16/128,4x4096/4/64"
HIDDEN = 1024
SLOWER = 1.02


def layer_step(shape: tuple[int, int, int, int, int], device: torch.device) -> Callable[[], None]:
    """One forward and backward of a layer on a fixed input."""
    B, T, H, HV, head_dim = shape
    layers = importlib.import_module("fla.layers")
    torch.manual_seed(0)
    layer = layers.GatedDeltaNet(
        hidden_size=HIDDEN, head_dim=head_dim, num_heads=H, num_v_heads=HV, expand_v=1.0, layer_idx=0
    ).to(device, torch.bfloat16)
    x = torch.randn(B, T, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    do = torch.randn_like(x)
    wanted = [x, *layer.parameters()]

    def step() -> None:
        torch.autograd.grad(layer(x)[0], wanted, do)

    return step


def lift_guard() -> None:
    """Let the library run its gated backward wherever it is."""
    importlib.import_module("fla.ops.common.chunk_o").IS_NVIDIA_HOPPER = False  # type: ignore[attr-defined]


# -- compiling ahead -------------------------------------------------------------------------------------------


def compile_ahead(shapes: list[str], jobs: int) -> float:
    """Let processes compile what the library will try for each shape; seconds that took."""
    start = time.perf_counter()
    share = max(1, jobs // len(shapes))
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "--shapes", shape, "--part", f"{part}/{share}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for shape in shapes
        for part in range(share)
    ]
    failed = sum(process.wait() != 0 for process in running)
    if failed:
        print(f"{failed} of {len(running)} processes that compile ahead failed", file=sys.stderr)
    return time.perf_counter() - start


def compile_part(shape: str, part: int, share: int, device: torch.device) -> None:
    """Run a step in which the library tries a share of its configurations; the first part runs ours too."""
    step = layer_step(SHAPES[shape], device)
    for tuner in autotuners():
        tuner.configs = tuner.configs[part::share] or tuner.configs[:1]
    step()
    if part == 0:
        layout_tuner.enable(on_miss="default")(step)()
    driver.synchronize(device)


def autotuners() -> Iterator[Any]:
    """Every kernel of the library that it tunes."""
    from triton.runtime.autotuner import Autotuner

    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            for value in vars(module).values():
                while value is not None and not isinstance(value, Autotuner):
                    value = getattr(value, "fn", None)
                if value is not None:
                    yield value


# -- one shape -------------------------------------------------------------------------------------------------


def bench(name: str, cache: Path, steps: int, device: torch.device, timer: Timer) -> dict[str, Any]:
    """One shape's row, printed piece by piece; decisions go to `cache`."""
    without = layer_step(SHAPES[name], device)
    routed = layout_tuner.enable(cache=cache, on_miss="tune")(without)
    known = len(routes(cache))
    without_first_s = seconds(without, device)
    say(f"{name:14} first step without {without_first_s:.1f} s", end="  ")
    with_first_s = seconds(routed, device)
    say(f"with, tuning, {with_first_s:.1f} s")
    compared = routes(cache)[known:]
    for route in compared:
        show_route(route)
    before = {"served": integration.served(), "yielded": integration.yielded()}
    for _ in range(2):
        routed()
        without()
    counts = {
        "served": {op: count - before["served"].get(op, 0) for op, count in integration.served().items()},
        "yielded": {op: count - before["yielded"].get(op, 0) for op, count in integration.yielded().items()},
    }
    say(f"    two steps: served {present(counts['served'])}, left to the library {present(counts['yielded'])}")
    rounds = time_rounds(
        {"without": without, "with": routed},
        "without",
        timer,
        warmup_rounds=5,
        min_rounds=15,
        max_rounds=40,
        interval=0.01,
        deadline=time.monotonic() + 8,
    )
    gain = rounds.gain("with", "without")
    without_us, with_us = rounds.median("without"), rounds.median("with")
    without_wall_us, with_wall_us = wall_us(without, routed, steps, device)
    say(
        f"    device {without_us:9.1f} -> {with_us:9.1f} us  ratio {with_us / without_us:.3f}  "
        f"saved [{gain.low:.3f}, {gain.high:.3f}]  "
        f"wall {without_wall_us:9.1f} -> {with_wall_us:9.1f} us  ratio {with_wall_us / without_wall_us:.3f}"
    )
    return {
        "shape": name,
        "without_us": without_us,
        "with_us": with_us,
        "ratio": with_us / without_us,
        "gain": [gain.low, gain.median, gain.high],
        "without_wall_us": without_wall_us,
        "with_wall_us": with_wall_us,
        "wall_ratio": with_wall_us / without_wall_us,
        "without_first_s": without_first_s,
        "with_first_s": with_first_s,
        **counts,
        "routes": compared,
    }


def seconds(run: Callable[[], None], device: torch.device) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    run()
    driver.synchronize(device)
    return time.perf_counter() - start


def wall_us(
    without: Callable[[], None], routed: Callable[[], None], steps: int, device: torch.device
) -> tuple[float, float]:
    """Wall-clock time of a step of each, of the fastest of five interleaved series."""
    series: dict[Callable[[], None], list[float]] = {without: [], routed: []}
    for _ in range(5):
        for run, taken in series.items():
            driver.synchronize(device)
            start = time.perf_counter()
            for _ in range(steps):
                run()
            driver.synchronize(device)
            taken.append((time.perf_counter() - start) * 1e6 / steps)
    return min(series[without]), min(series[routed])


def present(counts: dict[str, int]) -> dict[str, int]:
    """Those above 0."""
    return {op: count for op, count in counts.items() if count}


def routes(cache: Path) -> list[dict[str, Any]]:
    """Every comparison with the library that is stored: who won, and the evidence."""
    if not cache.exists():
        return []
    store = open_store(cache)
    try:
        return [
            {
                "op": decision.key.op.removeprefix("fla."),
                "key": f"B={decision.key.B} T={decision.key.T} HV={decision.key.HV} K={decision.key.K}",
                "winner": decision.candidate,
                "candidates": {
                    found.candidate: {
                        "state": found.state,
                        "us": found.end_to_end_us,
                        "error": found.error,
                        "reason": found.reason,
                    }
                    for found in decision.measurements
                },
            }
            for decision in store.decisions()
            if decision.key.op.startswith("fla.")
        ]
    finally:
        store.close()


def show_route(route: dict[str, Any]) -> None:
    """One comparison with the library."""
    each = "; ".join(
        f"{name} {facts['state']}"
        + (f" {facts['us']:.1f} us" if facts["us"] is not None else "")
        + (f" error {facts['error']:.2g}" if facts["error"] is not None else "")
        + (f" ({facts['reason'][:80]})" if facts["reason"] else "")
        for name, facts in route["candidates"].items()
    )
    say(f"    {route['op']:30} -> {route['winner']:12} {each}")


def say(text: str, end: str = "\n") -> None:
    """Print at once: a run that is cut off has told what it knew."""
    print(text, end=end, flush=True)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default=CHOSEN, help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile ahead")
    parser.add_argument("--steps", type=int, default=20, help="steps of a wall-clock series")
    parser.add_argument("--cache", default="", help="file of decisions; a temporary one where left out")
    parser.add_argument("--json", default="", help="also write everything to this file")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    shapes = chosen.shapes.split(",")
    unknown = [name for name in shapes if name not in SHAPES]
    if unknown:
        parser.error(f"--shapes: no shape {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    device = driver.resolve()
    if device.type == "cpu":
        print("no accelerator here: there is nothing to time", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")  # of the library, on its environment
    if chosen.jobs:  # before this process takes the device
        say(f"compiled ahead in {compile_ahead(shapes, chosen.jobs):.0f} s")
    lift_guard()
    if chosen.part:
        part, share = map(int, chosen.part.split("/"))
        compile_part(shapes[0], part, share, device)
        return 0
    triton, version = driver.triton_distribution()
    release = integration.installed_release()
    say(f"{driver.chip(device).name}, torch {torch.__version__}, {triton} {version}, fla-core {release}")
    timer = EventTimer(device)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(chosen.cache or Path(folder) / "decisions.sqlite")
        for name in shapes:
            rows.append(bench(name, cache, chosen.steps, device, timer))
            torch.get_device_module(device).empty_cache()
            if chosen.json:
                Path(chosen.json).write_text(json.dumps({"rows": rows}, indent=1))
    ratio, wall_ratio = max(row["ratio"] for row in rows), max(row["wall_ratio"] for row in rows)
    say(f"largest ratio {ratio:.3f} on the device, {wall_ratio:.3f} on the wall clock (allowed {SLOWER})")
    for (op, reason), count in integration.fallthroughs().items():
        say(f"fell through: {op} {count} times: {reason}")
    return 0 if max(ratio, wall_ratio) <= SLOWER else 1


if __name__ == "__main__":
    sys.exit(main())
