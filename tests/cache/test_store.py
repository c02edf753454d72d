"""One file: what goes in comes out, one row per slot, nothing lost, nothing unsound."""

import contextlib
import dataclasses
import os
import sqlite3
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
from layout_tuner.cache.evidence import LIFETIMES, failures
from layout_tuner.cache.faults import Fault, StoreError
from layout_tuner.cache.memory import MemoryStore
from layout_tuner.cache.records import MAX_COUNT, EnvironmentRecord, utc_now
from layout_tuner.cache.sqlite.file import Store
from layout_tuner.cache.validation import RefusedRowError


@pytest.fixture(params=["file", "memory"])
def store(request, path, opened):
    return MemoryStore() if request.param == "memory" else opened(path)


def test_what_is_published_is_found(store, make):
    stored = store.publish(make.decision(), make.environment)
    assert stored == dataclasses.replace(make.decision(), host=stored.host)
    assert store.lookup(make.key(), make.environment.id) == stored
    assert list(store.decisions()) == [stored]
    assert store.environments() == [make.environment]


def test_every_field_of_the_key_and_the_environment_tell_decisions_apart(store, make):
    store.publish(make.decision(), make.environment)
    others = {"op": "x", "B": 9, "T": 9, "H": 9, "HV": 9, "K": 9, "V": 9, "varlen": True, "dtype": "x", "form": "x"}
    for name, value in others.items():
        assert store.lookup(make.key(**{name: value}), make.environment.id) is None
    assert store.lookup(make.key(), "another") is None


def test_publishing_again_replaces(store, make):
    store.publish(make.decision(), make.environment)
    store.publish(make.decision(candidate="full/g=STRIDE_HV", created_at=utc_now()), make.environment)
    assert [each.candidate for each in store.decisions()] == ["full/g=STRIDE_HV"]


def test_sizes_of_zero_do_not_duplicate(store, make):
    for _ in range(3):
        store.publish(make.decision(H=0, K=0, V=0), make.environment)
    assert len(list(store.decisions())) == 1


def test_a_clock_that_jumps_back_does_not_bring_an_older_decision_back(store, make):
    first = store.publish(make.decision(created_at=make.moment + timedelta(days=900)), make.environment)
    second = store.publish(make.decision(candidate="block/g=T_CONTIG"), make.environment)
    assert second.created_at > first.created_at
    assert store.lookup(make.key(), make.environment.id).candidate == "block/g=T_CONTIG"


def test_evidence_of_candidates_that_were_not_measured_again_is_kept(store, make):
    store.publish(make.decision(), make.environment)
    newcomer = make.measurement("block/g=T_CONTIG", end_to_end_us=9.0)
    store.publish(make.decision(candidate="block/g=T_CONTIG", measurements=(newcomer,)), make.environment)
    (stored,) = store.decisions()
    assert [each.candidate for each in stored.measurements] == [
        "block/g=T_CONTIG",
        "full/g=T_CONTIG",
        "full/g=STRIDE_HV",
    ]


@pytest.mark.parametrize("order", [("pinned", "measured", "imported", "predicted")])
def test_stronger_sources_win(store, make, order):
    for source in reversed(order):
        store.publish(make.decision(source=source, candidate=source), make.environment)
        assert store.lookup(make.key(), make.environment.id).candidate == source
    assert len(list(store.decisions())) == len(order)


def test_misses_add_up(store, make):
    store.record_misses([make.miss(count=2), make.miss(count=3, last_seen=make.moment + timedelta(hours=1))])
    store.record_misses([make.miss(T=64, count=9)])
    most, other = store.misses()
    assert (most.key.T, most.count) == (64, 9)
    assert (other.count, other.first_seen, other.last_seen) == (5, make.moment, make.moment + timedelta(hours=1))
    assert store.misses("another") == []


def test_a_count_that_is_full_stays_full(store, make):
    store.record_misses([make.miss(count=MAX_COUNT - 1)])
    for _ in range(3):
        store.record_misses([make.miss()])
    assert [miss.count for miss in store.misses()] == [MAX_COUNT]


