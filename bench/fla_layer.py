"""A GatedDeltaNet layer of flash-linear-attention, forward and backward, with and without `enable`.

    python bench/fla_layer.py [--shapes small,large] [--steps 20] [--cache FILE] [--json FILE]

Both run in one process on the same layer, in interleaved rounds, after tuning and warm-up: device time, and wall-clock
time of `--steps` steps. Below each shape stands what was routed where and why: for every op that was compared, the
time of ours and of the library's, and what the comparison with the oracle said of each.

The library refuses its gated backward on Hopper with Triton 3.4 to 3.7.0, whose results are wrong there. Here that
guard is lifted, so that there is something to compare with. Without an accelerator there is nothing to time and the
exit status is 2.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from layout_tuner.cache.store import open_store

import layout_tuner
from layout_tuner import device as devices
from layout_tuner.integrations import fla as integration
from layout_tuner.measure import EventTimer, time_rounds

# B, T, H, HV, head dimension of keys and of values.
SHAPES = {
    "small": (2, 2048, 4, 8, 64),
    "small-128": (2, 2048, 4, 8, 128),
    "large": (4, 4096, 16, 32, 64),
    "large-128": (4, 4096, 16, 32, 128),
}
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


def wall_us(run: Callable[[], None], steps: int, device: torch.device) -> float:
    """Wall-clock time of a step, of the fastest of five series."""
    series = []
    for _ in range(5):
        devices.synchronize(device)
        start = time.perf_counter()
        for _ in range(steps):
            run()
        devices.synchronize(device)
        series.append((time.perf_counter() - start) * 1e6 / steps)
    return min(series)


def bench(name: str, cache: Path, steps: int, device: torch.device, timer: EventTimer) -> dict[str, object]:
    """One shape's row; decisions go to `cache`."""
    without = layer_step(SHAPES[name], device)
    routed = layout_tuner.enable(cache=cache)(without)
    before = {"served": integration.served(), "yielded": integration.yielded()}
    start = time.perf_counter()
    for _ in range(3):
        routed()
        without()
    devices.synchronize(device)
    first_s = time.perf_counter() - start
    rounds = time_rounds(
        {"without": without, "with": routed},
        "without",
        timer,
        warmup_rounds=5,
        min_rounds=15,
        max_rounds=30,
        interval=0.01,
        deadline=time.monotonic() + 20,
    )
    gain = rounds.gain("with", "without")
    without_us, with_us = rounds.median("without"), rounds.median("with")
    after = {"served": integration.served(), "yielded": integration.yielded()}
    return {
        "shape": name,
        "without_us": without_us,
        "with_us": with_us,
        "ratio": with_us / without_us,
        "gain": [gain.low, gain.median, gain.high],
        "without_wall_us": wall_us(without, steps, device),
        "with_wall_us": wall_us(routed, steps, device),
        "first_steps_s": first_s,
        **{
            kind: {op: count - before[kind].get(op, 0) for op, count in after[kind].items()}
            for kind in ("served", "yielded")
        },
    }


def routes(cache: Path) -> list[dict[str, object]]:
    """Every comparison with the library that is stored: who won, and the evidence."""
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


def show(row: dict[str, object], found: list[dict[str, object]]) -> None:
    """A row for people."""
    print(
        f"{row['shape']:10} without {row['without_us']:9.1f} us  with {row['with_us']:9.1f} us  "
        f"ratio {row['ratio']:.3f}  wall {row['without_wall_us']:9.1f} -> {row['with_wall_us']:9.1f} us  "
        f"(first steps {row['first_steps_s']:.1f} s)"
    )
    print(f"           served {row['served']}  left to the library {row['yielded']}")
    for route in found:
        candidates = route["candidates"]
        assert isinstance(candidates, dict)
        each = "; ".join(
            f"{name} {facts['state']}"
            + (f" {facts['us']:.1f} us" if facts["us"] is not None else "")
            + (f" error {facts['error']:.2g}" if facts["error"] is not None else "")
            + (f" ({facts['reason'][:80]})" if facts["reason"] else "")
            for name, facts in candidates.items()
        )
        print(f"           {route['op']:32} {route['key']:34} -> {route['winner']:12} {each}")
    sys.stdout.flush()


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--steps", type=int, default=20, help="steps of a wall-clock series")
    parser.add_argument("--cache", default="", help="file of decisions; a temporary one where left out")
    parser.add_argument("--json", default="", help="also write everything to this file")
    chosen = parser.parse_args()
    device = devices.resolve()
    if device.type == "cpu":
        print("no accelerator here: there is nothing to time", file=sys.stderr)
        return 2
    importlib.import_module("fla.ops.common.chunk_o").IS_NVIDIA_HOPPER = False  # type: ignore[attr-defined]
    triton, version = devices.triton_distribution()
    release = integration.installed_release()
    print(f"{devices.chip(device).name}, torch {torch.__version__}, {triton} {version}, fla-core {release}")
    timer = EventTimer(device)
    rows, seen = [], 0
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(chosen.cache or Path(folder) / "decisions.sqlite")
        for name in chosen.shapes.split(","):
            row = bench(name, cache, chosen.steps, device, timer)
            found = routes(cache)
            show(row, found[seen:])
            rows.append(row)
            seen = len(found)
            torch.get_device_module(device).empty_cache()
        found = routes(cache)
    ratios = [row["ratio"] for row in rows if isinstance(row["ratio"], float)]
    print(f"median ratio {statistics.median(ratios):.3f}, largest {max(ratios):.3f} (allowed {SLOWER})")
    for (op, reason), count in integration.fallthroughs().items():
        print(f"fell through: {op} {count} times: {reason}")
    if chosen.json:
        Path(chosen.json).write_text(json.dumps({"rows": rows, "routes": found}, indent=1))
    return 0 if max(ratios) <= SLOWER else 1


if __name__ == "__main__":
    sys.exit(main())
