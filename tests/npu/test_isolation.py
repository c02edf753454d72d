"""Tuning in a process of its own, on the simulated NPU: what candidates do there befalls no call."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch
from command import shape
from dv_local import CANDIDATES, SPEC, arguments, assert_right, dv_local, key
from torch.utils.checkpoint import checkpoint

import layout_tuner
from layout_tuner import processes
from layout_tuner.config import Config
from layout_tuner.device import driver, environment
from layout_tuner.dispatch import choices, router
from layout_tuner.dispatch.router import Router
from layout_tuner.errors import DeviceLostError, TuningError
from layout_tuner.tuning import isolation

TESTS = Path(__file__).parents[1]
DEFAULT, OTHER, FIRST_SUB, LAST = CANDIDATES[1], CANDIDATES[0], CANDIDATES[2], CANDIDATES[3]
TIMES_MS = dict(zip(CANDIDATES, (2.0, 1.5, 1.0, 0.5), strict=True))
PATIENCE_S = 300.0


@pytest.fixture(autouse=True)
def _fresh(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No answer about a device outlives a test; children have the simulated device and its set clock."""
    forget()
    sim.set_properties(L2_cache_size=1 << 10)
    befall(monkeypatch, {})
    monkeypatch.setenv("PYTHONPATH", str(TESTS / "npu_child"))
    yield
    assert isolation.idle(PATIENCE_S)
    forget()


def forget() -> None:
    layout_tuner.disable()
    router.current().prepared.clear()
    driver.chip.cache_clear()
    environment.environment.cache_clear()


def befall(monkeypatch: pytest.MonkeyPatch, what: dict[str, object]) -> None:
    """Says what happens to candidates in children, beside the time that they take."""
    events = []
    for candidate, event in [*TIMES_MS.items(), *what.items()]:
        variant, _, plan = candidate.partition("/g=")
        events.append((f"chunk_bwd_dv_local_{variant}", {"G_T_CONTIG": plan == "T_CONTIG"}, event))
    monkeypatch.setenv("LAYOUT_TUNER_TEST_NPU_CHILD", json.dumps(events))


def npu() -> torch.device:
    return torch.device("npu", 0)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return settings(tmp_path)


def settings(folder: Path, **tuning: object) -> Config:
    return Config(
        cache={"path": str(folder / "cache.sqlite")},
        tuning=tuning,
        measure={"warmup_rounds": 1, "min_rounds": 10, "max_rounds": 10},
    )


def decisions(config: Config) -> list[object]:
    made = Router(config)
    try:
        return list(made.store.decisions())
    finally:
        made.close()


def ran(sim: ModuleType) -> list[str]:
    """The candidates that this process launched."""
    plans = {True: "T_CONTIG", False: "STRIDE_HV"}
    return [
        f"{each.kernel.removeprefix('chunk_bwd_dv_local_')}/g={plans[each.constexprs['G_T_CONTIG']]}"
        for each in sim.launches()
    ]


def test_calls_take_the_default_until_a_child_has_tuned_and_then_follow(sim, config):
    given = arguments(npu())
    host = {name: x.cpu() for name, x in given.items()}
    layout_tuner.dispatch.counters.reset()
    with layout_tuner.enable(config):
        assert_right(dv_local(given).cpu(), host)
        assert isolation._waiting, "it waited for the tuning"
        assert_right(dv_local(given).cpu(), host)
        assert ran(sim) == [DEFAULT] * 2
        assert layout_tuner.stats().fallbacks == {choices.BESIDE: 2}
        assert isolation.idle(PATIENCE_S)
        assert_right(dv_local(given).cpu(), host)
        dv_local(given)
        assert layout_tuner.stats().tunings == 1
    assert ran(sim) == [DEFAULT] * 2 + [LAST] * 2, "this process's queue is for calls"
    (decision,) = decisions(config)
    assert decision.candidate == LAST
    assert [m.state for m in decision.measurements] == ["ok"] * 4


@pytest.mark.parametrize(
    ("event", "failure", "said"),
    [
        ("stop", "crash", "507015"),
        ("die", "crash", "SIGSEGV"),
        ("hang 30", "timeout", "does not end|occupies"),
    ],
    ids=["a queue that stops", "a process that dies", "a kernel that does not end"],
)
def test_what_a_candidate_does_to_a_child_is_its_failure_and_nobody_elses(
    sim, tmp_path, monkeypatch, event, failure, said
):
    config = settings(tmp_path, budget_s=40.0 if failure == "crash" else 15.0)
    befall(monkeypatch, {LAST: event})
    given = arguments(npu())
    with layout_tuner.enable(config):
        dv_local(given)
        assert isolation.idle(PATIENCE_S)
        dv_local(given)
    assert ran(sim) == [DEFAULT, FIRST_SUB]
    (decision,) = decisions(config)
    found = {m.candidate: m for m in decision.measurements}
    assert {name: m.state for name, m in found.items()} == dict.fromkeys(CANDIDATES, "ok") | {LAST: "failed"}
    assert found[LAST].failure == failure
    assert any(part in found[LAST].reason for part in said.split("|")), found[LAST].reason
    assert sim.sync_count() >= 0 and torch.ones(2, device="npu").sum().item() == 2, "this process's device works"


def test_a_warm_up_waits_for_its_children_and_leaves_this_process_alone(sim, config):
    given = [shape(T=20)]
    report = layout_tuner.warmup(given, config=config, device="npu", ops=SPEC.name)
    assert [row.status for row in report.rows] == ["tuned"]
    assert report.rows[0].decision.candidate == LAST
    assert sim.launches() == []


