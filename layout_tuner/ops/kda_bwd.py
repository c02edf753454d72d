"""`chunk_kda_bwd_dAv` and `chunk_kda_bwd_wy_dqkg_fused`: a chunk's gradients around the state."""

from __future__ import annotations

import torch

from layout_tuner.kernels import kda_dAv, kda_wy_bwd, tiling

from .. import reference
from ..dispatch import router
from ..launch import launcher
from ..spec import layouts
from ..spec.declaration import Candidate, Launch, OpSpec, Problem
from ..spec.operands import Operand, Option, Output
from ..spec.registry import register
from .sizes import DOT_PRECISION, chunk_counts


def chunk_kda_bwd_dAv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    A: torch.Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the chunk output with respect to its scores and, through them, to its values.

    dA = scale * tril(do v^T), the gradient of the score without its scale; dv = tril(A)^T do.

    Args:
        q: Queries `[B, T, H, K]`: their sizes and dtype only, values are not read.
        k: Keys `[B, T, H, K]`, in the same way.
        v: Corrected values `[B, T, HV, V]`, v_new of the forward, the dtype of q; HV a multiple of H.
        do: Gradient of the output `[B, T, HV, V]`, the dtype of q.
        A: Scores with their scale `[B, T, HV, chunk_size]`, the dtype of q; not used above the diagonal; required.
        scale: None: `K ** -0.5`.
        cu_seqlens: Sequence starts of a packed batch `[N + 1]`, int32 or int64; needs B == 1.
        chunk_size: Tokens of a chunk: 16, 32 or 64.
        chunk_indices: `prepare_chunk_indices(cu_seqlens, chunk_size)`, where the caller has it.

    Returns:
        dA `[B, T, HV, chunk_size]` in fp32 and dv `[B, T, HV, V]` in the dtype of do; zero for tokens outside every
        sequence.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together; no A.
        UnsupportedProblemError: K or V above 256, another chunk size, or CPU tensors outside Triton's interpreter.

    Source: Kimi Team 2025, Kimi Linear, arXiv:2510.26692, section 3.
    """
    dA, dv = router.call(DAV_SPEC, (q, k, v, do, A), (chunk_size,), (scale,), cu_seqlens, chunk_indices)
    assert dA is not None and dv is not None
    return dA, dv


def chunk_kda_bwd_wy_dqkg_fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    v_new: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    h: torch.Tensor,
    do: torch.Tensor,
    dh: torch.Tensor,
    dv: torch.Tensor,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: torch.Tensor | None = None,
    chunk_offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of each chunk through its states, through w and u, and through the inverse they are made with.

    dw = -dv h^T, t_u = A^T dv, t_w = A^T dw; dq = scale * 2**G * (do h^T); dk_end = 2**(G_last - G) * (v_new dh^T);
    dk = dk_end + beta * 2**G * t_w; gradient of v: beta * t_u; db = sum_V(t_u * v) + sum_K(t_w * 2**G * k);
    dA = -stril(A^T stril(beta[s] * (dv v^T + dw (2**G * k)^T)) A^T); dG = q * dq - k * dk_end + beta * 2**G * k * t_w,
    and in a chunk's last row also 2**G_last * sum_V(h * dh) + sum_t(k * dk_end).

    Args:
        q: Queries `[B, T, H, K]`, fp32, bf16 or fp16.
        k: Keys `[B, T, H, K]`, the dtype of q.
        v: Values `[B, T, HV, V]`, the dtype of q; HV a multiple of H.
        v_new: Corrected values, as v.
        g: Chunk-local cumulative gate G `[B, T, HV, K]`, log2 units, in any layout.
        beta: Strength of each token's update `[B, T, HV]`, in any layout.
        A: Inverse of the chunk's system `[B, T, HV, chunk_size]`, the dtype of q.
        h: State at the start of each chunk `[B, NT, HV, K, V]` (packed: `[1, chunks of all sequences, ...]`).
        do: Gradient of the output `[B, T, HV, V]`, the dtype of q.
        dh: Gradient of the state at the end of each chunk, as h.
        dv: Gradient of u `[B, T, HV, V]`, dv2 of `chunk_gated_delta_rule_bwd_dhu`, the dtype of q.
        scale: None: `K ** -0.5`.
        state_v_first: Whether h and dh are `[..., V, K]`.
        cu_seqlens: Sequence starts of a packed batch `[N + 1]`, int32 or int64; needs B == 1.
        chunk_size: Tokens of a chunk: 16, 32 or 64.
        chunk_indices: `prepare_chunk_indices(cu_seqlens, chunk_size)`, where the caller has it.
        chunk_offsets: Not read: a chunk's number is its place in `chunk_indices`.

    Returns:
        `(dq, dk, dv, db, dg, dA)`: dq and dk `[B, T, HV, K]`, for each value head, db `[B, T, HV]`, dg `[B, T, HV, K]`
        (dG, with respect to G in natural-log units) and dA `[B, T, HV, chunk_size]` (with respect to the system's
        matrix) in fp32; dv `[B, T, HV, V]` in the dtype of v. All zero for tokens outside every sequence.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together.
        UnsupportedProblemError: K or V above 256, another chunk size, or CPU tensors outside Triton's interpreter.

    Source: Kimi Team 2025, Kimi Linear, arXiv:2510.26692, section 3.
    """
    tensors, options = (q, k, v, v_new, g, beta, A, h, do, dh, dv), (state_v_first, chunk_size)
    results = router.call(SPEC, tensors, options, (scale,), cu_seqlens, chunk_indices)
    dq, dk, dv_out, db, dg, dA = results
    assert dq is not None and dk is not None and dv_out is not None
    assert db is not None and dg is not None and dA is not None
    return dq, dk, dv_out, db, dg, dA


