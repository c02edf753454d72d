"""Times of every op's candidates and of the whole chain, against the floor of the shape and the public kernels.

    python bench/kernels.py [--shapes small,middle,large] [--ops NAME,...] [--json FILE]

One table a shape: median device time of each candidate (relayouts apart), bytes and floating-point operations a
second, and how many floors that is; the floor is the longer of the fewest bytes over a measured copy's rate and the
operations over a measured bf16 matrix product's. Where flash-linear-attention is installed, its Ascend kernels (plain
Triton) run on the same arguments in the same process, its core count patched to this device's; for the chain, its CUDA
kernels, with its guard against Triton 3.4 to 3.7.0 on Hopper lifted. Every candidate is compared with the oracle before
it is timed. Without an accelerator there is nothing to time and the exit status is 2.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import layout_tuner.ops
from layout_tuner.device import driver
from layout_tuner.launch.prepared import Prepared
from layout_tuner.spec import layouts, operands, registry
from layout_tuner.spec.declaration import OpSpec
from layout_tuner.spec.keys import Form, Key
from layout_tuner.spec.layouts import Layout
from layout_tuner.spec.operands import Call
from layout_tuner.tuning.experiment import Experiment
from layout_tuner.tuning.timing import EventTimer, time_rounds

SHAPES = {
    "small": (2, 2048, 4, 8, 64, 64),
    "middle": (1, 8192, 16, 32, 128, 128),
    "large": (8, 4096, 16, 32, 128, 128),
}
CHUNK = 64

# Multiply-adds times two of one chunk of one value head, from the formulas of the kernels; K, V, BT in that order.
OPERATIONS: dict[str, Callable[[int, int, int], int]] = {
    "chunk_scaled_dot_kkt_fwd": lambda K, V, BT: 2 * BT * BT * K,
    "solve_tril": lambda K, V, BT: 2 * BT * BT * BT // 3,
    "recompute_w_u_fwd": lambda K, V, BT: 2 * BT * BT * (K + V),
    "chunk_gated_delta_rule_fwd_intra": lambda K, V, BT: 2 * BT * BT * (2 * K + V) + 2 * BT**3 // 3,
    "chunk_gated_delta_rule_fwd_h": lambda K, V, BT: 4 * BT * K * V,
    "chunk_fwd_o": lambda K, V, BT: 2 * BT * (K * V + BT * K + BT * V),
    "chunk_bwd_dv_local": lambda K, V, BT: 2 * BT * BT * (K + V),
    "chunk_gated_delta_rule_bwd_dhu": lambda K, V, BT: 6 * BT * K * V,
    "chunk_bwd_dqkwg": lambda K, V, BT: 2 * BT * (3 * K * V + BT * V + 3 * BT * K),
    "prepare_wy_repr_bwd": lambda K, V, BT: 2 * BT * BT * (2 * V + 5 * K + 2 * BT),
}

# Where flash-linear-attention 0.6.0 keeps its Ascend kernels.
PUBLIC = {
    "chunk_fwd_o": ("fla.ops.common.backends.triton_ascend.chunk_o", "chunk_fwd_o_npu"),
    "chunk_bwd_dv_local": ("fla.ops.common.backends.triton_ascend.chunk_o", "chunk_bwd_dv_local_npu"),
    "chunk_bwd_dqkwg": ("fla.ops.common.backends.triton_ascend.chunk_o", "chunk_bwd_dqkwg_npu"),
    "chunk_gated_delta_rule_fwd_h": (
        "fla.ops.common.backends.triton_ascend.chunk_delta_h",
        "chunk_gated_delta_rule_fwd_h_npu",
    ),
    "chunk_gated_delta_rule_bwd_dhu": (
        "fla.ops.common.backends.triton_ascend.chunk_delta_h",
        "chunk_gated_delta_rule_bwd_dhu_npu",
    ),
    "chunk_scaled_dot_kkt_fwd": (
        "fla.ops.common.backends.triton_ascend.chunk_scaled_dot_kkt",
        "chunk_scaled_dot_kkt_fwd_npu",
    ),
    "recompute_w_u_fwd": ("fla.ops.gated_delta_rule.backends.triton_ascend.wy_fast", "recompute_w_u_fwd_npu"),
    "prepare_wy_repr_bwd": ("fla.ops.gated_delta_rule.backends.triton_ascend.wy_fast", "prepare_wy_repr_bwd_npu"),
}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What this device reaches: bytes/s of a large copy, floating-point operations/s of a large bf16 product."""

    bytes_s: float
    flops_s: float


