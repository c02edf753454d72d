"""From a call to its launch: scopes, hits, misses, policies, and what a failure may not do."""

import copy
import functools
import inspect
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from threading import Thread
from types import MethodType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from cases import key_for
from dv_local import BT, CANDIDATES, SPEC, arguments, assert_right, dv_local, key
from layout_tuner.cache.places.opening import Store
from layout_tuner.cache.sharing.pins import write_pins
from layout_tuner.kernels import dv_local as kernels
from timers import SetTimer, set_times
from triton.runtime.errors import OutOfResources, PTXASError

import layout_tuner
from layout_tuner.config import Config
from layout_tuner.device import driver
from layout_tuner.device.environment import environment
from layout_tuner.dispatch import router
from layout_tuner.dispatch.router import Router
from layout_tuner.errors import CacheError, ConfigError, TuningError, UnsupportedProblemError
from layout_tuner.launch import launcher
from layout_tuner.launch.prepared import Prepared
from layout_tuner.spec import registry
from layout_tuner.spec.layouts import Layout, relayout
from layout_tuner.tuning import inputs
from layout_tuner.tuning.tuner import Outcome

SECOND = "sub/g=T_CONTIG"
SECOND_WINS = {name: 2.0 if name == SECOND else 10.0 for name in CANDIDATES}


class NeverTimed:
    """A timer for what must not be tuned."""

    def round_us(self, runs: object) -> list[float]:
        raise AssertionError("tuned")

    def settled(self, seconds: float) -> bool:
        raise AssertionError("tuned")


class Counted(Router):
    """Counts misses and tunings; tuning decides for the last candidate without running anything."""

    def __init__(self, config: Config, **named: object) -> None:
        super().__init__(config, **named)
        self.missed_calls = 0
        self.tuned: list[object] = []
        self.raises: Exception | None = None

    def resolve(self, *arguments: object):
        self.missed_calls += 1
        return super().resolve(*arguments)

    def tune(self, spec, key, device):
        self.tuned.append(key)
        if self.raises is not None:
            raise copy.copy(self.raises)
        return Outcome(winner=spec.candidates(key)[-1].id, default="", measurements=())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "decisions.sqlite"


@pytest.fixture
def config(file: Path) -> Config:
    return Config(cache={"path": str(file)})


@contextmanager
def entered(made: Router) -> Iterator[Router]:
    ticket = router.push(made)
    try:
        yield made
    finally:
        router.remove(ticket)
        made.close()


def tuning(config: Config, times: dict[str, float] | None = None, **named: object) -> Router:
    """A router that tunes with a set clock."""
    return Router(config, on_miss="tune", timer=set_times(times or SECOND_WINS), **named)


def ran(made: Router) -> list[str]:
    """The candidates a router has prepared."""
    return [prepared.candidate.id for prepared in made.prepared.values()]


# -- enable, disable ---------------------------------------------------------------------------------------------


def test_without_enable_the_default_runs(device: torch.device) -> None:
    given = arguments(device)
    assert not layout_tuner.is_enabled()
    assert_right(dv_local(given), given)
    assert ran(router.current()) == [SPEC.default(key(), driver.chip(device)).id]


def test_scopes_nest_and_the_newest_wins(config: Config) -> None:
    outside = router.current()
    with layout_tuner.enable(config):
        first = router.current()
        with layout_tuner.enable(config):
            assert router.current() not in (first, outside)
        assert router.current() is first
        assert layout_tuner.is_enabled()
    assert router.current() is outside
    assert not layout_tuner.is_enabled()


def test_scopes_end_in_any_order(config: Config) -> None:
    first = layout_tuner.enable(config)
    of_first = router.current()
    second = layout_tuner.enable(config)
    of_second = router.current()
    first.__exit__(None, None, None)
    assert router.current() is of_second is not of_first
    first.__exit__(None, None, None)
    assert layout_tuner.is_enabled()
    second.__exit__(None, None, None)
    assert not layout_tuner.is_enabled()


def test_an_entry_that_is_entered_again_ends_with_its_outer_scope(config: Config) -> None:
    outside = router.current()
    with layout_tuner.enable(config) as entry:
        first = router.current()
        with entry:
            assert router.current() is first
        assert router.current() is first
        thread = Thread(target=lambda: entry.__exit__(None, None, None) if entry.__enter__() else None)
        thread.start()
        thread.join()
        assert router.current() is first
        assert entry(layout_tuner.is_enabled)()
        assert router.current() is first
    assert router.current() is outside
    with entry:
        assert router.current() is first
    entry.__exit__(None, None, None)
    assert router.current() is outside


def test_an_exception_leaves_the_scope(config: Config) -> None:
    with pytest.raises(KeyError), layout_tuner.enable(config):
        raise KeyError
    assert not layout_tuner.is_enabled()


