"""What was checked is what runs: on an NPU nobody believes a binary, or a default, that nothing was compared with."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from dv_local import CANDIDATES, SPEC, arguments, assert_right, dv_local, key

import layout_tuner
from layout_tuner import ops, reference
from layout_tuner.config import Config
from layout_tuner.device import driver, environment
from layout_tuner.dispatch import choices, router
from layout_tuner.dispatch.router import Router
from layout_tuner.errors import NoRightCandidateError, UnsupportedProblemError
from layout_tuner.explanation import explain_keys
from layout_tuner.tuning import isolation, numerics

TESTS = Path(__file__).parents[1]
OTHER, DEFAULT, LAST = CANDIDATES[0], CANDIDATES[1], CANDIDATES[3]
PATIENCE_S = 300.0


@pytest.fixture(autouse=True)
def _fresh(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No answer about a device outlives a test; children have the simulated device and its set clock."""
    forget()
    sim.set_properties(L2_cache_size=1 << 10)
    sim.use_wall_clock(False)
    befall(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(TESTS / "npu_child"))
    yield
    assert isolation.idle(PATIENCE_S)
    forget()


def forget() -> None:
    layout_tuner.disable()
    router.current().prepared.clear()
    driver.chip.cache_clear()
    environment.environment.cache_clear()


def kernel_of(candidate: str) -> tuple[str, dict[str, object]]:
    variant, _, plan = candidate.partition("/g=")
    return f"chunk_bwd_dv_local_{variant}", {"G_T_CONTIG": plan == "T_CONTIG"}


def befall(monkeypatch: pytest.MonkeyPatch, *wrong: str, compilation: int = 0) -> None:
    """Says which candidates are wrong in children, and what kernels are compiled to there."""
    events = [(*kernel_of(candidate), "wrong") for candidate in wrong]
    monkeypatch.setenv("LAYOUT_TUNER_TEST_NPU_CHILD", json.dumps(events or [("none", {}, 1.0)]))
    monkeypatch.setenv("LAYOUT_TUNER_TEST_NPU_COMPILATION", str(compilation))


def npu() -> torch.device:
    return torch.device("npu", 0)


def settings(folder: Path, on_wrong: str = "reference", **tuning: object) -> Config:
    return Config(
        cache={"path": str(folder / "cache.sqlite")},
        tuning=tuning,
        measure={"warmup_rounds": 1, "min_rounds": 10, "max_rounds": 10},
        routing={"on_wrong": on_wrong},
    )


def ran(sim: ModuleType) -> list[str]:
    """The candidates that this process launched since it was asked last."""
    plans = {True: "T_CONTIG", False: "STRIDE_HV"}
    found = [
        f"{each.kernel.removeprefix('chunk_bwd_dv_local_')}/g={plans[each.constexprs['G_T_CONTIG']]}"
        for each in sim.launches()
    ]
    sim.triton_bridge.launches.clear()
    return found


def stored(config: Config) -> list[tuple[str, str, list[tuple[str, str, bool]]]]:
    """Source, candidate and measurements of everything that is stored."""
    made = Router(config)
    try:
        return [
            (
                each.source,
                each.candidate,
                [(m.candidate, m.state, bool(m.counts.get("binary"))) for m in each.measurements],
            )
            for layer in made.store.layers
            for each in layer.store.decisions()
        ]
    finally:
        made.close()


# -- every key is checked once per environment -------------------------------------------------------------------


def test_a_key_that_nothing_tunes_is_checked_once_per_environment(sim, tmp_path, monkeypatch):
    config = settings(tmp_path)
    given = arguments(npu())
    host = {name: x.cpu() for name, x in given.items()}
    with layout_tuner.enable(config, on_miss="default"):
        for _ in range(2):
            assert_right(dv_local(given).cpu(), host)
        assert isolation.idle(PATIENCE_S)
        assert_right(dv_local(given).cpu(), host)
    assert ran(sim) == [DEFAULT] * 3, "this process's queue is for calls"
    assert stored(config) == [("checked", DEFAULT, [(DEFAULT, "ok", True)])]
    # The next process asks for no check, and still finds no decision.
    forget()
    monkeypatch.setattr(isolation, "ask", None)
    layout_tuner.dispatch.counters.reset()
    with layout_tuner.enable(config, on_miss="default"):
        dv_local(given)
    assert layout_tuner.stats().fallbacks == {"on_miss is 'default'": 1}
    assert not isolation._waiting


