"""The class of a failure and the line that says why, from the texts that compilers and runtimes print."""

import subprocess

import pytest
import torch
from compilers import compiler_error
from triton.compiler.errors import CompilationError
from triton.runtime.errors import InterpreterError, OutOfResources, PTXASError

from layout_tuner.device.failures import classify, fatal, first_line

SOURCE = "build/CMakeFiles/torch_npu.dir/compiler_depend.ts"
SYNCHRONIZE = (
    f"synchronize:{SOURCE}:361 NPU function error: "
    "c10_npu::acl::AclrtSynchronizeStreamWithTimeout(stream()), error code is 507011\n"
    "[ERROR] 2025-04-29-18:46:11 (PID:1066924, Device:1, RankID:-1) ERR00100 PTA call acl api failed\n"
    "[Error]: The model execution failed."
)
VECTOR = (
    f"operator():{SOURCE}:25 NPU function error: c10_npu::acl::AclrtSynchronizeStreamWithTimeout(copy_stream), "
    "error code is 507035\n[ERROR] 2025-04-29-18:46:11 (PID:1066924, Device:1, RankID:-1) ERR00100 PTA call acl api "
    "failed\n[Error]: The vector core execution is abnormal."
)
QUEUE = (
    "The Inner error is reported as above. The process exits for this inner error, and the current working operator "
    "name is MatMul.\nSince the operator is called asynchronously, the stacktrace may be inaccurate.\n"
    "[ERROR] 2025-04-29-18:46:11 (PID:1066924, Device:1, RankID:-1) ERR00100 PTA call acl api failed."
)
PARAMETER = f"call:{SOURCE}:10 OPS function error: Equal, error code is 561103 ERR01002 OPS invalid type"
MEMORY = (
    "NPU out of memory. Tried to allocate 5.03 GiB (NPU 3; 60.96 GiB total capacity; 49.47 GiB already allocated)"
    f"\n[ERROR] ERR00006 PTA memory error: {SOURCE}"
)
UB = 'loc("k.py":11:4): error: ub overflow, requires 1908736 bits while 1572864 bits available! (possible reason: ...)'
PIPELINE = 'loc("k.py":11:0): error: Failed to run the pipeline'


def raised_from(error: Exception, cause: Exception) -> Exception:
    try:
        raise error from cause
    except Exception as made:
        return made


class Killed(subprocess.CalledProcessError):
    def __init__(self, status: int) -> None:
        super().__init__(status, ["bishengir-compile", "kernel.ttadapter.mlir"], b"", b"")


TOO_MUCH = OutOfResources(245760, 232448, "shared memory")
STALE = OSError(116, "Stale file handle", "/cache/torch_compile_cache/x/k.so")
FULL = OSError(28, "No space left on device", "/home/user/.triton/compiled")
NETWORK = TimeoutError(110, "Connection timed out", "/nfs/k.so")
ILLEGAL = "CUDA error: an illegal memory access was encountered"
WORDS = "could not compile, stack overflow in the plug-in"
TO_BINARY = "ConvertLinalgRToBinary"
CRASH = "PLEASE submit a bug report to the vendor and include the crash backtrace."


@pytest.mark.parametrize(
    ("error", "failure", "line"),
    [
        # A runtime's errors, whatever files they name.
        (RuntimeError(SYNCHRONIZE), "device", SYNCHRONIZE.splitlines()[0]),
        (RuntimeError(VECTOR), "device", VECTOR.splitlines()[0]),
        (RuntimeError(QUEUE), "device", QUEUE.splitlines()[0]),
        (RuntimeError(PARAMETER), "device", PARAMETER),
        (RuntimeError(f"{ILLEGAL}\nCompile with `TORCH_USE_CUDA_DSA`"), "device", ILLEGAL),
        (RuntimeError(WORDS), "device", WORDS),
        # Memory, whatever class it comes in.
        (RuntimeError(MEMORY), "memory", MEMORY.splitlines()[0]),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "memory", "Triton Error [CUDA]: out of memory"),
        (torch.OutOfMemoryError("tried to allocate 80 GiB"), "memory", "tried to allocate 80 GiB"),
        (MemoryError(), "memory", "no message"),
        (raised_from(InterpreterError("MemoryError()"), MemoryError()), "memory", "MemoryError()"),
        # Files, numbers, waits.
        (STALE, "device", str(STALE)),
        (FULL, "device", str(FULL)),
        (NETWORK, "device", str(NETWORK)),
        (OverflowError("int too big to convert"), "device", "int too big to convert"),
        (TimeoutError("no result within its time"), "timeout", "no result within its time"),
        # Compilers.
        (TOO_MUCH, "overflow", str(TOO_MUCH)),
        (PTXASError("failed with error code 255\nfatal"), "compile", "PTXAS error: failed with error code 255"),
        (PTXASError("`ptxas` raised SIGSEGV\n"), "crash", "PTXAS error: `ptxas` raised SIGSEGV"),
        (PTXASError("failed with error code -9\n"), "crash", "PTXAS error: failed with error code -9"),
        (RuntimeError("PassManager::run failed"), "compile", "PassManager::run failed"),
        (CompilationError("def k():", None, "NameError('y')"), "compile", "def k():"),
        (compiler_error(TO_BINARY, f"{PIPELINE}\n{UB}\n"), "overflow", UB),
        (compiler_error(TO_BINARY, f"[NOTE] trying again\n{PIPELINE}\n"), "compile", PIPELINE),
        (compiler_error("MLIRCompile", "", RuntimeError("PassManager::run failed")), "compile", "[INFO]: The compiled "
         "kernel cache is in ~/.triton"),
        (compiler_error(TO_BINARY, CRASH), "crash", CRASH),
        (compiler_error(TO_BINARY, "a note", Killed(-11)), "crash", "a note"),
        (compiler_error(TO_BINARY, "a note", Killed(-9)), "crash", "a note"),
        (compiler_error(TO_BINARY, "a note", Killed(134)), "crash", "a note"),
        # What triton-ascend wraps although it is no compiler's.
        (compiler_error(TO_BINARY, str(FULL), FULL), "device", str(FULL)),
        (compiler_error(TO_BINARY, QUEUE, RuntimeError(QUEUE)), "device", QUEUE.splitlines()[0]),
        (Killed(1), "device", str(Killed(1))),
        (raised_from(InterpreterError("ValueError()"), ValueError("shape")), "device", "ValueError()"),
        (ValueError(""), "device", "no message"),
    ],
)  # fmt: skip
def test_the_class_comes_from_types_and_codes(error: Exception, failure: str, line: str) -> None:
    assert classify(error) == failure
    assert first_line(error) == line


def test_a_compilers_place_comes_with_what_is_wrong_there() -> None:
    error = RuntimeError("at 12:8:\ndef kernel(x):\n    tl.load(y)\n            ^\nNameError('y is not defined')")
    assert first_line(error) == "at 12:8: NameError('y is not defined')"


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (SYNCHRONIZE, True),
        (VECTOR, True),
        (QUEUE, True),
        (PARAMETER, False),
        (MEMORY, False),
        ("CUDA error: an illegal memory access was encountered", True),
        ("Triton Error [CUDA]: an illegal memory access was encountered", True),
        ("Triton Error [CUDA]: invalid argument", False),
        ("CUDA error: out of memory", False),
        ("illegal instruction", False),
    ],
)
def test_which_errors_end_a_process_use_of_the_device(text: str, lost: bool) -> None:
    assert fatal(RuntimeError(text)) is lost
    assert fatal(raised_from(InterpreterError("RuntimeError"), RuntimeError(text))) is lost
