"""Times callables on a device in interleaved rounds, and computes medians and intervals of the samples.

Rounds time every callable once, in rotating order, so that what one leaves behind (cache contents, clock speed, heat)
falls on all of them alike. Comparisons are paired within rounds; an interval is one of order statistics, which assumes
nothing of the distribution. Times are microseconds throughout.
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from ..device import driver

log = logging.getLogger(__name__)

Run = Callable[[], object]

# Fills ahead of a sample take at most so long together.
MOST_HOLD_US = 10_000.0
# Seconds between questions to a device whose events do not come.
ASK_S = 0.1
CONFIDENCE = 0.95


class Timer(Protocol):
    """Times callables; tests pass one with a clock of their own."""

    def round_us(self, runs: Sequence[Run]) -> list[float]:
        """Run each once, in order, and return what each took in microseconds."""
        ...

    def settled(self, seconds: float) -> bool:
        """Whether the device finishes all its work within `seconds` and then answers."""
        ...


class RunError(Exception):
    """A callable that raised while it was timed, or whose work on the device does not end.

    Attributes:
        place: Its place in the round.
        cause: What it raised; a TimeoutError where it does not end.
    """

    def __init__(self, place: int, cause: Exception) -> None:
        self.place = place
        self.cause = cause
        super().__init__(f"{type(cause).__name__}: {cause}")


@contextmanager
def blamed(place: int) -> Iterator[None]:
    """Within this context, an error is blamed on the callable of that place."""
    try:
        yield
    except Exception as error:
        raise RunError(place, error) from error


class HostTimer:
    """Wall-clock time of callables that return when their work is done, as the interpreter's do."""

    def round_us(self, runs: Sequence[Run]) -> list[float]:
        """One sample of each, in microseconds."""
        samples = []
        for place, run in enumerate(runs):
            with blamed(place):
                start = time.perf_counter()
                run()
                samples.append((time.perf_counter() - start) * 1e6)
        return samples

    def settled(self, seconds: float) -> bool:
        """True: work on the host is done when it returns."""
        return True


def scratch_bytes(device: torch.device) -> int:
    """Bytes of an `EventTimer`'s scratch buffer: enough to empty the second-level cache."""
    return 2 * driver.cache_bytes(device)


class EventTimer:
    """Device time between two events around a callable's work.

    Fills of a scratch buffer ahead of each sample keep the device busy until the host has queued the callable, so that
    a short kernel's time, or that of a chain of them, is the device's and not the host's: a sample that the device
    came to sooner is taken again behind twice the fills, `MOST_HOLD_US` of them at most. The fills also empty the
    second-level cache; with `warm` the callable then runs once untimed, as a step of a model finds its operands where
    the step before left them.

    Args:
        device: An accelerator.
        l2: `warm` or `cold`.
        patience_s: How long a sample may take; one that is not done by then counts as hung.
    """

    def __init__(
        self, device: torch.device, l2: Literal["warm", "cold"] = "warm", patience_s: float = math.inf
    ) -> None:
        self.device = device
        self.l2 = l2
        self.patience_s = patience_s
        self.scratch = torch.empty(scratch_bytes(device), dtype=torch.uint8, device=device)
        fill_us, queueing_us = self._fill_us()
        self.gain_us = fill_us - queueing_us  # how far the device falls behind the host with each fill
        # A fill that is done about as soon as it is queued holds nothing, however many there are.
        self.most_holds = max(1, int(MOST_HOLD_US / fill_us)) if fill_us > 2 * queueing_us else 1

    def _fill_us(self) -> tuple[float, float]:
        """Device time of one fill, and the host's time to queue it."""
        self.scratch.zero_()
        queueing = []
        start, end = driver.event(self.device), driver.event(self.device)
        start.record()
        for _ in range(8):
            begun = time.perf_counter()
            self.scratch.zero_()
            queueing.append((time.perf_counter() - begun) * 1e6)
        end.record()
        driver.synchronize(self.device)
        return start.elapsed_time(end) * 1e3 / len(queueing), min(queueing)

    def _holds(self, run: Run) -> int:
        """How many fills take twice as long as the host takes to queue a callable."""
        start = time.perf_counter()
        run()
        queueing_us = (time.perf_counter() - start) * 1e6
        done = driver.event(self.device)
        done.record()
        self._wait(done, done)
        return 1 if self.most_holds == 1 else min(self.most_holds, 1 + math.ceil(2.5 * queueing_us / self.gain_us))

    def _wait(self, start: driver.Event, end: driver.Event) -> None:
        """Poll events until they are complete: a blocking wait could not be given up.

        A stream that stopped reports its error only to the next call that queues work, not through its events; so after
        a while such a call is made.
        """
        now = time.monotonic()
        give_up, ask_at = now + self.patience_s, now + ASK_S
        pause_s = 0.0
        while not (start.query() and end.query()):
            now = time.monotonic()
            if now > give_up:
                raise TimeoutError("its work on the device does not end")
            if now > ask_at:
                driver.event(self.device).record()
                ask_at = now + ASK_S
            time.sleep(pause_s)
            pause_s = min(pause_s + 1e-6, 1e-3)

    def _sample(self, run: Run) -> float:
        """Device time of one run in microseconds."""
        holds = self._holds(run)
        while True:
            sample_us, held = self._held(run, holds)
            if held or holds >= self.most_holds:
                return sample_us
            holds = min(self.most_holds, 2 * holds)

    def _held(self, run: Run, holds: int) -> tuple[float, bool]:
        """Device time of one run behind so many fills, and whether the device came to it after all was queued."""
        for _ in range(holds):
            self.scratch.zero_()
        if self.l2 == "warm":
            run()
        start, end = driver.event(self.device), driver.event(self.device)
        start.record()
        run()
        end.record()
        held = not start.query()
        self._wait(start, end)
        return start.elapsed_time(end) * 1e3, held

    def settled(self, seconds: float) -> bool:
        """Whether the device does all that it was given, and what it is given now, within so many seconds."""
        give_up = time.monotonic() + seconds
        try:
            done = driver.event(self.device)
            done.record()
            while not done.query():
                if time.monotonic() > give_up:
                    return False
                time.sleep(1e-3)
            return driver.answers(self.device)
        except RuntimeError as error:
            log.warning("%s does not answer: %s", self.device, error)
            return False

    def round_us(self, runs: Sequence[Run]) -> list[float]:
        """One sample of each, in microseconds of device time.

        Raises:
            RunError: One that raises, or does not end.
        """
        samples = []
        for place, run in enumerate(runs):
            with blamed(place):
                samples.append(self._sample(run))
        return samples


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A median and its 95 % interval.

    Attributes:
        median: The middle sample.
        low, high: Order statistics that enclose the true median with 95 % confidence.
    """

    median: float
    low: float
    high: float


def median_interval(samples: Sequence[float], doubt: float = 1 - CONFIDENCE) -> Interval:
    """Median with the distribution-free interval of the sign test.

    Under 6 samples no two order statistics give 95 %; the interval then is unbounded.

    Args:
        samples: In any order.
        doubt: Probability that the true median lies outside, half of it on either side.
    """
    ordered = sorted(samples)
    n = len(ordered)
    rank = sign_test_rank(n, doubt / 2)
    if rank < 0:
        return Interval(median=statistics.median(ordered) if n else math.nan, low=-math.inf, high=math.inf)
    return Interval(median=statistics.median(ordered), low=ordered[rank], high=ordered[n - 1 - rank])


@functools.cache
def sign_test_rank(n: int, most: float) -> int:
    """The largest r with P(Binomial(n, 1/2) <= r) <= most; -1 where there is none."""
    rank = -1
    tail = 0.0
    for r in range(n):
        tail += math.comb(n, r) / 2**n
        if tail > most:
            break
        rank = r
    return rank


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Samples of callables timed side by side.

    Attributes:
        samples: By name, one entry a kept round; entries of equal position were taken in the same round.
        discarded: Rounds left out because a sample of theirs was zero, negative or not finite.
        stopped: Why there were no more rounds: `narrow`, `rounds`, `budget` or `broken`.
        broken: The callable that raised or did not end, where one did.
        error: What it raised.
    """

    samples: Mapping[str, list[float]]
    discarded: int
    stopped: str
    broken: str = ""
    error: Exception | None = None

    def median(self, name: str) -> float:
        """Median time of a callable in microseconds."""
        return statistics.median(self.samples[name])

    def gain(self, name: str, baseline: str, doubt: float = 1 - CONFIDENCE) -> Interval:
        """Fraction of the baseline's time that a callable saves, paired by round; negative where it is slower."""
        pairs = zip(self.samples[name], self.samples[baseline])
        return median_interval([1.0 - own / base for own, base in pairs], doubt)


