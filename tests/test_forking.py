"""Locks, and what else is kept for a process, in a child that was forked while threads were at work."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

# `os._exit` tells the parent, and an alarm ends a child that waits for ever.
CHILD = """
import os, signal, threading, traceback

def in_fork(check):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            check()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status == 0, status
"""

HELD_BY_ANOTHER = """
import contextlib
from layout_tuner import forking
from layout_tuner.device import interpreter
from layout_tuner.dispatch import counters, misses, router
from layout_tuner.integrations import fla, takeover
from layout_tuner.launch import launcher
from layout_tuner.spec import packing
from layout_tuner.tuning import isolation

log = misses.MissLog()
named = [interpreter.interpreter_lock, counters._lock, router._stack_lock, fla._lock, takeover._lock, log._lock,
         launcher._interceptors_lock, packing._lock, isolation._lock]
routed = router.current()._lock
held, done = threading.Event(), threading.Event()

def hold():
    with contextlib.ExitStack() as locks:
        for lock in forking._locks:
            locks.enter_context(lock)
        held.set()
        done.wait()

assert all(lock in forking._locks for lock in (*named, routed))
other = threading.Thread(target=hold)
other.start()
held.wait()
assert not any(lock.acquire(blocking=False) for lock in named)
assert routed._head == other.ident

def check():
    assert len(named) == 9 and all(lock.acquire(blocking=False) for lock in named)
    with routed, routed:
        assert routed._head == threading.get_ident()

try:
    in_fork(check)
finally:
    done.set()
    other.join()
"""

HELD_BY_ITSELF = """
from layout_tuner.forking import ProcessLock
from layout_tuner.tuning.deadline import FamilyLock

class Tried(FamilyLock):
    def acquire(self, blocking):
        with self._free:
            free = self._head is None
        if free:
            self.__enter__()
        return free

    def release(self):
        self.__exit__()

def taken(lock):
    got = []
    def take():
        got.append(lock.acquire(blocking=False))
        if got[0]:
            lock.release()
    other = threading.Thread(target=take)
    other.start()
    other.join()
    return got[0]

for lock in (ProcessLock(), Tried()):
    def check():
        assert not taken(lock)
        lock.release()
        assert not taken(lock)  # held twice
        lock.release()
        assert taken(lock)

    with lock, lock:
        in_fork(check)
        assert not taken(lock)
    assert taken(lock)
"""

REGISTERED = """
import sys
from layout_tuner.forking import ProcessLock, in_child

lock = ProcessLock()
seen = []
sys.unraisablehook = lambda failure: seen.append(str(failure.exc_value))

@in_child
def first():
    seen.append(lock.acquire(blocking=False))

@in_child
def second():
    raise ValueError("second")

@in_child
def third():
    seen.append("third")

held, done = threading.Event(), threading.Event()

def hold():
    with lock:
        held.set()
        done.wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()

def check():
    assert seen == [True, "second", "third"], seen

in_fork(check)
assert seen == []
done.set()
"""


@pytest.mark.parametrize("code", [HELD_BY_ANOTHER, HELD_BY_ITSELF, REGISTERED], ids=["another", "itself", "registered"])
def test_a_child_has_its_own_state(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD + code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_one_module_alone_handles_forks() -> None:
    """A lock that a module keeps for the whole process is a `ProcessLock`."""
    own = re.compile(r"register_at_fork|^\w+ = threading\.(R?Lock|Condition)\(", re.MULTILINE)
    files = [*(ROOT / "layout_tuner").rglob("*.py"), *(ROOT / "cache").rglob("*.py")]
    found = {file.relative_to(ROOT).as_posix() for file in files if own.search(file.read_text())}
    assert found == {"layout_tuner/forking.py"}
