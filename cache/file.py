"""A store in one SQLite file."""

import os
from datetime import datetime
from pathlib import Path

from . import schema
from .database import BUSY_TIMEOUT_S, Database
from .sql import SqlStore


class Store(SqlStore):
    """Decisions in one SQLite file. Any number of threads and processes may use the same file.

    Attributes:
        path: The file.
        read_only: Whether it takes no decisions, because it was opened so.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        read_only: bool = False,
        immutable: bool = False,
        journal: str = "wal",
        host: str | None = None,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        verify: bool = False,
    ) -> None:
        """Opens the file; unless it is for reading only, makes it where there is none and repairs what can be repaired.

        A file that is no database is set aside under another name and a new one begun; one of an older schema is migrated.

        Args:
            path: The file.
            read_only: Never write to it.
            immutable: Read it without locks, as a file that nobody changes; implies `read_only`.
            journal: `wal`, or `delete` where processes cannot share memory, as on a network file system.
            host: The name under which decisions are stored that carry none; by default this machine's.
            busy_timeout_s: How long to wait for other writers.
            verify: Look at every page first, as after trouble with the file.

        Raises:
            StoreError: A `CacheError`: the file can be neither used nor made, or belongs to something else.
        """
        self.path = Path(path)
        database = Database(
            self.path, read_only=read_only, immutable=immutable, journal=journal, busy_timeout_s=busy_timeout_s
        )
        schema.prepare(database, verify=verify)
        super().__init__(database, host)
        self._database: Database = database
        self.read_only = database.read_only

    @property
    def name(self) -> str:
        """The file's path."""
        return str(self.path)

    def snapshot(self, target: Path) -> None:
        """Writes the present content to a new file, compacted; raises `StoreError`."""
        self._database.snapshot(target)

    def prune(
        self, *, older_than: datetime | None = None, environment: str | None = None, op: str | None = None
    ) -> int:
        """As `SqlStore.prune`, and gives the space back."""
        removed = super().prune(older_than=older_than, environment=environment, op=op)
        if removed:
            self._database.vacuum()
        return removed
