"""A server database: the same operations, shared by hosts, and outages that heal. Needs PostgreSQL's programs."""

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from command import run_here
from layout_tuner.cache.faults import Fault, StoreError
from layout_tuner.cache.layers import open_layers
from layout_tuner.cache.records import EnvironmentRecord
from layout_tuner.cache.sharing.share import differences, export_file, import_file, prune
from layout_tuner.cache.sqlite import migrations
from layout_tuner.cache.sqlite.file import Store
from typer.testing import CliRunner

from layout_tuner.cli import cache

pytest.importorskip("psycopg")
from layout_tuner.cache.places.server import ServerStore

USER = "postgres"


def program(name):
    """A program of PostgreSQL's, which Debian keeps out of the path."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return shutil.which(name) or (str(found[-1]) if found else None)


class Server:
    """A PostgreSQL of the tests' own, on a loopback port of its own."""

    def __init__(self, folder):
        self.data = Path(folder) / "data"
        self.log = Path(folder) / "log"
        # PostgreSQL refuses to run as root.
        self.prefix = ["runuser", "-u", USER, "--"] if os.geteuid() == 0 else []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        if self.prefix:
            shutil.chown(folder, USER)
        self.run("initdb", "-D", self.data, "-U", USER, "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C")
        self.start()

    def run(self, name, *arguments):
        command = [*self.prefix, program(name), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self):
        options = f"-c listen_addresses=127.0.0.1 -c port={self.port} -c unix_socket_directories='' -c fsync=off"
        self.run("pg_ctl", "-D", self.data, "-l", self.log, "-o", options, "-w", "start")

    def stop(self, mode="immediate"):
        self.run("pg_ctl", "-D", self.data, "-m", mode, "-w", "stop")

    def url(self, database):
        return f"postgresql+psycopg://{USER}:secret@127.0.0.1:{self.port}/{database}"

    def create(self, database):
        self.run("createdb", "-h", "127.0.0.1", "-p", self.port, "-U", USER, database)
        return self.url(database)


@pytest.fixture(scope="module")
def server():
    if not all(map(program, ("initdb", "pg_ctl", "createdb", "postgres"))):
        pytest.skip("PostgreSQL is not installed")
    with tempfile.TemporaryDirectory() as folder:
        running = Server(folder)
        try:
            yield running
        finally:
            running.stop()


@pytest.fixture
def url(server, request):
    return server.create(f"db{abs(hash(request.node.name))}")


@pytest.fixture
def store(url):
    with contextlib.closing(ServerStore(url, host="here")) as made:
        yield made


def test_what_is_published_is_found(store, make):
    stored = store.publish(make.decision(), make.environment)
    assert stored == dataclasses.replace(make.decision(), host="here")
    assert store.lookup(make.key(), make.environment.id) == stored
    assert list(store.decisions()) == [stored]
    assert store.environments() == [make.environment]
    again = store.publish(make.decision(candidate="block/g=T_CONTIG"), make.environment)
    assert list(store.decisions()) == [again]
    assert again.created_at > stored.created_at


def test_misses_add_up(store, make):
    store.record_misses([make.miss(count=2), make.miss(count=3)])
    store.record_misses([make.miss(count=1, reason="capture")])
    (miss,) = store.misses()
    assert (miss.count, miss.reason) == (6, "capture")


def test_hosts_share_and_keep_apart(store, url, make):
    store.publish(make.decision(), make.environment)
    with contextlib.closing(ServerStore(url, host="there")) as other:
        other.publish(make.decision(candidate="full/g=STRIDE_HV"), make.environment)
        assert len(list(other.decisions())) == len(list(store.decisions())) == 2


