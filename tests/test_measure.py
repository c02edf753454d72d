"""Timing with a set clock: order, discarded samples, intervals, the budget."""

import itertools
import math

import pytest
import torch
from timers import Named, SetTimer, noisy_times, set_times

from layout_tuner.tuning.timing import (
    MOST_HOLD_US,
    EventTimer,
    HostTimer,
    Rounds,
    RunError,
    median_interval,
    time_rounds,
)

FEW = {"warmup_rounds": 1, "min_rounds": 6, "max_rounds": 12, "interval": 0.01, "deadline": math.inf}


def rounds(timer: SetTimer, names: str = "abc", baseline: str = "a", **settings: object) -> Rounds:
    return time_rounds({name: Named(name) for name in names}, baseline, timer, **(FEW | settings))


def test_every_round_times_each_once_in_rotating_order() -> None:
    timer = set_times({"a": 10.0, "b": 20.0, "c": 30.0})
    kept = rounds(timer)
    assert all(sorted(order) == ["a", "b", "c"] for order in timer.orders)
    assert [order[0] for order in timer.orders[1:]] == ["a", "b", "c", "a", "b", "c"]
    assert timer.orders[2] == ("b", "c", "a")
    assert kept.samples == {"a": [10.0] * 6, "b": [20.0] * 6, "c": [30.0] * 6}
    assert (kept.discarded, kept.stopped) == (0, "narrow")


def test_samples_belong_to_their_callable_whatever_the_order() -> None:
    kept = rounds(noisy_times({"a": 10.0, "b": 100.0, "c": 1000.0}, seed=1), interval=1e-9)
    for name, size in (("a", 10.0), ("b", 100.0), ("c", 1000.0)):
        assert all(size / 2 < sample < 2 * size for sample in kept.samples[name])


@pytest.mark.parametrize("bad", [0.0, -3.0, math.nan, math.inf])
def test_unusable_samples_discard_their_round_and_are_counted(bad: float) -> None:
    taken = itertools.count()
    kept = rounds(SetTimer(lambda name, place: bad if next(taken) % 7 == 3 else 10.0), min_rounds=8, interval=1e-9)
    assert kept.discarded > 0
    assert {len(samples) for samples in kept.samples.values()} == {8}
    assert all(sample == 10.0 for samples in kept.samples.values() for sample in samples)


def test_a_timer_that_never_works_ends_too() -> None:
    kept = rounds(SetTimer(lambda name, place: 0.0))
    assert kept.samples["a"] == []
    assert kept.discarded == FEW["min_rounds"] + FEW["max_rounds"]


def test_only_some_may_be_zero() -> None:
    times = {"a": 10.0, "copy": 0.0}
    runs = {name: Named(name) for name in times}
    kept = time_rounds(runs, "a", set_times(times), may_be_zero={"copy"}, **FEW)
    assert kept.discarded == 0
    assert kept.median("copy") == 0.0


def test_rounds_go_on_until_the_interval_is_narrow() -> None:
    wide = rounds(noisy_times({"a": 10.0, "b": 9.0, "c": 11.0}, seed=3), interval=1e-6)
    assert (len(wide.samples["a"]), wide.stopped) == (FEW["max_rounds"], "rounds")
    narrow = rounds(set_times({"a": 10.0, "b": 9.0, "c": 11.0}))
    assert (len(narrow.samples["a"]), narrow.stopped) == (FEW["min_rounds"], "narrow")


def test_warm_up_ends_when_two_rounds_agree() -> None:
    times = iter([100.0, 50.0, 20.0, 10.0, 10.1] + [10.0] * 6)
    kept = rounds(SetTimer(lambda name, place: next(times)), names="a", warmup_rounds=20)
    assert kept.samples["a"] == [10.0] * 6


def test_warm_up_has_a_cap() -> None:
    counter = itertools.count(1)
    timer = SetTimer(lambda name, place: 2.0 ** -next(counter))
    rounds(timer, names="a", warmup_rounds=4)
    assert len(timer.orders) == 4 + FEW["min_rounds"]


