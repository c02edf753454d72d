"""Stored text is text: no markup, no escape sequence and no forged line, in whatever a command prints."""

import contextlib
import io
import json
import logging
import os
import sqlite3
import subprocess

import pytest
from command import TUNER
from layout_tuner.cache.sharing.share import export_file
from layout_tuner.cache.sqlite.file import Store
from rich.console import Console

from layout_tuner.cli.common import _OneLine, plain
from layout_tuner.cli.decisions import decision_table, scientific

HOSTILE = ("[/x]", "[bold red]x[/]", "\x1b[2J\x1b]0;owned\x07", "a\nERROR forged", "\u202egnp.exe", "\x9b31m", ":boom:")
FORBIDDEN = ("\x1b", "\x07", "\u202e", "\x9b", "\nERROR forged")


@pytest.mark.parametrize("text", [*HOSTILE, "\udcff\udcfe", "\u2028x", "\x00", "\u2066x\u2069"])
def test_plain_is_one_printable_line(text):
    shown = plain(text)
    assert shown.isprintable()
    assert len(shown.splitlines()) == 1
    shown.encode()


@pytest.mark.parametrize("text", ["", "größe 测试 🔥", "a b", "[x]"])
def test_plain_leaves_text_alone(text):
    assert plain(text) == text


@pytest.fixture
def hostile(path, make):
    """A file whose every free text is hostile: those that SQL lets in and the checks of a label do not, too."""
    with contextlib.closing(Store(path, host="[/there]")) as store:
        for number, text in enumerate(HOSTILE):
            reason = make.measurement("b", state="failed", failure="compile", reason=text)
            store.publish(make.decision(T=number + 1, measurements=(make.measurement(), reason)), make.environment)
        label = "[/x]\u202e[red]:boom:"
        store.publish(make.decision(T=99, form=label, candidate=label, dtype=label), make.environment)
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ("show",),
        ("show", "--layers"),
        ("cache", "diff", "other.sqlite"),
        ("cache", "merge", "other.sqlite", "-o", "out.sqlite"),
        ("doctor",),
    ],
    ids=" ".join,
)
def test_no_command_prints_what_steers_a_terminal(hostile, make, tmp_path, arguments):
    with contextlib.closing(Store(tmp_path / "other.sqlite", host="\u202e[/]")) as store:
        store.publish(make.decision(T=99, candidate="[/y]\u202e", source="pinned"), make.environment)
        store.publish(make.decision(T=99, environment="e[/]\u202e"), type(make.environment)(id="e[/]\u202e"))
    named = [str(hostile)] if arguments[0] == "cache" else ["--cache", str(hostile)]
    done = subprocess.run(
        [TUNER, *arguments, *named],
        capture_output=True,
        cwd=tmp_path,
        check=False,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )
    out = done.stdout.decode()
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    for mark in FORBIDDEN:
        assert mark not in out
    if arguments[0] == "show":
        for text in ("[/x]", "[bold red]x[/]", ":boom:", "\\u202e"):
            assert text in out


def test_a_log_record_is_one_line():
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(_OneLine("%(levelname)s %(message)s"))
    handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "stored %s", ("a\nERROR forged\x1b[2J",), None))
    assert out.getvalue() == "INFO stored a\\nERROR forged\\x1b[2J\n"


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_number_is_cut_however_narrow_the_terminal_is(make, width):
    errors = (1.5e-4, 2.5e-300, 3.0e12)
    found = [make.measurement(f"c{number}", error=error) for number, error in enumerate(errors)]
    out = io.StringIO()
    Console(file=out, width=width, markup=False).print(
        decision_table([(make.decision(measurements=tuple(found)), "measured")])
    )
    for error in errors:
        assert scientific(error) in out.getvalue()


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_any_encoding_of_the_output_will_do(make, tmp_path, encoding):
    folder = tmp_path / os.fsdecode(b"\xff gr\xc3\xb6\xc3\x9fe")
    folder.mkdir()
    with contextlib.closing(Store(folder / "in.sqlite")) as store:
        store.publish(make.decision(form="größe"), make.environment)
        export_file(store, folder / "out.sqlite")
    for arguments in (
        ("show", "--cache", folder / "in.sqlite"),
        ("cache", "export", folder / "new.sqlite", "--cache", folder / "in.sqlite"),
        ("cache", "merge", folder / "in.sqlite", folder / "out.sqlite", "-o", folder / "merged.sqlite"),
    ):
        done = subprocess.run(
            [TUNER, *map(str, arguments)],
            capture_output=True,
            check=False,
            env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
        )
        assert (done.returncode, done.stderr) == (0, b"")
        # What no encoding has, a byte of a name that is no text, is spelled out.
        assert b"\\udcff gr" in done.stdout


def test_a_bad_stored_row_is_said_in_one_line(path, make, tmp_path):
    with contextlib.closing(Store(path)) as store:
        store.publish(make.decision(), make.environment)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE decisions SET candidate = ?", ("x\x1b[2J\nERROR forged",))
        connection.commit()
    done = subprocess.run([TUNER, "show", "--cache", str(path)], capture_output=True, text=True, check=True)
    assert len(done.stderr.splitlines()) == 1
    assert "\x1b" not in done.stderr
    assert json.loads(
        subprocess.run([TUNER, "show", "--json", "--cache", str(path)], capture_output=True, text=True).stdout
    ) == {"decisions": []}
