"""Stored decisions as a table for people and as JSON for machines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .common import microseconds, percent, plain, scientific

if TYPE_CHECKING:
    from rich.table import Table

    from layout_tuner.cache.records import DecisionRecord, KeyRecord, MeasurementRecord


def sizes_text(key: KeyRecord) -> str:
    """A key's sizes as people write them, with dtype and packing."""
    sizes = " ".join(f"{name}={size}" for name in ("B", "T", "H", "HV", "K", "V") if (size := getattr(key, name)))
    return f"{sizes} {key.dtype}{' packed' if key.varlen else ''}"


def key_cell(key: KeyRecord) -> str:
    """A key in a table: its sizes, and its form below."""
    return f"{plain(sizes_text(key))}\n{plain(key.form)}"


def decision_table(rows: Iterable[tuple[DecisionRecord, str]]) -> Table:
    """A row for every candidate of every decision.

    Args:
        rows: Decisions, each with a word on its origin, such as `tuned now`.
    """
    from rich.table import Table

    rows = list(rows)
    counted = any(measurement.counts for decision, _ in rows for measurement in decision.measurements)
    table = Table(show_lines=False, pad_edge=False)
    for heading in ("op", "key", "candidate"):
        table.add_column(heading, overflow="fold")
    for heading in ("end to end us", "kernel us", "transpose us", "error", "against default"):
        table.add_column(heading, justify="right", overflow="fold")
    if counted:
        table.add_column("work units", justify="right", overflow="fold")
    table.add_column("", overflow="fold")
    for decision, word in rows:
        key = decision.key
        first = True
        for each in decision.measurements:
            wins = each.candidate == decision.candidate
            default = each.candidate == decision.default_candidate
            note = f"WINNER ({word})" if wins else (f"{each.state}: {each.reason}" if each.state != "ok" else "")
            table.add_row(
                plain(key.op) if first else "",
                key_cell(key) if first else "",
                plain(each.candidate) + (" (default)" if default else ""),
                microseconds(each.end_to_end_us),
                microseconds(each.kernel_us),
                microseconds(each.relayout_us),
                scientific(each.error),
                "" if default else against_default(decision, each.end_to_end_us),
                *([work_units(each)] if counted else []),
                plain(note),
            )
            first = False
        if not decision.measurements:
            unknown = ["-", "-", "-", "-", "", *(["-"] if counted else [])]
            table.add_row(plain(key.op), key_cell(key), plain(decision.candidate), *unknown, plain(word))
        table.add_section()
    for column in table.columns[3 : 9 if counted else 8]:
        # A number is never cut, however narrow the terminal is: without its exponent it would be another one.
        column.min_width = max(map(len, [*map(str, column.cells), *str(column.header).split()]))
    return table


def work_units(measurement: MeasurementRecord) -> str:
    """The work units that a prediction rests on; they are counts, not times."""
    number = measurement.counts.get("work units")
    return f"{number:,.0f}" if isinstance(number, int | float) else "-"


def against_default(decision: DecisionRecord, end_to_end_us: float | None) -> str:
    """How much faster or slower than the default a candidate was, as a signed share of the default's time."""
    default = next((m for m in decision.measurements if m.candidate == decision.default_candidate), None)
    if default is None or not default.end_to_end_us or end_to_end_us is None:
        return "-"
    share = end_to_end_us / default.end_to_end_us - 1.0
    return f"{'+' if share > 0 else ''}{percent(share)}"


def decision_json(decision: DecisionRecord) -> dict[str, Any]:
    """A decision as one JSON object, key fields first."""
    key = decision.key
    return {
        **{name: getattr(key, name) for name in ("op", "B", "T", "H", "HV", "K", "V", "varlen", "dtype", "form")},
        "candidate": decision.candidate,
        "default": decision.default_candidate,
        "source": decision.source,
        "gain": decision.gain,
        "gain_low": decision.gain_low,
        "gain_high": decision.gain_high,
        "environment": decision.environment,
        "revision": decision.revision,
        "created_at": decision.created_at.isoformat(),
        "host": decision.host,
        "version": decision.version,
        "measurements": [
            {
                "candidate": measurement.candidate,
                "state": measurement.state,
                "reason": measurement.reason,
                "end_to_end_us": measurement.end_to_end_us,
                "kernel_us": measurement.kernel_us,
                "relayout_us": measurement.relayout_us,
                "error": measurement.error,
                "samples_us": list(measurement.samples),
                **counts(measurement.counts),
            }
            for measurement in decision.measurements
        ],
    }


def counts(stored: Mapping[str, object]) -> dict[str, object]:
    """The counts behind a prediction, as a member of a JSON object; empty where there are none."""
    return {"counts": dict(stored)} if stored else {}
