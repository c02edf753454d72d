"""Layers: evidence first, then the nearer layer."""

import contextlib
import json
import os
from datetime import timedelta

import pytest
from command import run_here
from layout_tuner.cache.layers import LayeredStore, open_layers
from layout_tuner.cache.memory import MemoryStore
from layout_tuner.cache.records import EnvironmentRecord
from layout_tuner.cache.sharing.share import export_file
from layout_tuner.cache.sqlite.file import Store

from layout_tuner.errors import CacheError

HERE = "here"


@pytest.fixture
def layers():
    stores = {
        name: MemoryStore(host=HERE if name == "user" else "there") for name in ("user", "server", "site", "packaged")
    }
    made = LayeredStore(
        stores["user"], server=stores["server"], sites=[stores["site"]], packaged=stores["packaged"], host=HERE
    )
    made.stores = stores
    return made


def put(layers, make, layer, **fields):
    return layers.stores[layer].publish(make.decision(**fields), make.environment)


def answer(layers, make):
    return layers.resolve(make.key(), (make.environment.id,))


def test_nothing_answers_nothing(layers, make):
    assert answer(layers, make) is None


@pytest.mark.parametrize(
    ("near", "far", "winner"),
    [
        (("user", "measured"), ("site", "measured"), "user"),
        (("user", "imported"), ("site", "measured"), "user"),
        (("user", "predicted"), ("site", "measured"), "site"),
        (("user", "measured"), ("packaged", "pinned"), "packaged"),
        (("user", "predicted"), ("server", "measured"), "server"),
        (("user", "imported"), ("site", "pinned"), "site"),
        (("site", "measured"), ("packaged", "measured"), "site"),
        (("server", "measured"), ("packaged", "imported"), "packaged"),
        (("user", "pinned"), ("site", "pinned"), "user"),
        (("site", "predicted"), ("packaged", "measured"), "packaged"),
    ],
)
def test_evidence_decides_first_then_the_nearer_layer(layers, make, near, far, winner):
    for layer, source in (near, far):
        put(layers, make, layer, source=source, candidate=layer)
    found = answer(layers, make)
    assert (found.layer.kind, found.record.candidate) == (winner, winner)


def test_what_others_measured_counts_as_imported(layers, make):
    put(layers, make, "site", candidate="site")
    assert answer(layers, make).record.source == "imported"
    put(layers, make, "user", candidate="user")
    assert answer(layers, make).record.source == "measured"


def test_the_server_is_asked_where_the_others_miss_and_what_it_says_is_kept(layers, make):
    put(layers, make, "server", candidate="server")
    assert answer(layers, make).layer.kind == "server"
    (kept,) = layers.stores["user"].decisions()
    assert (kept.source, kept.host) == ("imported", "there")
    assert layers.stores["user"].environments() == [make.environment]
    layers.stores["server"].evidence = None
    assert answer(layers, make).layer.kind == "user"


def test_what_this_host_measured_comes_back_from_the_server_as_its_own(layers, make):
    put(layers, make, "server", host=HERE)
    assert answer(layers, make).record.source == "measured"


def test_publishing_goes_to_the_user_and_to_the_server(layers, make):
    layers.publish(make.decision(), make.environment)
    counts = {name: len(list(store.decisions())) for name, store in layers.stores.items()}
    assert counts == {"user": 1, "server": 1, "site": 0, "packaged": 0}


def test_the_exact_environment_is_asked_before_a_prediction(layers, make):
    prediction = make.decision(environment="predicted:Ascend910B", source="predicted", candidate="predicted")
    layers.stores["user"].publish(prediction, EnvironmentRecord(id=prediction.environment))
    environments = (make.environment.id, prediction.environment)
    assert layers.resolve(make.key(), environments).record.candidate == "predicted"
    put(layers, make, "packaged", candidate="packaged")
    assert layers.resolve(make.key(), environments).record.candidate == "packaged"


def test_candidates_that_do_not_exist_here_are_passed_over(layers, make):
    put(layers, make, "user", candidate="gone/g=T_CONTIG")
    put(layers, make, "site", candidate="full/g=T_CONTIG")
    found = layers.resolve(make.key(), (make.environment.id,), known=["full/g=T_CONTIG"])
    assert found.layer.kind == "site"
    assert layers.resolve(make.key(), (make.environment.id,), known=[]) is None


