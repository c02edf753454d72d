"""How long the first calls of a model wait: with the default candidates, and while a process of its own tunes.

    python bench/first_step.py [--shape 2x2048/4/64] [--layers 4] [--inline] [--steps 200] [--json FILE]

A model of flash-linear-attention's GatedDeltaNet layers takes steps, forward and backward, in a fresh process with
empty caches, once with `on_miss="default"` and once with `on_miss="tune"` and `[tuning] isolate = "process"`, where
the library's functions are among the candidates; `--inline` adds `isolate = "none"`, where the calls wait for the
tuning. Each call (a layer's forward, the backward of the step) is timed to its end on the device. A step that the first
process did not take is compared with that process's last ones.

Printed: the slowest call of each step that says something, when the calls began to follow what was measured, and the
most that any call waited beyond the same call with the default candidates. Exit status: 1 where that is more than
`--allowed` seconds, 2 without an accelerator.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import layout_tuner
from layout_tuner.config import Config
from layout_tuner.device import driver
from layout_tuner.tuning import isolation

HIDDEN = 1024
STEADY = 5
UNGUARDED = Path(__file__).resolve().parent / "unguarded"
MODES = {"default": "none", "process": "process", "inline": "none"}


def layers_of(shape: str, count: int, device: torch.device) -> tuple[list[Any], torch.Tensor]:
    """Layers of the model and their input."""
    tokens, heads, head_dim = shape.split("/")
    B, T = map(int, tokens.split("x"))
    layer = importlib.import_module("fla.layers").GatedDeltaNet
    torch.manual_seed(0)
    made = [
        layer(
            hidden_size=HIDDEN, head_dim=int(head_dim), num_heads=int(heads), num_v_heads=2 * int(heads), expand_v=1.0,
            layer_idx=number,
        ).to(device, torch.bfloat16)
        for number in range(count)
    ]  # fmt: skip
    return made, torch.randn(B, T, HIDDEN, device=device, dtype=torch.bfloat16)


def step(layers: list[Any], x: torch.Tensor, device: torch.device) -> dict[str, float]:
    """Seconds of each call of one step."""
    took = {}
    hidden = x.detach().requires_grad_()
    for number, layer in enumerate(layers):
        start = time.perf_counter()
        hidden = hidden + layer(hidden)[0]
        driver.synchronize(device)
        took[f"forward {number}"] = time.perf_counter() - start
    start = time.perf_counter()
    hidden.float().square().mean().backward()
    driver.synchronize(device)
    took["backward"] = time.perf_counter() - start
    return took


def run(mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Steps of one process: until nothing is tuned any more and the last ones are steady."""
    device = driver.resolve()
    layers, x = layers_of(arguments.shape, arguments.layers, device)
    warm = torch.nn.Linear(HIDDEN, HIDDEN, device=device, dtype=torch.bfloat16)  # the libraries' own first calls
    warm(x).sum().backward()
    driver.synchronize(device)
    folder = os.environ["FIRST_STEP_FOLDER"]
    settings = Config(cache={"path": f"{folder}/decisions.sqlite"}, tuning={"isolate": MODES[mode]})  # type: ignore[arg-type]
    steps: list[dict[str, float]] = []
    start = time.perf_counter()
    followed = None
    with layout_tuner.enable(settings, on_miss="default" if mode == "default" else "tune"):
        while len(steps) < arguments.steps or (followed is None and time.perf_counter() - start < arguments.patience):
            steps.append(step(layers, x, device))
            if followed is None and isolation.idle(0.0):
                followed = {"step": len(steps), "seconds": time.perf_counter() - start}
            if followed is not None and len(steps) >= followed["step"] + 2 * STEADY:
                break
        tunings = layout_tuner.stats().tunings
    return {"mode": mode, "steps": steps, "followed": followed, "tunings": tunings}


def fresh(mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The same in a process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--mode", mode]
        # The library's gated backward is refused on Hopper with Triton 3.4 to 3.7.0; without it it is no rival. The
        # process that tunes has to see that too.
        path = os.pathsep.join(filter(None, [str(UNGUARDED), os.environ.get("PYTHONPATH")]))
        variables = os.environ | {
            "TRITON_CACHE_DIR": f"{folder}/triton", "FIRST_STEP_FOLDER": folder, "PYTHONPATH": path,
        }  # fmt: skip
        done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def waits(found: dict[str, Any], default: dict[str, Any]) -> list[dict[str, float]]:
    """By step, how much longer each call took than the same call with the default candidates."""
    taken = default["steps"]
    steady = {name: statistics.median(each[name] for each in taken[-STEADY:]) for name in taken[0]}
    against = [*taken, *[steady] * len(found["steps"])]
    return [{name: took - other[name] for name, took in each.items()} for each, other in zip(found["steps"], against)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="2x2048/4/64", help="BxT/heads/head dimension")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20, help="at least")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds until the tuning has to be done")
    parser.add_argument("--allowed", type=float, default=1.0, help="seconds a call may wait beyond the default's")
    parser.add_argument("--inline", action="store_true", help="also tune in the process that calls")
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if driver.resolve().type == "cpu":
        print("no accelerator: there is nothing to time", file=sys.stderr)
        return 2
    if arguments.mode:
        print(json.dumps(run(arguments.mode, arguments)))
        return 0
    default = fresh("default", arguments)
    first = default["steps"][0]
    print(f"default candidates: first step {sum(first.values()):.2f} s, slowest call {max(first.values()):.2f} s")
    report = {"default": default}
    most = 0.0
    for mode in ["process", *(["inline"] if arguments.inline else [])]:
        found = report[mode] = fresh(mode, arguments)
        longer = waits(found, default)
        for number, each in enumerate(longer):
            name, seconds = max(each.items(), key=lambda item: item[1])
            if number < 2 or seconds > 0.1:
                print(f"{mode}: step {number + 1}: {name} waited {seconds:+.3f} s beyond the default's")
        worst = max(max(each.values()) for each in longer)
        followed = found["followed"]
        when = f"from step {followed['step']} on, after {followed['seconds']:.0f} s" if followed else "never"
        print(f"{mode}: {found['tunings']} keys tuned, followed {when}; no call waited more than {worst:.2f} s longer")
        if mode == "process":
            most = worst
            if followed is None or not found["tunings"]:
                print("process: nothing was tuned", file=sys.stderr)
                return 1
    if arguments.json:
        arguments.json.write_text(json.dumps(report))
    return int(most > arguments.allowed)


if __name__ == "__main__":
    sys.exit(main())