def median_us(run: Callable[[], object], timer: EventTimer, rounds: int = 15) -> float:
    """Median device time of a callable in microseconds."""
    found = time_rounds(
        {"run": run}, "run", timer, warmup_rounds=5, min_rounds=rounds, max_rounds=rounds, interval=0.0,
        deadline=time.monotonic() + 60,
    )  # fmt: skip
    return found.median("run")


def measure_rates(device: torch.device, timer: EventTimer) -> Rates:
    """The two ceilings, measured on random data."""
    source = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_us = median_us(functools.partial(target.copy_, source), timer, rounds=5)
    del source, target
    a, b = (torch.randn(8192, 8192, dtype=torch.float32, device=device).bfloat16() for _ in range(2))
    product_us = median_us(lambda: a @ b, timer, rounds=5)
    return Rates(bytes_s=2 * (1 << 30) / copy_us * 1e6, flops_s=2 * 8192**3 / product_us * 1e6)


def total_bytes(tensors: tuple[torch.Tensor | None, ...]) -> int:
    """Bytes of tensors, each once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def key_for(spec: OpSpec, shape: tuple[int, ...], form: Form) -> Key:
    """The dense bf16 key of a shape."""
    return spec.key_for(dict(zip(operands.SIZES, shape)), dtype="bfloat16", form=form)


def public_kernel(spec: OpSpec, call: Call, device: torch.device) -> Callable[[], object] | None:
    """The public Ascend kernel on the same arguments, where the library is installed and has one."""
    if spec.name not in PUBLIC:
        return None
    module, name = PUBLIC[spec.name]
    try:
        function = getattr(importlib.import_module(module), name)
    except ImportError:
        return None
    cores = driver.chip(device).cube_programs
    for loaded in [m for n, m in sys.modules.items() if n.startswith("fla") and hasattr(m, "get_npu_properties")]:
        loaded.get_npu_properties = lambda: {"num_aicore": cores, "num_vectorcore": cores}  # type: ignore[attr-defined]
    arguments = {name: value for name, value in spec.arguments(call).items() if value is not None}
    arguments.pop("cu_seqlens", None)
    if "scale" in spec.scalars:
        main = call.tensors[0]
        assert main is not None
        arguments["scale"] = main.shape[-1] ** -0.5
    return lambda: function(**arguments)


def bench_op(spec: OpSpec, shape: tuple[int, ...], timer: EventTimer, rates: Rates) -> list[dict[str, object]]:
    """A row for every candidate of an op's first standard form, and one for the public kernel."""
    device = timer.device
    B, T, _, HV, K, V = shape
    experiment = Experiment(spec, key_for(spec, shape, spec.every_form[0]), device)
    call = experiment.call
    rows: list[dict[str, object]] = []
    chunks = B * -(-T // CHUNK) * HV
    flops = OPERATIONS.get(spec.name, lambda K, V, BT: 0)(K, V, CHUNK) * chunks
    for candidate in spec.candidates(experiment.key, buffers=experiment.problem.chip.buffers):
        whole = Prepared(spec, experiment.problem, candidate, call)
        check = experiment.check(whole)
        arranged = tuple(whole.arrange(call.tensors))
        bare_call = Call(tensors=arranged, options=call.options, scalars=call.scalars)
        bare = Prepared(spec, experiment.problem, candidate, bare_call, bare=True)
        results = bare(arranged, call.scalars, None, None)
        moved = total_bytes(arranged) + total_bytes(results)
        floor_us = max(moved / rates.bytes_s, flops / rates.flops_s) * 1e6
        us = median_us(lambda bare=bare, arranged=arranged: bare(arranged, call.scalars, None, None), timer)
        rows.append(
            {
                "op": spec.name, "candidate": candidate.id, "error": check.error, "right": check.right, "us": us,
                "GB_s": moved / us / 1e3, "TFLOP_s": flops / us / 1e6, "floor_us": floor_us, "floors": us / floor_us,
            }
        )  # fmt: skip
        del results
    public = public_kernel(spec, call, device)
    if public is not None:
        try:
            rows.append({"op": spec.name, "candidate": "public Ascend kernel", "us": median_us(public, timer)})
        except Exception as error:  # a foreign kernel that this Triton refuses is a fact to print, not a failure
            rows.append({"op": spec.name, "candidate": "public Ascend kernel", "failed": str(error).splitlines()[0]})
    return rows


def chain_arguments(shape: tuple[int, ...], device: torch.device) -> dict[str, torch.Tensor]:
    """Inputs of a training step, all of them leaves."""
    B, T, H, HV, K, V = shape
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, dtype=torch.float32, device=device, generator=generator)

    q, k = (torch.nn.functional.normalize(normal(B, T, H, K), dim=-1).bfloat16() for _ in range(2))
    made = {
        "q": q, "k": k, "v": normal(B, T, HV, V).bfloat16(),
        "g": torch.nn.functional.logsigmoid(normal(B, T, HV) + 2), "beta": normal(B, T, HV).sigmoid(),
    }  # fmt: skip
    return {name: tensor.requires_grad_() for name, tensor in made.items()}