def test_a_key_with_nothing_to_choose_is_checked_too(sim, tmp_path):
    config = settings(tmp_path)
    with layout_tuner.enable(config):
        dv_local(arguments(npu(), HV=1))
        assert isolation.idle(PATIENCE_S)
    assert [source for source, *_ in stored(config)] == ["checked"]


def test_what_was_checked_is_still_tuned(tmp_path):
    made = Router(settings(tmp_path, isolate="none"))
    (default,) = [each for each in SPEC.candidates(key()) if each.id == DEFAULT]
    assert made.check(SPEC, key(), npu(), default)
    assert made.stored_decision(SPEC, key(), npu()) is None
    made.tune(SPEC, key(), npu())
    assert made.stored_decision(SPEC, key(), npu()).source == "measured"
    made.close()


@pytest.mark.parametrize("on_miss", ["default", "tune"])
def test_rows_that_are_no_multiple_of_32_bytes_run_once_they_were_found_right(sim, tmp_path, on_miss):
    """Compilers were seen to read the next row's beginning there."""
    config = settings(tmp_path)
    given = arguments(npu(), K=20, V=12)
    host = {name: x.cpu() for name, x in given.items()}
    layout_tuner.dispatch.counters.reset()
    with layout_tuner.enable(config, on_miss=on_miss):
        assert_right(dv_local(given).cpu(), host)
        assert ran(sim) == []
        assert isolation.idle(PATIENCE_S)
        assert_right(dv_local(given).cpu(), host)
        assert len(ran(sim)) == 1
    (reason,) = [reason for reason in layout_tuner.stats().fallbacks if "32 bytes" in reason]
    assert reason == f"{DEFAULT} was not checked yet, and rows of K=20 and V=12 are no multiple of 32 bytes"


# -- a default that is wrong -------------------------------------------------------------------------------------


def test_the_oracle_serves_in_place_of_a_default_that_is_wrong(sim, tmp_path, monkeypatch, caplog):
    config = settings(tmp_path)
    befall(monkeypatch, DEFAULT)
    given = arguments(npu(), dtype=torch.bfloat16)
    wanted = reference.chunk_bwd_dv_local(**{name: x.cpu() for name, x in given.items()}, chunk_size=16)
    layout_tuner.dispatch.counters.reset()
    with layout_tuner.enable(config, on_miss="default"):
        dv_local(given)
        assert isolation.idle(PATIENCE_S)
        assert ran(sim) == [DEFAULT]
        for _ in range(2):
            got = dv_local(given)
            assert got.dtype is torch.bfloat16 and got.is_contiguous() and got.device == npu()
            assert numerics.error(got.cpu(), wanted) < 0.005
        assert ran(sim) == []
    assert caplog.text.count("computes wrongly on this device") == 1
    assert any(f"{DEFAULT} computes wrongly" in reason for reason in layout_tuner.stats().fallbacks)
    found = SPEC.key_for({"B": 1, "T": 20, "H": 1, "HV": 2, "K": 16, "V": 16}, dtype="bfloat16", form=key().form)
    (explained,) = explain_keys([(SPEC, found)], config=config, device="npu:0")
    assert (explained.candidate, explained.source) == ("reference", "reference")
    assert f"{DEFAULT} computes wrongly" in explained.reason


def test_an_error_where_the_user_asks_for_one(sim, tmp_path, monkeypatch):
    config = settings(tmp_path, on_wrong="error")
    befall(monkeypatch, DEFAULT)
    given = arguments(npu())
    with layout_tuner.enable(config, on_miss="default"):
        dv_local(given)
        assert isolation.idle(PATIENCE_S)
        for _ in range(2):
            with pytest.raises(UnsupportedProblemError, match=f"{DEFAULT} computes wrongly.*on_wrong is 'error'"):
                dv_local(given)
    forget()
    with layout_tuner.enable(config, on_miss="default"), pytest.raises(UnsupportedProblemError):
        dv_local(given)
    assert ran(sim) == [DEFAULT]
    (explained,) = explain_keys([(SPEC, key())], config=config, device="npu:0")
    assert "[routing] on_wrong makes that an error" in explained.reason


