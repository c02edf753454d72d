"""What the doctor sees."""

import contextlib
import os
import shutil
import sqlite3

import pytest
from layout_tuner.cache.filesystem import FileSystem
from layout_tuner.cache.sharing import doctor
from layout_tuner.cache.sharing.doctor import examine
from layout_tuner.cache.sharing.share import export_file, sweep
from layout_tuner.cache.sqlite.file import Store


@pytest.fixture
def file(path, make):
    with contextlib.closing(Store(path)) as store:
        for number in range(50):
            store.publish(make.decision(T=number), make.environment)
    return path


def seen(path):
    return {each.subject: each for each in examine(path)}


def change(path, *statements):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def test_a_sound_file_is_found_sound(file):
    found = seen(file)
    assert {each.level for each in found.values()} == {"ok"}
    assert set(found) == {"file system", "schema", "integrity", "decisions", "locks"}
    assert found["decisions"].text == "50"
    assert found["locks"].text == "keep other processes out"


def test_no_file_is_no_trouble(path):
    assert [each.level for each in examine(path)] == ["ok", "note"]


def test_a_file_that_was_made_and_not_written_yet_is_no_trouble(path):
    path.touch()
    assert [(each.level, each.subject) for each in examine(path)] == [("ok", "file system"), ("note", "file")]


def test_a_sound_file_without_decisions_is_no_copy(path):
    Store(path).close()
    found = seen(path)
    assert set(found) == {"file system", "schema", "integrity", "decisions", "locks"}
    assert {each.level for each in found.values()} == {"ok", "note"}


def test_an_export_is_recognised(file, tmp_path):
    out = tmp_path / "out.sqlite"
    with contextlib.closing(Store(file)) as store:
        export_file(store, out)
    assert seen(out)["seal"].text == "an export, unchanged"
    os.chmod(out, 0o644)
    with out.open("r+b") as copy:
        copy.seek(3000)
        copy.write(b"x")
    assert seen(out)["seal"].level == "error"


def test_damage_is_found(file):
    with file.open("r+b") as damaged:
        damaged.seek(4096 * 4)
        damaged.write(os.urandom(4096 * 6))
    assert "error" in {each.level for each in examine(file)}


def test_a_live_file_that_was_copied_alone_is_recognised(path, tmp_path, make):
    with contextlib.closing(Store(path)) as store:
        for number in range(5):
            store.publish(make.decision(T=number), make.environment)
        copies = tmp_path / "copies"
        copies.mkdir()
        # What `cp decisions.sqlite elsewhere` takes along before the first checkpoint: next to nothing.
        shutil.copy(path, copies / "copy.sqlite")
    found = seen(copies / "copy.sqlite")
    assert found["schema"].text == "the file has no tables"
    assert found["copy"].level == "warning"
    assert "tuner cache export" in found["copy"].text


def test_a_live_file_that_was_copied_while_its_wal_was_folded_in_is_recognised(file, tmp_path):
    copy = tmp_path / "torn.sqlite"
    content = file.read_bytes()
    copy.write_bytes(content[: len(content) // 2 // 4096 * 4096])
    assert "copied alone" in seen(copy)["copy"].text


def test_orphans_are_counted(file):
    change(file, "DELETE FROM decisions WHERE T = 1", "DELETE FROM environments")
    texts = [each.text for each in examine(file) if each.subject == "orphans"]
    assert len(texts) == 2
    assert texts[0].startswith("2 measurements")
    assert all("tuner cache prune --orphans" in text for text in texts)
    with contextlib.closing(Store(file)) as store:
        assert sweep(store) == 3
        assert len(list(store.decisions())) == 49
        assert len(store.environments()) == 1
        assert sweep(store) == 0
    assert "orphans" not in seen(file)


def test_rows_that_cannot_be_believed_are_counted(file):
    change(file, "UPDATE decisions SET source = 'forged' WHERE T < 3")
    assert seen(file)["decisions"].text == "50, 3 of them unreadable and ignored"


def test_another_schema_is_said(file):
    change(file, "INSERT INTO schema_version VALUES (7, '', '')")
    found = seen(file)["schema"]
    assert found.level == "warning"
    assert "version 7" in found.text


def test_a_file_that_anybody_may_write_is_said(file):
    os.chmod(file, 0o666)
    assert seen(file)["rights"].level == "warning"


def test_a_network_file_system_is_said(file, monkeypatch):
    monkeypatch.setattr(doctor, "file_system", lambda place: FileSystem(name="nfs", local=False))
    assert "each host writes a file of its own" in seen(file)["file system"].text


@pytest.mark.parametrize("content", [b"garbage" * 1000, b"SQLite format 3\x00" + bytes(5000)])
def test_what_is_no_file_of_ours_is_an_error(path, content):
    path.write_bytes(content)
    assert "error" in {each.level for each in examine(path)}
    assert path.read_bytes() == content


def test_locks_that_do_not_hold_are_found(file, monkeypatch):
    monkeypatch.setattr(doctor, "_LOCK_TEST", "import sys; sys.exit(0)")
    assert seen(file)["locks"].level == "error"
    monkeypatch.setattr(doctor, "_LOCK_TEST", "import sys; sys.exit(9)")
    assert seen(file)["locks"].level == "warning"
