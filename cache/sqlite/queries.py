"""The statements, each called inside a transaction that somebody else opened; SQLite and PostgreSQL alike."""

import functools
import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, TypeVar, cast

from sqlalchemy import (
    ColumnElement,
    Connection,
    Executable,
    Table,
    Text,
    and_,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal,
    not_,
    or_,
    select,
    true,
    tuple_,
    update,
)
from sqlalchemy import cast as cast_to
from sqlalchemy.dialects import postgresql, sqlite

from .. import misses as counts
from ..evidence import facts_order, succeed
from ..records import (
    MAX_COUNT,
    MAX_MEASUREMENTS,
    DecisionRecord,
    EnvironmentRecord,
    KeyRecord,
    MissRecord,
    mapping_text,
    time_text,
)
from ..validation import RefusedRowError
from .models import KEY_COLUMNS, Decision, Environment, Measurement, Miss
from .rows import (
    Row,
    decision_record,
    decision_row,
    environment_record,
    environment_row,
    key_row,
    measurement_row,
    miss_record,
    miss_row,
)

log = logging.getLogger(__name__)

_Record = TypeVar("_Record")

_NO_FACTS = mapping_text({})

PAGE = 1000
_ENVIRONMENTS = cast(Table, Environment.__table__)
DECISIONS = cast(Table, Decision.__table__)
MEASUREMENTS = cast(Table, Measurement.__table__)
_MISSES = cast(Table, Miss.__table__)
DECISION_SLOT = ("environment_id", *KEY_COLUMNS, "source", "host")
_MISS_SLOT = ("environment_id", *KEY_COLUMNS, "host")
_PLACE = [DECISIONS.c[name] for name in ("environment_id", *KEY_COLUMNS)]
KEYS = 250
"""Keys whose decisions are read at once."""


def put_environment(connection: Connection, record: EnvironmentRecord) -> None:
    """Stores an environment; the facts of a known one stay, unless there are none."""
    connection.execute(_put_environment(connection.dialect.name), environment_row(record))


def put_decision(connection: Connection, record: DecisionRecord) -> DecisionRecord:
    """Stores a decision in its slot and returns what is stored.

    What the slot held before is taken into account as `succeed` says.
    """
    stored = (
        connection.execute(
            _SLOT, {f"slot_{name}": value for name, value in zip(DECISION_SLOT, slot_values(record), strict=True)}
        )
        .mappings()
        .first()
    )
    if stored is not None:
        record = _following(record, stored, _measurements(connection, [stored["id"]]).get(stored["id"], []))
    decision_id = connection.execute(_put_decision(connection.dialect.name), decision_row(record)).scalar_one()
    if stored is not None:
        connection.execute(_FORGET_MEASUREMENTS, {"decision": decision_id})
    if record.measurements:
        connection.execute(insert(MEASUREMENTS), [measurement_row(each, decision_id) for each in record.measurements])
    return record


def put_miss(connection: Connection, record: MissRecord) -> None:
    """Adds a miss to its count; a count that cannot be believed is begun anew."""
    row = _stored_miss(connection, record)
    if row is not None and next(_sound([row], miss_record), None) is None:
        connection.execute(delete(_MISSES).where(_MISSES.c.id == row["id"]))
    connection.execute(_put_miss(connection.dialect.name), miss_row(record))


def merge_environment(connection: Connection, record: EnvironmentRecord) -> None:
    """Stores an environment; of two with one id, the same one wins in whatever order they come."""
    row = environment_row(record)
    rows = connection.execute(select(_ENVIRONMENTS).where(_ENVIRONMENTS.c.id == record.id)).mappings().all()
    known = next(_sound(rows, environment_record), None)
    if not rows:
        put_environment(connection, record)
    elif known is None or facts_order(mapping_text(known.facts)) < facts_order(row["facts"]):
        connection.execute(update(_ENVIRONMENTS).where(_ENVIRONMENTS.c.id == record.id).values(facts=row["facts"]))


def sound_facts(name: str, facts: Any) -> bool:
    """Whether a stored account of an environment can be believed."""
    try:
        environment_record({"id": name, "facts": facts})
    except RefusedRowError:
        return False
    return True


def merge_misses(connection: Connection, records: Sequence[MissRecord]) -> None:
    """Stores miss counts. A host's count only grows, so of two the larger one holds the other."""
    for record in records:
        row = _stored_miss(connection, record)
        if row is None:
            connection.execute(insert(_MISSES), miss_row(record))
            continue
        known = next(_sound([row], miss_record), None)
        merged = record if known is None else counts.merged(known, record)
        connection.execute(update(_MISSES).where(_MISSES.c.id == row["id"]).values(**miss_row(merged)))


