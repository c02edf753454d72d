"""The seal of an exported file: a hash of every byte of it, kept in the one row of a table of its own.

The hash is taken with zeros in its own place, and that place follows from the file's structure alone: the page where
SQLite's schema says that the table begins, and the format of a page. What other rows say cannot imitate it. A file in
use carries no seal.
"""

import contextlib
import hashlib
import logging
import os
import sqlite3
from enum import Enum
from pathlib import Path

from layout_tuner.errors import CacheError

log = logging.getLogger(__name__)

_MARK = b"layout_tuner-seal-sha256:"
_DIGITS = 64
_CHUNK = 1 << 20
_LEAF = 0x0D

BLANK = _MARK.decode() + "0" * _DIGITS
"""What the row says before the file is sealed."""


SEALED = (
    "is a sealed export and is not written to; import it into a file of your own with `tuner cache import`, or make it "
    "one with `chmod u+w`"
)
"""What to say where an export was to be written to."""


class SealState(Enum):
    """What a file's seal says."""

    NONE = "none"
    SOUND = "sound"
    BROKEN = "broken"


def seal(path: Path) -> str:
    """Seals a finished file that nobody has open and returns the hash; raises `CacheError`."""
    place = _place(path)
    if place is None:
        raise CacheError(f"{path}: has no place for a seal")
    digest = _digest(path, place)
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, digest.encode(), place)
    finally:
        os.close(descriptor)
    return digest


def seal_state(path: Path) -> SealState:
    """Whether a file is sealed, and still what was sealed; raises `CacheError` where it cannot be read.

    Not for a file that this process has open for writing: closing it a second time would drop SQLite's locks on it.
    """
    try:
        if os.stat(path).st_size == 0:
            return SealState.NONE
        try:
            place = _place(path)
        except (sqlite3.Error, _UnreadableSealError):
            return SealState.BROKEN if _mentions_a_seal(path) else SealState.NONE
        if place is None:
            return SealState.NONE
        with path.open("rb") as file:
            file.seek(place)
            stated = file.read(_DIGITS)
        return SealState.SOUND if stated == _digest(path, place).encode() else SealState.BROKEN
    except (OSError, ValueError) as error:
        raise CacheError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def locked_export(path: Path) -> bool:
    """Whether a file is an export, changed or not, that nobody has made writable: not even root writes to it."""
    try:
        return not os.stat(path).st_mode & 0o222 and seal_state(path) is not SealState.NONE
    except (OSError, CacheError):
        return False


def warn_about(path: Path) -> None:
    """Says what makes a shared file doubtful: anybody may write it, or it is no export but a file in use."""
    with contextlib.suppress(OSError):
        if os.stat(path).st_mode & 0o002:
            log.warning("%s: anybody on this machine may write it; take that right away (chmod o-w)", path)
        if Path(f"{path}-wal").exists():
            log.warning("%s: is in use by a writer, so what was written last is not seen; share an export of it", path)


class _UnreadableSealError(Exception):
    """The table of seals is there and is not as a sealed file has it."""


def _place(path: Path) -> int | None:
    """Where the digits are; None where there is no seal.

    Raises:
        sqlite3.Error: The file's schema cannot be read.
        _UnreadableSealError: There is something else where the seal should be.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        header = file.read(100)
        if len(header) < 100 or not header.startswith(b"SQLite format 3\0"):
            raise _UnreadableSealError
        root = _root_page(path)
        if root is None:
            return None
        # 1 stands for 65536, which two bytes cannot say.
        size = int.from_bytes(header[16:18], "big")
        size = 65536 if size == 1 else size
        file.seek((root - 1) * size)
        page = file.read(size)
    place = _in_page(page, 100 if root == 1 else 0)
    return None if place is None else (root - 1) * size + place


def _root_page(path: Path) -> int | None:
    """The page where the table of seals begins; None where there is no such table."""
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
        connection.execute("PRAGMA trusted_schema = OFF")
        row = connection.execute(
            "SELECT rootpage FROM sqlite_master WHERE type = 'table' AND name = 'seals'"
        ).fetchone()
    if row is None:
        return None
    if not isinstance(row[0], int) or row[0] < 1:
        raise _UnreadableSealError
    return row[0]


def _in_page(page: bytes, start: int) -> int | None:
    """Where the digits are in the page of a table with one small row; None where it has no row.

    Source: https://www.sqlite.org/fileformat2.html, sections 1.6 and 2.1.
    """
    if len(page) < start + 10 or page[start] != _LEAF:
        raise _UnreadableSealError
    cells = int.from_bytes(page[start + 3 : start + 5], "big")
    if cells == 0:
        return None
    try:
        if cells != 1:
            raise _UnreadableSealError
        place = int.from_bytes(page[start + 8 : start + 10], "big")
        _, place = _varint(page, place)  # the length of the row
        _, place = _varint(page, place)  # its number
        head = place
        length, place = _varint(page, head)
        of_id, place = _varint(page, place)
        of_seal, place = _varint(page, place)
    except IndexError:
        raise _UnreadableSealError from None
    # The number of a row stands for its key, so the column itself is NULL; an odd type from 13 on is a text.
    text = head + length
    end = text + len(_MARK) + _DIGITS
    if of_id != 0 or of_seal != 13 + 2 * (end - text) or end > len(page) or not page.startswith(_MARK, text):
        raise _UnreadableSealError
    return text + len(_MARK)


def _varint(page: bytes, place: int) -> tuple[int, int]:
    """A number of SQLite's variable length, and the place behind it."""
    value = 0
    for count in range(9):
        byte = page[place]
        place += 1
        if count == 8:
            return value << 8 | byte, place
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            break
    return value, place


def _digest(path: Path, place: int) -> str:
    """The hash of a file with zeros where its digits are; read in pieces, however large the file."""
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            first, last = max(place, done), min(place + _DIGITS, done + len(piece))
            if first < last:
                piece = piece[: first - done] + b"0" * (last - first) + piece[last - done :]
            digest.update(piece)
            done += len(piece)
    return digest.hexdigest()


def _mentions_a_seal(path: Path) -> bool:
    """Whether a file that cannot be read as one may have been an export."""
    tail = b""
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            if _MARK in tail + piece:
                return True
            tail = piece[-len(_MARK) :]
    return False
