"""Counts of calls by the choice that ran them, and the time that decisions saved.

A call adds one to the tally of the choice that runs it; counting costs it nothing else. Everything is summed up when
somebody asks. Calls of several threads at the same moment may be counted as one.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from ..forking import ProcessLock
from ..launch.tally import Tally
from ..tuning.timing import Interval


@dataclass(frozen=True, kw_only=True)
class Used:
    """A choice that ran calls.

    Attributes:
        key: The key, as text.
        environment: Id of its environment.
        candidate: What ran.
        source: `pinned`, `forced`, `measured`, `imported`, `predicted` or `default`.
        reason: Why the default ran in place of a decision; empty where there was one.
        calls: How many calls.
        saved_us: What they saved against the default, with its interval; None where that was not measured.
    """

    key: str
    environment: str
    candidate: str
    source: str
    reason: str
    calls: int
    saved_us: Interval | None


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Counts of this process's calls within `enable`.

    Attributes:
        hits: Calls that ran what was decided for their key.
        misses: Calls that found no decision, neither in memory nor stored.
        tunings: Keys tuned by this process.
        fallbacks: Calls that ran the default in place of a decision, by reason.
        saved_us: Device time that decisions saved against the defaults, by what was measured when they were made. Its
            bounds are the sums of each decision's 95 % bounds, wider than the interval of the sum. None: no decision
            that was measured has run.
        decisions: The choices that ran, those with most calls first.
        fla_served: Calls of flash-linear-attention that ran here, by op.
        fla_yielded: Its calls left to it because it was measured to be faster, by op.
        fla_fallthroughs: Its calls left to it because nothing here serves them, by op and reason.
    """

    hits: int
    misses: int
    tunings: int
    fallbacks: Mapping[str, int]
    saved_us: Interval | None
    decisions: tuple[Used, ...]
    fla_served: Mapping[str, int] = field(default_factory=dict)
    fla_yielded: Mapping[str, int] = field(default_factory=dict)
    fla_fallthroughs: Mapping[tuple[str, str], int] = field(default_factory=dict)


class Library(NamedTuple):
    """Counts of another library's calls, kept by what takes them over; each is asked for when `stats` is.

    Attributes:
        served: Calls that ran here, by op.
        yielded: Calls left to it because it was measured to be faster, by op.
        fallthroughs: Calls left to it because nothing here serves them, by op and reason.
    """

    served: Callable[[], Mapping[str, int]] = dict
    yielded: Callable[[], Mapping[str, int]] = dict
    fallthroughs: Callable[[], Mapping[tuple[str, str], int]] = dict


_library = Library()


def count_library(library: Library) -> None:
    """Have `stats` report these counts."""
    global _library
    _library = library


class Tallies(dict[tuple[object, ...], Tally]):
    """One router's tallies by place. When the router goes, its counts are kept with those of earlier routers."""

    def __init__(self) -> None:
        super().__init__()
        _live[id(self)] = self

    def of(self, tally: Tally) -> Tally:
        """The tally that is kept for the place of this one; this one itself, where none was kept yet."""
        return self.setdefault(tally.place, tally)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose calls are not counted."""
        before = {place: (tally.calls, tally.missed) for place, tally in list(self.items())}
        try:
            yield
        finally:
            for place, tally in list(self.items()):
                tally.calls, tally.missed = before.get(place, (0, 0))

    def retire(self) -> None:
        """Keep the counts of a router that is gone."""
        with _lock:
            _live.pop(id(self), None)
            for place, tally in self.items():
                before = _past.setdefault(place, tally)
                if before is not tally:
                    before.calls += tally.calls
                    before.missed += tally.missed
            self.clear()


_lock = ProcessLock()
_live: dict[int, Tallies] = {}
_past: dict[tuple[object, ...], Tally] = {}
_tunings: collections.Counter[str] = collections.Counter()


def count_tuning(op: str) -> None:
    """Count a key of an op that was tuned."""
    with _lock:
        _tunings[op] += 1


def reset() -> None:
    """Count from zero."""
    with _lock:
        _past.clear()
        _tunings.clear()
        for tallies in _live.values():
            for tally in tallies.values():
                tally.flushed -= tally.calls  # what is not recorded yet stays to be recorded
                tally.calls = tally.missed = 0


def together() -> list[Tally]:
    """The tallies that counted calls, the counts of one place added up."""
    sums: dict[tuple[object, ...], Tally] = {}
    with _lock:
        every = [*_past.values(), *(tally for tallies in list(_live.values()) for tally in list(tallies.values()))]
    for tally in every:
        if tally.key is None or not tally.calls:
            continue
        sum_ = sums.get(tally.place)
        if sum_ is None:
            sum_ = sums[tally.place] = Tally(
                tally.key, tally.environment, candidate=tally.candidate, source=tally.source, reason=tally.reason,
                saved_us=tally.saved_us,
            )  # fmt: skip
        sum_.calls += tally.calls
        sum_.missed += tally.missed
    return list(sums.values())


def stats() -> Stats:
    """Counts of this process's calls within `enable`, also within entries that are gone.

    Returns:
        The counts; they are taken at the call and do not change.
    """
    tallies = sorted(together(), key=lambda tally: -tally.calls)
    misses = sum(tally.missed for tally in tallies)
    fallbacks: collections.Counter[str] = collections.Counter()
    for tally in tallies:
        if tally.reason:
            fallbacks[tally.reason] += tally.calls
    return Stats(
        hits=sum(tally.calls for tally in tallies) - misses,
        misses=misses,
        tunings=sum(_tunings.values()),
        fallbacks=dict(fallbacks),
        saved_us=added(times(tally.saved_us, tally.calls) for tally in tallies),
        decisions=tuple(used(tally) for tally in tallies),
        fla_served=_library.served(),
        fla_yielded=_library.yielded(),
        fla_fallthroughs=_library.fallthroughs(),
    )


def used(tally: Tally) -> Used:
    """A tally for people."""
    return Used(
        key=str(tally.key),
        environment=tally.environment,
        candidate=tally.candidate,
        source=tally.source,
        reason=tally.reason,
        calls=tally.calls,
        saved_us=times(tally.saved_us, tally.calls),
    )


def times(one: Interval | None, calls: int) -> Interval | None:
    """The time that a number of calls save, where one call saves `one`."""
    if one is None:
        return None
    return Interval(median=one.median * calls, low=one.low * calls, high=one.high * calls)


def added(intervals: Iterable[Interval | None]) -> Interval | None:
    """The sum of intervals, bound by bound; None where there is none."""
    kept = [each for each in intervals if each is not None]
    if not kept:
        return None
    return functools.reduce(
        lambda a, b: Interval(median=a.median + b.median, low=a.low + b.low, high=a.high + b.high), kept
    )


def saved_us(default_us: float | None, gain: float | None, low: float | None, high: float | None) -> Interval | None:
    """Microseconds that a call saves, from a decision's gain over its default; None where that was not measured."""
    if default_us is None or gain is None:
        return None
    bounds = [default_us * (bound if bound is not None and math.isfinite(bound) else gain) for bound in (low, high)]
    return Interval(median=default_us * gain, low=bounds[0], high=bounds[1])
