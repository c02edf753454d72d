"""Where Ascend's compiler is, and which versions it has.

triton-ascend installs itself as `triton`, so it lives in an environment of its own, made by `make ascend`; on a
machine with an NPU the running interpreter has it. A verdict holds only for the versions it was made with, so they
go wherever a verdict goes.
"""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...errors import ConfigError
from ..targets import Target

DEFAULT_PYTHON: Final = Path(".venv-ascend/bin/python")
INSTALL: Final = "make ascend"
NATIVE_TOOLS: Final = ("mlir-opt-19", "mlir-translate-19", "clang-19")
INSTALL_NATIVE: Final = "apt-get install mlir-19-tools llvm-19 clang-19"

_PROBE_TIMEOUT_S: Final = 30.0

# Run by the candidate interpreter: what it has, as JSON. On standard error stands which command it waits for.
_PROBE: Final = """
import importlib.metadata, importlib.util, json, os, subprocess, sys
versions = {}
for name in ("triton-ascend", "ascendnpu-ir"):
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
spec = importlib.util.find_spec("ascendnpuir")
if spec is not None:
    versions["bin"] = os.path.join(os.path.dirname(spec.origin), "bin")
    for tool in ("bishengir-compile", "bishengir-compile-a5"):
        command = [os.path.join(versions["bin"], tool), "--version"]
        if not os.path.exists(command[0]):
            continue  # releases before 1.1.0 know no A5
        print(*command, file=sys.stderr, flush=True)
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        versions[tool] = " ".join(run.stdout.split("\\n")[0].split())
print(json.dumps(versions))
"""


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """A Python with triton-ascend and ascendnpu-ir.

    Attributes:
        python: The interpreter.
        triton_ascend: Version of triton-ascend, the front end.
        ascendnpu_ir: Version of ascendnpu-ir, the package of the compiler.
        folder: Where the compiler's programs are.
        compilers: Version line of the compiler for A2 and A3 targets, and of the one for A5 targets; empty where there
            is none.
    """

    python: Path
    triton_ascend: str
    ascendnpu_ir: str
    folder: Path
    compilers: tuple[str, str]

    def compiler(self, target: Target) -> Path:
        """The program that compiles for `target`.

        Raises:
            ConfigError: This release has none.
        """
        if not self.compilers[target.generation == "A5"]:
            raise ConfigError(f"ascendnpu-ir {self.ascendnpu_ir} has no compiler for {target.name}")
        return self.folder / ("bishengir-compile-a5" if target.generation == "A5" else "bishengir-compile")

    def printer(self, target: Target) -> Path:
        """The program that prints a module of `target`'s compiler."""
        return self.folder / ("bishengir-opt-a5" if target.generation == "A5" else "bishengir-opt")

    def version(self, target: Target) -> str:
        """The versions a verdict about `target` holds for, in words."""
        return f"triton-ascend {self.triton_ascend}, {self.compilers[target.generation == 'A5']}"


@dataclass(frozen=True, kw_only=True)
class NativeTools:
    """Upstream MLIR and LLVM 19, which run the front end's output on the host."""

    mlir_opt: Path
    mlir_translate: Path
    clang: Path


@functools.cache
def find_toolchain(python: str | Path | None = None) -> Toolchain:
    """The toolchain of the setting `[ascend] python`.

    Args:
        python: The interpreter that has triton-ascend. None: `.venv-ascend/bin/python` in the working directory, else
            the running interpreter.

    Raises:
        ConfigError: it is not there, or lacks a package; the message names the command that installs it.
    """
    if python is not None:
        candidates = [Path(python)]
    else:
        candidates = [path for path in (DEFAULT_PYTHON, Path(sys.executable)) if path.exists()]
    problems = []
    for candidate in candidates:
        try:
            return _probe(candidate)
        except ConfigError as error:
            problems.append(str(error))
    raise ConfigError(
        f"no Ascend toolchain: {'; '.join(problems)}. `{INSTALL}` installs it; "
        "the setting `[ascend] python` says where it is"
    )


def _probe(python: Path) -> Toolchain:
    # The path is made absolute, not resolved: a virtual environment is recognised by its own link.
    python = Path(shutil.which(python) or python).absolute()
    try:
        versions = json.loads(_run_probe(python))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{python} does not run ({error})") from None
    missing = [name for name in ("triton-ascend", "ascendnpu-ir") if name not in versions]
    if missing:
        raise ConfigError(f"{python} has no {' and no '.join(missing)}")
    return Toolchain(
        python=python,
        triton_ascend=versions["triton-ascend"],
        ascendnpu_ir=versions["ascendnpu-ir"],
        folder=Path(versions["bin"]),
        compilers=(versions["bishengir-compile"], versions.get("bishengir-compile-a5", "")),
    )


def _run_probe(python: Path) -> str:
    """What the probe prints; it and whatever it started have ended.

    Raises:
        ConfigError: It failed or did not end in time.
    """
    # Files, not pipes: a process that outlives the probe would hold a pipe open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [python, "-P", "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        timed_out = False
        try:
            process.wait(_PROBE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(0)
        lines = errors.read().decode(errors="replace").splitlines()
        said = lines[-1] if lines else ""
        if timed_out:
            raise ConfigError(f"{said or python} did not answer within {_PROBE_TIMEOUT_S:g} s and was ended")
        if process.returncode != 0:
            raise ConfigError(f"{python} does not run (exit status {process.returncode}{said and f': {said}'})")
        output.seek(0)
        return output.read().decode(errors="replace")


@functools.cache
def find_native_tools() -> NativeTools:
    """The programs that native execution needs.

    Raises:
        ConfigError: one is missing; the message names the command that installs them.
    """
    paths = {tool: shutil.which(tool) for tool in NATIVE_TOOLS}
    missing = [tool for tool, path in paths.items() if path is None]
    if missing:
        raise ConfigError(f"native execution needs {', '.join(missing)}: `{INSTALL_NATIVE}` installs them")
    opt, translate, clang = (Path(str(paths[tool])) for tool in NATIVE_TOOLS)
    return NativeTools(mlir_opt=opt, mlir_translate=translate, clang=clang)
