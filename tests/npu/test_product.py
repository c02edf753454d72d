"""The product on a simulated NPU: the code an NPU would run, up to its kernels' numerics and speed.

Detection, device checks, events, streams and memory are the device's; which candidate wins is the test's to say, by
the simulated time that each launch and each copy takes.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compilers import compiler_error

import layout_tuner
from layout_tuner import ops, reference
from layout_tuner.config import Config, Measure
from layout_tuner.device import driver, environment
from layout_tuner.dispatch import router
from layout_tuner.dispatch.router import Router
from layout_tuner.errors import ConfigError
from layout_tuner.spec import keys, layouts, operands, registry
from layout_tuner.spec.layouts import Layout
from layout_tuner.tuning import numerics
from layout_tuner.tuning.timing import EventTimer

B, T, H, HV, K, V, BT = 1, 21, 1, 2, 16, 16, 16
CONFIG = Config(tuning={"isolate": "none"}, measure=Measure(warmup_rounds=1, min_rounds=10, max_rounds=10))
SPEC = registry.lookup("chunk_bwd_dv_local")
UB_OVERFLOW = 'loc("k.py":11:4): error: ub overflow, requires 1835008 bits while 1572864 bits available!'
CANDIDATES = ("full/g=STRIDE_HV", "full/g=T_CONTIG", "sub/g=STRIDE_HV", "sub/g=T_CONTIG")


@pytest.fixture(autouse=True)
def _fresh(sim, monkeypatch) -> Iterator[None]:
    """No answer about a device outlives a test, and timing costs the host next to nothing.

    A small L2 cache keeps the timer's scratch buffer small; while it times, launches take time and do no work.
    """
    forget()
    sim.set_properties(L2_cache_size=1 << 10)
    timed = EventTimer.round_us

    def round_us(self, runs):
        with sim.without_execution():
            return timed(self, runs)

    monkeypatch.setattr(EventTimer, "round_us", round_us)
    yield
    forget()


def forget() -> None:
    """Lets the process ask the device anew."""
    layout_tuner.disable()
    router.current().prepared.clear()
    driver.chip.cache_clear()
    environment.environment.cache_clear()


def npu(index: int = 0) -> torch.device:
    """A simulated device; torch knows none by that name while modules are imported."""
    return torch.device("npu", index)


def arguments(
    device: str = "npu",
    *,
    dtype: torch.dtype = torch.float32,
    layout: Layout = Layout.STRIDE_HV,
    tokens: int = T,
) -> dict[str, torch.Tensor]:
    """q, k, do and g of a small problem, the same values on every device."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(B, tokens, H, K, generator=generator).to(dtype).to(device) for _ in range(2))
    do = torch.randn(B, tokens, HV, V, generator=generator).to(dtype).to(device)
    g = -torch.rand(B, tokens, HV, generator=generator).cumsum(1).to(device)
    return {"q": q, "k": k, "do": do, "g": layouts.relayout(g, layout)}


def dv_local(given: dict[str, torch.Tensor], **more: torch.Tensor) -> torch.Tensor:
    return ops.chunk_bwd_dv_local(**given, **more, chunk_size=BT)


def assert_right(dv: torch.Tensor, given: dict[str, torch.Tensor], **more: torch.Tensor) -> None:
    host = {name: tensor.cpu() for name, tensor in {**given, **more}.items()}
    wanted = reference.chunk_bwd_dv_local(**host, chunk_size=BT)
    dtype = str(given["q"].dtype).removeprefix("torch.")
    assert numerics.error(dv.cpu(), wanted) <= numerics.tolerance(dtype)


def set_costs(sim, costs_ms: dict[str, float], copy_ms: float = 0.1) -> None:
    """Says what each candidate's launch takes; time passes in no other way."""
    sim.use_wall_clock(False)
    sim.copy_cost(copy_ms)
    for candidate, ms in costs_ms.items():
        variant, _, plan = candidate.partition("/g=")
        sim.launch_cost(f"chunk_bwd_dv_local_{variant}", ms, G_T_CONTIG=plan == "T_CONTIG")


