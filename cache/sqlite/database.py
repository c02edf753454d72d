"""One SQLite file and how it is spoken to: connections, transactions, waiting, forks, files swapped underneath.

A connection is never used by two threads at once and never crosses a fork: before a fork the process closes all its
idle ones, because SQLite keeps the state of file locks in memory that a child would inherit without the locks.
"""

import contextlib
import functools
import logging
import os
import random
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool

from layout_tuner.forking import Forkable

from ..faults import CAUGHT, Fault, StoreError, fault_of, store_error
from ..names import journal_beside, require_one_name, resolved
from .plain import require_plain

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

BUSY_TIMEOUT_S = 30.0
READING_TIMEOUT_S = 60.0
WRITING_TIMEOUT_S = 600.0
# A writer that finds the file taken looks again after pauses that double and are drawn at random: many writers then
# neither keep the processors busy with looking nor starve one of them.
_SLICE_S = 0.005
_FIRST_PAUSE_S = 0.01
_LAST_PAUSE_S = 0.2
_MAX_VALUE_BYTES = 4 * 1024 * 1024
# Steps of SQLite's machine, about a millisecond of them, between two looks at the clock and at signals.
_STEPS = 100_000
# What no statement of this product does, whatever a file's schema wants to have done.
_REFUSED_ACTIONS = frozenset(
    {
        sqlite3.SQLITE_CREATE_TRIGGER,
        sqlite3.SQLITE_CREATE_TEMP_TRIGGER,
        sqlite3.SQLITE_CREATE_VIEW,
        sqlite3.SQLITE_CREATE_TEMP_VIEW,
        sqlite3.SQLITE_CREATE_VTABLE,
        sqlite3.SQLITE_DROP_VTABLE,
    }
)


class _Clock:
    """The deadline of what a connection is doing."""

    deadline = float("inf")

    def over(self) -> bool:
        """Whether it is time."""
        return time.monotonic() > self.deadline


class _Handle(sqlite3.Connection):
    """A connection that remembers which file it opened, and how long it may take."""

    file: tuple[int, int] | None = None
    clock: _Clock


class Database(Forkable):
    """A SQLite file, which may come from anybody: nothing that it says is run.

    Every connection looks at the whole schema first, refuses at any time what a view or a trigger asks for, and ends a
    transaction that takes too long. Python 3.12 and later also set SQLite's defensive mode; Python 3.11 cannot, and
    there the refusals above stand alone.

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
            with self._alone():
                pass
        except CAUGHT as error:
            # Another connection is reading; the next one to be opened changes the mode.
            if fault_of(error) is not Fault.BUSY:
                raise store_error(self.path, error) from error

    def snapshot(self, target: Path) -> None:
        """Writes the file's present content to a new file, compacted, in rollback mode; raises `StoreError`."""
        try:
            with self._alone() as connection:
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
                with self._alone() as connection:
                    journal_beside(resolved(other))
                    # With the default of 2 MiB, pages of the indices are written out and read back again and again.
                    connection.execute("PRAGMA cache_size = -65536")
                    connection.execute("ATTACH DATABASE ? AS source", (f"{other.absolute().as_uri()}?{options}",))
                    require_plain(connection, "source")
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
        with contextlib.suppress(*CAUGHT), self._alone() as connection:
            connection.execute("VACUUM")

    @property
    def file(self) -> Path:
        """The file behind every symbolic link, beside which SQLite keeps its journals; raises `StoreError`."""
        return resolved(self.path)

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
                handle = connection.connection.dbapi_connection
                assert isinstance(handle, _Handle)
                if identity(self.path) == handle.file:
                    limit_s = WRITING_TIMEOUT_S if write else READING_TIMEOUT_S
                    with _limited(self.path, handle.clock, limit_s):
                        yield connection
                    return
            self.close()
        raise StoreError(f"{self.path}: replaced again and again", Fault.UNAVAILABLE)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[sqlite3.Connection]:
        """A connection for one use, which may take as long as it takes."""
        with (
            self.entered(),
            contextlib.closing(self._open()) as connection,
            _limited(self.path, connection.clock, float("inf")),
        ):
            yield connection

    def _connected(self) -> Connection:
        with self.gate:
            if self._engine is None:
                self._engine = self._new_engine()
            engine = self._engine
        return engine.connect()

    def _new_engine(self) -> Engine:
        pattern = _pattern()
        # One dialect for all files, and so one memory of compiled statements: hundreds of hosts' files are read alike.
        creator: Callable[[], Any] = self._open
        pool = QueuePool(creator, pool_size=4, max_overflow=-1, dialect=pattern.dialect)
        engine = Engine(pool, pattern.dialect, pattern.url, execution_options={"compiled_cache": _COMPILED})
        event.listen(engine, "begin", _begin)
        return engine

    def _open(self) -> "_Handle":
        path = self.file
        unfinished = journal_beside(path)
        if unfinished and self.immutable:
            raise StoreError(
                f"{path}: {path.name}-journal lies beside it: it is being written, or its writer was killed",
                Fault.UNAVAILABLE,
            )
        if not self.read_only:
            # SQLite would make the file too, but only after the look at it that a later look is compared with. Never an
            # existing one: closing it would drop the locks that this process holds on it through other connections.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            require_one_name(path)
        file = identity(path)
        # What is only looked at is not repaired: without a right to write, SQLite refuses to play a journal back.
        reading = self.read_only and (unfinished or not self.attached)
        mode = "mode=ro&immutable=1" if self.immutable else "mode=ro" if reading else "mode=rw"
        connection = sqlite3.connect(
            f"{path.as_uri()}?{mode}",
            uri=True,
            timeout=_SLICE_S,
            isolation_level=None,
            check_same_thread=False,
            factory=_Handle,
        )
        connection.file = file
        try:
            _restrain(connection)
            require_plain(connection)
            if not self.read_only:
                connection.execute("PRAGMA foreign_keys = ON")
                (mode_now,) = connection.execute("PRAGMA journal_mode").fetchone()
                # Changing it writes to the file, so not before the file is known to be one of this product's.
                self._mode = mode_now
                if self._ours and mode_now != self.journal:
                    connection.execute(f"PRAGMA journal_mode = {'wal' if self.journal == 'wal' else 'delete'}")
                # A killed process loses nothing; a machine that loses power may lose the last moments, never the file.
                connection.execute(f"PRAGMA synchronous = {'NORMAL' if self.journal == 'wal' else 'FULL'}")
        except (sqlite3.Error, StoreError):
            connection.close()
            raise
        return connection