def test_the_reason_of_the_latest_miss_is_kept(store, make):
    later = make.moment + timedelta(hours=1)
    for miss in (make.miss(last_seen=later, reason="capture"), make.miss(reason="an older batch, flushed late")):
        store.record_misses([miss])
    assert [(miss.count, miss.reason) for miss in store.misses()] == [(2, "capture")]


FLUSHING = """
import sys
from datetime import datetime, timedelta, timezone
from layout_tuner.cache.layers import open_layers
from layout_tuner.cache.records import KeyRecord, MissRecord
start = datetime(2025, 3, 1, tzinfo=timezone.utc)
layers = open_layers(sys.argv[1])
for batch in range(10):
    misses = []
    for T in range(1, 6):
        key = KeyRecord(op="x", B=1, T=T, H=1, HV=1, K=1, V=1, varlen=False, dtype="float32", form="")
        seen = start + timedelta(seconds=100 * int(sys.argv[2]) + batch)
        misses.append(MissRecord(key=key, environment="e", count=T, first_seen=seen, last_seen=seen, reason="r"))
    layers.record_misses(misses)
layers.close()
"""


def test_misses_of_several_processes_add_up(path, make, opened):
    command = [sys.executable, "-c", FLUSHING, str(path)]
    children = [subprocess.Popen([*command, str(number)]) for number in range(4)]
    assert [child.wait(60) for child in children] == [0] * 4
    found = opened(path).misses("e")
    assert [(miss.key.T, miss.count) for miss in found] == [(T, 40 * T) for T in (5, 4, 3, 2, 1)]
    assert {(miss.last_seen - miss.first_seen).total_seconds() for miss in found} == {309.0}


def test_a_candidate_that_was_skipped_is_still_known_to_fail(store, make):
    failed = make.measurement("a", state="failed", failure="compile", reason="no such instruction", samples=())
    old = make.measurement("b", state="failed", failure="compile", revision="r0", samples=())
    store.publish(make.decision(measurements=(make.measurement(), failed, old)), make.environment)
    skipped = [make.measurement(name, state="skipped", reason="known to fail", samples=()) for name in ("a", "b")]
    stored = store.publish(make.decision(measurements=(make.measurement(), *skipped)), make.environment)
    assert {each.candidate: each.state for each in stored.measurements} == {
        "full/g=T_CONTIG": "ok",
        "a": "failed",
        "b": "skipped",
    }
    assert list(failures(store.evidence(make.key(), make.environment.id))) == [("a", "r1")]


def test_a_wrong_winner_is_not_believed_not_even_from_another_host(store, make):
    store.publish(make.decision(host="one"), make.environment)
    wrong = make.measurement(state="wrong", failure="wrong", error=0.5, reason="error 0.5 over 0.005")
    store.publish(make.decision(host="two", candidate="full/g=STRIDE_HV", measurements=(wrong,)), make.environment)
    assert store.lookup(make.key(), make.environment.id).candidate == "full/g=STRIDE_HV"
    assert failures(store.evidence(make.key(), make.environment.id))[("full/g=T_CONTIG", "r1")].state == "wrong"


def test_a_new_revision_has_a_clean_sheet(store, make):
    wrong = make.measurement(state="wrong", failure="wrong")
    store.publish(make.decision(host="one", measurements=(wrong,)), make.environment)
    assert store.lookup(make.key(), make.environment.id) is None
    store.publish(make.decision(host="two", revision="r2", measurements=()), make.environment)
    assert store.lookup(make.key(), make.environment.id).revision == "r2"


@pytest.mark.parametrize("failure", ["compile", "crash", "overflow", "memory", "timeout"])
def test_failures_last_as_long_as_their_class(make, failure):
    lifetime = LIFETIMES[failure]
    store = MemoryStore()
    ages = (timedelta(minutes=1), timedelta(days=3650)) if lifetime is None else (lifetime * 0.9, lifetime * 1.1)
    believed = []
    for age in ages:
        failed = make.measurement(state="failed", failure=failure, measured_at=utc_now() - age, samples=())
        store.publish(make.decision(measurements=(failed,)), make.environment)
        believed.append(store.lookup(make.key(), make.environment.id) is None)
    assert believed == [True, lifetime is None]


