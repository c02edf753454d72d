"""`recompute_w_u_fwd`: the WY representation of each chunk."""

from __future__ import annotations

import torch

from layout_tuner.kernels import recompute_w_u as kernels
from layout_tuner.kernels import tiling

from .. import reference
from ..dispatch import router
from ..launch import launcher
from ..spec.declaration import Candidate, Launch, OpSpec, Problem
from ..spec.operands import Operand, Output
from ..spec.registry import register
from .sizes import DOT_PRECISION, chunk_counts, require_room


def recompute_w_u_fwd(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    g: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The WY representation of each chunk.

    u = A (beta * v), w = A (beta * 2**g * k).

    Args:
        k: Keys `[B, T, H, K]`, fp32, bf16 or fp16.
        v: Values `[B, T, HV, V]`, the dtype of k; HV a multiple of H.
        beta: Strength of each token's update `[B, T, HV]`, in any layout.
        A: Inverse of the chunk's system, `[B, T, HV, BT]` with BT the chunk size: 16, 32 or 64.
        g: Chunk-local cumulative gate `[B, T, HV]`, log2 units, in any layout. None: no gate.
        cu_seqlens: Sequence starts of a packed batch `[N + 1]`, int32 or int64; needs B == 1.
        chunk_indices: `prepare_chunk_indices(cu_seqlens, BT)`, where the caller has it.

    Returns:
        w `[B, T, HV, K]` and u `[B, T, HV, V]`, the dtype of k; zero for tokens outside every sequence.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together.
        UnsupportedProblemError: K or V above 256, another chunk size, or CPU tensors outside Triton's interpreter.

    Source: Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks, arXiv:2412.06464, section 3.3.
    """
    w, u = router.call(SPEC, (k, v, beta, A, g), (), (), cu_seqlens, chunk_indices)
    assert w is not None and u is not None
    return w, u


def bind_w_u(problem: Problem, candidate: Candidate) -> launcher.BoundKernel:
    """The kernel of a problem that has k, v, beta and perhaps g, in the plan's layouts."""
    key = problem.key
    BK, BV = tiling.recompute_w_u_fwd_tiles(
        candidate.variant, key.K, key.V, problem.BT, problem.element_bytes, problem.chip.tiles
    )
    require_room(problem, candidate, "recompute_w_u_fwd", BT=problem.BT, BK=BK, BV=BV)
    return launcher.bind(
        kernels.recompute_w_u_fwd,
        H=key.H,
        HV=key.HV,
        K=key.K,
        V=key.V,
        BT=problem.BT,
        BK=BK,
        BV=BV,
        USE_G=problem.has("g"),
        G_T_CONTIG=candidate.plan.t_contig("g"),
        BETA_T_CONTIG=candidate.plan.t_contig("beta"),
        IS_VARLEN=key.varlen,
        DOT_PRECISION=DOT_PRECISION,
    )


def _bind(problem: Problem, candidate: Candidate) -> Launch:
    HV, K, BT = problem.key.HV, problem.key.K, problem.BT
    kernel, programs = bind_w_u(problem, candidate), problem.chip.cube_programs

    def launch(
        k: torch.Tensor,
        v: torch.Tensor,
        beta: torch.Tensor,
        A: torch.Tensor,
        g: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        B, T = k.shape[0], k.shape[1]
        w, u = k.new_empty(B, T, HV, K), torch.empty_like(v)
        NT, N, chunks = chunk_counts(B, T, BT, cu_seqlens, chunk_indices)
        tasks = chunks * HV
        kernel(max(1, min(tasks, programs)), k, v, beta, A, g, w, u, cu_seqlens, chunk_indices, T, NT, N, tasks)
        return w, u

    return launch


SPEC = register(
    OpSpec(
        name="recompute_w_u_fwd",
        operands=(
            Operand(name="k", dims="B T H K", fill="unit"),
            Operand(name="v", dims="B T HV V"),
            Operand(name="beta", dims="B T HV", time_axis=True, fill="strength"),
            Operand(name="A", dims="B T HV BT", fill="unit_lower", must_match=False),
            Operand(name="g", dims="B T HV", optional=True, time_axis=True, fill="cumulative_decay"),
        ),
        outputs=(Output(name="w", dims="B T HV K"), Output(name="u", dims="B T HV V")),
        layout_groups=(("g", "beta"),),
        variants=("full",),
        bind=_bind,
        reference=reference.recompute_w_u_fwd,
        forms={"training": "BT=64,beta=float32@STRIDE_HV,g=float32@STRIDE_HV"},
        more_forms=(
            "BT=64,beta=float32@STRIDE_HV",
            "BT=64,beta=float32@T_CONTIG,g=float32@T_CONTIG",
            "BT=64,beta=bfloat16@OTHER,g=float32@OTHER",
            "BT=32,beta=float32@STRIDE_HV,g=bfloat16@STRIDE_HV",
            "BT=16,beta=float32@STRIDE_HV,g=float32@STRIDE_HV",
        ),
        tolerances={"w": 0.006, "u": 0.006},
    )
)
