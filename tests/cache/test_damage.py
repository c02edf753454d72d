"""Files that are damaged, foreign, older, newer, or swapped: each has a sensible outcome and none stops the job."""

import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
import time

import pytest
from layout_tuner.cache.faults import Fault, StoreError
from layout_tuner.cache.places.guarded import GuardedStore
from layout_tuner.cache.places.opening import open_existing, open_path, open_store
from layout_tuner.cache.sqlite import migrations, schema
from layout_tuner.cache.sqlite.database import Database
from layout_tuner.cache.sqlite.file import Store
from layout_tuner.cache.sqlite.models import SCHEMA_VERSION


@contextlib.contextmanager
def plain(path):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        yield connection
        connection.commit()


@pytest.mark.parametrize(
    "content", [b"\x00" * 5000, b"not a database at all" * 100, b"SQLite format 3\x00" + b"\xff" * 200]
)
def test_a_file_that_is_no_database_is_set_aside(path, make, opened, content, caplog):
    path.write_bytes(content)
    store = opened(path)
    store.publish(make.decision(), make.environment)
    (aside,) = path.parent.glob("decisions.sqlite.damaged-*")
    assert aside.read_bytes() == content
    assert len(list(store.decisions())) == 1
    assert "set aside" in caplog.text


def test_an_empty_file_is_begun(path, make, opened, caplog):
    path.touch()
    opened(path).publish(make.decision(), make.environment)
    assert not list(path.parent.glob("*damaged*"))
    assert caplog.text == ""


def test_a_database_of_something_else_is_left_alone(path, opened):
    with plain(path) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="something else") as caught:
        opened(path)
    assert caught.value.fault is Fault.FOREIGN
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER t AFTER INSERT ON decisions BEGIN DELETE FROM decisions; END",
        "CREATE VIEW v AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT * FROM n",
        "ALTER TABLE decisions ADD COLUMN more TEXT GENERATED ALWAYS AS (hex(zeroblob(999999999)))",
        "DROP TABLE measurements",
        "ALTER TABLE decisions DROP COLUMN version",
        "ALTER TABLE decisions RENAME TO other",
    ],
)
def test_tables_that_run_things_or_lack_things_are_refused(path, make, opened, statement):
    store = opened(path)
    store.publish(make.decision(), make.environment)
    store.close()
    with plain(path) as connection:
        connection.execute(statement)
    with pytest.raises(StoreError):
        Store(path)


def test_a_newer_file_is_read_where_its_tables_serve(path, make, opened, caplog):
    store = opened(path)
    stored = store.publish(make.decision(), make.environment)
    store.close()
    with plain(path) as connection:
        connection.execute("INSERT INTO schema_version VALUES (?, '', '9.0')", (SCHEMA_VERSION + 6,))
    newer = opened(path)
    assert list(newer.decisions()) == [stored]
    with pytest.raises(StoreError, match="reading only"):
        newer.publish(make.decision(), make.environment)
    assert f"version {SCHEMA_VERSION + 6}" in caplog.text
    assert f"writes {SCHEMA_VERSION}" in caplog.text


def test_a_newer_file_whose_tables_do_not_serve_is_refused_with_both_versions(path, opened):
    opened(path).close()
    with plain(path) as connection:
        connection.execute("INSERT INTO schema_version VALUES (?, '', '9.0')", (SCHEMA_VERSION + 6,))
        connection.execute("ALTER TABLE decisions RENAME COLUMN gain TO saved")
    with pytest.raises(StoreError, match=f"version {SCHEMA_VERSION + 6}, .* {SCHEMA_VERSION}") as caught:
        Store(path)
    assert caught.value.fault is Fault.NEWER


def from_0_to_1(connection):
    """Version 0 as it might have been: no gain interval, no host of a miss."""
    connection.exec_driver_sql("ALTER TABLE decisions ADD COLUMN gain_low FLOAT")
    connection.exec_driver_sql("ALTER TABLE decisions ADD COLUMN gain_high FLOAT")
    connection.exec_driver_sql("UPDATE decisions SET version = '0.0 migrated'")


