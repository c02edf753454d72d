"""Compiles the simulator's C++ part, once per source, compiler flags and torch build.

The compiler is called directly. `torch.utils.cpp_extension.load` guards its build folder with a lock file that
a killed build leaves behind, on which every later build waits for ever, and it needs ninja. Here each build
works in a folder of its own and a finished library is renamed to its final name: nothing waits for anything,
and a name that exists is complete.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("npu_sim.cpp")
CACHE = Path(__file__).parents[2] / ".cache" / "npu_sim"
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared")


def compiler() -> str | None:
    """The C++ compiler (`$CXX`, else c++, else g++), or None where there is none."""
    candidates = (cpp_extension.get_cxx_compiler(), "g++")
    return next((found for name in candidates if (found := shutil.which(name))), None)


def library(cache: Path = CACHE) -> Path:
    """The compiled library; compiles it where that has not been done yet (about 20 s).

    Raises:
        RuntimeError: There is no C++ compiler, or it fails; the message holds what it said.
    """
    what = (SOURCE.read_bytes().hex(), *FLAGS, torch.__version__, str(torch.version.git_version), platform.machine())
    name = f"npu_sim-{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}.so"
    target = cache / name
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _compile(target)
    return target


def _compile(target: Path) -> None:
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("the simulated npu device needs a C++ compiler: none found (tried $CXX, c++, g++)")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        output = Path(scratch) / target.name
        command = [cxx, *FLAGS, str(SOURCE), "-o", str(output)]
        command += [f"-I{path}" for path in cpp_extension.include_paths()]
        command += [f"-L{path}" for path in cpp_extension.library_paths()]
        command += ["-lc10", "-ltorch_cpu", "-ltorch"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"compiling {SOURCE.name} failed:\n{done.stderr}")
        os.replace(output, target)
