"""One file under two names: links, mounts, and relative paths of a process that moves."""

import contextlib
import os
import subprocess
import sys

import pytest
from command import run_here
from layout_tuner.cache import names
from layout_tuner.cache.faults import Fault, StoreError
from layout_tuner.cache.filesystem import FileSystem
from layout_tuner.cache.layers import open_layers
from layout_tuner.cache.places import opening as stores
from layout_tuner.cache.places.folder import FolderStore
from layout_tuner.cache.places.opening import open_existing, open_path, open_store, require_place
from layout_tuner.cache.sharing.doctor import examine
from layout_tuner.cache.sqlite.file import Store

import layout_tuner
from layout_tuner.config import Cache, Config
from layout_tuner.dispatch import router

WRITER = """
import sys
from layout_tuner.cache.places.opening import open_store
from layout_tuner.cache.records import DecisionRecord, EnvironmentRecord, KeyRecord
store = open_store(sys.argv[1])
for number in range(40):
    key = KeyRecord(op="x", B=int(sys.argv[2]), T=number, H=1, HV=1, K=1, V=1, varlen=False, dtype="f", form="")
    store.publish(DecisionRecord(key=key, environment="e", candidate="a", revision="r", default_candidate="a",
                                 source="measured"), EnvironmentRecord(id="e"))
    assert store.lookup(key, "e") is not None
store.close()
"""


def write_under(paths):
    """A process for each path, all at once; what they said."""
    children = [
        subprocess.Popen([sys.executable, "-c", WRITER, path, str(number)], stderr=subprocess.PIPE, text=True)
        for number, path in enumerate(paths)
    ]
    said = [child.communicate(timeout=60)[1] for child in children]
    assert [child.returncode for child in children] == [0] * len(children), said
    return said


@pytest.fixture
def file(path, make):
    with contextlib.closing(Store(path)) as store:
        store.publish(make.decision(), make.environment)
    return path


def test_a_hard_link_is_read_and_not_written(file, tmp_path, make, caplog):
    other = tmp_path / "other" / "name.sqlite"
    other.parent.mkdir()
    os.link(file, other)
    before = file.read_bytes()
    for each in (file, other):
        with pytest.raises(StoreError, match="hard link") as caught:
            Store(each)
        assert caught.value.fault is Fault.READ_ONLY
        with pytest.raises(StoreError, match="hard link"):
            require_place(each)
        with contextlib.closing(open_store(each)) as store:
            kept = store.publish(make.decision(T=7), make.environment)
            assert store.lookup(make.key(T=7), make.environment.id) == kept
            assert store.lookup(make.key(), make.environment.id) is not None
    write_under([file, other])
    assert file.read_bytes() == before
    assert "kept in memory" in caplog.text
    assert {each.subject: each.level for each in examine(other)}["names"] == "warning"
    other.unlink()
    with contextlib.closing(Store(file, verify=True)) as store:
        assert len(list(store.decisions())) == 1


@pytest.fixture
def mounted(file, tmp_path):
    """The file, mounted under another name, as containers do."""
    other = tmp_path / "mounted here.sqlite"
    other.touch()
    if subprocess.run(["mount", "--bind", file, other], capture_output=True).returncode:
        pytest.skip("files cannot be mounted here")
    try:
        yield other
    finally:
        subprocess.run(["umount", "-l", other], check=True)


def test_a_file_that_is_mounted_is_written_under_its_own_name_only(file, mounted):
    assert names.mounted_alone(mounted)
    assert not names.mounted_alone(file)
    with pytest.raises(StoreError, match="mount the folder") as caught:
        Store(mounted)
    assert caught.value.fault is Fault.READ_ONLY
    write_under([file, mounted])
    with contextlib.closing(Store(file, verify=True)) as store:
        assert len(list(store.decisions())) == 41


def test_symbolic_links_name_one_file(file, tmp_path):
    link = tmp_path / "link.sqlite"
    link.symlink_to(file)
    assert write_under([file, link, link]) == ["", "", ""]
    with contextlib.closing(Store(link, verify=True)) as store:
        assert len(list(store.decisions())) == 121


