"""Where stores come from: the file of the user, made safe for its file system and against its own failures."""

import logging
import os
from pathlib import Path

import platformdirs

from .faults import Fault, StoreError
from .file import Store
from .filesystem import file_system
from .folder import FolderStore
from .guarded import GuardedStore
from .memory import MemoryStore

__all__ = ["MemoryStore", "Store", "default_path", "open_path", "open_store"]

logger = logging.getLogger(__name__)


def default_path() -> Path:
    """The decision file in the platform's user cache folder."""
    return platformdirs.user_cache_path("layout_tuner") / "decisions.sqlite"


def open_store(path: str | os.PathLike[str] | None = None) -> GuardedStore:
    """The store at a path. Whatever is wrong with it is said once, and memory serves until it can be used again.

    Args:
        path: The file; None means `default_path()`.
    """
    place = default_path() if path is None else Path(path).expanduser()
    return GuardedStore(str(place), lambda fault: open_path(place, fault))


def open_path(path: Path, fault: Fault | None = None) -> Store | FolderStore:
    """The store at a path, as its file system allows: one file on a local one, one file per host on a network.

    Args:
        path: The file.
        fault: What ended its last use, if something did.

    Raises:
        StoreError: It can be neither used nor made.
    """
    kind = file_system(path.parent)
    if not kind.local:
        if fault is None:
            logger.info(
                "%s is on a network file system (%s): each host writes its own file, all are read", path, kind.name
            )
        return FolderStore(path)
    try:
        return Store(path, verify=fault is Fault.DAMAGED)
    except StoreError as error:
        if error.fault is not Fault.READ_ONLY or not path.exists():
            raise
        return open_for_reading(path)


def open_for_reading(path: Path) -> Store:
    """A file that cannot be written.

    Raises:
        StoreError: It cannot be read either.
    """
    try:
        return Store(path, read_only=True)
    except StoreError:
        # Reading a WAL file takes a right to write next to it, unless nobody changes the file meanwhile.
        return Store(path, immutable=True)
