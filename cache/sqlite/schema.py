"""The schema of a file: made, checked, migrated; a file that is none is set aside."""

import fcntl
import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Connection, insert
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateTable

from ..faults import Fault, StoreError
from ..names import resolved
from ..records import time_text, utc_now
from . import migrations
from .database import Database
from .models import SCHEMA_VERSION, Base, SchemaVersion
from .plain import columns_of
from .seal import SEALED, locked_export

log = logging.getLogger(__name__)

APPLICATION_ID = 0x4C54444E
"""Marks a SQLite file as one of this product's, so that no other program's file is taken for a damaged one."""

_MAGIC = b"SQLite format 3\0"
_NAMES = frozenset({".sqlite", ".sqlite3", ".db"})


def prepare(database: Database, *, verify: bool = False) -> None:
    """Makes a file usable: begins a new one, migrates an older one, sets a damaged one aside.

    A file of a later version is used for reading where the tables still serve.

    Args:
        database: The file.
        verify: Look at every page, as after trouble with the file.

    Raises:
        StoreError: The file can be neither used nor made.
    """
    if database.read_only:
        _check_readable(database)
        return
    _check_place(database.path)
    probe = sound_version if verify else file_version
    for _ in range(3):
        try:
            stored = database.run(probe)
        except StoreError as error:
            if error.fault is not Fault.DAMAGED:
                raise
            if not meant_as_database(database.path):
                raise foreign(database.path) from error
            set_aside(database, error, probe)
            continue
        if stored is None:
            database.adopt()
            database.run(create, write=True)
        elif stored < SCHEMA_VERSION:
            # Whoever waits for the lock must not hold the file open meanwhile: the one that migrates waits for that.
            database.close()
            with locked(database.path):
                if database.run(file_version) == stored:
                    migrations.migrate(database, stored, SCHEMA_VERSION)
        else:
            if stored > SCHEMA_VERSION:
                log.warning("%s; it is read, not written", _newer(database.path, stored))
                database.read_only = True
                _check_tables(database, stored)
                return
            break
    _check_tables(database, SCHEMA_VERSION)
    if database.run(_sealed):
        database.run(_unseal, write=True)
    database.adopt()


def meant_as_database(path: Path) -> bool:
    """Whether a file begins as SQLite's do or is named as one, so that it may be taken for a damaged one."""
    if path.suffix.lower() in _NAMES:
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def foreign(path: Path) -> StoreError:
    """What to say of a file that was never one of decisions."""
    return StoreError(
        f"{path}: is not a file of decisions and is left as it is; wanted one of those, or the name of a new one",
        Fault.FOREIGN,
    )


