"""Examines a decision file and reports what is wrong or doubtful; it changes nothing."""

import contextlib
import functools
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sqlalchemy import Connection

from layout_tuner.errors import CacheError

from ..faults import CAUGHT, StoreError
from ..filesystem import FileSystem, file_system
from ..names import has_other_name, require_one_name, resolved
from ..places.folder import host_files
from ..places.server import ServerStore
from ..sqlite import schema
from ..sqlite.database import Database
from ..sqlite.file import WAL_MODE
from ..sqlite.models import SCHEMA_VERSION
from ..sqlite.queries import page_of_decisions
from ..sqlite.seal import SealState, seal_state

Level = Literal["ok", "note", "warning", "error"]

_LOCK_TEST_TIMEOUT_S = 20

# Run by another process: locks within one say nothing about locks between two.
_LOCK_TEST = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)
try:
    connection.execute("BEGIN IMMEDIATE")
except sqlite3.OperationalError as error:
    sys.exit(3 if "locked" in str(error) else 4)
"""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding.

    Attributes:
        level: `ok`, `note`, `warning` or `error`.
        subject: What was looked at.
        text: The state of the subject, and what to do about it.
    """

    level: Level
    subject: str
    text: str


def examine_server(url: str) -> list[Finding]:
    """What can be said about a server; raises `CacheError` where the URL is none."""
    try:
        with contextlib.closing(ServerStore(url, create=False)) as store:
            number = store.count()
            readable = sum(1 for _ in store.decisions())
            name = store.name
    except StoreError as error:
        return [Finding(level="error", subject="server", text=str(error))]
    return [
        Finding(level="ok", subject="server", text=f"{name} answers"),
        Finding(level="ok", subject="schema", text=f"version {SCHEMA_VERSION}"),
        _decisions(number, readable),
    ]


def examine(path: Path) -> list[Finding]:
    """Everything that can be said about a decision file, its place and its content.

    For a process that does not use the file at the same time: looking at its bytes would drop SQLite's locks on it.
    """
    try:
        path = resolved(path)
        there = path.exists()
    except (StoreError, OSError) as error:
        return [Finding(level="error", subject="file", text=str(error))]
    kind = file_system(path.parent)
    findings = [_place(kind)]
    files = [path] if there else []
    if not kind.local and not path.is_dir():
        files = host_files(path)
    if not files:
        return [*findings, Finding(level="note", subject="file", text="no file yet; the first decision makes one")]
    for file in files:
        of_host = f"{file.name}: " if file != path else ""
        findings += [replace(each, text=of_host + each.text) for each in _file(file)]
    return findings


def _place(kind: FileSystem) -> Finding:
    if kind.local:
        return Finding(level="ok", subject="file system", text=f"{kind.name}, local")
    text = f"{kind.name}, taken for a network: each host writes a file of its own, and all of them are read"
    return Finding(level="note", subject="file system", text=text)


