"""What tuning must never do, on the simulated device with a set clock: believe a wrong, lucky or hanging candidate."""

import importlib
import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from timers import RIGHT

import layout_tuner
from layout_tuner import ops, reference, warming
from layout_tuner.config import Config, Measure, Tuning
from layout_tuner.device import driver, environment
from layout_tuner.dispatch import router
from layout_tuner.dispatch.router import Router
from layout_tuner.errors import TooLittleMemoryError
from layout_tuner.spec import registry
from layout_tuner.spec.keys import Form, bucket
from layout_tuner.tuning import deadline, memory, numerics
from layout_tuner.tuning.experiment import Experiment
from layout_tuner.tuning.timing import EventTimer, scratch_bytes
from layout_tuner.tuning.tuner import Outcome, Runs, Trial, tune

SPEC = registry.lookup("chunk_bwd_dv_local")
CANDIDATES = ("full/g=STRIDE_HV", "full/g=T_CONTIG", "sub/g=STRIDE_HV", "sub/g=T_CONTIG")
DEFAULT, OTHER = "full/g=T_CONTIG", "full/g=STRIDE_HV"
BT, T = 16, 21
FORM = "BT=16,g=float32@STRIDE_HV"
KEY = SPEC.key_for({"B": 1, "T": T, "H": 1, "HV": 2, "K": 16, "V": 16}, dtype="float32", form=Form.parse(FORM))


@pytest.fixture(autouse=True)
def _fresh(sim, monkeypatch) -> Iterator[None]:
    """No answer about a device outlives a test; time passes only as launches and copies take it.

    While the timer times, launches take time and do no work.
    """
    forget()
    sim.set_properties(L2_cache_size=1 << 10)
    sim.use_wall_clock(False)
    taken = EventTimer.round_us

    def round_us(self, runs):
        with sim.without_execution():
            return taken(self, runs)

    monkeypatch.setattr(EventTimer, "round_us", round_us)
    yield
    forget()


def forget() -> None:
    layout_tuner.disable()
    router.current().prepared.clear()
    driver.chip.cache_clear()
    environment.environment.cache_clear()


def npu() -> torch.device:
    return torch.device("npu", 0)


def config(folder: Path, **tuning: object) -> Config:
    return Config(
        cache={"path": str(folder / "cache.sqlite")},
        tuning={"isolate": "none"} | tuning,
        measure={"warmup_rounds": 1, "min_rounds": 10, "max_rounds": 10},
    )


def arguments(tokens: int = T) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, tokens, 1, 16, generator=generator).to("npu") for _ in range(2))
    do = torch.randn(1, tokens, 2, 16, generator=generator).to("npu")
    return {"q": q, "k": k, "do": do, "g": -torch.rand(1, tokens, 2, generator=generator).cumsum(1).to("npu")}


def assert_right(given: dict[str, torch.Tensor]) -> None:
    dv = ops.chunk_bwd_dv_local(**given, chunk_size=BT)
    wanted = reference.chunk_bwd_dv_local(**{name: x.cpu() for name, x in given.items()}, chunk_size=BT)
    assert numerics.error(dv.cpu(), wanted) <= numerics.tolerance("float32")


def set_costs(sim, costs_ms: dict[str, object]) -> None:
    for candidate, ms in costs_ms.items():
        variant, _, plan = candidate.partition("/g=")
        sim.launch_cost(f"chunk_bwd_dv_local_{variant}", ms, G_T_CONTIG=plan == "T_CONTIG")


def launched(sim) -> list[str]:
    plans = {True: "T_CONTIG", False: "STRIDE_HV"}
    return [
        f"{each.kernel.removeprefix('chunk_bwd_dv_local_')}/g={plans[each.constexprs['G_T_CONTIG']]}"
        for each in sim.launches()
    ]


# -- wrong, broken or hanging ------------------------------------------------------------------------------------