def file_version(connection: Connection) -> int | None:
    """The schema version of a SQLite file; None for an empty one.

    Raises:
        StoreError: The file belongs to something else, or has lost its version.
    """
    # What runs by itself was refused when the connection was made.
    tables = set(connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'").scalars())
    if not tables:
        return None
    ours = connection.exec_driver_sql("PRAGMA application_id").scalar_one() == APPLICATION_ID
    if SchemaVersion.__tablename__ not in tables:
        if ours:
            raise StoreError("the file has lost its schema version", Fault.DAMAGED)
        raise StoreError("the file is a database of something else", Fault.FOREIGN)
    stored = connection.exec_driver_sql("SELECT max(version) FROM schema_version").scalar_one()
    if not isinstance(stored, int) or not 0 <= stored < 1_000_000:
        raise StoreError("the file's schema version is no number", Fault.DAMAGED if ours else Fault.FOREIGN)
    return stored


def create(connection: Connection) -> None:
    """Makes the tables of an empty database; a database that has them is left alone."""
    if connection.dialect.name == "sqlite":
        # Another process may have been faster: the look is repeated under the write lock.
        if file_version(connection) is not None:
            return
        connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
    Base.metadata.create_all(connection)
    row = {
        "version": SCHEMA_VERSION,
        "applied_at": time_text(utc_now()),
        "product_version": migrations.product_version(),
    }
    connection.execute(insert(SchemaVersion), row)


def sound_version(connection: Connection) -> int | None:
    """As `file_version`, after a look at every page."""
    stored = file_version(connection)
    answer = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
    if answer != "ok":
        raise StoreError(f"the file is damaged ({str(answer).splitlines()[0]})", Fault.DAMAGED)
    return stored


def set_aside(database: Database, reason: Exception, probe: Callable[[Connection], int | None]) -> Path | None:
    """Gives a damaged file, and what SQLite keeps beside it, another name; None if it turned out sound meanwhile.

    Args:
        database: The file.
        reason: How the damage showed.
        probe: Shows it again, now that nobody else sets the file aside at the same time.
    """
    path = database.file
    with locked(path):
        database.close()
        try:
            database.run(probe)
        except StoreError as error:
            if error.fault is not Fault.DAMAGED:
                raise
        else:
            return None
        database.close()
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
        target = path.with_name(f"{path.name}.damaged-{stamp}")
        # The file last: once it is gone another process may begin a new one, whose companions stay where they are.
        for suffix in ("-wal", "-shm", "-journal"):
            with suppress(FileNotFoundError):
                os.replace(f"{path}{suffix}", f"{target}{suffix}")
        os.replace(path, target)
    log.warning(
        "%s is no sound decision file (%s); it was set aside as %s and a new one begun", path, reason, target.name
    )
    return target


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a path's rare operations: setting aside, migrating, replacing."""
    # One lock for the file, by whatever link it is named.
    path = resolved(path)
    with open(path.with_name(path.name + ".lock"), "a", encoding="ascii") as file:
        # Where a file system has no such locks, the operations are still atomic renames.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sealed(connection: Connection) -> bool:
    return connection.exec_driver_sql("SELECT 1 FROM seals LIMIT 1").first() is not None


def _unseal(connection: Connection) -> None:
    """An export that becomes a file in use, as where it was copied to a user's place, is no export any more."""
    # Overwritten with zeros, because the mark of a seal is looked for in every byte of a file.
    connection.exec_driver_sql("PRAGMA secure_delete = ON")
    connection.exec_driver_sql("DELETE FROM seals")


def _check_place(path: Path) -> None:
    path = resolved(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}", Fault.UNAVAILABLE) from error
    if path.is_dir():
        raise StoreError(f"{path}: is a folder", Fault.UNAVAILABLE)
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise StoreError(f"{path}: cannot be written", Fault.READ_ONLY)
    if locked_export(path):
        raise StoreError(f"{path}: {SEALED}", Fault.READ_ONLY)


def _check_readable(database: Database) -> None:
    def work(connection: Connection) -> tuple[int | None, list[str]]:
        stored = file_version(connection)
        return stored, [] if stored is None or stored < SCHEMA_VERSION else _table_faults(connection, stored)

    try:
        stored, faults = database.run(work)
    except StoreError as error:
        if error.fault is Fault.DAMAGED and not meant_as_database(database.path):
            raise foreign(database.path) from error
        raise
    if stored is None:
        raise StoreError(f"{database.path}: is empty, it holds no decisions yet", Fault.UNAVAILABLE)
    if stored < SCHEMA_VERSION:
        raise StoreError(
            f"{database.path}: has schema version {stored}, this version of layout_tuner reads {SCHEMA_VERSION}; "
            "the first job or `tuner cache import` that may write it migrates it",
            Fault.OLDER,
        )
    _require_none(database, stored, faults)


def _check_tables(database: Database, stored: int) -> None:
    """Refuses a file whose tables are not this product's."""
    _require_none(database, stored, database.run(functools.partial(_table_faults, stored=stored)))


def _table_faults(connection: Connection, stored: int) -> list[str]:
    """How tables differ from this product's: those of its version have to be its own, a later one's at least serve.

    What else a definition may say, as a foreign key that removes rows, would change what is stored.
    """
    faults = []
    rows = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE type = 'table'").all()
    defined = {row[0]: row[1] for row in rows}
    for table, wanted in _definitions().items():
        there = columns_of(defined.get(table, ""))
        if missing := _names(wanted) - _names(there):
            faults.append(f"{table} lacks {', '.join(sorted(missing))}")
        elif stored == SCHEMA_VERSION and there != wanted:
            faults.append(f"{table} is defined otherwise: {'; '.join(sorted(there ^ wanted))[:200]}")
    return faults


def _require_none(database: Database, stored: int, faults: list[str]) -> None:
    if faults:
        prefix = f"{_newer(database.path, stored)}: " if stored > SCHEMA_VERSION else f"{database.path}: "
        raise StoreError(prefix + "; ".join(faults), Fault.NEWER if stored > SCHEMA_VERSION else Fault.FOREIGN)


@functools.cache
def _definitions() -> dict[str, frozenset[str]]:
    """What the tables of this version are defined as."""
    tables = Base.metadata.sorted_tables
    return {table.name: columns_of(str(CreateTable(table).compile(dialect=sqlite.dialect()))) for table in tables}


def _names(definitions: frozenset[str]) -> set[str]:
    """The columns among definitions; constraints start with a word of their own."""
    return {each.partition(" ")[0] for each in definitions} - {"PRIMARY", "UNIQUE", "CONSTRAINT", "FOREIGN"}


def _newer(path: Path, stored: int) -> str:
    return f"{path} has schema version {stored}, this version of layout_tuner writes {SCHEMA_VERSION}"
