"""Where exports, merges and pin files are written: over no link and no device, whole, and with nothing left behind."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from layout_tuner.cache.atomic import replacing
from layout_tuner.cache.sharing.pins import read_pins, write_pins
from layout_tuner.cache.sharing.share import export_file, import_file, merge_files
from layout_tuner.cache.sqlite.file import Store
from layout_tuner.cache.sqlite.seal import BLANK, SealState, seal_state

from layout_tuner.errors import CacheError


@pytest.fixture
def full(path, make, opened):
    store = opened(path)
    store.publish(make.decision(), make.environment)
    return store


def written(store, target):
    """Every way to write a file of one's own, by name."""
    return {
        "export": lambda: export_file(store, target),
        "merge": lambda: merge_files([store.path], target),
        "pins": lambda: write_pins(target, store.decisions()),
    }


WAYS = ("export", "merge", "pins")


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_written_through_a_link(full, tmp_path, way):
    earlier, link = tmp_path / "earlier", tmp_path / "link"
    written(full, earlier)[way]()
    content = earlier.read_bytes()
    for goal in (earlier, tmp_path / "nowhere"):
        link.symlink_to(goal)
        with pytest.raises(CacheError, match="symbolic link"):
            written(full, link)[way]()
        assert Path(os.readlink(link)) == goal
        link.unlink()
    assert earlier.read_bytes() == content
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("way", WAYS)
def test_nothing_but_a_regular_file_is_replaced(full, tmp_path, way):
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for target, said in ((pipe, "no regular file"), (folder, "is a folder"), (Path("/dev/null"), "no regular file")):
        with pytest.raises(CacheError, match=said):
            written(full, target)[way]()
    assert pipe.is_fifo()
    assert Path("/dev/null").is_char_device()


def test_a_link_that_appears_meanwhile_is_not_replaced(tmp_path):
    path = tmp_path / "out"

    def write():
        with replacing(path) as scratch:
            scratch.write_bytes(b"new")
            path.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(CacheError, match="symbolic link"):
        write()
    assert path.is_symlink()
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


KILLED = """
import os, sys
from pathlib import Path
from layout_tuner.cache.atomic import replacing
with replacing(Path(sys.argv[1])) as scratch:
    scratch.write_bytes(b"half")
    print(scratch, flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_one_leaves_is_swept_and_a_living_one_is_left_alone(full, tmp_path):
    out = tmp_path / "out.sqlite"
    writers = [
        subprocess.Popen([sys.executable, "-c", KILLED, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    living, killed = [(writer, Path(writer.stdout.readline().decode().strip())) for writer in writers]
    killed[0].send_signal(signal.SIGKILL)
    killed[0].wait()
    assert killed[1].exists()
    (tmp_path / f".{out.name}.0123abcd").mkdir()
    (tmp_path / ".other.sqlite.0123abcd").mkdir()
    export_file(full, out)
    assert living[1].read_bytes() == b"half"
    left = {each.name for each in tmp_path.glob(".*")}
    assert left == {living[1].parent.name, ".other.sqlite.0123abcd"}
    living[0].communicate()
    assert living[0].returncode == 0
    assert out.read_bytes() == b"half"
    for process in writers:
        process.stdout.close()
        process.stdin.close()


def test_names_that_are_no_utf8_are_written_and_read(make, tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    folder.mkdir()
    with contextlib.closing(Store(folder / "in.sqlite")) as store:
        store.publish(make.decision(), make.environment)
        export_file(store, folder / "out.sqlite")
        export_file(store, folder / "op.sqlite", op="chunk_bwd_dv_local")
        write_pins(folder / "pins.json", store.decisions())
    assert len(read_pins(folder / "pins.json")[1]) == 1
    assert merge_files([folder / "in.sqlite", folder / "out.sqlite"], folder / "merged.sqlite").exported.decisions == 1
    with contextlib.closing(Store(folder / "new.sqlite")) as store:
        assert import_file(store, folder / "merged.sqlite").added == 1


# -- the seal ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [BLANK, "layout_tuner-seal-sha256:", f"x{BLANK[:-64]}{'f' * 64}"])
def test_text_that_imitates_a_seal_is_text(path, tmp_path, make, opened, text):
    store = opened(path)
    store.publish(
        make.decision(candidate=text, measurements=(make.measurement(text, state="failed", reason=text),)),
        make.environment,
    )
    store.close()
    assert seal_state(path) is SealState.NONE
    export_file(store, tmp_path / "out.sqlite")
    assert seal_state(tmp_path / "out.sqlite") is SealState.SOUND
    merge_files([path, tmp_path / "out.sqlite"], tmp_path / "merged.sqlite")
    assert seal_state(tmp_path / "merged.sqlite") is SealState.SOUND
    assert import_file(opened(tmp_path / "new.sqlite"), tmp_path / "merged.sqlite").added == 1


@pytest.mark.parametrize(
    "change",
    [
        "INSERT INTO seals SELECT 2, seal, sealed_at, host, product_version FROM seals",
        "UPDATE seals SET host = printf('%.9000c', 'x')",
        "UPDATE seals SET id = 7",
        "UPDATE decisions SET candidate = (SELECT seal FROM seals)",
    ],
)
def test_a_seal_that_was_written_to_is_broken(full, tmp_path, change):
    out = tmp_path / "out.sqlite"
    export_file(full, out)
    os.chmod(out, 0o644)
    with contextlib.closing(sqlite3.connect(out)) as connection:
        connection.execute(change)
        connection.commit()
    assert seal_state(out) is SealState.BROKEN