def test_the_fastest_but_wrong_never_wins_and_stays_out_after_a_restart(sim, tmp_path, monkeypatch):
    set_costs(sim, dict(zip(CANDIDATES, (2.0, 1.0, 0.1, 0.1), strict=True)))
    kernels = importlib.import_module("layout_tuner.kernels.dv_local")
    right = kernels.chunk_bwd_dv_local_sub

    class Wrong:
        """Right but for its last row."""

        def __getitem__(self, grid):
            def launch(*given, **named):
                right[grid](*given, **named)
                outputs = [x for x in given if isinstance(x, torch.Tensor) and x.shape == (1, T, 2, 16)]
                outputs[-1][:, -1] += 0.5

            return launch

    with monkeypatch.context() as patched:
        patched.setattr(kernels, "chunk_bwd_dv_local_sub", Wrong())
        with layout_tuner.enable(config(tmp_path)):
            assert_right(arguments())
            assert_right(arguments())
        found = Router(config(tmp_path)).store
        (decision,) = found.decisions()
        found.close()
    assert decision.candidate == DEFAULT
    assert {m.candidate: (m.state, m.failure) for m in decision.measurements if m.candidate.startswith("sub")} == {
        "sub/g=STRIDE_HV": ("wrong", "wrong"),
        "sub/g=T_CONTIG": ("wrong", "wrong"),
    }
    # A new process, as far as decisions go; the candidate is right now and would win.
    forget()
    before = len(sim.launches())
    again = Router(config(tmp_path))
    outcome = again.tune(SPEC, KEY, npu())
    again.close()
    assert outcome.winner == DEFAULT
    assert not [name for name in launched(sim)[before:] if name.startswith("sub")]
    assert {m.state for m in outcome.measurements if m.id.startswith("sub")} == {"wrong"}
    with layout_tuner.enable(config(tmp_path), on_miss="error"):
        assert_right(arguments())
    assert launched(sim)[-1] == DEFAULT


def test_a_candidate_that_hangs_is_recorded_and_the_call_is_right(sim, tmp_path):
    def hang(launch) -> float:
        while True:  # a compiler or driver that polls; it ends when its thread is told to
            time.sleep(0.01)

    set_costs(sim, dict(zip(CANDIDATES, (2.0, 1.0, 0.5, 0.1), strict=True)))
    sim.launch_cost("chunk_bwd_dv_local_sub", hang, G_T_CONTIG=True)
    start = time.monotonic()
    with layout_tuner.enable(config(tmp_path, budget_s=10.0)):
        assert_right(arguments())
        assert_right(arguments())
    assert time.monotonic() - start < 60.0
    found = Router(config(tmp_path)).store
    (decision,) = found.decisions()
    found.close()
    states = {m.candidate: (m.state, m.failure) for m in decision.measurements}
    assert states["sub/g=T_CONTIG"] == ("failed", "timeout")
    assert decision.candidate == "sub/g=STRIDE_HV", "the best so far is kept"


@pytest.fixture
def occupied(sim, monkeypatch) -> Iterator[list[float]]:
    """Puts the time until which a launch keeps the device busy into a list; events and waits heed it."""
    until = [0.0]
    make_event, synchronize = driver.event, driver.synchronize

    class Event:
        def __init__(self, device: torch.device) -> None:
            self.real = make_event(device)
            self.record = self.real.record

        def query(self) -> bool:
            return self.real.query() and time.monotonic() >= until[0]

        def elapsed_time(self, end: "Event") -> float:
            return self.real.elapsed_time(end.real)

    def wait(device: torch.device) -> None:
        time.sleep(max(0.0, until[0] - time.monotonic()))  # as in a driver: no exception reaches its thread there
        synchronize(device)

    monkeypatch.setattr(driver, "event", Event)
    monkeypatch.setattr(driver, "synchronize", wait)
    yield until
    while deadline.left_behind():
        time.sleep(0.01)


@pytest.mark.parametrize("hung", [DEFAULT, "sub/g=STRIDE_HV"], ids=["the first rival", "a later one"])
def test_nothing_is_stored_of_a_device_that_a_candidate_occupies(sim, tmp_path, occupied, caplog, hung):
    """Whether it is busy or dead cannot be told: what was seen of it since is worth nothing."""

    def occupy(launch) -> float:
        occupied[0] = time.monotonic() + 9.0
        return 0.1

    default = SPEC.default(KEY, driver.chip(npu())).id
    hung = hung if hung != default else OTHER
    set_costs(sim, dict(zip(CANDIDATES, (2.0, 1.0, 0.5, 0.1), strict=True)))
    variant, _, plan = hung.partition("/g=")
    sim.launch_cost(f"chunk_bwd_dv_local_{variant}", occupy, G_T_CONTIG=plan == "T_CONTIG")
    start = time.monotonic()
    with layout_tuner.enable(config(tmp_path, budget_s=5.0)):
        assert_right(arguments())
        assert time.monotonic() - start < 60.0
        assert_right(arguments())
    assert launched(sim)[-1] == default
    assert f"{hung}, which was given up, still occupies the device" in caplog.text
    made = Router(config(tmp_path))
    assert not list(made.store.decisions())
    assert warming.failed_before(made, npu()) == {}
    made.close()