def ran(sim) -> list[str]:
    """The candidates of the launches so far."""
    plans = {True: "T_CONTIG", False: "STRIDE_HV"}
    return [
        f"{launch.kernel.removeprefix('chunk_bwd_dv_local_')}/g={plans[launch.constexprs['G_T_CONTIG']]}"
        for launch in sim.launches()
        if launch.kernel.startswith("chunk_bwd_dv_local_")
    ]


# ---- Detection


def test_a_simulated_device_is_never_picked_by_itself():
    assert driver.resolve() == torch.device("cpu")
    assert driver.resolve("npu") == npu()
    assert driver.resolve("npu:1") == npu(1)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="npu:7"):
        driver.resolve("npu:7")


def test_the_chip_is_the_npus(sim):
    chip = driver.chip(npu())
    assert (chip.kind, chip.name, chip.tiles) == ("npu", "Ascend910B3", "ascend")
    assert (chip.cube_programs, chip.vector_programs) == (20, 40)


def test_an_older_torch_npu_leaves_the_core_counts_to_triton(sim):
    sim.set_properties(cube_core_num=24, vector_core_num=48)
    assert driver.npu_cores(npu(), SimpleNamespace(name="Ascend910_9391")) == (24, 48)


def test_the_environment_says_that_it_is_simulated(sim):
    here = environment.environment(npu())
    assert here.facts["simulated"] == "1" and here.facts["interpreter"] == "1"
    assert here.facts["model"] == "Ascend910B3" and here.facts["cann"] == torch.npu.utils.get_cann_version("CANN")
    assert here.id != environment.environment(torch.device("cpu")).id
    forget()
    sim.set_properties(cube_core_num=24)
    assert environment.environment(npu()).id != here.id


def test_questions_to_the_device(sim):
    sim.set_properties(total_memory=torch.npu.memory_allocated() + 4096, L2_cache_size=512)
    assert driver.free_bytes(npu()) == 4096
    assert driver.cache_bytes(npu()) == 512
    assert not driver.capturing(npu())
    with sim.capture():
        assert driver.capturing(npu())


# ---- The op


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [Layout.STRIDE_HV, Layout.T_CONTIG])
def test_an_op_runs_on_the_npu(sim, dtype, layout):
    given = arguments(dtype=dtype, layout=layout)
    dv = dv_local(given)
    assert dv.device == npu() and dv.is_contiguous()
    assert_right(dv, given)
    assert ran(sim) == ["full/g=T_CONTIG"], "the default on an NPU is the published fix"
    (launch,) = sim.launches()
    assert launch.grid == (min(2 * HV, 20),)


def test_one_program_a_cube_core(sim):
    sim.set_properties(cube_core_num=2, vector_core_num=4)
    given = arguments()
    assert_right(dv_local(given), given)
    assert sim.launches()[0].grid == (2,)


def test_a_packed_batch(sim):
    given = arguments()
    cu_seqlens = torch.tensor([1, 5, 5, 20], dtype=torch.int32, device="npu")
    dv = dv_local(given, cu_seqlens=cu_seqlens)
    assert_right(dv, given, cu_seqlens=cu_seqlens)
    assert dv[:, 0].eq(0).all() and dv[:, 20].eq(0).all()


