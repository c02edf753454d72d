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
held, done = threading.Event(), threading.Event()

def hold():
    for lock in forking._locks:
        lock.acquire()
    held.set()
    done.wait()
    for lock in forking._locks:
        lock.release()

assert all(lock in forking._locks for lock in named)
other = threading.Thread(target=hold)
other.start()
held.wait()
assert not any(lock.acquire(blocking=False) for lock in named)

def check():
    assert len(named) == 9 and all(lock.acquire(blocking=False) for lock in named)

try:
    in_fork(check)
finally:
    done.set()
    other.join()
"""

HELD_BY_ITSELF = """
from layout_tuner.forking import ProcessLock

lock = ProcessLock()

def taken():
    got = []
    def take():
        got.append(lock.acquire(blocking=False))
        if got[0]:
            lock.release()
    other = threading.Thread(target=take)
    other.start()
    other.join()
    return got[0]

def check():
    assert not taken()
    lock.release()
    assert not taken()  # held twice
    lock.release()
    assert taken()

with lock, lock:
    in_fork(check)
    assert not taken()
assert taken()
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
