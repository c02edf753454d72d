"""`solve_tril`: the inverse of each chunk's unit lower triangular system."""

from __future__ import annotations

import torch

from layout_tuner.kernels import solve_tril as kernels
from layout_tuner.kernels import tiling

from .. import reference
from ..dispatch import router
from ..launch import launcher
from ..spec.declaration import Candidate, Launch, OpSpec, Problem
from ..spec.operands import Operand, Option, Output
from ..spec.registry import register
from .local_cumsum import output_dtype_name, output_dtype_of
from .sizes import chunk_counts


def solve_tril(
    A: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
) -> torch.Tensor:
    """(I + A)^-1 of each chunk.

    Args:
        A: Strictly lower triangular in each chunk, `[B, T, HV, BT]` with BT the chunk size: 16, 32 or 64; fp32, bf16
            or fp16.
        cu_seqlens: Sequence starts of a packed batch `[N + 1]`, int32 or int64; needs B == 1.
        chunk_indices: `prepare_chunk_indices(cu_seqlens, BT)`, where the caller has it.
        output_dtype: Dtype of the result; None: that of `A`.

    Returns:
        The inverse `[B, T, HV, BT]`, unit lower triangular; zero for tokens outside every sequence. Products are
        exact to fp32 where it is fp32, to 16 bits of mantissa where it is rounded to a 16-bit dtype anyway.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together.
        UnsupportedProblemError: Another chunk size, or CPU tensors outside Triton's interpreter.
    """
    dtype = output_dtype_name(SPEC.name, output_dtype, A)
    X = router.call(SPEC, (A,), (dtype,), (), cu_seqlens, chunk_indices)[0]
    assert X is not None
    return X


def solve_family(problem: Problem) -> str:
    """The family of tile choices; the interpreter takes the GPU's, as row by row costs it a second a chunk."""
    return "cuda" if problem.chip.kind == "cpu" else problem.chip.tiles


def solve_precision(problem: Problem, dtype: torch.dtype) -> str:
    """How products of blocks are formed for a result of `dtype`."""
    if problem.chip.kind != "cuda":
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "bf16x3"


def bind_solve(problem: Problem, candidate: Candidate, dtype: torch.dtype) -> tuple[launcher.BoundKernel, int]:
    """The kernel for a result of `dtype`, and its head blocks."""
    BH, by_rows = tiling.solve_tril_tiles(candidate.variant, 0, 0, problem.BT, dtype.itemsize, solve_family(problem))
    kernel = launcher.bind(
        kernels.solve_tril,
        HV=problem.key.HV,
        BT=problem.BT,
        BH=BH,
        BY_ROWS=by_rows,
        IS_VARLEN=problem.key.varlen,
        DOT_PRECISION=solve_precision(problem, dtype),
    )
    return kernel, -(-problem.key.HV // BH)


def _bind(problem: Problem, candidate: Candidate) -> Launch:
    BT, dtype, programs = problem.BT, output_dtype_of(problem), problem.chip.cube_programs
    kernel, head_blocks = bind_solve(problem, candidate, dtype)

    def launch(
        A: torch.Tensor, cu_seqlens: torch.Tensor | None, chunk_indices: torch.Tensor | None
    ) -> tuple[torch.Tensor]:
        B, T = A.shape[0], A.shape[1]
        X = torch.empty_like(A, dtype=dtype)
        NT, N, chunks = chunk_counts(B, T, BT, cu_seqlens, chunk_indices)
        tasks = chunks * head_blocks
        kernel(max(1, min(tasks, programs)), A, X, cu_seqlens, chunk_indices, T, NT, N, tasks)
        return (X,)

    return launch


SPEC = register(
    OpSpec(
        name="solve_tril",
        operands=(Operand(name="A", dims="B T HV BT", fill="strictly_lower"),),
        outputs=(Output(name="X", dims="B T HV BT"),),
        options=(Option(name="output_dtype", default="float32", names_dtype=True),),
        variants=("blocks",),
        bind=_bind,
        reference=reference.solve_tril,
        forms={"training": "BT=64,output_dtype=float32"},
        more_forms=("BT=32,output_dtype=float32", "BT=16,output_dtype=float32"),
    )
)