def bench_chain(shape: tuple[int, ...], timer: EventTimer) -> list[dict[str, object]]:
    """Forward + backward of the whole op: device time, host time and peak memory, ours in both layouts and public."""
    device = timer.device
    arguments = chain_arguments(shape, device)
    do = torch.randn_like(arguments["v"])
    contenders: dict[str, Callable[[], object]] = {}
    relaid = {
        name: layouts.relayout(x.detach(), Layout.T_CONTIG).requires_grad_() if name in ("g", "beta") else x
        for name, x in arguments.items()
    }

    def step(function: Callable[..., tuple[torch.Tensor, ...]], given: dict[str, torch.Tensor]) -> None:
        o = function(**given)[0]
        torch.autograd.grad(o, list(given.values()), do)

    ours = layout_tuner.ops.chunk_gated_delta_rule
    contenders["STRIDE_HV"] = lambda: step(ours, arguments)
    contenders["T_CONTIG"] = lambda: step(ours, relaid)
    try:
        chunk_o = importlib.import_module("fla.ops.common.chunk_o")
        chunk_o.IS_NVIDIA_HOPPER = False  # type: ignore[attr-defined]
        public = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        contenders["public CUDA chain"] = lambda: step(public, arguments)
    except ImportError:
        pass
    rows: list[dict[str, object]] = []
    for name, run in contenders.items():
        run()
        run()
        torch.get_device_module(device).reset_peak_memory_stats(device)
        before = torch.get_device_module(device).memory_allocated(device)
        run()
        driver.synchronize(device)
        peak = torch.get_device_module(device).max_memory_allocated(device) - before
        hosts = []
        for _ in range(10):
            driver.synchronize(device)
            start = time.perf_counter()
            run()
            hosts.append((time.perf_counter() - start) * 1e6)
        rows.append(
            {
                "op": "chunk_gated_delta_rule fwd+bwd", "candidate": name, "us": median_us(run, timer),
                "host_us": statistics.median(hosts), "peak_MiB": peak / 2**20,
            }
        )  # fmt: skip
    return rows


def line(row: dict[str, object]) -> str:
    """A row for people."""
    numbers = " ".join(
        f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in row.items()
        if name not in ("op", "candidate", "us")
    )
    us = row.get("us")
    return f"  {row['op']:34} {row['candidate']:40} {f'{us:9.1f} us' if isinstance(us, float) else '':>12}  {numbers}"


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of small, middle, large")
    parser.add_argument("--ops", default="", help="only these, separated by commas; `chain` is the whole op")
    parser.add_argument("--json", default="", help="also write the rows to this file")
    chosen = parser.parse_args()
    device = driver.resolve()
    if device.type == "cpu":
        print("no accelerator here: there is nothing to time", file=sys.stderr)
        return 2
    timer = EventTimer(device)
    rates = measure_rates(device, timer)
    name, version = driver.triton_distribution()
    print(f"{driver.chip(device).name}, torch {torch.__version__}, {name} {version}")
    print(f"copy {rates.bytes_s / 1e12:.2f} TB/s, bf16 product {rates.flops_s / 1e12:.0f} TFLOP/s")
    wanted = [op for op in chosen.ops.split(",") if op]
    everything: list[dict[str, object]] = []
    for shape_name in chosen.shapes.split(","):
        shape = SHAPES[shape_name]
        print(f"(B, T, H, HV, K, V) = {shape}, bf16")
        for op in registry.names():
            if op == "chunk_gated_delta_rule" or (wanted and op not in wanted):
                continue
            rows = bench_op(registry.lookup(op), shape, timer, rates)
            everything += [{"shape": shape_name, **row} for row in rows]
            print("\n".join(line(row) for row in rows), flush=True)
            torch.get_device_module(device).empty_cache()
        if not wanted or "chain" in wanted:
            rows = bench_chain(shape, timer)
            everything += [{"shape": shape_name, **row} for row in rows]
            print("\n".join(line(row) for row in rows), flush=True)
    if chosen.json:
        with open(chosen.json, "w", encoding="utf-8") as file:
            json.dump(everything, file, indent=1)
    return 0 if all(row.get("right", True) for row in everything) else 1


if __name__ == "__main__":
    sys.exit(main())
