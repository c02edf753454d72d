"""Export, import, diff, prune."""

import contextlib
import os
import sqlite3
import stat
from datetime import timedelta

import pytest
from layout_tuner.cache.memory import MemoryStore
from layout_tuner.cache.places.folder import FolderStore
from layout_tuner.cache.records import EnvironmentRecord, utc_now
from layout_tuner.cache.sharing.share import (
    differences,
    export_file,
    import_file,
    merge_files,
    prune,
)
from layout_tuner.cache.sqlite.file import Store
from layout_tuner.cache.sqlite.seal import SealState, seal_state

from layout_tuner.errors import CacheError


@pytest.fixture
def full(path, make, opened):
    """A store in use with three decisions of two ops in two environments."""
    store = opened(path)
    store.publish(make.decision(), make.environment)
    store.publish(make.decision(op="chunk_fwd_o"), make.environment)
    store.publish(make.decision(environment="other"), EnvironmentRecord(id="other"))
    store.record_misses([make.miss()])
    return store


def test_an_export_holds_everything_in_one_read_only_file(full, tmp_path):
    out = tmp_path / "with blanks" / "Größe.sqlite"
    written = export_file(full, out)
    assert written.decisions == 3
    assert list(out.parent.iterdir()) == [out]
    assert not stat.S_IMODE(out.stat().st_mode) & 0o222
    assert seal_state(out) is SealState.SOUND
    with contextlib.closing(sqlite3.connect(out)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    with contextlib.closing(Store(out, immutable=True)) as copy:
        assert list(copy.decisions()) == list(full.decisions())
        assert copy.misses() == full.misses()
        assert copy.environments() == full.environments()


def test_an_export_may_be_of_one_op_or_environment(full, tmp_path):
    export_file(full, tmp_path / "op.sqlite", op="chunk_fwd_o")
    export_file(full, tmp_path / "env.sqlite", environment="other")
    with contextlib.closing(Store(tmp_path / "op.sqlite", immutable=True)) as store:
        assert [record.key.op for record in store.decisions()] == ["chunk_fwd_o"]
        assert store.misses() == []
    with contextlib.closing(Store(tmp_path / "env.sqlite", immutable=True)) as store:
        assert [record.environment for record in store.decisions()] == ["other"]
        assert [each.id for each in store.environments()] == ["other"]


def test_memory_and_folders_are_exported_too(tmp_path, make):
    memory = MemoryStore()
    memory.publish(make.decision(), make.environment)
    assert export_file(memory, tmp_path / "memory.sqlite").decisions == 1
    with contextlib.closing(FolderStore(tmp_path / "d.sqlite", host="one")) as folder:
        folder.publish(make.decision(), make.environment)
        assert export_file(folder, tmp_path / "folder.sqlite").decisions == 1


def test_every_changed_byte_breaks_the_seal(full, tmp_path, opened):
    out = tmp_path / "out.sqlite"
    export_file(full, out)
    sound = out.read_bytes()
    os.chmod(out, 0o644)
    for place in (30, len(sound) // 2, len(sound) - 1):
        changed = bytearray(sound)
        changed[place] ^= 1
        out.write_bytes(changed)
        assert seal_state(out) is SealState.BROKEN
        with pytest.raises(CacheError, match="changed after it was exported"):
            import_file(full, out)
    out.write_bytes(sound)
    assert seal_state(out) is SealState.SOUND


def test_an_import_counts_as_imported_and_does_no_harm_twice(tmp_path, make, opened):
    there = opened(tmp_path / "there.sqlite", host="there")
    there.publish(make.decision(), make.environment)
    there.publish(make.decision(T=7, source="pinned"), make.environment)
    export_file(there, tmp_path / "out.sqlite")
    here = opened(tmp_path / "here.sqlite")
    own = here.publish(make.decision(candidate="full/g=STRIDE_HV"), make.environment)
    tally = import_file(here, tmp_path / "out.sqlite")
    assert (tally.added, tally.replaced, tally.kept, tally.refused) == (2, 0, 0, 0)
    assert sorted(record.source for record in here.decisions()) == ["imported", "measured", "pinned"]
    assert here.lookup(make.key(), make.environment.id) == own
    assert here.lookup(make.key(T=7), make.environment.id).source == "pinned"
    assert here.environments() == [make.environment]
    again = import_file(here, tmp_path / "out.sqlite")
    assert (again.added, again.replaced, again.kept) == (0, 0, 2)


def test_a_backup_that_comes_home_stays_measured(full, tmp_path, opened):
    export_file(full, tmp_path / "backup.sqlite")
    fresh = opened(tmp_path / "fresh.sqlite")
    import_file(fresh, tmp_path / "backup.sqlite")
    assert {record.source for record in fresh.decisions()} == {"measured"}


def test_a_newer_import_replaces_an_older_one(tmp_path, make, opened):
    here = opened(tmp_path / "here.sqlite")
    for age, candidate in ((0, "full/g=T_CONTIG"), (1, "block/g=T_CONTIG"), (0, "full/g=T_CONTIG")):
        name = tmp_path / f"{age}{candidate[0]}.sqlite"
        with contextlib.closing(Store(name, host="there")) as there:
            moment = make.moment + timedelta(days=age)
            there.publish(make.decision(candidate=candidate, created_at=moment), make.environment)
        import_file(here, name)
    assert [record.candidate for record in here.decisions()] == ["block/g=T_CONTIG"]


def test_measured_and_imported_of_one_host_fall_together(tmp_path, make, opened):
    there = opened(tmp_path / "there.sqlite", host="there")
    there.publish(make.decision(), make.environment)
    newer = make.decision(source="imported", candidate="block/g=T_CONTIG", created_at=utc_now())
    there.publish(newer, make.environment)
    there.close()
    here = opened(tmp_path / "here.sqlite")
    import_file(here, tmp_path / "there.sqlite")
    assert [(record.source, record.candidate) for record in here.decisions()] == [("imported", "block/g=T_CONTIG")]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("B", -1),
        ("T", "many"),
        ("source", "forged"),
        ("varlen", 2),
        ("created_at", "yesterday"),
        ("form", "num_warps=4"),
        ("candidate", "a\nb"),
        ("gain", "much"),
        ("op", b"blob"),
        ("host", "x" * 999),
    ],
)
def test_unsound_rows_are_refused_one_by_one(full, tmp_path, opened, column, value):
    full.close()
    with contextlib.closing(sqlite3.connect(full.path)) as connection:
        connection.execute(f"UPDATE decisions SET {column} = ? WHERE op = 'chunk_fwd_o'", (value,))
        connection.commit()
    here = opened(tmp_path / "here.sqlite")
    tally = import_file(here, full.path)
    assert (tally.added, tally.refused) == (2, 1)
    assert len(list(here.decisions())) == 2