def test_a_hit_never_waits_for_the_device(sim):
    given = arguments()
    dv_local(given)
    cu_seqlens = torch.tensor([0, 5, T], device="npu")
    chunk_indices = ops.prepare_chunk_indices(cu_seqlens, BT)
    dv_local(given, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
    before = sim.sync_count()
    dv_local(given)
    dv_local(given, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
    dv_local(given, cu_seqlens=cu_seqlens)
    assert sim.sync_count() == before


@pytest.mark.parametrize("operand", ["q", "k", "do", "g", "cu_seqlens", "chunk_indices"])
@pytest.mark.parametrize("elsewhere", ["cpu", "npu:1"])
def test_mixed_devices_are_refused_before_any_launch(sim, operand, elsewhere):
    cu_seqlens = torch.tensor([0, T], device="npu")
    given = arguments() | {"cu_seqlens": cu_seqlens, "chunk_indices": ops.prepare_chunk_indices(cu_seqlens, BT)}
    dv_local(given)
    launched = len(sim.launches())
    given[operand] = given[operand].to(elsewhere)
    with pytest.raises(ValueError, match=rf"chunk_bwd_dv_local: .*device.*{elsewhere}"):
        dv_local(given)
    assert len(sim.launches()) == launched


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: {"cu_seqlens_cpu": torch.tensor([0, 6, T])}, r"cu_seqlens_cpu: wanted the values of cu_seqlens, "),
        (lambda x: {"cu_seqlens_cpu": torch.tensor([0, T])}, r"cu_seqlens_cpu: wanted \[3\] as cu_seqlens on the CPU"),
        (lambda x: {"cu_seqlens_cpu": x}, r"cu_seqlens_cpu: wanted \[3\] as cu_seqlens on the CPU, got \[3\] on npu:0"),
        (lambda x: {"cu_seqlens": torch.tensor([0, 5, T + 1], device="npu")}, f"at most T={T}, got {T + 1}"),
        (lambda x: {"cu_seqlens": torch.tensor([0, 9, 5, T], device="npu")}, r"never fall, got \[0, 9, 5, 21\]"),
        (lambda x: {"cu_seqlens": x[None]}, r"cu_seqlens: "),
        (lambda x: {"cu_seqlens": x.cpu()}, r"device.*cpu"),
    ],
    ids=["other values", "other length", "not on the host", "past the end", "falling", "two dimensions", "on the host"],
)
def test_wrong_starts_of_a_packed_batch_are_named(sim, change, said):
    """Starts on the device, whose chunks an earlier call made; nothing is launched with other ones."""
    q, k, v = (torch.randn(1, T, heads, 16).npu() for heads in (H, H, HV))
    g, beta = -torch.rand(1, T, HV).npu(), torch.rand(1, T, HV).npu()
    cu_seqlens = torch.tensor([0, 5, T], device="npu")
    given = {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": torch.tensor([0, 5, T])}
    ops.chunk_gated_delta_rule(q, k, v, g, beta, **given)
    launched = len(sim.launches())
    with pytest.raises(ValueError, match=said):
        ops.chunk_gated_delta_rule(q, k, v, g, beta, **given | {"cu_seqlens_cpu": None} | change(cu_seqlens))
    assert len(sim.launches()) == launched


def test_an_op_runs_where_its_tensors_are(sim):
    """The current device need not be the tensors', and stays what it was."""
    given = arguments("npu:1")
    for _ in range(2):  # a miss, a hit
        dv = dv_local(given)
        assert dv.device == npu(1) and torch.npu.current_device() == 0
        assert_right(dv, given)
    assert [launch.device for launch in sim.launches()] == [1, 1]


# ---- Tuning on a set clock


@pytest.mark.parametrize(
    ("costs_ms", "copy_ms", "winner"),
    [
        pytest.param((2.0, 1.0, 3.0, 3.0), 0.1, "full/g=T_CONTIG", id="the transpose pays"),
        pytest.param((2.0, 1.9, 3.0, 3.0), 0.5, "full/g=STRIDE_HV", id="the transpose costs more than it saves"),
        pytest.param((2.0, 1.5, 1.0, 1.2), 0.1, "sub/g=STRIDE_HV", id="the other variant"),
        pytest.param((2.0, 1.5, 1.4, 0.7), 0.1, "sub/g=T_CONTIG", id="the other variant, transposed"),
        pytest.param((1.995, 1.9, 3.0, 1.99), 0.1, "full/g=T_CONTIG", id="within the margin the default stays"),
    ],
)
def test_the_set_clock_decides_who_wins(sim, tmp_path, costs_ms, copy_ms, winner):
    set_costs(sim, dict(zip(CANDIDATES, costs_ms, strict=True)), copy_ms)
    given = arguments()
    with layout_tuner.enable(CONFIG, cache=tmp_path / "cache.sqlite"):
        assert_right(dv_local(given), given)
        tuned = len(sim.launches())
        assert set(ran(sim)) == set(CANDIDATES)
        dv_local(given)
    assert ran(sim)[-2:] == [winner, winner] and len(sim.launches()) == tuned + 1


def test_times_are_the_devices(sim, tmp_path):
    set_costs(sim, dict(zip(CANDIDATES, (2.0, 1.0, 4.0, 3.0), strict=True)), copy_ms=0.25)
    tuning = Router(cached(tmp_path))
    outcome = tuning.tune(SPEC, key_of(arguments()), npu())
    tuning.close()
    times = {m.id: (m.state, m.end_to_end_us, m.kernel_us, m.relayout_us) for m in outcome.measurements}
    expected = {
        "full/g=STRIDE_HV": ("ok", 2000, 2000, 0),
        "full/g=T_CONTIG": ("ok", 1250, 1000, 250),
        "sub/g=STRIDE_HV": ("ok", 4000, 4000, 0),
        "sub/g=T_CONTIG": ("ok", 3250, 3000, 250),
    }
    assert {name: found[0] for name, found in times.items()} == {name: found[0] for name, found in expected.items()}
    for name, found in expected.items():
        assert times[name][1:] == pytest.approx(found[1:])


def test_an_operand_that_arrives_t_contiguous_is_used_as_it_is(sim, tmp_path):
    set_costs(sim, dict(zip(CANDIDATES, (0.1, 1.0, 0.1, 0.5), strict=True)), copy_ms=5.0)
    given = arguments(layout=Layout.T_CONTIG)
    with layout_tuner.enable(CONFIG, cache=tmp_path / "cache.sqlite"):
        assert_right(dv_local(given), given)
    assert set(ran(sim)) == {"full/g=T_CONTIG", "sub/g=T_CONTIG"} and ran(sim)[-1] == "sub/g=T_CONTIG"


def test_a_stored_decision_is_used_without_tuning(sim, tmp_path):
    set_costs(sim, dict(zip(CANDIDATES, (1.0, 2.0, 3.0, 3.0), strict=True)))
    given, cache = arguments(), tmp_path / "cache.sqlite"
    with layout_tuner.enable(CONFIG, cache=cache):
        dv_local(given)
    sim.reset()
    with layout_tuner.enable(CONFIG, cache=cache, on_miss="error"):
        assert_right(dv_local(given), given)
    assert ran(sim) == ["full/g=STRIDE_HV"]


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (compiler_error("ConvertLinalgRToBinary", UB_OVERFLOW), "overflow"),
        (RuntimeError("some fault of the driver's"), "device"),
        (RuntimeError("NPU out of memory. Tried to allocate 5.03 GiB (NPU 3; 60.96 GiB total capacity)"), "memory"),
    ],
)
def test_a_failing_candidate_harms_no_call(sim, tmp_path, error, failure):
    def fail(launch) -> float:
        raise error

    set_costs(sim, dict(zip(CANDIDATES, (2.0, 1.0, 1.5, 3.0), strict=True)))
    sim.launch_cost("chunk_bwd_dv_local_full", fail, G_T_CONTIG=True)
    tuning = Router(cached(tmp_path))
    outcome = tuning.tune(SPEC, key_of(arguments()), npu())
    tuning.close()
    broken = outcome.measurement("full/g=T_CONTIG")
    assert (broken.state, broken.failure) == ("failed", failure) and outcome.winner == "sub/g=STRIDE_HV"
    given = arguments()
    with layout_tuner.enable(CONFIG, cache=tmp_path / "cache.sqlite"):
        assert_right(dv_local(given), given)


