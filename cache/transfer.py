"""Merging one SQLite file into another inside SQLite: a hundred thousand decisions in seconds.

The rules are `bulk.put_decisions`'s: of two decisions in one slot the later stays. Rows are checked by SQL for type
and bounds before they are taken, and by `rows` again whenever they are read. What SQL cannot decide, two decisions of
one moment that differ, is left to the caller.
"""

import sqlite3
from dataclasses import dataclass, field
from typing import get_args

from .bulk import Tally
from .models import KEY_COLUMNS, Decision, Measurement
from .queries import DECISION_SLOT
from .records import MAX_REASON, FailureClass, Source, State

_MAX_JSON = 128 * 1024
_SIZES = ("B", "T", "H", "HV", "K", "V")


@dataclass(kw_only=True)
class Transferred:
    """What was merged.

    Attributes:
        tally: What became of the decisions.
        undecided: Source row ids of decisions that need a closer look.
    """

    tally: Tally = field(default_factory=Tally)
    undecided: list[int] = field(default_factory=list)


def transfer(connection: sqlite3.Connection, host: str | None) -> Transferred:
    """Merges the decisions of the attached database `source` into `main`, inside the transaction that is open.

    Args:
        connection: Has the other file attached.
        host: This host, where what others measured is to count as imported; None takes sources as they are.
    """
    result = Transferred()
    run = connection.execute
    total = run("SELECT count(*) FROM source.decisions").fetchone()[0]
    run(_ENVIRONMENTS)
    run("DROP TABLE IF EXISTS temp.incoming")
    run(_INCOMING, {"host": host})
    run("CREATE INDEX temp.incoming_source ON incoming (source_id)")
    taken = run("SELECT count(*) FROM temp.incoming").fetchone()[0]
    if host is not None:
        # What was measured and what was imported of it may fall into one slot now.
        run(f"UPDATE temp.incoming SET verdict = 'undecided' WHERE ({_columns('', DECISION_SLOT)}) IN ({_CROWDED})")
    run(_SAME)
    result.undecided = [row[0] for row in run("SELECT source_id FROM temp.incoming WHERE verdict = 'undecided'")]
    counted = dict(run("SELECT verdict, count(*) FROM temp.incoming GROUP BY verdict").fetchall())
    run(f"DELETE FROM main.measurements WHERE decision_id IN ({_OBSOLETE})")
    run(f"DELETE FROM main.decisions WHERE id IN ({_OBSOLETE})")
    base = run("SELECT coalesce(max(id), 0) FROM main.decisions").fetchone()[0]
    run(_DECISIONS, {"base": base})
    run(_MEASUREMENTS, {"base": base})
    run("DROP TABLE temp.incoming")
    result.tally = Tally(
        added=counted.get("new", 0),
        replaced=counted.get("newer", 0),
        kept=counted.get("kept", 0),
        refused=total - taken,
    )
    return result


def _columns(prefix: str, names: tuple[str, ...]) -> str:
    return ", ".join(f"{prefix}{name}" for name in names)


def _one_of(column: str, values: tuple[str, ...]) -> str:
    # The values are the literals of this product's own types.
    return f"{column} IN ({', '.join(repr(value) for value in values)})"


def _text(column: str, longest: int, shortest: int = 0) -> str:
    return f"(typeof({column}) = 'text' AND length({column}) BETWEEN {shortest} AND {longest})"


def _label(column: str, longest: int, shortest: int = 0) -> str:
    """A text without control characters and without a launch option."""
    options = " AND ".join(
        f"instr(lower({column}), '{start}{end}') = 0"
        for start in ("num_", "num-", "num")
        for end in ("warps", "stages")
    )
    control = f"{column} NOT GLOB '*[' || char(1) || '-' || char(31) || char(127) || ']*'"
    # Hardly any text has the first letters, which spares the rest.
    return f"({_text(column, longest, shortest)} AND {control} AND ({column} NOT LIKE '%num%' OR {options}))"


def _integer(column: str, largest: int) -> str:
    return f"(typeof({column}) = 'integer' AND {column} BETWEEN 0 AND {largest})"


def _number(column: str) -> str:
    return f"({column} IS NULL OR (typeof({column}) IN ('real', 'integer') AND abs({column}) < 1e300))"


def _moment(column: str) -> str:
    digit = "[0-9]"
    day, clock = f"{digit * 4}-{digit * 2}-{digit * 2}", f"{digit * 2}:{digit * 2}:{digit * 2}.{digit * 6}"
    return f"(typeof({column}) = 'text' AND {column} GLOB '{day}T{clock}Z')"


def _json(column: str) -> str:
    return _text(column, _MAX_JSON, 2)


_SOUND_DECISION = " AND ".join(
    [
        _label("s.environment_id", 200, 1),
        _label("s.op", 200, 1),
        *(_integer(f"s.{name}", 2**40) for name in _SIZES),
        "s.varlen IN (0, 1) AND typeof(s.varlen) = 'integer'",
        _label("s.dtype", 200),
        _label("s.form", 1000),
        _label("s.candidate", 200, 1),
        _label("s.revision", 200),
        _label("s.default_candidate", 200),
        _one_of("s.source", get_args(Source)),
        *(_number(f"s.{name}") for name in ("gain", "gain_low", "gain_high")),
        _moment("s.created_at"),
        _label("s.host", 200),
        _label("s.version", 200),
    ]
)

