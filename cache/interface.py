"""What every store of decisions offers, whatever it keeps them in."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from .records import DecisionRecord, EnvironmentRecord, KeyRecord, MissRecord


class DecisionStore(Protocol):
    """What every store offers."""

    @property
    def name(self) -> str:
        """Where it keeps things, for people."""

    def publish(self, decision: DecisionRecord, environment: EnvironmentRecord) -> DecisionRecord:
        """Stores a decision at once and returns it as stored."""

    def evidence(self, key: KeyRecord, environment: str) -> tuple[DecisionRecord, ...]:
        """Every decision for a key in an environment."""

    def lookup(self, key: KeyRecord, environment: str) -> DecisionRecord | None:
        """The decision that is believed for a key in an environment."""

    def decisions(self, *, environment: str | None = None, op: str | None = None) -> Iterator[DecisionRecord]:
        """Every decision, read page by page."""

    def environments(self) -> list[EnvironmentRecord]:
        """Every environment."""

    def record_misses(self, misses: Iterable[MissRecord]) -> None:
        """Adds misses to their counts."""

    def misses(self, environment: str | None = None) -> list[MissRecord]:
        """Every miss, the most frequent first."""

    def close(self) -> None:
        """Gives back files and connections; the store opens them again when it is used again."""
