"""`chunk_scaled_dot_kkt_fwd`: the triangular system of each chunk."""

from __future__ import annotations

import torch

from layout_tuner.kernels import kkt as kernels
from layout_tuner.kernels import tiling

from .. import reference
from ..dispatch import router
from ..launch import launcher
from ..spec.declaration import Candidate, Launch, OpSpec, Problem
from ..spec.operands import Operand, Option, Output
from ..spec.registry import register
from .local_cumsum import output_dtype_name, output_dtype_of
from .sizes import DOT_PRECISION, chunk_counts


def chunk_scaled_dot_kkt_fwd(
    k: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_size: int = 64,
    output_dtype: torch.dtype | None = torch.float32,
    chunk_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """The strictly lower triangular system of each chunk.

    M[t, s] = beta[t] * <k[t], k[s]> * 2**(g[t] - g[s]), s < t in one chunk, else 0.

    Args:
        k: Keys `[B, T, H, K]`, fp32, bf16 or fp16.
        g: Chunk-local cumulative gate `[B, T, HV]`, log2 units, in any layout; HV a multiple of H. None: no gate.
        beta: Strength of each token's update `[B, T, HV]`, in any layout; required.
        cu_seqlens: Sequence starts of a packed batch `[N + 1]`, int32 or int64; needs B == 1.
        chunk_size: Tokens of a chunk: 16, 32 or 64.
        output_dtype: Dtype of the result; None: that of `k`.
        chunk_indices: `prepare_chunk_indices(cu_seqlens, chunk_size)`, where the caller has it.

    Returns:
        M `[B, T, HV, chunk_size]`, column s counted from the start of the chunk; zero for tokens outside every
        sequence.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together; no beta.
        UnsupportedProblemError: K above 256, another chunk size, or CPU tensors outside Triton's interpreter.

    Source: Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks, arXiv:2412.06464, section 3.3.
    """
    dtype = output_dtype_name(SPEC.name, output_dtype, k)
    A = router.call(SPEC, (k, g, beta), (chunk_size, dtype), (), cu_seqlens, chunk_indices)[0]
    assert A is not None
    return A


def bind_kkt(problem: Problem, candidate: Candidate) -> launcher.BoundKernel:
    """The kernel of a problem that has k, beta and perhaps g, in the plan's layouts."""
    key = problem.key
    (BK,) = tiling.chunk_scaled_dot_kkt_fwd_tiles(
        candidate.variant, key.K, key.V, problem.BT, problem.element_bytes, problem.chip.tiles
    )
    return launcher.bind(
        kernels.chunk_scaled_dot_kkt_fwd,
        H=key.H,
        HV=key.HV,
        K=key.K,
        BT=problem.BT,
        BK=BK,
        USE_G=problem.has("g"),
        G_T_CONTIG=candidate.plan.t_contig("g"),
        BETA_T_CONTIG=candidate.plan.t_contig("beta"),
        IS_VARLEN=key.varlen,
        DOT_PRECISION=DOT_PRECISION,
    )


def _bind(problem: Problem, candidate: Candidate) -> Launch:
    H, HV, BT = problem.key.H, problem.key.HV, problem.BT
    kernel, dtype, programs = bind_kkt(problem, candidate), output_dtype_of(problem), problem.chip.cube_programs

    def launch(
        k: torch.Tensor,
        g: torch.Tensor | None,
        beta: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor]:
        B, T = k.shape[0], k.shape[1]
        A = torch.empty((B, T, HV, BT), dtype=dtype, device=k.device)
        NT, N, chunks = chunk_counts(B, T, BT, cu_seqlens, chunk_indices)
        tasks = chunks * H
        kernel(max(1, min(tasks, programs)), k, g, beta, A, cu_seqlens, chunk_indices, T, NT, N, tasks)
        return (A,)

    return launch


SPEC = register(
    OpSpec(
        name="chunk_scaled_dot_kkt_fwd",
        operands=(
            Operand(name="k", dims="B T H K", fill="unit"),
            Operand(name="g", dims="B T HV", optional=True, time_axis=True, fill="cumulative_decay"),
            Operand(name="beta", dims="B T HV", time_axis=True, fill="strength"),
        ),
        outputs=(Output(name="A", dims="B T HV BT"),),
        options=(
            Option(name="chunk_size", default=64, entry="BT", size="BT"),
            Option(name="output_dtype", default="float32", names_dtype=True),
        ),
        layout_groups=(("g", "beta"),),
        variants=("full",),
        bind=_bind,
        reference=reference.chunk_scaled_dot_kkt_fwd,
        forms={"training": "BT=64,beta=float32@STRIDE_HV,g=float32@STRIDE_HV,output_dtype=float32"},
        more_forms=(
            "BT=64,beta=float32@STRIDE_HV,output_dtype=float32",
            "BT=64,beta=float32@T_CONTIG,g=float32@T_CONTIG,output_dtype=float32",
            "BT=64,beta=bfloat16@OTHER,g=float32@OTHER,output_dtype=float32",
            "BT=32,beta=float32@STRIDE_HV,g=bfloat16@STRIDE_HV,output_dtype=float32",
            "BT=16,beta=float32@STRIDE_HV,g=float32@STRIDE_HV,output_dtype=float32",
        ),
    )
)
