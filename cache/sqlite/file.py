"""A store in one SQLite file."""

import functools
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from ..faults import Fault, StoreError
from ..names import has_other_name, resolved
from . import schema
from .bulk import Tally, saying_what_is_stored
from .database import BUSY_TIMEOUT_S, Database
from .sql import SqlStore
from .transfer import transfer, transfer_environments

WAL_MODE = b"\x02\x02"
"""What the bytes 18 and 19 of a file in WAL mode are."""


class Store(SqlStore):
    """Decisions in one SQLite file. Any number of threads and processes may use the same file.

    Attributes:
        path: The file.
        read_only: Whether it takes no decisions, because it was opened so.
        immutable: Whether it is read without locks.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        read_only: bool = False,
        immutable: bool = False,
        attached: bool = False,
        journal: str = "wal",
        host: str | None = None,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        verify: bool = False,
    ) -> None:
        """Opens the file; unless it is for reading only, makes it where there is none and repairs what can be repaired.

        A damaged database is set aside under another name and a new one begun; one of an older schema is migrated.
        What neither looks like a database nor is named as one is left alone.

        Args:
            path: The file.
            read_only: Never write to it.
            immutable: Read it without locks, as a file that nobody changes; implies `read_only`.
            attached: Read it with the locks of those who write it, which takes a right to write; implies `read_only`.
            journal: `wal`, or `delete` where processes cannot share memory, as on a network file system.
            host: The name under which decisions are stored that carry none; by default this machine's.
            busy_timeout_s: How long to wait for other writers.
            verify: Look at every page first, as after trouble with the file.

        Raises:
            StoreError: A `CacheError`: the file can be neither used nor made, or belongs to something else.
        """
        self.path = Path(path)
        database = Database(
            self.path,
            read_only=read_only,
            immutable=immutable,
            attached=attached,
            journal=journal,
            busy_timeout_s=busy_timeout_s,
        )
        try:
            schema.prepare(database, verify=verify)
        except StoreError:
            database.close()
            raise
        super().__init__(database, host)
        self._database: Database = database
        self.read_only = database.read_only
        self.immutable = database.immutable

    @property
    def name(self) -> str:
        """The file's path."""
        return str(self.path)

    def snapshot(self, target: Path) -> None:
        """Writes the present content to a new file, compacted; raises `StoreError`."""
        self._database.snapshot(target)

    def absorb_file(
        self, other: "Store", *, as_imported: bool, progress: Callable[[int], None] = lambda done: None
    ) -> Tally:
        """Merges another file: of two decisions in one slot the later stays, of two miss counts the larger.

        Args:
            other: The other file.
            as_imported: Whether what other hosts measured counts as imported from now on.
            progress: Is told how many decisions of the other file are done.

        Raises:
            StoreError: One of the files cannot be used; the message says how much was stored before that. Absorbing it
                again does no harm.
        """
        host = self._host if as_imported else None
        tally = Tally()
        after: int | None = 0
        with saying_what_is_stored(tally):
            self._database.run_with(other.path, transfer_environments, immutable=other.immutable)
            while after is not None:
                step = functools.partial(transfer, host=host, after=after)
                done, after = self._database.run_with(other.path, step, immutable=other.immutable)
                tally += done
                progress(tally.seen)
            if not as_imported:
                self.absorb((), misses=other.each_miss())
        return tally

    def prune(
        self, *, older_than: datetime | None = None, environment: str | None = None, op: str | None = None
    ) -> int:
        """As `SqlStore.prune`, and gives the space back."""
        removed = super().prune(older_than=older_than, environment=environment, op=op)
        if removed:
            self._database.vacuum()
        return removed


def open_for_reading(path: Path) -> Store:
    """A file that is not to be written: with the locks of its writers, or as one that has none.

    Raises:
        StoreError: It cannot be read.
    """
    place = resolved(path)
    ways: list[Callable[[], Store]] = []
    # The writers of a file with another name may keep their locks, and what they wrote last, beside that one.
    if os.access(place, os.W_OK) and os.access(place.parent, os.W_OK) and not has_other_name(place):
        ways.append(functools.partial(Store, path, attached=True))
    elif Path(f"{place}-wal").exists() or not in_wal_mode(place):
        # Otherwise SQLite would make files beside it that belong to the reader and lock its owner out.
        ways.append(functools.partial(Store, path, read_only=True))
    for way in ways:
        try:
            return way()
        except StoreError as error:
            if error.fault not in (Fault.READ_ONLY, Fault.UNAVAILABLE):
                raise
    return Store(path, immutable=True)


def in_wal_mode(path: Path) -> bool:
    """Whether a file's header says that its writers use WAL. Not for a file that this process writes."""
    try:
        with path.open("rb") as file:
            return file.read(20)[18:] == WAL_MODE
    except OSError:
        return False
