"""Ways to damage a file of decisions: its bytes, or what its rows say."""

import contextlib
import random
import sqlite3
import struct
from pathlib import Path

HOSTILE: list[object] = [
    "'; DROP TABLE decisions; --",
    "../../../../etc/passwd",
    "__import__('os').system('touch /tmp/owned')",
    "cos\nsystem\n(S'touch /tmp/owned'\ntR.",
    "\x00\x01\x02",
    "\ud7ff\U0010ffff" * 50,
    "[" * 100_000,
    '{"a":' * 20_000,
    "A" * 3_000_000,
    "A" * 5_000_000,
    "NaN",
    "1e999",
    "%s%n{0.__class__}",
    b"\xff\xfe\x00blob",
    -1,
    2**63 - 1,
    1e308,
    float("inf"),
    None,
    "num_warps=4",
]


def broken(content: bytes, random_: random.Random) -> bytes:
    """The content, damaged in one of many ways."""
    data = bytearray(content)
    way = random_.randrange(8)
    if way == 0:
        del data[random_.randrange(len(data)) :]
    elif way == 1:
        for _ in range(random_.choice([1, 4, 64])):
            data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
    elif way == 2:
        data[random_.randrange(100)] = random_.randrange(256)
    elif way == 3:
        page = 4096 * random_.randrange(len(data) // 4096)
        data[page : page + 4096] = random_.randbytes(4096)
    elif way == 4:
        page = 4096 * random_.randrange(len(data) // 4096)
        data[page : page + 4096] = bytes(4096)
    elif way == 5:
        start = random_.randrange(len(data))
        data[start:start] = random_.randbytes(random_.randrange(1, 5000))
    elif way == 6:
        one, other = (4096 * random_.randrange(len(data) // 4096) for _ in range(2))
        data[one : one + 4096], data[other : other + 4096] = data[other : other + 4096], data[one : one + 4096]
    else:
        # The number of pages, which SQLite believes.
        data[28:32] = struct.pack(">I", random_.choice([0, 1, 2, 2**31 - 1, 2**32 - 1]))
    return bytes(data)


def poison(path: Path, random_: random.Random) -> None:
    """Writes hostile values into random columns of random rows."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for _ in range(random_.randrange(1, 6)):
            table = random_.choice(["decisions", "measurements", "environments", "misses", "schema_version"])
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[1] != "id"]
            # What breaks a constraint never gets into a file.
            with contextlib.suppress(sqlite3.IntegrityError):
                connection.execute(
                    f"UPDATE {table} SET {random_.choice(columns)} = ? WHERE rowid % ? = 0",
                    (random_.choice(HOSTILE), random_.choice([1, 2, 3])),
                )
        connection.commit()