def test_a_stored_candidate_that_fails_gives_way_to_the_default(sim, tmp_path):
    def fail(launch) -> float:
        raise RuntimeError("the aicore execution is abnormal")

    set_costs(sim, dict(zip(CANDIDATES, (2.0, 2.0, 1.0, 3.0), strict=True)))
    given, cache = arguments(), tmp_path / "cache.sqlite"
    with layout_tuner.enable(CONFIG, cache=cache):
        dv_local(given)
    assert ran(sim)[-1] == "sub/g=STRIDE_HV"
    sim.launch_cost("chunk_bwd_dv_local_sub", fail)
    with layout_tuner.enable(CONFIG, cache=cache):
        assert_right(dv_local(given), given)
        assert_right(dv_local(given), given)
    assert ran(sim)[-2:] == ["full/g=T_CONTIG", "full/g=T_CONTIG"]


def test_no_tuning_while_a_graph_is_captured(sim, tmp_path):
    set_costs(sim, dict(zip(CANDIDATES, (0.5, 1.0, 3.0, 3.0), strict=True)))
    given = arguments()
    with layout_tuner.enable(CONFIG, cache=tmp_path / "cache.sqlite"):
        with sim.capture():
            dv = dv_local(given)
        assert ran(sim) == ["full/g=T_CONTIG"]
        assert_right(dv, given)
        dv_local(given)
        assert set(ran(sim)) == set(CANDIDATES) and ran(sim)[-1] == "full/g=STRIDE_HV", "the choice was frozen"