def test_a_file_in_use_is_imported_whole(full, tmp_path, opened):
    assert (full.path.parent / "decisions.sqlite-wal").exists()
    here = opened(tmp_path / "here.sqlite")
    assert import_file(here, full.path).added == 3


def test_nothing_is_written_over_a_file_in_use(full, tmp_path, make, opened):
    other = opened(tmp_path / "other.sqlite")
    other.publish(make.decision(), make.environment)
    for attempt in (lambda: export_file(full, other.path), lambda: merge_files([full.path], other.path)):
        with pytest.raises(CacheError, match="is in use"):
            attempt()
    assert len(list(other.decisions())) == 1


def test_a_failed_export_leaves_the_old_one(full, tmp_path, monkeypatch):
    out = tmp_path / "out.sqlite"
    export_file(full, out)
    before = out.read_bytes()
    monkeypatch.setattr(
        "layout_tuner.cache.sharing.share.seal", lambda path: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    with pytest.raises(CacheError, match="No space left"):
        export_file(full, out)
    assert out.read_bytes() == before
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("name", ["missing.sqlite", "folder", "garbage.sqlite"])
def test_what_cannot_be_imported_is_said(full, tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "garbage.sqlite").write_bytes(b"garbage" * 1000)
    with pytest.raises(CacheError, match=name):
        import_file(full, tmp_path / name)
    assert (tmp_path / "garbage.sqlite").read_bytes() == b"garbage" * 1000


def test_diff_lists_what_is_believed_differently(full, tmp_path, make, opened):
    other = opened(tmp_path / "other.sqlite")
    other.publish(make.decision(), make.environment)
    other.publish(make.decision(op="chunk_fwd_o", candidate="full/g=STRIDE_HV"), make.environment)
    other.publish(make.decision(T=7), make.environment)
    found = {(each.environment, each.key.op, each.key.T): each for each in differences(full, other)}
    assert set(found) == {
        (make.environment.id, "chunk_fwd_o", 2048),
        (make.environment.id, "chunk_bwd_dv_local", 7),
        ("other", "chunk_bwd_dv_local", 2048),
    }
    assert found["other", "chunk_bwd_dv_local", 2048].other is None
    assert found[make.environment.id, "chunk_bwd_dv_local", 7].one is None
    assert list(differences(full, full)) == []


def test_prune_removes_what_meets_every_condition(full, make):
    assert prune(full) == 0
    assert prune(full, older_than=make.moment) == 0
    assert prune(full, op="chunk_fwd_o", environment="other") == 0
    assert prune(full, op="chunk_fwd_o") == 1
    assert prune(full, environment="other") == 1
    assert [each.id for each in full.environments()] == [make.environment.id]
    assert len(full.misses()) == 1
    assert prune(full, older_than=utc_now()) == 1
    assert (list(full.decisions()), full.misses(), full.environments()) == ([], [], [])


def test_thousands_are_absorbed_page_by_page(tmp_path, make, opened):
    one, other = opened(tmp_path / "one.sqlite"), opened(tmp_path / "other.sqlite")
    tally = one.absorb((make.decision(T=number, host="x") for number in range(2500)), [make.environment])
    assert tally.added == 2500
    assert other.absorb_file(one, as_imported=False).added == 2500
    assert sum(1 for _ in other.decisions()) == 2500
    assert other.absorb(one.decisions()).kept == 2500
