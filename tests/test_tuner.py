"""The decision: what wins, what never wins, and what is remembered of the rest. Timers have a set clock."""

import itertools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import torch
from timers import RIGHT, WRONG, Named, SetTimer, name_of, noisy_times, set_times, trial
from triton.runtime.errors import OutOfResources, PTXASError

from layout_tuner.config import Measure, Tuning
from layout_tuner.errors import DeviceLostError, TuningError
from layout_tuner.tuning.checking import as_tuple
from layout_tuner.tuning.deadline import left_behind, run_within
from layout_tuner.tuning.numerics import error
from layout_tuner.tuning.records import measurement_record
from layout_tuner.tuning.timing import RunError
from layout_tuner.tuning.tuner import Check, Measurement, Outcome, Runs, Trial, tune

MEASURE = Measure(warmup_rounds=1, min_rounds=15, max_rounds=15)
DEFAULT = "a"


@pytest.fixture(autouse=True)
def _nobody_is_left_behind() -> Iterator[None]:
    """Threads that a test let go have ended before the next begins."""
    yield
    patience = time.monotonic() + 30.0
    while left_behind() and time.monotonic() < patience:
        time.sleep(0.01)


def decide(trials: Sequence[Trial], timer: SetTimer, default: str = DEFAULT, **named: object) -> Outcome:
    return tune(trials, default, timer, named.pop("measure", MEASURE), named.pop("tuning", Tuning()), **named)


def raising(name: str, error: Exception, where: str = "prepare") -> Trial:
    """A candidate that raises while it is prepared or checked."""

    def fail() -> Check:
        raise error

    def prepare() -> Runs:
        if where == "prepare":
            raise error
        return Runs(end_to_end=Named(name), kernel=None, relayout=None, check=fail)

    return Trial(id=name, revision="r1", prepare=prepare)


def test_the_faster_candidate_wins_with_its_evidence() -> None:
    outcome = decide([trial("a"), trial("b"), trial("c")], set_times({"a": 10.0, "b": 8.0, "c": 12.0}))
    assert outcome.winner == "b"
    assert outcome.gain is not None
    assert (outcome.gain.low, outcome.gain.median, outcome.gain.high) == pytest.approx((0.2, 0.2, 0.2))
    found = outcome.measurement("b")
    assert (found.state, found.end_to_end_us, found.samples) == ("ok", 8.0, (8.0,) * 15)
    assert outcome.measurement("c").gain.median == pytest.approx(-0.2)
    assert outcome.measurement("a").gain is None
    assert [m.id for m in outcome.measurements] == ["a", "b", "c"]
    assert (outcome.rounds, outcome.discarded, outcome.stopped) == (15, 0, "narrow")


def test_the_cost_of_copies_decides() -> None:
    timer = set_times({"a": 10.0, "b": 11.0, "b kernel": 5.0, "b relayout": 6.0})
    outcome = decide([trial("a"), trial("b", relayout=True)], timer)
    found = outcome.measurement("b")
    assert outcome.winner == "a"
    assert (found.end_to_end_us, found.kernel_us, found.relayout_us) == (11.0, 5.0, 6.0)
    assert (outcome.measurement("a").kernel_us, outcome.measurement("a").relayout_us) == (10.0, 0.0)


@pytest.mark.parametrize("check", [WRONG, Check(error=float("inf"), limit=1e-4, output="dv")])
def test_fastest_but_wrong_never_wins(check: Check) -> None:
    timer = set_times({"a": 10.0, "b": 0.001, "c": 9.0})
    outcome = decide([trial("a"), trial("b", check), trial("c")], timer)
    assert outcome.winner == "c"
    found = outcome.measurement("b")
    assert (found.state, found.failure, found.error, found.samples) == ("wrong", "wrong", check.error, ())
    assert check.output in found.reason
    assert all("b" not in order for order in timer.orders)


def test_nan_outputs_are_infinitely_wrong() -> None:
    wanted = torch.ones(4)
    assert error(torch.tensor([1.0, 1.0, float("nan"), 1.0]), wanted) == float("inf")
    check = Check(error=error(torch.full((4,), float("nan")), *as_tuple(wanted)), limit=0.5, output="dv")
    assert not check.right
    assert not Check(error=float("nan"), limit=0.5, output="dv").right


