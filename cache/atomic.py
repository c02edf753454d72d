"""Files that appear whole or not at all."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from layout_tuner.errors import CacheError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name next to `path` to write to; what lies there at the end takes the path's place in one step.

    Raises:
        CacheError: The folder cannot be made or the file not be put there.
    """
    scratch = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}")
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield scratch
            _sync(scratch)
            os.replace(scratch, path)
            _sync(path.parent)
        finally:
            for suffix in ("", "-journal", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{scratch}{suffix}")
    except OSError as error:
        raise CacheError(f"{path}: {error.strerror or error}") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a whole file, with the user's umask; raises `CacheError`."""
    with replacing(path) as scratch:
        scratch.write_bytes(content)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