def test_no_child_no_tuning(sim, config, monkeypatch, caplog):
    given = arguments(npu())
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with layout_tuner.enable(config):
        dv_local(given)
        assert isolation.idle(PATIENCE_S)
        dv_local(given)
        dv_local(given)
    assert ran(sim) == [DEFAULT] * 3
    assert "not tuned: no process to tune in" in caplog.text
    assert decisions(config) == []


def test_a_child_that_sees_another_device_measures_nothing(config, monkeypatch):
    """As where the variables that choose devices changed after this process had used its own."""
    monkeypatch.setattr(driver, "identity", lambda device: "GPU-1")
    made = Router(config)
    with pytest.raises(TuningError, match="another process sees Ascend910B3"):
        made.tune(SPEC, key(), npu())
    made.close()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_that_somebody_else_ends_is_no_failure_of_a_candidate(config, monkeypatch, end):
    befall(monkeypatch, dict.fromkeys(CANDIDATES, "hang 60"))
    made = Router(config)
    with ThreadPoolExecutor(1) as pool:
        tuning = pool.submit(made.tune, SPEC, key(), npu())
        while not processes.running:
            time.sleep(0.01)
        (child,) = processes.running
        child.send_signal(end)
        with pytest.raises(TuningError, match=f"the process that tunes was ended by {end.name}"):
            tuning.result()
    made.close()
    assert decisions(config) == []


def answering(monkeypatch: pytest.MonkeyPatch, *answers: isolation.Answer) -> list[isolation.Request]:
    """Stands for children, whose answers come in turn."""
    asked: list[isolation.Request] = []
    left = list(answers)

    def ask(request: isolation.Request, candidates: list[str]) -> isolation.Answer:
        asked.append(request)
        return left.pop(0)

    monkeypatch.setattr(isolation, "ask", ask)
    return asked


def test_a_device_that_answers_no_child_is_nobodys_failure(config, monkeypatch):
    asked = answering(monkeypatch, isolation.Answer(error="DeviceLostError", text="the device does not answer"))
    made = Router(config)
    with pytest.raises(DeviceLostError, match="does not answer"):
        made.tune(SPEC, key(), npu())
    made.close()
    assert len(asked) == 1
    assert decisions(config) == []


def test_every_death_is_tried_around_once(config, monkeypatch):
    lost = [isolation.Answer(error="DeviceLostError", text="it died", candidate=name) for name in CANDIDATES[2:]]
    asked = answering(monkeypatch, *lost, isolation.Answer(error="TuningError", text="no candidate is right: x"))
    made = Router(config)
    with pytest.raises(TuningError, match="no candidate is right"):
        made.tune(SPEC, key(), npu())
    made.close()
    assert [sorted(name for name, _ in request.known) for request in asked] == [[], [FIRST_SUB], [FIRST_SUB, LAST]]


def test_one_child_at_a_time_for_a_device(sim, config, monkeypatch):
    running, most = [], []

    def ask(request: isolation.Request, candidates: list[str]) -> isolation.Answer:
        running.append(request.key.T)
        most.append(len(running))
        time.sleep(0.05)
        running.remove(request.key.T)
        return isolation.Answer(error="TuningError", text="x")

    monkeypatch.setattr(isolation, "ask", ask)
    with layout_tuner.enable(config):
        for T in (20, 21, 22):
            dv_local(arguments(npu(), T=T))
            dv_local(arguments(npu(), T=T))
        assert isolation.idle(PATIENCE_S)
    assert most == [1, 1, 1], "each key once, one after the other"


def test_no_child_is_started_while_a_graph_is_captured(sim, config, monkeypatch):
    asked = answering(monkeypatch)
    given = arguments(npu())
    with layout_tuner.enable(config), sim.capture():
        dv_local(given)
    assert asked == [] and not isolation._waiting


def test_what_a_checkpoint_repeats_takes_what_it_took(sim, config, monkeypatch):
    """The outcome comes between a region's first run and its repetition; the next step follows it."""
    winner = next(each for each in SPEC.candidates(key()) if each.id == LAST)
    made = Router(config)
    monkeypatch.setattr(made, "tuned_choice", lambda *_: (None, choices.Choice(candidate=winner, source="measured")))
    given = arguments(npu())
    scale = torch.ones((), device="npu", requires_grad=True)

    def region(x: torch.Tensor) -> torch.Tensor:
        return x * dv_local(given)

    ticket = router.push(made)
    try:
        loss = checkpoint(region, scale, use_reentrant=True).sum()
        assert isolation.idle(PATIENCE_S)
        loss.backward()
        assert ran(sim) == [DEFAULT] * 2
        checkpoint(region, scale, use_reentrant=True).sum().backward()
    finally:
        router.remove(ticket)
        made.close()
    assert ran(sim) == [DEFAULT] * 2 + [LAST] * 2


PARENT = """
import sys, time
from npu_sim import sim
import torch, layout_tuner
from layout_tuner import processes
from dv_local import arguments, dv_local
from layout_tuner.tuning import isolation
with layout_tuner.enable(cache=sys.argv[1]):
    dv_local(arguments(torch.device("npu", 0)))
    while not processes.running:
        time.sleep(0.01)
    print(*[child.pid for child in processes.running], flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="tells the child of its parent's death")
def test_a_child_dies_with_its_parent(tmp_path, monkeypatch):
    befall(monkeypatch, dict.fromkeys(CANDIDATES, "hang 600"))
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(TESTS / "support")])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "cache.sqlite")],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    give_up = time.monotonic() + 60.0
    while alive(child) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not alive(child)


def alive(process: int) -> bool:
    """Whether a process runs; one that has ended and is not waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
