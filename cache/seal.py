"""The seal of an exported file: a hash of every byte of it, kept in a row of its own table.

The hash is taken with zeros in its own place. A file in use carries no seal.
"""

import contextlib
import hashlib
import logging
import mmap
import os
from enum import Enum
from pathlib import Path

from layout_tuner.errors import CacheError

logger = logging.getLogger(__name__)

_MARK = b"layout_tuner-seal-sha256:"
_DIGITS = 64

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
    with path.open("r+b") as file, contextlib.closing(mmap.mmap(file.fileno(), 0)) as content:
        place = _place(content)
        if place is None:
            raise CacheError(f"{path}: has no place for a seal")
        digest = _digest(content, place)
        content[place : place + _DIGITS] = digest.encode()
        content.flush()
    return digest


def seal_state(path: Path) -> SealState:
    """Whether a file is sealed, and still what was sealed; raises `CacheError` where it cannot be read.

    Not for a file that this process has open for writing: closing it a second time would drop SQLite's locks on it.
    """
    try:
        if os.stat(path).st_size == 0:
            return SealState.NONE
        with (
            path.open("rb") as file,
            contextlib.closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) as content,
        ):
            first = content.find(_MARK)
            if first < 0:
                return SealState.NONE
            place = _place(content)
            sealed = place is not None and content[place : place + _DIGITS] == _digest(content, place).encode()
            return SealState.SOUND if sealed else SealState.BROKEN
    except (OSError, ValueError) as error:
        raise CacheError(f"{path}: {error}") from error


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
            logger.warning("%s: anybody on this machine may write it; take that right away (chmod o-w)", path)
        if Path(f"{path}-wal").exists():
            logger.warning(
                "%s: is in use by a writer, so what was written last is not seen; share an export of it", path
            )


def _place(content: mmap.mmap) -> int | None:
    """Where the digits are; None unless there is exactly one place."""
    first = content.find(_MARK)
    if first < 0 or content.find(_MARK, first + 1) >= 0 or first + len(_MARK) + _DIGITS > len(content):
        return None
    return first + len(_MARK)


def _digest(content: mmap.mmap, place: int) -> str:
    digest = hashlib.sha256()
    with memoryview(content) as view:
        for start, end in ((0, place), (place + _DIGITS, len(content))):
            with view[start:end] as part:
                digest.update(part)
            if end == place:
                digest.update(b"0" * _DIGITS)
    return digest.hexdigest()