def test_files_and_servers_exchange_decisions(store, tmp_path, make, opened):
    file = opened(tmp_path / "file.sqlite", host="there")
    for number in range(1200):
        file.publish(make.decision(T=number), make.environment) if number < 3 else None
    file.absorb((make.decision(T=number, host="there") for number in range(3, 1200)), [make.environment])
    assert import_file(store, file.path).added == 1200
    assert import_file(store, file.path).kept == 1200
    assert {record.source for record in store.decisions(op="chunk_bwd_dv_local")} == {"imported"}
    assert list(differences(store, file)) == []
    assert export_file(store, tmp_path / "out.sqlite").decisions == 1200
    with contextlib.closing(Store(tmp_path / "out.sqlite", immutable=True)) as out:
        assert list(differences(store, out)) == []
    # Row numbers of a bulk import and of single publishes do not collide.
    store.publish(make.decision(T=5000), make.environment)
    assert prune(store, op="chunk_bwd_dv_local") == 1201
    assert store.environments() == []


def test_many_threads_and_processes_write_at_once(url, make):
    code = """
import sys
from layout_tuner.cache.places.server import ServerStore
from layout_tuner.cache.records import DecisionRecord, EnvironmentRecord, KeyRecord, MissRecord
store = ServerStore(sys.argv[1], host=sys.argv[2] if int(sys.argv[2]) % 2 else "same")
for number in range(20):
    for B in (1, 2 + int(sys.argv[2])):
        key = KeyRecord(op="x", B=B, T=number, H=1, HV=1, K=1, V=1, varlen=False, dtype="float32", form="")
        store.publish(DecisionRecord(key=key, environment="e", candidate="a", revision="r", default_candidate="a",
                                     source="measured"), EnvironmentRecord(id="e"))
        store.record_misses([MissRecord(key=key, environment="e", host="same")])
store.close()
"""
    children = [subprocess.Popen([sys.executable, "-c", code, url, str(number)]) for number in range(4)]
    assert [child.wait(120) for child in children] == [0] * 4
    with contextlib.closing(ServerStore(url)) as store:
        own = [record for record in store.decisions() if record.key.B > 1]
        shared = [record for record in store.decisions() if record.key.B == 1]
        assert len(own) == 80
        # Two of the four writers go by one name and share their slots.
        assert len(shared) == 60
        assert sum(miss.count for miss in store.misses()) == 160


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forks_do_not_share_a_connection(store, make):
    store.publish(make.decision(), make.environment)
    child = os.fork() if threading.active_count() == 1 else None
    if child is None:
        pytest.skip("this process has threads")
    if child == 0:
        code = 1
        try:
            store.publish(make.decision(T=7), make.environment)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(store.decisions())) == 2


def test_the_password_is_shown_nowhere(server, url, caplog):
    with contextlib.closing(ServerStore(url)) as store:
        assert "secret" not in store.name
    with pytest.raises(StoreError) as caught:
        ServerStore(server.url("missing"))
    assert "secret" not in str(caught.value)
    assert "missing" in str(caught.value)


def test_a_server_of_another_schema_is_refused(store, url):
    def newer(connection):
        connection.exec_driver_sql("INSERT INTO schema_version VALUES (7, '', '')")

    store._database.run(newer, write=True)
    with pytest.raises(StoreError, match=r"schema version 7, .* uses 1") as caught:
        ServerStore(url)
    assert caught.value.fault is Fault.NEWER


def test_an_older_server_is_migrated_whole_or_not_at_all(store, url, make, monkeypatch):
    stored = store.publish(make.decision(), make.environment)

    def older(connection):
        connection.exec_driver_sql("ALTER TABLE decisions DROP COLUMN version")
        connection.exec_driver_sql("UPDATE schema_version SET version = 0")

    def step(connection):
        connection.exec_driver_sql("ALTER TABLE decisions ADD COLUMN version TEXT NOT NULL DEFAULT '0.1.0'")
        if fails:
            connection.exec_driver_sql("UPDATE nothing SET x = 1")

    store._database.run(older, write=True)
    store.close()
    with pytest.raises(StoreError, match=r"version 0, .* writes 1") as caught:
        ServerStore(url)
    assert caught.value.fault is Fault.OLDER
    monkeypatch.setitem(migrations.MIGRATIONS, 0, step)
    with pytest.raises(StoreError, match="version 0"):
        ServerStore(url, create=False)
    fails = True
    with pytest.raises(StoreError, match="nothing"):
        ServerStore(url)
    fails = False
    with contextlib.closing(ServerStore(url)) as same:
        assert list(same.decisions()) == [stored]


