"""A server database: the same tables, spoken to through a URL, shared by every host that knows it."""

import functools
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import unquote

from sqlalchemy import URL, Connection, Dialect, Engine, create_engine, event, func, inspect, make_url, select, text
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import QueuePool

from layout_tuner.errors import CacheError
from layout_tuner.forking import Forkable

from ..faults import CAUGHT, Fault, StoreError, fault_of, store_error
from ..sqlite import migrations, schema
from ..sqlite.models import SCHEMA_VERSION, SchemaVersion
from ..sqlite.sql import SqlStore

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

PATIENCE_S = 10.0
JOB_PATIENCE_S = 1.0
"""How long a command, and an op of a job, waits for a server."""

_DRIVER = "postgresql+psycopg"
# libpq and psycopg take no less than 2 s.
CONNECT_TIMEOUT_S = 3
# A server that is alive ends a statement by itself first.
GRACE_S = 0.5
_ATTEMPTS = 5
# One number that every process agrees on, for the lock under which the tables are made.
_SCHEMA_LOCK = schema.APPLICATION_ID


class ServerDatabase(Forkable):
    """A PostgreSQL database and how it is spoken to."""

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S) -> None:
        """Takes a URL; nothing is connected yet.

        Args:
            url: The server.
            patience_s: How long to wait for a connection, a statement or a lock, and then for anything at all.

        Raises:
            CacheError: The URL is none, or names a database that is not supported.
        """
        super().__init__()
        self._url = parse_url(url)
        self._secrets = _secrets(self._url)
        self.patience_s = patience_s
        self.name = _shown(self._url)
        self._engine: Engine | None = None

    def run(self, work: Callable[[Connection], _Result], *, write: bool = False) -> _Result:
        """What `work` returns, called in one transaction; it may be called again after a conflict with another.

        Raises:
            StoreError: The server does not answer, or refuses.
        """
        del write
        deadline = time.monotonic() + self.patience_s
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with self.entered(), self._connected() as connection, connection.begin():
                    return work(connection)
            except (*CAUGHT, ImportError) as error:
                if fault_of(error) is not Fault.BUSY or attempt == _ATTEMPTS or time.monotonic() > deadline:
                    raise self._failure(error) from None
                time.sleep(random.uniform(0.0, 0.02 * attempt))
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Closes every idle connection."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.dispose()

    def abandon(self) -> None:
        """Forgets the connections without a word to the server: they belong to the parent process."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.dispose(close=False)

    def _connected(self) -> Connection:
        with self.gate:
            if self._engine is None:
                self._engine = create_engine(
                    self._url,
                    poolclass=QueuePool,
                    pool_size=2,
                    max_overflow=-1,
                    # A connection that a restart of the server broke is replaced before it is used.
                    pool_pre_ping=True,
                    connect_args=_limits(self.patience_s),
                )
                event.listen(self._engine, "do_connect", functools.partial(_connect, patience_s=self.patience_s))
            engine = self._engine
        return engine.connect()

    def _failure(self, error: Exception) -> StoreError:
        """The error without anything that the URL keeps secret, which messages of the driver may quote."""
        failure = store_error(self.name, error)
        text = str(failure)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return StoreError(text, failure.fault)


def parse_url(url: str) -> URL:
    """The URL of a server; raises `CacheError` where it is none, or names a database that is not supported."""
    # What is wrong is not quoted: it may hold a password.
    wanted = f"wanted {_DRIVER}://user@host/name"
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise CacheError(f"[cache] url: not a database URL; {wanted}") from None
    if parsed.drivername not in ("postgresql", _DRIVER):
        raise CacheError(f"[cache] url: {parsed.drivername} is not supported; {wanted}")
    if "\0" in unquote(url):
        raise CacheError(f"[cache] url: holds a NUL character; {wanted}")
    if parsed.port is not None and not 0 < parsed.port < 2**16:
        raise CacheError(f"[cache] url: port {parsed.port} is none; wanted 1 to 65535")
    return parsed.set(drivername=_DRIVER)


def _secrets(url: URL) -> list[str]:
    """The secrets of a URL: its password, in either place where it may stand."""
    values = [url.password or "", *(value for name, value in _flat(url) if _secret(name))]
    return [value for value in values if value]


def _shown(url: URL) -> str:
    """A URL without its passwords."""
    query = {name: "***" if _secret(name) else value for name, value in url.query.items()}
    return url.set(query=query).render_as_string(hide_password=True).replace("%2A%2A%2A", "***")


def _flat(url: URL) -> Iterator[tuple[str, str]]:
    for name, values in url.query.items():
        yield from ((name, value) for value in ([values] if isinstance(values, str) else values))


def _secret(name: str) -> bool:
    return "pass" in name.lower()


def _limits(patience_s: float) -> dict[str, object]:
    """The time limits for driver, server and network; a stopped server is noticed by the first of them only."""
    limit_ms = round(1000 * patience_s)
    return {
        "connect_timeout": math.ceil(min(patience_s, CONNECT_TIMEOUT_S)),
        "options": f"-c statement_timeout={limit_ms} -c lock_timeout={limit_ms}",
        "keepalives_idle": 10,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": limit_ms,
    }


def _connect(
    dialect: Dialect, record: object, arguments: Sequence[object], options: dict[str, Any], *, patience_s: float
) -> Any:
    """A connection that ends itself where the server does not answer in time.

    A server whose process stands still keeps its connections open: its machine goes on to acknowledge what is sent,
    so neither a limit of the server nor one of the network ends the wait.
    """
    del dialect, record
    return _bounded_connection(patience_s + GRACE_S).connect(*arguments, **options)


@functools.cache
def _bounded_connection(limit_s: float) -> Any:
    import psycopg

    class Bounded(psycopg.Connection[Any]):
        def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
            return super().wait(bounded(self, gen), *arguments, **options)

    def bounded(connection: psycopg.Connection[Any], work: Any) -> Any:
        """The driver's steps, which ask to be resumed when the socket is ready or a moment has passed."""
        deadline = time.monotonic() + limit_s
        try:
            wanted = next(work)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > deadline:
                    connection.pgconn.finish()
                    raise psycopg.OperationalError(f"the server did not answer within {limit_s:g} s")
                wanted = work.send(ready)
        except StopIteration as done:
            return done.value

    return Bounded


