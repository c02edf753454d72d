"""The `tuner` command: in this process where only what it prints matters, else in one of its own."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from dv_local import FORM, SPEC

from layout_tuner.cli import main

TUNER = Path(sys.executable).with_name("tuner")
PATIENCE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a command ended."""

    status: int
    out: str
    err: str


def shape(**named: object) -> dict[str, object]:
    """A row of a shapes file, as small as the interpreter likes it."""
    return {"op": SPEC.name, "T": 16, "H": 1, "HV": 2, "K": 16, "dtype": "fp32", "forms": [FORM]} | named


def shapes_file(folder: Path, *rows: Mapping[str, object]) -> Path:
    """A shapes file."""
    file = folder / "shapes.json"
    file.write_text(json.dumps({"shapes": rows}))
    return file


def run_here(
    arguments: Sequence[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Result:
    """Run the command in this process."""
    monkeypatch.setattr(sys, "argv", ["tuner", *map(str, arguments)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    return Result(status=int(caught.value.code or 0), out=out, err=err)


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start the command in a process of its own; Ctrl-C reaches it however this one was started."""
    return subprocess.Popen(
        [TUNER, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def finish(process: subprocess.Popen[str]) -> Result:
    """Wait for a started command."""
    out, err = process.communicate(timeout=PATIENCE_S)
    return Result(status=process.returncode, out=out, err=err)


def rows(file: Path) -> int:
    """Decisions in a file; 0 where there is none yet."""
    try:
        connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
        try:
            return int(connection.execute("select count(*) from decisions").fetchone()[0])
        finally:
            connection.close()
    except sqlite3.OperationalError:
        return 0


def wait_for_rows(file: Path, wanted: int, process: subprocess.Popen[str]) -> None:
    """Wait until a running command has stored so many decisions."""
    deadline = time.monotonic() + PATIENCE_S
    while rows(file) < wanted:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
