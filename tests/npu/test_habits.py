"""The product on a device with a real NPU's habits: late errors and silence, want of memory, old values, forks."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from dv_local import CANDIDATES, SPEC, arguments, assert_right, dv_local, key
from layout_tuner.kernels import dv_local as kernels

import layout_tuner
from layout_tuner import ops
from layout_tuner.config import Config
from layout_tuner.device import driver, environment, software
from layout_tuner.dispatch import router
from layout_tuner.dispatch.router import Router
from layout_tuner.errors import DeviceLostError, UnsupportedProblemError
from layout_tuner.tuning import timing
from layout_tuner.tuning.timing import EventTimer

DEFAULT, LAST = "full/g=T_CONTIG", "sub/g=T_CONTIG"
TIMES_MS = dict(zip(CANDIDATES, (2.0, 1.5, 1.0, 0.5), strict=True))
DEAD = "aicore execution is abnormal"


@pytest.fixture(autouse=True)
def _fresh(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No answer about a device outlives a test; time passes only as launches and copies take it.

    While the timer times, launches take time and do no work.
    """
    taken = EventTimer.round_us

    def round_us(self: EventTimer, runs: object) -> list[float]:
        with sim.without_execution():
            return taken(self, runs)

    monkeypatch.setattr(EventTimer, "round_us", round_us)
    forget()
    sim.set_properties(L2_cache_size=1 << 10)
    sim.use_wall_clock(False)
    for candidate, ms in TIMES_MS.items():
        kernel, constants = named(candidate)
        sim.launch_cost(kernel, ms, **constants)
    yield
    forget()


def forget() -> None:
    layout_tuner.disable()
    router.current().prepared.clear()
    driver.chip.cache_clear()
    environment.environment.cache_clear()


def named(candidate: str) -> tuple[str, dict[str, object]]:
    """Kernel and constants of a candidate."""
    variant, _, plan = candidate.partition("/g=")
    return f"chunk_bwd_dv_local_{variant}", {"G_T_CONTIG": plan == "T_CONTIG"}


def npu() -> torch.device:
    return torch.device("npu", 0)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return settings(tmp_path)


def settings(folder: Path, **tuning: object) -> Config:
    return Config(
        cache={"path": str(folder / "cache.sqlite")},
        tuning={"budget_s": 30.0, "isolate": "none"} | tuning,
        measure={"warmup_rounds": 1, "min_rounds": 10, "max_rounds": 10},
    )


def decisions(config: Config) -> list[object]:
    made = Router(config)
    try:
        return list(made.store.decisions())
    finally:
        made.close()


# -- a queue that stops ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fatal", [CANDIDATES[0], LAST])
def test_a_candidate_that_stops_the_queue_is_named_and_nothing_is_stored(sim, config, fatal):
    kernel, constants = named(fatal)
    sim.launch_fault(kernel, **constants)
    made = Router(config)
    with pytest.raises(DeviceLostError, match=rf"stopped answering at {fatal} .*507015"):
        made.tune(SPEC, key(), npu())
    made.close()
    assert decisions(config) == []


def test_a_candidate_that_stops_the_queue_while_it_is_timed_is_named(sim, config, monkeypatch):
    taken = EventTimer.round_us

    def round_us(self, runs):
        kernel, constants = named(LAST)
        sim.launch_fault(kernel, **constants)
        return taken(self, runs)

    monkeypatch.setattr(EventTimer, "round_us", round_us)
    made = Router(config)
    start = time.monotonic()
    with pytest.raises(DeviceLostError, match=f"stopped answering at {LAST} "):
        made.tune(SPEC, key(), npu())
    assert time.monotonic() - start < 25.0, "it waited for events that never come"
    made.close()
    assert decisions(config) == []


@pytest.mark.parametrize("told", [False, True], ids=["told to nobody", "told to somebody else"])
def test_nothing_is_tuned_with_a_queue_that_has_stopped(sim, tmp_path, told):
    """The memory that a check would look at holds what was right."""
    config = settings(tmp_path, budget_s=0.3)
    given = arguments(npu())
    with sim.recycled_memory():
        dv_local(given)
        sim.stop_queue(told=told)
        made = Router(config)
        with pytest.raises((DeviceLostError, RuntimeError)):
            made.tune(SPEC, key(), npu())
        made.close()
    assert decisions(config) == []