def _stored_miss(connection: Connection, record: MissRecord) -> Row | None:
    row = miss_row(record)
    where = [_MISSES.c[name] == row[name] for name in _MISS_SLOT]
    return connection.execute(select(_MISSES).where(*where)).mappings().first()


def disputed_keys(connection: Connection) -> "array[int]":
    """A row of each key whose decisions differ in their winners, or of which one saw a wrong result."""
    wrong = select(MEASUREMENTS.c.decision_id).where(MEASUREMENTS.c.state == "wrong")
    differ = func.min(DECISIONS.c.candidate) != func.max(DECISIONS.c.candidate)
    seen_wrong = func.max(case((DECISIONS.c.id.in_(wrong), 1), else_=0)) == 1
    statement = (
        select(func.min(DECISIONS.c.id)).group_by(*_PLACE).having(and_(func.count() > 1, or_(differ, seen_wrong)))
    )
    return array("q", connection.execute(statement).scalars())


def newest_keys(connection: Connection, *, environment: str | None, op: str | None, like: str | None) -> "array[int]":
    """A row of each key, the key with the newest decision first."""
    first = func.min(DECISIONS.c.id)
    statement = (
        select(first)
        .where(*_matching(environment, op, like))
        .group_by(*_PLACE)
        .order_by(func.max(DECISIONS.c.created_at).desc(), first.desc())
    )
    return array("q", connection.execute(statement).scalars())


def key_hash(key: KeyRecord, environment: str) -> int:
    """The number of a key in an environment, in this process."""
    return hash((environment, *key_row(key).values()))


def key_hashes(connection: Connection, *, environment: str | None, op: str | None, like: str | None) -> set[int]:
    """A number for each environment and key."""
    statement = select(*_PLACE).where(*_matching(environment, op, like)).distinct()
    return {hash(tuple(row)) for row in connection.execute(statement)}


def decisions_beside(connection: Connection, ids: Sequence[int]) -> list[list[DecisionRecord]]:
    """The decisions of the environments and keys that rows have, in the order of the rows."""
    one = DECISIONS.alias()
    same = and_(*(one.c[column.name] == column for column in _PLACE))
    statement = (
        select(one.c.id.label("beside"), *DECISIONS.c)
        .select_from(one)
        .join(DECISIONS, same)
        .where(one.c.id.in_(list(ids)))
        .order_by(DECISIONS.c.id)
    )
    rows = connection.execute(statement).mappings().all()
    by_key: dict[tuple[str, KeyRecord], list[DecisionRecord]] = {}
    for record in records_of(connection, rows):
        by_key.setdefault((record.environment, record.key), []).append(record)
    order = {row_id: place for place, row_id in enumerate(ids)}
    places: dict[tuple[object, ...], int] = {}
    for row in rows:
        place = (row["environment_id"], *(row[name] for name in KEY_COLUMNS))
        places[place] = order[row["beside"]]
    groups = [
        (places[environment_id, *key_row(key).values()], group) for (environment_id, key), group in by_key.items()
    ]
    return [group for _, group in sorted(groups, key=lambda each: each[0])]


def page_by_key(
    connection: Connection,
    after: tuple[object, ...],
    *,
    environment: str | None = None,
    op: str | None = None,
    most: int | None = None,
) -> tuple[list[list[DecisionRecord]], tuple[object, ...] | None]:
    """The decisions of the next keys, at most `most` or `KEYS`, and the key to go on after; None at the end."""
    most = most or KEYS
    wanted = _named(DECISIONS, environment, op)
    keys = select(*_PLACE).where(*wanted).distinct().order_by(*_PLACE).limit(most)
    if after:
        keys = keys.where(tuple_(*_PLACE) > tuple_(*(literal(value) for value in after)))
    places = [tuple(row) for row in connection.execute(keys)]
    if not places:
        return [], None
    statement = select(DECISIONS).where(
        *wanted,
        tuple_(*_PLACE) >= tuple_(*(literal(value) for value in places[0])),
        tuple_(*_PLACE) <= tuple_(*(literal(value) for value in places[-1])),
    )
    rows = connection.execute(statement.order_by(*_PLACE, DECISIONS.c.id)).mappings().all()
    by_key: dict[tuple[object, ...], list[DecisionRecord]] = {}
    for record in records_of(connection, rows):
        by_key.setdefault((record.environment, record.key), []).append(record)
    return list(by_key.values()), places[-1] if len(places) == most else None


def count(connection: Connection) -> int:
    """How many decisions there are."""
    return connection.execute(select(func.count()).select_from(DECISIONS)).scalar_one()


