"""Many decisions: what enters passes one check, what is listed comes page by page, and what was stored is said."""

import contextlib
import json
import sqlite3
import subprocess
from datetime import timedelta

import pytest
from command import TUNER
from layout_tuner.cache.faults import Fault, StoreError
from layout_tuner.cache.layers import LayeredStore
from layout_tuner.cache.listing import listing
from layout_tuner.cache.memory import MemoryStore
from layout_tuner.cache.places.folder import FolderStore
from layout_tuner.cache.records import EnvironmentRecord
from layout_tuner.cache.sharing.pins import read_pins, write_pins
from layout_tuner.cache.sharing.share import (
    believed_by_key,
    differences,
    export_file,
    import_file,
    merge_files,
)
from layout_tuner.cache.sqlite import file as files
from layout_tuner.cache.sqlite import queries, transfer
from layout_tuner.cache.sqlite.file import Store

from layout_tuner.cli import show


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr(transfer, "PAGE", 3)
    monkeypatch.setattr(transfer, "PAGES", 2)
    monkeypatch.setattr(queries, "KEYS", 3)


def file_of(path, decisions, host="there"):
    with contextlib.closing(Store(path, host=host)) as store:
        for record in decisions:
            store.publish(record, EnvironmentRecord(id=record.environment, facts={"device": "x"}))
    return path


def change(path, *statements):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


# -- what enters -------------------------------------------------------------------------------------------------

# Each passes for sound where only types and lengths are looked at.
BAD = (
    "UPDATE decisions SET created_at = '9999-99-99T99:99:99.999999Z'",
    "UPDATE measurements SET samples = '[1, 2'",
    "UPDATE measurements SET samples = '{}'",
    "UPDATE measurements SET counts = '[]'",
    "UPDATE measurements SET end_to_end_us = -1.0",
    "UPDATE measurements SET counts = '{\"num_warps\": 4}'",
    "UPDATE decisions SET candidate = 'a' || char(0x7f)",
    "UPDATE decisions SET varlen = 7",
    "UPDATE measurements SET error = 9e999",
)


@pytest.mark.parametrize("statement", BAD)
def test_a_bad_row_is_refused_and_a_good_one_stays(make, path, opened, tmp_path, statement):
    bad = file_of(tmp_path / "bad.sqlite", [make.decision(candidate="bad", created_at=make.moment + timedelta(days=9))])
    change(bad, statement)
    good = file_of(tmp_path / "good.sqlite", [make.decision(candidate="full/g=T_CONTIG")])
    here = opened(path)
    for source, tally in ((good, (1, 0)), (bad, (0, 1))):
        done = import_file(here, source)
        assert (done.added + done.replaced, done.refused) == tally
    assert [record.candidate for record in here.decisions()] == ["full/g=T_CONTIG"]


@pytest.mark.parametrize("way", ["file", "records"])
@pytest.mark.parametrize("statement", BAD[:3])
def test_a_bad_row_that_is_stored_gives_way_to_a_good_one(make, path, opened, tmp_path, way, statement):
    later = make.moment + timedelta(days=9)
    file_of(path, [make.decision(candidate="bad", created_at=later, source="pinned")])
    change(path, statement)
    good = file_of(tmp_path / "good.sqlite", [make.decision(source="pinned")])
    here = opened(path)
    with contextlib.closing(Store(good, read_only=True)) as source:
        done = here.absorb_file(source, as_imported=True) if way == "file" else here.absorb(source.decisions())
    assert (done.added, done.replaced, done.kept) == (0, 1, 0)
    assert [record.candidate for record in here.decisions()] == ["full/g=T_CONTIG"]


