"""What stands between a kernel and an NPU: versions that go together, a compiler that says its own, variables."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from layout_tuner.device import interpreter, software
from layout_tuner.errors import UnsupportedProblemError

# Where torch has no such device, there is none to name either.
NPU = SimpleNamespace(type="npu")


@pytest.fixture(autouse=True)
def _asked_anew():
    software.compiler_version.cache_clear()
    yield
    software.compiler_version.cache_clear()


@pytest.mark.parametrize(
    ("triton_ascend", "cann", "said"),
    [
        ("3.2.0", "8.5.0", ""),
        ("3.2.0", "8.5.RC1", ""),
        ("3.2.1", "9.0.0", ""),
        ("3.2.2", "9.1.RC1.alpha001", ""),
        ("3.2.0", "9.1.0", "triton-ascend 3.2.0 goes with CANN 8.5, here is CANN 9.1.0"),
        ("3.2.0", "9.1.0", "or triton-ascend 3.2.2, which goes with CANN 9.1"),
        ("3.2.0", "8.3.RC1", "Install CANN 8.5; clear Triton's cache"),
        ("3.2.1.dev20260101", "8.5.0", "or triton-ascend 3.2.0, which"),
        ("9.9.9", "8.5.0", ""),
        ("", "8.5.0", ""),
        ("3.2.0", "unknown", ""),
    ],
)
def test_a_pair_that_was_not_made_for_each_other_is_said(triton_ascend: str, cann: str, said: str) -> None:
    fault = software.pair_fault(triton_ascend, cann)
    assert (said in fault) if said else not fault


def test_the_readme_names_the_pairs() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    for triton_ascend, cann in software.PAIRS.items():
        assert f"| {triton_ascend} | {cann} |" in text


def program(folder: Path, text: str) -> None:
    made = folder / software.COMPILER
    made.write_text(f"#!/bin/sh\n{text}\n")
    made.chmod(0o755)


def test_the_compiler_is_asked_for_its_version(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert software.compiler_version() == ""
    software.compiler_version.cache_clear()
    program(tmp_path, "echo 'bishengir-compile  1.2.0 (abc 2026)'; echo llvm 19")
    assert software.compiler_version() == "bishengir-compile 1.2.0 (abc 2026)"
    assert software.npu_facts()["bishengir"] == "bishengir-compile 1.2.0 (abc 2026)"


def test_a_compiler_that_does_not_answer_is_no_reason_to_wait(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(software, "COMPILER_ANSWERS_S", 0.2)
    program(tmp_path, "exec sleep 20")
    assert software.compiler_version() == ""
    assert "does not say its version" in caplog.text


@pytest.mark.parametrize("name", software.STEERING)
def test_a_variable_that_changes_what_runs_is_a_fact_where_it_does(monkeypatch, name):
    monkeypatch.setenv(name, software.STEERING[name][0])
    assert name not in software.npu_facts()
    monkeypatch.setenv(name, "2")
    assert software.npu_facts()[name] == "2"


@pytest.mark.parametrize("name", software.DEAF)
@pytest.mark.parametrize("value", ["1", "True"])
def test_variables_that_keep_kernels_from_running_are_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedProblemError, match=f"chunk_fwd_o: {name}={value} is set: .*launches nothing"):
        interpreter.require_running("chunk_fwd_o", "float32", NPU)
    interpreter.require_running("chunk_fwd_o", "float32", torch.device("cpu"))
    monkeypatch.setenv(name, "0")
    interpreter.require_running("chunk_fwd_o", "float32", NPU)