def test_enable_at_the_call_lasts_until_disable(config: Config) -> None:
    layout_tuner.enable(config)
    layout_tuner.enable(config)
    assert layout_tuner.is_enabled()
    layout_tuner.disable()
    assert not layout_tuner.is_enabled()


def test_disable_within_a_scope(config: Config) -> None:
    with layout_tuner.enable(config):
        layout_tuner.disable()
        assert not layout_tuner.is_enabled()
        layout_tuner.enable(config)
    assert layout_tuner.is_enabled()


def test_decorator_enables_inside_the_call_only(config: Config) -> None:
    seen = []

    @layout_tuner.enable(config)
    def forward(x: int, depth: int = 0) -> int:
        """Doc."""
        seen.append(router.current())
        if depth:
            forward(x, depth - 1)
            assert layout_tuner.is_enabled()
        if x < 0:
            raise ValueError
        return x

    assert not layout_tuner.is_enabled()
    assert forward(3, depth=1) == 3
    assert (forward.__name__, forward.__doc__) == ("forward", "Doc.")
    with pytest.raises(ValueError, match=r"^$"):
        forward(-1)
    assert not layout_tuner.is_enabled()
    assert len(set(seen)) == 1


class Model(torch.nn.Module):
    """A module that calls an op."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.routed: list[bool] = []

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        self.routed.append(layout_tuner.is_enabled())
        return dv_local(given) * self.scale


@layout_tuner.enable(Config(), on_miss="default", fla=False)
def decorated(given: dict[str, torch.Tensor]) -> tuple[bool, torch.Tensor]:
    return layout_tuner.is_enabled(), dv_local(given)


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy, copy.copy], ids=["pickle", "deepcopy", "copy"])
def test_copies_of_a_module_are_their_own(config: Config, device: torch.device, copied: Callable[[Any], Any]) -> None:
    given, model = arguments(device), Model().to(device)
    wanted = model(given)
    with layout_tuner.enable(config):
        within = copied(model)
        assert torch.equal(within(given), wanted)
    assert within.routed == [False, True]
    model.forward = layout_tuner.enable(config)(model.forward)
    other = copied(model)
    if copied is not copy.copy:  # which copies no method: it is the first model's
        other.scale.data.fill_(0.0)
        assert not other(given).any()
        assert other.routed[-1] is True
        assert not layout_tuner.is_enabled()
    assert torch.equal(model(given), wanted)
    assert model.routed[-1] is True


def test_a_decorated_function_is_pickled_by_its_name(device: torch.device) -> None:
    assert pickled(decorated) is decorated
    given = arguments(device)
    routed, dv = decorated(given)
    assert routed
    assert_right(dv, given)
    assert decorated.__name__ == "decorated"


def test_a_decorated_method_is_bound(config: Config) -> None:
    class Kept:
        @layout_tuner.enable(config)
        def itself(self) -> tuple[object, bool]:
            return self, layout_tuner.is_enabled()

    kept = Kept()
    assert kept.itself() == (kept, True)
    assert Kept.itself(kept) == (kept, True)


def prepared_by_accelerate(model: torch.nn.Module) -> None:
    """Does to `forward` what Hugging Face's Accelerate does to run it under autocast (`Accelerator.prepare`)."""
    model._original_forward = model.forward
    assert hasattr(model.forward, "__func__")

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))

    model.forward = MethodType(wrapped(model.forward.__func__), model)
    model.forward = MethodType(wrapped(model.forward.__func__), model)


def unwrapped_by_accelerate(model: torch.nn.Module) -> None:
    """Does what its `unwrap_model(keep_fp32_wrapper=False)` does."""
    forward, first = model.forward, model.__dict__.pop("_original_forward")
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
        if forward == first:
            break
    model.forward = MethodType(forward, model)


def test_a_decorated_forward_goes_through_accelerate(config: Config, device: torch.device) -> None:
    given, model = arguments(device), Model().to(device)
    wanted = model(given)
    model.forward = layout_tuner.enable(config)(model.forward)
    for change in (prepared_by_accelerate, unwrapped_by_accelerate, copy.deepcopy):
        model = change(model) or model
        assert torch.equal(model(given), wanted)
        assert model.routed[-1] is True
    assert not layout_tuner.is_enabled()


def test_a_decorated_method_is_still_one(config: Config, device: torch.device) -> None:
    given, model = arguments(device), Model().to(device)
    plain = model.forward
    method = model.forward = layout_tuner.enable(config)(plain)
    assert inspect.ismethod(method)
    assert method.__self__ is model
    assert (method.__name__, method.__qualname__, method.__doc__) == (plain.__name__, plain.__qualname__, plain.__doc__)
    for look in (inspect.signature, inspect.getfullargspec, inspect.getsource):
        assert look(method) == look(plain), look
    assert inspect.signature(method.__func__) == inspect.signature(plain.__func__)
    assert method.__func__.__code__ is plain.__func__.__code__
    assert method == model.forward
    assert method != Model().forward
    wanted = functools.partial(plain, given)()
    for made in (method, functools.partial(method, given), MethodType(method.__func__, model), pickled(method)):
        assert torch.equal(made() if isinstance(made, functools.partial) else made(given), wanted)
        assert getattr(made, "__self__", model).routed[-1] is True
    spawned = pickle.loads(bytes(ForkingPickler.dumps(model)))
    assert torch.equal(spawned(given), wanted)
    assert spawned.routed[-1] is True
    other = functools.update_wrapper(functools.partial(lambda *_: None), method)
    assert inspect.signature(other) == inspect.signature(plain)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the files of /proc")
