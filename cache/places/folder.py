"""Decisions on a network file system: each host writes a file of its own, and readers merge all of them.

SQLite's locks and shared memory do not hold between hosts, so no file has two writers. For the file
`decisions.sqlite`, host `node7` writes `decisions.node7-<id>.sqlite` next to it.
"""

import functools
import heapq
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import TypeVar

from ..evidence import choose
from ..faults import Fault, StoreError
from ..hosts import this_host
from ..merge import Evidence
from ..misses import frequency
from ..records import DecisionRecord, EnvironmentRecord, KeyRecord, MissRecord
from ..sqlite import queries
from ..sqlite.bulk import Progress, silent
from ..sqlite.file import Store, in_wal_mode

log = logging.getLogger(__name__)

_Record = TypeVar("_Record")

_MAX_PEERS = 4096
_MAX_OPEN = 64


def host_file(path: Path, host: str) -> Path:
    """The file that a host writes instead of `path`."""
    return path.with_name(f"{path.stem}.{host}{path.suffix}")


def host_files(path: Path) -> list[Path]:
    """Every file that hosts wrote instead of `path`, and `path` itself where it exists."""
    own = re.compile(re.escape(path.stem) + r"\.[A-Za-z0-9._-]+" + re.escape(path.suffix))
    try:
        files = [each for each in path.parent.iterdir() if own.fullmatch(each.name)]
    except OSError:
        return []
    return sorted(files)[:_MAX_PEERS] + ([path] if path.exists() else [])