def test_the_same_rules_hold_for_files_and_for_records(make, opened, tmp_path):
    moments = [make.moment + timedelta(seconds=number % 3) for number in range(12)]
    mine = [make.decision(T=number + 1, created_at=moments[number]) for number in range(10)]
    theirs = [
        make.decision(T=number + 1, created_at=moments[11 - number], candidate="block/g=T_CONTIG")
        for number in range(2, 12)
    ]
    results = []
    for way in ("file", "records"):
        here = opened(tmp_path / f"{way}.sqlite", host="there")
        for record in mine:
            here.publish(record, make.environment)
        other = opened(file_of(tmp_path / f"other-{way}.sqlite", theirs), host="there")
        done = here.absorb_file(other, as_imported=False) if way == "file" else here.absorb(other.decisions())
        found = sorted(here.decisions(), key=lambda record: record.key.T)
        results.append(((done.added, done.replaced, done.kept, done.refused), found))
    assert results[0] == results[1]
    assert results[0][0][0] == 2
    assert 0 < results[0][0][1] < 8


def test_the_fault_of_a_device_does_not_come_in(make, path, opened, tmp_path):
    other = file_of(tmp_path / "other.sqlite", [make.decision()])
    change(other, "UPDATE measurements SET state = 'failed', failure = 'device' WHERE candidate LIKE '%STRIDE%'")
    here = opened(path)
    assert import_file(here, other).added == 1
    (record,) = here.decisions()
    assert [each.candidate for each in record.measurements] == ["full/g=T_CONTIG"]


def test_bytes_that_are_no_text_become_characters_that_say_so(make, path, opened, tmp_path):
    other = file_of(tmp_path / "other.sqlite", [make.decision(T=number + 1) for number in range(8)])
    change(other, "UPDATE decisions SET version = CAST(x'ff61' AS TEXT) WHERE T = 5")
    here = opened(path)
    assert import_file(here, other).added == 8
    assert sorted(record.version for record in here.decisions())[-1] == "\ufffda"
    change(other, "UPDATE decisions SET candidate = CAST(x'ff01' AS TEXT) WHERE T = 5")
    assert import_file(here, other).refused == 1


def test_of_two_in_one_file_the_later_comes_in(make, path, opened, tmp_path):
    """Measured and imported by one host are two slots there, and one where both count as imported."""
    later = make.moment + timedelta(days=1)
    for number, sources in enumerate((("measured", "imported"), ("imported", "measured"))):
        records = [
            make.decision(T=number + 1, source=source, candidate=f"{source}/g=T_CONTIG", created_at=moment)
            for source, moment in zip(sources, (later, make.moment), strict=True)
        ]
        done = import_file(opened(path), file_of(tmp_path / f"{number}.sqlite", records))
        assert (done.added, done.kept) == (1, 1)
    assert {record.candidate for record in opened(path).decisions()} == {"measured/g=T_CONTIG", "imported/g=T_CONTIG"}


def test_an_import_that_fails_says_what_it_stored(make, path, opened, tmp_path, monkeypatch):
    other = file_of(tmp_path / "other.sqlite", [make.decision(T=number + 1) for number in range(20)])
    whole, calls = transfer.transfer, []

    def fail(*given, **named):
        calls.append(1)
        if len(calls) == 3:
            raise StoreError("the disk went away", Fault.UNAVAILABLE)
        return whole(*given, **named)

    monkeypatch.setattr(files, "transfer", fail)
    here = opened(path)
    with pytest.raises(StoreError, match="the disk went away; 12 decisions were stored before that"):
        import_file(here, other)
    assert here.count() == 12
    calls.clear()
    with pytest.raises(StoreError) as caught:
        merge_files([other], tmp_path / "merged.sqlite")
    assert "stored before" not in str(caught.value)
    assert not (tmp_path / "merged.sqlite").exists()
    monkeypatch.undo()
    assert import_file(here, other).added == 8


# -- what is compared --------------------------------------------------------------------------------------------


def test_a_merge_of_equal_winners_looks_at_no_pair(make, tmp_path, monkeypatch):
    records = [make.decision(T=number + 1) for number in range(8)]
    paths = [file_of(tmp_path / host, records, host=host) for host in ("one", "two")]
    seen = []
    whole = queries.decisions_beside
    monkeypatch.setattr(queries, "decisions_beside", lambda *given, **named: seen.append(1) or whole(*given, **named))
    assert merge_files(paths, tmp_path / "out.sqlite").disputes == 0
    assert not seen


