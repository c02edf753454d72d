"""`tuner cache`: what it writes, what it prints, and how it ends."""

import contextlib
import json
from datetime import timedelta

import pytest
import typer
from layout_tuner.cache.records import utc_now
from layout_tuner.cache.sharing.pins import read_pins
from layout_tuner.cache.sqlite.file import Store
from typer.testing import CliRunner

from layout_tuner.cli import cache as command
from layout_tuner.errors import CacheError


@pytest.fixture
def tuner(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments, code=0):
        done = CliRunner().invoke(command.app, [str(each) for each in arguments])
        if isinstance(done.exception, CacheError):
            # The `tuner` command turns these into a message and exit status 2.
            assert code == 2
            return str(done.exception)
        assert done.exit_code == code, done.output
        return done.output

    return run


@pytest.fixture
def file(path, make):
    with contextlib.closing(Store(path, host="there")) as store:
        store.publish(make.decision(), make.environment)
        store.publish(make.decision(op="chunk_fwd_o", created_at=utc_now() - timedelta(days=40)), make.environment)
    return path


def test_export_import_and_back(tuner, file, tmp_path):
    assert "2 decisions, sha256" in tuner("export", tmp_path / "out.sqlite", "--cache", file)
    assert "2 added, 0 replaced, 0 known already" in tuner("import", tmp_path / "out.sqlite", "--cache", "new.sqlite")
    again = json.loads(tuner("import", tmp_path / "out.sqlite", "--cache", "new.sqlite", "--json"))
    assert again["imported"][str(tmp_path / "out.sqlite")] == {"added": 0, "replaced": 0, "kept": 2, "refused": 0}
    assert "1 decisions" in tuner("export", "one.sqlite", "--cache", file, "--op", "chunk_fwd_o")


def test_export_as_pins(tuner, file):
    assert "2 decisions" in tuner("export", "--pin", "pins.json", "--cache", file)
    digest, decisions = read_pins("pins.json")
    assert len(decisions) == 2
    assert digest in tuner("export", "--pin", "pins.json", "--cache", file)
    assert "name one file" in tuner("export", "--cache", file, code=2)


def test_merge_lists_conflicts(tuner, make, tmp_path):
    for host in ("one", "two"):
        with contextlib.closing(Store(tmp_path / host, host=host)) as store:
            store.publish(make.decision(source="pinned", candidate=host), make.environment)
    text = tuner("merge", "one", "two", "-o", "out.sqlite")
    assert "conflict: chunk_bwd_dv_local B=2" in text
    assert "2 decisions, 1 conflicts" in text
    found = json.loads(tuner("merge", "two", "one", "one", "-o", "out.sqlite", "--json"))
    assert found["decisions"] == 2
    assert found["conflicts"][0]["hosts"] == ["one", "two"]


def test_diff(tuner, file, make, tmp_path):
    with contextlib.closing(Store(tmp_path / "other.sqlite")) as store:
        store.publish(make.decision(candidate="full/g=STRIDE_HV"), make.environment)
    assert "full/g=STRIDE_HV" in tuner("diff", file, "other.sqlite")
    found = json.loads(tuner("diff", file, "other.sqlite", "--json"))["differences"]
    assert [each["other"] is None for each in found] == [False, True]
    assert tuner("diff", file, file) == "no differences\n"


def test_prune(tuner, file):
    assert "name at least one" in tuner("prune", "--cache", file, code=2)
    assert "30 days" in tuner("prune", "--older-than", "30 days", "--cache", file, code=2)
    assert "before the year 1" in tuner("prune", "--older-than", "999999w", "--cache", file, code=2)
    assert tuner("prune", "--older-than", "999999h", "--cache", file) == "0 decisions removed\n"
    assert tuner("prune", "--older-than", "30d", "--op", "chunk_bwd_dv_local", "--cache", file).startswith(
        "1 decisions"
    )
    assert json.loads(tuner("prune", "--environment", "none", "--cache", file, "--json")) == {"removed": 0}
    assert tuner("prune", "--older-than", "30d", "--cache", file) == "1 decisions removed\n"


def test_what_cannot_be_read_is_said(tuner, file):
    assert "none.sqlite" in tuner("import", "none.sqlite", "--cache", file, code=2)
    assert "none.sqlite" in tuner("diff", "none.sqlite", file, code=2)
    assert "/proc/x" in tuner("export", "/proc/x/out.sqlite", "--cache", file, code=2)


def test_the_settings_name_the_file(tuner, file, tmp_path):
    (tmp_path / "tuner.toml").write_text(f'[cache]\npath = "{file}"\n')
    assert "2 decisions" in tuner("export", "out.sqlite")


def test_examining(file, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    command.examine_cache(str(file), None, json=False)
    assert "keep other processes out" in capsys.readouterr().out
    file.write_bytes(b"garbage" * 1000)
    with pytest.raises(typer.Exit) as ended:
        command.examine_cache(str(file), None, json=True)
    assert ended.value.exit_code == 1
    assert json.loads(capsys.readouterr().out)["findings"][-1]["level"] == "error"
