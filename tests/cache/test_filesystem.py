"""File systems: which are local, and one file per host where they are not."""

import contextlib
import json
import logging
import os
import resource
import shutil
import sqlite3
import subprocess
import sys

import pytest
from layout_tuner.cache import filesystem
from layout_tuner.cache.filesystem import FileSystem, file_system
from layout_tuner.cache.hosts import host_id
from layout_tuner.cache.places import opening as stores
from layout_tuner.cache.places.folder import FolderStore, host_file, host_files
from layout_tuner.cache.places.opening import Store, open_store
from layout_tuner.cache.sharing.share import merge_files


def test_this_machine_has_local_and_other_file_systems(tmp_path):
    assert file_system(tmp_path).local
    assert file_system(tmp_path / "not" / "there" / "yet") == file_system(tmp_path)
    assert not file_system(filesystem.Path("/proc")).local
    if os.path.ismount("/dev/shm"):
        assert file_system(filesystem.Path("/dev/shm")) == FileSystem(name="tmpfs", local=True)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (0x6969, FileSystem(name="nfs", local=False)),
        (0x0BD00BD0, FileSystem(name="lustre", local=False)),
        (0x65735546, FileSystem(name="fuse", local=False)),
        (0xFF534D42, FileSystem(name="cifs", local=False)),
        (0x12345678, FileSystem(name="type 0x12345678", local=False)),
        (0x58465342, FileSystem(name="xfs", local=True)),
        (0x9123683E, FileSystem(name="btrfs", local=True)),
    ],
)
def test_what_is_not_known_to_be_local_counts_as_a_network(tmp_path, monkeypatch, kind, expected):
    monkeypatch.setattr(filesystem, "_statfs_type", lambda place: kind)
    assert file_system(tmp_path) == expected


def test_the_mount_table_answers_where_statfs_does_not(tmp_path, monkeypatch):
    table = tmp_path / "mountinfo"
    folder = tmp_path / "a b"
    folder.mkdir()
    point = str(folder).replace(" ", "\\040")
    table.write_text(
        "20 1 8:1 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        f"41 20 0:50 / {point} rw - nfs4 server:/home rw\n"
        "nonsense\n"
    )
    monkeypatch.setattr(filesystem, "_statfs_type", lambda place: None)
    monkeypatch.setattr(filesystem._mounted_type, "__defaults__", (table,))
    assert file_system(folder / "x") == FileSystem(name="nfs4", local=False)
    assert file_system(tmp_path) == FileSystem(name="ext4", local=True)
    monkeypatch.setattr(filesystem._mounted_type, "__defaults__", (tmp_path / "none",))
    assert file_system(tmp_path) == FileSystem(name="unknown", local=False)


