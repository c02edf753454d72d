"""Writes files so that they appear whole or not at all, and never through a link."""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from layout_tuner.errors import CacheError

_LOCK = "lock"
_ATTEMPTS = 10


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write to; at the end the file under that name takes the path's place in one step.

    The name is in a folder of its own next to `path`, locked while this process lives. A folder that a killed process
    left behind has no lock any more, and is removed by the next process that writes to the same path.

    Raises:
        CacheError: Something that is no regular file lies at the path, the folder cannot be made or the file not be
            put there.
    """
    require_replaceable(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path)
        with _scratch_folder(path) as folder:
            # The mode of a finished export takes the right to write away: from the file, not from its folder.
            scratch = folder / "file"
            yield scratch
            _sync(scratch)
            require_replaceable(path)
            os.replace(scratch, path)
            _sync(path.parent)
    except OSError as error:
        raise CacheError(f"{path}: {error.strerror or error}") from error


def require_replaceable(path: Path) -> None:
    """Raises `CacheError` unless a path is free or a regular file: nothing is written through a link or to a device."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise CacheError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if stat.S_ISLNK(mode):
        raise CacheError(f"{path}: is a symbolic link, and nothing is written through one; name the file itself")
    if not stat.S_ISREG(mode):
        what = "is a folder" if stat.S_ISDIR(mode) else "is no regular file"
        raise CacheError(f"{path}: {what}; wanted an earlier one to replace, or the name of a new one")


def sweep(path: Path) -> None:
    """Removes what killed processes left of a file that they were writing to a path."""
    name = re.compile(re.escape(_prefix(path)) + "[0-9a-f]{8}")
    for folder in path.parent.iterdir():
        if not name.fullmatch(folder.name) or folder.is_symlink():
            continue
        # Another process may remove it at the same time, and somebody else's cannot be removed.
        with contextlib.suppress(OSError):
            _remove_abandoned(folder)


def _remove_abandoned(folder: Path) -> None:
    """Removes a scratch folder whose lock nobody holds; raises `OSError` where that cannot be told or done."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        # Made and never locked; one that is about to be locked is made anew by its process.
        os.rmdir(folder)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(descriptor)


def _prefix(path: Path) -> str:
    return f".{path.name[:60]}."


@contextlib.contextmanager
def _scratch_folder(path: Path) -> Iterator[Path]:
    """A new folder beside a path, locked; removed at the end."""
    folder, descriptor = _locked_folder(path)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _locked_folder(path: Path) -> tuple[Path, int]:
    for _ in range(_ATTEMPTS):
        folder = path.with_name(_prefix(path) + secrets.token_hex(4))
        folder.mkdir(mode=0o700)
        try:
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue
        # Where a file system has no such locks, nothing is ever swept.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if (folder / _LOCK).exists():
            return folder, descriptor
        os.close(descriptor)
    raise CacheError(f"{path}: another process removes what is written beside it")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