def _file(path: Path) -> list[Finding]:
    """Everything that can be said about one file."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is no regular file"
        return [Finding(level="error", subject="file", text=what)]
    findings = [*_rights(path)]
    if not path.stat().st_size:
        return [*findings, Finding(level="note", subject="file", text="empty; the first decision begins it")]
    header = _header(path)
    findings += _content(path, header)
    if any(each.level == "error" for each in findings):
        findings += _copied(path, header)
    elif _written_here(path) and not has_other_name(path):
        findings.append(_locks(path))
    return findings


def _rights(path: Path) -> Iterator[Finding]:
    if path.stat().st_mode & 0o002:
        yield Finding(level="warning", subject="rights", text="anybody on this machine may write it: chmod o-w")
    if not os.access(path, os.W_OK):
        yield Finding(level="note", subject="rights", text="it can only be read")
    try:
        require_one_name(path)
    except StoreError as error:
        yield Finding(level="warning", subject="names", text=str(error))


def _header(path: Path) -> bytes:
    """The first 100 bytes; read before SQLite opens the file, whose locks closing it again would drop."""
    try:
        with path.open("rb") as file:
            return file.read(100)
    except OSError:
        return b""


def _content(path: Path, header: bytes) -> Iterator[Finding]:
    live = Path(f"{path}-wal").exists()
    if not live:
        yield from _seal(path)
    database = Database(path, read_only=True, immutable=not live)
    try:
        yield from _checks(database)
    except CAUGHT as error:
        yield Finding(level="error", subject="content", text=str(error))
    finally:
        database.close()


def _seal(path: Path) -> Iterator[Finding]:
    try:
        state = seal_state(path)
    except CacheError as error:
        yield Finding(level="error", subject="seal", text=str(error))
        return
    if state is SealState.SOUND:
        yield Finding(level="ok", subject="seal", text="an export, unchanged")
    elif state is SealState.BROKEN:
        yield Finding(level="error", subject="seal", text="an export that was changed after it was made")


def _checks(database: Database) -> Iterator[Finding]:
    stored = database.run(schema.file_version)
    if stored is None:
        yield Finding(level="error", subject="schema", text="the file has no tables")
        return
    level: Level = "ok" if stored == SCHEMA_VERSION else "warning"
    text = f"version {stored}" + (
        "" if stored == SCHEMA_VERSION else f"; this version of layout_tuner uses {SCHEMA_VERSION}"
    )
    yield Finding(level=level, subject="schema", text=text)
    answers = database.run(_rows("PRAGMA integrity_check(5)"))
    sound = answers == [("ok",)]
    yield Finding(
        level="ok" if sound else "error",
        subject="integrity",
        text="every page is sound" if sound else "; ".join(str(row[0]).replace("\n", " ") for row in answers),
    )
    for subject, (statement, remedy) in _ORPHANS.items():
        ((number,),) = database.run(_rows(statement))
        if number:
            yield Finding(
                level="warning", subject="orphans", text=f"{number} {subject}: `tuner cache prune --orphans` {remedy}"
            )
    yield _decisions(*_counted(database))


def _decisions(number: int, readable: int) -> Finding:
    """How many decisions there are, and how many of them count."""
    if not number:
        return Finding(level="note", subject="decisions", text="none yet")
    bad = number - readable
    text = f"{number}" + (f", {bad} of them unreadable and ignored" if bad else "")
    return Finding(level="warning" if bad else "ok", subject="decisions", text=text)


_ORPHANS = {
    "measurements belong to no decision": (
        "SELECT count(*) FROM measurements WHERE decision_id NOT IN (SELECT id FROM decisions)",
        "removes them",
    ),
    "decisions belong to no environment": (
        "SELECT count(*) FROM decisions WHERE environment_id NOT IN (SELECT id FROM environments)",
        "adds it, without facts",
    ),
}


def _rows(statement: str) -> Callable[[Connection], list[tuple[object, ...]]]:
    return lambda connection: [tuple(row) for row in connection.exec_driver_sql(statement)]


def _counted(database: Database) -> tuple[int, int]:
    """How many decisions there are, and how many of them can be read."""
    ((number,),) = database.run(_rows("SELECT count(*) FROM decisions"))
    readable = 0
    after: int | None = 0
    while after is not None:
        page, after = database.run(functools.partial(page_of_decisions, after=after))
        readable += len(page)
    return int(str(number)), readable


def _copied(path: Path, header: bytes) -> Iterator[Finding]:
    """Explains the damage of copying a file in use: what was written last is in the `-wal` file that stayed behind."""
    if header[18:20] == WAL_MODE and not Path(f"{path}-wal").exists():
        text = (
            "the file was in use and no -wal file is beside it, as when a live database is copied alone; "
            "if this is a copy, go back to the original and share it with `tuner cache export`"
        )
        yield Finding(level="warning", subject="copy", text=text)


def _written_here(path: Path) -> bool:
    return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)


def _locks(path: Path) -> Finding:
    """Whether a lock that this process holds keeps another process out."""
    try:
        connection = sqlite3.connect(path, timeout=5, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            command = [sys.executable, "-I", "-S", "-c", _LOCK_TEST, os.fspath(path)]
            code = subprocess.run(command, check=False, timeout=_LOCK_TEST_TIMEOUT_S, capture_output=True).returncode
            connection.execute("ROLLBACK")
        finally:
            connection.close()
    except (sqlite3.Error, subprocess.SubprocessError, OSError) as error:
        return Finding(level="warning", subject="locks", text=f"could not be tested: {error}")
    if code == 3:
        return Finding(level="ok", subject="locks", text="keep other processes out")
    text = "do not keep other processes out: the file must not be shared between them"
    return Finding(level="error" if code == 0 else "warning", subject="locks", text=text)
