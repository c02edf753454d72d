"""Records to rows and rows to records. A row is data from elsewhere: what it says is validated, never trusted."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import RowMapping

from ..hindsight import failure_of
from ..records import (
    MAX_MAPPING,
    MAX_SAMPLES,
    DecisionRecord,
    EnvironmentRecord,
    Fact,
    KeyRecord,
    MeasurementRecord,
    MissRecord,
    mapping_text,
    parse_time,
    time_text,
)
from ..validation import RefusedRowError, check_decision, check_environment, check_miss
from .models import KEY_COLUMNS

Row = RowMapping | Mapping[str, Any]
_Parsed = TypeVar("_Parsed")

_MAX_JSON = 128 * 1024
_SAMPLES: TypeAdapter[tuple[float, ...]] = TypeAdapter(tuple[float, ...])
_MAPPING: TypeAdapter[dict[str, Fact]] = TypeAdapter(dict[str, Fact])


def key_row(key: KeyRecord) -> dict[str, Any]:
    """The key's columns."""
    return {name: getattr(key, name) for name in KEY_COLUMNS}


def decision_row(record: DecisionRecord) -> dict[str, Any]:
    """The columns of a decision, without its id."""
    return {
        "environment_id": record.environment,
        **key_row(record.key),
        "candidate": record.candidate,
        "revision": record.revision,
        "default_candidate": record.default_candidate,
        "source": record.source,
        "gain": record.gain,
        "gain_low": record.gain_low,
        "gain_high": record.gain_high,
        "created_at": time_text(record.created_at),
        "host": record.host,
        "version": record.version,
    }


def measurement_row(record: MeasurementRecord, decision_id: int) -> dict[str, Any]:
    """The columns of a measurement, without its id."""
    return {
        "decision_id": decision_id,
        "candidate": record.candidate,
        "revision": record.revision,
        "state": record.state,
        "reason": record.reason,
        "failure": record.failure,
        "end_to_end_us": record.end_to_end_us,
        "kernel_us": record.kernel_us,
        "relayout_us": record.relayout_us,
        "interval_low_us": record.interval_low_us,
        "interval_high_us": record.interval_high_us,
        "error": record.error,
        "sample_count": len(record.samples),
        "samples": _SAMPLES.dump_json(record.samples).decode(),
        "counts": mapping_text(record.counts),
        "measured_at": None if record.measured_at is None else time_text(record.measured_at),
    }


def environment_row(record: EnvironmentRecord) -> dict[str, Any]:
    """The columns of an environment."""
    return {"id": record.id, "facts": mapping_text(record.facts)}


def miss_row(record: MissRecord) -> dict[str, Any]:
    """The columns of a miss, without its id."""
    return {
        "environment_id": record.environment,
        **key_row(record.key),
        "count": record.count,
        "first_seen": time_text(record.first_seen),
        "last_seen": time_text(record.last_seen),
        "reason": record.reason,
        "host": record.host,
    }


def decision_record(row: Row, measurements: Sequence[Row]) -> DecisionRecord:
    """The decision of a row and its measurements' rows; raises `RefusedRowError`."""
    return check_decision(
        DecisionRecord(
            key=_key(row),
            environment=row["environment_id"],
            candidate=row["candidate"],
            revision=row["revision"],
            default_candidate=row["default_candidate"],
            source=row["source"],
            gain=_number(row["gain"]),
            gain_low=_number(row["gain_low"]),
            gain_high=_number(row["gain_high"]),
            measurements=tuple(_measurement(each) for each in measurements),
            created_at=_moment(row["created_at"]),
            host=row["host"],
            version=row["version"],
        )
    )


def environment_record(row: Row) -> EnvironmentRecord:
    """The environment of a row; raises `RefusedRowError`."""
    return check_environment(EnvironmentRecord(id=row["id"], facts=_mapping(row["facts"])))


def miss_record(row: Row) -> MissRecord:
    """The miss of a row; raises `RefusedRowError`."""
    return check_miss(
        MissRecord(
            key=_key(row),
            environment=row["environment_id"],
            count=row["count"],
            first_seen=_moment(row["first_seen"]),
            last_seen=_moment(row["last_seen"]),
            reason=row["reason"],
            host=row["host"],
        )
    )


def _key(row: Row) -> KeyRecord:
    return KeyRecord(**{name: row[name] for name in KEY_COLUMNS})


def _measurement(row: Row) -> MeasurementRecord:
    return MeasurementRecord(
        candidate=row["candidate"],
        revision=row["revision"],
        state=row["state"],
        reason=row["reason"],
        failure=failure_of(row["failure"], row["reason"]),
        end_to_end_us=_number(row["end_to_end_us"]),
        kernel_us=_number(row["kernel_us"]),
        relayout_us=_number(row["relayout_us"]),
        interval_low_us=_number(row["interval_low_us"]),
        interval_high_us=_number(row["interval_high_us"]),
        error=_number(row["error"]),
        samples=_samples(row["samples"]),
        counts=_mapping(row["counts"]),
        measured_at=None if row["measured_at"] is None else _moment(row["measured_at"]),
    )


def _number(stored: Any) -> Any:
    # SQLite hands a whole number back as an int from a column that holds floats.
    return float(stored) if isinstance(stored, int) and not isinstance(stored, bool) else stored


def _moment(stored: Any) -> Any:
    return parse_time(stored)


def _samples(stored: Any) -> tuple[float, ...]:
    samples = _json(_SAMPLES, "samples", stored)
    if len(samples) > MAX_SAMPLES:
        raise RefusedRowError(f"samples: {len(samples)}, at most {MAX_SAMPLES}")
    return samples


def _mapping(stored: Any) -> dict[str, Fact]:
    if stored == "{}":
        # What nearly every measurement has.
        return {}
    mapping = _json(_MAPPING, "mapping", stored)
    if len(mapping) > MAX_MAPPING:
        raise RefusedRowError(f"mapping: {len(mapping)} entries, at most {MAX_MAPPING}")
    return mapping


def _json(adapter: TypeAdapter[_Parsed], name: str, stored: Any) -> _Parsed:
    if not isinstance(stored, str) or len(stored) > _MAX_JSON:
        raise RefusedRowError(f"{name}: wanted at most {_MAX_JSON} characters of JSON")
    try:
        return cast(_Parsed, adapter.validator.validate_json(stored))
    except ValidationError:
        raise RefusedRowError(f"{name}: not the JSON that is wanted (got {stored[:40]!r})") from None
