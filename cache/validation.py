"""Validates every record on its way into a file and on its way out of one."""

import re
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from layout_tuner.errors import CacheError

from .records import DecisionRecord, EnvironmentRecord, MissRecord

_Checked = TypeVar("_Checked")

DECISION: TypeAdapter[DecisionRecord] = TypeAdapter(DecisionRecord)
ENVIRONMENT: TypeAdapter[EnvironmentRecord] = TypeAdapter(EnvironmentRecord)
MISS: TypeAdapter[MissRecord] = TypeAdapter(MissRecord)

# Launch options that this product never takes from anywhere, least of all from a row.
_REFUSED = re.compile(r"num[_-]?(warps|stages)", re.IGNORECASE)


class RefusedRowError(CacheError):
    """A row that SQL accepts and that is no valid record."""


def check_decision(record: DecisionRecord) -> DecisionRecord:
    """The record, validated field by field.

    Raises:
        RefusedRowError: A field has the wrong type, is out of bounds, or carries a launch option.
    """
    checked = validated(DECISION, record)
    texts = [checked.key.form, checked.key.op, checked.candidate, checked.default_candidate]
    texts += [text for each in checked.measurements for text in (each.candidate, *each.counts)]
    refuse_launch_options(texts)
    return checked


def check_environment(record: EnvironmentRecord) -> EnvironmentRecord:
    """The record, validated field by field; raises `RefusedRowError`."""
    checked = validated(ENVIRONMENT, record)
    refuse_launch_options([checked.id, *checked.facts])
    return checked


def check_miss(record: MissRecord) -> MissRecord:
    """The record, validated field by field; raises `RefusedRowError`."""
    checked = validated(MISS, record)
    refuse_launch_options([checked.key.form, checked.key.op])
    return checked


def validated(adapter: TypeAdapter[_Checked], value: object) -> _Checked:
    """What a type makes of a value; raises `RefusedRowError`."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise RefusedRowError(explain(error)) from None


def explain(error: ValidationError) -> str:
    """Every fault of a validation error, as one line."""
    return "; ".join(f"{'.'.join(map(str, fault['loc'])) or 'row'}: {_fault(fault)}" for fault in error.errors()[:8])


def _fault(fault: Any) -> str:
    shown = repr(fault.get("input"))
    return f"{fault['msg']} (got {shown if len(shown) <= 60 else shown[:57] + '...'})"


def refuse_launch_options(texts: Iterable[str]) -> None:
    """Raises `RefusedRowError` where one of the texts names a launch option."""
    # No launch option has a line break in it, so one search sees the same as one for each text.
    together = "\n".join(texts)
    if match := _REFUSED.search(together):
        within = next(text for text in together.split("\n") if match.group() in text)
        raise RefusedRowError(f"{match.group()} is not accepted anywhere in this product (found in {within[:80]!r})")
