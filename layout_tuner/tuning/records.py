"""Turns keys and outcomes of the tuner into records of the cache, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

from layout_tuner.cache.records import DecisionRecord, EnvironmentRecord, KeyRecord, MeasurementRecord

from .. import __version__
from ..device.environment import Environment
from ..spec.declaration import Candidate
from ..spec.keys import Key
from .tuner import Measurement, Outcome


def key_record(key: Key) -> KeyRecord:
    """A key as the cache stores it."""
    return KeyRecord(**key.plain())


def key_of(record: KeyRecord) -> Key:
    """A stored key."""
    return Key.of({field.name: getattr(record, field.name) for field in fields(Key)})


def outcome_record(
    key: Key, where: Environment, outcome: Outcome, winner: Candidate
) -> tuple[DecisionRecord, EnvironmentRecord]:
    """The decision for a tuned key, and the environment it holds in, as the cache stores them."""
    gain = outcome.gain
    decision = DecisionRecord(
        key=key_record(key),
        environment=where.id,
        candidate=winner.id,
        revision=winner.revision,
        default_candidate=outcome.default,
        source="measured",
        gain=gain.median if gain else 0.0,
        gain_low=finite(gain.low) if gain else None,
        gain_high=finite(gain.high) if gain else None,
        measurements=tuple(measurement_record(measurement) for measurement in outcome.measurements),
        version=__version__,
    )
    return decision, EnvironmentRecord(id=where.id, facts=dict(where.facts))


def check_record(
    key: Key, where: Environment, found: Sequence[Measurement], candidate: Candidate, default: Candidate
) -> tuple[DecisionRecord, EnvironmentRecord]:
    """What checking came to, where nothing was timed, as the cache stores it.

    Args:
        key: The key.
        where: In which environment.
        found: Of candidates that were checked.
        candidate: The one that it is about.
        default: The key's default.
    """
    decision = DecisionRecord(
        key=key_record(key),
        environment=where.id,
        candidate=candidate.id,
        revision=candidate.revision,
        default_candidate=default.id,
        source="checked",
        measurements=tuple(measurement_record(each) for each in found),
        version=__version__,
    )
    return decision, EnvironmentRecord(id=where.id, facts=dict(where.facts))


def measurement_record(measurement: Measurement) -> MeasurementRecord:
    """A candidate's measurement as the cache stores it."""
    return MeasurementRecord(
        candidate=measurement.id,
        revision=measurement.revision,
        state=measurement.state,
        reason=measurement.reason[:2000],
        failure=measurement.failure,
        end_to_end_us=measurement.end_to_end_us,
        kernel_us=measurement.kernel_us,
        relayout_us=measurement.relayout_us,
        error=finite(measurement.error),
        samples=measurement.samples,
        counts={"binary": measurement.binary} if measurement.binary else {},
        measured_at=measurement.measured_at,
    )


def measurement_of(record: MeasurementRecord) -> Measurement:
    """A stored measurement as the tuner takes it, with its own time."""
    return Measurement(
        id=record.candidate,
        revision=record.revision,
        state=record.state,
        reason=record.reason,
        failure=record.failure,
        error=record.error,
        binary=str(record.counts.get("binary", "")),
        measured_at=record.measured_at,
    )


def finite(value: float | None) -> float | None:
    """The number, or None where it is NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None
