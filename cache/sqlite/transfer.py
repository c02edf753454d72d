"""Merging one SQLite file into another: every row is read, checked as `rows` checks it, and copied as it was read.

The rules are `bulk.put_decisions`'s: of two decisions in one slot the later stays, and one that cannot be believed
gives way to one that can. Rows pass one page at a time, so memory does not grow with the file.
"""

import functools
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from ..evidence import facts_order, newer, source_on, storable
from ..records import MAX_MEASUREMENTS, DecisionRecord, mapping_text, time_text
from ..validation import RefusedRowError
from .bulk import Tally
from .models import Decision, Environment, Measurement
from .queries import DECISION_SLOT, sound_facts
from .rows import CheckedRow, check_decision_row, environment_record, record_of

PAGE = 1000
PAGES = 10
"""Pages of one transaction: some seconds, for which nobody else writes to the file."""

_Row = tuple[Any, ...]
_Slot = tuple[Any, ...]


def _names(model: type) -> tuple[str, ...]:
    return tuple(column.name for column in model.__table__.columns)  # type: ignore[attr-defined]


_DECISION, _MEASUREMENT = _names(Decision), _names(Measurement)
# What identifies a row comes first.
assert _DECISION[0] == "id"
assert _MEASUREMENT[:2] == ("id", "decision_id")
_CONTENT, _EVIDENCE = _DECISION[1:], _MEASUREMENT[2:]
_SOURCE, _VARLEN, _FAILURE = (_DECISION.index("source"), _DECISION.index("varlen"), _MEASUREMENT.index("failure"))
_NO_FACTS = mapping_text({})


def transfer_environments(connection: sqlite3.Connection) -> None:
    """Merges the environments of the attached database `source` into `main`: the rule is `merge.Evidence`'s."""
    for row in connection.execute(f"SELECT {', '.join(_names(Environment))} FROM source.environments"):
        try:
            record = environment_record(dict(zip(_names(Environment), row)))
        except RefusedRowError:
            continue
        facts = mapping_text(record.facts)
        known = connection.execute("SELECT facts FROM main.environments WHERE id = ?", (record.id,)).fetchone()
        if known is None:
            connection.execute("INSERT INTO main.environments (id, facts) VALUES (?, ?)", (record.id, facts))
        elif not sound_facts(record.id, known[0]) or facts_order(known[0]) < facts_order(facts):
            connection.execute("UPDATE main.environments SET facts = ? WHERE id = ?", (facts, record.id))


def transfer(connection: sqlite3.Connection, host: str | None, after: int) -> tuple[Tally, int | None]:
    """Merges the next decisions of the attached database `source` into `main`, inside the transaction that is open.

    Args:
        connection: Has the other file attached.
        host: This host, where what others measured is to count as imported; None takes sources as they are.
        after: The row of the other file to go on after.

    Returns:
        What became of them, and the row to go on after; None at the end.
    """
    tally = Tally()
    connection.text_factory = str
    for _ in range(PAGES):
        try:
            done, following = _page(connection, host, after)
        except sqlite3.OperationalError as error:
            if "decode" not in str(error):
                raise
            # Bytes that are no text become characters that say so: slower, by a quarter of all that reading takes.
            connection.text_factory = functools.partial(str, encoding="utf-8", errors="replace")
            done, following = _page(connection, host, after)
        tally += done
        if following is None:
            return tally, None
        after = following
    return tally, after


def _page(connection: sqlite3.Connection, host: str | None, after: int) -> tuple[Tally, int | None]:
    """What `transfer` does, for one page; everything is read before anything is written."""
    statement = f"SELECT {', '.join(_DECISION)} FROM source.decisions WHERE id > ? ORDER BY id LIMIT {PAGE}"
    rows = connection.execute(statement, (after,)).fetchall()
    done = _put(connection, rows, host) if rows else Tally()
    return done, rows[-1][0] if len(rows) == PAGE else None


class _Incoming:
    """A decision that may be stored, with its rows as they were read."""

    __slots__ = ("checked", "measurements", "row")

    def __init__(self, row: _Row, measurements: Sequence[_Row], host: str | None) -> None:
        self.checked = _checked(row, measurements)
        if host is not None:
            self.checked["source"] = source_on(host, self.checked["source"], self.checked["host"])
        self.row = (*row[:_SOURCE], self.checked["source"], *row[_SOURCE + 1 :])
        # As `evidence.storable` has it.
        self.measurements = [each for each in measurements if each[_FAILURE] != "device"]

    @property
    def slot(self) -> _Slot:
        """Where it is stored."""
        return tuple([self.checked[name] for name in DECISION_SLOT])

    @property
    def record(self) -> DecisionRecord:
        """The decision itself, made when it is asked for: few have to be compared with another."""
        return storable(record_of(self.checked))

    def is_stored_as(self, row: _Row, measurements: Sequence[_Row]) -> bool:
        """Whether rows say the very same."""
        return (
            self.row[1:] == row[1:]
            and len(self.measurements) == len(measurements)
            and all(one[2:] == other[2:] for one, other in zip(self.measurements, measurements))
        )


