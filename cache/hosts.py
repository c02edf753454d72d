"""A name for this machine that two machines do not share, even where they are called alike."""

import functools
import hashlib
import re
import socket
from pathlib import Path

# The first is the same after a restart; the second, for images that ship without one, tells running machines apart.
_IDENTITIES = (Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id"))


def host_id(name: str, identities: tuple[Path, ...] = _IDENTITIES) -> str:
    """The host's name, safe as a part of a file name, with eight digits that come from the machine's own identity."""
    safe = re.sub(r"[^A-Za-z0-9.-]", "_", name.partition(".")[0])[:64] or "host"
    for path in identities:
        try:
            identity = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if len(identity) >= 32:
            return f"{safe}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
    return safe


@functools.cache
def this_host() -> str:
    """`host_id` of the machine this runs on."""
    return host_id(socket.gethostname())
