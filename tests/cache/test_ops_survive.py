"""Whatever lies where the decisions should be, an op returns right numbers."""

import contextlib
import dataclasses
import random
import sqlite3

import pytest
import torch
from cache_damage import broken, poison
from dv_local import SPEC, arguments, assert_right, dv_local
from layout_tuner.cache.records import EnvironmentRecord
from layout_tuner.cache.sqlite.file import Store

import layout_tuner
from layout_tuner.dispatch import router
from layout_tuner.tuning.records import key_of

WINNER = "full/g=T_CONTIG"


class Files:
    """A sound file of decisions for the call that the test makes, and ways to spoil it."""

    def __init__(self, path, given, device, make):
        self.path = path
        self.given = given
        # A default that is run records nothing: the key is taken from what the router asks the cache for.
        asked = []
        original = Store.evidence

        def spying(store, key, environment):
            asked.append((key, environment))
            return original(store, key, environment)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Store, "evidence", spying)
            self.call()
        self.key, self.environment = asked[0]
        revision = next(each.revision for each in SPEC.candidates(key_of(self.key)) if each.id == WINNER)
        sound = path.with_name("sound.sqlite")
        with contextlib.closing(Store(sound)) as store:
            for host in ("one", "two"):
                store.publish(
                    make.decision(
                        environment=self.environment,
                        candidate=WINNER,
                        revision=revision,
                        host=host,
                        **dataclasses.asdict(self.key),
                    ),
                    EnvironmentRecord(id=self.environment),
                )
        self.sound = sound.read_bytes()

    def call(self):
        with layout_tuner.enable(cache=self.path, on_miss="default"):
            return dv_local(self.given)

    def spoil(self, content, *statements):
        for each in self.path.parent.glob(f"{self.path.name}*"):
            each.unlink()
        self.path.write_bytes(content)
        if statements:
            with contextlib.closing(sqlite3.connect(self.path)) as connection:
                for statement in statements:
                    connection.execute(statement)
                connection.commit()


@pytest.fixture
def files(fast_path, device, make):
    return Files(fast_path / "decisions.sqlite", arguments(device), device, make)


HOSTILE = [
    "UPDATE decisions SET candidate = 'no/such=CANDIDATE'",
    "UPDATE decisions SET candidate = '../../etc/passwd'",
    "UPDATE decisions SET candidate = 'full/g=T_CONTIG; DROP TABLE decisions'",
    "UPDATE decisions SET candidate = '__import__(''os'').abort()'",
    "UPDATE decisions SET candidate = hex(zeroblob(1000000))",
    "UPDATE decisions SET candidate = hex(zeroblob(3000000))",
    "UPDATE decisions SET candidate = 7, revision = x'ff'",
    "UPDATE decisions SET form = form || ',num_warps=4'",
    "UPDATE measurements SET counts = '{\"num_stages\": 3}'",
    "UPDATE measurements SET samples = '" + "[" * 10_000 + "'",
    "UPDATE measurements SET end_to_end_us = 9e999",
    "UPDATE decisions SET source = 'pinned', revision = ''",
    "DELETE FROM schema_version",
    "DROP TABLE measurements",
]


def test_a_sound_file_decides(files):
    files.spoil(files.sound)
    with layout_tuner.enable(cache=files.path, on_miss="error"):
        assert_right(dv_local(files.given), files.given)
        (choice,) = router.current().choices.values()
    assert (choice.candidate.id, choice.source) == (WINNER, "measured")


@pytest.mark.parametrize("statement", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_rows(files, statement):
    files.spoil(files.sound, statement)
    assert_right(files.call(), files.given)


def survive(files, count, random_):
    """Calls the op over damaged files and says how often the file decided what ran."""
    expected = files.call()
    decided = 0
    for number in range(count):
        files.spoil(broken(files.sound, random_) if number % 4 else files.sound)
        if number % 4 == 0:
            poison(files.path, random_)
        with layout_tuner.enable(cache=files.path, on_miss="default"):
            found = dv_local(files.given)
            decided += any(choice.record is not None for choice in router.current().choices.values())
        assert torch.equal(found, expected)
    assert_right(expected, files.given)
    return decided


def test_damaged_files(files):
    assert 0 < survive(files, 24, random.Random(5)) < 24


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(8))
def test_two_thousand_damaged_files(files, part):
    assert 0 < survive(files, 250, random.Random(f"part {part}")) < 250


@pytest.mark.parametrize("name", ["README.md", "decisions.sqlite"])
def test_a_path_of_something_else(files, tmp_path, name):
    files.path = tmp_path / "of others" / name
    files.path.parent.mkdir()
    files.path.write_text("# A text\n" * 1000)
    if name == "decisions.sqlite":
        files.path.unlink()
        with contextlib.closing(sqlite3.connect(files.path)) as connection:
            connection.execute("CREATE TABLE recipes (name TEXT)")
            connection.commit()
    before = files.path.read_bytes()
    assert_right(files.call(), files.given)
    assert files.path.read_bytes() == before
    assert [each.name for each in files.path.parent.iterdir()] == [name]


def test_a_path_that_cannot_be_used(files, tmp_path):
    for place in ("/proc/none/decisions.sqlite", tmp_path, "/dev/null/x"):
        files.path = place
        assert_right(files.call(), files.given)
