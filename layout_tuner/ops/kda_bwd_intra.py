"""`chunk_kda_bwd_intra`: gradients through a chunk's scores, with a decay for each key channel."""

from __future__ import annotations

import torch

from layout_tuner.kernels import kda_bwd_intra as kernels
from layout_tuner.kernels import tiling

from .. import reference
from ..dispatch import router
from ..launch import launcher
from ..spec import layouts
from ..spec.declaration import Candidate, Launch, OpSpec, Problem
from ..spec.operands import Operand, Option, Output
from ..spec.registry import register
from .kda_bwd import gated_precision
from .kda_intra import check_bound, offers_bounded
from .sizes import chunk_counts


def chunk_kda_bwd_intra(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    dAqk: torch.Tensor,
    dAkk: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    db: torch.Tensor,
    dg: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    chunk_size: int = 64,
    safe_gate: bool = False,
    lower_bound: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients through the scores of each chunk, added to what the other stages found.

    With D = 2**(G[t] - G[s]): a[t] = sum over s < t of dAqk[t, s] k[s] D, row[t] = the same of dAkk,
    col[s] = sum over t > s of (dAqk[t, s] q[t] + dAkk[t, s] beta[t] k[t]) D; dq + a + dAqk[t, t] k,
    dk + beta * row + col + dAqk[t, t] q, db + sum_K(row * k), dg + q * a + k * (beta * row - col).

    Args:
        q: Queries `[B, T, H, K]`, fp32, bf16 or fp16.
        k: Keys `[B, T, H, K]`, the dtype of q.
        g: Chunk-local cumulative gate G `[B, T, HV, K]`, log2 units, in any layout; HV a multiple of H.
        beta: Strength of each token's update `[B, T, HV]`, in any layout.
        dAqk: Gradient of q's scores without their scale `[B, T, HV, chunk_size]`, as `chunk_kda_bwd_dAv` returns it;
            not used above the diagonal.
        dAkk: Gradient of the system's matrix `[B, T, HV, chunk_size]`, as `chunk_kda_bwd_wy_dqkg_fused` returns it;
            not used above the diagonal, nor on it.
        dq: What is there of q's gradient `[B, T, HV, K]`.
        dk: What is there of k's gradient `[B, T, HV, K]`.
        db: What is there of beta's gradient `[B, T, HV]`, in any layout.
        dg: What is there of the gradient of G `[B, T, HV, K]`, in any layout.
        cu_seqlens: Sequence starts of a packed batch `[N + 1]`, int32 or int64; needs B == 1.
        chunk_indices: `prepare_chunk_indices(cu_seqlens, chunk_size)`, where the caller has it.
        chunk_size: Tokens of a chunk: 16, 32 or 64.
        safe_gate: Whether no token's gate is below -5, natural log, so that products may take the place of
            element-wise decays. It clamps nothing.
        lower_bound: Smallest gate of a token, natural log; refused with `safe_gate` where it is below -5.

    Returns:
        `(dq, dk, db, dg)`, new tensors in fp32; dq and dk for each value head. Zero for tokens outside every sequence.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together; a bound that is not safe.
        UnsupportedProblemError: K above 256, another chunk size, or CPU tensors outside Triton's interpreter.

    Source: Kimi Team 2025, Kimi Linear, arXiv:2510.26692, section 3.
    """
    check_bound(SPEC.name, safe_gate, lower_bound)
    tensors, options = (q, k, g, beta, dAqk, dAkk, dq, dk, db, dg), (chunk_size, safe_gate)
    dq_out, dk_out, db_out, dg_out = router.call(SPEC, tensors, options, (), cu_seqlens, chunk_indices)
    assert dq_out is not None and dk_out is not None and db_out is not None and dg_out is not None
    return dq_out, dk_out, db_out, dg_out


def _bind(problem: Problem, candidate: Candidate) -> Launch:
    key, BT, plan = problem.key, problem.BT, candidate.plan
    HV, K = key.HV, key.K
    kernel = launcher.bind(
        kernels.chunk_kda_bwd_intra,
        H=key.H,
        HV=HV,
        K=K,
        BT=BT,
        BK=tiling.chunk_kda_bwd_intra_tiles(candidate.variant, K, problem.element_bytes, problem.chip.tiles),
        DIAGONAL=tiling.chunk_kda_diagonal(candidate.variant, problem.chip.kind),
        G_T_CONTIG=plan.t_contig("g"),
        BETA_T_CONTIG=plan.t_contig("beta"),
        DG_T_CONTIG=plan.t_contig("dg"),
        DB_T_CONTIG=plan.t_contig("db"),
        IS_VARLEN=key.varlen,
        DOT_PRECISION=gated_precision(problem),
    )
    programs = problem.chip.cube_programs

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        dAqk: torch.Tensor,
        dAkk: torch.Tensor,
        dq: torch.Tensor,
        dk: torch.Tensor,
        db: torch.Tensor,
        dg: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        B, T = q.shape[0], q.shape[1]
        dq_out = torch.empty_like(dq, dtype=torch.float32)
        dk_out = torch.empty_like(dq_out)
        db_out = layouts.empty((B, T, HV), plan["db"], torch.float32, q.device)
        dg_out = layouts.empty((B, T, HV, K), plan["dg"], torch.float32, q.device)
        NT, N, chunks = chunk_counts(B, T, BT, cu_seqlens, chunk_indices)
        tasks = chunks * HV * (BT // 16)
        kernel(
            max(1, min(tasks, programs)),
            q,
            k,
            g,
            beta,
            dAqk,
            dAkk,
            dq,
            dk,
            db,
            dg,
            dq_out,
            dk_out,
            db_out,
            dg_out,
            cu_seqlens,
            chunk_indices,
            T,
            NT,
            N,
            tasks,
        )
        return dq_out, dk_out, db_out, dg_out

    return launch


_FP32 = "dAkk=float32,dAqk=float32,dk=float32,dq=float32"

SPEC = register(
    OpSpec(
        name="chunk_kda_bwd_intra",
        operands=(
            Operand(name="q", dims="B T H K", fill="unit"),
            Operand(name="k", dims="B T H K", fill="unit"),
            Operand(name="g", dims="B T HV K", time_axis=True, fill="cumulative_decay"),
            Operand(name="beta", dims="B T HV", time_axis=True, fill="strength"),
            Operand(name="dAqk", dims="B T HV BT", fill="unit_lower", must_match=False),
            Operand(name="dAkk", dims="B T HV BT", fill="strictly_lower", must_match=False),
            Operand(name="dq", dims="B T HV K", must_match=False),
            Operand(name="dk", dims="B T HV K", must_match=False),
            Operand(name="db", dims="B T HV", time_axis=True),
            Operand(name="dg", dims="B T HV K", time_axis=True),
        ),
        outputs=(
            Output(name="dq", dims="B T HV K"),
            Output(name="dk", dims="B T HV K"),
            Output(name="db", dims="B T HV", time_axis=True),
            Output(name="dg", dims="B T HV K", time_axis=True),
        ),
        options=(
            Option(name="chunk_size", default=64, entry="BT", size="BT"),
            Option(name="safe_gate", default=False),
        ),
        layout_groups=(("g", "dg"), ("beta", "db")),
        variants=("exact", "bounded"),
        offers=offers_bounded,
        bind=_bind,
        reference=reference.chunk_kda_bwd_intra,
        forms={
            "training": f"BT=64,beta=float32@STRIDE_HV,{_FP32},db=float32@STRIDE_HV,dg=float32@STRIDE_HV,"
            "g=float32@STRIDE_HV"
        },
        more_forms=(
            f"BT=64,beta=float32@T_CONTIG,{_FP32},db=float32@T_CONTIG,dg=float32@STRIDE_HV,g=float32@STRIDE_HV,"
            "safe_gate=1",
            f"BT=32,beta=bfloat16@OTHER,{_FP32},db=float32@STRIDE_HV,dg=float32@OTHER,g=float32@T_CONTIG",
            f"BT=16,beta=float32@STRIDE_HV,{_FP32},db=float32@OTHER,dg=float32@STRIDE_HV,g=float32@OTHER,safe_gate=1",
        ),
        tolerances=dict.fromkeys(("dq", "dk", "db", "dg"), 0.001),
    )
)
