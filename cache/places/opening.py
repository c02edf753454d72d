"""Opens stores: the user's file, in the way its file system allows, and guarded against failure."""

import logging
import os
import re
import stat
from pathlib import Path

import platformdirs

from ..faults import Fault, StoreError
from ..filesystem import file_system
from ..memory import MemoryStore
from ..names import require_one_name, resolved
from ..sqlite.file import Store, open_for_reading
from ..sqlite.seal import SEALED, locked_export
from .folder import FolderStore, host_files
from .guarded import GuardedStore

__all__ = [
    "MemoryStore",
    "Store",
    "default_path",
    "open_existing",
    "open_for_reading",
    "open_path",
    "open_store",
    "require_existing",
    "require_no_export",
    "require_place",
]

# A path keeps one of a URL's slashes.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")

log = logging.getLogger(__name__)


def default_path() -> Path:
    """The decision file in the platform's user cache folder."""
    return platformdirs.user_cache_path("layout_tuner") / "decisions.sqlite"


def stated_path(path: str | os.PathLike[str] | None) -> Path:
    """A path as somebody states it, absolute from now on: wherever the process goes, the file stays where it is.

    Raises:
        StoreError: There is no such user or working folder, or the text is no path.
    """
    try:
        place = default_path() if path is None else Path(os.fsdecode(path)).expanduser()
        if "\0" in str(place):
            raise ValueError("holds a NUL character")
        return place.absolute()
    except (OSError, RuntimeError, ValueError) as error:
        raise StoreError(f"{os.fsdecode(path or '')!r}: {error}", Fault.UNAVAILABLE) from error


def open_store(path: str | os.PathLike[str] | None = None) -> GuardedStore:
    """The store at a path. Whatever is wrong with it is said once, and memory serves until it can be used again.

    Args:
        path: The file; None means `default_path()`.
    """
    place = stated_path(path)
    return GuardedStore(str(place), lambda fault: open_path(place, fault))


def open_path(path: Path, fault: Fault | None = None) -> Store | FolderStore:
    """The store at a path, as its file system allows: one file on a local one, one file per host on a network.

    Args:
        path: The file.
        fault: What ended its last use, if something did.

    Raises:
        StoreError: It can be neither used nor made.
    """
    # A link leads to where the file lies: that file system counts, and beside that file SQLite keeps its journals.
    path = resolved(path)
    kind = file_system(path.parent)
    if not kind.local:
        if fault is None:
            log.info(
                "%s is on a network file system (%s): each host writes its own file, all are read", path, kind.name
            )
        return FolderStore(path)
    try:
        return Store(path, verify=fault is Fault.DAMAGED)
    except StoreError as error:
        if error.fault is not Fault.READ_ONLY or not path.exists():
            raise
        return open_for_reading(path)


def open_existing(path: Path) -> Store | FolderStore:
    """The store at a path, for reading: nothing is made, migrated or set aside, whatever is wrong with it.

    Raises:
        StoreError: There is nothing, or it cannot be read.
    """
    require_existing(path)
    path = resolved(path)
    if not file_system(path.parent).local:
        return FolderStore(path, read_only=True)
    return open_for_reading(path)


def require_existing(path: Path) -> None:
    """Raises `StoreError` unless a path is a file, or stands for the files of hosts on a network file system."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        place = resolved(path)
        if file_system(place.parent).local or not host_files(place):
            raise StoreError(f"{path}: no such file", Fault.UNAVAILABLE) from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: {getattr(error, 'strerror', None) or error}", Fault.UNAVAILABLE) from error
    else:
        if not stat.S_ISREG(mode):
            what = "is a folder" if stat.S_ISDIR(mode) else "is no regular file"
            raise StoreError(f"{path}: {what}", Fault.UNAVAILABLE)


def require_place(path: Path) -> None:
    """Raises `StoreError` where decisions cannot be kept, or over something that was never a file of decisions.

    For commands, whose work would be for nothing: they say so before it. A job keeps decisions in memory there.
    """
    if _URL.match(str(path)):
        raise StoreError(
            "--cache: a file is wanted; a server is named by [cache] url in the settings", Fault.UNAVAILABLE
        )
    try:
        begun = _require_writable(path)
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: {getattr(error, 'strerror', None) or error}", Fault.UNAVAILABLE) from error
    if not begun:
        return
    if file_system(resolved(path).parent).local:
        require_one_name(resolved(path))
    try:
        open_for_reading(path).close()
    except StoreError as error:
        if error.fault is Fault.FOREIGN:
            raise


def require_no_export(path: Path) -> None:
    """Raises `StoreError` where a command is to write to an export, which root could."""
    if file_system(resolved(path).parent).local and locked_export(path):
        raise StoreError(f"{path}: {SEALED}", Fault.UNAVAILABLE)


def _require_writable(path: Path) -> bool:
    """Whether a file with content lies at a path; raises `StoreError` where none can lie or be written."""
    instead = "wanted a file of decisions, or the name of a new one"
    if path.is_dir():
        raise StoreError(f"{path}: is a folder; {instead}", Fault.UNAVAILABLE)
    if path.exists() and not path.is_file():
        raise StoreError(f"{path}: is no regular file; {instead}", Fault.UNAVAILABLE)
    require_no_export(path)
    above = next(each for each in path.absolute().parents if each.exists())
    if not above.is_dir():
        raise StoreError(f"{path}: {above} is no folder; {instead}", Fault.UNAVAILABLE)
    own = [path] if path.exists() and file_system(resolved(path).parent).local else []
    for place in (above, *own):
        if not os.access(place, os.W_OK):
            raise StoreError(f"{path}: {place} cannot be written, so decisions could not be kept", Fault.UNAVAILABLE)
    return path.exists() and path.stat().st_size > 0
