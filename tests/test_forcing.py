"""`LAYOUT_TUNER_FORCE` and `LAYOUT_TUNER_DISABLE`: what they change, when they are read, what is said of bad ones."""

from pathlib import Path

import pytest
import torch
from dv_local import CANDIDATES, SPEC, arguments, assert_right, dv_local, key
from layout_tuner.cache.sharing.pins import write_pins
from timers import set_times

import layout_tuner
from layout_tuner.config import Config
from layout_tuner.device import driver
from layout_tuner.dispatch import router
from layout_tuner.dispatch.router import Router
from layout_tuner.errors import ConfigError
from layout_tuner.spec import forcing, registry

LAST = "sub/g=T_CONTIG"
DQKWG = registry.lookup("chunk_bwd_dqkwg")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(cache={"path": str(tmp_path / "decisions.sqlite")})


def ran() -> list[str]:
    return [prepared.candidate.id for prepared in router.current().prepared.values()]


def test_a_forced_candidate_runs_whatever_was_measured(
    config: Config, device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = arguments(device)
    tuned = Router(
        config, on_miss="tune", timer=set_times({name: 1.0 if name == CANDIDATES[1] else 9.0 for name in CANDIDATES})
    )
    assert tuned.tune(SPEC, key(), device).winner == CANDIDATES[1]
    tuned.close()
    monkeypatch.setenv("LAYOUT_TUNER_FORCE", f" {SPEC.name} = {LAST} ; ")
    with layout_tuner.enable(config, on_miss="error"):
        assert_right(dv_local(given), given)
        assert ran() == [LAST]
        (used,) = [each for each in layout_tuner.stats().decisions if each.source == "forced"]
        assert (used.candidate, used.calls) == (LAST, 1)
    assert "LAYOUT_TUNER_FORCE" in caplog.text


def test_it_is_read_at_enable_and_not_at_a_call(
    config: Config, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(device)
    with layout_tuner.enable(config, on_miss="default"):
        monkeypatch.setenv("LAYOUT_TUNER_FORCE", f"{SPEC.name}={LAST}")
        dv_local(given)
        assert ran() == [SPEC.default(key(), driver.chip(device)).id]
    with layout_tuner.enable(config, on_miss="default"):
        monkeypatch.delenv("LAYOUT_TUNER_FORCE")
        monkeypatch.setattr("layout_tuner.config.os", None)  # the only module that reads the environment
        dv_local(given)
        dv_local(given)
        assert ran() == [LAST]


def test_a_pinned_decision_ranks_above(
    config: Config, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {name: 1.0 if name == CANDIDATES[1] else 9.0 for name in CANDIDATES}
    tuned = Router(config, on_miss="tune", timer=set_times(times))
    tuned.tune(SPEC, key(), device)
    write_pins(tmp_path / "pins.toml", list(tuned.store.decisions()))
    tuned.close()
    monkeypatch.setenv("LAYOUT_TUNER_FORCE", f"{SPEC.name}={LAST}")
    pinned = config.model_copy(update={"tuning": config.tuning.model_copy(update={"pin": str(tmp_path / "pins.toml")})})
    with layout_tuner.enable(pinned, on_miss="error"):
        dv_local(arguments(device))
        assert ran() == [CANDIDATES[1]]
        dv_local(arguments(device, T=21))
        assert ran() == [CANDIDATES[1], LAST]


def test_layouts_left_out_are_the_defaults_and_absent_operands_say_nothing(device: torch.device) -> None:
    forced = forcing.parse("chunk_bwd_dqkwg=full/g=T_CONTIG")
    training = DQKWG.key_for(
        {"B": 1, "T": 20, "H": 1, "HV": 2, "K": 16, "V": 16}, dtype="float32", form=DQKWG.standard_forms["training"]
    )
    cuda = driver.Chip(kind="cuda", name="", cube_programs=1, vector_programs=1)
    npu = driver.Chip(kind="npu", name="", cube_programs=1, vector_programs=1)
    for chip, dg in ((cuda, "STRIDE_HV"), (npu, "T_CONTIG")):
        chosen = forcing.choice(forced, DQKWG, training, DQKWG.default(training, chip))
        assert chosen is not None
        assert chosen.id == f"full/g=T_CONTIG,dg={dg}"
    without = SPEC.candidates(key("BT=16"))
    assert forcing.parse(f"{SPEC.name}=sub/g=T_CONTIG")[SPEC.name].of(without, without[0]) == without[1]
    assert forcing.parse(f"{SPEC.name}=sub")[SPEC.name].layouts == {}


def test_a_key_without_the_forced_candidate_runs_what_it_would_and_says_so(
    config: Config, device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = arguments(device)
    given["g"] = layout_tuner.spec.layouts.relayout(given["g"], layout_tuner.spec.layouts.Layout.T_CONTIG)
    monkeypatch.setenv("LAYOUT_TUNER_FORCE", f"{SPEC.name}=sub/g=STRIDE_HV")
    with layout_tuner.enable(config, on_miss="default"):
        assert_right(dv_local(given), given)
        assert ran() == ["full/g=T_CONTIG"]
    assert "forces a candidate that this key does not have" in caplog.text


def test_a_forced_variant_is_a_stages_variant_in_the_chain(config: Config, device: torch.device) -> None:
    made = Router(config, on_miss="default", forced=forcing.parse(f"{SPEC.name}=sub"))
    assert made.stored_variant(SPEC, key(), device) == "sub"


def test_a_stages_pinned_variant_ranks_above_a_forced_one(config: Config, device: torch.device, tmp_path: Path) -> None:
    """In the chain as in a call of the stage itself; what was measured does not."""
    whole = next(name for name in CANDIDATES if name.startswith("full"))
    times = {name: 1.0 if name == whole else 9.0 for name in CANDIDATES}
    made = Router(config, on_miss="tune", timer=set_times(times), forced=forcing.parse(f"{SPEC.name}=sub"))
    made.tune(SPEC, key(), device)
    assert made.stored_variant(SPEC, key(), device) == "sub"
    write_pins(tmp_path / "pins.json", list(made.store.decisions()))
    made.close()
    pinned = config.model_copy(update={"tuning": config.tuning.model_copy(update={"pin": str(tmp_path / "pins.json")})})
    made = Router(pinned, on_miss="error", forced=forcing.parse(f"{SPEC.name}=sub"))
    assert made.stored_variant(SPEC, key(), device) == "full"
    assert made.stored_variant(SPEC, key(T=21), device) == "sub"
    made.close()


def test_bad_values_are_one_error_that_lists_what_is_known(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    values = ["nothing=full", SPEC.name, "chunk_fwd_o=full/g=SIDEWAYS"]
    values += [f"{SPEC.name}={candidate}" for candidate in ("fast/g=T_CONTIG", "sub", "full")]
    monkeypatch.setenv("LAYOUT_TUNER_FORCE", ";".join(values))
    with pytest.raises(ConfigError) as caught:
        layout_tuner.enable(config)
    said = str(caught.value)
    assert said.startswith("LAYOUT_TUNER_FORCE: ")
    assert "no op 'nothing' (there are " in said
    assert f"{SPEC.name} has no candidate 'fast/g=T_CONTIG' (it has {', '.join(CANDIDATES)}" in said
    assert f"'{SPEC.name}': wanted op=candidate" in said
    assert "chunk_fwd_o has no candidate 'full/g=SIDEWAYS'" in said
    assert f"{SPEC.name} stands twice" in said
    assert not layout_tuner.is_enabled()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (f"{SPEC.name}=full/g=T_CONTIG,g=STRIDE_HV", "g stands twice"),
        ("chunk_bwd_dqkwg=full/g=T_CONTIG,dg=T_CONTIG,g=T_CONTIG", "g stands twice"),
        (";;", "';;': forces nothing, wanted op=candidate"),
    ],
)
def test_what_says_nothing_or_two_things_is_refused(value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        forcing.parse(value)


def test_explain_says_what_is_forced(
    config: Config, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"T": 20, "H": 1, "HV": 2, "K": 16, "dtype": "float32"}
    made = Router(config, on_miss="tune", timer=set_times(dict.fromkeys(CANDIDATES, 9.0) | {CANDIDATES[1]: 1.0}))
    made.tune(SPEC, key(), device)
    write_pins(tmp_path / "pins.json", list(made.store.decisions()))
    made.close()
    monkeypatch.setenv("LAYOUT_TUNER_FORCE", f"{SPEC.name}={LAST}")

    def explained(settings: Config, **sizes: int) -> tuple[str, str, str]:
        (found,) = layout_tuner.explain(SPEC.name, asked | sizes, form=key().form.text, config=settings, device=device)
        return found.candidate, found.source, found.reason

    assert explained(config) == (LAST, "forced", "LAYOUT_TUNER_FORCE forces it, whatever was measured")
    assert explained(config, T=21)[:2] == (LAST, "forced")
    pinned = config.model_copy(update={"tuning": config.tuning.model_copy(update={"pin": str(tmp_path / "pins.json")})})
    assert explained(pinned)[:2] == (CANDIDATES[1], "pinned")
    assert explained(pinned, T=21)[:2] == (LAST, "forced")
    monkeypatch.setenv("LAYOUT_TUNER_FORCE", f"{SPEC.name}=sub")
    assert explained(config, HV=1)[:2] == ("sub/g=STRIDE_HV", "forced")  # one head: forced as in a call
    monkeypatch.delenv("LAYOUT_TUNER_FORCE")
    candidate, source, reason = explained(pinned, T=21)
    assert (candidate, source) == (CANDIDATES[0], "default")
    assert reason.startswith("not in the pin; ")
    monkeypatch.setenv("LAYOUT_TUNER_FORCE", f"{SPEC.name}={LAST}")
    monkeypatch.setenv("LAYOUT_TUNER_DISABLE", "1")
    assert explained(pinned) == (CANDIDATES[0], "default", "LAYOUT_TUNER_DISABLE=1: nothing is routed")
    monkeypatch.setenv("LAYOUT_TUNER_DISABLE", "maybe")
    with pytest.raises(ConfigError, match="LAYOUT_TUNER_DISABLE: wanted 0 or 1, got 'maybe'"):
        explained(pinned)


def test_disabled_routes_nothing(
    config: Config, device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LAYOUT_TUNER_DISABLE", "1")
    given = arguments(device)
    outside = router.current()
    with layout_tuner.enable(config, on_miss="error") as entry:
        assert not layout_tuner.is_enabled()
        assert router.current() is outside
        assert_right(dv_local(given), given)
        with entry:
            pass
    assert layout_tuner.enable(config, on_miss="error")(lambda: layout_tuner.is_enabled())() is False
    assert not Path(config.cache.path).exists()
    assert "LAYOUT_TUNER_DISABLE=1" in caplog.text
    monkeypatch.setenv("LAYOUT_TUNER_DISABLE", "0")
    with layout_tuner.enable(config):
        assert layout_tuner.is_enabled()
    monkeypatch.setenv("LAYOUT_TUNER_DISABLE", "yes")
    with pytest.raises(ConfigError, match="LAYOUT_TUNER_DISABLE: wanted 0 or 1, got 'yes'"):
        layout_tuner.enable(config)
