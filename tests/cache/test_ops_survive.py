"""Whatever lies where the decisions should be, an op returns right numbers."""

import contextlib
import dataclasses
import os
import random
import sqlite3

import pytest
import torch
from dv_local import arguments, assert_right, dv_local
from layout_tuner.cache.file import Store
from layout_tuner.cache.records import EnvironmentRecord

import layout_tuner


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
        sound = path.with_name("sound.sqlite")
        with contextlib.closing(Store(sound)) as store:
            for revision in ("r1", "r2"):
                store.publish(
                    make.decision(
                        environment=self.environment,
                        candidate="full/g=T_CONTIG",
                        revision=revision,
                        host=revision,
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
def files(path, device, make):
    return Files(path, arguments(device), device, make)


HOSTILE = [
    "UPDATE decisions SET candidate = 'no/such=CANDIDATE'",
    "UPDATE decisions SET candidate = '../../etc/passwd'",
    "UPDATE decisions SET candidate = 'full/g=T_CONTIG; DROP TABLE decisions'",
    "UPDATE decisions SET candidate = '__import__(''os'').abort()'",
    "UPDATE decisions SET candidate = hex(zeroblob(1000000))",
    "UPDATE decisions SET candidate = 7, revision = x'ff'",
    "UPDATE decisions SET form = form || ',num_warps=4'",
    "UPDATE measurements SET counts = '{\"num_stages\": 3}'",
    "UPDATE measurements SET samples = '" + "[" * 10_000 + "'",
    "UPDATE measurements SET end_to_end_us = 9e999",
    "UPDATE decisions SET source = 'pinned', revision = ''",
    "DELETE FROM schema_version",
    "DROP TABLE measurements",
]


@pytest.mark.parametrize("statement", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_rows(files, statement):
    files.spoil(files.sound, statement)
    assert_right(files.call(), files.given)


def test_damaged_files(files):
    random_ = random.Random(5)
    expected = files.call()
    for number in range(24):
        content = bytearray(files.sound)
        if number % 3 == 0:
            del content[random_.randrange(len(content)) :]
        elif number % 3 == 1:
            for _ in range(20):
                content[random_.randrange(len(content))] ^= 1 << random_.randrange(8)
        else:
            start = random_.randrange(len(content) - 5000)
            content[start : start + 4096] = os.urandom(4096)
        files.spoil(bytes(content))
        assert torch.equal(files.call(), expected)
    assert_right(expected, files.given)


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
