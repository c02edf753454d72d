"""Calls without a decision, written to the cache in the background.

A choice that stands in for a decision has a tally, as every choice has; what it counted since the last time is added
to the cache's counts by a daemon thread, at the end of a scope, and at exit. No call waits for that. A child process
begins with nothing to write: what its parent counted is its parent's.
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
    """What takes misses."""

    def record_misses(self, misses: list[MissRecord]) -> None: ...


class MissLog:
    """One router's misses that are not in its cache yet."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[Tally, Recorder]] = {}
        self._lock = ProcessLock()
        _logs.add(self)

    def watch(self, tally: Tally, store: Recorder) -> None:
        """Record from now on what a tally counts."""
        if id(tally) not in self._watched:
            self._watched[id(tally)] = (tally, store)
            _start()

    def flush(self) -> None:
        """Write what was counted since the last time."""
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
        """In a child: what was counted so far is the parent's to write."""
        for tally, _ in list(self._watched.values()):
            tally.flushed = tally.calls


_logs: weakref.WeakSet[MissLog] = weakref.WeakSet()
_stop = threading.Event()
_thread: threading.Thread | None = None


def _start() -> None:
    """Have a thread that writes."""
    global _thread
    if _thread is None or not _thread.is_alive():
        _thread = threading.Thread(target=_run, name="layout_tuner misses", daemon=True)
        _thread.start()


def _run() -> None:
    while not _stop.wait(PAUSE_S):
        flush()


def flush() -> None:
    """Write what every router counted since the last time."""
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
    """In a child: no thread writes yet, and nothing is to be written."""
    global _thread, _stop
    _thread, _stop = None, threading.Event()
    for each in list(_logs):
        each.forget()


atexit.register(_at_exit)
