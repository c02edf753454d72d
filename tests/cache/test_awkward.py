"""Awkward places: no right to write, no space, odd names, clocks that jump."""

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
from layout_tuner.cache.faults import Fault, StoreError
from layout_tuner.cache.places.guarded import GuardedStore
from layout_tuner.cache.places.opening import default_path, open_path, open_store
from layout_tuner.cache.records import utc_now
from layout_tuner.cache.sharing.share import export_file, import_file
from layout_tuner.cache.sqlite.file import Store

ROOT = os.geteuid() == 0


@pytest.mark.parametrize(
    "name",
    [
        "with blanks and tabs\t.sqlite",
        "größe-测试-🔥.sqlite",
        "a?b#c%20&mode=ro.sqlite",
        "'quoted' \"twice\".sqlite",
        "-o",
    ],
)
def test_any_file_name_works(tmp_path, make, name):
    path = tmp_path / name / name
    with contextlib.closing(open_store(path)) as store:
        stored = store.publish(make.decision(), make.environment)
        with contextlib.closing(open_path(path)) as same:
            export_file(same, tmp_path / f"out {name}")
    with contextlib.closing(Store(path)) as store:
        assert list(store.decisions()) == [stored]
        assert import_file(store, tmp_path / f"out {name}").kept == 1
    assert os.listdir(path.parent) == [name]


def test_a_name_that_is_no_utf8_works(tmp_path, make):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.sqlite"))
    with contextlib.closing(open_store(path)) as store:
        store.publish(make.decision(), make.environment)
    assert path.exists()


@pytest.mark.parametrize(
    "place", ["/proc/none/decisions.sqlite", "/dev/null/decisions.sqlite", "folder", "loop/x.sqlite"]
)
def test_a_path_that_cannot_be_written_leaves_memory(tmp_path, make, caplog, place):
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    path = tmp_path / place
    store = open_store(path)
    kept = store.publish(make.decision(), make.environment)
    assert store.lookup(make.key(), make.environment.id) == kept
    assert len(list(store.decisions())) == 1
    store.record_misses([make.miss()])
    assert len(store.misses()) == 1
    store.close()
    assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 1
    assert "kept in memory" in caplog.text


UNPRIVILEGED = """
import os, sys, logging
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
from layout_tuner.cache.places.opening import open_store
from layout_tuner.cache.records import DecisionRecord, EnvironmentRecord, KeyRecord
key = KeyRecord(op="x", B=1, T=2, H=1, HV=1, K=1, V=1, varlen=False, dtype="float32", form="")
# Whatever is imported late has to be imported before the right to read it is gone.
warm = open_store(sys.argv[2])
list(warm.decisions())
warm.close()
os.setgid(65534)
os.setuid(65534)
store = open_store(sys.argv[1])
before = len(list(store.decisions()))
decision = DecisionRecord(key=key, environment="e", candidate="a", revision="r", default_candidate="a",
                          source="measured")
store.publish(decision, EnvironmentRecord(id="e"))
assert store.lookup(key, "e").candidate == "a"
print("decisions", before, len(list(store.decisions())))
store.close()
"""


def as_nobody(path, warm):
    """Uses a file as a user who may not write it."""
    command = [sys.executable, "-c", UNPRIVILEGED, str(path), str(warm)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(not ROOT, reason="needs to be root to become somebody else")
@pytest.mark.parametrize("closed", [True, False])
def test_a_file_of_somebody_else_is_read_and_memory_takes_the_rest(tmp_path, make, closed):
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        path = Path(name) / "decisions.sqlite"
        store = Store(path)
        store.publish(make.decision(), make.environment)
        if closed:
            store.close()
        done = as_nobody(path, tmp_path / "warm.sqlite")
        assert done.stdout == "decisions 1 2\n", done.stderr
        assert done.stderr.count("WARNING") == 1
        store.close()


@pytest.fixture
def little_space():
    """A folder on a file system of 2 MiB."""
    with tempfile.TemporaryDirectory() as name:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", name], capture_output=True, check=False
        )
        if mounted.returncode:
            pytest.skip("file systems cannot be mounted here")
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "-l", name], check=True)


def test_a_full_disk_leaves_memory_and_heals(little_space, make, caplog):
    clock = [0.0]
    path = little_space / "decisions.sqlite"
    store = GuardedStore("here", lambda fault: open_path(path, fault), clock=lambda: clock[0])
    store.publish(make.decision(T=1), make.environment)
    filler = little_space / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    for number in range(2, 40):
        store.publish(make.decision(T=number), make.environment)
        assert store.lookup(make.key(T=number), make.environment.id) is not None
    assert len(list(store.decisions())) == 39
    assert caplog.text.count("kept in memory") == 1
    filler.unlink()
    clock[0] += 1000.0
    store.publish(make.decision(T=40), make.environment)
    store.close()
    with contextlib.closing(Store(path, verify=True)) as again:
        assert sorted(record.key.T for record in again.decisions()) == list(range(1, 41))