def prune(connection: Connection, *, older_than: datetime | None, environment: str | None, op: str | None) -> int:
    """Removes decisions and misses that meet every condition given; returns how many decisions."""
    removed = 0
    for table, moment in ((_MISSES, _MISSES.c.last_seen), (DECISIONS, DECISIONS.c.created_at)):
        conditions = _named(table, environment, op)
        if older_than is not None:
            conditions.append(moment < time_text(older_than))
        removed = connection.execute(delete(table).where(*conditions)).rowcount
    sweep(connection)
    return removed


def keep_only(connection: Connection, *, environment: str | None, op: str | None) -> None:
    """Removes decisions and misses that are not of an environment and an op."""
    for table in (_MISSES, DECISIONS):
        connection.execute(delete(table).where(not_(and_(true(), *_named(table, environment, op)))))
    sweep(connection)


def _named(table: Table, environment: str | None, op: str | None) -> list[ColumnElement[bool]]:
    wanted = {"environment_id": environment, "op": op}
    return [table.c[name] == value for name, value in wanted.items() if value is not None]


def _matching(environment: str | None, op: str | None, like: str | None) -> list[ColumnElement[bool]]:
    conditions = _named(DECISIONS, environment, op)
    if like is not None:
        conditions.append(key_text().icontains(like, autoescape=True))
    return conditions


def key_text() -> ColumnElement[str]:
    """A decision's key and environment as one text, such as `op B=1 T=2048 ... V=64 bfloat16 form environment`."""
    text: ColumnElement[str] = DECISIONS.c.op
    for name in KEY_COLUMNS:
        if name not in ("op", "varlen", "dtype", "form"):
            text = text + f" {name}=" + cast_to(DECISIONS.c[name], Text)
    packed = case((DECISIONS.c.varlen, " packed"), else_=" dense")
    return text + " " + DECISIONS.c.dtype + packed + " " + DECISIONS.c.form + " " + DECISIONS.c.environment_id


def sweep(connection: Connection) -> int:
    """Removes what nothing names any more and names what is missing; returns how many rows that took."""
    known = select(_ENVIRONMENTS.c.id)
    nameless = select(DECISIONS.c.environment_id).where(DECISIONS.c.environment_id.not_in(known)).distinct()
    missing = list(connection.execute(nameless).scalars())
    if missing:
        connection.execute(insert(_ENVIRONMENTS), [{"id": name, "facts": _NO_FACTS} for name in missing])
    without_decision = delete(MEASUREMENTS).where(MEASUREMENTS.c.decision_id.not_in(select(DECISIONS.c.id)))
    without_use = delete(_ENVIRONMENTS).where(_ENVIRONMENTS.c.id.not_in(select(DECISIONS.c.environment_id)))
    removed = [connection.execute(statement).rowcount for statement in (without_decision, without_use)]
    return len(missing) + sum(removed)


def evidence(connection: Connection, key: KeyRecord, environment: str) -> tuple[DecisionRecord, ...]:
    """Every decision stored for a key in an environment; rows that cannot be believed are left out and said."""
    slot = {"slot_environment_id": environment, **{f"slot_{name}": value for name, value in key_row(key).items()}}
    return tuple(records_of(connection, connection.execute(_EVIDENCE, slot).mappings().all()))


def page_of_decisions(
    connection: Connection, after: int, *, environment: str | None = None, op: str | None = None
) -> tuple[list[DecisionRecord], int | None]:
    """The next decisions by row id, and the id to go on after; None at the end."""
    statement = select(DECISIONS).where(DECISIONS.c.id > after).order_by(DECISIONS.c.id).limit(PAGE)
    if environment is not None:
        statement = statement.where(DECISIONS.c.environment_id == environment)
    if op is not None:
        statement = statement.where(DECISIONS.c.op == op)
    rows = connection.execute(statement).mappings().all()
    return list(records_of(connection, rows)), rows[-1]["id"] if len(rows) == PAGE else None


def page_of_misses(connection: Connection, after: int) -> tuple[list[MissRecord], int | None]:
    """The next misses by row id, and the id to go on after; None at the end."""
    rows = connection.execute(select(_MISSES).where(_MISSES.c.id > after).order_by(_MISSES.c.id).limit(PAGE))
    stored = rows.mappings().all()
    return list(_sound(stored, miss_record)), stored[-1]["id"] if len(stored) == PAGE else None


def environments(connection: Connection) -> list[EnvironmentRecord]:
    """Every environment, by id."""
    rows = connection.execute(select(_ENVIRONMENTS).order_by(_ENVIRONMENTS.c.id)).mappings().all()
    return list(_sound(rows, environment_record))