def test_what_a_link_leads_to_is_set_aside_and_the_link_stays(file, tmp_path, make):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    link = folder / "link.sqlite"
    link.symlink_to(file)
    file.write_bytes(b"garbage" * 1000)
    with contextlib.closing(Store(link)) as store:
        store.publish(make.decision(), make.environment)
    assert link.is_symlink()
    assert len(list(tmp_path.glob("decisions.sqlite.damaged-*"))) == 1
    assert os.listdir(folder) == ["link.sqlite"]


def test_a_link_to_a_file_that_is_not_there_yet_is_followed(path, tmp_path, make):
    link = tmp_path / "link.sqlite"
    link.symlink_to(path)
    with contextlib.closing(open_store(link)) as store:
        store.publish(make.decision(), make.environment)
    with contextlib.closing(Store(path)) as store:
        assert len(list(store.decisions())) == 1


def test_the_file_system_behind_a_link_counts(tmp_path, monkeypatch, make):
    far = tmp_path / "far"
    far.mkdir()
    link = tmp_path / "decisions.sqlite"
    link.symlink_to(far / "site.sqlite")
    monkeypatch.setattr(stores, "file_system", lambda place: FileSystem(name="nfs", local=place != far))
    with contextlib.closing(open_path(link)) as store:
        assert isinstance(store, FolderStore)
        store.publish(make.decision(), make.environment)
        assert store.own.path.parent == far
    with contextlib.closing(open_existing(link)) as store:
        assert len(list(store.decisions())) == 1


def test_the_doctor_looks_behind_a_link(file, tmp_path, make):
    link = tmp_path / "elsewhere" / "link.sqlite"
    link.parent.mkdir()
    link.symlink_to(file)
    with contextlib.closing(Store(file)) as store:
        # In use: what was written last is in the file beside the real one.
        store.publish(make.decision(T=7), make.environment)
        found = {each.subject: each for each in examine(link)}
    assert {each.level for each in found.values()} == {"ok"}
    assert found["decisions"].text == "2"


@pytest.mark.parametrize("way", ["argument", "variable", "toml", "shared"])
def test_a_relative_path_is_where_it_was_when_it_was_taken(tmp_path, monkeypatch, make, way):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    monkeypatch.chdir(one)
    monkeypatch.setenv("XDG_CACHE_HOME", str(one / "of the user"))
    cache = None
    if way == "argument":
        cache = "d.sqlite"
    elif way == "variable":
        monkeypatch.setenv("LAYOUT_TUNER_CACHE_PATH", "d.sqlite")
    elif way == "toml":
        (one / "tuner.toml").write_text('[cache]\npath = "d.sqlite"')
    else:
        monkeypatch.setenv("LAYOUT_TUNER_CACHE_SHARED", "d.sqlite")
        Store("d.sqlite").close()
    with layout_tuner.enable(cache=cache, fla=False):
        monkeypatch.chdir(other)
        store = router.current().store
        store.publish(make.decision(), make.environment)
        kinds = {layer.kind: layer.store.name for layer in store.layers}
        assert store.lookup(make.key(), make.environment.id) is not None
    assert os.listdir(other) == []
    assert kinds["site" if way == "shared" else "user"] == str(one / "d.sqlite")
    assert (one / "d.sqlite").exists()


def test_layers_take_relative_paths_once(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    layers = open_layers("d.sqlite", shared=["site.sqlite"])
    (tmp_path / "other").mkdir()
    monkeypatch.chdir("other")
    layers.publish(make.decision(), make.environment)
    layers.close()
    assert os.listdir() == []
    assert (tmp_path / "d.sqlite").exists()


def test_settings_hold_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found = Config(cache=Cache(path="d.sqlite", shared=("~/site.sqlite", "x/../y.sqlite"))).cache
    assert found.path == str(tmp_path / "d.sqlite")
    assert found.shared == (str(tmp_path / "home/site.sqlite"), str(tmp_path / "x/../y.sqlite"))
    assert Cache().path == ""


def test_show_of_a_link_to_a_file_in_use(file, tmp_path, make, monkeypatch, capsys):
    link = tmp_path / "elsewhere" / "link.sqlite"
    link.parent.mkdir()
    link.symlink_to(file)
    with contextlib.closing(Store(file)) as store:
        store.publish(make.decision(T=7), make.environment)
        done = run_here(["show", "--cache", str(link)], monkeypatch, capsys)
    assert (done.status, "2 decisions in" in done.out) == (0, True)
