"""Holding connections in a process that may fork: none of them is in use, or open, while it does."""

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

_PATIENCE_S = 5.0


class Forkable:
    """Something that holds connections which must not cross a fork.

    Attributes:
        gate: Guards what the object holds.
    """

    def __init__(self) -> None:
        self.gate = threading.Condition(threading.RLock())
        self._running = 0
        self._forking = False
        _holders.add(self)

    def close(self) -> None:
        """Closes every idle connection."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Forgets, in a child, connections that a fork caught open."""
        raise NotImplementedError

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # What was dropped without being closed closes here, not whenever its connections happen to be collected. As
        # the interpreter ends, this module's globals may be gone, and the process closes everything.
        if not ending():
            with contextlib.suppress(Exception):
                self.close()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Around the use of a connection: a fork waits until it is over."""
        with self.gate:
            self.gate.wait_for(lambda: not self._forking, timeout=_PATIENCE_S)
            self._running += 1
        try:
            yield
        finally:
            with self.gate:
                self._running -= 1
                self.gate.notify_all()

    def before_fork(self) -> None:
        """Waits until no connection is in use and closes the idle ones."""
        with self.gate:
            self._forking = True
            self.gate.wait_for(lambda: self._running == 0, timeout=_PATIENCE_S)
            self.close()

    def after_fork(self, child: bool) -> None:
        """Opens the way again, in a child with locks of its own."""
        if child:
            self.gate = threading.Condition(threading.RLock())
            self._running = 0
            self._forking = False
            self.abandon()
            return
        with self.gate:
            self._forking = False
            self.gate.notify_all()


class ProcessLock:
    """A re-entrant lock that a child process finds free, whichever thread of its parent held it at the fork."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Starts anew, in a child."""
        self._lock = threading.RLock()


_locks: "weakref.WeakSet[ProcessLock]" = weakref.WeakSet()
_holders: "weakref.WeakSet[Forkable]" = weakref.WeakSet()


def _before() -> None:
    for holder in list(_holders):
        holder.before_fork()


def _after(child: bool) -> None:
    for holder in list(_holders):
        holder.after_fork(child)
    if child:
        for lock in list(_locks):
            lock.renew()


os.register_at_fork(
    before=_before, after_in_parent=lambda: _after(child=False), after_in_child=lambda: _after(child=True)
)