@pytest.mark.parametrize("where", ["prepare", "check"])
@pytest.mark.parametrize(
    ("raised", "failure"),
    [
        (torch.OutOfMemoryError("tried to allocate 80 GiB"), "memory"),
        (MemoryError(), "memory"),
        (OutOfResources(245760, 232448, "shared memory"), "overflow"),
        (TimeoutError("took too long"), "timeout"),
        (PTXASError("`ptxas` failed with error code 255\nsecond line"), "compile"),
        (ValueError("no such thing"), "device"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_candidate_that_raises_is_recorded_with_its_class(where: str, raised: Exception, failure: str) -> None:
    outcome = decide([trial("a"), raising("b", raised, where), trial("c")], set_times({"a": 10.0, "c": 9.0}))
    found = outcome.measurement("b")
    assert outcome.winner == "c"
    assert (found.state, found.failure, found.samples) == ("failed", failure, ())
    assert found.reason.startswith(type(raised).__name__)
    assert "second line" not in found.reason


def test_an_interrupt_is_no_failure_of_a_candidate() -> None:
    with pytest.raises(KeyboardInterrupt):
        decide([trial("a"), raising("b", KeyboardInterrupt())], set_times({}))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [raising("a", RuntimeError("broken")), trial("a", WRONG)], ids=["failed", "wrong"])
def test_a_default_that_is_out_is_replaced_by_the_best(bad: Trial) -> None:
    outcome = decide([bad, trial("b"), trial("c")], set_times({"b": 10.0, "c": 8.0}))
    assert (outcome.winner, outcome.default) == ("c", "a")


def test_no_right_candidate_is_an_error_with_every_reason() -> None:
    with pytest.raises(TuningError, match=r"a: failed: RuntimeError: broken; b: wrong: out: error 0\.5 over 0\.0001"):
        decide([raising("a", RuntimeError("broken")), trial("b", WRONG)], set_times({}))


@pytest.mark.parametrize("default", ["a", "b"])
def test_ties_go_to_the_default(default: str) -> None:
    outcome = decide([trial("a"), trial("b")], set_times({"a": 10.0, "b": 10.0}), default)
    assert outcome.winner == default
    assert outcome.gain is None


def test_ties_of_candidates_go_to_the_smaller_id() -> None:
    times = {"a": 10.0, "b": 8.0, "c": 8.0}
    assert decide([trial("a"), trial("c"), trial("b")], set_times(times)).winner == "b"


@pytest.mark.parametrize(("gain", "winner"), [(0.019, "a"), (0.021, "b")])
def test_a_gain_within_the_margin_is_none(gain: float, winner: str) -> None:
    assert decide([trial("a"), trial("b")], set_times({"a": 100.0, "b": 100.0 * (1 - gain)})).winner == winner


def test_a_gain_within_the_noise_is_none() -> None:
    flips = itertools.cycle([5.0, 15.0, 9.0])
    timer = SetTimer(lambda name, place: 10.0 if name == "a" else next(flips))
    outcome = decide([trial("a"), trial("b")], timer)
    assert outcome.measurement("b").gain.median == pytest.approx(0.1)
    assert outcome.winner == "a"


def test_unusable_samples_are_counted_and_decide_nothing() -> None:
    taken = itertools.count()
    timer = SetTimer(lambda name, place: (0.0 if next(taken) % 11 == 0 else 20.0) if name == "b" else 10.0)
    outcome = decide([trial("a"), trial("b")], timer)
    assert outcome.winner == "a"
    assert outcome.discarded > 0
    assert outcome.measurement("b").samples == (20.0,) * 15


def test_a_clock_that_never_works_leaves_the_default() -> None:
    outcome = decide([trial("a"), trial("b")], set_times({"a": 0.0, "b": 0.0}))
    assert (outcome.winner, outcome.rounds) == ("a", 0)
    assert outcome.measurement("b").end_to_end_us is None


def test_a_spent_budget_skips_candidates_but_not_the_default() -> None:
    now = itertools.count(0, 60)
    outcome = decide(
        [trial("b"), trial("c"), trial("a")], set_times({}), tuning=Tuning(budget_s=100.0), clock=lambda: next(now)
    )
    states = {found.id: (found.state, found.failure) for found in outcome.measurements}
    assert states == {"b": ("skipped", "timeout"), "c": ("skipped", "timeout"), "a": ("ok", "")}
    assert outcome.winner == "a"
    assert "budget of 100 s" in outcome.measurement("b").reason


@pytest.mark.parametrize("copies", ["ab", "abcd"])
def test_copies_of_one_kernel_win_falsely_in_under_one_percent(copies: str) -> None:
    noisy = Measure(max_rounds=30)
    false_wins = sum(
        decide(
            [trial(name) for name in copies],
            noisy_times(dict.fromkeys(copies, 10.0), seed, noise=0.1),
            measure=noisy,
        ).winner
        != DEFAULT
        for seed in range(1000)
    )
    assert false_wins < 10


def test_ten_and_ten_point_oh_one_give_the_same_winner_every_time() -> None:
    for times in ({"a": 10.01, "b": 10.0}, {"a": 10.0, "b": 10.01}):
        winners = {
            decide([trial("a"), trial("b")], noisy_times(times, seed), measure=Measure()).winner for seed in range(20)
        }
        assert winners == {"a"}


def test_close_winners_beside_a_slow_default_agree_too() -> None:
    times = {"a": 20.0, "b": 10.01, "c": 10.0}
    winners = {
        decide([trial("a"), trial("b"), trial("c")], noisy_times(times, seed, noise=0.005)).winner for seed in range(20)
    }
    assert winners == {"b"}


@pytest.mark.parametrize("lucky", [0, 1, 2])
def test_a_place_in_the_round_that_is_faster_favours_nobody(lucky: int) -> None:
    generator = random.Random(lucky)
    timer = SetTimer(lambda name, place: (7.0 if place == lucky else 10.0) * generator.gauss(1.0, 0.005))
    outcome = decide([trial("a"), trial("b"), trial("c")], timer)
    assert outcome.winner == "a"


def test_right_at_the_limit_is_right() -> None:
    assert Check(error=1e-4, limit=1e-4, output="dv").right
    assert RIGHT.right


# -- time runs out, and what is known before -----------------------------------------------------------------------


def hanging(name: str, gate: threading.Event, where: str = "check") -> Trial:
    """A candidate that does not come back until the gate opens, as from a compiler or a device that hangs."""

    def prepare() -> Runs:
        if where == "prepare":
            gate.wait(60.0)
        return Runs(
            end_to_end=Named(name), kernel=None, relayout=None, check=lambda: gate.wait(60.0) and RIGHT
        )  # fmt: skip

    return Trial(id=name, revision="r1", prepare=prepare)


@pytest.mark.parametrize("where", ["prepare", "check"])
def test_a_candidate_that_hangs_is_recorded_and_the_rest_is_timed(where: str) -> None:
    gate = threading.Event()
    start = time.monotonic()
    outcome = decide(
        [trial("a"), trial("b"), hanging("c", gate, where), trial("d")],
        set_times({"a": 10.0, "b": 8.0, "c": 1.0, "d": 1.0}),
        tuning=Tuning(budget_s=2.0),
    )
    gate.set()
    assert time.monotonic() - start < 30.0
    found = outcome.measurement("c")
    assert (found.state, found.failure, found.samples) == ("failed", "timeout", ())
    assert (outcome.measurement("d").state, outcome.measurement("d").failure) == ("skipped", "timeout")
    assert outcome.winner == "b", "the best so far is kept"


def test_a_default_that_hangs_is_an_error_within_the_budget() -> None:
    gate = threading.Event()
    with pytest.raises(TuningError, match=r"a: failed: TimeoutError: no result within its time; b: skipped"):
        decide([hanging("a", gate), trial("b")], set_times({}), tuning=Tuning(budget_s=0.2))
    gate.set()


class Lost(SetTimer):
    """A timer of a device that answers so many times, and then no more."""

    def __init__(self, times: dict[str, float], answers: int) -> None:
        super().__init__(lambda each, place: times[each])
        self.answers = answers

    def settled(self, seconds: float) -> bool:
        self.answers -= 1
        return self.answers >= 0


@pytest.mark.parametrize("default", ["b", "d"])
def test_nothing_is_made_of_a_device_that_a_candidate_occupies(default: str) -> None:
    gate = threading.Event()
    timer = Lost({"a": 1.0, "b": 10.0}, 1)
    trials = [trial("b"), trial("a"), hanging("c", gate), trial("e")]
    if default == "d":
        trials.append(raising("d", RuntimeError("broken")))
    with pytest.raises(DeviceLostError, match="c, which was given up, still occupies the device"):
        decide(trials, timer, default, tuning=Tuning(budget_s=1.0))
    gate.set()
    assert not timer.orders, "something was timed"


def test_nothing_is_made_of_a_device_whose_default_does_not_end_while_it_is_timed() -> None:
    timer = Breaking({"a": 10.0, "b": 1.0, "c": 8.0}, "a", TimeoutError("it does not end"), 5)
    timer.settled = Lost({}, 1).settled
    with pytest.raises(DeviceLostError, match="a, which was given up, still occupies the device"):
        decide([trial("a"), trial("c"), trial("b")], timer)


@pytest.mark.parametrize(("answers", "said"), [(0, "does not answer"), (1, "does not answer any more")])
def test_nothing_is_made_of_a_device_that_does_not_answer_before_or_after(answers: int, said: str) -> None:
    timer = Lost({"a": 10.0, "b": 1.0}, answers)
    with pytest.raises(DeviceLostError, match=said):
        decide([trial("a"), trial("b", WRONG)], timer)
    assert bool(timer.orders) is bool(answers)


LOST = RuntimeError(
    "synchronize:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:361 NPU function error: "
    "c10_npu::acl::AclrtSynchronizeStreamWithTimeout(stream()), error code is 507015"
)


@pytest.mark.parametrize("where", ["prepare", "check"])
def test_a_candidate_that_takes_the_device_with_it_ends_the_tuning(where: str) -> None:
    timer = set_times({"a": 10.0, "c": 1.0})
    with pytest.raises(DeviceLostError, match=r"at b .*507015"):
        decide([trial("a"), raising("b", LOST, where), trial("c")], timer)
    assert not timer.orders


def test_a_candidate_that_takes_the_device_with_it_while_it_is_timed_ends_the_tuning() -> None:
    timer = Breaking({"a": 10.0, "b": 1.0, "c": 8.0}, "b", LOST, 3)
    with pytest.raises(DeviceLostError, match=r"at b .*507015"):
        decide([trial("a"), trial("b"), trial("c")], timer)


def test_an_untimed_candidate_never_stands_in_for_a_default_that_is_out() -> None:
    with pytest.raises(TuningError, match="nothing could be timed, and the default is failed: RuntimeError: broken"):
        decide([raising("a", RuntimeError("broken")), trial("b"), trial("c")], set_times({"b": 0.0, "c": 0.0}))


def test_a_device_that_an_earlier_tuning_left_busy_is_no_fault_of_the_next_default() -> None:
    gate = threading.Event()
    with pytest.raises(TimeoutError):
        run_within(0.1, lambda: gate.wait(60.0))
    timer = set_times({"a": 10.0, "b": 8.0})
    timer.comes_back = False
    with pytest.raises(TuningError, match="an earlier tuning gave up still occupies the device"):
        decide([trial("a"), trial("b")], timer)
    timer.comes_back = True
    assert decide([trial("a"), trial("b")], timer).winner == "b"
    gate.set()


def test_compiling_ahead_is_outside_the_budget_and_a_failure_there_is_known() -> None:
    prepared: list[str] = []
    now = [0.0]

    def slow(name: str) -> Trial:
        def prepare() -> Runs:
            prepared.append(name)
            now[0] += 500.0 if prepared.count(name) == 1 else 0.0
            return Runs(end_to_end=Named(name), kernel=None, relayout=None, check=lambda: RIGHT)

        return Trial(id=name, revision="r1", prepare=prepare)

    outcome = decide(
        [slow("a"), slow("b"), raising("c", PTXASError("no such instruction"))],
        set_times({"a": 10.0, "b": 8.0}),
        tuning=Tuning(budget_s=100.0),
        clock=lambda: now[0],
        compile_s=1000.0,
    )
    assert outcome.winner == "b"
    assert [(m.state, m.failure) for m in outcome.measurements] == [("ok", ""), ("ok", ""), ("failed", "compile")]
    assert prepared == ["a", "b", "a", "b"]


@pytest.mark.parametrize("where", ["prepare", "run"])
def test_a_device_that_is_lost_while_compiling_ahead_names_the_candidate(where: str) -> None:
    timer = Lost({}, 1)  # after the first
    trials = [trial("a"), raising("b", LOST) if where == "prepare" else trial("b")]
    with pytest.raises(DeviceLostError) as caught:
        decide(trials, timer, compile_s=10.0)
    assert (caught.value.candidate, caught.value.failure) == ("b", "crash" if where == "prepare" else "timeout")


def test_compiling_leaves_a_fifth_of_the_budget_for_timing() -> None:
    now = itertools.count(0.0, 30.0)
    outcome = decide(
        [trial("a"), trial("b"), trial("c"), trial("d")],
        set_times({"a": 10.0, "b": 8.0, "c": 9.0}),
        tuning=Tuning(budget_s=100.0),
        clock=lambda: next(now),
    )
    assert [m.state for m in outcome.measurements] == ["ok", "ok", "skipped", "skipped"]
    assert outcome.rounds == 1


class Breaking(SetTimer):
    """A timer under which one callable raises at its n-th run."""

    def __init__(self, times: dict[str, float], name: str, error: Exception, runs: int) -> None:
        super().__init__(lambda each, place: times[each])
        self.name = name
        self.error = error
        self.runs = runs

    def round_us(self, runs: Sequence[object]) -> list[float]:
        names = [name_of(run) for run in runs]
        if self.name in names:
            self.runs -= 1
            if self.runs < 0:
                raise RunError(names.index(self.name), self.error)
        return super().round_us(runs)


@pytest.mark.parametrize("name", ["b", "b kernel", "b relayout"])
@pytest.mark.parametrize("runs", [0, 7])
def test_a_candidate_that_raises_while_it_is_timed_is_out_and_the_rest_is_timed_anew(name: str, runs: int) -> None:
    times = {"a": 10.0, "b": 1.0, "b kernel": 1.0, "b relayout": 1.0, "c": 9.0}
    timer = Breaking(times, name, RuntimeError("illegal address"), runs)
    outcome = decide([trial("a"), trial("b", relayout=True), trial("c")], timer)
    found = outcome.measurement("b")
    assert (found.state, found.failure) == ("failed", "device")
    assert "illegal address" in found.reason
    assert (outcome.winner, outcome.rounds) == ("c", 15)


def test_a_candidate_that_does_not_end_again_leaves_what_was_timed() -> None:
    timer = Breaking({"a": 10.0, "b": 1.0, "c": 8.0}, "b", TimeoutError("it does not end"), 10)
    outcome = decide([trial("a"), trial("b"), trial("c")], timer)
    assert (outcome.measurement("b").state, outcome.measurement("b").failure) == ("failed", "timeout")
    assert outcome.stopped == "broken"
    assert outcome.winner == "c"


def test_a_default_that_breaks_while_it_is_timed_is_out_too() -> None:
    timer = Breaking({"a": 10.0, "b": 8.0}, "a", RuntimeError("illegal address"), 3)
    outcome = decide([trial("a"), trial("b")], timer)
    assert (outcome.winner, outcome.measurement("a").state) == ("b", "failed")
    with pytest.raises(TuningError, match="illegal address"):
        decide([trial("a")], Breaking({"a": 10.0}, "a", RuntimeError("illegal address"), 3))


def test_what_is_known_to_fail_is_not_tried_and_stays_as_old_as_it_is() -> None:
    when = datetime(2026, 1, 2, tzinfo=UTC)
    known = Measurement(id="b", revision="r1", state="wrong", failure="wrong", reason="dv is off", measured_at=when)
    untouchable = Trial(id="b", revision="r1", prepare=lambda: pytest.fail("it was tried"), known=known)
    outcome = decide([trial("a"), untouchable, trial("c")], set_times({"a": 10.0, "b": 0.1, "c": 9.0}))
    assert outcome.winner == "c"
    assert outcome.measurement("b") is known
    assert measurement_record(known).measured_at == when


def test_only_bit_exact_candidates_where_that_is_asked_for() -> None:
    exact, other = replace(RIGHT, exact=True), replace(RIGHT, exact=False)
    trials = [trial("a"), trial("b", other), trial("c", exact), trial("d")]
    times = {"a": 10.0, "b": 1.0, "c": 9.0, "d": 1.0}
    assert decide(trials, set_times(times)).winner == "b"
    outcome = decide(trials, set_times(times), tuning=Tuning(bit_exact=True))
    assert outcome.winner == "c"
    assert [(m.state, m.failure) for m in outcome.measurements] == [
        ("ok", ""), ("skipped", ""), ("ok", ""), ("skipped", ""),
    ]  # fmt: skip


def test_a_layout_that_changes_bits_is_wrong() -> None:
    differs = replace(RIGHT, exact=False, differs="dv: not the bits of a")
    outcome = decide([trial("a"), trial("b", differs)], set_times({"a": 10.0, "b": 1.0}))
    assert outcome.winner == "a"
    assert (outcome.measurement("b").state, outcome.measurement("b").reason) == ("wrong", "dv: not the bits of a")
