"""Failures that earlier versions stored under a wrong class are judged anew, wherever the file lies."""

import contextlib
import sqlite3
from datetime import timedelta

import pytest
from layout_tuner.cache.memory import MemoryStore
from layout_tuner.cache.records import utc_now
from layout_tuner.cache.sqlite.file import Store, open_for_reading

SYNCHRONIZE = (
    "synchronize:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:361 NPU function error: Sync, error code is 507015"
)
MARKER = "///------------------[ERROR][Triton][BEG]------------------"

# Class and reason as earlier versions stored them, and whether the winner is usable: at once, and after a day.
CASES = [
    ("compile", SYNCHRONIZE, True, True),
    ("compile", f"RuntimeError: {SYNCHRONIZE}", True, True),
    ("compile", "The Inner error is reported as above. The process exits for this inner error", True, True),
    ("compile", "[Errno 116] Stale file handle: '/cache/torch_compile_cache/x/k.so'", True, True),
    ("compile", "OSError: [Errno 28] No space left on device: '/home/user/.triton/compiled'", True, True),
    ("overflow", "OverflowError: Python int too large to convert to C int", True, True),
    ("overflow", "int too big to convert", True, True),
    ("compile", MARKER, False, True),
    ("compile", f"MLIRCompilationError: {MARKER}", False, True),
    ("compile", "the compiler crashed (exit status -11)", False, True),
    ("compile", "PTXASError: PTXAS error: `ptxas` raised SIGSEGV", False, True),
    ("overflow", f"MLIRCompilationError: {MARKER}", False, False),
    ("overflow", "OutOfResources: out of resource: shared memory, Required: 2, Hardware limit: 1.", False, False),
    ("overflow", "error: ub overflow, requires 1908736 bits while 1572864 bits available", False, False),
    ("compile", "PTXASError: PTXAS error: `ptxas` failed with error code 255", False, False),
    ("compile", "CompilationError: at 12:8:", False, False),
    ("compile", "", False, False),
]


@pytest.mark.parametrize("reading", [False, True], ids=["own", "read only"])
@pytest.mark.parametrize(("failure", "reason", "now", "later"), CASES)
def test_decisions_that_were_erased_by_mistake_are_believed_again(path, make, reading, failure, reason, now, later):
    for age, usable in ((timedelta(minutes=1), now), (timedelta(days=2), later)):
        moment = utc_now() - age
        failed = make.measurement(state="failed", failure="timeout", reason="x", measured_at=moment, samples=())
        with contextlib.closing(Store(path)) as store:
            store.prune(op="chunk_bwd_dv_local")
            stored = store.publish(make.decision(measurements=(failed,), created_at=moment), make.environment)
        with contextlib.closing(sqlite3.connect(path)) as plain, plain:  # as an earlier version wrote it
            plain.execute("UPDATE measurements SET failure = ?, reason = ?", (failure, reason))
        with contextlib.closing(open_for_reading(path) if reading else Store(path)) as store:
            found = store.lookup(make.key(), make.environment.id)
            assert (found is not None) is usable
            assert found is None or found.candidate == stored.candidate


def test_what_is_merged_from_such_a_file_is_judged_anew_too(path, tmp_path, make):
    with contextlib.closing(Store(path, host="old")) as old:
        old.publish(
            make.decision(measurements=(make.measurement(state="failed", failure="timeout"),)), make.environment
        )
    with contextlib.closing(sqlite3.connect(path)) as plain, plain:
        plain.execute("UPDATE measurements SET failure = 'compile', reason = ?", (SYNCHRONIZE,))
    with contextlib.closing(open_for_reading(path)) as old, contextlib.closing(Store(tmp_path / "new.sqlite")) as new:
        new.absorb_file(old, as_imported=False)
        assert new.lookup(make.key(), make.environment.id) is not None
        memory = MemoryStore()
        for record in new.decisions():
            assert memory.publish(record, make.environment).measurements == ()