# -- luck --------------------------------------------------------------------------------------------------------


def timed(sim, name: str, time_us) -> Trial:
    """A candidate whose work takes device time and computes nothing."""

    def run() -> None:
        sim.advance(time_us() / 1e3)

    return Trial(
        id=name, revision="r1", prepare=lambda: Runs(end_to_end=run, kernel=None, relayout=None, check=lambda: RIGHT)
    )


def decide(trials: list[Trial], measure: Measure = Measure()) -> Outcome:  # noqa: B008
    return tune(trials, "a", EventTimer(npu()), measure, Tuning())


def test_two_copies_of_one_kernel_win_falsely_in_under_one_percent_of_a_thousand_tunings(sim):
    generator = random.Random(7)

    def time_us() -> float:
        return 10.0 * generator.gauss(1.0, 0.1) * (1.5 if generator.random() < 0.05 else 1.0)

    few = Measure(warmup_rounds=1, max_rounds=20)
    wins = sum(decide([timed(sim, "a", time_us), timed(sim, "b", time_us)], few).winner != "a" for _ in range(1000))
    assert wins < 10


def test_a_candidate_that_is_faster_only_when_timed_last_does_not_win(sim):
    runs = []

    def of(name: str):
        def time_us() -> float:
            runs.append(name)
            if len(runs) > 1 and runs[-2] != name:
                of.samples += 1
            last_place = of.samples % 3 == 2
            return 5.0 if name == "b" and last_place else 10.0

        return time_us

    of.samples = -1
    outcome = decide([timed(sim, name, of(name)) for name in "abc"], Measure(warmup_rounds=1))
    assert outcome.winner == "a"
    assert 5.0 in [round(sample) for sample in outcome.measurement("b").samples], "it never had the place it likes"


