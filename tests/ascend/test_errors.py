"""What triton-ascend raises, against what the tests elsewhere take for it."""

import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path

import compilers
import pytest

from layout_tuner.ascend.compile.toolchain import Toolchain
from layout_tuner.ascend.targets import target_named
from layout_tuner.device.failures import classify, first_line
from layout_tuner.errors import ConfigError

pytestmark = pytest.mark.ascend

UB = 'loc("k.py":11:4): error: ub overflow, requires 1908736 bits while 1572864 bits available!'


@pytest.fixture
def raises(toolchain: Toolchain) -> Callable[[str, str], Exception]:
    """The real class of that triton-ascend: the module needs nothing of it but the base of all of Triton's errors."""
    where = "import importlib.util; print(importlib.util.find_spec('triton').submodule_search_locations[0])"
    folder = subprocess.run([toolchain.python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    name = "triton.compiler.ascend_errors"
    spec = importlib.util.spec_from_file_location(name, f"{folder}/compiler/errors.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: Callable[[str, str], Exception] = module.MLIRCompilationError
    return made


def test_a_compilers_error_is_known_for_what_it_is(raises: Callable[[str, str], Exception]) -> None:
    for text, failure, line in (
        (f"[NOTE] trying again\n{UB}\n", "overflow", UB),
        ("error: no such thing\n", "compile", "error: no such thing"),
        ("PLEASE submit a bug report\nStack dump without symbol names\n0x1\n", "crash", "PLEASE submit a bug report"),
    ):
        error = raises("ConvertLinalgRToBinary", text)
        assert (classify(error), first_line(error)) == (failure, line)
        assert str(error).split() == str(compilers.MLIRCompilationError("ConvertLinalgRToBinary", shown(text))).split()


def test_a_release_without_a_compiler_for_a5_says_so() -> None:
    older = Toolchain(
        python=Path("python"), triton_ascend="3.2.0", ascendnpu_ir="1.0.0", folder=Path("bin"), compilers=("old", "")
    )
    assert older.compiler(target_named("Ascend910B3")) == Path("bin/bishengir-compile")
    with pytest.raises(ConfigError, match=r"ascendnpu-ir 1\.0\.0 has no compiler for Ascend950PR_9589"):
        older.compiler(target_named("Ascend950PR_9589"))


def shown(text: str) -> str:
    """Of a text, what triton-ascend shows."""
    return text.partition("Stack dump without symbol names")[0]
