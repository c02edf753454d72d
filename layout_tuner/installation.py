"""Whether what is installed can work together: Triton's two distributions, torch_npu, CANN and the Python between them.

Looks at what lies on the disk and at variables, and imports neither torch nor Triton: it has to say what is wrong where
those cannot be imported. What is said here was seen in environments made for it, see `docs/install.md`.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import logging
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import config
from .errors import InstallationError

log = logging.getLogger(__name__)

# The newest Python that triton-ascend's wheels are made for.
ASCEND_PYTHON = (3, 11)
# Where CANN's installers put the file that sets its variables.
SET_ENV = ("ascend-toolkit/set_env.sh", "cann/set_env.sh", "cann-*/set_env.sh")
HOMES = ("/usr/local/Ascend", "~/Ascend")
# One of the libraries that torch_npu is linked with.
CANN_LIBRARY = "libhccl.so"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that is wrong with an installation.

    Attributes:
        subject: What it is about.
        text: What is wrong.
        cure: What to do.
    """

    subject: str
    text: str
    cure: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}: {self.cure}"


def version(distribution: str) -> str:
    """Version of an installed distribution; empty where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def faults() -> list[Fault]:
    """All that is wrong; where nothing is, kernels of this process can be imported."""
    return [*triton_faults(), *npu_faults()]


def triton_faults() -> Iterator[Fault]:
    """What is wrong with Triton: `triton` and `triton-ascend` both install the folder `triton`."""
    plain, ascend, npu = version("triton"), version("triton-ascend"), version("torch_npu")
    again = f'pip uninstall -y triton triton-ascend, then pip install --no-deps "triton-ascend=={ascend}"'
    extra = 'pip install -e ".[npu]"'
    if plain and ascend:
        text = f"triton {plain} and triton-ascend {ascend} are both installed, and each overwrites the other's files"
        yield Fault(subject="triton", text=text, cure=f'{again} for an NPU, or "triton=={plain}" elsewhere')
    elif ascend and (damaged := changed_files("triton-ascend")):
        text = f"{damaged} files of triton-ascend {ascend} are missing or another package's"
        yield Fault(subject="triton", text=text, cure=again)
    elif npu and not ascend and sys.version_info[:2] > ASCEND_PYTHON:
        newest = ".".join(map(str, ASCEND_PYTHON))
        text = f"this is Python {platform.python_version()}; triton-ascend has wheels for {newest} and older only"
        yield Fault(subject="python", text=text, cure=f"make the environment with python{newest}, then {extra}")
    elif npu and not ascend:
        text = f"torch_npu {npu} is here without triton-ascend" + (f"; triton {plain} runs on no NPU" if plain else "")
        yield Fault(subject="triton", text=text, cure=f"pip uninstall -y triton, then {extra}" if plain else extra)
    elif not plain and not ascend and importlib.util.find_spec("triton") is None:
        cure = 'pip install -e ".[npu]", ".[cuda]" or ".[cpu]", whichever this machine is'
        yield Fault(subject="triton", text="no Triton is installed", cure=cure)
    if ascend and importlib.util.find_spec("pybind11") is None:
        text = "triton-ascend imports pybind11 and does not say so"
        yield Fault(subject="pybind11", text=text, cure="pip install pybind11")


def npu_faults() -> Iterator[Fault]:
    """What is wrong around torch_npu."""
    npu, torch = version("torch_npu"), version("torch")
    if not npu:
        return
    if torch and release(npu) != release(torch):
        text = f"torch_npu {npu} is made for torch {release(npu)}, and this is torch {torch}"
        plus = "+cpu" if platform.machine() == "x86_64" else ""
        yield Fault(subject="torch", text=text, cure=f'pip install "torch=={release(npu)}{plus}"')
    if not loadable(CANN_LIBRARY):
        stated = config.variables_like("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
        files = set_env_files()
        if files:
            text = "CANN's libraries are not found: its variables are not set"
            cure = f"source {files[0]} in the shell that starts Python"
        elif stated:
            name, home = next(iter(stated.items()))
            text, cure = f"{name} is {home}, where no CANN can be loaded", "install CANN there, or correct the variable"
        else:
            text = f"torch_npu {npu} needs CANN, of which there is nothing in {' or '.join(HOMES)}"
            cure = "install CANN's toolkit and source its set_env.sh, or, without an NPU, pip uninstall torch_npu"
        yield Fault(subject="cann", text=f"{text} ({CANN_LIBRARY})", cure=cure)
    elif version("triton-ascend") and not (shutil.which("clang++") or shutil.which("g++")):
        text = "triton-ascend compiles a launcher for each kernel, and there is no C++ compiler"
        yield Fault(subject="compiler", text=text, cure="install g++ or clang++")


def release(text: str) -> str:
    """The release in a version: `2.7.1` of `2.7.1.post2` and of `2.7.1+cpu`."""
    return ".".join(part for part in text.partition("+")[0].split(".")[:3] if part.isdigit())


def loadable(library: str) -> bool:
    """Whether the loader finds a library, as it will for those linked with it."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def set_env_files() -> list[Path]:
    """The files that set CANN's variables, where its installers put them."""
    return [found for home in HOMES for name in SET_ENV for found in sorted(Path(home).expanduser().glob(name))]


def changed_files(distribution: str) -> int:
    """How many of a distribution's Python files are missing or not what its wheel held."""
    changed = 0
    for file in importlib.metadata.files(distribution) or ():
        if file.suffix != ".py" or file.hash is None:
            continue
        try:
            digest = hashlib.new(file.hash.mode, Path(str(file.locate())).read_bytes()).digest()
        except OSError:
            changed += 1
            continue
        changed += base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value
    return changed


def explained(error: BaseException) -> InstallationError | None:
    """Why something could not be imported, and what to do; None where the installation is not at fault."""
    found = faults()
    if not found:
        return None
    cause = error.__cause__ or error
    said = (str(cause).splitlines() or [""])[0]
    return InstallationError("\n".join([f"{type(cause).__name__}: {said}", *map(str, found)]))


@functools.cache
def require_kernels() -> None:
    """Import torch and Triton, or say why they cannot be imported; says once what may yet go wrong.

    Raises:
        InstallationError: One cannot be imported, and the installation is at fault.
    """
    try:
        importlib.import_module("torch")
        _ = importlib.import_module("triton").jit  # a folder whose files another package took away has none
    except Exception as error:
        if (told := explained(error)) is not None:
            raise told from error
        raise
    for fault in triton_faults():
        log.warning("%s", fault)