_SOUND_MEASUREMENT = " AND ".join(
    [
        _label("m.candidate", 200, 1),
        _label("m.revision", 200),
        _one_of("m.state", get_args(State)),
        _text("m.reason", MAX_REASON),
        _one_of("m.failure", tuple(each for each in get_args(FailureClass) if each != "device")),
        *(
            _number(f"m.{name}")
            for name in ("end_to_end_us", "kernel_us", "relayout_us", "interval_low_us", "interval_high_us", "error")
        ),
        _integer("m.sample_count", 2**20),
        _json("m.samples"),
        _json("m.counts"),
        f"(m.measured_at IS NULL OR {_moment('m.measured_at')})",
    ]
)

_SOURCE = "CASE WHEN s.source = 'measured' AND :host IS NOT NULL AND s.host <> :host THEN 'imported' ELSE s.source END"

# An account without facts gives way to one with facts; of two with facts the larger text stays, in whatever order
# they come.
_ENVIRONMENTS = f"""
    INSERT INTO main.environments (id, facts)
    SELECT s.id, s.facts FROM source.environments s WHERE {_label("s.id", 200, 1)} AND {_json("s.facts")}
    UNION ALL
    SELECT DISTINCT s.environment_id, '{{}}' FROM source.decisions s WHERE {_label("s.environment_id", 200, 1)}
    ON CONFLICT (id) DO UPDATE SET facts = excluded.facts
    WHERE (excluded.facts <> '{{}}' AND environments.facts = '{{}}')
       OR (excluded.facts <> '{{}}' AND excluded.facts > environments.facts)
"""

_KEYS_AND_HOST = (*KEY_COLUMNS, "host")

_INCOMING = f"""
    CREATE TEMPORARY TABLE incoming AS
    SELECT s.id AS source_id, s.environment_id AS environment_id, {_SOURCE} AS source,
           {", ".join(f"s.{name} AS {name}" for name in _KEYS_AND_HOST)},
           d.id AS known_id,
           CASE WHEN d.id IS NULL THEN 'new'
                WHEN s.created_at > d.created_at THEN 'newer'
                WHEN s.created_at < d.created_at THEN 'kept'
                ELSE 'undecided' END AS verdict
    FROM source.decisions s LEFT JOIN main.decisions d
      ON d.environment_id = s.environment_id AND d.source = {_SOURCE}
     AND {" AND ".join(f"d.{name} = s.{name}" for name in _KEYS_AND_HOST)}
    WHERE {_SOUND_DECISION}
"""

_INCOMING_SLOT = _columns("", DECISION_SLOT)

_CROWDED = f"SELECT {_INCOMING_SLOT} FROM temp.incoming GROUP BY {_INCOMING_SLOT} HAVING count(*) > 1"

_OBSOLETE = "SELECT known_id FROM temp.incoming WHERE verdict = 'newer'"

_CONTENT = tuple(
    column.name for column in Decision.__table__.columns if column.name not in ("id", "source", *_KEYS_AND_HOST)
)
_EVIDENCE = tuple(column.name for column in Measurement.__table__.columns if column.name not in ("id", "decision_id"))


def _measured(schema: str, decision: str) -> str:
    """All that is known of a decision's candidates, as one text."""
    parts = " || '|' || ".join(f"quote({name})" for name in _EVIDENCE)
    return (
        f"(SELECT group_concat(part) FROM (SELECT {parts} AS part FROM {schema}.measurements "
        f"WHERE decision_id = {decision} ORDER BY id))"
    )


# Of one moment and alike in all they say: the same decision, met again.
_SAME = f"""
    UPDATE temp.incoming SET verdict = 'kept'
    WHERE verdict = 'undecided' AND known_id IS NOT NULL
      AND (SELECT {" AND ".join(f"s.{name} IS d.{name}" for name in _CONTENT)}
           FROM source.decisions s, main.decisions d WHERE s.id = source_id AND d.id = known_id)
      AND {_measured("source", "source_id")} IS {_measured("main", "known_id")}
"""

_DECISIONS = f"""
    INSERT INTO main.decisions (id, source, {_columns("", _KEYS_AND_HOST)}, {_columns("", _CONTENT)})
    SELECT :base + i.rowid, i.source, {_columns("s.", _KEYS_AND_HOST)}, {_columns("s.", _CONTENT)}
    FROM temp.incoming i JOIN source.decisions s ON s.id = i.source_id
    WHERE i.verdict IN ('new', 'newer')
"""

_MEASUREMENTS = f"""
    INSERT INTO main.measurements (decision_id, {_columns("", _EVIDENCE)})
    SELECT :base + i.rowid, {_columns("m.", _EVIDENCE)}
    FROM temp.incoming i JOIN source.measurements m ON m.decision_id = i.source_id
    WHERE i.verdict IN ('new', 'newer') AND {_SOUND_MEASUREMENT}
    ORDER BY i.rowid, m.id
"""