def test_the_budget_ends_rounds_but_one_is_always_taken() -> None:
    now = itertools.count()
    timer = set_times({"a": 10.0, "b": 9.0})
    kept = rounds(timer, names="ab", clock=lambda: float(next(now)), deadline=4.0)
    assert kept.stopped == "budget"
    assert len(kept.samples["a"]) == 4
    kept = rounds(timer, names="ab", clock=lambda: 10.0, deadline=4.0)
    assert (len(kept.samples["a"]), kept.stopped) == (1, "budget")


def test_gain_is_paired_by_round() -> None:
    paired = Rounds(samples={"a": [10.0, 20.0, 40.0], "b": [9.0, 18.0, 36.0]}, discarded=0, stopped="rounds")
    assert paired.gain("b", "a").median == pytest.approx(0.1)
    assert paired.gain("a", "b").median == pytest.approx(1 - 10 / 9)


# Ranks of the 95 % sign-test interval of the median, counted from 1, as tables of the binomial distribution have them.
@pytest.mark.parametrize(
    ("n", "low", "high"),
    [(6, 1, 6), (8, 1, 8), (9, 2, 8), (11, 2, 10), (12, 3, 10), (15, 4, 12), (20, 6, 15), (30, 10, 21), (100, 40, 61)],
)
def test_interval_has_the_ranks_of_the_sign_test(n: int, low: int, high: int) -> None:
    samples = [float((17 * i) % n + 1) if math.gcd(17, n) == 1 else float(i + 1) for i in range(n)]
    found = median_interval(samples)
    assert (found.low, found.high) == (low, high)
    assert found.median == (n + 1) / 2


@pytest.mark.parametrize("n", range(6))
def test_too_few_samples_know_nothing(n: int) -> None:
    found = median_interval([1.0] * n)
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert math.isnan(found.median) if n == 0 else found.median == 1.0


def test_interval_covers_the_median_as_often_as_it_says() -> None:
    timer = noisy_times({"a": 10.0}, seed=5)
    covered = 0
    for _ in range(1000):
        found = median_interval([timer.round_us([Named("a")])[0] for _ in range(15)])
        covered += found.low <= 10.01 <= found.high
    assert covered >= 930


def test_host_timer_runs_each_in_order() -> None:
    ran: list[str] = []
    samples = HostTimer().round_us([lambda: ran.append("a"), lambda: ran.append("b")])
    assert ran == ["a", "b"]
    assert all(sample > 0 for sample in samples)


class Event:
    """An event of a device that takes a while, or does not come back."""

    comes = True
    clock_ms = 0.0

    def record(self) -> None:
        self.ms = Event.clock_ms

    def query(self) -> bool:
        return Event.comes

    def elapsed_time(self, end: "Event") -> float:
        return end.ms - self.ms


def test_a_device_that_does_not_come_back_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layout_tuner.device.driver.event", lambda device: Event())
    monkeypatch.setattr(Event, "comes", True)
    timer = EventTimer(torch.device("cpu"), patience_s=0.1)

    def work() -> None:
        Event.clock_ms += 0.25

    def stuck() -> None:
        Event.comes = False

    assert timer.round_us([work, work]) == [pytest.approx(250.0)] * 2
    with pytest.raises(RunError, match="does not end") as caught:
        timer.round_us([work, stuck, work])
    assert caught.value.place == 1
    assert isinstance(caught.value.cause, TimeoutError)
    monkeypatch.setattr(Event, "comes", True)
    kept = time_rounds({"a": work, "b": stuck}, "a", timer, **FEW)
    assert (kept.stopped, kept.broken, kept.samples["a"]) == ("broken", "b", [])


