"""Pin files: readable, hashed, refused when changed."""

import json

import pytest
from layout_tuner.cache.layers import open_layers
from layout_tuner.cache.sharing.pins import read_pins, write_pins

from layout_tuner.errors import CacheError


@pytest.fixture
def pinned(tmp_path, make):
    path = tmp_path / "pins.json"
    digest = write_pins(path, [make.decision(T=number) for number in (3, 1, 2)])
    return path, digest


def test_what_is_written_is_read(pinned):
    path, digest = pinned
    found, decisions = read_pins(path)
    assert found == digest
    assert [record.key.T for record in decisions] == [1, 2, 3]
    assert {record.source for record in decisions} == {"pinned"}
    document = json.loads(path.read_text())
    assert set(document) == {"format", "sha256", "decisions"}
    assert document["decisions"][0]["candidate"] == "full/g=T_CONTIG"


def test_the_same_decisions_give_the_same_file(tmp_path, pinned, make):
    path, digest = pinned
    other = tmp_path / "other.json"
    assert write_pins(other, [make.decision(T=number) for number in (1, 2, 3)]) == digest
    assert other.read_bytes() == path.read_bytes()


def test_how_the_file_is_laid_out_does_not_count(pinned):
    path, digest = pinned
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7, sort_keys=True))
    assert read_pins(path)[0] == digest


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("full/g=T_CONTIG", "full/g=STRIDE_HV", "changed after it was written"),
        ('"T": 1,', '"T": 64,', "changed after it was written"),
        ("layout_tuner pins 1", "layout_tuner pins 2", "not a pin file"),
        ('"decisions": [', '"decisions": [[', "not JSON"),
    ],
)
def test_a_changed_file_is_refused(pinned, old, new, message):
    path, _ = pinned
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(CacheError, match=message):
        read_pins(path)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", "null", "[" * 100_000, '{"format": "layout_tuner pins 1"}', "\x00"]
)
def test_what_is_no_pin_file_is_refused(tmp_path, content):
    path = tmp_path / "pins.json"
    path.write_text(content)
    with pytest.raises(CacheError, match=r"pins\.json"):
        read_pins(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(CacheError, match="No such file"):
        read_pins(tmp_path / "none.json")


def rehashed(path, change):
    from layout_tuner.cache.sharing.pins import content_hash

    document = json.loads(path.read_text())
    change(document["decisions"][0])
    document["sha256"] = content_hash(document["decisions"])
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda each: each.update(num_warps=4), "num_warps"),
        (lambda each: each["key"].update(T="many"), r"key\.T"),
        (lambda each: each.update(source="measured"), "wanted 'pinned'"),
        (lambda each: each.update(candidate="num_stages=3"), "not accepted anywhere"),
        (lambda each: each.pop("candidate"), "candidate"),
    ],
)
def test_a_right_hash_does_not_excuse_unsound_decisions(pinned, change, message):
    path, _ = pinned
    rehashed(path, change)
    with pytest.raises(CacheError, match=message):
        read_pins(path)


def test_one_key_is_pinned_once(tmp_path, make):
    with pytest.raises(CacheError, match="two decisions"):
        write_pins(tmp_path / "pins.json", [make.decision(), make.decision(candidate="full/g=STRIDE_HV")])
    assert not list(tmp_path.iterdir())


def test_pins_are_all_that_is_used(pinned, tmp_path, make):
    path, digest = pinned
    layers = open_layers(tmp_path / "user.sqlite", pin=path)
    layers.publish(make.decision(T=9), make.environment)
    assert layers.pin_hash == digest
    assert layers.lookup(make.key(T=9), make.environment.id) is None
    assert layers.lookup(make.key(T=1), make.environment.id).source == "pinned"
    layers.close()


def test_a_pin_file_that_was_changed_stops_the_job(pinned, tmp_path):
    path, _ = pinned
    path.write_text(path.read_text().replace("full/", "block/", 1))
    with pytest.raises(CacheError, match="changed"):
        open_layers(tmp_path / "user.sqlite", pin=path)


def test_a_file_that_nobody_would_read_is_not_written(tmp_path, make, monkeypatch):
    path = tmp_path / "pins.json"
    write_pins(path, [make.decision(T=number) for number in (1, 2)])
    before = path.read_bytes()
    for most in (len(before) - 1, len(before) // 3):
        monkeypatch.setattr("layout_tuner.cache.sharing.pins.MAX_PIN_BYTES", most)
        with pytest.raises(CacheError, match="pin one environment or op"):
            write_pins(path, [make.decision(T=number) for number in (1, 2)])
    assert path.read_bytes() == before
    monkeypatch.setattr("layout_tuner.cache.sharing.pins.MAX_PIN_BYTES", len(before))
    write_pins(path, [make.decision(T=number) for number in (2, 1)])
    assert path.read_bytes() == before
    assert len(read_pins(path)[1]) == 2
