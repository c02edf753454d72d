"""How often a choice ran: the count that a hit adds one to."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ..spec.keys import Key

if TYPE_CHECKING:
    from ..tuning.timing import Interval


class Tally:
    """Calls that one choice ran.

    Attributes:
        calls: How many.
        flushed: How many of them are recorded as misses.
        missed: How many of them found no decision anywhere when they came.
        key: The key.
        environment: Its environment's id.
        candidate: What runs.
        source: Where the choice comes from.
        reason: Why the default runs in place of a decision; empty where there is one.
        saved_us: What a call saves against the default.
        first_seen: When the first came.
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
        """Tallies of one place count the same thing."""
        return (self.key, self.environment, self.candidate, self.source, self.reason)


# What is counted outside every `enable`, and never reported.
UNROUTED = Tally()
