"""Files that somebody names for this product to read."""

from __future__ import annotations

import errno
import os
import stat


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The content of a regular file; a pipe or a device, which might never end, is refused at once.

    Raises:
        OSError: It cannot be read, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(code, "is a folder" if code == errno.EISDIR else "is no regular file", os.fspath(path))
        return file.read()