def test_where_no_candidate_is_right_tuning_says_so_and_the_oracle_serves(sim, tmp_path, monkeypatch):
    config = settings(tmp_path)
    befall(monkeypatch, *CANDIDATES)
    given = arguments(npu())
    host = {name: x.cpu() for name, x in given.items()}
    with layout_tuner.enable(config):
        dv_local(given)
        assert isolation.idle(PATIENCE_S)
        assert_right(dv_local(given).cpu(), host)
    assert ran(sim) == [DEFAULT]
    ((source, _, found),) = stored(config)
    assert source == "checked" and {state for _, state, _ in found} == {"wrong"}


def test_a_winner_that_fails_gives_way_to_no_default_that_is_wrong(sim, tmp_path, monkeypatch):
    config = settings(tmp_path, isolate="none")
    sim.triton_bridge.faults.insert(0, (*kernel_of(DEFAULT), lambda launch: None))
    given = arguments(npu())
    host = {name: x.cpu() for name, x in given.items()}
    for candidate in CANDIDATES:
        name, constants = kernel_of(candidate)
        sim.launch_cost(name, 1.0, **constants)
    with layout_tuner.enable(config):
        assert_right(dv_local(given).cpu(), host)
        winner = ran(sim)[-1]
        assert winner != DEFAULT

        def fail(launch: object) -> float:
            raise RuntimeError("no")

        name, constants = kernel_of(winner)
        sim.launch_cost(name, fail, **constants)
        for _ in range(2):
            assert_right(dv_local(given).cpu(), host)
        assert DEFAULT not in ran(sim)


def test_the_whole_op_by_its_oracle_has_gradients(tmp_path):
    config = settings(tmp_path, isolate="none")
    made = Router(config, on_miss="default")
    spec = layout_tuner.ops.gated_delta_rule.spec.SPEC
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(1, 20, 1, 16, generator=generator), dim=-1) for _ in range(2))
    given = [q, k, torch.randn(1, 20, 2, 16, generator=generator)]
    given += [-torch.rand(1, 20, 2, generator=generator), torch.rand(1, 20, 2, generator=generator)]

    def step(device: str) -> list[torch.Tensor]:
        leaves = [x.to(device).requires_grad_() for x in given]
        o, state = ops.chunk_gated_delta_rule(*leaves, output_final_state=True, chunk_size=16)
        (o.sum() + (state * state).sum()).backward()
        return [o.detach().cpu(), state.detach().cpu(), *[x.grad.cpu() for x in leaves]]

    wanted = step("npu")
    made.known_wrong = lambda *_: "planted"
    ticket = router.push(made)
    try:
        found = step("npu")
        assert {choice.source for choice in made.choices.values()} == {"reference"}
        assert all(choice.candidate.id.startswith("reference") for choice in made.choices.values())
    finally:
        router.remove(ticket)
        made.close()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)
    assert spec.name == "chunk_gated_delta_rule"


# -- another binary ----------------------------------------------------------------------------------------------


def tuned(config: Config) -> str:
    """Tunes the key in a child, as another process would have."""
    made = Router(config)
    try:
        return made.tune(SPEC, key(), npu()).winner
    finally:
        made.close()


def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """In children the last candidate is the fastest."""
    times = [(*kernel_of(candidate), ms) for candidate, ms in zip(CANDIDATES, (2.0, 1.5, 1.0, 0.5), strict=True)]
    monkeypatch.setenv("LAYOUT_TUNER_TEST_NPU_CHILD", json.dumps(times))


def test_the_same_binary_is_believed_and_another_one_is_checked_first(sim, tmp_path, monkeypatch):
    config = settings(tmp_path)
    given = arguments(npu())
    host = {name: x.cpu() for name, x in given.items()}
    fast(monkeypatch)
    assert tuned(config) == LAST
    with layout_tuner.enable(config, on_miss="error"):
        assert_right(dv_local(given).cpu(), host)
        assert not isolation._waiting
    assert ran(sim) == [LAST]
    # The next process compiles something else of the same sources; so does its child, from the same cache.
    forget()
    sim.compile_to(1)
    monkeypatch.setenv("LAYOUT_TUNER_TEST_NPU_COMPILATION", "1")
    layout_tuner.dispatch.counters.reset()
    with layout_tuner.enable(config, on_miss="error"):
        dv_local(given)
        assert layout_tuner.stats().fallbacks == {choices.UNCHECKED: 1}
        assert isolation.idle(PATIENCE_S)
        assert_right(dv_local(given).cpu(), host)
    assert ran(sim) == [DEFAULT, LAST]
    # What was found is stored: a third process with that binary believes it.
    forget()
    with layout_tuner.enable(config, on_miss="error"):
        dv_local(given)
        assert not isolation._waiting
    assert ran(sim) == [LAST]


