"""What triton-ascend's compiler raises, for machines that have Triton itself."""

import subprocess

MARKER = "///------------------[ERROR][Triton][BEG]------------------"
END = "///------------------[ERROR][Triton][END]------------------"


class TritonError(Exception):
    """As `triton.errors.TritonError`."""


class MLIRCompilationError(TritonError):
    """As triton-ascend 3.2.0's, which wraps whatever a stage raises; `tests/ascend` compares it with the real one."""

    def __init__(self, stage_name: str, message: str) -> None:
        self.message = f"\n{MARKER}\n[{stage_name}] encounters error:\n{message}{END}\n"

    def __str__(self) -> str:
        return self.message


MLIRCompilationError.__module__ = "triton.compiler.errors"


def compiler_error(stage: str, stderr: str, cause: Exception | None = None) -> MLIRCompilationError:
    """The error of a stage, as triton-ascend raises it while it handles another.

    Args:
        stage: Name of the stage.
        stderr: What the compiler said.
        cause: What the stage raised; None means that the compiler ended with status 1.
    """
    try:
        raise cause or subprocess.CalledProcessError(1, ["bishengir-compile"], b"", stderr.encode())
    except Exception:
        try:
            raise MLIRCompilationError(stage, stderr + "\n\n[INFO]: The compiled kernel cache is in ~/.triton\n\n")
        except MLIRCompilationError as error:
            return error
