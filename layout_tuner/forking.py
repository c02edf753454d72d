"""What a process that may fork needs: locks that its children find free, and connections that none of them shares.

A child has only the thread that forked. What another thread of its parent held stays held in it for ever, and what
another thread was doing is never finished. `ProcessLock` is a lock for such a process, `in_child` registers what else
a child does first, and `Forkable` holds connections: while the process forks, none of them is in use or open. A lock
of another kind registers itself with `renewed_in_child`.
"""

import contextlib
import os
import sys
import threading
import weakref
from _thread import RLock
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

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


class Renewable(Protocol):
    """A lock that frees itself, in a child, from a thread that is not there any more."""

    def renew(self) -> None: ...


class ProcessLock(RLock):  # type: ignore[misc]  # final for type checkers only; a wrapper would cost calls more
    """A re-entrant lock that a child process finds free, whichever other thread of its parent held it at the fork.

    Where the thread that forks holds it, it is held in the child too, until that thread releases it there.
    """

    def __init__(self) -> None:
        super().__init__()
        renewed_in_child(self)

    def renew(self) -> None:
        """Frees the lock, in a child, unless the thread that forked holds it."""
        if self.acquire(blocking=False):
            self.release()
        else:
            self._at_fork_reinit()  # type: ignore[attr-defined]  # what Python's own modules call on their locks


_locks: "weakref.WeakSet[Renewable]" = weakref.WeakSet()
_holders: "weakref.WeakSet[Forkable]" = weakref.WeakSet()


def renewed_in_child(lock: Renewable) -> None:
    """Has every child renew a lock, for as long as there is that lock, before anything else runs there."""
    _locks.add(lock)


def _before() -> None:
    for holder in list(_holders):
        holder.before_fork()


def _after(child: bool) -> None:
    if child:
        for lock in list(_locks):
            lock.renew()
    for holder in list(_holders):
        holder.after_fork(child)


F = TypeVar("F", bound=Callable[[], None])


def in_child(function: F) -> F:
    """Calls a function in every child process that is forked from now on, when its locks are free again.

    A decorator; functions run in the order in which they were registered, and one that fails keeps no other from it.
    """
    if hasattr(os, "register_at_fork"):  # where there are no forks there is nothing to do
        os.register_at_fork(after_in_child=function)
    return function


# Registered before anything that `in_child` registers, so that locks come first.
in_child(lambda: _after(child=True))
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=lambda: _after(child=False))
