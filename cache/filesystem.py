"""What kind of file system a path lies on: SQLite's WAL and shared writing are safe on local ones only."""

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path

# f_type of statfs(2) for the file systems that are known to be local. Everything else, FUSE included, counts as a
# network: a wrong guess that way costs a little speed, a wrong guess the other way costs the file.
_LOCAL = {
    0x01021994: "tmpfs",
    0x0000EF53: "ext",
    0x2FC12FC1: "zfs",
    0x3153464A: "jfs",
    0x52654973: "reiserfs",
    0x5346544E: "ntfs",
    0x58465342: "xfs",
    0x73717368: "squashfs",
    0x794C7630: "overlay",
    0x858458F6: "ramfs",
    0x9123683E: "btrfs",
    0xCA451A4E: "bcachefs",
    0xE0F5E1E2: "erofs",
    0xF2F52010: "f2fs",
    0x2011BAB0: "exfat",
    0x00004D44: "vfat",
    0x00003434: "nilfs",
    0x0000F15F: "ecryptfs",
}
_NETWORK = {
    0x00006969: "nfs",
    0x0000517B: "smb",
    0x0BD00BD0: "lustre",
    0x00C36400: "ceph",
    0x01021997: "9p",
    0x19830326: "fhgfs",
    0x47504653: "gpfs",
    0x5346414F: "afs",
    0x65735546: "fuse",
    0xFE534D42: "smb2",
    0xFF534D42: "cifs",
    0xAAD7AAEA: "panfs",
}
_LOCAL_NAMES = frozenset(_LOCAL.values()) | {"ext2", "ext3", "ext4", "msdos", "ntfs3", "iso9660"}


@dataclass(frozen=True, kw_only=True)
class FileSystem:
    """A file system.

    Attributes:
        name: Its type, for people.
        local: Whether it is known to be a disk or memory of this machine.
    """

    name: str
    local: bool


def file_system(path: Path) -> FileSystem:
    """The file system of a path, or of the nearest folder above it that exists."""
    place = path.absolute()
    while not _exists(place) and place != place.parent:
        place = place.parent
    kind = _statfs_type(place)
    if kind is None:
        name = _mounted_type(place)
        return FileSystem(name=name, local=name in _LOCAL_NAMES)
    if kind in _LOCAL:
        return FileSystem(name=_LOCAL[kind], local=True)
    return FileSystem(name=_NETWORK.get(kind, f"type 0x{kind:x}"), local=False)


def _exists(place: Path) -> bool:
    # Of what lies below a folder that may not be entered, nothing is known.
    try:
        os.stat(place)
    except (OSError, ValueError):
        return False
    return True


def _statfs_type(place: Path) -> int | None:
    """f_type of statfs(2), which Python's os.statvfs leaves out; None where the C library has no such call."""
    try:
        library = _c_library()
        # Larger than struct statfs of any Linux; only its first member is looked at.
        answer = ctypes.create_string_buffer(512)
        if library.statfs(os.fsencode(place), answer) != 0:
            return None
    except (OSError, AttributeError, ValueError):
        return None
    return ctypes.c_ulong.from_buffer(answer).value & 0xFFFFFFFF


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _mounted_type(place: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type that the mount table gives for a path: that of the longest mount point above it."""
    best, name = -1, "unknown"
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return name
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        # The table writes blanks and the like as octal escapes.
        point = Path(fields[4].encode("utf-8", "surrogateescape").decode("unicode_escape", "replace"))
        if (place == point or point in place.parents) and len(point.parts) > best:
            best, name = len(point.parts), after.split(" ")[0]
    return name