class Queue:
    """A host with a set clock that queues work for a device, which does one thing after the other.

    It stands in for a timer's scratch buffer, for its events, and for the `time` module.

    Args:
        fill_us: What a fill takes on the device.
        fill_queueing_us: What it takes the host to queue one.
    """

    def __init__(self, fill_us: float, fill_queueing_us: float = 4.0) -> None:
        self.fill = (fill_queueing_us, fill_us)
        self.host_us = 0.0
        self.free_us = 0.0  # when the device is done with what it has
        self.fills = 0

    def work(self, queueing_us: float, *kernels_us: float) -> None:
        for each in kernels_us:
            self.host_us += queueing_us / len(kernels_us)
            self.free_us = max(self.free_us, self.host_us) + each

    def zero_(self) -> None:
        self.fills += 1
        self.work(*self.fill)

    def event(self, device: torch.device) -> "QueuedEvent":
        return QueuedEvent(self)

    def perf_counter(self) -> float:
        return self.host_us / 1e6

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.host_us += max(1.0, seconds * 1e6)


class QueuedEvent:
    """An event of such a device."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def record(self) -> None:
        self.us = self.queue.free_us = max(self.queue.free_us, self.queue.host_us)

    def query(self) -> bool:
        return self.queue.host_us >= self.us

    def elapsed_time(self, end: "QueuedEvent") -> float:
        return (end.us - self.us) / 1e3


def queued_timer(queue: Queue, monkeypatch: pytest.MonkeyPatch, **named: object) -> EventTimer:
    monkeypatch.setattr("layout_tuner.tuning.timing.time", queue)
    monkeypatch.setattr("layout_tuner.device.driver.event", queue.event)
    monkeypatch.setattr("layout_tuner.device.driver.synchronize", lambda device: queue.sleep(1.0))
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", lambda *size, **named: queue)
        return EventTimer(torch.device("cpu"), **named)


@pytest.mark.parametrize("l2", ["warm", "cold"])
@pytest.mark.parametrize("queueing_us", [10.0, 670.0, 3000.0])
def test_a_chain_is_timed_as_the_device_runs_it_however_long_the_host_queues(
    l2: str, queueing_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(fill_us=30.0)
    timer = queued_timer(queue, monkeypatch, l2=l2)
    kernels_us = [4.0 + i for i in range(20)]
    (sample,) = timer.round_us([lambda: queue.work(queueing_us, *kernels_us)])
    assert sample == pytest.approx(sum(kernels_us))


def test_a_sample_that_was_not_held_long_enough_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(fill_us=30.0)
    timer = queued_timer(queue, monkeypatch)
    slow = itertools.chain([100.0, 2000.0, 2000.0], itertools.repeat(500.0))  # the host was interrupted

    assert timer.round_us([lambda: queue.work(next(slow), 10.0, 10.0)]) == [pytest.approx(20.0)]


def test_holding_has_an_end_and_is_not_tried_with_fills_that_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(fill_us=30.0)
    timer = queued_timer(queue, monkeypatch)
    queue.fills = 0
    timer.round_us([lambda: queue.work(1e5, 10.0, 10.0)])
    assert queue.fills <= MOST_HOLD_US / 30.0
    queue = Queue(fill_us=5.0)
    timer = queued_timer(queue, monkeypatch)
    queue.fills = 0
    timer.round_us([lambda: queue.work(670.0, 10.0, 10.0)])
    assert queue.fills == 1


def test_a_device_settles_or_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(fill_us=30.0)
    timer = queued_timer(queue, monkeypatch)
    assert timer.settled(0.0)
    queue.work(1.0, 5e6)
    assert not timer.settled(2.0)
    assert timer.settled(4.0)
    assert HostTimer().settled(0.0)


def test_an_error_belongs_to_the_callable_that_raised_it() -> None:
    def broken() -> None:
        raise ValueError("no")

    with pytest.raises(RunError, match="ValueError: no") as caught:
        HostTimer().round_us([lambda: None, broken])
    assert caught.value.place == 1