def test_enabling_again_and_again_keeps_no_more_files_open(config: Config, device: torch.device) -> None:
    given, opened = arguments(device), []
    for _ in range(6):
        layout_tuner.enable(config, on_miss="default", fla=False)
        dv_local(given)
        opened.append(len(os.listdir("/proc/self/fd")))
    assert opened[-1] <= opened[1]
    layout_tuner.disable()


def test_every_thread_sees_the_entry(config: Config) -> None:
    seen = []
    with layout_tuner.enable(config):
        thread = Thread(target=lambda: seen.append(router.current()))
        thread.start()
        thread.join()
        assert seen == [router.current()]


def test_arguments_of_enable(config: Config, file: Path, tmp_path: Path) -> None:
    settings = tmp_path / "mine.toml"
    settings.write_text("[tuning]\nmin_gain = 0.5\n")
    with layout_tuner.enable(settings, cache=file, on_miss="error"):
        made = router.current()
        assert (made.config.tuning.min_gain, made.config.cache.path, made.on_miss) == (0.5, str(file), "error")
    with pytest.raises(ConfigError, match=r"on_miss: wanted 'tune', 'default', 'error', 'sync' or None, got 'ask'"):
        layout_tuner.enable(config, on_miss="ask")
    with pytest.raises(ConfigError, match=r"(?s)on_miss: .*got 'ask'.*No such file"):
        layout_tuner.enable(tmp_path / "none.toml", on_miss="ask")
    assert not layout_tuner.is_enabled()


# -- hits --------------------------------------------------------------------------------------------------------


def test_a_hit_does_no_miss_and_asks_no_store(config: Config, device: torch.device) -> None:
    given = arguments(device)
    with entered(Counted(config, on_miss="tune")) as made:
        dv_local(given)
        made._store = SimpleNamespace(close=lambda: None)  # any question to it would raise
        for seed in (2, 3):
            other = arguments(device, seed=seed)
            assert_right(dv_local(other), other)
        assert made.missed_calls == 1
        assert ran(made) == [SECOND]


@pytest.mark.parametrize(
    "change",
    [
        lambda given: given | {"g": relayout(given["g"], Layout.T_CONTIG)},
        lambda given: given | {"g": None},
        lambda given: given | {"g": given["g"].half()},
        lambda given: {name: tensor[:, :17] for name, tensor in given.items()},
        lambda given: given | {"scale": 0.5, "cu_seqlens": torch.tensor([0, 20], device=given["q"].device)},
    ],
    ids=["arrival", "no gate", "dtype", "length", "packed"],
)
def test_another_signature_is_another_miss(config: Config, device: torch.device, change) -> None:
    given = arguments(device)
    with entered(Counted(config, on_miss="default")) as made:
        dv_local(given)
        dv_local(change(given))
        assert made.missed_calls == 2


def test_another_scale_is_a_hit(config: Config, device: torch.device) -> None:
    given = arguments(device)
    with entered(Counted(config, on_miss="default")) as made:
        dv_local(given)
        assert_right(dv_local(given, scale=0.5), given, scale=0.5)
        assert made.missed_calls == 1


def test_a_mistake_after_a_hit_is_still_named(config: Config, device: torch.device) -> None:
    given = arguments(device)
    with layout_tuner.enable(config):
        dv_local(given)
        with pytest.raises(ValueError, match=r"do: wanted HV=3|g: wanted HV=3"):
            dv_local(given | {"do": torch.zeros(1, 20, 3, 16, device=device)})
        with pytest.raises(TypeError, match=r"g: wanted a tensor, got list"):
            dv_local(given | {"g": [1.0]})


# -- misses ------------------------------------------------------------------------------------------------------