def _bind_dAv(problem: Problem, candidate: Candidate) -> Launch:
    key, BT = problem.key, problem.BT
    HV, V = key.HV, key.V
    kernel = launcher.bind(
        kda_dAv.chunk_kda_bwd_dAv,
        HV=HV,
        V=V,
        BT=BT,
        BV=tiling.chunk_kda_bwd_dAv_tiles(candidate.variant, V, problem.element_bytes, problem.chip.tiles),
        IS_VARLEN=key.varlen,
        DOT_PRECISION=DOT_PRECISION,
    )
    programs, default_scale = problem.chip.cube_programs, key.K**-0.5

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        do: torch.Tensor,
        A: torch.Tensor,
        scale: float | None,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        B, T = v.shape[0], v.shape[1]
        dA, dv = torch.empty_like(A, dtype=torch.float32), torch.empty_like(do)
        NT, N, chunks = chunk_counts(B, T, BT, cu_seqlens, chunk_indices)
        tasks = chunks * HV
        kernel(
            max(1, min(tasks, programs)),
            v,
            do,
            A,
            dA,
            dv,
            cu_seqlens,
            chunk_indices,
            default_scale if scale is None else scale,
            T,
            NT,
            N,
            tasks,
        )
        return dA, dv

    return launch


def _bind(problem: Problem, candidate: Candidate) -> Launch:
    key, BT, plan = problem.key, problem.BT, candidate.plan
    HV, K, V = key.HV, key.K, key.V
    BK, BV = tiling.chunk_kda_bwd_wy_dqkg_fused_tiles(
        candidate.variant, K, V, problem.element_bytes, problem.chip.tiles, problem.form.flag("state_v_first")
    )
    on_gpu = problem.chip.kind == "cuda"
    kernel = launcher.bind(
        kda_wy_bwd.chunk_kda_bwd_wy_dqkg_fused,
        H=key.H,
        HV=HV,
        K=K,
        V=V,
        BT=BT,
        BK=BK,
        BV=BV,
        STATE_V_FIRST=problem.form.flag("state_v_first"),
        G_T_CONTIG=plan.t_contig("g"),
        BETA_T_CONTIG=plan.t_contig("beta"),
        DG_T_CONTIG=plan.t_contig("dg"),
        DB_T_CONTIG=plan.t_contig("db"),
        IS_VARLEN=key.varlen,
        SPLIT=on_gpu,
        DOT_PRECISION=DOT_PRECISION,
        GATED_PRECISION=gated_precision(problem),
    )
    programs, default_scale = problem.chip.cube_programs, K**-0.5

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        v_new: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        A: torch.Tensor,
        h: torch.Tensor,
        do: torch.Tensor,
        dh: torch.Tensor,
        du: torch.Tensor,
        scale: float | None,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        B, T = q.shape[0], q.shape[1]
        dq = torch.empty((B, T, HV, K), dtype=torch.float32, device=q.device)
        dk, dv = torch.empty_like(dq), torch.empty_like(v)
        db = layouts.empty((B, T, HV), plan["db"], torch.float32, q.device)
        dg = layouts.empty((B, T, HV, K), plan["dg"], torch.float32, q.device)
        dA = torch.empty_like(A, dtype=torch.float32)
        NT, N, chunks = chunk_counts(B, T, BT, cu_seqlens, chunk_indices)
        tasks = chunks * HV
        kernel(
            max(1, min(tasks, programs)),
            q,
            k,
            v,
            v_new,
            g,
            beta,
            A,
            h,
            do,
            dh,
            du,
            dq,
            dk,
            dv,
            db,
            dg,
            dA,
            cu_seqlens,
            chunk_indices,
            default_scale if scale is None else scale,
            T,
            NT,
            N,
            tasks,
        )
        return dq, dk, dv, db, dg, dA

    return launch