def _put(connection: sqlite3.Connection, rows: Sequence[_Row], host: str | None) -> Tally:
    tally = Tally()
    measurements = _measurements(connection, "source", "BETWEEN ? AND ?", (rows[0][0], rows[-1][0]))
    wanted: dict[_Slot, _Incoming] = {}
    for row in rows:
        try:
            found = _Incoming(row, measurements.get(row[0], ()), host)
        except RefusedRowError:
            tally.refused += 1
            continue
        slot = found.slot
        if slot in wanted:
            # What was measured and what was imported of it may fall into one slot now.
            tally.kept += 1
            known = wanted[slot].record
            if newer(known, found.record) is known:
                continue
        wanted[slot] = found
    obsolete = _settle(connection, wanted, tally)
    connection.executemany("DELETE FROM main.measurements WHERE decision_id = ?", obsolete)
    connection.executemany("DELETE FROM main.decisions WHERE id = ?", obsolete)
    tally.replaced = len(obsolete)
    tally.added = len(wanted) - len(obsolete)
    _insert(connection, wanted.values())
    return tally


def _settle(connection: sqlite3.Connection, wanted: dict[_Slot, _Incoming], tally: Tally) -> list[tuple[int]]:
    """Takes out of `wanted` what gives way to what is stored; returns the ids of what gives way to it."""
    obsolete: list[tuple[int]] = []
    rivals: dict[int, _Slot] = {}
    for slot, found in wanted.items():
        known = connection.execute(_KNOWN, slot).fetchone()
        if known is None:
            continue
        if isinstance(known[1], str) and known[1] < time_text(found.checked["created_at"]):
            obsolete.append((known[0],))
        else:
            rivals[known[0]] = slot
    if not rivals:
        return obsolete
    these = f"IN ({', '.join('?' * len(rivals))})"
    stored = connection.execute(f"SELECT {', '.join(_DECISION)} FROM main.decisions WHERE id {these}", tuple(rivals))
    rows = stored.fetchall()
    measurements = _measurements(connection, "main", these, tuple(rivals))
    for row in rows:
        slot = rivals[row[0]]
        if _stays(row, measurements.get(row[0], ()), wanted[slot]):
            del wanted[slot]
            tally.kept += 1
        else:
            obsolete.append((row[0],))
    return obsolete


def _stays(row: _Row, measurements: Sequence[_Row], found: _Incoming) -> bool:
    """Whether a stored decision keeps its slot: it can be believed and is not older."""
    if found.is_stored_as(row, measurements):
        return True
    try:
        known = record_of(_checked(row, measurements))
    except RefusedRowError:
        return False
    return newer(known, found.record) is known


def _insert(connection: sqlite3.Connection, found: Iterable[_Incoming]) -> None:
    found = list(found)
    places = sorted({each.checked["environment_id"] for each in found})
    # One that the other file has no sound account of still needs a row.
    connection.executemany(
        f"INSERT INTO main.environments (id, facts) VALUES (?, '{_NO_FACTS}') ON CONFLICT (id) DO NOTHING",
        [(place,) for place in places],
    )
    (last,) = connection.execute("SELECT coalesce(max(id), 0) FROM main.decisions").fetchone()
    connection.executemany(
        f"INSERT INTO main.decisions (id, {', '.join(_CONTENT)}) VALUES (?{', ?' * len(_CONTENT)})",
        [(number, *each.row[1:]) for number, each in enumerate(found, last + 1)],
    )
    connection.executemany(
        f"INSERT INTO main.measurements (decision_id, {', '.join(_EVIDENCE)}) VALUES (?{', ?' * len(_EVIDENCE)})",
        [(number, *row[2:]) for number, each in enumerate(found, last + 1) for row in each.measurements],
    )


_KNOWN = f"SELECT id, created_at FROM main.decisions WHERE {' AND '.join(f'{name} = ?' for name in DECISION_SLOT)}"


def _checked(row: _Row, measurements: Sequence[_Row]) -> CheckedRow:
    """What the rows of a decision say; raises `RefusedRowError`."""
    named = dict(zip(_DECISION, row))
    # SQLite has no truth values; anything but its 0 and 1 stays what it is, and is refused.
    if type(row[_VARLEN]) is int and row[_VARLEN] in (0, 1):
        named["varlen"] = bool(row[_VARLEN])
    return check_decision_row(named, [dict(zip(_MEASUREMENT, each)) for each in measurements])


def _measurements(
    connection: sqlite3.Connection, schema: str, which: str, values: tuple[int, ...]
) -> dict[int, list[_Row]]:
    """The measurements of decisions, no more of each than show that they are too many."""
    found: dict[int, list[_Row]] = {}
    columns = ", ".join(_MEASUREMENT)
    statement = f"SELECT {columns} FROM {schema}.measurements WHERE decision_id {which} ORDER BY decision_id, id"
    for row in connection.execute(statement, values):
        kept = found.setdefault(row[1], [])
        if len(kept) <= MAX_MEASUREMENTS:
            kept.append(row)
    return found