def test_a_call_that_would_tune_on_a_dead_device_takes_the_default(sim, tmp_path, caplog):
    config = settings(tmp_path, budget_s=0.3)
    given = arguments(npu())
    sim.stop_queue(told=True)
    with layout_tuner.enable(config, on_miss="tune"):
        dv_local(given)
        dv_local(given)
    assert "not tuned" in caplog.text
    assert decisions(config) == []


def test_the_decision_of_a_candidate_that_meets_a_dead_device_stays(sim, config):
    given = arguments(npu())
    with layout_tuner.enable(config, on_miss="tune"):
        dv_local(given)
    (before,) = decisions(config)
    assert before.candidate == LAST
    sim.stop_queue()
    with layout_tuner.enable(config):
        dv_local(given)
    assert decisions(config) == [before]
    sim.reset()
    sim.set_properties(L2_cache_size=1 << 10)
    with layout_tuner.enable(config, on_miss="error") as _:
        assert_right(dv_local(given).cpu(), {name: x.cpu() for name, x in given.items()})
        assert [each.candidate.id for each in router.current().prepared.values()] == [LAST]


def test_a_kernel_that_does_not_end_ends_the_tuning_within_its_budget(sim, tmp_path):
    config = settings(tmp_path, budget_s=5.0)
    kernel, constants = named(CANDIDATES[0])
    sim.launch_hang(kernel, 8.0, **constants)
    made = Router(config)
    start = time.monotonic()
    with pytest.raises(DeviceLostError, match=f"{CANDIDATES[0]}, which was given up, still occupies the device"):
        made.tune(SPEC, key(), npu())
    assert time.monotonic() - start < 25.0
    made.close()
    assert decisions(config) == []


# -- memory ------------------------------------------------------------------------------------------------------


def test_want_of_memory_inside_a_candidate_is_its_failure_for_a_day(sim, config, monkeypatch):
    right = kernels.chunk_bwd_dv_local_sub

    class Greedy:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            def launch(*arguments: object, **named: object) -> None:
                torch.empty(1 << 40, dtype=torch.int8, device="npu")
                right[grid](*arguments, **named)

            return launch

    monkeypatch.setattr(kernels, "chunk_bwd_dv_local_sub", Greedy())
    made = Router(config)
    outcome = made.tune(SPEC, key(), npu())
    made.close()
    assert [(m.state, m.failure) for m in outcome.measurements if m.id.startswith("sub")] == [("failed", "memory")] * 2
    assert all(m.reason.startswith("RuntimeError: NPU out of memory") for m in outcome.measurements if m.failure)


def test_want_of_memory_for_the_timer_leaves_the_call_alone(sim, config, monkeypatch, caplog):
    """Fragments, or a neighbour, may pass by the look at what is free."""
    given = arguments(npu())
    with layout_tuner.enable(config, on_miss="tune"):
        with monkeypatch.context() as patched:
            patched.setattr(timing, "scratch_bytes", lambda device: 1 << 40)
            assert_right(dv_local(given).cpu(), {name: x.cpu() for name, x in given.items()})
        assert "too little free memory to tune (NPU out of memory" in caplog.text
        dv_local(given)
        assert [each.candidate.id for each in router.current().prepared.values()] == [LAST], "the choice was frozen"


def test_a_candidate_that_writes_nothing_is_wrong_even_where_memory_holds_the_right_values(sim, config, monkeypatch):
    class Nothing:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *arguments, **named: None

    monkeypatch.setattr(kernels, "chunk_bwd_dv_local_sub", Nothing())
    with sim.recycled_memory():
        made = Router(config)
        outcome = made.tune(SPEC, key(), npu())
        made.close()
    assert {m.id: m.state for m in outcome.measurements} == {
        name: "wrong" if name.startswith("sub") else "ok" for name in CANDIDATES
    }


def test_a_call_computes_in_recycled_memory(sim, config):
    given = arguments(npu())
    host = {name: x.cpu() for name, x in given.items()}
    with sim.recycled_memory(), layout_tuner.enable(config, on_miss="tune"):
        for _ in range(3):
            assert_right(dv_local(given).cpu(), host)


# -- what cannot be asked, and forks -----------------------------------------------------------------------------


