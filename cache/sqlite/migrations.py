"""From an older schema to the present one: numbered steps on a copy, which then takes the file's place."""

import contextlib
import functools
import importlib.metadata
import logging
import os
import random
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection, insert

from ..faults import CAUGHT, Fault, StoreError, store_error
from ..records import time_text, utc_now
from .database import Database
from .models import SchemaVersion

log = logging.getLogger(__name__)

Migration = Callable[[Connection], None]

MIGRATIONS: dict[int, Migration] = {}
"""Step by the version it starts from; each leads to the next. Schema version 1 is the first: there is none yet."""

PATIENCE_S = 5.0
"""How long to wait until nobody else has the old file open."""


def migrate(
    database: Database,
    stored: int,
    wanted: int,
) -> None:
    """Migrates a file on a copy and swaps the copy in. Whatever fails, the old file stays as it was.

    The caller holds the path's lock. Nobody may have the old file open meanwhile: an earlier version of this product
    that still ran would go on with a file that has no name any more.

    Args:
        database: The file.
        stored: Its schema version.
        wanted: The schema version to reach.

    Raises:
        StoreError: There is no way from one version to the other, a step failed, or the file is in use.
    """
    path = database.file
    require_steps(path, stored, wanted)
    database.close()
    copy = path.with_name(f"{path.name}.migrating-{os.getpid()}")
    _remove(copy)
    held = sqlite3.connect(path, isolation_level=None, timeout=0.1)
    try:
        _hold(held, path)
        # The schema may have been migrated while this process waited.
        if held.execute("SELECT max(version) FROM schema_version").fetchone()[0] != stored:
            return
        _copy(path, copy)
        target = Database(copy, journal="delete")
        for version in range(stored, wanted):
            target.run(functools.partial(step, version=version), write=True)
        if target.run(lambda connection: connection.exec_driver_sql("PRAGMA quick_check").scalar_one()) != "ok":
            raise StoreError(f"{path}: the migrated copy is not sound", Fault.UNAVAILABLE)
        target.close()
        _sync(copy)
        os.replace(copy, path)
    except CAUGHT as error:
        raise store_error(path, error) from error
    finally:
        held.close()
        _remove(copy)
    log.info("%s: migrated from schema version %d to %d", path, stored, wanted)


def _hold(connection: sqlite3.Connection, path: Path) -> None:
    """Takes the write lock of a file that nobody else has open; only then can WAL be left, which folds it in."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = DELETE")
            connection.execute("BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError as error:
            if time.monotonic() > deadline:
                raise StoreError(
                    f"{path}: has an older schema and is open elsewhere; migrated once it is closed there ({error})",
                    Fault.UNAVAILABLE,
                ) from error
            time.sleep(random.uniform(0.01, 0.05))


def _copy(path: Path, copy: Path) -> None:
    # Through SQLite, not through the file: closing a second handle of the file would drop the lock that is held on it.
    with contextlib.closing(sqlite3.connect(path)) as source, contextlib.closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    shutil.copymode(path, copy)


def require_steps(place: object, stored: int, wanted: int) -> None:
    """Raises `StoreError` unless there is a way from one version to the other."""
    if missing := [version for version in range(stored, wanted) if version not in MIGRATIONS]:
        raise StoreError(
            f"{place} has schema version {stored}, this version of layout_tuner writes {wanted}, and no migration "
            f"starts from version {missing[0]}",
            Fault.OLDER,
        )


def step(connection: Connection, version: int) -> None:
    """Migrates from a version to the next, in the transaction that is open."""
    MIGRATIONS[version](connection)
    row = {"version": version + 1, "applied_at": time_text(utc_now()), "product_version": product_version()}
    connection.execute(insert(SchemaVersion), row)


def product_version() -> str:
    """The version of this product, as installed."""
    try:
        return importlib.metadata.version("layout-tuner")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    for suffix in ("", "-journal", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}{suffix}")
