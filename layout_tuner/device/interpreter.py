"""Triton's interpreter, which runs kernels on a plain CPU.

Its `tl.dot` multiplies the raw 16-bit integers of bfloat16 operands in every release tried (3.2 of triton-ascend, 3.6,
3.7.1, 3.8, 3.9); its casts to bfloat16 round towards zero. `mend_interpreter` puts both right, and
`interpreter_is_right` says whether it did.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import installation
from ..errors import UnsupportedProblemError
from ..forking import ProcessLock
from . import driver, software
from .driver import triton_distribution

# Held while the interpreter runs a kernel: Triton keeps the program that runs in globals, one for all threads.
interpreter_lock = ProcessLock()


def interpreted(kernel: object) -> bool:
    """Whether a kernel runs in the interpreter; Triton decides that when the kernel's module is imported."""
    return type(kernel).__name__ == "InterpretedFunction"


def interpreting() -> bool:
    """Whether kernels of this process run in the interpreter."""
    from layout_tuner.kernels import time_axis

    return interpreted(time_axis.locate_chunk)


@functools.cache
def mend_interpreter() -> None:
    """Let the interpreter multiply bfloat16 operands as numbers and round to bfloat16 as devices do; done once.

    Products widen their operands to fp32. Casts, and so stores, round to the nearest, ties to even; infinities and NaN
    stay what they are.
    """
    import numpy
    from triton.runtime import interpreter

    builder, tl = interpreter.InterpreterBuilder, interpreter.tl
    plain_dot, plain_cast, plain_fp_to_fp = builder.create_dot, builder.cast_impl, builder.create_fp_to_fp

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:  # which the interpreter stores as its 16 bits
            return handle
        wide = (handle.data.astype(numpy.uint32) << 16).view(numpy.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    def rounded(values: Any) -> Any:
        near = torch.from_numpy(numpy.array(values, dtype=numpy.float32)).to(torch.bfloat16)
        return interpreter.TensorHandle(near.view(torch.int16).numpy().view(numpy.uint16), tl.bfloat16)

    @functools.wraps(plain_dot)
    def create_dot(self: Any, a: Any, b: Any, *rest: Any, **named: Any) -> Any:
        return plain_dot(self, widened(a), widened(b), *rest, **named)

    @functools.wraps(plain_cast)
    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        wide = widened(src)
        return rounded(wide.data) if dst_type.scalar == tl.bfloat16 else plain_cast(self, wide, dst_type)

    @functools.wraps(plain_fp_to_fp)
    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if dst_type.scalar == tl.bfloat16 and "RTZ" not in str(rounding_mode):
            return cast_impl(self, src, dst_type)
        return plain_fp_to_fp(self, src, dst_type, rounding_mode)

    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = create_dot, cast_impl, create_fp_to_fp


@functools.cache
def interpreter_is_right() -> bool:
    """Whether this process's interpreter multiplies bfloat16 and rounds to it as devices do; runs one small kernel."""
    from layout_tuner.kernels import probe

    mend_interpreter()
    generator = torch.Generator("cpu").manual_seed(0)
    a, b = (torch.randn(16, 16, generator=generator, dtype=torch.float32, device="cpu").bfloat16() for _ in range(2))
    product = torch.full((16, 16), float("nan"), dtype=torch.float32, device="cpu")
    stored = product.to(torch.bfloat16)
    with interpreter_lock:
        probe.dot_probe[(1,)](a, b, product, stored, N=16)
    wanted = a.float() @ b.float()
    return bool((product - wanted).norm() <= 1e-2 * wanted.norm()) and torch.equal(stored, product.to(torch.bfloat16))


def no_driver(kind: str) -> str:
    """Why Triton launches nothing on a kind of device, and what to do."""
    told = [str(fault) for fault in installation.faults()]
    if not told and kind == "npu":
        told = ["source CANN's set_env.sh in the shell that starts Python (triton-ascend looks for its compiler, ccec)"]
    return "; ".join([f"{' '.join(driver.triton_distribution())} finds no {kind} device", *told])


def require_running(op: str, dtype: str, device: torch.device) -> None:
    """Raise, saying what to do, where Triton cannot run kernels on a device; on a CPU also mend the interpreter.

    Args:
        op: Name of the op, for the message.
        dtype: Of its main tensor, by torch's name.
        device: Where its tensors are.

    Raises:
        UnsupportedProblemError: CPU tensors outside the interpreter, an interpreter that computes bfloat16
            wrongly, or an NPU where variables keep kernels from being launched.
    """
    deaf = software.refusals() if device.type == "npu" else []
    if deaf:
        raise UnsupportedProblemError(op, deaf)
    if not interpreting():
        if device.type == "cpu":
            wanted = "set TRITON_INTERPRET=1 before Triton is imported"
            raise UnsupportedProblemError(op, [f"tensors on a CPU run in Triton's interpreter only: {wanted}"])
        if not driver.launches_on(device.type):
            raise UnsupportedProblemError(op, [no_driver(device.type)])
        return
    mend_interpreter()
    if dtype == "bfloat16" and not interpreter_is_right():
        name, version = triton_distribution()
        raise UnsupportedProblemError(
            op, [f"the interpreter of {name} {version} computes bfloat16 wrongly: use fp16 or fp32"]
        )
