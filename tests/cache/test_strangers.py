"""Files from strangers: what lies beside them, what their schema would run, and what their rows claim."""

import contextlib
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import time

import pytest
from command import run_here
from layout_tuner.cache.faults import Fault, StoreError
from layout_tuner.cache.layers import open_layers
from layout_tuner.cache.sqlite import database
from layout_tuner.cache.sqlite.database import Database
from layout_tuner.cache.sqlite.file import Store

MAGIC = bytes.fromhex("d9d505f920a163d7")

COMMANDS = {
    "show": ["show", "--cache", "{}"],
    "doctor": ["doctor", "--cache", "{}"],
    "export": ["cache", "export", "out.sqlite", "--cache", "{}"],
    "import": ["cache", "import", "{}", "--cache", "new.sqlite"],
    "merge": ["cache", "merge", "{}", "-o", "out.sqlite"],
    "diff": ["cache", "diff", "{}", "{}"],
}


@pytest.fixture
def tuner(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run_here(arguments, monkeypatch, capsys)


@pytest.fixture
def theirs(tmp_path, make):
    """A sound file in rollback mode, as somebody sends it."""
    path = tmp_path / "theirs.sqlite"
    with contextlib.closing(Store(path, host="there", journal="delete")) as store:
        store.publish(make.decision(), make.environment)
    return path


def change(path, *statements):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        for statement in statements:
            connection.executescript(f"BEGIN; {statement}; COMMIT" if "PRAGMA" not in statement else statement)


def journal(path, *, victim=None):
    """Puts a journal beside a file that is played back when the file is opened."""
    pages = path.stat().st_size // 4096
    content = bytearray(struct.pack(">8sIIIII", MAGIC, 0, 0, pages, 512, 4096).ljust(512, b"\0"))
    if victim is not None:
        name = os.fsencode(victim)
        content += struct.pack(">I", 2**30 // 4096 + 1) + name
        content += struct.pack(">II", len(name), sum(name)) + MAGIC
    beside = path.with_name(f"{path.name}-journal")
    beside.write_bytes(content)
    return beside


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "thesis.txt"
    path.write_text("ten years of work")
    return path


def test_sqlite_itself_deletes_what_a_journal_names(theirs, victim):
    """Otherwise the tests below show nothing."""
    beside = journal(theirs, victim=victim)
    with contextlib.closing(sqlite3.connect(theirs)) as connection:
        connection.execute("SELECT * FROM decisions").fetchall()
    assert not victim.exists()
    assert not beside.exists()


@pytest.mark.parametrize("linked", [False, True], ids=["", "through a link"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_journal_that_names_a_file_is_refused_by_name(tuner, tmp_path, theirs, victim, command, linked):
    beside = journal(theirs, victim=victim)
    named = theirs
    if linked:
        named = tmp_path / "link.sqlite"
        named.symlink_to(theirs)
    done = tuner(*(each.format(named) for each in COMMANDS[command]))
    assert victim.read_text() == "ten years of work"
    assert beside.exists()
    assert done.status in (1, 2)
    assert "theirs.sqlite-journal" in done.out + done.err


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_job_leaves_such_a_journal_and_its_file_alone(theirs, victim, make, caplog, mode):
    change(theirs, f"PRAGMA journal_mode = {mode}")
    beside = journal(theirs, victim=victim)
    before = theirs.read_bytes(), beside.read_bytes()
    layers = open_layers(theirs, shared=[theirs.with_name("other.sqlite"), theirs])
    kept = layers.publish(make.decision(T=7), make.environment)
    assert layers.lookup(make.key(T=7), make.environment.id) == kept
    layers.close()
    assert (theirs.read_bytes(), beside.read_bytes()) == before
    assert victim.exists()
    assert "names another file" in caplog.text


def test_a_journal_that_is_no_file_is_refused(theirs, victim):
    beside = theirs.with_name(f"{theirs.name}-journal")
    beside.symlink_to(victim)
    for options in ({}, {"attached": True}, {"immutable": True}):
        with pytest.raises(StoreError, match="is no regular file") as caught:
            Store(theirs, **options)
        assert caught.value.fault is Fault.FOREIGN
    beside.unlink()
    os.mkfifo(beside)
    with pytest.raises(StoreError, match="is no regular file"):
        Store(theirs)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_only_read_is_not_repaired(tuner, theirs, command):
    beside = journal(theirs)
    before = theirs.read_bytes(), beside.read_bytes()
    done = tuner(*(each.format(theirs) for each in COMMANDS[command]))
    assert (theirs.read_bytes(), beside.read_bytes()) == before
    assert done.status in (1, 2)
    assert "theirs.sqlite-journal" in done.out + done.err


KILLED = """
import os, sys
from layout_tuner.cache.sqlite.file import Store
store = Store(sys.argv[1], journal=sys.argv[2])
def work(connection):
    connection.exec_driver_sql("PRAGMA cache_spill = 1")
    connection.exec_driver_sql("PRAGMA cache_size = 1")
    connection.exec_driver_sql("UPDATE decisions SET candidate = hex(zeroblob(9000))")
    connection.exec_driver_sql("DELETE FROM measurements")
    connection.exec_driver_sql("INSERT INTO seals VALUES (1, hex(zeroblob(200000)), '', '', '')")
    assert sys.argv[2] == "wal" or os.path.getsize(sys.argv[1] + "-journal") > 0
    os._exit(7)
store._database.run(work, write=True)
"""


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_writer_that_was_killed_is_recovered_from(path, make, mode):
    with contextlib.closing(Store(path, journal=mode)) as store:
        stored = store.publish(make.decision(), make.environment)
    assert subprocess.run([sys.executable, "-c", KILLED, path, mode]).returncode == 7
    assert path.with_name(f"{path.name}-{'wal' if mode == 'wal' else 'journal'}").exists()
    with contextlib.closing(Store(path, journal=mode)) as store:
        assert list(store.decisions()) == [stored]


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n"
TRIGGER = "CREATE TRIGGER t AFTER INSERT ON decisions BEGIN UPDATE decisions SET candidate = 'evil'; END"
PADDING = "".join(f"CREATE TABLE padding{number} (x TEXT);" for number in range(120))

PROGRAMS = {
    "a view after a hundred tables": f"{PADDING} CREATE VIEW more AS {ENDLESS}",
    "an endless table": f"DROP TABLE measurements; {PADDING} CREATE VIEW measurements AS {ENDLESS}",
    "an endless version": f"DROP TABLE schema_version; CREATE VIEW schema_version AS SELECT x version FROM ({ENDLESS})",
    "a trigger": f"{PADDING} {TRIGGER}",
    "a check": "ALTER TABLE misses ADD COLUMN more TEXT CHECK (abs(random()) > 0)",
    "a default": "ALTER TABLE misses ADD COLUMN more TEXT DEFAULT (hex(randomblob(9)))",
    "a computed column": "ALTER TABLE misses ADD COLUMN more TEXT AS (hex(zeroblob(99)))",
    "an index over an expression": "CREATE INDEX i ON decisions (abs(gain))",
    "a partial index": "CREATE INDEX i ON decisions (gain) WHERE gain > 0",
    "a virtual table": "CREATE VIRTUAL TABLE v USING fts5(x)",
    "a conflict clause": "CREATE TABLE v (x TEXT UNIQUE ON CONFLICT REPLACE)",
    "too many tables": "".join(f"CREATE TABLE padding{number} (x TEXT);" for number in range(1001)),
    "a foreign key": "ALTER TABLE decisions ADD COLUMN more TEXT REFERENCES misses (id) ON DELETE CASCADE",
}


@pytest.mark.parametrize("options", [{}, {"attached": True}, {"immutable": True}], ids=["own", "attached", "immutable"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_schema_that_says_more_than_ours_is_refused(theirs, program, options):
    change(theirs, PROGRAMS[program])
    before = theirs.read_bytes()
    with pytest.raises(StoreError) as caught:
        Store(theirs, **options)
    assert caught.value.fault is Fault.FOREIGN
    assert theirs.read_bytes() == before


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_an_endless_view(tuner, theirs, command):
    change(theirs, PROGRAMS["an endless table"])
    start = time.monotonic()
    done = tuner(*(each.format(theirs) for each in COMMANDS[command]))
    assert time.monotonic() - start < 10
    assert done.status in (1, 2)
    assert "view" in done.out + done.err


def test_a_shared_file_that_becomes_endless_while_it_is_used_is_left_out(tmp_path, theirs, make, caplog):
    layers = open_layers(tmp_path / "user.sqlite", shared=[theirs])
    assert layers.lookup(make.key(), make.environment.id) is not None
    copy = theirs.with_name("copy.sqlite")
    copy.write_bytes(theirs.read_bytes())
    change(copy, PROGRAMS["an endless table"])
    os.replace(copy, theirs)
    start = time.monotonic()
    assert layers.lookup(make.key(), make.environment.id) is None
    assert time.monotonic() - start < 10
    assert "carries a view" in caplog.text
    layers.close()


def test_a_trigger_that_is_added_under_an_open_connection_does_not_run(path, make, opened):
    store = opened(path)
    stored = store.publish(make.decision(), make.environment)
    change(path, TRIGGER)
    with pytest.raises(StoreError):
        store.publish(make.decision(T=7), make.environment)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT candidate FROM decisions").fetchall() == [(stored.candidate,)]


LONG = "SELECT count(*) FROM " + ", ".join(f"sqlite_master t{number}" for number in range(12))


def test_a_statement_without_end_is_ended(path, opened, monkeypatch):
    monkeypatch.setattr(database, "READING_TIMEOUT_S", 0.2)
    store = opened(path)
    with pytest.raises(StoreError, match=r"took longer than 0\.2 s"):
        store._database.run(lambda connection: connection.exec_driver_sql(LONG).all())
    assert store.count() == 0


INTERRUPTED = f"""
import sys
from layout_tuner.cache.sqlite.file import Store
store = Store(sys.argv[1])
print("ready", flush=True)
try:
    store._database.run(lambda connection: connection.exec_driver_sql({LONG!r}).all())
except KeyboardInterrupt:
    print("interrupted", store.count())
"""


def test_ctrl_c_ends_a_statement(path):
    child = subprocess.Popen([sys.executable, "-c", INTERRUPTED, path], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=20)[0] == "interrupted 0\n"
    finally:
        child.kill()


def test_a_file_that_is_attached_is_judged_again(path, theirs, opened):
    """Between the look at it and its use, somebody changes it."""
    target = Database(path)
    opened(path)
    change(theirs, PROGRAMS["an endless table"])
    with contextlib.closing(target), pytest.raises(StoreError, match="carries a view"):
        target.run_with(theirs, lambda connection: connection.execute("SELECT * FROM source.decisions"), immutable=True)
