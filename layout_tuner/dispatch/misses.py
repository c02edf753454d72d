"""Calls without a decision, written to the cache in the background.

Where there is no decision, a choice stands in for one and has a tally, as every choice has. A daemon thread adds what
such tallies have counted to the cache's counts from time to time, as do the end of a scope and the end of the process.
No call waits for that. A child process begins with nothing to write: its parent writes what its parent counted.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from datetime import UTC, datetime
from typing import Protocol

from layout_tuner.cache.records import MissRecord

from ..forking import ProcessLock, in_child
from ..launch.tally import Tally
from ..tuning.records import key_record

log = logging.getLogger(__name__)

PAUSE_S = 5.0


class Recorder(Protocol):
    """A store that counts misses."""

    def record_misses(self, misses: list[MissRecord]) -> None: ...


class MissLog:
    """One router's misses that are not in its cache yet."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[Tally, Recorder]] = {}
        self._lock = ProcessLock()
        _logs.add(self)

    def watch(self, tally: Tally, store: Recorder) -> None:
        """Record the calls of a tally from now on."""
        if id(tally) not in self._watched:
            self._watched[id(tally)] = (tally, store)
            _start()

    def flush(self) -> None:
        """Write the calls that were counted since the last time."""
        with self._lock:
            fresh: dict[int, tuple[Recorder, list[tuple[Tally, int, MissRecord]]]] = {}
            now = datetime.now(UTC)
            for tally, store in list(self._watched.values()):
                calls = tally.calls
                if calls <= tally.flushed or tally.key is None:
                    continue
                miss = MissRecord(
                    key=key_record(tally.key),
                    environment=tally.environment,
                    count=calls - tally.flushed,
                    first_seen=min(tally.first_seen, now),
                    last_seen=now,
                    reason=tally.reason,
                )
                fresh.setdefault(id(store), (store, []))[1].append((tally, calls, miss))
            for store, batch in fresh.values():
                try:
                    store.record_misses([miss for _, _, miss in batch])
                except Exception as error:  # a cache never fails an op
                    log.warning("cache: %s", error)
                    continue
                for tally, calls, _ in batch:
                    tally.flushed = calls

    def forget(self) -> None:
        """Leave, in a child, what was counted so far to the parent, which writes it."""
        for tally, _ in list(self._watched.values()):
            tally.flushed = tally.calls


_logs: weakref.WeakSet[MissLog] = weakref.WeakSet()
_stop = threading.Event()
_thread: threading.Thread | None = None


def _start() -> None:
    """Start the thread that writes, unless it runs."""
    global _thread
    if _thread is None or not _thread.is_alive():
        _thread = threading.Thread(target=_run, name="layout_tuner misses", daemon=True)
        _thread.start()


def _run() -> None:
    while not _stop.wait(PAUSE_S):
        flush()


def flush() -> None:
    """Write the calls that every router counted since the last time."""
    for each in list(_logs):
        try:
            each.flush()
        except Exception as error:  # a thread that ends would leave the rest unwritten
            log.warning("misses: %s", error)


def _at_exit() -> None:
    _stop.set()
    flush()


@in_child
def _forget() -> None:
    """A child has no thread that writes yet, and nothing to write."""
    global _thread, _stop
    _thread, _stop = None, threading.Event()
    for each in list(_logs):
        each.forget()


atexit.register(_at_exit)