PROCESSES = """
import os, random, sys, tempfile
import npu_sim.sim as sim
sim.install(devices=1)
sim.attach_triton()
import layout_tuner, torch
from layout_tuner.device import driver
from layout_tuner import ops
from layout_tuner.spec import registry
from layout_tuner.config import Config
from layout_tuner.tuning.timing import EventTimer
from layout_tuner.dispatch.router import Router
spec = registry.lookup("chunk_bwd_dv_local")
form = "BT=16,g=float32@STRIDE_HV"
key = spec.key_for({"B": 1, "T": 4, "H": 1, "HV": 2, "K": 16, "V": 16}, dtype="float32", form=spec.form_named(form))
sim.set_properties(L2_cache_size=1 << 10)
sim.use_wall_clock(False)
timed = EventTimer.round_us
def round_us(self, runs):
    with sim.without_execution():
        return timed(self, runs)
EventTimer.round_us = round_us
def main(seed):
    generator = random.Random(seed)
    def costs(us):
        return lambda launch: us / 1e3 * generator.gauss(1.0, 0.02) * (1.5 if generator.random() < 0.05 else 1.0)
    sim.launch_cost("*_sub", 1.0)
    sim.launch_cost("*_full", costs(10.01), G_T_CONTIG=True)
    sim.launch_cost("*_full", costs(10.00), G_T_CONTIG=False)
    few = {"max_rounds": 30}  # each process also checks every candidate in the interpreter: that is long enough
    cache = {"path": os.path.join(tempfile.mkdtemp(), "d.sqlite")}
    made = Router(Config(cache=cache, measure=few, tuning={"isolate": "none"}))
    return made.tune(spec, key, torch.device("npu", 0)).winner
def start(seed):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, main(seed).encode())
        finally:
            os._exit(0)
    os.close(write)
    return pid, read
winners = []
for first in range(0, 20, 4):
    for pid, read in [start(seed) for seed in range(first, first + 4)]:
        winners.append(os.read(read, 100).decode())
        os.close(read)
        os.waitpid(pid, 0)
print(*winners)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_ten_and_ten_point_oh_one_have_the_same_winner_in_twenty_processes(python):
    done = python(PROCESSES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [DEFAULT] * 20


# -- many lengths, little memory ---------------------------------------------------------------------------------


def test_ten_thousand_packed_calls_tune_each_bucket_once(sim, tmp_path, monkeypatch):
    set_costs(sim, dict(zip(CANDIDATES, (0.5, 1.0, 2.0, 2.0), strict=True)))
    bridge = sim.triton_bridge
    tuned = []
    original = Router.tune

    def tune_for_real(self, spec, key, device, budget_s=None):
        tuned.append(key.T)
        bridge.executing = True
        try:
            return original(self, spec, key, device, budget_s)
        finally:
            bridge.executing = False

    monkeypatch.setattr(Router, "tune", tune_for_real)
    generator = random.Random(3)
    lengths = [generator.randint(2, 120) for _ in range(10_000)]
    by_length = {tokens: arguments(tokens) for tokens in set(lengths)}
    packing = {tokens: torch.tensor([0, tokens], device="npu", dtype=torch.int32) for tokens in set(lengths)}
    chunks = {tokens: ops.prepare_chunk_indices(packing[tokens], BT) for tokens in set(lengths)}
    with layout_tuner.enable(config(tmp_path)), sim.without_execution():
        for tokens in lengths:
            ops.chunk_bwd_dv_local(
                **by_length[tokens], cu_seqlens=packing[tokens], chunk_indices=chunks[tokens], chunk_size=BT
            )
    assert sorted(tuned) == sorted({bucket(tokens, "pow2") for tokens in lengths})
    assert len(tuned) == 7


@pytest.mark.parametrize(("share", "tuned"), [(1.15, False), (1.25, True)])
def test_a_fifth_more_than_the_estimate_has_to_be_free(sim, tmp_path, share, tuned):
    set_costs(sim, dict(zip(CANDIDATES, (0.5, 1.0, 2.0, 2.0), strict=True)))
    given = arguments()
    needed = memory.tuning_bytes(SPEC, KEY, oracle_limit=1024 << 20, scratch=scratch_bytes(npu()))
    sim.set_properties(L2_cache_size=1 << 10, total_memory=torch.npu.memory_allocated() + int(share * needed))
    with layout_tuner.enable(config(tmp_path)):
        assert_right(given)
        assert (launched(sim)[-1] == OTHER) is tuned
        sim.set_properties(L2_cache_size=1 << 10)
        assert_right(given)
        assert launched(sim)[-1] == OTHER, "the choice was frozen"


def test_want_of_memory_is_said_once_and_counted(sim, tmp_path, caplog):
    given = arguments()
    sim.set_properties(L2_cache_size=1 << 10, total_memory=torch.npu.memory_allocated() + (64 << 10))
    layout_tuner.dispatch.counters.reset()
    with layout_tuner.enable(config(tmp_path)):
        for _ in range(3):
            assert_right(given)
        assert layout_tuner.stats().fallbacks == {"too little free memory to tune": 3}
    assert caplog.text.count("too little free memory to tune") == 1
    with pytest.raises(TooLittleMemoryError, match=r"tuning it takes \d+ MiB, 0 MiB are free"):
        Router(config(tmp_path)).tune(SPEC, KEY, npu())


@pytest.mark.parametrize("op", registry.names())
def test_tuning_takes_no_more_memory_than_is_estimated(sim, op):
    spec = registry.lookup(op)
    form = spec.every_form[0]
    sizes = {"B": 1, "T": 24, "H": 2, "HV": 4, "K": 16, "V": 16}
    key = spec.key_for(sizes, dtype="float32", form=form.changed(BT="16") if "BT" in form else form)
    for limit in (1, 1 << 30):
        torch.npu.reset_peak_memory_stats()
        before = torch.npu.memory_allocated()
        experiment = layout_tuner.tuning.experiment.Experiment(spec, key, npu(), oracle_limit=limit)
        assert experiment.prepare(experiment.default).check().right
        peak = torch.npu.max_memory_allocated() - before
        part = memory.oracle_bytes(spec, key) if limit > 1 else memory.oracle_bytes(spec, key) // 2
        assert peak <= memory.tuning_bytes(spec, key, oracle_limit=part, scratch=0), op


@pytest.mark.parametrize("allowed", [True, False])
def test_the_oracle_multiplies_exactly_whatever_the_user_allows(monkeypatch, allowed):
    """With HF32 allowed, as some trainers do, every right kernel of an fp32 key would be wrong for ever."""
    seen = []

    def oracle(**named: object) -> torch.Tensor:
        seen.append(torch.npu.matmul.allow_hf32)
        return reference.chunk_bwd_dv_local(**named)

    monkeypatch.setattr(torch.npu.matmul, "allow_hf32", allowed)
    experiment = Experiment(replace(SPEC, reference=oracle), KEY, npu())
    assert experiment.prepare(experiment.default).check().right
    assert seen == [False] and torch.npu.matmul.allow_hf32 is allowed
