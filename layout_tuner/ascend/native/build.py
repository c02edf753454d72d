"""Run the front end's output on this machine, without an NPU.

triton-ascend's linalg text is what Ascend's compiler gets. Upstream MLIR 19 can lower the same text to LLVM, so a
kernel's arithmetic is checked at full size and with bf16 done right, in a fraction of the interpreter's time. What
the Ascend compiler does after that (tiling, memory, synchronisation) is not exercised.
"""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ...errors import LayoutTunerError
from ..compile.compiler import Request
from ..compile.toolchain import NativeTools

_RUNTIME: Final = Path(__file__).with_name("host_runtime.c")
_TIMEOUT_S: Final = 300.0

_TO_MEMREFS: Final = (
    "--canonicalize",
    "--linalg-generalize-named-ops",
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true allow-unknown-ops=true "
    "bufferize-function-boundaries=true function-boundary-type-conversion=identity-layout-map",
    "--canonicalize",
)
_TO_LLVM: Final = (
    "--convert-linalg-to-loops",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--arith-expand=include-bf16=true",
    "--convert-arith-to-llvm",
    "--memref-expand",
    "--convert-vector-to-llvm",
    "--convert-index-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--lower-affine",
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
)
# No contraction: a fused multiply-add would round differently from the separate operations of the text.
_CLANG: Final = ("-O2", "-w", "-march=native", "-shared", "-fPIC", "-ffp-contract=off")

_SCALARS: Final[Mapping[str, Any]] = {
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
    "i1": ctypes.c_bool,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
}
_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "i8": torch.int8,
    "i32": torch.int32,
    "i64": torch.int64,
}


class NativeBuildError(LayoutTunerError):
    """Upstream MLIR does not take the front end's output."""


class NativeKernel:
    """A kernel built for this machine.

    Args:
        library: The shared object.
        request: What it was lowered from.
    """

    def __init__(self, library: Path, request: Request) -> None:
        self._library = ctypes.CDLL(str(library))
        self._function = getattr(self._library, request.kernel.rpartition(".")[2])
        self._function.restype = None
        self._types = {name: request.signature[name] for name in request.arguments}

    def run(self, arguments: Mapping[str, Any], grid: int) -> None:
        """Run every program of a launch.

        Args:
            arguments: Tensors on the CPU and numbers, by name; those the compiled kernel does not have are ignored.
            grid: Programs.

        Raises:
            TypeError: an argument is not of the type it was compiled for.
        """
        # The lock and the workspace, which Ascend's compiler adds the use of.
        values = [*_memref(None), *_memref(None)]
        for name, kind in self._types.items():
            value = arguments[name]
            if kind is None or not kind.startswith("*"):
                values.append(_SCALARS[str(kind)](value))
                continue
            if not isinstance(value, torch.Tensor) or value.dtype != _DTYPES[kind[1:]] or value.device.type != "cpu":
                raise TypeError(f"{name}: wanted a {kind[1:]} tensor on the CPU, got {_describe(value)}")
            values += _memref(value)
        size = [ctypes.c_int32(extent) for extent in (grid, 1, 1)]
        for program in range(grid):
            self._function(*values, *size, ctypes.c_int32(program), ctypes.c_int32(0), ctypes.c_int32(0))
            self._library.scratch_reset()


def _memref(tensor: torch.Tensor | None) -> list[Any]:
    """The five words of a one-dimensional memref: allocated and aligned address, offset, size, stride."""
    address = ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())
    elements = 0 if tensor is None else tensor.untyped_storage().nbytes() // tensor.element_size()
    return [address, address, ctypes.c_int64(0), ctypes.c_int64(elements), ctypes.c_int64(1)]


def _describe(value: object) -> str:
    return f"{value.dtype} on {value.device}" if isinstance(value, torch.Tensor) else type(value).__name__


def build(linalg: str, request: Request, tools: NativeTools, cache: Path) -> NativeKernel:
    """Build a kernel's linalg text for this machine, or take it from the cache.

    Args:
        linalg: The front end's output.
        request: What it was lowered from.
        tools: Upstream MLIR and clang.
        cache: Folder of the shared objects.

    Raises:
        NativeBuildError: a step failed; says which and why.
    """
    text = _upstream(linalg)
    runtime = _RUNTIME.read_bytes()
    key = hashlib.sha256(repr((text, runtime, _TO_MEMREFS, _TO_LLVM, _CLANG, os.uname().machine)).encode()).hexdigest()
    library = cache / f"{key}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            os.replace(_build(text, tools, Path(folder)), library)
    return NativeKernel(library, request)


def _build(text: str, tools: NativeTools, folder: Path) -> Path:
    (folder / "kernel.mlir").write_text(text)
    opt = [str(tools.mlir_opt), "--allow-unregistered-dialect", "--mlir-disable-threading"]
    _run([*opt, "kernel.mlir", *_TO_MEMREFS, "-o", "memrefs.mlir"], folder)
    _run([*opt, "memrefs.mlir", *_TO_LLVM, "-o", "llvm.mlir"], folder)
    _run([str(tools.mlir_translate), "--mlir-to-llvmir", "llvm.mlir", "-o", "kernel.ll"], folder)
    llvm = (folder / "kernel.ll").read_text()
    # Only names change: the text's own allocations go to the runtime's scratch memory.
    llvm = llvm.replace("@malloc(", "@scratch_malloc(").replace("@free(", "@scratch_free(")
    (folder / "kernel.ll").write_text(llvm)
    _run([str(tools.clang), *_CLANG, "kernel.ll", str(_RUNTIME), "-lm", "-o", "kernel.so"], folder)
    return folder / "kernel.so"


def _upstream(linalg: str) -> str:
    """The text as upstream MLIR reads it."""
    # Upstream may write to a `writable` tensor in place although its memory is read again.
    text = linalg.replace(" restrict writable", " restrict")
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("gpu.barrier"))


def _run(command: list[str], folder: Path) -> None:
    try:
        result = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise NativeBuildError(f"{Path(command[0]).name} took more than {_TIMEOUT_S:.0f} s") from None
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()[-1:]
        raise NativeBuildError(f"{Path(command[0]).name}: {errors[0] if errors else result.returncode}")
