"""No trouble of the cache reaches an op; settings that cannot be used are refused when they are given."""

import contextlib
import os
import sqlite3
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
from layout_tuner.cache.faults import Fault
from layout_tuner.cache.layers import open_layers
from layout_tuner.cache.memory import MemoryStore
from layout_tuner.cache.places.guarded import GuardedStore
from layout_tuner.cache.places.opening import open_store
from layout_tuner.cache.sqlite.file import Store
from layout_tuner.cache.validation import RefusedRowError

import layout_tuner
from layout_tuner.config import Config
from layout_tuner.errors import ConfigError

NOBODY = """
import os, sys
from layout_tuner.cache.layers import open_layers
from layout_tuner.cache.records import DecisionRecord, EnvironmentRecord, KeyRecord
warm = open_layers(sys.argv[2])
key = KeyRecord(op="x", B=1, T=2, H=1, HV=1, K=1, V=1, varlen=False, dtype="float32", form="")
warm.lookup(key, "e")
warm.close()
os.setgid(65534)
os.setuid(65534)
layers = open_layers(sys.argv[1] or None, shared=["/root/site.sqlite", sys.argv[3]])
layers.publish(DecisionRecord(key=key, environment="e", candidate="a", revision="r", default_candidate="a",
                              source="measured"), EnvironmentRecord(id="e"))
print(layers.lookup(key, "e").candidate)
layers.close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root to become somebody else")
@pytest.mark.parametrize("path", ["closed/decisions.sqlite", "closed/below/decisions.sqlite", "home"])
def test_a_folder_that_may_not_be_entered_leaves_memory(path, tmp_path):
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        closed = Path(name) / "closed"
        closed.mkdir(mode=0o700)
        (closed / "below").mkdir()
        environment = {**os.environ, "HOME": str(closed)}
        environment.pop("XDG_CACHE_HOME", None)
        place = "" if path == "home" else str(Path(name) / path)
        command = [sys.executable, "-c", NOBODY, place, str(tmp_path / "warm.sqlite"), str(closed / "site.sqlite")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
        assert (done.returncode, done.stdout) == (0, "a\n"), done.stderr


@pytest.mark.parametrize("moment", ["9999-12-31T23:59:59.999999Z", "9999-12-31T00:00:00.000000Z"])
def test_a_row_at_the_end_of_time_is_replaced(path, make, moment, caplog):
    with contextlib.closing(Store(path, host="here")) as store:
        store.publish(make.decision(), make.environment)
        store.record_misses([make.miss()])
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE decisions SET created_at = ?", (moment,))
        connection.execute("UPDATE measurements SET measured_at = ?", (moment,))
        connection.execute("UPDATE misses SET last_seen = ?, count = 'x'", (moment,))
        connection.commit()
    layers = open_layers(path)
    assert layers.lookup(make.key(), make.environment.id) is None
    layers._user.publish(make.decision(host="here"), make.environment)
    layers.record_misses([make.miss(host="here", count=3)])
    assert layers.lookup(make.key(), make.environment.id).created_at == make.moment
    assert [miss.count for miss in layers.misses()] == [3]
    assert layers.kept
    layers.close()


@pytest.mark.parametrize("year", [1, 9999])
def test_moments_at_both_ends_of_time_are_refused_as_rows(make, year):
    edge = datetime(year, 1 if year == 1 else 12, 1 if year == 1 else 31, tzinfo=UTC)
    with pytest.raises(RefusedRowError, match="created_at"):
        MemoryStore().publish(make.decision(created_at=edge), make.environment)
    with pytest.raises(RefusedRowError, match="last_seen"):
        MemoryStore().record_misses([make.miss(last_seen=edge)])


@pytest.mark.parametrize("error", [OverflowError("date"), ValueError("x"), PermissionError(13, "no"), RecursionError()])
def test_whatever_a_store_raises_is_trouble_with_the_store(make, error, caplog):
    class Broken(MemoryStore):
        def evidence(self, key, environment):
            raise error

        publish = decisions = environments = record_misses = misses = close = evidence

    store = GuardedStore("broken", lambda fault: Broken())
    kept = store.publish(make.decision(), make.environment)
    assert store.lookup(make.key(), make.environment.id) == kept
    store.record_misses([make.miss()])
    assert len(store.misses()) == 1
    store.close()
    assert caplog.text.count("kept in memory") == 1


def test_what_cannot_be_stored_is_no_trouble_with_the_store(path, make):
    with contextlib.closing(open_store(path)) as store:
        with pytest.raises(RefusedRowError):
            store.publish(make.decision(candidate="x" * 300), make.environment)
        assert store.healthy


WRONG = {
    "no url": ("url", "not a url"),
    "another database": ("url", "mysql://user:secret@host/name"),
    "another driver": ("url", "postgresql+asyncpg://user:secret@host/name"),
    "a port that is none": ("url", "postgresql+psycopg://user:secret@host:port/name"),
    "a port that is too large": ("url", "postgresql+psycopg://user:secret@host:99999/name"),
    "a NUL in a url": ("url", "postgresql+psycopg://user:secret@host/na%00me"),
    "a url as path": ("path", "postgresql+psycopg://user:secret@host/name"),
    "a url as path, with a query": ("path", "postgresql://host/name?user=x&password=secret"),
    "a url as a shared file": ("shared", ["postgresql://user:secret@host/name"]),
    "nobody's home": ("path", "~nosuchuser/decisions.sqlite"),
    "nobody's home, shared": ("shared", ["~nosuchuser/decisions.sqlite"]),
    "a NUL": ("path", "deci\0sions.sqlite"),
    "a NUL, shared": ("shared", ["deci\0sions.sqlite"]),
}


WAYS = [(case, way) for case in WRONG for way in ("toml", "argument") if way == "toml" or WRONG[case][0] == "path"]


@pytest.mark.parametrize(("case", "way"), WAYS)
def test_settings_that_cannot_be_used_are_refused_by_enable(tmp_path, monkeypatch, case, way):
    name, value = WRONG[case]
    monkeypatch.chdir(tmp_path)
    text = repr(value).replace("'", '"').replace("\\x00", "\\u0000")
    (tmp_path / "tuner.toml").write_text("" if way == "argument" else f"[cache]\n{name} = {text}\n")
    with pytest.raises(ConfigError, match="cache") as caught:
        layout_tuner.enable(cache=value if way == "argument" else None, fla=False)
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError):
        layout_tuner.warmup([], cache=value if way == "argument" else None)
    assert os.listdir(tmp_path) == ["tuner.toml"]


def test_a_variable_shows_no_password(monkeypatch):
    monkeypatch.setenv("LAYOUT_TUNER_TUNING_BUDGET_S", "postgresql://user:secret@host/name?sslpassword=secret")
    with pytest.raises(ConfigError) as caught:
        Config.load()
    assert "secret" not in str(caught.value)


def test_a_store_of_a_path_that_is_none_says_so():
    for path in ("~nosuchuser/x.sqlite", "a\0b"):
        with pytest.raises(layout_tuner.errors.CacheError) as caught:
            open_layers(path)
        assert caught.value.fault is Fault.UNAVAILABLE