def test_a_candidate_that_is_wrong_in_any_layer_is_used_from_none(layers, make):
    put(layers, make, "user")
    wrong = make.measurement(state="wrong", failure="wrong")
    put(layers, make, "site", candidate="full/g=STRIDE_HV", measurements=(wrong,))
    assert answer(layers, make).record.candidate == "full/g=STRIDE_HV"


def test_a_winner_that_fails_is_quarantined(layers, make):
    put(layers, make, "site", candidate="full/g=T_CONTIG")
    used = answer(layers, make).record
    failed = make.measurement(state="failed", failure="memory", reason="out of memory", samples=())
    layers.quarantine(used, make.measurement(state="failed", failure="device"))
    assert answer(layers, make) is not None
    layers.quarantine(used, failed)
    assert answer(layers, make) is None
    put(layers, make, "packaged", candidate="full/g=STRIDE_HV")
    assert answer(layers, make).record.candidate == "full/g=STRIDE_HV"


def test_every_decision_says_where_it_came_from(layers, make):
    put(layers, make, "user")
    put(layers, make, "site")
    put(layers, make, "site", T=7)
    shown = [(each.layer.kind, each.record.key.T, each.used) for each in layers.resolutions()]
    assert sorted(shown) == [("site", 7, True), ("site", 2048, False), ("user", 2048, True)]
    assert [record.key.T for record in layers.decisions()] == [2048, 7]


@pytest.fixture
def site(tmp_path, make):
    with contextlib.closing(Store(tmp_path / "origin.sqlite", host="there")) as store:
        store.publish(make.decision(), make.environment)
        export_file(store, tmp_path / "site.sqlite")
    return tmp_path / "site.sqlite"


def test_site_files_are_read_and_never_written(tmp_path, site, make):
    before = site.read_bytes(), sorted(tmp_path.iterdir())
    layers = open_layers(tmp_path / "user" / "d.sqlite", shared=[site])
    found = layers.resolve(make.key(), (make.environment.id,))
    assert found.layer.name == f"site: {site}"
    layers.publish(make.decision(T=7), make.environment)
    layers.close()
    assert (site.read_bytes(), sorted(each for each in tmp_path.iterdir() if each.name != "user")) == before


def test_a_site_file_that_is_replaced_is_read_anew(tmp_path, site, make):
    layers = open_layers(tmp_path / "user.sqlite", shared=[site])
    assert layers.lookup(make.key(T=7), make.environment.id) is None
    with contextlib.closing(Store(tmp_path / "origin.sqlite", host="there")) as store:
        store.publish(make.decision(T=7), make.environment)
        export_file(store, site)
    assert layers.lookup(make.key(T=7), make.environment.id) is not None
    layers.close()


def test_doubtful_site_files_are_warned_about(tmp_path, site, make, caplog):
    os.chmod(site, 0o666)
    live = tmp_path / "live.sqlite"
    with contextlib.closing(Store(live)) as writer:
        writer.publish(make.decision(), make.environment)
        open_layers(tmp_path / "user.sqlite", shared=[site, live, tmp_path / "missing.sqlite"]).close()
    assert "anybody on this machine may write it" in caplog.text
    assert "is in use by a writer" in caplog.text
    assert "missing.sqlite" in caplog.text


def test_a_url_that_is_none_stops_the_job(tmp_path):
    for url in ("not a url", "mysql://host/name", "sqlite:////tmp/x"):
        with pytest.raises(CacheError, match=r"\[cache\] url"):
            open_layers(tmp_path / "user.sqlite", url=url)


def test_failures_of_every_layer_are_known_by_candidate_and_revision(layers, make):
    fails = {
        "user": make.measurement("a", state="failed", failure="compile", samples=()),
        "server": make.measurement("b", state="wrong", failure="wrong", revision="r2"),
        "site": make.measurement("c", state="failed", failure="memory", measured_at=make.moment),
    }
    for layer, failure in fails.items():
        put(layers, make, layer, candidate="full/g=STRIDE_HV", measurements=(failure,))
    found = layers.failures(make.key(), make.environment.id)
    assert {place: each.failure for place, each in found.items()} == {("a", "r1"): "compile", ("b", "r2"): "wrong"}
    assert layers.failures(make.key(T=7), make.environment.id) == {}
    assert layers.failures(make.key(), "another compiler") == {}


