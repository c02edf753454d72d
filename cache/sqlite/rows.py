"""Records to rows and rows to records. A row is data from elsewhere: what it says is validated, never trusted.

Rows are checked as they are, before any record is made of them: a check takes a fraction of what a record takes, and
who merges a million rows needs few records.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, core_schema
from sqlalchemy import RowMapping
from typing_extensions import TypedDict

from ..hindsight import failure_of
from ..records import (
    MAX_MEASUREMENTS,
    DecisionRecord,
    EnvironmentRecord,
    Facts,
    KeyRecord,
    MeasurementRecord,
    MissRecord,
    Name,
    Samples,
    mapping_text,
    time_text,
)
from ..validation import refuse_launch_options, validated
from .models import KEY_COLUMNS

Row = RowMapping | Mapping[str, Any]
CheckedRow = dict[str, Any]
"""What a decision's row and its measurements' say, each column of the type that the record's field has."""

_MAX_JSON = 128 * 1024
_SAMPLES: TypeAdapter[tuple[float, ...]] = TypeAdapter(tuple[float, ...])


class _InJson:
    """Makes a column of a type one that holds it as a text of JSON."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        text = core_schema.str_schema(strict=True, max_length=_MAX_JSON)
        return core_schema.chain_schema([text, core_schema.json_schema(handler(source))])


def _columns(record: type, *left_out: str) -> dict[str, Any]:
    """The types of a record's fields, bounds included."""
    hints = get_type_hints(record, include_extras=True)
    return {field.name: hints[field.name] for field in fields(record) if field.name not in left_out}


def _row(columns: Mapping[str, Any]) -> Any:
    """The type of a table's rows: these columns, strictly, and any others."""
    make: Any = TypedDict  # of which a type checker wants the columns written out
    row = make("row", dict(columns))
    row.__pydantic_config__ = ConfigDict(strict=True, allow_inf_nan=False)
    return row


_FACTS = Annotated[Facts, _InJson()]
_KEY = _columns(KeyRecord)
_MEASUREMENT = _row(_columns(MeasurementRecord) | {"samples": Annotated[Samples, _InJson()], "counts": _FACTS})
_DECISION: TypeAdapter[CheckedRow] = TypeAdapter(
    _row(
        _KEY
        | _columns(DecisionRecord, "key", "environment")
        | {
            "environment_id": Name,
            "measurements": Annotated[list[_MEASUREMENT], Field(max_length=MAX_MEASUREMENTS)],  # type: ignore[valid-type]
        }
    )
)
_ENVIRONMENT: TypeAdapter[CheckedRow] = TypeAdapter(_row(_columns(EnvironmentRecord) | {"facts": _FACTS}))
_MISS: TypeAdapter[CheckedRow] = TypeAdapter(
    _row(_KEY | _columns(MissRecord, "key", "environment") | {"environment_id": Name})
)


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
    return record_of(check_decision_row(row, [dict(each) for each in measurements]))


def check_decision_row(row: Row, measurements: Sequence[dict[str, Any]]) -> CheckedRow:
    """What `decision_record` makes a record of, column by column.

    Raises:
        RefusedRowError: A column has the wrong type, is out of bounds, or carries a launch option.
    """
    checked = validated(_DECISION, {**row, "measurements": measurements})
    texts = [checked["form"], checked["op"], checked["candidate"], checked["default_candidate"]]
    for each in checked["measurements"]:
        texts += (each["candidate"], *each["counts"])
        each["failure"] = failure_of(each["failure"], each["reason"])
    refuse_launch_options(texts)
    return checked


def record_of(checked: CheckedRow) -> DecisionRecord:
    """The decision of a checked row."""
    columns = dict(checked)
    key = _key(columns)
    environment = columns.pop("environment_id")
    measurements = tuple([MeasurementRecord(**each) for each in columns.pop("measurements")])
    return DecisionRecord(key=key, environment=environment, measurements=measurements, **columns)


def environment_record(row: Row) -> EnvironmentRecord:
    """The environment of a row; raises `RefusedRowError`."""
    checked = validated(_ENVIRONMENT, dict(row))
    refuse_launch_options([checked["id"], *checked["facts"]])
    return EnvironmentRecord(**checked)


def miss_record(row: Row) -> MissRecord:
    """The miss of a row; raises `RefusedRowError`."""
    columns = validated(_MISS, dict(row))
    refuse_launch_options([columns["form"], columns["op"]])
    key = _key(columns)
    return MissRecord(key=key, environment=columns.pop("environment_id"), **columns)


def _key(columns: CheckedRow) -> KeyRecord:
    """Takes the key's columns out of a row."""
    return KeyRecord(**{name: columns.pop(name) for name in KEY_COLUMNS})
