"""Stores many decisions at once, for merging and importing."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import Column, Connection, MetaData, Table, and_, delete, func, insert, select
from sqlalchemy.schema import CreateTable

from ..evidence import newer
from ..faults import StoreError
from ..records import DecisionRecord, time_text
from .queries import DECISION_SLOT, DECISIONS, MEASUREMENTS, records_of, slot_values
from .rows import decision_row, measurement_row

BATCH = 1000

_Record = TypeVar("_Record")

_WANTED = Table(
    "wanted_slots",
    MetaData(),
    *(Column(name, DECISIONS.c[name].type) for name in DECISION_SLOT),
    prefixes=["TEMPORARY"],
)
_FOUND = select(*(DECISIONS.c[name] for name in DECISION_SLOT), DECISIONS.c.id, DECISIONS.c.created_at).join_from(
    _WANTED, DECISIONS, and_(*(DECISIONS.c[name] == _WANTED.c[name] for name in DECISION_SLOT))
)


@dataclass(kw_only=True)
class Tally:
    """How many decisions brought to a store were added, replaced others, were not needed, or were refused.

    Attributes:
        added: Their slot held no decision.
        replaced: Took the place of an older one.
        kept: Were there already, or older than what was.
        refused: Rows that could not be believed.
    """

    added: int = 0
    replaced: int = 0
    kept: int = 0
    refused: int = 0

    @property
    def seen(self) -> int:
        """How many there were."""
        return self.added + self.replaced + self.kept + self.refused

    def __iadd__(self, other: "Tally") -> "Tally":
        self.added += other.added
        self.replaced += other.replaced
        self.kept += other.kept
        self.refused += other.refused
        return self


Progress = Callable[[str, int, int | None], None]
"""Is told what is being done, how much of it is, and of how much; None: that cannot be told."""


def silent(what: str, done: int, total: int | None) -> None:
    """Tells nobody."""


def told(records: Iterable[_Record], progress: Callable[[int], None]) -> Iterator[_Record]:
    """The records one by one; from time to time calls `progress` with the count so far."""
    for number, record in enumerate(records):
        if number % BATCH == 0:
            progress(number)
        yield record


@contextlib.contextmanager
def saying_what_is_stored(tally: Tally) -> Iterator[None]:
    """Has a `StoreError` say how much had been stored when it came."""
    try:
        yield
    except StoreError as error:
        stored = tally.added + tally.replaced
        if not stored:
            raise
        raise StoreError(
            f"{error}; {stored} decisions were stored before that, and doing it again does no harm", error.fault
        ) from error


def batches(records: Iterable[_Record]) -> Iterator[list[_Record]]:
    """The records in runs that one transaction each takes."""
    left = iter(records)
    while batch := list(islice(left, BATCH)):
        yield batch


def put_decisions(connection: Connection, records: Sequence[DecisionRecord]) -> Tally:
    """Merges decisions into a store: of two in one slot the later stays."""
    tally = Tally()
    wanted: dict[tuple[Any, ...], DecisionRecord] = {}
    for record in records:
        slot = slot_values(record)
        wanted[slot] = newer(wanted[slot], record) if slot in wanted else record
    stored = _stored(connection, list(wanted))
    moments = {slot: time_text(wanted[slot].created_at) for slot in stored}
    # One that cannot be believed is not among these, and gives way whatever its moment is.
    rivals = [row_id for slot, (row_id, moment) in stored.items() if moment >= moments[slot]]
    for known in decisions_of(connection, rivals):
        slot = slot_values(known)
        if newer(known, wanted[slot]) is known:
            del wanted[slot]
            tally.kept += 1
    obsolete = [stored[slot][0] for slot in wanted if slot in stored]
    for start in range(0, len(obsolete), BATCH):
        ids = obsolete[start : start + BATCH]
        connection.execute(delete(MEASUREMENTS).where(MEASUREMENTS.c.decision_id.in_(ids)))
        connection.execute(delete(DECISIONS).where(DECISIONS.c.id.in_(ids)))
    tally.replaced = len(obsolete)
    tally.added = len(wanted) - len(obsolete)
    _insert(connection, list(wanted.values()))
    return tally


def decisions_of(connection: Connection, ids: Sequence[int]) -> list[DecisionRecord]:
    """The decisions of row ids, as far as they can be believed."""
    records: list[DecisionRecord] = []
    for start in range(0, len(ids), BATCH):
        some = select(DECISIONS).where(DECISIONS.c.id.in_(ids[start : start + BATCH]))
        records += records_of(connection, connection.execute(some).mappings().all())
    return records


def _stored(connection: Connection, slots: Sequence[tuple[Any, ...]]) -> dict[tuple[Any, ...], tuple[int, str]]:
    """Id and moment of the decisions that are stored in some of the slots."""
    if connection.execute(select(DECISIONS.c.id).limit(1)).first() is None:
        return {}
    # A join with a table of their own finds them through the index; SQLite scans the table for a list of row values.
    connection.execute(CreateTable(_WANTED, if_not_exists=True))
    connection.execute(delete(_WANTED))
    connection.execute(insert(_WANTED), [dict(zip(DECISION_SLOT, slot, strict=True)) for slot in slots])
    return {tuple(row[:-2]): (row[-2], row[-1]) for row in connection.execute(_FOUND)}


def _insert(connection: Connection, records: Sequence[DecisionRecord]) -> None:
    if not records:
        return
    ids = _fresh_ids(connection, len(records))
    rows = [{"id": row_id, **decision_row(record)} for row_id, record in zip(ids, records, strict=True)]
    connection.execute(insert(DECISIONS), rows)
    measurements = [
        measurement_row(each, row_id)
        for row_id, record in zip(ids, records, strict=True)
        for each in record.measurements
    ]
    if measurements:
        connection.execute(insert(MEASUREMENTS), measurements)


def _fresh_ids(connection: Connection, number: int) -> list[int]:
    """Row ids that nobody else uses: the write lock sees to that on SQLite, a sequence on a server."""
    if connection.dialect.name == "sqlite":
        last = connection.execute(select(func.max(DECISIONS.c.id))).scalar_one() or 0
        return list(range(last + 1, last + 1 + number))
    sequence = func.nextval(func.pg_get_serial_sequence(_name(DECISIONS), "id"))
    return list(connection.execute(select(sequence).select_from(func.generate_series(1, number).alias())).scalars())


def _name(table: Table) -> str:
    return str(table.name)
