"""A server database: the same tables, spoken to through a URL, shared by every host that knows it."""

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection, Engine, create_engine, func, inspect, make_url, select, text
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import QueuePool

from layout_tuner.errors import CacheError

from . import migrations, schema
from .faults import CAUGHT, Fault, StoreError, fault_of, store_error
from .forking import Forkable
from .models import SCHEMA_VERSION, SchemaVersion
from .sql import SqlStore

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

CONNECT_TIMEOUT_S = 3
STATEMENT_TIMEOUT_MS = 10_000
_ATTEMPTS = 5
# One number that every process agrees on, for the lock under which the tables are made.
_SCHEMA_LOCK = schema.APPLICATION_ID


class ServerDatabase(Forkable):
    """A PostgreSQL database and how it is spoken to."""

    def __init__(self, url: str) -> None:
        """Takes a URL; nothing is connected yet.

        Raises:
            CacheError: The URL is none, or names a database that is not supported.
        """
        super().__init__()
        try:
            self._url = make_url(url)
        except ArgumentError:
            raise CacheError("[cache] url: not a database URL; wanted postgresql+psycopg://user@host/name") from None
        if self._url.get_backend_name() != "postgresql":
            raise CacheError(f"[cache] url: {self._url.drivername} is not supported; wanted postgresql+psycopg")
        if self._url.drivername == "postgresql":
            self._url = self._url.set(drivername="postgresql+psycopg")
        self.name = self._url.render_as_string(hide_password=True)
        self._engine: Engine | None = None

    def run(self, work: Callable[[Connection], _Result], *, write: bool = False) -> _Result:
        """What `work` returns, called in one transaction; it may be called again after a conflict with another.

        Raises:
            StoreError: The server does not answer, or refuses.
        """
        del write
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with self.entered(), self._connected() as connection, connection.begin():
                    return work(connection)
            except (*CAUGHT, ImportError) as error:
                if fault_of(error) is not Fault.BUSY or attempt == _ATTEMPTS:
                    raise store_error(self.name, error) from error
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
                    connect_args={
                        "connect_timeout": CONNECT_TIMEOUT_S,
                        "options": f"-c statement_timeout={STATEMENT_TIMEOUT_MS}",
                    },
                )
            engine = self._engine
        return engine.connect()


class ServerStore(SqlStore):
    """Decisions in a server database."""

    def __init__(self, url: str, *, host: str | None = None, create: bool = True) -> None:
        """Connects.

        Args:
            url: The server.
            host: The name under which decisions are stored that carry none; by default this machine's.
            create: Make the tables where there are none; for reading there is no need.

        Raises:
            CacheError: The URL cannot be used.
            StoreError: The server does not answer, or its schema is of another version.
        """
        database = ServerDatabase(url)
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
        found = connection.execute(select(func.max(SchemaVersion.version))).scalar_one()
        if found is not None and found < SCHEMA_VERSION and self._create:
            migrations.require_steps(self._place, found, SCHEMA_VERSION)
            # All of them or, where one fails, none: definitions of tables are part of a transaction here.
            for version in range(found, SCHEMA_VERSION):
                migrations.step(connection, version)
            logger.info("%s: migrated from schema version %d to %d", self._place, found, SCHEMA_VERSION)
        elif found != SCHEMA_VERSION:
            raise StoreError(
                f"{self._place} has schema version {found}, this version of layout_tuner uses {SCHEMA_VERSION}",
                Fault.OLDER if found is None or found < SCHEMA_VERSION else Fault.NEWER,
            )