def test_a_network_file_system_gets_one_file_per_host(tmp_path, path, monkeypatch, make, caplog):
    monkeypatch.setattr(stores, "file_system", lambda place: FileSystem(name="nfs", local=False))
    caplog.set_level(logging.INFO)
    store = open_store(path)
    store.publish(make.decision(), make.environment)
    store.close()
    (written,) = [each for each in tmp_path.iterdir() if each.suffix == ".sqlite"]
    assert written.name.startswith("decisions.")
    assert written != path
    assert caplog.text.count("network file system (nfs)") == 1
    assert not list(tmp_path.glob("*-wal"))
    with contextlib.closing(sqlite3.connect(written)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


@pytest.fixture
def hosts(path):
    """The stores of three hosts that share a folder."""
    with contextlib.ExitStack() as stack:
        found = [FolderStore(path, host=f"node{number}") for number in range(3)]
        for each in found:
            stack.callback(each.close)
        yield found


def test_every_host_reads_what_all_wrote(hosts, make):
    for number, store in enumerate(hosts):
        store.publish(make.decision(T=number), make.environment)
        store.record_misses([make.miss(T=100 + number)])
    for store in hosts:
        assert sorted(record.key.T for record in store.decisions()) == [0, 1, 2]
        assert store.lookup(make.key(T=2), make.environment.id).host == "node2"
        assert len(store.misses()) == 3
        assert store.environments() == [make.environment]


def test_a_host_writes_its_own_file_only(hosts, path, make):
    hosts[0].publish(make.decision(), make.environment)
    before = {each: each.read_bytes() for each in host_files(path) if each != host_file(path, "node1")}
    hosts[1].publish(make.decision(candidate="full/g=STRIDE_HV"), make.environment)
    assert {each: each.read_bytes() for each in before} == before
    assert len({record.host for record in hosts[2].decisions()}) == 2


def test_a_file_from_before_is_still_read(path, make, opened):
    old = opened(path)
    stored = old.publish(make.decision(host="before"), make.environment)
    old.close()
    with contextlib.closing(FolderStore(path, host="node1")) as store:
        assert store.lookup(make.key(), make.environment.id) == stored


def test_the_broken_file_of_another_host_is_left_out_and_said_once(hosts, path, make, caplog):
    hosts[0].publish(make.decision(), make.environment)
    host_file(path, "node2").write_bytes(b"garbage" * 1000)
    for _ in range(3):
        assert hosts[0].lookup(make.key(), make.environment.id) is not None
    assert caplog.text.count("left out for now") == 1


def test_the_files_of_hosts_fold_into_one(hosts, path, tmp_path, make):
    for number, store in enumerate(hosts):
        store.publish(make.decision(T=number), make.environment)
        store.publish(make.decision(T=99), make.environment)
    merged = merge_files(host_files(path), tmp_path / "folded.sqlite")
    assert merged.exported.decisions == 6
    with contextlib.closing(Store(tmp_path / "folded.sqlite", immutable=True)) as store:
        assert sorted({record.key.T for record in store.decisions()}) == [0, 1, 2, 99]


def test_two_hosts_with_one_name_write_two_files(tmp_path):
    names = set()
    for number in range(2):
        identity = tmp_path / str(number)
        identity.write_text(f"{number:032x}\n")
        names.add(host_id("node.example", (identity,)))
    assert len(names) == 2
    assert all(name.startswith("node-") for name in names)


def test_a_host_without_an_identity_file_takes_the_next(tmp_path):
    empty, boot = tmp_path / "empty", tmp_path / "boot"
    empty.write_text("\n")
    boot.write_text("6e1d4a3c-95bf-4b0b-8c43-26f0d0a4c0aa\n")
    assert host_id("h", (tmp_path / "none", empty, boot)) == host_id("h", (boot,))
    assert "/" not in host_id("../ä b", ())


@pytest.mark.parametrize(
    "message", ["locking protocol", "disk I/O error", "database disk image is malformed", "Stale file handle"]
)
def test_trouble_of_network_file_systems_never_reaches_an_op(path, make, monkeypatch, caplog, message):
    codes = {"locking protocol": 15, "disk I/O error": 10, "database disk image is malformed": 11}

    def fail(*arguments, **options):
        error: Exception
        if message in codes:
            error = sqlite3.OperationalError(message)
            error.sqlite_errorcode = codes[message]
        else:
            error = OSError(116, message)
        raise error

    store = open_store(path)
    store.publish(make.decision(), make.environment)
    clock = [1000.0]
    store._clock = lambda: clock[0]
    store._open_at = store._write_at = 0.0
    with monkeypatch.context() as patched:
        patched.setattr("layout_tuner.cache.sqlite.queries.put_decision", fail)
        patched.setattr("layout_tuner.cache.sqlite.queries.evidence", fail)
        for number in range(5):
            kept = store.publish(make.decision(T=number), make.environment)
            assert store.lookup(make.key(T=number), make.environment.id) == kept
        assert caplog.text.count(message) == 1
    clock[0] += 1000.0
    assert store.lookup(make.key(T=3), make.environment.id) is not None
    store.close()
    with contextlib.closing(Store(path)) as again:
        assert len(list(again.decisions())) == 6


SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/vfs.h>
int statfs(const char *path, struct statfs *answer) {
    int (*real)(const char *, struct statfs *) = (int (*)(const char *, struct statfs *))dlsym(RTLD_NEXT, "statfs");
    int code = real(path, answer);
    answer->f_type = 0x6969;
    return code;
}
"""

HOST = """
import logging, sys
from pathlib import Path
import layout_tuner.cache.hosts as hosts
hosts._IDENTITIES = host_id = (Path(sys.argv[2]),)
name = hosts.host_id("node.cluster", host_id)
hosts.this_host.cache_clear()
for module in ("places.folder", "memory", "sqlite.sql", "layers", "sharing.share"):
    __import__(f"layout_tuner.cache.{module}")
    setattr(sys.modules[f"layout_tuner.cache.{module}"], "this_host", lambda: name)
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
from layout_tuner.cache.layers import open_layers
from layout_tuner.cache.records import DecisionRecord, EnvironmentRecord, KeyRecord
layers = open_layers(sys.argv[1])
for number in range(10):
    key = KeyRecord(op="x", B=int(sys.argv[3]), T=number, H=1, HV=1, K=1, V=1, varlen=False, dtype="float32", form="")
    layers.publish(DecisionRecord(key=key, environment="e", candidate="a", revision="r", default_candidate="a",
                                  source="measured"), EnvironmentRecord(id="e"))
    assert layers.lookup(key, "e") is not None
layers.close()
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_hosts_of_one_name_share_a_folder_that_statfs_calls_nfs(tmp_path, path):
    (tmp_path / "shim.c").write_text(SHIM)
    shim = tmp_path / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, tmp_path / "shim.c", "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(shim)}
    hosts = []
    for number in range(2):
        identity = tmp_path / f"machine-id-{number}"
        identity.write_text(f"{number:032x}\n")
        command = [sys.executable, "-c", HOST, str(path), str(identity), str(number)]
        # Two processes of each host at once.
        hosts += [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [host.communicate(timeout=120)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [0] * 4, said
    assert [each.count("network file system (nfs)") for each in said] == [1] * 4
    assert "WARNING" not in "".join(said)
    assert len(host_files(path)) == 2
    assert not path.exists()
    assert not list(tmp_path.glob("*-wal"))
    shown = subprocess.run(
        [sys.executable, "-c", "from layout_tuner.cli import main; main()", "show", "--json", "--cache", path],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(json.loads(shown.stdout)["decisions"]) == 20


def test_what_another_host_stores_later_is_found(fast_path, make):
    """Files are remembered by what they hold, until they change."""
    path = fast_path / "decisions.sqlite"
    with (
        contextlib.closing(Store(host_file(path, "other"), journal="delete", host="other")) as other,
        contextlib.closing(FolderStore(path, host="me")) as store,
    ):
        other.publish(make.decision(T=1), make.environment)
        assert store.lookup(make.key(T=2), make.environment.id) is None
        other.publish(make.decision(T=2), make.environment)
        assert store.lookup(make.key(T=2), make.environment.id).host == "other"
        assert store.lookup(make.key(T=1), make.environment.id).host == "other"
        assert store.lookup(make.key(T=1), "another") is None


def test_more_hosts_than_files_may_be_open(fast_path, make):
    """Each host's file is looked at, whatever the limit, and none is dropped for want of a handle."""
    path = fast_path / "decisions.sqlite"
    with contextlib.closing(Store(host_file(path, "h0"), journal="delete", host="h0")) as first:
        first.publish(make.decision(), make.environment)
    for number in range(1, 150):
        shutil.copy(host_file(path, "h0"), host_file(path, f"h{number}"))
    with contextlib.closing(Store(host_file(path, "h149"), journal="delete", host="h149")) as last:
        last.publish(make.decision(T=7), make.environment)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as lowest:
        free = lowest.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 100, hard))
    try:
        with contextlib.closing(FolderStore(path, host="me")) as store:
            for _ in range(2):
                assert store.lookup(make.key(T=7), make.environment.id).host == "h149"
            assert len(os.listdir("/proc/self/fd")) < free + 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not store._said