def test_conflicts_are_counted_beyond_those_that_are_kept(make, tmp_path, monkeypatch):
    monkeypatch.setattr("layout_tuner.cache.sharing.share.MOST_CONFLICTS", 3)
    paths = [
        file_of(
            tmp_path / host,
            [make.decision(T=number + 1, source="pinned", candidate=host) for number in range(8)],
            host=host,
        )
        for host in ("one", "two")
    ]
    merged = merge_files(paths, tmp_path / "out.sqlite")
    assert (len(merged.conflicts), merged.disputes) == (3, 8)


def test_differences_come_in_the_order_of_keys_and_none_twice(make, opened, tmp_path):
    one, other = opened(tmp_path / "one.sqlite"), opened(tmp_path / "other.sqlite")
    for number in range(10):
        place = EnvironmentRecord(id=f"env-{number % 3}")
        record = make.decision(T=100 - number, environment=place.id, varlen=bool(number % 2))
        if number != 4:
            one.publish(record, place)
        if number != 7:
            other.publish(
                record
                if number % 2
                else make.decision(T=100 - number, environment=place.id, varlen=False, candidate="block/g=T_CONTIG"),
                place,
            )
    found = list(differences(one, other))
    places = [(each.environment, each.key.T) for each in found]
    assert places == sorted(set(places))
    assert {100 - each.key.T for each in found} == {0, 2, 4, 6, 7, 8}
    memory = MemoryStore()
    for record in other.decisions():
        memory.publish(record, EnvironmentRecord(id=record.environment))
    assert [each.key for each in differences(one, memory)] == [each.key for each in found]


# -- what is listed ----------------------------------------------------------------------------------------------


@pytest.fixture
def many(make, path):
    moments = [make.moment + timedelta(minutes=number * 7 % 11) for number in range(11)]
    return file_of(path, [make.decision(T=number + 1, created_at=moments[number]) for number in range(11)], host="here")


def test_the_newest_come_first_and_every_key_once(make, many, tmp_path, opened):
    near, far = opened(many, host="here"), opened(tmp_path / "far.sqlite", host="far")
    for number in (3, 30):
        far.publish(make.decision(T=number, created_at=make.moment + timedelta(hours=number)), make.environment)
    store = LayeredStore(near, sites=[far], host="here")
    found = listing(store)
    groups = list(found.groups)
    assert found.keys == len(groups) == 12
    newest = [max(each.record.created_at for each in group) for group in groups]
    assert newest == sorted(newest, reverse=True)
    assert [group[0].record.key.T for group in groups[:2]] == [30, 3]
    assert [sum(each.used for each in group) for group in groups] == [1] * 12
    (three,) = [group for group in groups if group[0].record.key.T == 3]
    assert [(each.layer.kind, each.used, each.record.source) for each in three] == [
        ("user", True, "measured"),
        ("site", False, "imported"),
    ]