def test_no_tuning_with_too_little_memory(sim, tmp_path):
    set_costs(sim, dict(zip(CANDIDATES, (0.5, 1.0, 3.0, 3.0), strict=True)))
    given = arguments()
    needed = given["do"].nbytes + given["g"].nbytes
    sim.set_properties(total_memory=torch.npu.memory_allocated() + 2 * needed, L2_cache_size=1 << 30)
    with layout_tuner.enable(CONFIG, cache=tmp_path / "cache.sqlite"):
        dv = dv_local(given)
        assert ran(sim)[-1] == "full/g=T_CONTIG"
        sim.set_properties(L2_cache_size=1 << 10)
        assert_right(dv, given)
        dv_local(given)
        assert ran(sim)[-1] == "full/g=STRIDE_HV", "the choice was frozen"


def test_tuning_touches_no_tensor_and_no_random_state_of_the_caller(sim, tmp_path):
    given = arguments()
    before = {name: tensor.cpu() for name, tensor in given.items()}
    states = torch.get_rng_state(), torch.npu.get_rng_state()
    with layout_tuner.enable(CONFIG, cache=tmp_path / "cache.sqlite"):
        dv_local(given)
    assert all(torch.equal(tensor.cpu(), before[name]) for name, tensor in given.items())
    assert torch.equal(torch.get_rng_state(), states[0]) and torch.equal(torch.npu.get_rng_state(), states[1])


def test_tuning_leaves_no_device_memory_behind(sim, tmp_path):
    given = arguments()
    before = torch.npu.memory_allocated()
    with layout_tuner.enable(CONFIG, cache=tmp_path / "cache.sqlite"):
        dv_local(given)
    assert torch.npu.memory_allocated() == before


def cached(folder: Path) -> Config:
    section = CONFIG.cache.model_copy(update={"path": str(folder / "cache.sqlite")})
    return CONFIG.model_copy(update={"cache": section})


def key_of(given: dict[str, torch.Tensor]) -> keys.Key:
    call = operands.Call(
        tensors=(given["q"], given["k"], given["do"], given["g"], None, None), options=(BT,), scalars=(None,)
    )
    return SPEC.key(call)
