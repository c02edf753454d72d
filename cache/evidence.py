"""Chooses which of several decisions for one key is believed.

`choose` and `newer` rest on total orders of the records alone, so every reader of the same rows, in whatever order,
comes to the same answer.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta

from .records import (
    MAX_MEASUREMENTS,
    DecisionRecord,
    FailureClass,
    MeasurementRecord,
    Source,
    mapping_text,
    utc_now,
)
from .validation import DECISION

SOURCE_RANK = {"pinned": 3, "measured": 2, "imported": 1, "predicted": 0, "checked": -1}
"""Strength of a stored source. A choice forced by an environment variable stands between pinned and measured."""

Lifetimes = dict[FailureClass, timedelta | None]

LIFETIMES: Lifetimes = {
    "compile": None,
    "overflow": None,
    "wrong": None,
    "crash": timedelta(days=1),
    "memory": timedelta(days=1),
    "timeout": timedelta(days=7),
    "device": timedelta(0),
}
"""How long a failure is believed. None: as long as the revision and the environment (with its compiler) last."""


def digest(record: DecisionRecord) -> str:
    """SHA-256 over the record's canonical JSON."""
    return hashlib.sha256(DECISION.dump_json(record)).hexdigest()


def strength(record: DecisionRecord) -> tuple[int, bool, int, datetime, str]:
    """Sort key of evidence: source, a gain outside the noise, number of samples, age, content as the last resort."""
    samples = sum(len(each.samples) for each in record.measurements if each.state == "ok")
    certain = record.gain_low is not None and record.gain_low > 0
    return SOURCE_RANK[record.source], certain, samples, record.created_at, digest(record)


def believed(failure: MeasurementRecord, record: DecisionRecord) -> bool:
    """Whether a failed measurement of a decision still counts: its class's lifetime has not run out.

    A failure dated in the future, as a clock that jumped leaves behind, has no age and counts only if its class never
    expires.
    """
    if failure.state == "wrong":
        return True
    if failure.state != "failed":
        return False
    lifetime = LIFETIMES.get(failure.failure, timedelta(days=1))
    if lifetime is None:
        return True
    age = utc_now() - (failure.measured_at or record.created_at)
    return timedelta(0) <= age < lifetime


def failures(records: Iterable[DecisionRecord]) -> dict[tuple[str, str], MeasurementRecord]:
    """Failures that still count, by candidate and revision; a wrong result weighs more than any other."""
    by_candidate: dict[tuple[str, str], MeasurementRecord] = {}
    for record in records:
        for each in record.measurements:
            if believed(each, record):
                place = (each.candidate, each.revision)
                if place not in by_candidate or each.state == "wrong":
                    by_candidate[place] = each if each.measured_at else replace(each, measured_at=record.created_at)
    return by_candidate


def rights(records: Iterable[DecisionRecord]) -> set[tuple[str, str, str]]:
    """Candidates that were found right on a device: id, revision, and digest of the binary; empty where none is known.

    What earlier versions measured is of no known binary.
    """
    return {
        (each.candidate, each.revision, str(each.counts.get("binary", "")))
        for record in records
        if record.source != "predicted"
        for each in record.measurements
        if each.state == "ok"
    }


def decides(record: DecisionRecord) -> bool:
    """Whether a record chose its candidate, rather than having found it right."""
    return record.source != "checked"


def choose(records: Iterable[DecisionRecord]) -> DecisionRecord | None:
    """The strongest decision whose winner is not known to fail; None where there is none."""
    kept = tuple(records)
    bad = failures(kept)
    usable = [record for record in kept if decides(record) and (record.candidate, record.revision) not in bad]
    if len(usable) <= 1:
        return usable[0] if usable else None
    return max(usable, key=strength)


def newer(one: DecisionRecord, other: DecisionRecord) -> DecisionRecord:
    """The later of two states of one slot (same key, environment, source and host)."""
    return max(one, other, key=lambda record: (record.created_at, digest(record)))


def succeed(old: DecisionRecord, new: DecisionRecord) -> DecisionRecord:
    """A decision as the successor of the one in its slot.

    The evidence of candidates that the new one does not mention, or skipped, is kept: a new candidate is measured
    against the incumbent alone, and one that is known to fail is not tried again. The moment never goes backward within
    a slot, whatever the clock did, so that the newer record stays the newer one.
    """
    measured = {each.candidate: each for each in new.measurements}
    kept = [
        each if each.measured_at else replace(each, measured_at=old.created_at)
        for each in old.measurements
        if _outlives(each, measured.get(each.candidate)) and (each.state != "failed" or believed(each, old))
    ]
    stays = {each.candidate for each in kept}
    fresh = [each for each in new.measurements if each.candidate not in stays]
    return replace(
        new,
        created_at=max(new.created_at, old.created_at + timedelta(microseconds=1)),
        measurements=(*fresh, *kept)[:MAX_MEASUREMENTS],
    )


def _outlives(old: MeasurementRecord, new: MeasurementRecord | None) -> bool:
    """Whether an old measurement stays: there is no new one of the candidate, or it was skipped."""
    return new is None or (new.state == "skipped" != old.state and new.revision == old.revision)


def storable(record: DecisionRecord) -> DecisionRecord:
    """The record without failures of the class `device`, which say nothing about a candidate."""
    if all(each.failure != "device" for each in record.measurements):
        return record
    return replace(record, measurements=tuple(each for each in record.measurements if each.failure != "device"))


def with_failure(record: DecisionRecord, failure: MeasurementRecord, host: str) -> DecisionRecord:
    """The decision with a failure of its winner recorded, for the host that saw it fail."""
    failure = replace(failure, candidate=record.candidate, revision=record.revision, measured_at=utc_now())
    others = [each for each in record.measurements if each.candidate != record.candidate]
    return replace(record, measurements=(failure, *others)[:MAX_MEASUREMENTS], created_at=utc_now(), host=host)


def facts_order(facts: str) -> tuple[bool, str]:
    """Sort key of the facts of an environment, as canonical JSON: none before any, then by content."""
    return facts != mapping_text({}), facts


def source_on(host: str, source: Source, made_by: str) -> Source:
    """As what a decision of a source counts on a host: what the host measured itself stays its own, as when a backup
    comes home."""
    return "imported" if source == "measured" and made_by != host else source


def imported(record: DecisionRecord, host: str) -> DecisionRecord:
    """The record as it counts on a host."""
    source = source_on(host, record.source, record.host)
    return record if source == record.source else replace(record, source=source)
