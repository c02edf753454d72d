"""Tests on the simulated `npu` device. They need a pytest process of their own:

    LAYOUT_TUNER_TEST_NPU=1 pytest tests/npu

because the device renames PyTorch's PrivateUse1 backend for the whole process. Without the variable nothing here is
collected, so that a plain `pytest` passes by.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parents[1]
DEVICES = 2
ENABLED = os.environ.get("LAYOUT_TUNER_TEST_NPU") == "1"

collect_ignore_glob = [] if ENABLED else ["test_*.py"]

# Triton decides while it is imported whether kernels are interpreted; test modules import it.
_interpret_was_set = "TRITON_INTERPRET" in os.environ
if ENABLED:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    if ENABLED:  # numpy says so of the interpreter's own code; as an error it would fail every kernel
        config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim:DeprecationWarning")


def pytest_unconfigure() -> None:
    if ENABLED and not _interpret_was_set:
        os.environ.pop("TRITON_INTERPRET", None)


def _load_sim() -> ModuleType:
    """`npu_sim.sim`, loaded by path: `tests` on sys.path would make its folders importable as packages."""
    if "npu_sim" not in sys.modules:
        folder = TESTS / "npu_sim"
        spec = importlib.util.spec_from_file_location("npu_sim", folder / "__init__.py")
        assert spec is not None and spec.loader is not None
        sys.modules["npu_sim"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return importlib.import_module("npu_sim.sim")


@pytest.fixture(scope="session")
def _installed_sim() -> ModuleType:
    sim = _load_sim()
    if reason := sim.unsupported_reason():
        pytest.skip(reason)
    sim.install(devices=DEVICES)
    sim.attach_triton()
    return sim


@pytest.fixture(autouse=True)
def sim(_installed_sim: ModuleType) -> Iterator[ModuleType]:
    """The simulated device, in its state after installation."""
    _installed_sim.reset()
    yield _installed_sim
    _installed_sim.reset()


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a snippet in a Python process of its own, with `npu_sim` importable there."""

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "PYTHONPATH": str(TESTS), **environment}
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, check=False)

    return run