@pytest.mark.parametrize(
    ("state", "failure", "lives"),
    [("failed", "compile", True), ("failed", "overflow", True), ("wrong", "wrong", True), ("failed", "memory", False)],
)
def test_a_failure_lives_with_the_revision_and_the_environment_of_its_compiler(store, make, state, failure, lives):
    old = utc_now() - timedelta(days=3650)
    failed = make.measurement(state=state, failure=failure, samples=(), measured_at=old)
    store.publish(make.decision(host="one", measurements=(failed,)), make.environment)
    assert (store.lookup(make.key(), make.environment.id) is None) == lives
    store.publish(make.decision(host="two", revision="r2", measurements=()), make.environment)
    assert store.lookup(make.key(), make.environment.id) is not None
    other = EnvironmentRecord(id="H200-triton3.7")
    stored = store.publish(make.decision(environment=other.id, measurements=()), other)
    assert store.lookup(make.key(), other.id) == stored


def test_a_failure_dated_in_the_future_expires(make):
    store = MemoryStore()
    failed = make.measurement(state="failed", failure="memory", measured_at=utc_now() + timedelta(days=9999))
    store.publish(make.decision(measurements=(failed,)), make.environment)
    assert store.lookup(make.key(), make.environment.id) is not None


def test_the_fault_of_a_device_is_not_stored(store, make):
    failed = make.measurement(state="failed", failure="device", reason="ECC error")
    stored = store.publish(make.decision(measurements=(failed,)), make.environment)
    assert stored.measurements == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"T": -1},
        {"T": 2**41},
        {"T": True},
        {"varlen": 1},
        {"op": ""},
        {"op": "x\0y"},
        {"op": "x" * 201},
        {"form": "x" * 1001},
        {"form": "BT=64,num_warps=4"},
        {"candidate": "full/num_stages=2"},
        {"source": "forced"},
        {"gain": float("nan")},
        {"created_at": "2026-03-01"},
    ],
)
def test_unsound_records_are_refused(store, make, fields):
    with pytest.raises(RefusedRowError):
        store.publish(make.decision(**fields), make.environment)
    assert list(store.decisions()) == []


def test_launch_options_are_refused_by_name(store, make):
    with pytest.raises(RefusedRowError, match="num_warps is not accepted anywhere"):
        store.publish(make.decision(form="num_warps=4"), make.environment)
    with pytest.raises(RefusedRowError, match="num_stages"):
        store.publish(make.decision(measurements=(make.measurement(counts={"num_stages": 2}),)), make.environment)


def test_a_reason_may_quote_a_compiler(store, make):
    failed = make.measurement("block/g=T_CONTIG", state="failed", failure="overflow", reason="reduce `num_stages`")
    store.publish(make.decision(measurements=(failed,)), make.environment)


def test_many_threads_share_a_store(path, make, opened):
    store = opened(path)
    errors = []

    def work(thread):
        try:
            for number in range(20):
                store.publish(make.decision(B=thread, T=number), make.environment)
                assert store.lookup(make.key(B=thread, T=number), make.environment.id) is not None
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(list(store.decisions())) == 160


