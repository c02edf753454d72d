"""Two thousand damaged files: none of them stops a job, and nothing unsound comes out of them."""

import ast
import contextlib
import random
from pathlib import Path

import pytest
from cache_damage import broken, poison
from layout_tuner.cache.layers import open_layers
from layout_tuner.cache.places.opening import Store, open_store
from layout_tuner.cache.records import DecisionRecord
from layout_tuner.cache.sharing.share import export_file, import_file
from layout_tuner.cache.sqlite import schema
from layout_tuner.cache.validation import check_decision

from layout_tuner.errors import CacheError

FILES = 2000
PARTS = 8


@pytest.fixture(scope="module")
def sound(tmp_path_factory, make):
    """The bytes of a sound file, and of an export of it."""
    folder = tmp_path_factory.mktemp("sound")
    with contextlib.closing(Store(folder / "a.sqlite")) as store:
        for number in range(30):
            store.publish(make.decision(T=2048 if number == 0 else number), make.environment)
        store.record_misses([make.miss()])
        export_file(store, folder / "b.sqlite")
    return (folder / "a.sqlite").read_bytes(), (folder / "b.sqlite").read_bytes()


@pytest.mark.parametrize("part", range(PARTS))
def test_damaged_files_never_stop_a_job(fast_path, sound, make, part):
    random_ = random.Random(f"part {part}")
    answered = faithful = 0
    path = fast_path / "decisions.sqlite"
    for number in range(FILES // PARTS):
        if number % 4 == 3:
            path.write_bytes(sound[0])
            poison(path, random_)
        else:
            path.write_bytes(broken(sound[number % 2], random_))
        store = open_store(path)
        found = store.lookup(make.key(), make.environment.id)
        if found is not None:
            answered += 1
            assert isinstance(found, DecisionRecord)
            assert check_decision(found) == found
            assert found.key == make.key()
        kept = store.publish(make.decision(T=5, candidate="block/g=T_CONTIG"), make.environment)
        after = store.lookup(make.key(T=5), make.environment.id)
        faithful += after == kept
        assert after is None or check_decision(after).key == make.key(T=5)
        if number % 5 == 0:
            for record in store.decisions():
                check_decision(record)
            store.misses()
            store.environments()
        store.close()
        for each in fast_path.iterdir():
            each.unlink()
    # A tree whose pages were exchanged may lose what is written to it; what comes out of it is sound all the same.
    assert faithful > FILES / PARTS * 0.95
    # Some damage leaves this row alone and some does not: the test has met both.
    assert FILES / PARTS * 0.1 < answered < FILES / PARTS * 0.95


def test_damaged_files_are_imported_safely_or_not_at_all(fast_path, sound, make):
    random_ = random.Random(7)
    imported = refused = 0
    for number in range(120):
        target, path = fast_path / "target.sqlite", fast_path / "shared.sqlite"
        if number % 2:
            path.write_bytes(sound[0])
            poison(path, random_)
        else:
            path.write_bytes(broken(sound[number % 4 // 2], random_))
        with contextlib.closing(Store(target)) as store:
            try:
                tally = import_file(store, path)
            except CacheError:
                refused += 1
            else:
                imported += 1
                # What import lets in can be read again, but for what only a closer look finds.
                assert sum(1 for _ in store.decisions()) <= tally.added
            store.publish(make.decision(T=5), make.environment)
            assert store.lookup(make.key(T=5), make.environment.id) is not None
        for each in fast_path.iterdir():
            each.unlink()
    assert imported > 20
    assert refused > 20


def test_damaged_site_files_leave_the_layers_working(fast_path, sound, make):
    random_ = random.Random(11)
    for number in range(100):
        site = fast_path / "site.sqlite"
        site.write_bytes(broken(sound[1], random_))
        layers = open_layers(fast_path / f"{number}.sqlite", shared=[site])
        layers.lookup(make.key(), make.environment.id)
        list(layers.decisions())
        kept = layers.publish(make.decision(T=5), make.environment)
        assert layers.lookup(make.key(T=5), make.environment.id) == kept
        layers.close()


def test_nothing_in_the_cache_evaluates_what_it_reads():
    names, attributes, modules = set(), set(), set()
    for file in Path(schema.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Attribute):
                attributes.add(node.attr)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                modules |= {alias.name for alias in node.names} | {getattr(node, "module", None)}
    assert {"sqlite3", "logging"} <= modules
    assert not {"eval", "exec", "compile", "__import__", "globals"} & names
    assert not {"import_module", "load_extension", "enable_load_extension"} & attributes
    assert not {"pickle", "marshal", "shelve", "dill", "yaml"} & modules