def test_misses_of_all_hosts_add_up_by_key(layers, make):
    layers.record_misses([make.miss(count=2), make.miss(T=7)])
    layers.record_misses([make.miss(count=1, last_seen=make.moment + timedelta(hours=1), reason="capture")])
    # Another host told the server; what this one told both of them counts once.
    layers.stores["server"].record_misses([make.miss(T=7, count=9, first_seen=make.moment - timedelta(hours=1))])
    layers.stores["server"].record_misses([make.miss(T=7, environment="other", count=50)])
    most, other = layers.missed(make.environment.id)
    assert (most.key.T, most.count) == (7, 10)
    assert (most.first_seen, most.last_seen) == (make.moment - timedelta(hours=1), make.moment)
    assert (other.count, other.reason, other.last_seen) == (3, "capture", make.moment + timedelta(hours=1))
    assert [miss.count for miss in layers.missed()] == [50, 10, 3]
    assert {miss.host for miss in layers.misses(make.environment.id)} == {HERE, "there"}


def test_show_says_which_layer_each_decision_comes_from(tmp_path, site, make, monkeypatch, capsys):
    user = tmp_path / "user.sqlite"
    with contextlib.closing(Store(user)) as store:
        store.publish(make.decision(candidate="full/g=STRIDE_HV"), make.environment)
    (tmp_path / "tuner.toml").write_text(f'[cache]\npath = "{user}"\nshared = ["{site}"]\n')
    monkeypatch.chdir(tmp_path)
    found = json.loads(run_here(["show", "--layers", "--json"], monkeypatch, capsys).out)["decisions"]
    assert [(each["layer"], each["source"], each["candidate"], each["used"]) for each in found] == [
        (f"user: {user}", "measured", "full/g=STRIDE_HV", True),
        (f"site: {site}", "imported", "full/g=T_CONTIG", False),
    ]
    text = run_here(["show", "--layers"], monkeypatch, capsys).out
    assert "measured, used, user: " in " ".join(text.split())
    (decision,) = json.loads(run_here(["show", "--json"], monkeypatch, capsys).out)["decisions"]
    assert decision["candidate"] == "full/g=STRIDE_HV"


CANDIDATES = {"full/g=T_CONTIG": "r1", "full/g=STRIDE_HV": "r1"}


def all_wrong(make, revision="r1"):
    return tuple(make.measurement(each, revision=revision, state="wrong", failure="wrong") for each in CANDIDATES)


@pytest.mark.parametrize("layer", ["site", "server", "packaged", "user"])
def test_others_that_call_every_candidate_wrong_do_not_keep_a_key_from_being_tuned(layers, make, layer):
    put(layers, make, layer, host="there", measurements=all_wrong(make))
    assert len(layers.failures(make.key(), make.environment.id)) == 2
    assert layers.failures(make.key(), make.environment.id, known=CANDIDATES) == {}
    assert layers.resolve(make.key(), (make.environment.id,), known=CANDIDATES) is None
    # What is tuned then is used, by later processes too.
    tuned = put(layers, make, "user", candidate="full/g=STRIDE_HV", host=HERE)
    assert layers.resolve(make.key(), (make.environment.id,), known=CANDIDATES).record == tuned


def test_what_this_host_saw_is_believed_whatever_is_left(layers, make):
    put(layers, make, "user", measurements=all_wrong(make))
    assert len(layers.failures(make.key(), make.environment.id, known=CANDIDATES)) == 2
    assert layers.resolve(make.key(), (make.environment.id,), known=CANDIDATES) is None


def test_others_that_leave_a_candidate_are_believed(layers, make):
    put(layers, make, "site", measurements=all_wrong(make)[:1])
    assert list(layers.failures(make.key(), make.environment.id, known=CANDIDATES)) == [("full/g=T_CONTIG", "r1")]
    put(layers, make, "packaged", measurements=all_wrong(make, "an older one")[1:], T=2048, candidate="x")
    assert len(layers.failures(make.key(), make.environment.id, known=CANDIDATES)) == 2
