"""How a command ends when something around it is wrong: one clear line, an exit status, and no traceback."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from cache_records import Make
from command import TUNER, Result, run_here
from layout_tuner.cache.faults import Fault, StoreError
from layout_tuner.cache.sqlite.file import Store

import layout_tuner.cli
from layout_tuner.errors import ConfigError
from layout_tuner.files import read_file

Tuner = Callable[..., Result]


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Tuner:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run_here(arguments, monkeypatch, capsys)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "decisions.sqlite"
    make = Make()
    with contextlib.closing(Store(path)) as store:
        store.publish(make.decision(), make.environment)
    return path


# -- what is read ------------------------------------------------------------------------------------------------

DEEP = "[" * 100_000
LONG = "1" * 5000


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("deep.toml", f"x = {DEEP}"),
        ("long.toml", f"[tuning]\nmin_gain = {LONG}\n"),
        ("bytes.toml", b"\xff\xfe"),
        ("deep.json", DEEP),
        ("long.json", f'{{"shapes": [{{"T": {LONG}}}]}}'),
        ("bytes.json", b"\xff\xfe"),
        ("pipe.toml", None),
        ("pipe.json", None),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_a_file_that_cannot_be_read_is_named_in_one_line(
    name: str, content: str | bytes | None, tuner: Tuner, tmp_path: Path
) -> None:
    path = tmp_path / name
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    settings = path if path.suffix == ".toml" else tmp_path / "good.toml"
    (tmp_path / "good.toml").touch()
    done = tuner("warmup", "--shapes", path, "--config", settings, "--cache", tmp_path / "new.sqlite")
    assert (done.status, done.out) == (2, "")
    assert name in done.err
    assert "Traceback" not in done.err
    assert len(done.err) < 1000


@pytest.mark.parametrize("content", [DEEP, f'{{"format": {LONG}}}', None], ids=["deep", "long", "pipe"])
def test_a_pin_file_that_cannot_be_read_is_named_in_one_line(
    content: str | None, tuner: Tuner, file: Path, tmp_path: Path
) -> None:
    pins = tmp_path / "pins.json"
    if content is None:
        os.mkfifo(pins)
    else:
        pins.write_text(content)
    (tmp_path / "tuner.toml").write_text('[tuning]\npin = "pins.json"\n')
    done = tuner("show", "--cache", file)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"error: {pins}: ")
    assert len(done.err.splitlines()) == 1


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match=r"is no regular file|[Ii]s a (folder|directory)"):
            read_file(path)


# -- what is written ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "--cache", "none.sqlite"),
        ("cache", "export", "out.sqlite", "--cache", "none.sqlite"),
        ("cache", "import", "none.sqlite"),
        ("cache", "merge", "none.sqlite", "-o", "out.sqlite"),
        ("cache", "export"),
        ("show", "--nothing"),
        ("show", "--limit", "many"),
        ("nothing",),
        ("warmup", "--shapes", "none.json"),
        ("explain", "--shape", "T=x"),
    ],
    ids=" ".join,
)
def test_with_json_a_failure_is_an_object_on_stdout(arguments: Sequence[str], tuner: Tuner) -> None:
    done = tuner(*arguments, "--json")
    assert done.status == 2
    error = json.loads(done.out)["error"]
    assert error["status"] == 2
    assert error["message"]
    assert error["message"].splitlines()[0] in " ".join(done.err.split())


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (PermissionError(13, "Permission denied", "/root/x"), 2, "/root/x: Permission denied"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (StoreError("taken", Fault.BUSY), 1, "taken"),
        (ConfigError("one\ntwo\x1b[2J"), 2, "one\ntwo\\x1b[2J"),
    ],
    ids=["permission", "space", "busy", "config"],
)
def test_what_a_command_raises_is_one_message(
    raised: Exception, status: int, said: str, tuner: Tuner, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object, **named: object) -> None:
        raise raised

    monkeypatch.setattr("layout_tuner.cache.listing.listing", fail)
    done = tuner("show", "--cache", file)
    assert (done.status, done.out.strip(), done.err) == (status, "", f"error: {said}\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root to become somebody else")
@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "--cache", "{0}/shut/decisions.sqlite"),
        ("doctor", "--cache", "{0}/shut/decisions.sqlite"),
        ("cache", "import", "{0}/shut/decisions.sqlite", "--cache", "{0}/open/new.sqlite"),
        ("cache", "export", "{0}/shut/out.sqlite", "--cache", "{0}/open/in.sqlite"),
        ("cache", "export", "--pin", "{0}/shut/pins.json", "--cache", "{0}/open/in.sqlite"),
        ("cache", "merge", "{0}/open/in.sqlite", "-o", "{0}/shut/out.sqlite"),
        ("warmup", "--shapes", "{0}/shut/shapes.json"),
        ("show", "--config", "{0}/shut/tuner.toml"),
    ],
    ids=lambda value: " ".join(value[:3]),
)
def test_a_folder_that_may_not_be_entered_is_one_line(arguments: Sequence[str]) -> None:
    # As root first, so that all is imported: the interpreter may lie where nobody may look.
    code = """
import contextlib, io, os, sys
from layout_tuner.cli import main
sys.argv[0] = "tuner"
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    with contextlib.suppress(SystemExit):
        main()
os.setgid(65534)
os.setuid(65534)
main()
"""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        (Path(name) / "open").mkdir()
        (Path(name) / "shut").mkdir(mode=0o700)
        make = Make()
        for place in ("open/in.sqlite", "shut/decisions.sqlite"):
            with contextlib.closing(Store(Path(name) / place)) as store:
                store.publish(make.decision(), make.environment)
        os.chmod(Path(name) / "open", 0o777)
        done = subprocess.run(
            [sys.executable, "-c", code, *(each.format(name) for each in arguments)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "HOME": name},
        )
    assert done.returncode in (1, 2), done
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_reader_that_goes_away_is_no_failure_to_talk_about(file: Path) -> None:
    make = Make()
    with contextlib.closing(Store(file)) as store:
        store.absorb((make.decision(T=number + 1, host="x") for number in range(300)), [make.environment])
    process = subprocess.Popen(
        [TUNER, "show", "--json", "--cache", str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), said) == (1, b"")


def test_a_closed_stdout_is_said(file: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "{TUNER}" show --cache "{file}" >&-'], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: stdout is closed\n")


# -- Ctrl-C ------------------------------------------------------------------------------------------------------


def test_ctrl_c_while_importing_is_one_line() -> None:
    code = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
wanted = sys.argv[1]
class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == wanted:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Stop())
from layout_tuner.cli import main
sys.argv[1:] = ["show", "--cache", "none.sqlite"]
main()
"""
    for module in ("typer", "layout_tuner.cli.show", "layout_tuner.cache.layers", "sqlalchemy"):
        done = subprocess.run([sys.executable, "-c", code, module], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (130, ""), (module, done)
        assert done.stderr in ("interrupted\n", ""), module


def test_importing_the_command_leaves_ctrl_c_as_it_was() -> None:
    assert signal.getsignal(signal.SIGINT) is not layout_tuner.cli._stop
