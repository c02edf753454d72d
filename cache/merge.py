"""Merges the evidence of several stores.

A store is a set of slots (key, environment, source, host), each with one writer, so merging is: all slots, and of two
states of one slot the later. That is commutative, associative and idempotent. Which decision of a key is then
believed is `evidence.choose`'s question; decisions that contradict each other beyond the noise are listed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations

from . import misses as counts
from .evidence import SOURCE_RANK, digest, facts_order, newer
from .interface import DecisionStore
from .records import DecisionRecord, EnvironmentRecord, KeyRecord, MeasurementRecord, MissRecord, mapping_text

Slot = tuple[str, KeyRecord, str, str]


def slot_of(record: DecisionRecord) -> Slot:
    """The slot of a decision: key, environment, source and host."""
    return record.environment, record.key, record.source, record.host


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Two decisions for one key that cannot both be right.

    Attributes:
        one: A decision.
        other: The other.
        reason: What they disagree about.
    """

    one: DecisionRecord
    other: DecisionRecord
    reason: str


@dataclass(kw_only=True)
class Evidence:
    """Everything that stores hold, by slot."""

    environments: dict[str, EnvironmentRecord] = field(default_factory=dict)
    decisions: dict[Slot, DecisionRecord] = field(default_factory=dict)
    misses: dict[tuple[str, KeyRecord, str], MissRecord] = field(default_factory=dict)

    def add_environment(self, record: EnvironmentRecord) -> None:
        """Adds an environment; of two with one id, the same one wins in whatever order they come."""
        known = self.environments.get(record.id)
        self.environments[record.id] = (
            record if known is None else max(known, record, key=lambda each: facts_order(mapping_text(each.facts)))
        )

    def add_decision(self, record: DecisionRecord) -> None:
        """Adds a decision; of two in one slot the later wins."""
        slot = slot_of(record)
        known = self.decisions.get(slot)
        self.decisions[slot] = record if known is None else newer(known, record)

    def add_miss(self, record: MissRecord) -> None:
        """Adds a miss count."""
        slot = (record.environment, record.key, record.host)
        known = self.misses.get(slot)
        self.misses[slot] = record if known is None else counts.merged(known, record)

    def conflicts(self) -> Iterator[Conflict]:
        """Every pair of decisions that contradict each other."""
        groups: dict[tuple[str, KeyRecord], list[DecisionRecord]] = {}
        for record in self.decisions.values():
            groups.setdefault((record.environment, record.key), []).append(record)
        for group in groups.values():
            yield from conflicts(group)


def gather(stores: Iterable[DecisionStore]) -> Evidence:
    """The merged evidence of stores."""
    merged = Evidence()
    for store in stores:
        for environment in store.environments():
            merged.add_environment(environment)
        for record in store.decisions():
            merged.add_decision(record)
        for miss in store.misses():
            merged.add_miss(miss)
    return merged


def conflicts(records: Iterable[DecisionRecord]) -> Iterator[Conflict]:
    """Pairs among the decisions of one key that contradict each other.

    Decisions of unlike strength do not: the stronger source simply wins. Nor do two hosts whose winners lie within each
    other's noise.
    """
    measured = [record for record in records if SOURCE_RANK[record.source] >= SOURCE_RANK["imported"]]
    for one, other in combinations(
        sorted(measured, key=lambda record: (record.host, record.source, digest(record))), 2
    ):
        if (one.source == "pinned") != (other.source == "pinned"):
            continue
        if reason := _contradiction(one, other) or _contradiction(other, one):
            yield Conflict(one=one, other=other, reason=reason)


def _contradiction(one: DecisionRecord, other: DecisionRecord) -> str | None:
    """The reason why `other` contradicts the winner of `one`; None where it does not."""
    seen = _measurement(other, one.candidate, one.revision)
    if seen is not None and seen.state == "wrong":
        return f"{one.candidate} won on {one.host} and gave wrong results on {other.host}"
    if one.candidate == other.candidate:
        return None
    if one.source == "pinned":
        return f"pinned to {one.candidate} by {one.host} and to {other.candidate} by {other.host}"
    if _faster(one, one.candidate, other) and _faster(other, other.candidate, one):
        return f"{one.candidate} is faster on {one.host}, {other.candidate} on {other.host}, both beyond the noise"
    return None


def _faster(record: DecisionRecord, winner: str, loser: DecisionRecord) -> bool:
    """Whether a record's own intervals put its winner ahead of another record's."""
    first = _measurement(record, winner, record.revision)
    second = _measurement(record, loser.candidate, loser.revision)
    if first is None or second is None or first.state != "ok" or second.state != "ok":
        return False
    if first.interval_high_us is None or second.interval_low_us is None:
        return loser.candidate == record.default_candidate and (record.gain_low or 0.0) > 0.0
    return first.interval_high_us < second.interval_low_us


def _measurement(record: DecisionRecord, candidate: str, revision: str) -> MeasurementRecord | None:
    for each in record.measurements:
        if (each.candidate, each.revision) == (candidate, revision):
            return each
    return None
