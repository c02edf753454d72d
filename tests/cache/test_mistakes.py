"""Commands that are pointed at the wrong thing: one clear message, exit status 2, and nothing made or changed."""

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest
from command import TUNER, run_here
from layout_tuner.cache.faults import Fault, StoreError
from layout_tuner.cache.layers import open_layers
from layout_tuner.cache.places.folder import FolderStore
from layout_tuner.cache.places.opening import open_existing, open_path, open_store, require_place
from layout_tuner.cache.sharing.share import export_file
from layout_tuner.cache.sqlite.file import Store
from layout_tuner.cache.sqlite.seal import SealState, seal_state

READING = {
    "show": ["show", "--cache", "{}"],
    "show layers": ["show", "--layers", "--cache", "{}"],
    "doctor": ["doctor", "--cache", "{}"],
    "export": ["cache", "export", "out.sqlite", "--cache", "{}"],
    "export pins": ["cache", "export", "--pin", "out.json", "--cache", "{}"],
    "prune": ["cache", "prune", "--op", "x", "--cache", "{}"],
    "orphans": ["cache", "prune", "--orphans", "--cache", "{}"],
    "import": ["cache", "import", "good.sqlite", "{}", "--cache", "new.sqlite"],
    "merge": ["cache", "merge", "good.sqlite", "{}", "-o", "out.sqlite"],
    "diff": ["cache", "diff", "good.sqlite", "{}"],
    "diff other": ["cache", "diff", "{}", "good.sqlite"],
}


