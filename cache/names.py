"""Checks a file's other names and the journal beside it, both of which SQLite believes, whoever put them there.

SQLite keeps a file's locks by its inode and its journals by its name. Under a second name (a hard link, a mount of the
file itself) its writers do not see each other. A journal that was cut off in the middle of a transaction is played back
by whoever opens the file next, and one that names a further file makes SQLite delete that file.
"""

import errno
import os
import stat
from pathlib import Path

from .faults import Fault, StoreError

_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
_MOUNTS = Path("/proc/self/mountinfo")


def resolved(path: str | os.PathLike[str]) -> Path:
    """The absolute path behind every symbolic link, as SQLite resolves it; raises `StoreError` where it is none."""
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError) as error:
        raise StoreError(f"{str(path)!r}: {error}", Fault.UNAVAILABLE) from error


def journal_beside(path: Path) -> bool:
    """Whether an unfinished transaction lies beside a file, which may be one that another process is in.

    Args:
        path: The file, resolved.

    Raises:
        StoreError: What lies there is not of this product: it is no file, or names another file, which no transaction
            of one file does. SQLite would delete that file.
        OSError: It cannot be read.
    """
    journal = f"{path}-journal"
    try:
        # A pipe would block, a link leads elsewhere.
        descriptor = os.open(journal, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _not_ours(path, "is no regular file") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _not_ours(path, "is no regular file")
        if os.pread(descriptor, len(_JOURNAL_MAGIC), max(0, status.st_size - len(_JOURNAL_MAGIC))) == _JOURNAL_MAGIC:
            raise _not_ours(path, "names another file, which SQLite would delete")
    finally:
        os.close(descriptor)
    return status.st_size > 0


def require_one_name(path: Path) -> None:
    """Raises `StoreError` where a file has a second name, under which it may be written at the same time.

    Args:
        path: The file, resolved.
    """
    if links := _further_links(path):
        raise StoreError(
            f"{path}: has {links} more {'name' if links == 1 else 'names'} (hard links), and writers under two names "
            "destroy it; make one of them a file of its own with `tuner cache export`, or use a symbolic link",
            Fault.READ_ONLY,
        )
    if mounted_alone(path):
        raise StoreError(
            f"{path}: is mounted from a file that has another name, and writers under two names destroy it; mount the "
            "folder instead",
            Fault.READ_ONLY,
        )


def has_other_name(path: Path) -> bool:
    """Whether `require_one_name` refuses a file."""
    return _further_links(path) > 0 or mounted_alone(path)


def _further_links(path: Path) -> int:
    try:
        return max(0, os.stat(path).st_nlink - 1)
    except OSError:
        return 0


def mounted_alone(path: Path, mounts: Path = _MOUNTS) -> bool:
    """Whether a path is itself a mount point, as in `docker -v file:file`."""
    wanted = os.fsencode(path)
    try:
        lines = mounts.read_bytes().splitlines()
    except OSError:
        return False
    for line in lines:
        fields = line.split(b" ", 5)
        # The table writes blanks and the like as octal escapes.
        if len(fields) > 5 and fields[4].decode("unicode_escape", "replace").encode("latin-1", "replace") == wanted:
            return True
    return False


def _not_ours(path: Path, what: str) -> StoreError:
    return StoreError(
        f"{path}: the file {path.name}-journal beside it {what}: it was not left by this product; move it away",
        Fault.FOREIGN,
    )