def misses(connection: Connection, environment: str | None = None) -> list[MissRecord]:
    """Every miss."""
    statement = select(_MISSES)
    if environment is not None:
        statement = statement.where(_MISSES.c.environment_id == environment)
    return list(_sound(connection.execute(statement).mappings().all(), miss_record))


def records_of(connection: Connection, rows: Sequence[Row]) -> Iterator[DecisionRecord]:
    """The decisions of rows, with their measurements; rows that cannot be believed are left out and said."""
    measurements = _measurements(connection, [row["id"] for row in rows])
    return _sound(rows, lambda row: decision_record(row, measurements.get(row["id"], ())))


def _sound(rows: Iterable[Row], record: Callable[[Row], _Record]) -> Iterator[_Record]:
    refused: list[RefusedRowError] = []
    for row in rows:
        try:
            yield record(row)
        except RefusedRowError as error:
            refused.append(error)
    if refused:
        log.warning("%d stored rows are ignored, the first for this: %s", len(refused), refused[0])


def _measurements(connection: Connection, ids: Sequence[int]) -> dict[int, list[Row]]:
    by_decision: dict[int, list[Row]] = {}
    if not ids:
        return by_decision
    of_these = MEASUREMENTS.c.decision_id.in_(ids)
    for row in connection.execute(select(MEASUREMENTS).where(of_these).order_by(MEASUREMENTS.c.id)).mappings():
        kept = by_decision.setdefault(row["decision_id"], [])
        if len(kept) <= MAX_MEASUREMENTS:
            kept.append(row)
    return by_decision


def slot_values(record: DecisionRecord) -> tuple[Any, ...]:
    """The values of `DECISION_SLOT`'s columns."""
    return (record.environment, *key_row(record.key).values(), record.source, record.host)


# Statements are built once: building one takes SQLAlchemy longer than SQLite needs to run it, and the time between the
# start of a transaction and its end is what other writers wait for.


def _where(table: Table, names: Sequence[str]) -> list[ColumnElement[bool]]:
    return [table.c[name] == bindparam(f"slot_{name}", type_=table.c[name].type) for name in names]


# Locked where locks are by row; SQLite leaves that out.
_SLOT = select(DECISIONS.c.id, DECISIONS.c.created_at).where(*_where(DECISIONS, DECISION_SLOT)).with_for_update()
_EVIDENCE = select(DECISIONS).where(*_where(DECISIONS, ("environment_id", *KEY_COLUMNS)))
_FORGET_MEASUREMENTS = delete(MEASUREMENTS).where(MEASUREMENTS.c.decision_id == bindparam("decision"))


def _insert(dialect: str, table: Table) -> sqlite.Insert | postgresql.Insert:
    return sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)


def _names(table: Table) -> list[str]:
    """The columns that a row brings along; SQLite or the server numbers the rows."""
    return [column.name for column in table.columns if column.name != "id"]


@functools.cache
def _put_environment(dialect: str) -> Executable:
    statement = _insert(dialect, _ENVIRONMENTS)
    return statement.on_conflict_do_update(
        index_elements=["id"], set_={"facts": statement.excluded["facts"]}, where=_ENVIRONMENTS.c.facts == _NO_FACTS
    )


@functools.cache
def _put_decision(dialect: str) -> Executable:
    statement = _insert(dialect, DECISIONS)
    changed = {name: statement.excluded[name] for name in _names(DECISIONS) if name not in DECISION_SLOT}
    upsert = statement.on_conflict_do_update(index_elements=list(DECISION_SLOT), set_=changed)
    return upsert.returning(DECISIONS.c.id)


@functools.cache
def _put_miss(dialect: str) -> Executable:
    statement = _insert(dialect, _MISSES)
    new = statement.excluded
    # SQLite calls them min and max, PostgreSQL least and greatest.
    least, greatest = (func.min, func.max) if dialect == "sqlite" else (func.least, func.greatest)
    changed = {
        "count": least(_MISSES.c.count + new["count"], MAX_COUNT),
        "first_seen": least(_MISSES.c.first_seen, new["first_seen"]),
        "last_seen": greatest(_MISSES.c.last_seen, new["last_seen"]),
        "reason": case((new["last_seen"] >= _MISSES.c.last_seen, new["reason"]), else_=_MISSES.c.reason),
    }
    return statement.on_conflict_do_update(index_elements=list(_MISS_SLOT), set_=changed)


def _following(record: DecisionRecord, row: Row, measurements: Sequence[Row]) -> DecisionRecord:
    """The record as the successor of a stored row: dated after it, with the evidence that it does not replace."""
    try:
        old = decision_record({**decision_row(record), "created_at": row["created_at"]}, measurements)
    except RefusedRowError:
        return record
    return succeed(old, record)