@pytest.fixture
def tuner(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run_here(arguments, monkeypatch, capsys)


@pytest.fixture
def good(tmp_path, make):
    path = tmp_path / "good.sqlite"
    with contextlib.closing(Store(path, host="there")) as store:
        store.publish(make.decision(), make.environment)
    return path


def everything(folder):
    """Names and content of all that lies in a folder."""
    return {str(each.relative_to(folder)): each.read_bytes() if each.is_file() else None for each in folder.rglob("*")}


def foreign(path):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
        connection.commit()


def placed(folder, what):
    """Something that holds no decisions; its path."""
    path = folder / {"text": "README.md", "foreign": "recipes.db", "garbage": "garbage.sqlite"}.get(what, what)
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "text":
        path.write_text("# A text\n" * 1000)
    elif what == "garbage":
        path.write_bytes(b"garbage" * 1000)
    elif what == "foreign":
        foreign(path)
    return path


@pytest.mark.parametrize("what", ["missing", "folder", "pipe", "text", "garbage", "foreign"])
@pytest.mark.parametrize("command", READING)
def test_what_holds_no_decisions_is_named_and_left_alone(tuner, tmp_path, good, command, what):
    path = placed(tmp_path, what)
    before = everything(tmp_path)
    done = tuner(*(each.format(path) for each in READING[command]))
    assert everything(tmp_path) == before
    assert "Traceback" not in done.err
    if command == "doctor" and what not in ("missing", "folder", "pipe"):
        # Looking at what is wrong is its business.
        assert (done.status, "error" in done.out) == (1, True)
        return
    assert (done.status, done.out) == (2, "")
    assert path.name in done.err
    assert done.err.count("error") == 1


@pytest.mark.parametrize("name", ["README.md", "notes.txt", "decisions", "model.safetensors", "Makefile"])
def test_what_is_no_database_is_never_moved(tmp_path, make, caplog, name):
    path = tmp_path / name
    path.write_bytes(b"something else\n" * 500)
    before = everything(tmp_path)
    with pytest.raises(StoreError, match="is left as it is") as caught:
        open_path(path)
    assert caught.value.fault is Fault.FOREIGN
    with pytest.raises(StoreError):
        require_place(path)
    store = open_store(path)
    kept = store.publish(make.decision(), make.environment)
    assert store.lookup(make.key(), make.environment.id) == kept
    store.close()
    assert everything(tmp_path) == before
    assert caplog.text.count("WARNING") == 1
    assert "kept in memory" in caplog.text


@pytest.mark.parametrize("name", ["d.sqlite", "d.SQLite3", "d.db", "odd name"])
def test_what_looks_like_a_damaged_database_is_set_aside(tmp_path, good, make, name):
    path = tmp_path / name
    content = bytearray(good.read_bytes())
    content[16:4096] = os.urandom(4080)
    if name != "odd name":
        content[:16] = os.urandom(16)
    path.write_bytes(content)
    require_place(path)
    with contextlib.closing(open_path(path)) as store:
        store.publish(make.decision(), make.environment)
    (aside,) = tmp_path.glob(f"{name}.damaged-*")
    assert aside.read_bytes() == content


@pytest.mark.parametrize(
    "arguments",
    [
        ["cache", "import", "good.sqlite", "--cache", "README.md"],
        ["warmup", "--shapes", "shapes.json", "--cache", "README.md"],
        ["warmup", "--shapes", "shapes.json", "--cache", "recipes.db"],
        ["warmup", "--shapes", "shapes.json", "--cache", "postgresql://user:secret@host/name"],
    ],
    ids=" ".join,
)
def test_writing_commands_refuse_what_was_never_theirs(tuner, tmp_path, good, arguments):
    placed(tmp_path, "text")
    placed(tmp_path, "foreign")
    shape = {"op": "chunk_bwd_dv_local", "B": 1, "T": 32, "H": 1, "HV": 2, "K": 16, "V": 16, "dtype": "float32"}
    (tmp_path / "shapes.json").write_text(json.dumps([shape]))
    before = everything(tmp_path)
    done = tuner(*arguments)
    assert (done.status, done.out) == (2, "")
    assert arguments[-1].partition(":")[0] in done.err or "[cache] url" in done.err
    assert "secret" not in done.err
    assert everything(tmp_path) == before


@pytest.mark.parametrize("named", ["--cache", "settings"])
@pytest.mark.parametrize("place", [".", "README.md/decisions.sqlite", "pipe", f"{'long' * 80}.sqlite"])
def test_nothing_is_tuned_for_a_place_that_keeps_nothing(tuner, tmp_path, monkeypatch, place, named):
    monkeypatch.setattr("layout_tuner.warming.warmup", lambda *_, **__: pytest.fail("it was tuned"))
    placed(tmp_path, "text")
    placed(tmp_path, "pipe")
    (tmp_path / "shapes.json").write_text("[]")
    if named == "settings":
        (tmp_path / "tuner.toml").write_text(f'[cache]\npath = "{place}"\n')
    before = everything(tmp_path)
    done = tuner("warmup", "--shapes", "shapes.json", *(["--cache", place] if named == "--cache" else []))
    assert (done.status, done.out) == (2, "")
    # A path in settings is made absolute when they are read.
    assert f"error: {place if named == '--cache' else tmp_path / place}: " in done.err
    assert everything(tmp_path) == before


# -- where nothing was stored yet --------------------------------------------------------------------------------


@pytest.mark.parametrize("begun", [False, True])
def test_a_default_file_without_decisions_is_no_mistake(tuner, tmp_path, begun):
    path = tmp_path / "new" / "decisions.sqlite"
    (tmp_path / "tuner.toml").write_text(f'[cache]\npath = "{path}"\n')
    if begun:
        path.parent.mkdir()
        path.touch()
    before = everything(tmp_path)
    shown = tuner("show")
    assert (shown.status, shown.out) == (0, f"no decisions in {path}\n")
    assert json.loads(tuner("show", "--json").out) == {"decisions": []}
    assert tuner("doctor").status == 0
    assert tuner("cache", "export", "out.sqlite").status == 2
    assert tuner("cache", "prune", "--op", "x").status == 2
    assert everything(tmp_path) == before


def test_a_read_only_look_leaves_nothing_beside_the_file(tuner, tmp_path, good):
    before = everything(tmp_path)
    for command in ("show", "show layers", "doctor", "diff"):
        assert tuner(*(each.format(good) for each in READING[command])).status == 0
    assert everything(tmp_path) == before
    with contextlib.closing(open_existing(good)) as store, pytest.raises(StoreError, match="reading only"):
        store.prune(op="x")


def test_a_file_in_use_is_looked_at_whole(tuner, good, make):
    with contextlib.closing(Store(good)) as writer:
        writer.publish(make.decision(T=7), make.environment)
        assert "2 decisions" in tuner("show", "--cache", good).out
        assert "2 decisions" in tuner("cache", "export", "out.sqlite", "--cache", good).out
        # The reader's end did not disturb the writer.
        writer.publish(make.decision(T=8), make.environment)
        assert len(list(writer.decisions())) == 3


def test_hosts_on_a_network_are_looked_at_without_a_file_of_ones_own(tuner, tmp_path, make, monkeypatch):
    from layout_tuner.cache.filesystem import FileSystem
    from layout_tuner.cache.places import opening
    from layout_tuner.cache.sharing import doctor

    for module in (opening, doctor):
        monkeypatch.setattr(module, "file_system", lambda place: FileSystem(name="nfs", local=False))
    path = tmp_path / "decisions.sqlite"
    assert tuner("show", "--cache", path).status == 2
    for number in range(2):
        with contextlib.closing(FolderStore(path, host=f"node{number}")) as written:
            written.publish(make.decision(T=1 + number), make.environment)
    before = everything(tmp_path)
    assert "2 decisions" in tuner("show", "--cache", path).out
    assert len(json.loads(tuner("show", "--cache", path, "--json").out)["decisions"]) == 2
    examined = tuner("doctor", "--cache", path)
    assert (examined.status, examined.out.count("every page is sound")) == (0, 2)
    assert "decisions.node1.sqlite: " in examined.out
    assert everything(tmp_path) == before
    assert "2 decisions" in tuner("cache", "export", "out.sqlite", "--cache", path).out


# -- what would be written over ----------------------------------------------------------------------------------


def attempts(target):
    """Every command that writes a file, writing to `target`."""
    return {
        "export": ["cache", "export", target, "--cache", "good.sqlite"],
        "pins": ["cache", "export", "--pin", target, "--cache", "good.sqlite"],
        "merge": ["cache", "merge", "good.sqlite", "more.sqlite", "-o", target],
    }


@pytest.fixture
def more(good):
    return shutil.copy(good, good.with_name("more.sqlite"))


@pytest.mark.parametrize("what", ["folder", "pipe", "text", "garbage", "foreign", "decisions", "/dev/null"])
@pytest.mark.parametrize("command", ["export", "pins", "merge"])
def test_only_what_an_earlier_export_wrote_is_replaced(tuner, tmp_path, good, more, command, what):
    if what == "decisions":
        path = Path(shutil.copy(good, tmp_path / "other.sqlite"))
    else:
        path = placed(tmp_path, what) if what != "/dev/null" else Path(what)
    before = everything(tmp_path)
    done = tuner(*attempts(path)[command])
    assert (done.status, done.out) == (2, "")
    assert path.name in done.err
    assert everything(tmp_path) == before
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("link", ["", "symbolic", "hard"])
@pytest.mark.parametrize("command", ["export", "merge"])
def test_an_input_is_never_written_over(tuner, tmp_path, good, more, command, link):
    target = "good.sqlite"
    if link:
        target = "link.sqlite"
        Path(target).symlink_to(good) if link == "symbolic" else Path(target).hardlink_to(good)
    before = everything(tmp_path)
    done = tuner(*attempts(target)[command])
    assert (done.status, done.out) == (2, "")
    assert "would be overwritten" in done.err
    assert everything(tmp_path) == before


def test_a_sealed_input_is_not_written_over_either(tuner, tmp_path, good):
    tuner("cache", "export", "one.sqlite", "--cache", good)
    assert "would be overwritten" in tuner("cache", "merge", "good.sqlite", "one.sqlite", "-o", "one.sqlite").err
    assert seal_state(tmp_path / "one.sqlite") is SealState.SOUND


@pytest.mark.parametrize("command", ["export", "pins", "merge"])
def test_an_earlier_export_and_an_empty_file_are_replaced(tuner, tmp_path, good, more, command):
    (tmp_path / "out").touch()
    for _ in range(2):
        assert tuner(*attempts("out")[command]).status == 0
    assert (tmp_path / "out").stat().st_size


@pytest.mark.parametrize("command", ["export", "pins"])
def test_an_export_of_nothing_does_not_replace_one_of_something(tuner, tmp_path, good, command):
    assert tuner(*attempts("out")[command]).status == 0
    before = everything(tmp_path)
    for options in (["--op", "chunk_bwd_dvlocal"], ["--environment", "H200"]):
        done = tuner(*attempts("out")[command], *options)
        assert (done.status, done.out) == (2, "")
        assert f"no decisions of {options[0][2:]} {options[1]!r}" in done.err
        assert "'H200-triton3.6': chunk_bwd_dv_local" in done.err
    Store(tmp_path / "empty.sqlite").close()
    done = tuner("cache", "export", "out", "--cache", "empty.sqlite")
    assert (done.status, "holds no decisions" in done.err) == (2, True)
    (tmp_path / "empty.sqlite").unlink()
    assert everything(tmp_path) == before


def test_a_merge_of_nothing_does_not_replace_one_of_something(tuner, tmp_path, good, more):
    assert tuner(*attempts("out")["merge"]).status == 0
    Store(tmp_path / "empty.sqlite").close()
    before = everything(tmp_path)
    done = tuner("cache", "merge", "empty.sqlite", "-o", "out")
    assert (done.status, done.out) == (2, "")
    assert "empty.sqlite: no sound decision to merge" in done.err
    assert everything(tmp_path) == before
    assert tuner("cache", "merge", "empty.sqlite", "good.sqlite", "-o", "out").status == 0


@pytest.mark.parametrize(
    "command",
    [
        ["import", "none.sqlite", "good.sqlite", "README.md", "--cache", "new.sqlite"],
        ["merge", "none.sqlite", "good.sqlite", "README.md", "-o", "out"],
        ["diff", "none.sqlite", "README.md"],
    ],
    ids=lambda command: command[0],
)
def test_every_file_that_cannot_be_read_is_named(tuner, tmp_path, good, command):
    placed(tmp_path, "text")
    before = everything(tmp_path)
    done = tuner("cache", *command)
    assert (done.status, done.out) == (2, "")
    assert "error: none.sqlite: no such file\nREADME.md: is not a file of decisions" in done.err
    assert everything(tmp_path) == before


def test_a_file_is_not_brought_to_itself(tuner, tmp_path, good):
    before = everything(tmp_path)
    done = tuner("cache", "import", "good.sqlite", "--cache", "good.sqlite")
    assert (done.status, done.out) == (2, "")
    assert everything(tmp_path) == before


@pytest.fixture
def tampered(tuner, tmp_path, good):
    """An export with another winner than it was sealed with."""
    assert tuner("cache", "export", "tampered.sqlite", "--cache", good).status == 0
    path = tmp_path / "tampered.sqlite"
    path.chmod(0o644)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE decisions SET candidate = 'full/g=STRIDE_HV'")
        connection.commit()
    path.chmod(0o444)
    return path


@pytest.mark.parametrize("command", [["show"], ["show", "--json"]], ids=" ".join)
def test_a_full_disk_behind_stdout_is_said_in_one_line(good, command):
    with open("/dev/full", "w") as full:
        done = subprocess.run([TUNER, *command, "--cache", good], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize("command", [["show"], ["show", "--json"], ["cache", "prune"]], ids=" ".join)
def test_an_op_that_does_not_exist_is_a_typo(tuner, tmp_path, good, command):
    before = everything(tmp_path)
    done = tuner(*command, "--op", "nope", "--cache", good)
    assert done.status == 2
    if "--json" in command:
        assert json.loads(done.out)["error"]["status"] == 2
    else:
        assert done.out == ""
    assert "no op 'nope' (there are chunk_bwd_dqkwg, chunk_bwd_dv_local, " in done.err
    assert everything(tmp_path) == before


def test_show_says_what_there_is_where_nothing_was_asked_for(tuner, good):
    there = f"in {good}; it holds 1, of chunk_bwd_dv_local\n"
    shown = tuner("show", "--op", "chunk_fwd_o", "--cache", good)
    assert (shown.status, shown.out) == (0, f"no decisions of op 'chunk_fwd_o' {there}")
    shown = tuner("show", "--environment", "H200", "--cache", good)
    assert (shown.status, shown.out) == (0, f"no decisions of environment 'H200' {there}")


@pytest.mark.parametrize("out", [["out.sqlite"], ["--pin", "out.json"]])
def test_an_export_that_was_changed_is_not_sealed_anew(tuner, tmp_path, tampered, out):
    before = everything(tmp_path)
    done = tuner("cache", "export", *out, "--cache", tampered)
    assert (done.status, done.out) == (2, "")
    assert "tampered.sqlite: was changed after it was exported" in done.err
    assert everything(tmp_path) == before


def test_an_export_that_was_changed_is_shown_as_such(tuner, tampered, good):
    shown = tuner("show", "--cache", tampered, "--json")
    assert (shown.status, len(json.loads(shown.out)["decisions"])) == (0, 1)
    assert shown.err == f"warning: {tampered}: was changed after it was exported (its seal is broken)\n"
    assert tuner("show", "--cache", good).err == ""


@pytest.mark.parametrize(
    "command",
    [
        ["cache", "prune", "--op", "chunk_bwd_dv_local"],
        ["cache", "prune", "--orphans"],
        ["cache", "import", "good.sqlite"],
        ["warmup", "--shapes", "shapes.json"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("kind", ["sound", "changed"])
def test_no_command_writes_to_an_export(tuner, tmp_path, tampered, command, kind):
    (tmp_path / "shapes.json").write_text("[]")
    tuner("cache", "export", "sound.sqlite", "--cache", "good.sqlite")
    path = tampered if kind == "changed" else tmp_path / "sound.sqlite"
    before = everything(tmp_path)
    done = tuner(*command, "--cache", path)
    assert (done.status, done.out) == (2, "")
    assert f"{path}: is a sealed export and is not written to; import it into a file of your own" in done.err
    assert everything(tmp_path) == before


def test_a_job_reads_an_export_and_leaves_it_sealed(tmp_path, good, make, caplog):
    path = tmp_path / "export.sqlite"
    with contextlib.closing(Store(good)) as store:
        export_file(store, path)
    before = everything(tmp_path)
    layers = open_layers(path)
    kept = layers.publish(make.decision(T=7), make.environment)
    assert layers.lookup(make.key(), make.environment.id) is not None
    assert layers.lookup(make.key(T=7), make.environment.id) == kept
    layers.close()
    assert everything(tmp_path) == before
    assert "kept in memory" in caplog.text


def test_an_export_that_becomes_a_users_file_is_an_export_no_more(tmp_path, good, make):
    with contextlib.closing(Store(good)) as store:
        export_file(store, tmp_path / "export.sqlite")
    path = tmp_path / "decisions.sqlite"
    shutil.copyfile(tmp_path / "export.sqlite", path)
    assert seal_state(path) is SealState.SOUND
    layers = open_layers(path)
    layers.publish(make.decision(T=7), make.environment)
    layers.close()
    assert seal_state(path) is SealState.NONE
    assert seal_state(tmp_path / "export.sqlite") is SealState.SOUND
