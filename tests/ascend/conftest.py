"""The Ascend toolchain for tests that need it, or the reason it is missing."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from layout_tuner.ascend.compile.compiler import Compiler
from layout_tuner.ascend.compile.toolchain import (
    NativeTools,
    Toolchain,
    find_native_tools,
    find_toolchain,
)
from layout_tuner.ascend.native.execution import NativeRunner
from layout_tuner.ascend.targets import target_named
from layout_tuner.errors import ConfigError

CACHE = Path(__file__).parents[2] / ".cache" / "ascend"


@pytest.fixture(scope="session")
def toolchain() -> Toolchain:
    """The toolchain, wherever `make ascend` or the environment put it."""
    try:
        return find_toolchain(os.environ.get("LAYOUT_TUNER_TEST_ASCEND_PYTHON") or None)
    except ConfigError as error:
        pytest.skip(f"needs the Ascend compiler, which `make ascend` installs: {error}")


@pytest.fixture(scope="session")
def native_tools() -> NativeTools:
    """Upstream MLIR and clang."""
    try:
        return find_native_tools()
    except ConfigError as error:
        pytest.skip(f"after `make ascend`: {error}")


@pytest.fixture(scope="session")
def compiler_for(toolchain: Toolchain) -> Iterator[Callable[[str], Compiler]]:
    """Compilers by SoC name, shared by the session."""
    made: dict[str, Compiler] = {}

    def get(name: str) -> Compiler:
        if name not in made:
            # One worker: the test process counts what it made while it makes the next.
            made[name] = Compiler(toolchain, target_named(name), cache=CACHE, processes=1)
        return made[name]

    yield get
    for compiler in made.values():
        compiler.close()


@pytest.fixture(scope="session")
def compiler(compiler_for: Callable[[str], Compiler]) -> Compiler:
    """The compiler for Ascend910B3."""
    return compiler_for("Ascend910B3")


@pytest.fixture(scope="session")
def runner(compiler: Compiler, native_tools: NativeTools) -> NativeRunner:
    """Native execution of what the front end makes for Ascend910B3."""
    return NativeRunner(compiler, native_tools, CACHE / "native")


@pytest.fixture(scope="session")
def sample() -> ModuleType:
    """Small kernels, loaded by path as a module of no package."""
    spec = importlib.util.spec_from_file_location("sample_kernels", Path(__file__).with_name("sample_kernels.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
