"""Checks that a SQLite file has only tables and indexes of plain columns: anything else in a schema may run code.

Views and triggers are programs; checks, defaults, computed columns and indexes over expressions are programs inside
tables; virtual tables are programs of others; `ON CONFLICT` decides what storing a row removes. No file of this product
has any of them.
"""

import functools
import re
import sqlite3

from ..faults import Fault, StoreError

MAX_OBJECTS = 1000
MAX_SQL = 20_000

# Names, column types, brackets: no literal, no operator, no comment.
_CHARACTERS = re.compile(r'[\w\s(),"]*', re.ASCII)
_RUNS = re.compile(r"\b(CHECK|DEFAULT|GENERATED|AS|COLLATE|CONFLICT|VIRTUAL|USING|WHERE|SELECT)\b", re.IGNORECASE)


def require_plain(connection: sqlite3.Connection, schema: str = "main") -> None:
    """Looks at the whole schema of a file, before anything else is asked of it.

    Args:
        connection: To the file.
        schema: The name under which the file is attached.

    Raises:
        StoreError: It holds what could run, or more than any file of this product.
        sqlite3.Error: It cannot be read.
    """
    statement = f"SELECT type, name, rootpage, substr(sql, 1, ?), length(sql) FROM {schema}.sqlite_master LIMIT ?"
    rows = connection.execute(statement, (MAX_SQL, MAX_OBJECTS + 1)).fetchall()
    if len(rows) > MAX_OBJECTS:
        raise StoreError(f"the file has more than {MAX_OBJECTS} tables and indexes", Fault.FOREIGN)
    if extra := sorted({str(row[0]) for row in rows} - {"table", "index"}):
        raise StoreError(
            f"the file carries a {' and a '.join(extra)}, which no file of this product does", Fault.FOREIGN
        )
    for kind, name, page, sql, length in rows:
        # SQLite's own indexes have no text; a table without a page is not stored in the file.
        plain = kind == "index" if sql is None else bool(page) and length <= MAX_SQL and _is_plain(str(kind), str(sql))
        if not plain:
            raise StoreError(
                f"the file's {kind} {str(name)[:80]!r} is more than plain columns, which no file of this product has",
                Fault.FOREIGN,
            )


@functools.lru_cache(maxsize=64)
def columns_of(sql: str) -> frozenset[str]:
    """The definitions between the outer brackets of a plain `CREATE TABLE`, in any order and layout."""
    inside = sql[sql.find("(") + 1 : sql.rfind(")")]
    # Commas between brackets belong to a constraint.
    parts = re.split(r",(?![^(]*\))", inside)
    return frozenset(" ".join(part.replace('"', "").split()).replace("( ", "(").replace(" )", ")") for part in parts)


@functools.lru_cache(maxsize=64)
def _is_plain(kind: str, sql: str) -> bool:
    if not _CHARACTERS.fullmatch(sql) or _RUNS.search(sql):
        return False
    # A bracket in an index's column list calls a function.
    return kind == "table" or sql.count("(") == 1
