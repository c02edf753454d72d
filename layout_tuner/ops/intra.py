"""`chunk_gated_delta_rule_fwd_intra`: all that a chunk's forward needs before the state arrives."""

from __future__ import annotations

from collections.abc import Callable

import torch

from layout_tuner.kernels import intra as kernels
from layout_tuner.kernels import tiling

from .. import reference
from ..dispatch import router
from ..launch import launcher
from ..spec.declaration import Candidate, Launch, OpSpec, Problem
from ..spec.operands import Operand, Option, Output
from ..spec.registry import register
from .kkt import bind_kkt
from .recompute_w_u import bind_w_u
from .sizes import DOT_PRECISION, chunk_counts
from .solve_tril import bind_solve, solve_family, solve_precision

Inverse = Callable[
    [torch.Tensor, "torch.Tensor | None", torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"], torch.Tensor
]


def chunk_gated_delta_rule_fwd_intra(
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The WY representation of each chunk from keys, values, gate and beta: kkt, its inverse, and w and u.

    M[t, s] = beta[t] * <k[t], k[s]> * 2**(g[t] - g[s]), s < t; A = (I + M)^-1; u = A (beta * v),
    w = A (beta * 2**g * k).

    Args:
        k: Keys `[B, T, H, K]`, fp32, bf16 or fp16.
        v: Values `[B, T, HV, V]`, the dtype of k; HV a multiple of H.
        g: Chunk-local cumulative gate `[B, T, HV]`, log2 units, in any layout. None: no gate.
        beta: Strength of each token's update `[B, T, HV]`, in any layout; required.
        cu_seqlens: Sequence starts of a packed batch `[N + 1]`, int32 or int64; needs B == 1.
        chunk_size: Tokens of a chunk: 16, 32 or 64.
        chunk_indices: `prepare_chunk_indices(cu_seqlens, chunk_size)`, where the caller has it.

    Returns:
        w `[B, T, HV, K]`, u `[B, T, HV, V]` and A `[B, T, HV, chunk_size]`, the dtype of k; zero for tokens outside
        every sequence. M is fp32 all the way; A is rounded once.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together; no beta.
        UnsupportedProblemError: K or V above 256, another chunk size, or CPU tensors outside Triton's interpreter.

    Source: Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks, arXiv:2412.06464, section 3.3.
    """
    w, u, A = router.call(SPEC, (k, v, g, beta), (chunk_size,), (), cu_seqlens, chunk_indices)
    assert w is not None and u is not None and A is not None
    return w, u, A


def bind_inverse(problem: Problem, candidate: Candidate) -> Inverse:
    """kkt and its inverse, in one kernel or in two."""
    key, BT, plan, programs = problem.key, problem.BT, candidate.plan, problem.chip.cube_programs
    H, HV, dtype = key.H, key.HV, getattr(torch, key.dtype)
    fused, BH, BK = tiling.chunk_gated_delta_rule_fwd_intra_tiles(
        candidate.variant, key.K, key.V, BT, problem.element_bytes, solve_family(problem)
    )
    if fused:
        kernel, head_blocks = (
            launcher.bind(
                kernels.kkt_solve,
                H=H,
                HV=HV,
                K=key.K,
                BT=BT,
                BH=BH,
                BK=BK,
                USE_G=problem.has("g"),
                G_T_CONTIG=plan.t_contig("g"),
                BETA_T_CONTIG=plan.t_contig("beta"),
                IS_VARLEN=key.varlen,
                DOT_PRECISION=DOT_PRECISION,
                SOLVE_PRECISION=solve_precision(problem, dtype),
            ),
            -(-HV // BH),
        )
    else:
        kernel, (solve, head_blocks) = bind_kkt(problem, candidate), bind_solve(problem, candidate, dtype)

    def inverse(
        k: torch.Tensor,
        g: torch.Tensor | None,
        beta: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> torch.Tensor:
        B, T = k.shape[0], k.shape[1]
        NT, N, chunks = chunk_counts(B, T, BT, cu_seqlens, chunk_indices)
        A = k.new_empty(B, T, HV, BT)
        tasks = chunks * head_blocks
        grid = max(1, min(tasks, programs))
        if fused:
            kernel(grid, k, g, beta, A, cu_seqlens, chunk_indices, T, NT, N, tasks)
            return A
        M = A if dtype == torch.float32 else torch.empty_like(A, dtype=torch.float32)
        kkt_tasks = chunks * H
        kernel(max(1, min(kkt_tasks, programs)), k, g, beta, M, cu_seqlens, chunk_indices, T, NT, N, kkt_tasks)
        X = torch.empty_like(A) if M is A else A
        solve(grid, M, X, cu_seqlens, chunk_indices, T, NT, N, tasks)
        return X

    return inverse


def _bind(problem: Problem, candidate: Candidate) -> Launch:
    HV, K, BT, programs = problem.key.HV, problem.key.K, problem.BT, problem.chip.cube_programs
    inverse, w_u = bind_inverse(problem, candidate), bind_w_u(problem, candidate)

    def launch(
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None,
        beta: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        B, T = k.shape[0], k.shape[1]
        A = inverse(k, g, beta, cu_seqlens, chunk_indices)
        w, u = k.new_empty(B, T, HV, K), torch.empty_like(v)
        NT, N, chunks = chunk_counts(B, T, BT, cu_seqlens, chunk_indices)
        tasks = chunks * HV
        w_u(max(1, min(tasks, programs)), k, v, beta, A, g, w, u, cu_seqlens, chunk_indices, T, NT, N, tasks)
        return w, u, A

    return launch


SPEC = register(
    OpSpec(
        name="chunk_gated_delta_rule_fwd_intra",
        operands=(
            Operand(name="k", dims="B T H K", fill="unit"),
            Operand(name="v", dims="B T HV V"),
            Operand(name="g", dims="B T HV", optional=True, time_axis=True, fill="cumulative_decay"),
            Operand(name="beta", dims="B T HV", time_axis=True, fill="strength"),
        ),
        outputs=(
            Output(name="w", dims="B T HV K"),
            Output(name="u", dims="B T HV V"),
            Output(name="A", dims="B T HV BT"),
        ),
        options=(Option(name="chunk_size", default=64, entry="BT", size="BT"),),
        layout_groups=(("g", "beta"),),
        variants=("full",),
        bind=_bind,
        reference=reference.chunk_gated_delta_rule_fwd_intra,
        forms={"training": "BT=64,beta=float32@STRIDE_HV,g=float32@STRIDE_HV"},
        more_forms=(
            "BT=32,beta=float32@STRIDE_HV",
            "BT=32,beta=float32@T_CONTIG,g=float32@T_CONTIG",
            "BT=16,beta=bfloat16@OTHER,g=float32@OTHER",
        ),
        tolerances={"w": 0.006, "u": 0.006, "A": 0.006},
    )
)
