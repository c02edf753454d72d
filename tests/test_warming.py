"""Warm-up beyond shapes: recorded misses, what earlier runs left, another library's functions, bad arguments."""

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import shape
from dv_local import CANDIDATES, SPEC, arguments, dv_local, key
from layout_tuner.cache.records import MeasurementRecord
from timers import set_times

import layout_tuner
from layout_tuner import warming
from layout_tuner.config import Config
from layout_tuner.dispatch import router
from layout_tuner.dispatch.router import Router
from layout_tuner.errors import ConfigError, DeviceLostError, TuningError
from layout_tuner.integrations import rivalry
from layout_tuner.spec.declaration import OpSpec
from layout_tuner.spec.keys import Key
from layout_tuner.tuning.records import key_record
from layout_tuner.warming import Report, warmup

WINNER = "full/g=T_CONTIG"
TIMES = dict.fromkeys(CANDIDATES, 10.0) | {WINNER: 8.0}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(cache={"path": str(tmp_path / "decisions.sqlite")})


def run(config: Config, device: torch.device, made: Router | None = None, **named: object) -> Report:
    """A warm-up with a set clock."""
    made = made or Router(config, on_miss="tune", timer=set_times(TIMES))
    try:
        return warmup(config=config, device=device, router=made, **named)
    finally:
        made.close()


def statuses(report: Report) -> list[tuple[int, str]]:
    return [(row.key.T, row.status) for row in report.rows if row.key is not None]


def miss(config: Config, device: torch.device, *lengths: int) -> None:
    """Calls that find no decision."""
    made = Router(config, on_miss="default")
    ticket = router.push(made)
    for T in lengths:
        dv_local(arguments(device, T=T))
    router.remove(ticket)
    made.close()


def test_what_was_missed_is_tuned_the_most_frequent_first(config: Config, device: torch.device) -> None:
    miss(config, device, 20, 21, 22, 21, 22, 22)
    report = run(config, device, from_misses=True)
    assert statuses(report) == [(22, "tuned"), (21, "tuned"), (20, "tuned")]
    assert statuses(run(config, device, from_misses=True)) == [(22, "stored"), (21, "stored"), (20, "stored")]
    with layout_tuner.enable(config, on_miss="error"):
        dv_local(arguments(device, T=21))


def test_misses_come_ahead_of_shapes_and_each_key_once(config: Config, device: torch.device) -> None:
    miss(config, device, 21)
    report = run(config, device, shapes=[shape(T=[20, 21])], from_misses=True)
    assert statuses(report) == [(21, "tuned"), (20, "tuned")]


def test_a_missed_op_that_is_not_here_is_said(config: Config, device: torch.device) -> None:
    miss(config, device, 20)
    made = Router(config)
    (known,) = made.store.missed()
    made.store.record_misses([replace(known, key=replace(known.key, op="nothing"), count=9)])
    made.close()
    report = run(config, device, from_misses=True)
    assert [row.status for row in report.rows] == ["unsupported", "tuned"]
    assert "no op 'nothing'" in report.rows[0].reason