@pytest.fixture
def older(path, make, opened):
    store = opened(path)
    store.publish(make.decision(gain_low=None, gain_high=None), make.environment)
    store.close()
    with plain(path) as connection:
        connection.execute("ALTER TABLE decisions DROP COLUMN gain_low")
        connection.execute("ALTER TABLE decisions DROP COLUMN gain_high")
        connection.execute("UPDATE schema_version SET version = 0")
    return path


def test_an_older_file_is_migrated(older, make, opened, monkeypatch):
    monkeypatch.setitem(migrations.MIGRATIONS, 0, from_0_to_1)
    os.chmod(older, 0o640)
    inode = os.stat(older).st_ino
    store = opened(older)
    (stored,) = store.decisions()
    assert stored.version == "0.0 migrated"
    store.publish(make.decision(T=7), make.environment)
    assert len(list(store.decisions())) == 2
    assert os.stat(older).st_ino != inode
    assert os.stat(older).st_mode & 0o777 == 0o640
    assert not list(older.parent.glob("*migrating*"))
    with plain(older) as connection:
        assert connection.execute("SELECT version FROM schema_version ORDER BY version").fetchall() == [(0,), (1,)]


def test_two_that_open_an_older_file_migrate_it_once(older, opened, monkeypatch):
    steps = []
    started = threading.Barrier(2)

    def counted(connection):
        steps.append(connection)
        time.sleep(0.2)
        from_0_to_1(connection)

    def work():
        started.wait()
        opened(older)

    monkeypatch.setitem(migrations.MIGRATIONS, 0, counted)
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(steps) == 1
    assert len(list(opened(older).decisions())) == 1


def test_a_look_at_an_older_file_does_not_migrate_it(older, monkeypatch):
    monkeypatch.setitem(migrations.MIGRATIONS, 0, from_0_to_1)
    before = older.read_bytes()
    with pytest.raises(StoreError, match=f"version 0, .* reads {SCHEMA_VERSION}") as caught:
        open_existing(older)
    assert caught.value.fault is Fault.OLDER
    assert older.read_bytes() == before


def test_an_older_file_without_a_migration_is_refused_with_both_versions(older):
    before = older.read_bytes()
    with pytest.raises(StoreError, match=f"version 0, .* writes {SCHEMA_VERSION}"):
        Store(older)
    assert older.read_bytes() == before


def test_a_migration_that_fails_leaves_the_file_as_it_was(older, monkeypatch):
    def half(connection):
        connection.exec_driver_sql("ALTER TABLE decisions ADD COLUMN gain_low FLOAT")
        connection.exec_driver_sql("UPDATE nothing SET x = 1")

    monkeypatch.setitem(migrations.MIGRATIONS, 0, half)
    with plain(older) as connection:
        before = connection.execute("SELECT sql FROM sqlite_master ORDER BY name").fetchall()
    with pytest.raises(StoreError, match="nothing"):
        Store(older)
    with plain(older) as connection:
        assert connection.execute("SELECT sql FROM sqlite_master ORDER BY name").fetchall() == before
        assert connection.execute("SELECT max(version) FROM schema_version").fetchone() == (0,)
    assert not list(older.parent.glob("*migrating*"))


