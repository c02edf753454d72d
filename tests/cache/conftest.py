"""Records and stores for the tests of the cache."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cache_records import Make
from layout_tuner.cache.places.opening import Store


@pytest.fixture(scope="session")
def make() -> Make:
    return Make()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "decisions.sqlite"


@pytest.fixture
def opened() -> Iterator[Callable[..., Store]]:
    """Opens stores that are closed after the test."""
    with contextlib.ExitStack() as stack:

        def open_one(path: Path, **options: object) -> Store:
            store = Store(path, **options)  # type: ignore[arg-type]
            stack.callback(store.close)
            return store

        yield open_one


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a test that makes thousands of files waits for no disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)