def test_a_look_at_a_server_makes_no_tables(url, tmp_path, make, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["cache", "export", "out.sqlite", "--cache", url],
        ["cache", "prune", "--op", "x", "--cache", url],
        ["doctor", "--cache", url],
        ["show", "--cache", url],
    ):
        done = run_here(arguments, monkeypatch, capsys)
        assert done.status == (1 if arguments[0] == "doctor" else 2)
        assert "holds no decisions yet" in done.out + done.err
        assert "secret" not in done.out + done.err
    with contextlib.closing(ServerStore(url)) as store:
        store.publish(make.decision(), make.environment)
    done = run_here(["doctor", "--cache", url], monkeypatch, capsys)
    assert (done.status, "secret" in done.out) == (0, False)
    assert "decisions    1" in done.out
    shown = run_here(["show", "--layers", "--cache", url], monkeypatch, capsys)
    assert "1 decisions in postgresql+psycopg://postgres:***@" in shown.out
    assert "secret" not in shown.out


def layers_of(path, url, clock):
    layers = open_layers(path, url=url)
    layers._server._clock = lambda: clock[0]
    layers._server._open_at = layers._server._write_at = min(layers._server._open_at, clock[0])
    return layers


def test_an_outage_in_the_middle_degrades_and_heals(server, url, tmp_path, make, caplog):
    clock = [1e9]
    layers = layers_of(tmp_path / "user.sqlite", url, clock)
    layers.publish(make.decision(T=1), make.environment)
    server.stop()
    try:
        start = time.monotonic()
        for number in range(2, 12):
            kept = layers.publish(make.decision(T=number), make.environment)
            assert layers.lookup(make.key(T=number), make.environment.id) == kept
            assert layers.lookup(make.key(T=number + 100), make.environment.id) is None
            layers.record_misses([make.miss(T=number + 100)])
        assert time.monotonic() - start < 10
        warnings = [each for each in caplog.records if each.levelname == "WARNING"]
        assert len(warnings) == 1
        assert "secret" not in caplog.text
    finally:
        server.start()
    clock[0] += 1000
    layers.publish(make.decision(T=12), make.environment)
    layers.close()
    with contextlib.closing(ServerStore(url)) as store:
        assert sorted(record.key.T for record in store.decisions()) == list(range(1, 13))
        assert sorted((miss.key.T, miss.count) for miss in store.misses()) == [(T, 1) for T in range(102, 112)]


def test_an_outage_at_the_start_degrades_and_heals(server, url, tmp_path, make):
    clock = [1e9]
    server.stop()
    try:
        layers = layers_of(tmp_path / "user.sqlite", url, clock)
        kept = layers.publish(make.decision(), make.environment)
        assert layers.lookup(make.key(), make.environment.id) == kept
    finally:
        server.start()
    clock[0] += 1000
    layers.lookup(make.key(T=99), make.environment.id)
    layers.close()
    with contextlib.closing(ServerStore(url)) as store:
        assert [record.key for record in store.decisions()] == [make.key()]


def test_a_second_host_finds_what_the_first_measured(url, tmp_path, make):
    with contextlib.closing(ServerStore(url, host="first")) as first:
        first.publish(make.decision(), make.environment)
    layers = open_layers(tmp_path / "user.sqlite", url=url)
    found = layers.resolve(make.key(), (make.environment.id,))
    assert (found.layer.kind, found.record.source, found.record.host) == ("server", "imported", "first")
    layers.close()
    alone = open_layers(tmp_path / "user.sqlite")
    assert alone.resolve(make.key(), (make.environment.id,)).record.host == "first"
    assert alone.environments() == [EnvironmentRecord(id=make.environment.id, facts=make.environment.facts)]
    alone.close()


