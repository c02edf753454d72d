"""One SQLite file and how it is spoken to: connections, transactions, waiting, forks, files swapped underneath.

A connection is never used by two threads at once and never crosses a fork: before a fork the process closes all its
idle ones, because SQLite keeps the state of file locks in memory that a child would inherit without the locks.
"""

import contextlib
import logging
import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.pool import QueuePool

from .faults import CAUGHT, Fault, StoreError, fault_of, store_error
from .forking import Forkable

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

BUSY_TIMEOUT_S = 30.0
# A writer that finds the file taken looks again after pauses that double and are drawn at random: many writers then
# neither keep the processors busy with looking nor starve one of them.
_SLICE_S = 0.005
_FIRST_PAUSE_S = 0.01
_LAST_PAUSE_S = 0.2
_MAX_VALUE_BYTES = 4 * 1024 * 1024


class _Handle(sqlite3.Connection):
    """A connection that remembers which file it opened."""

    file: tuple[int, int] | None = None


class Database(Forkable):
    """A SQLite file.

    Attributes:
        path: The file.
        read_only: Whether nothing is ever written to it.
        immutable: Whether it is read without locks, as a file that nobody changes.
        attached: Whether it is read as its writers read it: with their locks, and with nothing left beside it.
        journal: Journal mode wanted: `wal`, or `delete` where shared memory between processes does not work.
        busy_timeout_s: How long a transaction waits for other writers.
    """

    def __init__(
        self,
        path: Path,
        *,
        read_only: bool = False,
        immutable: bool = False,
        attached: bool = False,
        journal: str = "wal",
        busy_timeout_s: float = BUSY_TIMEOUT_S,
    ) -> None:
        super().__init__()
        self.path = path
        self.read_only = read_only or immutable or attached
        self.immutable = immutable
        self.attached = attached
        self.journal = journal
        self.busy_timeout_s = busy_timeout_s
        self._engine: Engine | None = None
        self._ours = False
        self._mode = ""

    def run(self, work: Callable[[Connection], _Result], *, write: bool = False) -> _Result:
        """What `work` returns, called in one transaction; it may be called again where another writer was in the way.

        Raises:
            StoreError: The file cannot be opened, read or written.
        """
        deadline = time.monotonic() + self.busy_timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                with self.entered(), self._transaction(write) as connection:
                    return work(connection)
            except CAUGHT as error:
                busy = fault_of(error) is Fault.BUSY
                if not busy or time.monotonic() > deadline:
                    if not busy:
                        self.close()
                    raise store_error(self.path, error) from error
                time.sleep(random.uniform(0.0, pause_s))
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def adopt(self) -> None:
        """The file is one of this product's: from now on it is kept in the journal mode wanted; raises `StoreError`."""
        self._ours = True
        if self._mode == self.journal:
            return
        try:
            with self.entered(), contextlib.closing(self._open()):
                pass
        except CAUGHT as error:
            # Another connection is reading; the next one to be opened changes the mode.
            if fault_of(error) is not Fault.BUSY:
                raise store_error(self.path, error) from error

    def snapshot(self, target: Path) -> None:
        """Writes the file's present content to a new file, compacted, in rollback mode; raises `StoreError`."""
        try:
            with self.entered(), contextlib.closing(self._open()) as connection:
                # As a URI, because a name that is not UTF-8 cannot be passed as text.
                connection.execute("VACUUM INTO ?", (target.absolute().as_uri(),))
        except CAUGHT as error:
            raise store_error(self.path, error) from error

    def run_with(self, other: Path, work: Callable[[sqlite3.Connection], _Result], *, immutable: bool) -> _Result:
        """What `work` returns, called in one write transaction on a connection that has another file attached.

        Args:
            other: The other file, called `source` in statements; it is only read.
            work: Is given the driver's connection.
            immutable: Whether nobody changes the other file meanwhile.

        Raises:
            StoreError: One of the files cannot be used.
        """
        options = "mode=ro&immutable=1" if immutable else "mode=ro"
        deadline = time.monotonic() + self.busy_timeout_s
        while True:
            try:
                with self.entered(), contextlib.closing(self._open()) as connection:
                    # With the default of 2 MiB, pages of the indices are written out and read back again and again.
                    connection.execute("PRAGMA cache_size = -65536")
                    connection.execute("ATTACH DATABASE ? AS source", (f"{other.absolute().as_uri()}?{options}",))
                    connection.execute("BEGIN IMMEDIATE")
                    result = work(connection)
                    connection.execute("COMMIT")
                    return result
            except CAUGHT as error:
                if fault_of(error) is not Fault.BUSY or time.monotonic() > deadline:
                    raise store_error(self.path, error) from error
                time.sleep(random.uniform(0.0, _LAST_PAUSE_S))

    def vacuum(self) -> None:
        """Gives unused space back, if nobody is in the way."""
        with contextlib.suppress(*CAUGHT), self.entered(), contextlib.closing(self._open()) as connection:
            connection.execute("VACUUM")

    def close(self) -> None:
        """Closes every idle connection; the next transaction opens a new one."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.dispose()

    def abandon(self) -> None:
        """Forgets the connections without closing them: their locks belong to the parent process."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.dispose(close=False)

    @contextlib.contextmanager
    def _transaction(self, write: bool) -> Iterator[Connection]:
        if write and self.read_only:
            raise StoreError(f"{self.path}: opened for reading only", Fault.READ_ONLY)
        begin = "BEGIN IMMEDIATE" if write else "BEGIN"
        for _ in range(3):
            with self._connected().execution_options(begin=begin) as connection, connection.begin():
                # Compared inside the transaction: once it holds the write lock, nobody swaps the file any more.
                if identity(self.path) == _opened(connection):
                    yield connection
                    return
            self.close()
        raise StoreError(f"{self.path}: replaced again and again", Fault.UNAVAILABLE)

    def _connected(self) -> Connection:
        with self.gate:
            if self._engine is None:
                self._engine = self._new_engine()
            engine = self._engine
        return engine.connect()

    def _new_engine(self) -> Engine:
        engine = create_engine(
            "sqlite+pysqlite://", creator=self._open, poolclass=QueuePool, pool_size=4, max_overflow=-1
        )
        event.listen(engine, "begin", _begin)
        return engine

    def _open(self) -> "_Handle":
        if not self.read_only:
            # SQLite would make the file too, but only after the look at it that a later look is compared with. Never an
            # existing one: closing it would drop the locks that this process holds on it through other connections.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        file = identity(self.path)
        reading = self.read_only and not self.attached
        mode = "mode=ro&immutable=1" if self.immutable else "mode=ro" if reading else "mode=rw"
        connection = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?{mode}",
            uri=True,
            timeout=_SLICE_S,
            isolation_level=None,
            check_same_thread=False,
            factory=_Handle,
        )
        connection.file = file
        try:
            connection.text_factory = _text
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
            connection.execute("PRAGMA temp_store = MEMORY")
            if not self.read_only:
                connection.execute("PRAGMA foreign_keys = ON")
                (mode_now,) = connection.execute("PRAGMA journal_mode").fetchone()
                # Changing it writes to the file, so not before the file is known to be one of this product's.
                self._mode = mode_now
                if self._ours and mode_now != self.journal:
                    connection.execute(f"PRAGMA journal_mode = {'wal' if self.journal == 'wal' else 'delete'}")
                # A killed process loses nothing; a machine that loses power may lose the last moments, never the file.
                connection.execute(f"PRAGMA synchronous = {'NORMAL' if self.journal == 'wal' else 'FULL'}")
        except sqlite3.Error:
            connection.close()
            raise
        return connection


def identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from another that took its name; None where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _opened(connection: Connection) -> tuple[int, int] | None:
    handle = connection.connection.dbapi_connection
    return handle.file if isinstance(handle, _Handle) else None


def _text(stored: bytes) -> str:
    return stored.decode("utf-8", "replace")


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))
