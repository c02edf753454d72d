"""What is counted of calls, and what of that reaches the cache."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from dv_local import CANDIDATES, SPEC, arguments, dv_local, key
from layout_tuner.cache.places.opening import Store
from timers import set_times

import layout_tuner
from layout_tuner import ops
from layout_tuner.config import Config
from layout_tuner.device.environment import environment
from layout_tuner.dispatch import counters, misses, router
from layout_tuner.dispatch.router import Router
from layout_tuner.integrations import takeover
from layout_tuner.tuning.timing import Interval

SECOND = "sub/g=T_CONTIG"
TIMES = {name: 2.0 if name == SECOND else 10.0 for name in CANDIDATES}


@pytest.fixture(autouse=True)
def _from_zero() -> Iterator[None]:
    """No count of an earlier test."""
    counters.reset()
    yield
    counters.reset()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "decisions.sqlite"


@pytest.fixture
def config(file: Path) -> Config:
    return Config(cache={"path": str(file)})


class Scope:
    """A router as an entry."""

    def __init__(self, made: Router) -> None:
        self.made = made

    def __enter__(self) -> Router:
        self.ticket = router.push(self.made)
        return self.made

    def __exit__(self, *error: object) -> None:
        router.remove(self.ticket)
        self.made.close()


def stored_misses(file: Path) -> list[tuple[int, int, str]]:
    """T, count and reason of every miss in a file."""
    store = Store(file)
    found = [(miss.key.T, miss.count, miss.reason) for miss in store.misses()]
    store.close()
    return found


# -- stats -------------------------------------------------------------------------------------------------------


def test_hits_misses_tunings_and_what_was_saved(config: Config, device: torch.device) -> None:
    given = arguments(device)
    with Scope(Router(config, on_miss="tune", timer=set_times(TIMES))):
        for _ in range(5):
            dv_local(given)
    stats = layout_tuner.stats()
    assert (stats.hits, stats.misses, stats.tunings, stats.fallbacks) == (4, 1, 1, {})
    assert stats.saved_us == Interval(median=pytest.approx(40.0), low=pytest.approx(40.0), high=pytest.approx(40.0))
    (used,) = stats.decisions
    assert (used.candidate, used.source, used.calls) == (SECOND, "measured", 5)
    with Scope(Router(config, on_miss="error")):
        for _ in range(3):
            dv_local(given)
    stats = layout_tuner.stats()
    assert (stats.hits, stats.misses, stats.tunings) == (7, 1, 1)
    assert stats.saved_us.median == pytest.approx(64.0)


def test_every_kind_of_hit_is_counted(config: Config, device: torch.device) -> None:
    """The last call of the op, another of its shapes, a number that is no float, the chain."""
    one, two = arguments(device), arguments(device, T=21)
    with Scope(Router(config, on_miss="default")):
        for given in (one, one, one, two, two, one, two, one, one):
            dv_local(given)
        dv_local(one, scale=1)
        assert {used.calls for used in layout_tuner.stats().decisions} == {7, 3}
        q, k = torch.randn(2, 1, 20, 1, 16, device=device).unbind()
        v, g = torch.randn(1, 20, 2, 16, device=device), -torch.rand(1, 20, 2, device=device)
        for _ in range(3):
            ops.chunk_gated_delta_rule(q, k, v, g, torch.rand(1, 20, 2, device=device), chunk_size=16)
        (chain,) = [used for used in layout_tuner.stats().decisions if used.key.startswith("chunk_gated_delta_rule ")]
        assert chain.calls == 3


def test_calls_outside_every_entry_are_nobodys(device: torch.device) -> None:
    for _ in range(3):
        dv_local(arguments(device))
    assert layout_tuner.stats().decisions == ()


def test_fallbacks_have_reasons(config: Config, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(device)
    with Scope(Router(config, on_miss="default")):
        for _ in range(3):
            dv_local(given)
    few = config.model_copy(update={"keys": config.keys.model_copy(update={"max_keys": 1})})
    with Scope(Router(few, on_miss="tune", timer=set_times(TIMES))):
        with monkeypatch.context() as patched:
            patched.setattr("layout_tuner.device.driver.capturing", lambda device: True)
            dv_local(given)
            dv_local(given)
        dv_local(given)
        dv_local(arguments(device, T=21))
    assert layout_tuner.stats().fallbacks == {
        "on_miss is 'default'": 3,
        "a graph was being captured or traced": 2,
        "[keys] max_keys": 1,
    }
    assert layout_tuner.stats().misses == 1 + 2 + 1 + 1


def test_a_candidate_that_fails_at_its_launch_is_a_fallback(
    config: Config, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(device)
    with Scope(Router(config, on_miss="tune", timer=set_times(TIMES))) as made:
        made.tune(SPEC, key(), device)

    class Broken:
        def __getitem__(self, grid: object):
            raise RuntimeError("illegal instruction")

    monkeypatch.setattr("layout_tuner.kernels.dv_local.chunk_bwd_dv_local_sub", Broken())
    with Scope(Router(config, on_miss="error")):
        for _ in range(3):
            dv_local(given)
    assert layout_tuner.stats().fallbacks == {"its candidate failed to launch": 3}
    assert sum(used.calls for used in layout_tuner.stats().decisions) == 3


def test_what_routers_counted_outlives_them(config: Config, device: torch.device) -> None:
    given = arguments(device)
    for _ in range(4):
        with Scope(Router(config, on_miss="default")):
            dv_local(given)
    import gc

    gc.collect()
    (used,) = layout_tuner.stats().decisions
    assert used.calls == 4
    assert len(counters._live) <= 2, "a dead router's tallies are kept"


def test_calls_left_to_another_library_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(takeover._fallthroughs, ("chunk_fwd_o", "K=300"), 2)
    monkeypatch.setitem(takeover._served, "chunk_fwd_o", 5)
    stats = layout_tuner.stats()
    assert stats.fla_fallthroughs[("chunk_fwd_o", "K=300")] == 2
    assert stats.fla_served["chunk_fwd_o"] == 5


def test_one_line_for_each_decision(config: Config, device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="layout_tuner.dispatch")
    given = arguments(device)
    with Scope(Router(config, on_miss="tune", timer=set_times(TIMES))):
        dv_local(given)
        dv_local(given)
    with Scope(Router(config, on_miss="error")):
        dv_local(given)
        dv_local(given)
    assert len(caplog.messages) == 2
    assert f"{SECOND} saves 80.0 %" in caplog.messages[0]
    assert caplog.messages[1] == f"{key()}: {SECOND}, measured"


# -- misses ------------------------------------------------------------------------------------------------------


def test_every_call_without_a_decision_is_a_miss_in_the_file(config: Config, file: Path, device: torch.device) -> None:
    one, two = arguments(device), arguments(device, T=21)
    with Scope(Router(config, on_miss="default")):
        for given in (one, two, one, one):
            dv_local(given)
    assert stored_misses(file) == [(20, 3, "on_miss is 'default'"), (21, 1, "on_miss is 'default'")]
    with Scope(Router(config, on_miss="default")):
        dv_local(one)
    assert stored_misses(file)[0][1] == 4
    store = Store(file)
    (miss, _) = store.misses()
    store.close()
    assert miss.environment == environment(device).id
    assert miss.first_seen < miss.last_seen


def test_they_are_written_in_the_background_and_never_by_a_call(
    config: Config, file: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(device)
    writers = []
    original = Store.record_misses

    def spying(self: Store, found: object) -> None:
        writers.append(threading.current_thread())
        original(self, found)

    monkeypatch.setattr(Store, "record_misses", spying)
    monkeypatch.setattr(misses, "PAUSE_S", 0.05)
    monkeypatch.setattr(misses, "_thread", None)
    with Scope(Router(config, on_miss="default")):
        for _ in range(20):
            dv_local(given)
        assert threading.main_thread() not in writers
        waited = threading.Event()
        for _ in range(100):
            if writers and stored_misses(file) == [(20, 20, "on_miss is 'default'")]:
                break
            waited.wait(0.1)
        assert stored_misses(file) == [(20, 20, "on_miss is 'default'")]
        assert threading.main_thread() not in writers
    assert stored_misses(file)[0][1] == 20


def test_what_is_tuned_at_once_is_no_miss_in_the_file(config: Config, file: Path, device: torch.device) -> None:
    with Scope(Router(config, on_miss="tune", timer=set_times(TIMES))):
        dv_local(arguments(device))
    assert stored_misses(file) == []


CHILD = """
import os, sys
sys.path.insert(0, {support!r})
import torch, layout_tuner
from layout_tuner.dispatch import misses
from dv_local import arguments, dv_local
misses.PAUSE_S = 60.0
given = arguments(torch.device({device!r}))
layout_tuner.enable(cache={file!r}, on_miss="default", fla=False)
dv_local(given)
dv_local(given)
"""


def python(code: str, file: Path, device: torch.device) -> None:
    text = CHILD.format(support=str(Path(__file__).parent / "support"), device=str(device), file=str(file)) + code
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_rest_is_written_at_exit(file: Path, device: torch.device) -> None:
    python("", file, device)
    assert [count for _, count, _ in stored_misses(file)] == [2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_counts_its_own_and_not_its_parents(file: Path) -> None:
    python(
        """
pid = os.fork()
if pid == 0:
    dv_local(given)
    dv_local(given)
    dv_local(given)
    misses.flush()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
""",
        file,
        torch.device("cpu"),
    )
    assert [count for _, count, _ in stored_misses(file)] == [5]