def test_another_binary_that_is_wrong_never_runs(sim, tmp_path, monkeypatch):
    config = settings(tmp_path)
    given = arguments(npu())
    host = {name: x.cpu() for name, x in given.items()}
    fast(monkeypatch)
    assert tuned(config) == LAST
    sim.compile_to(1)
    befall(monkeypatch, LAST, compilation=1)
    with layout_tuner.enable(config, on_miss="error"):
        assert_right(dv_local(given).cpu(), host)
        assert isolation.idle(PATIENCE_S)
        assert_right(dv_local(given).cpu(), host)
    assert LAST not in ran(sim)


def test_what_an_earlier_version_measured_stays_usable(sim, tmp_path, monkeypatch):
    """It is of no known binary."""
    config = settings(tmp_path)
    fast(monkeypatch)
    monkeypatch.setattr(layout_tuner.tuning.records, "measurement_record", _without_binary)
    assert tuned(config) == LAST
    monkeypatch.setattr(isolation, "ask", None)
    with layout_tuner.enable(config, on_miss="error"):
        dv_local(arguments(npu()))
    assert ran(sim) == [LAST]


_record = layout_tuner.tuning.records.measurement_record


def _without_binary(found):
    import dataclasses

    return _record(dataclasses.replace(found, binary=""))


# -- runs that differ --------------------------------------------------------------------------------------------


def test_a_candidate_whose_next_run_differs_in_a_bit_is_wrong(sim, tmp_path, monkeypatch):
    """As where the cores of an NPU race: right within the tolerance each time."""
    kernels = layout_tuner.kernels.dv_local
    right, runs = kernels.chunk_bwd_dv_local_sub, []

    class Racing:
        def __getitem__(self, grid):
            def launch(*given, **named):
                right[grid](*given, **named)
                runs.append(1)
                outputs = [x for x in given if isinstance(x, torch.Tensor) and x.shape == (1, 20, 2, 16)]
                outputs[-1][0, -1, 0, 0] *= 1.0 + 1e-6 * (len(runs) % 2)

            return launch

        def __getattr__(self, name):
            return getattr(right, name)

    monkeypatch.setattr(kernels, "chunk_bwd_dv_local_sub", Racing())
    made = Router(settings(tmp_path, isolate="none"))
    found = {m.id: (m.state, m.reason) for m in made.tune(SPEC, key(), npu()).measurements}
    made.close()
    assert found[LAST] == ("wrong", "dv: other bits when it runs again")
    assert found[DEFAULT][0] == "ok"


def test_no_right_candidate_is_an_error_that_says_what_was_found(sim, tmp_path):
    sim.triton_bridge.faults.insert(0, ("*", {}, lambda launch: None))
    made = Router(settings(tmp_path, isolate="none"))
    with pytest.raises(NoRightCandidateError, match="no candidate is right") as caught:
        made.tune(SPEC, key(), npu())
    assert {m.id for m in caught.value.measurements} == set(CANDIDATES)
    made.close()


# -- options that a variant carries ------------------------------------------------------------------------------


def test_no_candidate_without_buffers_where_ascends_compiler_does_not_compile(sim, monkeypatch):
    plain = SPEC.candidates(key(), buffers=driver.chip(npu()).buffers)
    assert [each.id for each in plain] == list(CANDIDATES)
    driver.chip.cache_clear()
    monkeypatch.setattr(driver, "triton_distribution", lambda: ("triton-ascend", "3.2.0"))
    more = SPEC.candidates(key(), buffers=driver.chip(npu()).buffers)
    added = ["full+single_buffer/g=STRIDE_HV", "full+single_buffer/g=T_CONTIG"]
    assert [each.id for each in more] == [*CANDIDATES, *added]
    driver.chip.cache_clear()
    sim.set_properties(name="Ascend950PR_9589")
    assert not driver.chip(npu()).buffers, "there triton-ascend does not ask for it in the first place"
