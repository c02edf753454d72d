"""`prepare_wy_repr_bwd`: gradients through `u`, `w` and the inverse that makes them, chunk by chunk."""

from __future__ import annotations

import torch

from layout_tuner.kernels import tiling
from layout_tuner.kernels import wy_bwd as kernels

from .. import reference
from ..dispatch import router
from ..launch import launcher
from ..spec import layouts
from ..spec.declaration import Candidate, Launch, OpSpec, Problem
from ..spec.operands import Operand, Output
from ..spec.registry import register
from .sizes import DOT_PRECISION, chunk_counts


def prepare_wy_repr_bwd(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    dw: torch.Tensor,
    du: torch.Tensor,
    g: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients through u = A (beta * v) and w = A (beta * 2**G * k), where A = (I + M)^-1 comes from k, beta and G.

    With dA = du (beta * v)^T + dw (beta * 2**G * k)^T, dM = -strict_tril(A^T dA A^T), E = 2**(G[t] - G[s]),
    X = beta[t] * dM * E, t_u = A^T du, t_w = A^T dw, per head and chunk:
    dv = beta * t_u, dk = beta * 2**G * t_w + X k + X^T k,
    dbeta = sum_V(t_u * v) + 2**G * sum_K(t_w * k) + rowsum(dM * E * k k^T),
    dG = beta * 2**G * sum_K(t_w * k) + rowsum(X * k k^T) - colsum(X * k k^T).

    Args:
        k: Keys `[B, T, H, K]`, fp32, bf16 or fp16.
        v: Values `[B, T, HV, V]`, the dtype of k; HV a multiple of H.
        beta: Writing strengths `[B, T, HV]`, fp32, bf16 or fp16, in any layout.
        A: `(I + M)^-1` of each chunk `[B, T, HV, BT]`, the dtype of k; BT is the chunk size, 16, 32 or 64.
        dw: Gradient of w `[B, T, HV, K]`, as `chunk_bwd_dqkwg` returns it.
        du: Gradient of u `[B, T, HV, V]`, dv2 of `chunk_gated_delta_rule_bwd_dhu`.
        g: Chunk-local cumulative gate `[B, T, HV]`, fp32, bf16 or fp16, log2 units, in any layout. None: no gate.
        cu_seqlens: Sequence starts of a packed batch `[N + 1]`, int32 or int64; needs B == 1.
        chunk_indices: `prepare_chunk_indices(cu_seqlens, BT)`, where the caller has it.

    Returns:
        `(dk, dv, dbeta, dg)`: dk `[B, T, H, K]`, summed over the value heads of a group; dv `[B, T, HV, V]`;
        dbeta `[B, T, HV]` in beta's dtype; dg `[B, T, HV]`, fp32, with respect to G in natural-log units, None
        without g. All are zero for tokens outside every sequence.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together.
        UnsupportedProblemError: K or V above 256, another chunk size, or CPU tensors outside Triton's interpreter.

    Source: Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks, arXiv:2412.06464, section 3.3.
    """
    dk, dv, dbeta, dg = router.call(SPEC, (k, v, beta, A, dw, du, g), (), (), cu_seqlens, chunk_indices)
    assert dk is not None and dv is not None and dbeta is not None
    return dk, dv, dbeta, dg


def _bind(problem: Problem, candidate: Candidate) -> Launch:
    key, BT = problem.key, problem.BT
    H, HV, K, V = key.H, key.HV, key.K, key.V
    BE, BD = tiling.prepare_wy_repr_bwd_tiles(K, V, BT, problem.element_bytes, problem.chip.tiles)
    plan, wants_dg = candidate.plan, problem.has("g")
    kernel = launcher.bind(
        kernels.prepare_wy_repr_bwd_full,
        H=H,
        HV=HV,
        K=K,
        V=V,
        BT=BT,
        BE=BE,
        BD=BD,
        USE_G=wants_dg,
        G_T_CONTIG=plan.t_contig("g"),
        BETA_T_CONTIG=plan.t_contig("beta"),
        DG_T_CONTIG=plan.t_contig("dg"),
        DB_T_CONTIG=plan.t_contig("dbeta"),
        IS_VARLEN=key.varlen,
        RELOAD_LEFT=problem.chip.tiles == "ascend",
        TIME_IN_COLUMNS=problem.chip.tiles == "ascend",
        DOT_PRECISION=DOT_PRECISION,
    )
    dbeta_layout, dg_layout, programs = plan["dbeta"], plan["dg"], problem.chip.cube_programs

    def launch(
        k: torch.Tensor,
        v: torch.Tensor,
        beta: torch.Tensor,
        A: torch.Tensor,
        dw: torch.Tensor,
        du: torch.Tensor,
        g: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        B, T = k.shape[0], k.shape[1]
        NT, N, chunks = chunk_counts(B, T, BT, cu_seqlens, chunk_indices)
        tasks = chunks * H
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        dbeta = layouts.empty((B, T, HV), dbeta_layout, beta.dtype, k.device)
        dg = layouts.empty((B, T, HV), dg_layout, torch.float32, k.device) if wants_dg else None
        kernel(
            max(1, min(tasks, programs)),
            k,
            v,
            beta,
            A,
            dw,
            du,
            g,
            dk,
            dv,
            dbeta,
            dg,
            cu_seqlens,
            chunk_indices,
            T,
            NT,
            N,
            tasks,
        )
        return dk, dv, dbeta, dg

    return launch


SPEC = register(
    OpSpec(
        name="prepare_wy_repr_bwd",
        operands=(
            Operand(name="k", dims="B T H K", fill="unit"),
            Operand(name="v", dims="B T HV V"),
            Operand(name="beta", dims="B T HV", time_axis=True, fill="strength"),
            Operand(name="A", dims="B T HV BT", fill="unit_lower"),
            Operand(name="dw", dims="B T HV K"),
            Operand(name="du", dims="B T HV V"),
            Operand(name="g", dims="B T HV", optional=True, time_axis=True, fill="cumulative_decay"),
        ),
        outputs=(
            Output(name="dk"),
            Output(name="dv"),
            Output(name="dbeta", time_axis=True),
            Output(name="dg", time_axis=True, needs="g"),
        ),
        layout_groups=(("g", "beta"), ("dg", "dbeta")),
        variants=("full",),
        bind=_bind,
        reference=reference.prepare_wy_repr_bwd,
        forms={"training": "BT=64,beta=float32@STRIDE_HV,g=float32@STRIDE_HV"},
        more_forms=(
            "BT=64,beta=float32@STRIDE_HV",
            "BT=64,beta=float32@T_CONTIG,g=float32@STRIDE_HV",
            "BT=64,beta=float32@OTHER,g=float32@OTHER",
            "BT=32,beta=float32@STRIDE_HV,g=bfloat16@STRIDE_HV",
            "BT=16,beta=float32@STRIDE_HV,g=float32@STRIDE_HV",
        ),
        tolerances={"dk": 0.006, "dv": 0.006, "dbeta": 0.006, "dg": 0.006},
        term_rms=lambda wanted, **named: reference.prepare_wy_repr_bwd_term_rms(**named),
    )
)