def test_the_last_key_has_what_is_left_of_the_budget(
    config: Config, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    original = Router.tune

    def spying(self: Router, spec: OpSpec, at: object, where: object, budget_s: float | None = None) -> object:
        given.append(budget_s)
        return original(self, spec, at, where, budget_s)

    monkeypatch.setattr(Router, "tune", spying)
    run(config, device, shapes=[shape(T=[20, 21])], budget_s=500.0)
    assert len(given) == 2
    assert 0 < given[1] < given[0] <= 500.0


def test_a_device_that_is_lost_ends_the_run_and_leaves_no_mark(
    config: Config, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after would only look as if it failed."""
    tuned = []
    original = Router.tune

    def tune(self: Router, spec: OpSpec, at: Key, *more: object) -> object:
        tuned.append(at.T)
        if at.T == 21:
            raise DeviceLostError("the device stopped answering at full/g=STRIDE_HV")
        return original(self, spec, at, *more)

    monkeypatch.setattr(Router, "tune", tune)
    report = run(config, device, shapes=[shape(T=[20, 21, 22])])
    assert statuses(report) == [(20, "tuned"), (21, "failed"), (22, "left")]
    assert tuned == [20, 21]
    assert "stopped answering" in report.rows[1].reason
    made = Router(config)
    assert not warming.failed_before(made, device)
    made.close()


def test_resume_finishes_what_ran_out_of_its_budget(config: Config, tmp_path: Path, device: torch.device) -> None:
    whole = Config(cache={"path": str(tmp_path / "whole.sqlite")})
    run(whole, device, shapes=[shape(T=20)])
    made = Router(whole)
    (decision,) = made.store.decisions()
    skipped = [
        MeasurementRecord(candidate=m.candidate, revision=m.revision, state="skipped", failure="timeout")
        if m.candidate == WINNER
        else m
        for m in decision.measurements
    ]
    (facts,) = made.store.environments()
    made.close()
    made = Router(config)
    made.store.publish(replace(decision, candidate=CANDIDATES[0], measurements=tuple(skipped)), facts)
    made.close()
    assert statuses(run(config, device, shapes=[shape(T=20)])) == [(20, "stored")]
    report = run(config, device, shapes=[shape(T=20)], resume=True)
    assert statuses(report) == [(20, "tuned")]
    assert report.rows[0].decision.candidate == WINNER
    assert statuses(run(config, device, shapes=[shape(T=20)], resume=True)) == [(20, "stored")]


def test_resume_passes_over_what_failed(config: Config, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Router.tune

    def failing(self: Router, spec: OpSpec, at: object, where: object, budget_s: float | None = None) -> object:
        if at.T == 20:
            raise TuningError("no candidate is right")
        return original(self, spec, at, where, budget_s)

    monkeypatch.setattr(Router, "tune", failing)
    shapes = [shape(T=[20, 21])]
    assert statuses(run(config, device, shapes=shapes)) == [(20, "failed"), (21, "tuned")]
    assert statuses(run(config, device, shapes=shapes)) == [(20, "failed"), (21, "stored")]
    report = run(config, device, shapes=shapes, resume=True)
    assert statuses(report) == [(20, "left"), (21, "stored")]
    assert "warm-up failed: no candidate is right" in report.rows[0].reason
    monkeypatch.setattr(Router, "tune", original)
    assert statuses(run(config, device, shapes=shapes)) == [(20, "tuned"), (21, "stored")]


def test_known_failures_are_honoured(config: Config, device: torch.device) -> None:
    run(config, device, shapes=[shape(T=20)])
    made = Router(config, on_miss="tune", timer=set_times(TIMES))
    (decision,) = made.store.decisions()
    wrong = MeasurementRecord(
        candidate=WINNER, revision=decision.revision, state="wrong", failure="wrong", reason="seen elsewhere"
    )
    made.store.quarantine(decision, wrong)
    assert made.stored_decision(SPEC, key(), device) is None
    outcome = made.tune(SPEC, key(), device)
    made.close()
    assert outcome.winner == CANDIDATES[0]
    found = outcome.measurement(WINNER)
    assert (found.state, found.reason, found.samples) == ("wrong", "seen elsewhere", ())


def test_another_librarys_function_is_measured_where_it_is_installed(
    config: Config, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = layout_tuner.ops.chunk_bwd_dv_local
    rival = rivalry.rivalry(SPEC, ours, ours, name="fla", release="fla-0", aside=nullcontext)
    monkeypatch.setattr(warming, "rival_of", lambda op: rival if op == SPEC.name else None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    both = warming.with_rivals([(SPEC, key())])
    assert [(spec.name, at.op) for spec, at in both] == [(SPEC.name, SPEC.name), (rival.name, rival.name)]
    made = Router(config, on_miss="tune", timer=set_times(TIMES | {"layout_tuner": 10.0, "fla": 5.0}))
    layout_tuner.dispatch.counters.reset()
    rows = [warming.warm_key(made, spec, at, device) for spec, at in both]
    assert [row.status for row in rows] == ["tuned", "tuned"]
    assert (rows[0].decision.candidate, rows[1].decision.candidate) == (WINNER, "fla")
    assert layout_tuner.stats().decisions == (), "what tuning called counts as a call"
    assert warming.op_of(replace(key(), op="fla.chunk_bwd_dv_local")) is rival
    made.close()


def test_everything_wrong_is_said_at_once(config: Config, tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[measure]\nmin_rounds = 50\nmax_rounds = 20\n[tuning]\nbudget_s = inf\nmin_gain = nan\n")
    with pytest.raises(ConfigError) as caught:
        warmup(tmp_path / "none.json", config=bad, ops=["nothing"], budget_s=float("nan"), device="warp")
    said = str(caught.value)
    for part in (
        "[measure]: min_rounds = 50 is more than max_rounds = 20",
        "[tuning] budget_s:",
        "[tuning] min_gain:",
        "none.json: No such file",
        "no op 'nothing'",
        "budget: wanted a number of seconds above 0, got nan",
        "device 'warp'",
    ):
        assert part in said
    for budget in (0.0, -1.0, float("inf")):
        with pytest.raises(ConfigError, match="budget: wanted"):
            warmup([shape()], config=config, budget_s=budget)
    with pytest.raises(ConfigError, match=r"name shapes \(--shapes\), or ask for the misses \(--from-misses\)"):
        warmup(config=config)


def test_one_name_one_row_and_a_files_content_are_taken(config: Config, device: torch.device) -> None:
    row = shape(T=20)
    assert statuses(run(config, device, shapes=row, ops=SPEC.name)) == [(20, "tuned")]
    assert statuses(run(config, device, shapes={"shapes": [row]})) == [(20, "stored")]
    assert statuses(run(config, device, shapes=row, ops="chunk_fwd_o")) == []
    with pytest.raises(ConfigError, match="no op 'nothing'"):
        warmup(row, config=config, ops="nothing")


def test_arguments_of_a_wrong_type_are_named_together(config: Config) -> None:
    with pytest.raises(ConfigError) as caught:
        warmup("nope.json", config=config, budget_s="x")
    assert "nope.json: No such file" in str(caught.value)
    assert "budget: wanted a number of seconds above 0, got 'x'" in str(caught.value)
    with pytest.raises(ConfigError, match="shapes: wanted the path of a file, rows or a row, got int"):
        warmup(3, config=config)


def test_a_budget_that_ends_while_candidates_are_made_blames_none(
    config: Config, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(self: Router, spec: OpSpec, at: object, where: object, budget_s: float) -> object:
        time.sleep(budget_s)
        return original(self, spec, at, where, 1e-9)

    original = Router.tune
    monkeypatch.setattr(Router, "tune", late)
    (row,) = run(config, device, shapes=[shape(T=20)], budget_s=0.2).rows
    assert (row.status, row.decision) == ("left", None)
    assert row.reason == warming.OUT_OF_TIME


def test_nothing_is_tuned_beside_a_pin(config: Config) -> None:
    pinned = config.model_copy(update={"tuning": config.tuning.model_copy(update={"pin": "pins.json"})})
    with pytest.raises(ConfigError, match=r"pin = 'pins.json': .*warm up with pin = ''.* --pin FILE"):
        warmup([shape()], config=pinned)
    assert not Path(config.cache.path).exists()


def test_a_missed_key_is_the_key_of_the_call(config: Config, device: torch.device) -> None:
    miss(config, device, 20)
    made = Router(config)
    (found,) = made.store.missed()
    made.close()
    assert found.key == key_record(key())


# -- explain -----------------------------------------------------------------------------------------------------


def test_explain_says_which_decision_and_from_where(config: Config, device: torch.device) -> None:
    run(config, device, shapes=[shape(T=20)])
    asked = {"T": 20, "H": 1, "HV": 2, "K": 16, "dtype": "fp32"}
    form = key().form.text
    (found,) = layout_tuner.explain(SPEC.name, asked, form=form, config=config, device=device)
    assert (found.candidate, found.source, found.key) == (WINNER, "measured", key())
    assert f"{WINNER} saves 20.0 % [20.0, 20.0] of {CANDIDATES[0]}" in found.reason
    assert found.layer == f"user: {config.cache.path}"
    (near,) = layout_tuner.explain(SPEC.name, asked | {"T": 40, "HV": 4}, form=form, config=config, device=device)
    assert (near.candidate, near.source, near.decision) == (CANDIDATES[0], "default", None)
    assert near.nearest.key == key_record(key())
    assert near.differing == {"T": ("40", "20"), "HV": ("4", "2")}
    assert "differs in T (40 asked for, 20 stored), HV (4 asked for, 2 stored)" in near.reason
    (trivial,) = layout_tuner.explain(SPEC.name, asked | {"HV": 1}, form=form, config=config, device=device)
    assert "nothing to choose" in trivial.reason
    with pytest.raises(ConfigError, match="no such op"):
        layout_tuner.explain("nothing", asked, config=config, device=device)
    with pytest.raises(ConfigError, match="K=300"):
        layout_tuner.explain(SPEC.name, asked | {"K": 300}, config=config, device=device)


@pytest.mark.parametrize("given", [None, "B=1", [("B", 1)]])
def test_explain_names_all_that_is_wrong(given: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        layout_tuner.explain(SPEC.name, given, config=tmp_path / "none.toml", device="warp")
    for part in ("none.toml: No such file", "shape: wanted a row as {'T': 2048, ", f"got {given!r}", "device 'warp'"):
        assert part in str(caught.value)