FORKING = """
import os, sys, threading, dataclasses
from layout_tuner.cache.places.opening import Store
from layout_tuner.cache.records import DecisionRecord, EnvironmentRecord, KeyRecord

store = Store(sys.argv[1])
environment = EnvironmentRecord(id="e")

def publish(B, T):
    key = KeyRecord(op="x", B=B, T=T, H=1, HV=1, K=1, V=1, varlen=False, dtype="float32", form="")
    store.publish(DecisionRecord(key=key, environment="e", candidate="a", revision="r", default_candidate="a",
                                 source="measured"), environment)

stop = threading.Event()
counts = [0, 0]
def busy(which):
    while not stop.is_set():
        publish(1000 + which, counts[which]); counts[which] += 1
threads = [threading.Thread(target=busy, args=(each,)) for each in range(2)]
for thread in threads: thread.start()
children = []
for child in range(10):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for number in range(5): publish(child, number)
            code = 0
        finally:
            os._exit(code)
    children.append(pid)
codes = [os.waitpid(pid, 0)[1] for pid in children]
stop.set()
for thread in threads: thread.join()
rows = sum(1 for _ in store.decisions())
print(codes, rows - sum(counts))
assert not any(codes) and rows == 50 + sum(counts)
"""


def test_forks_in_the_middle_of_publishing_lose_nothing(path):
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_store_for_reading_takes_nothing(path, make, opened):
    writer = opened(path)
    stored = writer.publish(make.decision(), make.environment)
    writer.close()
    for options in ({"read_only": True}, {"immutable": True}):
        reader = opened(path, **options)
        with pytest.raises(StoreError, match="reading only") as caught:
            reader.publish(make.decision(), make.environment)
        assert caught.value.fault is Fault.READ_ONLY
    assert opened(path, read_only=True).lookup(make.key(), make.environment.id) == stored


def test_a_file_that_another_took_the_place_of_is_opened_anew(tmp_path, path, make, opened):
    store = opened(path)
    store.publish(make.decision(), make.environment)
    other = opened(tmp_path / "other.sqlite")
    other.publish(make.decision(T=7), make.environment)
    other.close()
    os.replace(tmp_path / "other.sqlite", path)
    for suffix in ("-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}{suffix}")
    assert [each.key.T for each in store.decisions()] == [7]
    store.publish(make.decision(T=8), make.environment)
    assert [each.key.T for each in store.decisions()] == [7, 8]


def test_a_row_that_cannot_be_believed_is_left_out_and_said(path, make, opened, caplog):
    store = opened(path)
    store.publish(make.decision(), make.environment)
    store.publish(make.decision(T=7), make.environment)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE decisions SET source = 'forged' WHERE T = 7")
        connection.commit()
    assert [each.key.T for each in store.decisions()] == [2048]
    assert "source" in caplog.text
    assert "forged" in caplog.text


def test_the_tables_read_well_in_any_browser(path, make, opened):
    opened(path).publish(make.decision(), make.environment)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert tables == {"schema_version", "environments", "decisions", "measurements", "misses", "seals"}
        row = connection.execute(
            "SELECT op, B, T, H, HV, K, V, varlen, dtype, form, created_at FROM decisions"
        ).fetchone()
        assert row[:8] == ("chunk_bwd_dv_local", 2, 2048, 4, 8, 64, 64, 0)
        assert row[-1] == "2025-03-01T12:00:00.250000Z"
        columns = connection.execute("PRAGMA table_info(decisions)").fetchall()
        optional = {name for _, name, _, required, _, _ in columns if not required}
        assert optional == {"gain", "gain_low", "gain_high"}
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_an_environment_keeps_its_facts(path, make, opened):
    store = opened(path)
    store.publish(make.decision(), EnvironmentRecord(id=make.environment.id))
    store.publish(make.decision(), make.environment)
    store.publish(make.decision(), EnvironmentRecord(id=make.environment.id))
    assert store.environments() == [make.environment]


def test_a_decision_needs_the_facts_of_its_own_environment(path, make, opened):
    with pytest.raises(StoreError, match="facts of 'other'"):
        opened(path).publish(make.decision(), EnvironmentRecord(id="other"))


def test_importing_the_cache_imports_no_torch():
    code = "import sys, layout_tuner.cache.layers, layout_tuner.cache.sharing.doctor; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_stores_are_cheap_to_make_and_drop(tmp_path, make):
    for number in range(20):
        with contextlib.closing(Store(tmp_path / f"{number}.sqlite")) as store:
            store.publish(make.decision(), make.environment)
    assert not list(tmp_path.glob("*-wal"))