class FolderStore:
    """The files of all hosts as one store; only this host's is written.

    Attributes:
        path: The file that they stand for.
        read_only: Whether not even this host's file is written, nor made where there is none.
    """

    def __init__(self, path: Path, *, host: str | None = None, read_only: bool = False) -> None:
        """Opens this host's file.

        Args:
            path: The file that all hosts name.
            host: This host.
            read_only: Only read what hosts have written so far.

        Raises:
            StoreError: This host's file can be neither used nor made.
        """
        self.path = path
        self.read_only = read_only
        self._own_path = host_file(path, host or this_host())
        self._own = None if read_only else Store(self._own_path, journal="delete", host=host)
        self._peers: dict[Path, Store] = {}
        # What each of the other files held when it was last read, so that only those with a key are asked for it.
        self._keys: dict[Path, tuple[tuple[int, ...], frozenset[int]]] = {}
        self._said: set[Path] = set()

    @property
    def name(self) -> str:
        """This host's file, or the one that all of them stand for."""
        return str(self.path if self.read_only else self._own_path)

    @property
    def own(self) -> Store:
        """This host's file, to write to; raises `StoreError` where it is only read."""
        if self._own is None:
            raise StoreError(f"{self.path}: opened for reading only", Fault.READ_ONLY)
        return self._own

    def publish(self, decision: DecisionRecord, environment: EnvironmentRecord) -> DecisionRecord:
        """Stores a decision in this host's file."""
        return self.own.publish(decision, environment)

    def evidence(self, key: KeyRecord, environment: str) -> tuple[DecisionRecord, ...]:
        """Every decision for a key in an environment, of all hosts."""
        merged = Evidence()
        for store in self._holding(queries.key_hash(key, environment)):
            for record in self._read(store, lambda each: each.evidence(key, environment)):
                merged.add_decision(record)
        return tuple(merged.decisions.values())

    def lookup(self, key: KeyRecord, environment: str) -> DecisionRecord | None:
        """The strongest decision whose winner is not known to fail."""
        return choose(self.evidence(key, environment))

    def decisions(self, *, environment: str | None = None, op: str | None = None) -> Iterator[DecisionRecord]:
        """Every decision of all hosts, in the order of keys."""
        for records in self.by_key(environment=environment, op=op):
            yield from records

    def by_key(self, *, environment: str | None = None, op: str | None = None) -> Iterator[list[DecisionRecord]]:
        """The decisions of all hosts for each environment and key, in the order of these.

        All files are read side by side, in pages that together hold as many keys as one file's would.
        """
        stores = []
        for store in self.stores():
            stores.append(store)
            if len(self._peers) > _MAX_OPEN and store is not self._own:
                store.close()
        most = max(queries.KEYS // max(len(stores), 1), 1)
        merged = heapq.merge(*[self._pages(store, environment, op, most) for store in stores], key=_order)
        for _, groups in itertools.groupby(merged, key=_order):
            evidence = Evidence()
            for record in itertools.chain.from_iterable(groups):
                evidence.add_decision(record)
            yield list(evidence.decisions.values())

    def _pages(
        self, store: Store, environment: str | None, op: str | None, most: int
    ) -> Iterator[list[DecisionRecord]]:
        """A file's decisions by key, as far as they can be read now."""
        pages = store.by_key(environment=environment, op=op, most=most)
        while records := self._read(store, lambda _: list(itertools.islice(pages, most))):
            yield from records

    def pour_into(self, copy: Store, progress: Progress = silent) -> None:
        """Merges what all hosts hold into a file; what of another host's cannot be read now is left out, and said.

        Args:
            copy: The file.
            progress: Is told how far it is.

        Raises:
            StoreError: This host's file cannot be read, or the copy not be written.
        """
        for store in self.stores():
            step = functools.partial(_told, progress, f"copying {store.path}")
            try:
                copy.absorb_file(store, as_imported=False, progress=step)
            except StoreError:
                # Reading alone tells whose fault it was.
                if self._read(store, lambda each: [sum(1 for _ in each.decisions())]):
                    raise
            if len(self._peers) > _MAX_OPEN and store is not self._own:
                store.close()

    def environments(self) -> list[EnvironmentRecord]:
        """Every environment, by id."""
        merged = Evidence()
        for store in self.stores():
            for record in self._read(store, lambda each: each.environments()):
                merged.add_environment(record)
        return [merged.environments[name] for name in sorted(merged.environments)]

    def record_misses(self, misses: Iterable[MissRecord]) -> None:
        """Adds misses to their counts, in this host's file."""
        self.own.record_misses(misses)

    def misses(self, environment: str | None = None) -> list[MissRecord]:
        """Every miss of all hosts, the most frequent first."""
        merged = Evidence()
        for store in self.stores():
            for miss in self._read(store, lambda each: each.misses(environment)):
                merged.add_miss(miss)
        return sorted(merged.misses.values(), key=frequency)

    def close(self) -> None:
        """Closes every file."""
        if self._own is not None:
            self._own.close()
        for store in self._peers.values():
            store.close()

    def stores(self) -> Iterator[Store]:
        """This host's file, then those of the others, as far as they can be read now."""
        if self._own is not None:
            yield self._own
        for path in self._others():
            store = self._peer(path)
            if store is not None:
                yield store

    def _others(self) -> list[Path]:
        """The files of other hosts."""
        return [path for path in host_files(self.path) if self._own is None or path != self._own_path]

    def _peer(self, path: Path) -> Store | None:
        """The file of another host, opened once; None where it cannot be read now."""
        store = self._peers.get(path)
        if store is None:
            try:
                store = self._peers[path] = _peer(path)
            except StoreError as error:
                self._say(path, error)
        return store

    def _holding(self, wanted: int) -> Iterator[Store]:
        """This host's file, then those of the others that hold a key, by its `key_hash`.

        With hundreds of hosts, asking each file about each key takes seconds; a file is read again when it changes.
        """
        if self._own is not None:
            yield self._own
        for path in self._others():
            state = _state(path)
            known = self._keys.get(path)
            if known is None or known[0] != state:
                store = self._peer(path)
                if store is None:
                    continue
                try:
                    known = state, frozenset(store.key_hashes())
                except StoreError as error:
                    self._say(path, error)
                    store.close()
                    continue
                self._keys[path] = known
                if len(self._peers) > _MAX_OPEN:
                    store.close()
            if wanted in known[1]:
                store = self._peer(path)
                if store is not None:
                    yield store

    def _read(self, store: Store, action: Callable[[Store], Iterable[_Record]]) -> Iterable[_Record]:
        """What a store holds. Another host may be in the middle of writing its file; one's own file has to work."""
        if store is self._own:
            return action(store)
        try:
            return action(store)
        except StoreError as error:
            store.close()
            self._say(store.path, error)
            return ()
        finally:
            # There may be more hosts than a process may have files open.
            if len(self._peers) > _MAX_OPEN:
                store.close()

    def _say(self, path: Path, error: StoreError) -> None:
        """Says once that a file is left out. An empty one is about to be begun by its host: worth no warning."""
        if path not in self._said:
            self._said.add(path)
            level = logging.INFO if error.fault is Fault.UNAVAILABLE else logging.WARNING
            log.log(level, "%s; left out for now", error)


def _told(progress: Progress, what: str, done: int) -> None:
    progress(what, done, None)


def _order(records: list[DecisionRecord]) -> tuple[object, ...]:
    """Where the decisions of one key come among others: texts and numbers sort here as they do in a file."""
    return records[0].environment, *astuple(records[0].key)


def _state(path: Path) -> tuple[int, ...]:
    """Changes when a file is written or replaced, or another process is about to write it; empty where it is gone."""
    state: list[int] = []
    for each in (path, path.with_name(f"{path.name}-wal")):
        try:
            status = os.stat(each)
        except OSError:
            continue
        state += [status.st_ino, status.st_size, status.st_mtime_ns]
    return tuple(state)


def _peer(path: Path) -> Store:
    """A file that another host may be writing, or one from before that no host writes any more."""
    in_use_in_place = path.with_name(f"{path.name}-wal").exists()
    return Store(path, read_only=True) if in_use_in_place or not in_wal_mode(path) else Store(path, immutable=True)
