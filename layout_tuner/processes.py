"""Processes of this program's own, in which what might end a process, or its use of a device, ends nobody else's.

Each has this one's modules, working directory and variables, and does not outlive it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from .forking import in_child

BOOT = (
    "import importlib, json, os, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "os.environ.update(json.loads(sys.argv[2])); "
    "importlib.import_module('layout_tuner.' + sys.argv[3]).main(*map(int, sys.argv[4:]))"
)
PR_SET_PDEATHSIG = 1

running: set[subprocess.Popen[bytes]] = set()


def start(
    entry: str, descriptors: Sequence[int], said: int, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process; `end` it, whatever became of it.

    Args:
        entry: Module of this package whose `main` it runs; that takes the descriptors and this process's id.
        descriptors: Open files that it inherits.
        said: Descriptor of a file for its output.
        variables: Environment variables that differ from this process's.

    Raises:
        OSError: It cannot be started.
    """
    if not sys.executable:
        raise OSError("this program does not say which Python runs it")
    path = [each for each in sys.path if isinstance(each, str)]
    numbers = [str(number) for number in (*descriptors, os.getpid())]
    child = subprocess.Popen(
        [sys.executable, "-c", BOOT, json.dumps(path), json.dumps(dict(variables or {})), entry, *numbers],
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=said,
        pass_fds=descriptors,
        start_new_session=True,  # Ctrl-C is for this process, which ends the child
    )
    running.add(child)
    return child


def end(child: subprocess.Popen[bytes]) -> None:
    """Kill a child, wherever it hangs."""
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(10.0)
    running.discard(child)


def ended(child: subprocess.Popen[bytes]) -> str:
    """How a child ended that said nothing more."""
    try:
        status = child.wait(10.0)
    except subprocess.TimeoutExpired:
        return "fell silent"
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def last_line(said: IO[bytes]) -> str:
    """The last line of what a child wrote; empty for nothing."""
    size = said.seek(0, os.SEEK_END)
    said.seek(max(0, size - 2000))
    lines = said.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def die_with_parent(parent: int) -> None:
    """Let this process be killed when the one that started it ends, and end it now where that is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


@atexit.register
def _end_all() -> None:
    for child in list(running):
        child.kill()


@in_child
def _forget() -> None:
    """The processes that a parent started are not a forked child's to end."""
    running.clear()
