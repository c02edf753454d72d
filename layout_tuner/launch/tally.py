"""How often a choice ran: every hit adds one to the count of its choice."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ..spec.keys import Key

if TYPE_CHECKING:
    from ..tuning.timing import Interval


class Tally:
    """The calls that one choice ran.

    Attributes:
        calls: Number of calls.
        flushed: Number of these calls that are recorded as misses.
        missed: Number of these calls that came when there was no decision, neither in memory nor stored.
        key: The key of the calls.
        environment: Id of their environment.
        candidate: Id of the candidate that runs.
        source: Where the choice comes from.
        reason: Why the default runs in place of a decision; empty where there is a decision.
        saved_us: Microseconds that a call saves against the default; None where that was not measured.
        first_seen: When the tally was made, at the first call.
    """

    __slots__ = (
        "calls", "candidate", "environment", "first_seen", "flushed", "key", "missed", "reason", "saved_us", "source",
    )  # fmt: skip

    def __init__(
        self,
        key: Key | None = None,
        environment: str = "",
        *,
        candidate: str = "",
        source: str = "",
        reason: str = "",
        saved_us: Interval | None = None,
    ) -> None:
        self.calls = self.flushed = self.missed = 0
        self.key = key
        self.environment = environment
        self.candidate = candidate
        self.source = source
        self.reason = reason
        self.saved_us = saved_us
        self.first_seen = datetime.now(UTC)

    @property
    def place(self) -> tuple[object, ...]:
        """Equal for tallies that count calls of the same choice."""
        return (self.key, self.environment, self.candidate, self.source, self.reason)


# Counts the calls outside every `enable`, and is never reported.
UNROUTED = Tally()
