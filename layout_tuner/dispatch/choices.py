"""A candidate chosen for a key, and how the choice came about."""

from __future__ import annotations

from dataclasses import dataclass

from layout_tuner.cache.records import DecisionRecord

from ..spec.declaration import Candidate
from ..tuning.timing import Interval
from .counters import saved_us


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A candidate for a key, and how it came about.

    Attributes:
        candidate: What to run.
        source: `pinned`, `forced`, `measured`, `imported`, `predicted` or `default`.
        frozen: Whether the process keeps it; a default taken because tuning was not possible just now is not kept.
        record: The decision it follows, if any.
        reason: Why the default stands in for a decision; empty where there is one, or nothing to choose.
        missed: Whether there was no decision anywhere when it was made.
        pending: Whether it only serves until the key has been tuned beside the calls.
    """

    candidate: Candidate
    source: str
    frozen: bool = True
    record: DecisionRecord | None = None
    reason: str = ""
    missed: bool = False
    pending: bool = False


def stand_in(default: Candidate, reason: str, *, frozen: bool = True) -> Choice:
    """The default in place of a decision that there is not."""
    return Choice(candidate=default, source="default", frozen=frozen, reason=reason, missed=True)


def saved_by(record: DecisionRecord | None) -> Interval | None:
    """What a call saves that follows a decision, against the default that was measured beside it."""
    if record is None:
        return None
    default = next((each for each in record.measurements if each.candidate == record.default_candidate), None)
    known = None if default is None else default.end_to_end_us
    return saved_us(known, record.gain, record.gain_low, record.gain_high)