def time_rounds(
    runs: Mapping[str, Run],
    baseline: str,
    timer: Timer,
    *,
    warmup_rounds: int,
    min_rounds: int,
    max_rounds: int,
    interval: float,
    deadline: float,
    may_be_zero: Collection[str] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Rounds:
    """Time callables in interleaved rounds until their gains over the baseline are known narrowly enough.

    Args:
        runs: Callables by name.
        baseline: The name that the others are compared with.
        timer: Takes the samples.
        warmup_rounds: At most so many rounds are thrown away; fewer once two in a row agree within 2 %.
        min_rounds, max_rounds: Kept rounds.
        interval: Enough, once every gain's 95 % interval is at most this wide.
        deadline: On `clock`, no round starts after it; the first `min_rounds` do not wait for the interval.
        may_be_zero: Callables whose time may be too short to see, as a small copy's.
        clock: Seconds.
    """
    names = list(runs)
    samples: dict[str, list[float]] = {name: [] for name in names}
    previous: list[float] = []
    discarded = 0
    stopped = "rounds"
    order = names
    try:
        for _ in range(warmup_rounds):
            current = timer.round_us([runs[name] for name in names])
            settled = previous and all(abs(a - b) <= 0.02 * max(a, b) for a, b in zip(current, previous))
            if settled or clock() > deadline:
                break
            previous = current
        for i_round in range(max_rounds + min_rounds):
            if clock() > deadline and i_round:
                stopped = "budget"
                break
            order = names[i_round % len(names) :] + names[: i_round % len(names)]
            taken = dict(zip(order, timer.round_us([runs[name] for name in order])))
            if not all(math.isfinite(taken[name]) and (taken[name] > 0 or name in may_be_zero) for name in names):
                discarded += 1
                continue
            for name, sample in taken.items():
                samples[name].append(sample)
            kept = len(samples[baseline])
            result = Rounds(samples=samples, discarded=discarded, stopped="narrow")
            if kept >= min_rounds and narrow(result, names, baseline, interval):
                return result
            if kept >= max_rounds:
                break
    except RunError as error:
        broken = order[error.place]
        return Rounds(samples=samples, discarded=discarded, stopped="broken", broken=broken, error=error.cause)
    return Rounds(samples=samples, discarded=discarded, stopped=stopped)


def narrow(rounds: Rounds, names: Sequence[str], baseline: str, width: float) -> bool:
    """Whether every gain over the baseline is known to within `width`."""
    gains = [rounds.gain(name, baseline) for name in names if name != baseline]
    return all(gain.high - gain.low <= width for gain in gains)
