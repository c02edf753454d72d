"""What is said of installations that do not work, on folders as pip leaves them."""

import base64
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import run_here

from layout_tuner import installation
from layout_tuner.device import driver, interpreter
from layout_tuner.errors import InstallationError, UnsupportedProblemError

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Lets distributions be found, ahead of all that is installed, with their files as a wheel's record lists them."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(installation, "loadable", lambda library: True)

    def add(name: str, version: str, files: dict[str, str] | None = None) -> None:
        record = []
        for path, text in (files or {}).items():
            place = tmp_path / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(text)}")
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (folder / "RECORD").write_text("\n".join(record))

    return add


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets installed distributions seem not to be."""
    version = installation.version

    def hide(*names: str) -> None:
        monkeypatch.setattr(installation, "version", lambda name: "" if name in names else version(name))

    return hide


def said() -> str:
    return "\n".join(map(str, installation.faults()))


def test_this_environment_is_sound() -> None:
    assert installation.faults() == []


def test_two_tritons_in_one_folder(install: Install) -> None:
    install("triton", "3.6.0")
    install("triton-ascend", "3.2.0")
    assert "triton 3.6.0 and triton-ascend 3.2.0 are both installed" in said()
    assert 'pip uninstall -y triton triton-ascend, then pip install --no-deps "triton-ascend==3.2.0"' in said()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="triton-ascend is for Python 3.11 and older")
def test_a_triton_ascend_whose_files_went_with_triton(install: Install, hidden, tmp_path: Path) -> None:
    """As after installing `triton` over it and uninstalling that again."""
    hidden("triton")
    install(
        "triton-ascend", "3.2.0", {"triton/__init__.py": "one", "triton/language.py": "two", "triton/x.so": "three"}
    )
    assert "triton-ascend 3.2.0 are missing" not in said()
    (tmp_path / "triton" / "__init__.py").unlink()
    (tmp_path / "triton" / "language.py").write_text("another's")
    assert "2 files of triton-ascend 3.2.0 are missing or another package's" in said()


def test_a_python_without_a_triton_ascend(install: Install, hidden, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden("triton", "triton-ascend", "torch")
    install("torch_npu", "2.7.1.post2")
    monkeypatch.setattr(installation.sys, "version_info", (3, 12, 1, "final", 0))
    assert "triton-ascend has wheels for 3.11 and older only: make the environment with python3.11" in said()
    monkeypatch.setattr(installation.sys, "version_info", (3, 11, 7, "final", 0))
    assert 'torch_npu 2.7.1.post2 is here without triton-ascend: pip install -e ".[npu]"' in said()


def test_a_plain_triton_beside_torch_npu(install: Install, hidden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation.sys, "version_info", (3, 11, 7, "final", 0))
    hidden("triton-ascend", "torch")
    install("triton", "3.6.0")
    install("torch_npu", "2.7.1")
    assert "triton 3.6.0 runs on no NPU: pip uninstall -y triton, then pip install" in said()


def test_what_triton_ascend_needs_and_does_not_name(install: Install, hidden, monkeypatch) -> None:
    hidden("triton", "torch")
    install("triton-ascend", "3.2.0")
    install("torch_npu", "2.7.1")
    find = object()
    monkeypatch.setattr(
        installation.importlib.util, "find_spec", lambda name: find(name) if name != "pybind11" else None
    )
    monkeypatch.setattr(installation.shutil, "which", lambda name: None)
    assert "pip install pybind11" in said() and "install g++ or clang++" in said()


@pytest.mark.parametrize(
    ("torch_version", "fault"),
    [("2.7.1+cpu", ""), ("2.7.1", ""), ("2.13.0+cpu", "torch_npu 2.7.1.post2 is made for torch 2.7.1")],
)
def test_torch_and_torch_npu_go_together(install: Install, torch_version: str, fault: str) -> None:
    install("torch", torch_version)
    install("torch_npu", "2.7.1.post2")
    assert (fault in said()) if fault else ("is made for torch" not in said())


def test_cann_that_is_not_found(install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install("torch_npu", "2.7.1")
    monkeypatch.setattr(installation, "loadable", lambda library: False)
    monkeypatch.setattr(installation, "HOMES", (str(tmp_path / "Ascend"),))
    assert "needs CANN, of which there is nothing in" in said() and "pip uninstall torch_npu" in said()
    monkeypatch.setenv("ASCEND_HOME_PATH", "/somewhere/else")
    assert "ASCEND_HOME_PATH is /somewhere/else, where no CANN can be loaded" in said()
    script = tmp_path / "Ascend" / "ascend-toolkit" / "set_env.sh"
    script.parent.mkdir(parents=True)
    script.touch()
    assert f"source {script} in the shell that starts Python" in said()


# -- where it is said --------------------------------------------------------------------------------------------

# What `import torch` comes to where torch_npu is installed and CANN is not found.
BROKEN = """
try:
    raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")
