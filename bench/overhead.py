"""What a routed call costs the host, beside a plain launch.

python bench/overhead.py                    # the router on the CPU, and where there is a GPU the launches too
python bench/overhead.py --rounds 500       # medians of more rounds
python bench/overhead.py --shapes small     # without the large shape of the chain, for which others tune for minutes

Every number is the median of paired rounds: all things compared run in turn in each round, and a ratio is the median
of the rounds' ratios, so that whatever else the machine does hits them alike. `floor` is what no router can do
without, a key of ten fields and its look-up; it tells how fast the machine is just now: 0.22 us on the host of an H200
with nothing else to do. A line `at that host` is a time over the floor's, times 0.22 us.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import os
import pkgutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import layout_tuner.kernels
from layout_tuner.kernels import dv_local as kernels

from layout_tuner import ops
from layout_tuner.device import interpreter
from layout_tuner.device.driver import chip
from layout_tuner.dispatch import router
from layout_tuner.launch import direct, guards, launcher
from layout_tuner.launch.direct import Constant
from layout_tuner.ops import dv_local
from layout_tuner.spec.declaration import Launch, Problem

Rounds = dict[str, list[float]]
SHAPE = {"B": 2, "T": 2048, "H": 4, "HV": 8, "K": 64, "V": 64}
LARGE = {"B": 8, "T": 4096, "H": 16, "HV": 32, "K": 128, "V": 128}
FLOOR_US = 0.22


def paired(functions: dict[str, Callable[[], object]], rounds: int, calls: int, after: Callable[[], None]) -> Rounds:
    """Microseconds a call takes, for each function in each round.

    Args:
        functions: What is compared.
        rounds: How often each has its turn.
        calls: Calls in a turn; few, so that most turns are not interrupted.
        after: Called after each turn, outside the clock.
    """
    found: Rounds = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(3):
            function()
    after()
    for _ in range(rounds):
        for name, function in functions.items():
            started = time.perf_counter_ns()
            for _ in range(calls):
                function()
            found[name].append((time.perf_counter_ns() - started) / calls / 1000)
            after()
    return found


def ratio(rounds: Rounds, one: str, other: str) -> float:
    """The median of one's time over the other's."""
    return statistics.median(a / b for a, b in zip(rounds[one], rounds[other], strict=True))


def difference(rounds: Rounds, one: str, other: str) -> float:
    """The median of one's time less the other's."""
    return statistics.median(a - b for a, b in zip(rounds[one], rounds[other], strict=True))


def inputs(device: str, dtype: torch.dtype, B: int, T: int, H: int, HV: int, K: int, V: int) -> dict[str, torch.Tensor]:
    """Inputs of `chunk_bwd_dv_local`."""
    made = {"q": (B, T, H, K), "k": (B, T, H, K), "do": (B, T, HV, V)}
    tensors = {name: torch.randn(shape, device=device, dtype=dtype) for name, shape in made.items()}
    return {**tensors, "g": torch.full((B, T, HV), -0.01, dtype=torch.float32, device=device).cumsum(1)}


# -- the router, with the launch stubbed -----------------------------------------------------------------------


@contextmanager
def stubbed_launch() -> Iterator[Launch]:
    """`chunk_bwd_dv_local` with a launch that does nothing and allocates nothing."""
    results = (torch.empty(0, dtype=torch.float32, device="cpu"),)

    def launch(*_: object) -> tuple[torch.Tensor]:
        return results

    def bind(problem: Problem, candidate: object) -> Launch:
        return launch

    whole = dv_local.SPEC
    dv_local.SPEC = dataclasses.replace(whole, bind=bind)
    try:
        yield launch
    finally:
        dv_local.SPEC = whole


def on_the_router(rounds: int, shape: dict[str, int]) -> dict[str, float]:
    """Cost of a hit: every operand's shape, dtype, device and time-axis strides checked, then the stub called."""
    given = inputs("cpu", torch.float32, **shape)
    q, k, do, g = given.values()
    tensors = (q, k, do, g, None, None)
    table = {("chunk_bwd_dv_local", *shape.values(), False, torch.float32, "BT=64"): None}
    B, T, H, HV, K, V = shape.values()
    with stubbed_launch() as launch:
        spec = dv_local.SPEC
        for _ in range(2):
            ops.chunk_bwd_dv_local(q, k, do, g)
        memory = router.current().prepared
        fits = memory.last[spec].fits
        other = inputs("cpu", torch.float32, **shape | {"T": T // 2})
        ops.chunk_bwd_dv_local(**other)
        turn = [given, other]

        def alternating() -> None:
            for each in turn:
                ops.chunk_bwd_dv_local(each["q"], each["k"], each["do"], each["g"])

        functions: dict[str, Callable[[], object]] = {
            "nothing": lambda: None,
            "floor": lambda: table[("chunk_bwd_dv_local", B, T, H, HV, K, V, False, torch.float32, "BT=64")],
            "launch": lambda: launch(q, k, do, g, None, None, None, None, None),
            "comparison": lambda: fits(tensors, (64,), None, None),
            "signature": lambda: memory.get(guards.signature(spec, tensors, (64,), None, None)),
            "hit": lambda: ops.chunk_bwd_dv_local(q, k, do, g),
            "two shapes in turn": alternating,
        }
        theirs = dispatch_of_fla(launch)
        if theirs is not None:
            functions["flash-linear-attention's dispatch"] = lambda: theirs(
                q, k, do, g, None, None, None, None, 64, None
            )
        found = paired(functions, rounds, 50, lambda: None)
    found["two shapes in turn"] = [us / 2 for us in found["two shapes in turn"]]
    report = {name: difference(found, name, "nothing") for name in functions if name != "nothing"}
    report["router's share"] = difference(found, "hit", "launch")
    net = [floor - nothing for floor, nothing in zip(found["floor"], found["nothing"], strict=True)]
    for name, less in (("hit", "nothing"), ("router's share", "launch")):
        pairs = zip(found["hit"], found[less], net, strict=True)
        report[f"{name}, at that host"] = statistics.median((a - b) / floor * FLOOR_US for a, b, floor in pairs)
    return report


def dispatch_of_fla(launch: Callable[..., Any]) -> Callable[..., Any] | None:
    """flash-linear-attention's dispatch of the same op to a function that does nothing, where it is installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    from fla.backends import dispatch

    def chunk_bwd_dv_local(*given: object) -> object:
        return launch(*given)

    found: Callable[..., Any] = dispatch("common")(chunk_bwd_dv_local)
    return found


# -- the launcher, with the device stubbed ---------------------------------------------------------------------


class StubbedDriver:
    """As much of a driver as launching asks for."""

    def get_current_device(self) -> int:
        return -1  # what a CPU tensor says it is on

    def get_current_stream(self, index: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@contextmanager
def stubbed_device() -> Iterator[Any]:
    """The kernel, made for a device whose launches do nothing; a context of Triton 3.6."""
    from triton.runtime import driver, jit

    def start(*_: object) -> None:
        pass

    class Run:
        launch = staticmethod(start)
        global_scratch_size = profile_scratch_size = 0
        launch_cooperative_grid = launch_pdl = False

        def __call__(self, *_: object) -> None:
            pass

    def compile_nothing(kernel: Any, key: str, signature: object, device: int, *_: object) -> Any:
        made = SimpleNamespace(run=Run(), function=0, packed_metadata=(4, 1, 0), launch_metadata=lambda *_: None)
        kernel.device_caches[device][0][key] = made
        return made

    whole, require = jit.JITFunction._do_compile, interpreter.require_running
    previous = driver._active
    driver.set_active(StubbedDriver())
    direct.style.cache_clear()
    jit.JITFunction._do_compile = compile_nothing
    interpreter.require_running = lambda *_: None
    replaced = []
    for info in pkgutil.iter_modules(layout_tuner.kernels.__path__):
        module = importlib.import_module(f"layout_tuner.kernels.{info.name}")
        for name, made in list(vars(module).items()):
            if interpreter.interpreted(made):
                replaced.append((module, name, made))
                compiled = jit.JITFunction(made.fn, do_not_specialize=made.kwargs.get("do_not_specialize"))
                setattr(module, name, compiled)
    try:
        yield kernels.chunk_bwd_dv_local_full
    finally:
        for module, name, made in replaced:
            setattr(module, name, made)
        jit.JITFunction._do_compile, interpreter.require_running = whole, require
        driver._active = previous
        direct.style.cache_clear()
        router.current().prepared.clear()


def dv_local_constants(H: int, HV: int, K: int, V: int) -> dict[str, Constant]:
    """The constants of the whole-tile kernel."""
    return dict(
        H=H, HV=HV, K=K, V=V, BT=64, BK=64, BV=64, USE_G=True, USE_G_GAMMA=False, USE_A=False, G_T_CONTIG=False,
        IS_VARLEN=False, DOT_PRECISION="ieee",
    )  # fmt: skip


def dv_local_arguments(given: dict[str, torch.Tensor], dv: torch.Tensor) -> dict[str, Any]:
    """Its run-time arguments."""
    B, T, HV, _ = dv.shape
    NT = -(-T // 64)
    absent = {"cu_seqlens": None, "chunk_indices": None}
    numbers = {"scale": 0.125, "T": T, "NT": NT, "N": 0, "TASKS": B * NT * HV}
    return {**given, "g_gamma": None, "A": None, "dv": dv, **absent, **numbers}


def on_the_launcher(rounds: int, shape: dict[str, int]) -> dict[str, float]:
    """Host cost of a launch: Triton's binder against the direct one, with the same stub behind both."""
    given = inputs("cpu", torch.float32, **shape)
    constants = dv_local_constants(*list(shape.values())[2:])
    named = dv_local_arguments(given, torch.empty_like(given["do"]))
    arguments = tuple(named.values())
    with stubbed_device() as kernel:
        bound = launcher.bind(kernel, **constants)
        functions: dict[str, Callable[[], object]] = {
            "nothing": lambda: None,
            "kernel[grid](**kw)": lambda: kernel[(64,)](**named, **constants),
            "bound(grid, *args)": lambda: bound(64, *arguments),
        }
        found = paired(functions, rounds, 50, lambda: None)
        assert bound.variants, "nothing was launched directly"
    report = {name: difference(found, name, "nothing") for name in functions if name != "nothing"}
    report["bound / kernel"] = ratio(found, "bound(grid, *args)", "kernel[grid](**kw)")
    return report


def on_the_chain_stubbed(rounds: int, shape: dict[str, int]) -> dict[str, float]:
    """Host time of a step of the chain whose launches do nothing: autograd, allocations, launching."""
    with stubbed_device():
        run, forward = step(ops.chunk_gated_delta_rule, "cpu", **shape)
        found = paired(
            {"nothing": lambda: None, "forward": forward, "forward and backward": run}, rounds, 1, lambda: None
        )
    return {name: difference(found, name, "nothing") for name in found if name != "nothing"}


# -- on a GPU --------------------------------------------------------------------------------------------------


def flash_linear_attention(name: str) -> Callable[..., Any] | None:
    """A function of flash-linear-attention, where it is installed; only its cost counts here, so that its guard
    against Triton 3.4 to 3.7.0 on Hopper, which computes a gated dqkwg wrongly, is lifted.
    """
    if importlib.util.find_spec("fla") is None:
        return None
    from fla.ops.common import chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    chunk_o.IS_NVIDIA_HOPPER = False
    found: Callable[..., Any] = {
        "chunk_bwd_dv_local": chunk_o.chunk_bwd_dv_local,
        "chunk_gated_delta_rule": chunk_gated_delta_rule,
    }[name]
    return found


def on_a_gpu(rounds: int, shape: dict[str, int]) -> dict[str, float]:
    """Host time of one op: routed, as a plain launch into a tensor allocated alike, and flash-linear-attention's."""
    given = inputs("cuda", torch.bfloat16, **shape)
    q, k, do, g = given.values()
    ops.chunk_bwd_dv_local(q, k, do, g)
    known = router.current().prepared
    constants = dv_local_constants(*list(shape.values())[2:])
    kernel = kernels.chunk_bwd_dv_local_full
    programs = chip(q.device).cube_programs
    bound = launcher.bind(kernel, **constants)
    named = dv_local_arguments(given, torch.empty_like(do))
    grid = min(named["TASKS"], programs)
    arguments = tuple(named.values())

    def plain() -> None:
        named["dv"] = torch.empty_like(do)
        kernel[(grid,)](**named, **constants)

    functions: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "allocation": lambda: torch.empty_like(do),
        "routed": lambda: ops.chunk_bwd_dv_local(q, k, do, g),
        "kernel[grid](**kw)": plain,
        "bound(grid, *args)": lambda: bound(grid, *arguments),
    }
    theirs = flash_linear_attention("chunk_bwd_dv_local")
    if theirs is not None:
        functions["flash-linear-attention"] = lambda: theirs(q=q, k=k, do=do, g=g, scale=0.125)
    found = paired(functions, rounds, 100, torch.cuda.synchronize)
    assert known and bound.variants, "nothing was launched directly"
    report = {name: difference(found, name, "nothing") for name in functions if name != "nothing"}
    report["routed / kernel"] = ratio(found, "routed", "kernel[grid](**kw)")
    if theirs is not None:
        report["routed / flash-linear-attention"] = ratio(found, "routed", "flash-linear-attention")
    return report


def step(
    op: Callable[..., Any], device: str, B: int, T: int, H: int, HV: int, K: int, V: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Forward and backward of the chain, and the forward alone."""
    torch.manual_seed(0)
    q, k = (
        torch.nn.functional.normalize(torch.randn(B, T, H, K, dtype=torch.float32, device=device), dim=-1)
        for _ in range(2)
    )
    v = torch.randn(B, T, HV, V, dtype=torch.float32, device=device)
    leaves = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    leaves += [
        torch.rand(B, T, HV, dtype=torch.float32, device=device).log().requires_grad_(),
        torch.rand(B, T, HV, dtype=torch.float32, device=device).requires_grad_(),
    ]
    do = torch.randn(B, T, HV, V, device=device, dtype=torch.bfloat16)

    def forward() -> torch.Tensor:
        o: torch.Tensor = op(*leaves)[0]
        return o

    def run() -> object:
        return torch.autograd.grad(forward(), leaves, do)

    return run, forward


def on_the_chain(rounds: int, shape: dict[str, int]) -> dict[str, float]:
    """Host time of a whole step of `chunk_gated_delta_rule`, with its launches and allocations."""
    run, forward = step(ops.chunk_gated_delta_rule, "cuda", **shape)
    functions: dict[str, Callable[[], object]] = {"routed": run, "routed, forward": forward}
    theirs = flash_linear_attention("chunk_gated_delta_rule")
    if theirs is not None:
        run, forward = step(theirs, "cuda", **shape)
        functions |= {"flash-linear-attention": run, "flash-linear-attention, forward": forward}
    found = paired(functions, rounds, 5, torch.cuda.synchronize)
    report = {name: statistics.median(found[name]) for name in functions}
    for name, function in functions.items():
        if "forward" in name:
            continue
        report[f"{name}: launches"], report[f"{name}: allocations"] = counted(function)
    if theirs is not None:
        report["routed / flash-linear-attention"] = ratio(found, "routed", "flash-linear-attention")
    return report


def counted(function: Callable[[], object]) -> tuple[int, int]:
    """Kernels and allocations of one call."""
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    function()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    kernels_run = [
        event for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    ]  # fmt: skip
    return len(kernels_run), allocations


def measured(rounds: int, shapes: tuple[dict[str, int], ...]) -> Iterator[tuple[str, dict[str, float]]]:
    """Title and numbers of one comparison after the other; the chain at these shapes on a GPU."""
    few = max(10, rounds // 5)
    if torch.cuda.is_available():
        yield "chunk_bwd_dv_local on a GPU, host us", on_a_gpu(rounds, SHAPE)
        for shape in shapes:
            title = f"forward and backward of the chain on a GPU, {tuple(shape.values())}, host us"
            yield title, on_the_chain(few, shape)
    else:
        small = {"B": 2, "T": 64, "H": 4, "HV": 8, "K": 16, "V": 16}
        yield "router, launch stubbed, us", on_the_router(rounds, small)
        yield "launcher, device stubbed, us", on_the_launcher(rounds, small)
        yield "chain, device stubbed, us", on_the_chain_stubbed(rounds, small)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--shapes", choices=("all", "small"), default="all", help="of the chain on a GPU")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    reports: dict[str, dict[str, float]] = {}
    for title, report in measured(options.rounds, (SHAPE,) if options.shapes == "small" else (SHAPE, LARGE)):
        reports[title] = report
        if not options.json:
            print(f"\n{title}", flush=True)
            for name, number in report.items():
                print(f"  {name:34s} {number:10.2f}", flush=True)
    if options.json:
        print(json.dumps(reports))


if __name__ == "__main__":
    main()