_COMPILED: dict[object, object] = {}


@functools.cache
def _pattern() -> Engine:
    """An engine whose dialect has met a connection, as each has to once."""
    engine = create_engine("sqlite+pysqlite://")
    engine.connect().close()
    engine.dispose()
    return engine


def _restrain(connection: _Handle) -> None:
    """Restrains a connection: it runs nothing that its file asks for, and ends what takes too long."""
    clock = connection.clock = _Clock()
    clock.deadline = time.monotonic() + READING_TIMEOUT_S
    connection.set_progress_handler(clock.over, _STEPS)
    connection.set_authorizer(_authorized)
    connection.text_factory = _text
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    if sys.version_info >= (3, 12):
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    # A file that gets shorter while it is mapped ends the process.
    connection.execute("PRAGMA mmap_size = 0")
    connection.execute("PRAGMA temp_store = MEMORY")


def _authorized(action: int, one: str | None, other: str | None, schema: str | None, source: str | None) -> int:
    """What SQLite asks of every part of a statement: `source` names the view or trigger that wants it."""
    del one, other, schema
    return sqlite3.SQLITE_DENY if source is not None or action in _REFUSED_ACTIONS else sqlite3.SQLITE_OK


@contextlib.contextmanager
def _limited(path: Path, clock: _Clock, limit_s: float) -> Iterator[None]:
    """Around statements: after the limit they end with `StoreError`, and Ctrl-C ends them at once."""
    clock.deadline = time.monotonic() + limit_s
    try:
        yield
    except (sqlite3.Error, DBAPIError) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        if getattr(cause, "sqlite_errorcode", None) != sqlite3.SQLITE_INTERRUPT:
            raise
        if not clock.over():
            # The look at the clock raised, which only a signal's handler does there.
            raise KeyboardInterrupt from None
        text = f"{path}: a transaction took longer than {limit_s:g} s and was ended"
        raise StoreError(text, Fault.UNAVAILABLE) from error
    finally:
        clock.deadline = float("inf")


def identity(path: Path) -> tuple[int, int] | None:
    """The identity of a file, which another file of the same name does not have; None where there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _text(stored: bytes) -> str:
    return stored.decode("utf-8", "replace")


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))