except ImportError as error:
    raise RuntimeError("Failed to load the backend extension: torch_npu. You can disable auto-loading") from error
"""


@pytest.mark.parametrize("package", ["torch", "triton"])
@pytest.mark.parametrize(
    "statement",
    [
        "import layout_tuner.ops",
        "from layout_tuner import ops",
        "import layout_tuner; layout_tuner.enable()",
        "import sys; sys.argv = ['tuner', 'warmup', '--shapes', 'x']; from layout_tuner.cli import main; main()",
    ],
)
def test_what_cannot_be_imported_says_why_and_what_to_do(install, tmp_path, package: str, statement: str) -> None:
    install("torch_npu", "2.7.1")
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(BROKEN)
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\n"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    if statement.endswith("enable()") and package == "triton":
        assert done.returncode == 0, "enabling imports no kernel"
        return
    assert done.returncode == 1
    last = done.stderr[done.stderr.rindex("ImportError: libhccl.so") :]
    assert "cann: torch_npu 2.7.1 needs CANN" in last and "triton: torch_npu 2.7.1 is here without" in last
    assert "main()" not in statement or "Traceback" not in done.stderr


def test_a_folder_whose_files_went_with_another_package_says_so(install, tmp_path) -> None:
    install("triton-ascend", "3.2.0", {"triton/__init__.py": "one"})
    (tmp_path / "triton" / "__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", "import layout_tuner.ops"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "InstallationError: AttributeError: module 'triton' has no attribute 'jit'" in done.stderr
    assert "pip uninstall -y triton triton-ascend" in done.stderr


def test_the_self_test_says_why_torch_cannot_be_imported(install, tmp_path, monkeypatch, capsys) -> None:
    install("torch_npu", "2.7.1")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(BROKEN)
    monkeypatch.setattr(installation, "loadable", lambda library: False)
    monkeypatch.setattr(installation, "HOMES", ())
    done = run_here(["selftest"], monkeypatch, capsys)
    text = " ".join(done.out.split())
    assert done.status == 1 and "self-test on no device" in text
    assert "status 1: ImportError: libhccl.so: cannot open shared object file" in text
    assert "install CANN's toolkit and source its set_env.sh" in text


def test_an_error_that_the_installation_is_not_at_fault_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installation.explained(ImportError("x")) is None
    fault = installation.Fault(subject="triton", text="t", cure="c")
    monkeypatch.setattr(installation, "faults", lambda: [fault])
    told = installation.explained(ImportError("x\ny"))
    assert isinstance(told, InstallationError) and isinstance(told, ImportError)
    assert str(told) == "ImportError: x\ntriton: t: c"


def test_the_doctor_says_it_too(monkeypatch, capsys, tmp_path) -> None:
    sound = run_here(["doctor", "--config", _settings(tmp_path)], monkeypatch, capsys)
    assert "installation nothing is in the way" in " ".join(sound.out.split())
    fault = installation.Fault(subject="triton", text="both are installed", cure="uninstall one")
    monkeypatch.setattr(installation, "faults", lambda: [fault])
    done = run_here(["doctor", "--config", _settings(tmp_path)], monkeypatch, capsys)
    assert done.status == 1 and "triton       both are installed: uninstall one" in done.out
    done = run_here(["doctor", "--json", "--config", _settings(tmp_path)], monkeypatch, capsys)
    assert json.loads(done.out)["findings"][0] == {
        "level": "error", "subject": "triton", "text": "both are installed: uninstall one"
    }  # fmt: skip


def _settings(folder: Path) -> Path:
    file = folder / "tuner.toml"
    file.write_text(f'[cache]\npath = "{folder / "decisions.sqlite"}"\n')
    return file


@pytest.mark.parametrize(("kind", "target"), [("npu", ""), ("npu", "cuda"), ("cuda", "")])
def test_a_triton_without_a_driver_for_the_device_is_said_before_a_launch(monkeypatch, kind: str, target: str) -> None:
    monkeypatch.setattr(interpreter, "interpreting", lambda: False)
    monkeypatch.setattr(driver, "launch_target", lambda: target)
    driver.launches_on.cache_clear()
    with pytest.raises(UnsupportedProblemError, match=f"finds no {kind} device") as caught:
        interpreter.require_running("op", "float32", SimpleNamespace(type=kind))
    assert ("set_env.sh" in str(caught.value)) == (kind == "npu")
    driver.launches_on.cache_clear()