def test_tuning_on_a_miss_uses_the_winner_and_stores_it(
    config: Config, file: Path, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    given = arguments(device)
    caplog.set_level(logging.INFO, logger="layout_tuner.dispatch")
    with entered(tuning(config)) as made:
        assert_right(dv_local(given), given)
        assert ran(made) == [SECOND]
    assert len(caplog.messages) == 1
    assert f"{SECOND} saves 80.0 %" in caplog.text
    stored = Store(file)
    (decision,) = stored.decisions()
    stored.close()
    assert (decision.candidate, decision.source, decision.default_candidate) == (SECOND, "measured", CANDIDATES[0])
    assert decision.environment == environment(device).id
    assert [(m.candidate, m.state, m.end_to_end_us) for m in decision.measurements] == [
        (name, "ok", SECOND_WINS[name]) for name in CANDIDATES
    ]


def test_the_callers_tensors_are_untouched(config: Config, device: torch.device) -> None:
    given = arguments(device)
    before = {name: (tensor.clone(), tensor.data_ptr(), tensor._version) for name, tensor in given.items()}
    with entered(tuning(config)):
        dv_local(given)
    for name, tensor in given.items():
        values, pointer, version = before[name]
        assert torch.equal(tensor, values)
        assert (tensor.data_ptr(), tensor._version) == (pointer, version)


def test_policy_error_names_key_and_store(config: Config, file: Path, device: torch.device) -> None:
    with entered(Router(config, on_miss="error")), pytest.raises(TuningError) as caught:
        dv_local(arguments(device))
    assert str(key()) in str(caught.value)
    assert file.name in str(caught.value)


def test_policy_default_runs_the_default_untuned(config: Config, device: torch.device) -> None:
    given = arguments(device)
    with entered(Router(config, on_miss="default", timer=NeverTimed())) as made:
        assert_right(dv_local(given), given)
        assert ran(made) == [SPEC.default(key(), driver.chip(device)).id]
        assert not list(made.store.decisions())


def test_policy_by_device_setting_and_argument(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, accelerator = torch.device("cpu"), torch.device("cuda", 0)
    assert Router(config).policy(cpu) == "default"
    assert Router(config).policy(accelerator) == "tune"
    setting = config.model_copy(update={"tuning": config.tuning.model_copy(update={"on_miss": "error"})})
    assert Router(setting).policy(cpu) == "error"
    assert Router(setting, on_miss="tune").policy(cpu) == "tune"
    monkeypatch.setattr(driver, "multi_process", lambda: True)
    assert Router(config).policy(accelerator) == "default"
    assert Router(config, on_miss="tune").policy(accelerator) == "tune"


@pytest.mark.parametrize("sizes", [{"HV": 1}, {"T": 1}])
def test_nothing_to_choose_is_never_tuned_and_copies_nothing(
    config: Config, device: torch.device, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(device, **sizes)
    monkeypatch.setattr("layout_tuner.spec.layouts.relayout", lambda *_: pytest.fail("copied"))
    with entered(Router(config, on_miss="error", timer=NeverTimed())) as made:
        assert_right(dv_local(given), given)
        assert made._store is None


def test_packed_lengths_are_tuned_once_a_bucket(config: Config, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    with entered(Counted(config, on_miss="tune")) as made:
        for T in torch.randint(2, 5000, (1000,), generator=generator).tolist():
            made.choose(SPEC, key(T=T, varlen=True), device)
        assert len(made.tuned) == len({each.T for each in made.tuned}) <= 13


def test_threads_tune_a_key_once(config: Config, device: torch.device) -> None:
    with entered(Counted(config, on_miss="tune")) as made, ThreadPoolExecutor(8) as pool:
        choices = list(pool.map(lambda _: made.choose(SPEC, key(), device).candidate.id, range(32)))
        assert choices == [SECOND] * 32
        assert len(made.tuned) == 1


def test_too_many_keys_run_the_default_and_are_said_once(
    config: Config, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    few = config.model_copy(update={"keys": config.keys.model_copy(update={"max_keys": 2})})
    with entered(Counted(few, on_miss="tune")) as made:
        chosen = [made.choose(SPEC, key(T=T), device).candidate.id for T in (10, 20, 30, 40)]
    assert chosen == [SECOND, SECOND, CANDIDATES[0], CANDIDATES[0]]
    assert len(made.tuned) == 2
    assert caplog.text.count("max_keys") == 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("tried to allocate 80 GiB"),
        RuntimeError("NPU out of memory. Tried to allocate 384.00 MiB (NPU 0; 60.96 GiB total capacity)"),
    ],
    ids=["torch", "torch_npu 7"],
)
def test_out_of_memory_while_tuning_runs_the_default_and_is_not_kept(
    config: Config, device: torch.device, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    given = arguments(device)
    with entered(Counted(config, on_miss="tune")) as made:
        made.raises = error
        assert_right(dv_local(given), given)
        assert "too little free memory to tune" in caplog.text
        assert ran(made) == []
        made.raises = None
        dv_local(given)
        assert ran(made) == [SECOND]


def test_no_tuning_while_a_graph_is_captured(
    config: Config, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(device)
    with entered(Counted(config, on_miss="tune")) as made:
        with monkeypatch.context() as patched:
            patched.setattr(driver, "capturing", lambda device: True)
            assert_right(dv_local(given), given)
            assert made.tuned == []
        dv_local(given)
        assert ran(made) == [SECOND]


# -- stored decisions --------------------------------------------------------------------------------------------


def test_a_second_router_uses_the_stored_decision(config: Config, device: torch.device) -> None:
    given = arguments(device)
    with entered(tuning(config)):
        dv_local(given)
    with entered(Router(config, on_miss="error", timer=NeverTimed())) as made:
        assert_right(dv_local(given), given)
        assert ran(made) == [SECOND]


def test_a_second_process_uses_the_stored_decision(config: Config, file: Path, device: torch.device) -> None:
    with entered(tuning(config)):
        dv_local(arguments(device))
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent / "support")!r})
import torch, layout_tuner
from layout_tuner.dispatch import router
from dv_local import arguments, dv_local
with layout_tuner.enable(cache={str(file)!r}, on_miss="error"):
    dv_local(arguments(torch.device({str(device)!r})))
    print(*[prepared.candidate.id for prepared in router.current().prepared.values()])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, SECOND), done.stderr


def test_a_decision_once_used_is_frozen(config: Config, device: torch.device) -> None:
    given = arguments(device)
    with entered(tuning(config)) as made:
        dv_local(given)
        with entered(tuning(config, SECOND_WINS | {CANDIDATES[1]: 0.1})) as other:
            other.tune(SPEC, key(), device)
            assert made.stored_decision(SPEC, key(), device).candidate == CANDIDATES[1]
        made.prepared.clear()
        dv_local(given)
        assert ran(made) == [SECOND]


def test_a_decision_of_another_revision_is_not_used(
    config: Config, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with entered(tuning(config)):
        dv_local(arguments(device))
    monkeypatch.setitem(SPEC.__dict__, "revision", "another")
    with entered(Router(config, on_miss="error")), pytest.raises(TuningError):
        dv_local(arguments(device))


def test_a_decision_of_another_environment_is_not_used(config: Config, device: torch.device) -> None:
    with entered(tuning(config)) as made:
        dv_local(arguments(device))
        (decision,) = made.store.decisions()
        known = made.store.environments()[0]
        made.store.publish(replace(decision, key=replace(decision.key, T=21), environment="x"), replace(known, id="x"))
    with entered(Router(config, on_miss="error")), pytest.raises(TuningError):
        dv_local(arguments(device, T=21))


# -- failures ----------------------------------------------------------------------------------------------------


class Broken:
    """A kernel that fails at its launch."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error or RuntimeError("illegal instruction")
        self.launches = 0

    def __getitem__(self, grid: object):
        def launch(*_: object, **__: object) -> None:
            self.launches += 1
            raise copy.copy(self.error)  # an error that is kept would keep what raised it

        return launch


def test_a_failing_choice_falls_back_to_the_default(
    config: Config, device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = arguments(device)
    with entered(tuning(config)):
        dv_local(given)
    broken = Broken()
    monkeypatch.setattr(kernels, "chunk_bwd_dv_local_sub", broken)
    with entered(Router(config, on_miss="error")) as made:
        assert_right(dv_local(given), given)
        assert_right(dv_local(given), given)
        assert f"{SECOND} failed (illegal instruction)" in caplog.text
        dv_local(given | {"q": given["q"].repeat(1, 1, 1, 2)[..., ::2]})
        assert set(ran(made)) == {CANDIDATES[0]}
    assert broken.launches == 1


def test_what_launches_for_itself_is_tried_until_a_candidate_runs(config: Config, device: torch.device) -> None:
    """`call_by` puts a failing candidate aside as `call` does."""
    given = arguments(device)
    errors = [RuntimeError("illegal instruction"), OutOfResources(300000, 232448, "shared memory")]
    handed: list[str] = []

    def run(prepared: Prepared) -> str:
        handed.append(prepared.candidate.id)
        if errors:
            raise errors.pop(0)
        return prepared.candidate.id

    def launched() -> str:
        tensors = tuple(given.get(operand.name) for operand in SPEC.operands)
        return router.call_by(SPEC, run, tensors, (BT,), (1.0,))

    with entered(tuning(config, {name: 2.0 if name == CANDIDATES[1] else 10.0 for name in CANDIDATES})) as made:
        assert launched() == CANDIDATES[2]
        assert handed == [CANDIDATES[1], CANDIDATES[0], CANDIDATES[2]]
        assert launched() == CANDIDATES[2]
        assert len(handed) == 4 and ran(made) == [CANDIDATES[2]]


@pytest.mark.parametrize("hit", ["same", "by shape", "by signature"])
def test_a_winner_that_has_run_and_then_fails_falls_back_to_the_default(
    config: Config, device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hit: str
) -> None:
    given, other = arguments(device), arguments(device, T=30)
    with entered(tuning(config)):
        dv_local(given)
        dv_local(other)
    with entered(Router(config, on_miss="error")) as made:
        dv_local(given)
        dv_local(given)
        if hit == "by shape":
            dv_local(other)
            dv_local(other)
        if hit == "by signature":
            made.prepared.last.clear()
            made.prepared.by_shape.clear()
        assert set(ran(made)) == {SECOND}
        plain, broken = launcher.BoundKernel.plain, Broken()

        def launch(bound: launcher.BoundKernel, grid: int, *rest: object) -> bool:
            return plain(bound, grid, *rest) if bound.kernel is not kernels.chunk_bwd_dv_local_sub else broken[grid]()

        monkeypatch.setattr(launcher.BoundKernel, "plain", launch)
        assert_right(dv_local(given), given)
        assert_right(dv_local(given), given)
        assert f"{SECOND} failed (illegal instruction)" in caplog.text
    assert broken.launches == 1


@pytest.mark.parametrize(
    "error",
    [
        OSError(116, "Stale file handle", "/cache/torch_compile_cache/x/k.so"),
        OSError(28, "No space left on device", "/home/user/.triton/compiled"),
        OverflowError("Python int too large to convert to C int"),
        RuntimeError("run:build/torch_npu.dir/compiler_depend.ts:361 NPU function error: Sync, error code is 507015"),
    ],
    ids=["a stale handle", "a full disk", "a number", "a device"],
)
def test_a_fault_that_passes_takes_no_stored_decision_away(
    config: Config, device: torch.device, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    given = arguments(device)
    with entered(tuning(config)) as made:
        dv_local(given)
        (before,) = made.store.decisions()
    with monkeypatch.context() as patched:
        patched.setattr(kernels, "chunk_bwd_dv_local_sub", Broken(error))
        with entered(Router(config, on_miss="error")) as made:
            assert_right(dv_local(given), given)
            assert list(made.store.decisions()) == [before]
    with entered(Router(config, on_miss="error")) as made:
        assert_right(dv_local(given), given)
        assert ran(made) == [SECOND]


@pytest.mark.parametrize(
    ("starts", "said"),
    [([0, 30], "an end of at most T=20, got 30"), ([0, 12, 5], "starts from 0 that never fall")],
    ids=["too long", "falling"],
)
def test_a_mistake_of_the_caller_is_no_failure_of_the_choice(
    config: Config, device: torch.device, caplog: pytest.LogCaptureFixture, starts: list[int], said: str
) -> None:
    """What only a running candidate looks at: the next call follows the decision, which stays as it was stored."""
    given = arguments(device)
    right = {"cu_seqlens": torch.tensor([0, 7, 20][-len(starts) :], dtype=torch.int32, device=device)}
    right["cu_seqlens"][0] = 0
    wrong = {"cu_seqlens": torch.tensor(starts, dtype=torch.int32, device=device)}
    with entered(tuning(config)) as made:
        assert_right(dv_local(given, **right), given, **right)
        (before,) = made.store.decisions()
    with entered(Router(config, on_miss="error")) as made:
        with pytest.raises(ValueError, match=said):
            dv_local(given, **wrong)
        assert_right(dv_local(given, **right), given, **right)
        assert set(ran(made)) == {before.candidate} == {SECOND}
        assert list(made.store.decisions()) == [before]
    assert "failed" not in caplog.text


def test_a_candidate_that_fails_in_tuning_is_recorded_and_the_call_is_right(
    config: Config, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(device)
    monkeypatch.setattr(kernels, "chunk_bwd_dv_local_sub", Broken(PTXASError("no such instruction")))
    with entered(tuning(config, dict.fromkeys(CANDIDATES, 10.0) | {"full/g=T_CONTIG": 5.0})) as made:
        assert_right(dv_local(given), given)
        (decision,) = made.store.decisions()
    assert decision.candidate == "full/g=T_CONTIG"
    assert [m.state for m in decision.measurements] == ["ok", "ok", "failed", "failed"]
    assert decision.measurements[2].failure == "compile"
    assert decision.measurements[2].reason == "PTXASError: PTXAS error: no such instruction"


def test_when_every_candidate_fails_the_error_reaches_the_caller(
    config: Config, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "chunk_bwd_dv_local_sub", Broken())
    monkeypatch.setattr(kernels, "chunk_bwd_dv_local_full", Broken())
    with entered(tuning(config)), pytest.raises(RuntimeError, match=r"illegal instruction"):
        dv_local(arguments(device))


def test_what_is_no_tensor_is_named_after_a_call_too(config: Config, device: torch.device) -> None:
    """The second call is compared with the first by its shape, which may be anything here."""
    given = arguments(device)
    with entered(Router(config, on_miss="default")):
        dv_local(given)
        with pytest.raises(TypeError, match="q: wanted a tensor, got SimpleNamespace"):
            dv_local(given | {"q": SimpleNamespace(shape=[1, 20, 1, 16])})  # type: ignore[dict-item]


TOO_MUCH = OutOfResources(245760, 232448, "shared memory")


@pytest.mark.parametrize("tuned", [False, True], ids=["without-enable", "enabled"])
def test_a_default_that_takes_too_much_memory_gives_way_to_another_variant(
    config: Config, device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tuned: bool
) -> None:
    given = arguments(device, T=23)
    broken = Broken(TOO_MUCH)
    monkeypatch.setattr(kernels, "chunk_bwd_dv_local_full", broken)
    with entered(Router(config, on_miss="default", tuning=tuned)) as made:
        assert_right(dv_local(given), given)
        assert_right(dv_local(given), given)
        assert {ran_id.partition("/")[0] for ran_id in ran(made)} == {"sub"}
    assert f"failed ({TOO_MUCH})" in caplog.text
    assert broken.launches == 1
    monkeypatch.setattr(kernels, "chunk_bwd_dv_local_sub", Broken(TOO_MUCH))
    with entered(Router(config, on_miss="default", tuning=tuned)), pytest.raises(OutOfResources, match="shared memory"):
        dv_local(given)


def test_another_failure_of_the_default_is_the_callers_to_see(
    config: Config, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "chunk_bwd_dv_local_full", Broken())
    with entered(Router(config, on_miss="default")), pytest.raises(RuntimeError, match="illegal") as caught:
        dv_local(arguments(device))
    assert caught.value.__context__ is None


def test_a_database_error_never_fails_an_op(
    config: Config, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    class FailingStore:
        name = "a broken store"

        def __getattr__(self, name: str):
            def fail(*_: object, **__: object) -> None:
                raise CacheError(f"{name}: disk I/O error")

            return fail

        def close(self) -> None:
            pass

    given = arguments(device)
    with entered(tuning(config)) as made:
        made._store = FailingStore()
        assert_right(dv_local(given), given)
        assert ran(made) == [SECOND]
    assert "resolve: disk I/O error" in caplog.text
    assert "publish: disk I/O error: the decision is kept in memory only" in caplog.text


def test_wrong_numbers_never_win(config: Config, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(device)

    class Skipping:
        """A kernel that writes nothing, the fastest of all."""

        def __getitem__(self, grid: object):
            return lambda *_, **__: None

    monkeypatch.setattr(kernels, "chunk_bwd_dv_local_sub", Skipping())
    with entered(tuning(config)) as made:
        assert_right(dv_local(given), given)
        (decision,) = made.store.decisions()
    assert decision.candidate == CANDIDATES[0]
    assert [m.state for m in decision.measurements] == ["ok", "ok", "wrong", "wrong"]


def test_tuning_is_on_synthetic_arguments(config: Config, device: torch.device) -> None:
    """A call whose values are useless decides as well as any other."""
    given = {name: torch.full_like(tensor, float("nan")) for name, tensor in arguments(device).items()}
    with entered(tuning(config)) as made:
        dv_local(given)
        assert ran(made) == [SECOND]


def named(name: str) -> dict[str, object]:
    """Arguments of a public op, right ones."""
    spec = registry.lookup(name)
    form = next(form for form in spec.every_form if "OTHER" not in form)
    call = inputs.synthesize(spec, key_for(spec, form, B=1, T=20, K=16, V=16), "cpu")
    taken = inspect.signature(getattr(layout_tuner.ops, name)).parameters
    return {name: value for name, value in spec.arguments(call).items() if name in taken}


@pytest.mark.parametrize("name", registry.names())
def test_every_argument_of_a_wrong_type_is_named_by_one_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.Router, "prepare", lambda *_: pytest.fail("prepared"))
    spec, op, given = registry.lookup(name), getattr(layout_tuner.ops, name), named(name)
    optional = {operand.name for operand in spec.operands if operand.optional}
    for argument, value in given.items():
        wrong: list[object] = [[1.0], 1.5, torch.zeros(3).numpy()]
        if argument in spec.scalars:
            wrong = ["1", torch.tensor(1.0), True, [1.0]]
        elif value is not None and not isinstance(value, torch.Tensor):
            wrong = ["16", 64.0, torch.tensor(16), [16], torch.zeros(2).numpy()]
        elif argument not in optional and argument != "cu_seqlens":
            wrong.append(None)
        if argument == "output_dtype":
            wrong = ["complex64"]
        for mistake in wrong:
            with pytest.raises((TypeError, ValueError), match=rf"^{name}: .*{argument}: wanted"):
                op(**given | {argument: mistake})
    first, *others = [
        operand.name for operand in spec.operands if operand.name in given and given[operand.name] is not None
    ]
    if others:
        with pytest.raises(
            TypeError, match=rf"{first}: wanted a tensor, got list; {others[-1]}: wanted a tensor, got set"
        ):
            op(**given | {first: [], others[-1]: set()})


def test_a_number_of_another_kind_is_taken_as_a_float(device: torch.device) -> None:
    given = arguments(device)
    wanted = dv_local(given, scale=2.0)
    for scale in (2, numpy.float32(2), numpy.int64(2)):
        assert torch.equal(dv_local(given, scale=scale), wanted)
    with pytest.raises(TypeError, match="scale: wanted a number or None, got Tensor"):
        dv_local(given, scale=torch.tensor(2.0))


def test_chunks_without_starts_are_refused(device: torch.device) -> None:
    given = arguments(device)
    with pytest.raises(ValueError, match="chunk_indices: wanted cu_seqlens with it"):
        dv_local(given, chunk_indices=torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"cu_seqlens: wanted \[N \+ 1\], got \[\]"):
        dv_local(given, cu_seqlens=torch.tensor(3))


def test_a_wrong_call_is_the_callers_error(config: Config, device: torch.device) -> None:
    with entered(Router(config, on_miss="error")), pytest.raises(UnsupportedProblemError, match=r"K=300"):
        dv_local(arguments(device, K=300))


def test_synthetic_arguments_are_the_same_everywhere(device: torch.device) -> None:
    one, two = (inputs.synthesize(SPEC, key(varlen=True), device) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.tensors, two.tensors, strict=True) if a is not None)
    assert torch.equal(one.cu_seqlens, two.cu_seqlens)
    other = inputs.synthesize(SPEC, key(varlen=True), device, seed=1)
    assert not torch.equal(one.tensors[0], other.tensors[0])


def test_timer_of_the_tests_runs_nothing() -> None:
    assert SetTimer(lambda name, place: 1.0).round_us([lambda: pytest.fail("ran")]) == [1.0]


def test_a_scope_may_be_entered_again() -> None:
    scope = layout_tuner.enable(fla=False)
    with scope:
        pass
    assert not layout_tuner.is_enabled()
    with scope:
        assert layout_tuner.is_enabled()
    assert not layout_tuner.is_enabled()


@pytest.mark.parametrize("given", [5, lambda: None], ids=["number", "function"])
def test_what_is_no_config(given: Any) -> None:
    with pytest.raises(TypeError, match=r"config: wanted a Config, the path of a tuner\.toml or None, got") as caught:
        layout_tuner.enable(given)
    assert ("enable()(function)" in str(caught.value)) == callable(given)
    assert not layout_tuner.is_enabled()


def test_enable_names_all_that_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LAYOUT_TUNER_FORCE", "nothing=full")
    monkeypatch.setenv("LAYOUT_TUNER_DISABLE", "yes")
    with pytest.raises(ConfigError) as caught:
        layout_tuner.enable(tmp_path / "none.toml")
    for part in ("none.toml: No such file", "no op 'nothing'", "LAYOUT_TUNER_DISABLE: wanted 0 or 1"):
        assert part in str(caught.value)


async def coroutine() -> None: ...


def generator() -> Iterator[None]:
    yield


async def asynchronous_generator() -> AsyncIterator[None]:
    yield


class CalledLate:
    async def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("thing", "said"),
    [
        (coroutine, "coroutine: use the scope inside its body"),
        (generator, "generator: use the scope inside its body"),
        (asynchronous_generator, "asynchronous_generator: use the scope inside its body"),
        (CalledLate(), "use the scope inside its body"),
        (Model, "the class Model: decorate its methods"),
        (3, "3: wanted a function"),
    ],
    ids=["coroutine", "generator", "asynchronous generator", "asynchronous callable", "class", "number"],
)
def test_what_cannot_be_decorated(thing: Any, said: str) -> None:
    with pytest.raises(TypeError, match=f"enable: cannot decorate .*{said}"):
        layout_tuner.enable(fla=False)(thing)
    assert not layout_tuner.is_enabled()


@pytest.fixture
def pinned(config: Config, device: torch.device, tmp_path: Path) -> Config:
    """Settings with a pin file that holds one key."""
    made = tuning(config)
    made.tune(SPEC, key(), device)
    write_pins(tmp_path / "pins.json", list(made.store.decisions()))
    made.close()
    return Config(cache=config.cache, tuning={"pin": str(tmp_path / "pins.json")})


def test_what_is_not_in_the_pin_is_not_tuned(pinned: Config, device: torch.device) -> None:
    given = arguments(device, T=21)
    with entered(Router(pinned, on_miss="tune", timer=NeverTimed())) as made:
        dv_local(arguments(device))
        assert_right(dv_local(given), given)
        assert ran(made) == [SECOND, CANDIDATES[0]]
        assert [(choice.source, choice.reason) for choice in made.choices.values()] == [
            ("pinned", ""),
            ("default", "not in the pin"),
        ]
    with entered(Router(pinned, on_miss="error")), pytest.raises(TuningError, match=r"not in the pin file .*pins.json"):
        dv_local(given)


def test_a_pin_that_was_changed_fails_at_enable(pinned: Config) -> None:
    file = Path(pinned.tuning.pin)
    file.write_text(file.read_text().replace(SECOND, CANDIDATES[0]))
    with pytest.raises(CacheError, match="changed after it was written"):
        layout_tuner.enable(pinned, fla=False)
    assert not layout_tuner.is_enabled()


def test_a_home_in_a_cache_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = Router(Config.load(cache={"path": "~/decisions.sqlite"}), on_miss="default")
    assert str(tmp_path) in made.store.name