def test_a_read_only_file_system_is_read(little_space, make):
    path = little_space / "decisions.sqlite"
    with contextlib.closing(Store(path)) as store:
        store.publish(make.decision(), make.environment)
    subprocess.run(["mount", "-o", "remount,ro", str(little_space)], check=True)
    with contextlib.closing(open_store(path)) as store:
        assert store.lookup(make.key(), make.environment.id) is not None
        kept = store.publish(make.decision(T=7), make.environment)
        assert store.lookup(make.key(T=7), make.environment.id) == kept
        assert len(list(store.decisions())) == 2
    with contextlib.closing(open_store(little_space / "new.sqlite")) as store:
        store.publish(make.decision(), make.environment)
        assert len(list(store.decisions())) == 1


LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
from layout_tuner.cache.places.opening import open_store
from layout_tuner.cache.records import DecisionRecord, EnvironmentRecord, KeyRecord
store = open_store(sys.argv[1])
for number in range(100):
    key = KeyRecord(op="x", B=1, T=number, H=1, HV=1, K=1, V=1, varlen=False, dtype="float32", form="")
    store.publish(DecisionRecord(key=key, environment="e", candidate="a", revision="r", default_candidate="a",
                                 source="measured"), EnvironmentRecord(id="e"))
    assert store.lookup(key, "e") is not None
print(len(list(store.decisions())))
"""


def test_misses_that_wait_for_the_file_are_counted_with_those_in_it(path, make):
    clock = [0.0]
    store = GuardedStore("here", lambda fault: open_path(path, fault), clock=lambda: clock[0])
    store.record_misses([make.miss(count=2), make.miss(T=7)])
    store._failed(StoreError("gone", Fault.UNAVAILABLE))
    store.record_misses([make.miss(count=3)])
    store.record_misses([make.miss(count=4)])
    assert [miss.count for miss in store.misses()] == [7]
    clock[0] += 1000.0
    assert [(miss.key.T, miss.count) for miss in store.misses()] == [(2048, 9), (7, 1)]
    store.close()
    with contextlib.closing(Store(path)) as again:
        assert [miss.count for miss in again.misses()] == [9, 1]


def test_a_limit_on_file_sizes_leaves_memory(path):
    done = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "100\n", done.stderr


def test_too_few_file_handles_leave_memory(path, make):
    store = open_store(path)
    store.publish(make.decision(), make.environment)
    store.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The lowest free handle is the first that cannot be had any more.
    with open(os.devnull) as lowest:
        free = lowest.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        assert store.publish(make.decision(T=7), make.environment).key.T == 7
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert store.lookup(make.key(T=7), make.environment.id) is not None
    store.close()


def test_files_follow_the_umask(tmp_path, make):
    for mask, mode in ((0o077, 0o600), (0o022, 0o644), (0o002, 0o664)):
        old = os.umask(mask)
        try:
            path = tmp_path / f"{mask}.sqlite"
            with contextlib.closing(Store(path)) as store:
                store.publish(make.decision(), make.environment)
                modes = {each.stat().st_mode & 0o777 for each in tmp_path.glob(f"{mask}.sqlite*")}
                export_file(store, tmp_path / f"{mask}.export")
        finally:
            os.umask(old)
        assert modes == {mode}
        assert (tmp_path / f"{mask}.export").stat().st_mode & 0o777 == mode & 0o444


def test_a_clock_that_jumps_loses_and_expires_nothing(path, make, opened):
    store = opened(path)
    future = utc_now() + timedelta(days=5000)
    store.publish(make.decision(created_at=future), make.environment)
    latest = store.publish(make.decision(candidate="block/g=T_CONTIG", created_at=utc_now()), make.environment)
    assert latest.created_at > future
    assert store.lookup(make.key(), make.environment.id) == latest
    assert store.prune(older_than=utc_now()) == 0
    for moment in (future, utc_now(), make.moment):
        store.record_misses([make.miss(first_seen=moment, last_seen=moment)])
    (miss,) = store.misses()
    assert (miss.count, miss.first_seen, miss.last_seen) == (3, make.moment, future)


def test_a_home_that_is_not_there_leaves_memory(monkeypatch, make):
    monkeypatch.setenv("HOME", "/proc/nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere/cache")
    assert default_path() == Path("/proc/nowhere/cache/layout_tuner/decisions.sqlite")
    store = open_store()
    store.publish(make.decision(), make.environment)
    assert store.lookup(make.key(), make.environment.id) is not None


def test_opening_for_writing_says_what_is_wrong(tmp_path):
    with pytest.raises(StoreError, match="is a folder") as caught:
        Store(tmp_path)
    assert caught.value.fault is Fault.UNAVAILABLE
