"""A call with a time limit, made in a thread of its own.

Nothing in a process can end a thread that is stuck in a compiler or in a driver; it can be left behind. A thread that
is left behind is told to stop as soon as it runs Python again, so that what it was compiling is never launched.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ..forking import renewed_in_child

R = TypeVar("R")

GRACE_S = 1.0

_left: list[threading.Thread] = []


class Abandoned(BaseException):
    """Ends a thread whose result nobody waits for any more; no `except Exception` of a candidate stops it."""


class _Family(threading.local):
    """The thread for which this one works; a thread that works for no other is its own."""

    def __init__(self) -> None:
        self.head = threading.get_ident()


_family = _Family()


class FamilyLock:
    """A re-entrant lock that a thread shares with those that work for it while it waits for them.

    A child process finds it free, unless the thread that forked holds it or works for the one that does.
    """

    def __init__(self) -> None:
        self._free = threading.Condition(threading.Lock())
        self._head: int | None = None
        self._depth = 0
        renewed_in_child(self)

    def renew(self) -> None:
        """Frees the lock, in a child, from threads that are not there any more."""
        self._free = threading.Condition(threading.Lock())
        if self._head != _family.head:
            self._head, self._depth = None, 0

    def __enter__(self) -> None:
        with self._free:
            self._free.wait_for(lambda: self._head in (None, _family.head))
            self._head = _family.head
            self._depth += 1

    def __exit__(self, *error: object) -> None:
        with self._free:
            self._depth -= 1
            if not self._depth:
                self._head = None
                self._free.notify_all()


class _Job(Generic[R]):
    """A call, and its result or error."""

    def __init__(self, function: Callable[[], R]) -> None:
        self.head = _family.head
        self.function = function
        self.result: R | None = None
        self.error: BaseException | None = None
        self.done = threading.Event()

    def __call__(self) -> None:
        _family.head = self.head
        try:
            self.result = self.function()
        except BaseException as error:  # it belongs to whoever waits
            self.error = error
        finally:
            self.done.set()


def run_within(seconds: float, function: Callable[[], R]) -> R:
    """The result of a call, or what it raised.

    The thread has the caller's `FamilyLock`s. Gradients, autocast and the current stream are as in any new thread.

    Args:
        seconds: How long to wait; less than 0 counts as 0.
        function: What to call.

    Raises:
        TimeoutError: It is not done by then. Its thread is left behind.
    """
    job = _Job(function)
    thread = threading.Thread(target=job, name="layout_tuner candidate", daemon=True)
    thread.start()
    try:
        done = job.done.wait(min(max(seconds, 0.0), threading.TIMEOUT_MAX))
    except BaseException:  # Ctrl-C: the process may end now, and a thread in the middle of a kernel would not let it
        leave(thread)
        raise
    if not done:
        leave(thread, min(GRACE_S, seconds / 10))
        raise TimeoutError("no result within its time")
    thread.join()
    if job.error is not None:
        raise job.error
    return job.result  # type: ignore[return-value]


def leave(thread: threading.Thread, grace_s: float = GRACE_S) -> None:
    """Tell a thread to stop, and wait a moment for it."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Abandoned))
    thread.join(max(grace_s, 0.0))
    if thread.is_alive():
        _left.append(thread)


def left_behind() -> int:
    """Threads that were left behind and have not ended yet."""
    _left[:] = [thread for thread in _left if thread.is_alive()]
    return len(_left)