def test_a_file_in_use_is_not_migrated_under_its_user(older, monkeypatch, opened):
    monkeypatch.setitem(migrations.MIGRATIONS, 0, from_0_to_1)
    monkeypatch.setattr(migrations, "PATIENCE_S", 0.3)
    code = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('PRAGMA journal_mode=WAL');"
        "c.execute('SELECT * FROM decisions').fetchall(); print('open', flush=True); sys.stdin.read()"
    )
    user = subprocess.Popen([sys.executable, "-c", code, str(older)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert user.stdout.readline() == b"open\n"
        with pytest.raises(StoreError, match="open elsewhere"):
            Store(older)
    finally:
        user.communicate()
    assert len(list(opened(older).decisions())) == 1


def test_a_job_outlives_a_file_that_breaks_under_it(path, make, caplog):
    clock = [0.0]
    store = GuardedStore("here", lambda fault: open_path(path, fault), clock=lambda: clock[0])
    for number in range(200):
        store.publish(make.decision(T=number), make.environment)
    store.close()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))
    assert list(store.decisions()) == []
    kept = store.publish(make.decision(T=5), make.environment)
    assert store.lookup(make.key(T=5), make.environment.id) == kept
    assert caplog.text.count("kept in memory") == 1
    clock[0] += 1000.0
    assert store.lookup(make.key(T=5), make.environment.id) == kept
    store.close()
    assert list(path.parent.glob("*damaged*"))
    with contextlib.closing(Store(path)) as fresh:
        assert list(fresh.decisions()) == [kept]


def test_a_file_that_vanishes_is_begun_anew(path, make, opened):
    store = opened(path)
    store.publish(make.decision(), make.environment)
    for each in path.parent.glob("decisions.sqlite*"):
        each.unlink()
    with pytest.raises(StoreError):
        store.publish(make.decision(T=7), make.environment)
    guarded = open_store(path)
    guarded.publish(make.decision(T=7), make.environment)
    assert [each.key.T for each in guarded.decisions()] == [7]
    guarded.close()


def test_two_processes_do_not_set_a_new_file_aside(path):
    path.write_bytes(b"garbage" * 1000)
    code = "import sys; from layout_tuner.cache.sqlite.file import Store; Store(sys.argv[1]).close()"
    children = [subprocess.Popen([sys.executable, "-c", code, str(path)]) for _ in range(4)]
    assert [child.wait(60) for child in children] == [0] * 4
    assert len(list(path.parent.glob("*.damaged-*"))) == 1
    with contextlib.closing(Store(path)):
        pass


def test_what_lies_beside_a_new_file_is_not_set_aside(path, opened, monkeypatch):
    """Another process begins a new file the moment that the damaged one is gone."""
    opened(path).close()
    path.write_bytes(path.read_bytes()[:100] + b"garbage" * 1000)
    beside = path.with_name(f"{path.name}-wal")
    rename = os.replace

    def and_begin(source, target):
        rename(source, target)
        if os.fspath(source) == os.fspath(path):
            beside.write_bytes(b"of the new one")

    monkeypatch.setattr(schema.os, "replace", and_begin)
    damaged = Database(path)
    assert schema.set_aside(damaged, ValueError("garbage"), schema.sound_version) is not None
    assert beside.read_bytes() == b"of the new one"
    assert not list(path.parent.glob("*.damaged-*-wal"))


def test_set_aside_looks_again_first(path, opened):
    store = opened(path)
    assert schema.set_aside(store._database, ValueError("seen by another process"), schema.file_version) is None
    assert path.exists()


def test_waiting_for_a_writer_ends(path, opened):
    store = opened(path, busy_timeout_s=0.3)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        start = time.monotonic()
        with pytest.raises(StoreError) as caught:
            store.prune(op="x")
        assert caught.value.fault is Fault.BUSY
        assert 0.3 <= time.monotonic() - start < 5
        assert list(store.decisions()) == []


SHORTENED = """
import os, sys
from layout_tuner.cache.sqlite.file import Store
store = Store(sys.argv[1], immutable=sys.argv[2] == "immutable")
len(list(store.decisions()))
os.truncate(sys.argv[1], 4096)
for _ in range(2):
    try:
        list(store.decisions())
    except Exception as error:
        print(type(error).__name__)
"""


@pytest.mark.parametrize("way", ["immutable", "own"])
def test_a_file_that_gets_shorter_while_it_is_read_ends_no_process(path, make, opened, way):
    store = opened(path)
    for number in range(200):
        store.publish(make.decision(T=number), make.environment)
    store.close()
    # A user's SQLite may be built to map files; ours never does.
    done = subprocess.run([sys.executable, "-c", SHORTENED, path, way], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {"StoreError"}  # none, where SQLite had the pages in memory