def test_an_older_torch_npu_says_neither_cores_nor_cache(sim):
    sim.set_properties(cube_core_num=24, vector_core_num=48)
    sim.hide_properties("cube_core_num", "vector_core_num", "L2_cache_size")
    chip = driver.chip(npu())
    assert (chip.cube_programs, chip.vector_programs) == (24, 48)
    assert driver.cache_bytes(npu()) == 192 << 20, "less would leave the cache half full between samples"


def test_versions_that_nobody_can_say_leave_an_environment(sim):
    known = environment.environment(npu())
    forget()
    with sim.without_versions():
        unknown = environment.environment(npu())
    assert unknown.facts["cann"] == "unknown" and "driver" not in unknown.facts
    assert unknown.id != known.id


def test_a_cann_for_another_triton_ascend_is_said_once(sim, monkeypatch, caplog):
    monkeypatch.setattr(software, "version", {"triton-ascend": "3.2.0"}.get)
    for _ in range(2):
        environment.environment(npu())
    assert caplog.text.count("triton-ascend 3.2.0 goes with CANN 8.5, here is CANN 8.3.RC1") == 1


def test_a_variable_that_keeps_kernels_from_running_is_refused_before_anything_runs(sim, config, monkeypatch):
    given = arguments(npu())
    monkeypatch.setenv("TRITON_COMPILE_ONLY", "true")
    with layout_tuner.enable(config), pytest.raises(UnsupportedProblemError, match="TRITON_COMPILE_ONLY=true is set"):
        dv_local(given)
    with pytest.raises(UnsupportedProblemError, match="unset it"):
        dv_local(arguments(npu(), T=23))
    assert sim.launches() == []


FORKED = """
import os, time
from npu_sim import sim
sim.install()
sim.attach_triton()
import torch
import layout_tuner
from dv_local import arguments, dv_local
sim.set_properties(L2_cache_size=1 << 10)
given = arguments(torch.device("npu", 0))
pid = os.fork()
if pid == 0:
    try:
        with layout_tuner.enable(cache=os.environ["FILE"], on_miss="tune"):
            dv_local(given)
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_the_runtimes_own_words(python, tmp_path):
    support = Path(__file__).parents[1]
    done = python(
        FORKED, PYTHONPATH=f"{support}{os.pathsep}{support / 'support'}", FILE=str(tmp_path / "decisions.sqlite")
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Cannot re-initialize NPU in forked subprocess."), done.stderr


# -- waiting for the device ----------------------------------------------------------------------------------------


def waits(sim: ModuleType, what: str, layers: int = 3) -> int:
    """How often the host waits in one prefill of a packed batch of a model of several layers, in inference mode."""
    generator = torch.Generator().manual_seed(3)
    ends = [0, 7, 25]
    shapes = dict(q=(1, 25, 1, 16), k=(1, 25, 1, 16), v=(1, 25, 2, 16), g=(1, 25, 2), beta=(1, 25, 2))
    tensors = {name: -torch.rand(shape, generator=generator).to(npu()) for name, shape in shapes.items()}
    state = torch.zeros(2, 2, 16, 16, device=npu())
    with torch.inference_mode():
        given: dict[str, torch.Tensor] = {"cu_seqlens": torch.tensor(ends, dtype=torch.int32).to(npu())}
        if what == "cu_seqlens_cpu":
            given[what] = torch.tensor(ends, dtype=torch.int32)
        elif what == "chunk_indices":
            given[what] = torch.tensor([[0, 0], [1, 0], [1, 1]], dtype=torch.int32).to(npu())
        options = dict(initial_state=state, output_final_state=True, chunk_size=16)
        ops.chunk_gated_delta_rule(**tensors, **given, **options)  # what is prepared once for a signature
        before = sim.sync_count()
        for _ in range(layers):
            ops.chunk_gated_delta_rule(**tensors, **given, **options)
        return sim.sync_count() - before


def test_a_prefill_in_inference_mode_waits_for_nothing_that_its_caller_brought(sim):
    assert waits(sim, "cu_seqlens_cpu") == 0
    assert waits(sim, "chunk_indices") == 0
    assert waits(sim, "cu_seqlens") <= 3, "such a tensor may be written to without a trace, so each layer looks"