class ServerStore(SqlStore):
    """Decisions in a server database."""

    def __init__(
        self, url: str, *, host: str | None = None, create: bool = True, patience_s: float = PATIENCE_S
    ) -> None:
        """Connects.

        Args:
            url: The server.
            host: The name under which decisions are stored that carry none; by default this machine's.
            create: Make the tables where there are none; for reading there is no need.
            patience_s: How long to wait for a connection, a statement or a lock.

        Raises:
            CacheError: The URL cannot be used.
            StoreError: The server does not answer, or its schema is of another version.
        """
        database = ServerDatabase(url, patience_s=patience_s)
        super().__init__(database, host)
        self._place = database.name
        self._create = create
        try:
            database.run(self._prepare, write=True)
        except StoreError:
            database.close()
            raise

    @property
    def name(self) -> str:
        """The URL, without its password."""
        return self._place

    def _prepare(self, connection: Connection) -> None:
        connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _SCHEMA_LOCK})
        if not inspect(connection).has_table(SchemaVersion.__tablename__):
            if not self._create:
                raise StoreError(f"{self._place}: holds no decisions yet, not even their tables", Fault.UNAVAILABLE)
            schema.create(connection)
            return
        stored = connection.execute(select(func.max(SchemaVersion.version))).scalar_one()
        if stored is not None and stored < SCHEMA_VERSION and self._create:
            migrations.require_steps(self._place, stored, SCHEMA_VERSION)
            # All of them or, where one fails, none: definitions of tables are part of a transaction here.
            for version in range(stored, SCHEMA_VERSION):
                migrations.step(connection, version)
            log.info("%s: migrated from schema version %d to %d", self._place, stored, SCHEMA_VERSION)
        elif stored != SCHEMA_VERSION:
            raise StoreError(
                f"{self._place} has schema version {stored}, this version of layout_tuner uses {SCHEMA_VERSION}",
                Fault.OLDER if stored is None or stored < SCHEMA_VERSION else Fault.NEWER,
            )