def test_the_command_brings_a_file_to_a_server(url, path, tmp_path, make, opened):
    file = opened(path)
    file.publish(make.decision(), make.environment)
    done = CliRunner().invoke(cache.app, ["import", str(path), "--cache", url])
    assert "1 added" in done.output
    done = CliRunner().invoke(cache.app, ["export", str(tmp_path / "out.sqlite"), "--cache", url])
    assert "1 decisions" in done.output
    with contextlib.closing(Store(tmp_path / "out.sqlite", immutable=True)) as out:
        assert list(out.decisions()) == list(file.decisions())


def test_without_the_driver_the_file_serves(tmp_path, make, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    layers = open_layers(tmp_path / "user.sqlite", url="postgresql+psycopg://nobody@127.0.0.1:1/none")
    kept = layers.publish(make.decision(), make.environment)
    assert layers.lookup(make.key(), make.environment.id) == kept
    assert "psycopg" in caplog.text
    layers.close()


def signalled(processes, number):
    """Sends a signal to processes; one of a connection that was just closed may be gone by now."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


@contextlib.contextmanager
def frozen(server):
    """The server's processes stand still; their machine goes on to answer for them."""
    main = int((server.data / "postmaster.pid").read_text().split()[0])
    every = [main]
    try:
        signalled(every, signal.SIGSTOP)  # first, so that no more of them come
        children = subprocess.run(["pgrep", "-P", str(main)], capture_output=True, text=True).stdout.split()
        every += map(int, children)
        signalled(every[1:], signal.SIGSTOP)
        yield
    finally:
        signalled(every, signal.SIGCONT)


@pytest.mark.parametrize("connected", [True, False])
def test_a_frozen_server_does_not_stop_an_op(server, url, tmp_path, make, caplog, connected):
    clock = [1e9]
    ServerStore(url).close()
    if connected:
        layers = layers_of(tmp_path / "user.sqlite", url, clock)
        layers.publish(make.decision(T=1), make.environment)
    with frozen(server):
        start = time.monotonic()
        if not connected:
            layers = layers_of(tmp_path / "user.sqlite", url, clock)
        kept = layers.publish(make.decision(T=2), make.environment)
        assert layers.lookup(make.key(T=2), make.environment.id) == kept
        assert layers.lookup(make.key(T=99), make.environment.id) is None
        assert time.monotonic() - start < 8
    assert "did not answer" in caplog.text or "timeout expired" in caplog.text
    clock[0] += 1000
    layers.publish(make.decision(T=3), make.environment)
    layers.close()
    with contextlib.closing(ServerStore(url)) as store:
        assert sorted(record.key.T for record in store.decisions()) == ([1, 2, 3] if connected else [2, 3])


def test_a_lock_that_somebody_holds_does_not_stop_an_op(server, url, tmp_path, make):
    clock = [1e9]
    layers = layers_of(tmp_path / "user.sqlite", url, clock)
    layers.publish(make.decision(T=1), make.environment)
    with contextlib.closing(ServerStore(url)) as other, other._database._connected() as connection:
        connection.exec_driver_sql("LOCK TABLE decisions IN ACCESS EXCLUSIVE MODE")
        start = time.monotonic()
        kept = layers.publish(make.decision(T=2), make.environment)
        assert layers.lookup(make.key(T=2), make.environment.id) == kept
        assert time.monotonic() - start < 5
    layers.close()


@pytest.mark.parametrize(
    "place",
    ["//{user}:secret@{host}/none", "//{user}@{host}/none?password=secret", "//{host}/none?user=x&sslpassword=secret"],
)
def test_no_password_is_shown_wherever_it_stands(server, place, monkeypatch, tmp_path, capsys):
    url = "postgresql+psycopg:" + place.format(user=USER, host=f"127.0.0.1:{server.port}")
    with pytest.raises(StoreError) as caught:
        ServerStore(url)
    assert "secret" not in str(caught.value)
    assert "none" in str(caught.value)
    monkeypatch.chdir(tmp_path)
    done = run_here(["doctor", "--cache", url], monkeypatch, capsys)
    assert "secret" not in done.out + done.err
