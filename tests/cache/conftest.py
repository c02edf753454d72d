"""Records and stores for the tests of the cache."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from layout_tuner.cache.records import DecisionRecord, EnvironmentRecord, KeyRecord, MeasurementRecord, MissRecord
from layout_tuner.cache.store import Store

MOMENT = datetime(2026, 3, 1, 12, 0, 0, 250_000, tzinfo=UTC)


class Make:
    """Builds records that differ from a plain one in what is named."""

    environment = EnvironmentRecord(id="H200-triton3.6", facts={"device": "NVIDIA H200", "cores": 132, "mig": False})
    moment = MOMENT

    def key(self, **fields: object) -> KeyRecord:
        plain: dict[str, object] = {
            "op": "chunk_bwd_dv_local",
            "B": 2,
            "T": 2048,
            "H": 4,
            "HV": 8,
            "K": 64,
            "V": 64,
            "varlen": False,
            "dtype": "bfloat16",
            "form": "BT=64,g=float32@STRIDE_HV",
        }
        return KeyRecord(**(plain | fields))  # type: ignore[arg-type]

    def measurement(self, candidate: str = "full/g=T_CONTIG", **fields: object) -> MeasurementRecord:
        plain: dict[str, object] = {
            "candidate": candidate,
            "revision": "r1",
            "state": "ok",
            "end_to_end_us": 10.5,
            "kernel_us": 9.0,
            "relayout_us": 1.5,
            "interval_low_us": 10.25,
            "interval_high_us": 10.75,
            "error": 0.001,
            "samples": (10.5, 10.25, 10.75),
        }
        return MeasurementRecord(**(plain | fields))  # type: ignore[arg-type]

    def decision(self, **fields: object) -> DecisionRecord:
        key = {name: fields.pop(name) for name in list(fields) if name in KeyRecord.__dataclass_fields__}
        plain: dict[str, object] = {
            "key": self.key(**key),
            "environment": self.environment.id,
            "candidate": "full/g=T_CONTIG",
            "revision": "r1",
            "default_candidate": "full/g=STRIDE_HV",
            "source": "measured",
            "gain": 0.125,
            "gain_low": 0.1,
            "gain_high": 0.15,
            "measurements": (
                self.measurement(),
                self.measurement("full/g=STRIDE_HV", end_to_end_us=12.0, interval_low_us=11.75, interval_high_us=12.25),
            ),
            "created_at": MOMENT,
            "version": "0.1.0",
        }
        return DecisionRecord(**(plain | fields))  # type: ignore[arg-type]

    def miss(self, **fields: object) -> MissRecord:
        key = {name: fields.pop(name) for name in list(fields) if name in KeyRecord.__dataclass_fields__}
        plain: dict[str, object] = {
            "key": self.key(**key),
            "environment": self.environment.id,
            "count": 1,
            "first_seen": MOMENT,
            "last_seen": MOMENT,
            "reason": "on_miss is default",
        }
        return MissRecord(**(plain | fields))  # type: ignore[arg-type]


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