def gated_precision(problem: Problem) -> str:
    """`input_precision` of products whose operands are made in fp32 from 16-bit tensors; exact for fp32 ones.

    What comes out is stored in fp32 and has to be better than 16-bit operands make it; tf32 keeps 11 bits.
    """
    return "tf32" if problem.chip.kind == "cuda" and problem.element_bytes == 2 else "ieee"


DAV_SPEC = register(
    OpSpec(
        name="chunk_kda_bwd_dAv",
        operands=(
            Operand(name="q", dims="B T H K", fill="unit"),
            Operand(name="k", dims="B T H K", fill="unit"),
            Operand(name="v", dims="B T HV V"),
            Operand(name="do", dims="B T HV V"),
            Operand(name="A", dims="B T HV BT", fill="unit_lower"),
        ),
        outputs=(Output(name="dA"), Output(name="dv")),
        options=(Option(name="chunk_size", default=64, entry="BT", size="BT"),),
        scalars=("scale",),
        variants=("full",),
        bind=_bind_dAv,
        reference=reference.chunk_kda_bwd_dAv,
        forms={"training": "BT=64"},
        more_forms=("BT=32", "BT=16"),
        tolerances={"dA": 0.005, "dv": 0.005},
    )
)

SPEC = register(
    OpSpec(
        name="chunk_kda_bwd_wy_dqkg_fused",
        operands=(
            Operand(name="q", dims="B T H K", fill="unit"),
            Operand(name="k", dims="B T H K", fill="unit"),
            Operand(name="v", dims="B T HV V"),
            Operand(name="v_new", dims="B T HV V"),
            Operand(name="g", dims="B T HV K", time_axis=True, fill="cumulative_decay"),
            Operand(name="beta", dims="B T HV", time_axis=True, fill="strength"),
            Operand(name="A", dims="B T HV BT", fill="unit_lower"),
            Operand(name="h", dims="B NT HV K V", dims_v_first="B NT HV V K", fill="small"),
            Operand(name="do", dims="B T HV V"),
            Operand(name="dh", dims="B NT HV K V", dims_v_first="B NT HV V K", fill="small"),
            Operand(name="dv", dims="B T HV V"),
        ),
        outputs=(
            Output(name="dq", dims="B T HV K"),
            Output(name="dk", dims="B T HV K"),
            Output(name="dv", dims="B T HV V"),
            Output(name="db", dims="B T HV", time_axis=True),
            Output(name="dg", dims="B T HV K", time_axis=True),
            Output(name="dA", dims="B T HV BT"),
        ),
        options=(
            Option(name="state_v_first", default=False, turns_states=True),
            Option(name="chunk_size", default=64, entry="BT", size="BT"),
        ),
        scalars=("scale",),
        layout_groups=(("g", "dg"), ("beta", "db")),
        variants=("full",),
        bind=_bind,
        reference=reference.chunk_kda_bwd_wy_dqkg_fused,
        term_rms=lambda wanted, **named: reference.chunk_kda_bwd_wy_dqkg_fused_term_rms(**named),
        forms={"training": "BT=64,beta=float32@STRIDE_HV,g=float32@STRIDE_HV"},
        more_forms=(
            "BT=64,beta=float32@OTHER,g=float32@OTHER,state_v_first=1",
            "BT=32,beta=bfloat16@STRIDE_HV,g=float32@T_CONTIG",
            "BT=16,beta=float32@T_CONTIG,g=bfloat16@STRIDE_HV",
        ),
        tolerances={"dq": 0.001, "dk": 0.001, "dv": 0.005, "db": 0.001, "dg": 0.001, "dA": 0.005},
    )
)