def run(*arguments):
    done = subprocess.run([TUNER, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_show_pages_filters_and_says_what_it_left_out(many, monkeypatch, capsys):
    def shown(**named):
        show.show(cache=str(many), **named)
        return capsys.readouterr().out

    monkeypatch.setattr(show, "LIMIT", 4)
    monkeypatch.setattr(show, "TABLE", 3)
    first = shown(page=1)
    assert f"4 decisions in {many}; 7 keys left out: see --limit, --page 2, --op, --like" in first
    assert "T=4 " in first
    whole = [row["T"] for row in json.loads(shown(json=True))["decisions"]]
    assert sorted(whole) == list(range(1, 12))
    pages = [json.loads(shown(json=True, limit=4, page=page)) for page in (1, 2, 3, 4)]
    assert [row["T"] for page in pages for row in page["decisions"]] == whole
    assert [page["left_out"] for page in pages] == [7, 7, 8, 11]
    assert f"11 decisions in {many}\n" in shown(limit=0)
    assert "1 decisions" in shown(like="t=11 ")
    assert "11 decisions" in shown(like="BFLOAT16 dense BT=64", limit=0)
    assert "no decisions of like 'T=%' in" in shown(like="T=%")
    assert "it holds 11, of chunk_bwd_dv_local" in shown(like="T=%")


def test_a_listing_reads_one_page_at_a_time(many, opened, monkeypatch):
    read = []
    whole = queries.decisions_beside
    monkeypatch.setattr(queries, "decisions_beside", lambda *given, **named: read.append(1) or whole(*given, **named))
    groups = listing(LayeredStore(opened(many))).groups
    for wanted in (1, 1, 1, 2, 2, 2, 3):
        next(groups)
        assert len(read) == wanted


def test_the_command_streams_json(many):
    assert [row["T"] for row in json.loads(run("show", "--cache", many, "--json", "--limit", 2))["decisions"]] == [4, 7]


# -- a folder of hosts -------------------------------------------------------------------------------------------


@pytest.fixture
def folder(make, tmp_path):
    """Three hosts' files, which hold their own decisions and older states of another host's."""
    path = tmp_path / "decisions.sqlite"
    for number, host in enumerate(("one", "two", "three")):
        with contextlib.closing(FolderStore(path, host=host)) as store:
            for T in range(1, 9):
                moment = make.moment + timedelta(days=number)
                for owner in {host, "one"}:
                    store.publish(make.decision(T=T, host=owner, created_at=moment), make.environment)
    return path


def test_a_folder_is_read_in_the_order_of_keys_and_by_the_page(folder, make, monkeypatch):
    read = []
    whole = queries.page_by_key
    monkeypatch.setattr(queries, "page_by_key", lambda *given, **named: read.append(1) or whole(*given, **named))
    with contextlib.closing(FolderStore(folder, read_only=True)) as store:
        groups = store.by_key()
        first = next(groups)
        assert len(read) <= 2 * 3  # a key of each file, and the next of those that the first came from
        assert [record.key.T for group in (first, *groups) for record in group] == [
            T for T in range(1, 9) for _ in "123"
        ]
        assert {record.host for record in first} == {"one", "two", "three"}
        assert next(record for record in first if record.host == "one").created_at == make.moment + timedelta(days=2)
        assert not list(store.by_key(op="other"))
        written = export_file(store, folder.with_name("out.sqlite"))
        assert written.decisions == 24
        with contextlib.closing(Store(written.path, immutable=True)) as out:
            assert sorted(out.decisions(), key=repr) == sorted(store.decisions(), key=repr)


def test_an_export_of_a_folder_leaves_out_what_cannot_be_read_and_fails_where_it_cannot_be_written(
    folder, monkeypatch, caplog
):
    bad = next(each for each in folder.parent.iterdir() if ".three." in each.name)
    content = bytearray(bad.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    bad.write_bytes(content)
    with contextlib.closing(FolderStore(folder, read_only=True)) as store:
        assert export_file(store, folder.with_name("out.sqlite")).decisions == 16
        assert "left out for now" in caplog.text

        def full(*_, **__):
            raise StoreError("no space", Fault.READ_ONLY)

        monkeypatch.setattr(files, "transfer", full)
        with pytest.raises(StoreError, match="no space"):
            export_file(store, folder.with_name("other.sqlite"))
    assert not folder.with_name("other.sqlite").exists()


def test_pins_of_a_folder_are_those_of_its_export(folder):
    with contextlib.closing(FolderStore(folder, read_only=True)) as store:
        export_file(store, folder.with_name("out.sqlite"))
        digest = write_pins(folder.with_name("one.json"), believed_by_key(store))
    with contextlib.closing(Store(folder.with_name("out.sqlite"), immutable=True)) as out:
        assert write_pins(folder.with_name("two.json"), believed_by_key(out)) == digest
    assert [record.key.T for record in read_pins(folder.with_name("one.json"))[1]] == list(range(1, 9))
