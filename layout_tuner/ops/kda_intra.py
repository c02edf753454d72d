"""`chunk_kda_fwd_intra` and `recompute_w_u_fwd_kda`: what a chunk's forward needs before the state arrives."""

from __future__ import annotations

import torch

from layout_tuner.kernels import kda_scores, kda_w_u, tiling

from .. import reference
from ..dispatch import router
from ..launch import launcher
from ..spec.declaration import Candidate, Launch, OpSpec, Problem
from ..spec.keys import Key
from ..spec.operands import Operand, Option, Output
from ..spec.registry import register
from .sizes import DOT_PRECISION, chunk_counts
from .solve_tril import bind_solve

SAFE_BOUND = -5.0  # the strongest gate of a token for which `safe_gate` keeps every factor in range


def chunk_kda_fwd_intra(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gk: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: torch.Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The scores of each chunk and its WY representation, with a decay for each key channel.

    Aqk[t, s] = scale * sum_c q[t] k[s] 2**(G[t] - G[s]), s <= t; M[t, s] = beta[t] * sum_c k[t] k[s] 2**(G[t] - G[s]),
    s < t; Akk = (I + M)^-1; u = Akk (beta * v), w = Akk (beta * 2**G * k), qg = 2**G * q, kg = 2**(G_last - G) * k.

    Args:
        q: Queries `[B, T, H, K]`, fp32, bf16 or fp16.
        k: Keys `[B, T, H, K]`, the dtype of q.
        v: Values `[B, T, HV, V]`, the dtype of q; HV a multiple of H.
        gk: Chunk-local cumulative gate G `[B, T, HV, K]`, log2 units, in any layout; required.
        beta: Strength of each token's update `[B, T, HV]`, in any layout; required.
        scale: None: `K ** -0.5`.
        cu_seqlens: Sequence starts of a packed batch `[N + 1]`, int32 or int64; needs B == 1.
        chunk_size: Tokens of a chunk: 16, 32 or 64.
        chunk_indices: `prepare_chunk_indices(cu_seqlens, chunk_size)`, where the caller has it.
        safe_gate: Whether no token's gate is below -5, natural log, so that products may take the place of
            element-wise decays. It clamps nothing.
        lower_bound: Smallest gate of a token, natural log; refused with `safe_gate` where it is below -5.
        disable_recompute: Whether to return qg.

    Returns:
        `(w, u, qg, kg, Aqk, Akk)`: w, kg and qg (None unless `disable_recompute`) `[B, T, HV, K]`, u `[B, T, HV, V]`,
        Aqk and Akk `[B, T, HV, chunk_size]`, 0 above the diagonal; all in the dtype of q, zero for tokens outside
        every sequence. M is fp32 all the way.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together; no gk or beta; a bound that is not safe.
        UnsupportedProblemError: K or V above 256, another chunk size, or CPU tensors outside Triton's interpreter.

    Source: Kimi Team 2025, Kimi Linear, arXiv:2510.26692, section 3.
    """
    check_bound(SPEC.name, safe_gate, lower_bound)
    options = (chunk_size, safe_gate, disable_recompute)
    w, u, qg, kg, Aqk, Akk = router.call(SPEC, (q, k, v, gk, beta), options, (scale,), cu_seqlens, chunk_indices)
    assert w is not None and u is not None and kg is not None and Aqk is not None and Akk is not None
    return w, u, qg, kg, Aqk, Akk


def check_bound(op: str, safe_gate: bool, lower_bound: float | None) -> None:
    """Refuse a bound under which the product form overflows."""
    if safe_gate is True and lower_bound is not None and not SAFE_BOUND <= lower_bound < 0.0:
        raise ValueError(
            f"{op}: lower_bound: wanted {SAFE_BOUND} <= lower_bound < 0 with safe_gate, got {lower_bound}: "
            "leave safe_gate out, which is right for every gate"
        )


def offers_bounded(variant: str, key: Key) -> bool:
    """`bounded` is a candidate where the caller says that the gate is."""
    return variant != "bounded" or key.form.flag("safe_gate")


def recompute_w_u_fwd_kda(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    gk: torch.Tensor,
    q: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The WY representation of each chunk with a decay for each key channel, and its gated queries and keys.

    u = A (beta * v), w = A (beta * 2**G * k), qg = 2**G * q, kg = 2**(G_last - G) * k. In flash-linear-attention it is
    `fla.ops.kda.wy_fast.recompute_w_u_fwd`.

    Args:
        k: Keys `[B, T, H, K]`, fp32, bf16 or fp16.
        v: Values `[B, T, HV, V]`, the dtype of k; HV a multiple of H.
        beta: Strength of each token's update `[B, T, HV]`, in any layout.
        A: Inverse of the chunk's system, `[B, T, HV, BT]`, the dtype of k, with BT the chunk size: 16, 32 or 64.
        gk: Chunk-local cumulative gate G `[B, T, HV, K]`, log2 units, in any layout.
        q: Queries `[B, T, H, K]`, the dtype of k. None: no qg.
        cu_seqlens: Sequence starts of a packed batch `[N + 1]`, int32 or int64; needs B == 1.
        chunk_indices: `prepare_chunk_indices(cu_seqlens, BT)`, where the caller has it.

    Returns:
        `(w, u, qg, kg)`: w, kg and qg (None without q) `[B, T, HV, K]`, u `[B, T, HV, V]`, the dtype of k; zero for
        tokens outside every sequence.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together.
        UnsupportedProblemError: K or V above 256, another chunk size, or CPU tensors outside Triton's interpreter.

    Source: Kimi Team 2025, Kimi Linear, arXiv:2510.26692, section 3.
    """
    w, u, qg, kg = router.call(W_U_SPEC, (k, v, beta, A, gk, q), (), (), cu_seqlens, chunk_indices)
    assert w is not None and u is not None and kg is not None
    return w, u, qg, kg


def _bind_w_u(problem: Problem, candidate: Candidate, *, store_qg: bool) -> launcher.BoundKernel:
    key = problem.key
    BK, BV = tiling.recompute_w_u_fwd_kda_tiles(
        candidate.variant, key.K, key.V, problem.element_bytes, problem.chip.tiles
    )
    return launcher.bind(
        kda_w_u.recompute_w_u_fwd_kda,
        H=key.H,
        HV=key.HV,
        K=key.K,
        V=key.V,
        BT=problem.BT,
        BK=BK,
        BV=BV,
        STORE_QG=store_qg,
        G_T_CONTIG=candidate.plan.t_contig("gk"),
        BETA_T_CONTIG=candidate.plan.t_contig("beta"),
        IS_VARLEN=key.varlen,
        DOT_PRECISION=DOT_PRECISION,
    )


def _launch_w_u(problem: Problem, candidate: Candidate) -> Launch:
    key, BT, programs = problem.key, problem.BT, problem.chip.cube_programs
    HV, K = key.HV, key.K
    store_qg = problem.has("q") or problem.form.flag("disable_recompute")
    kernel = _bind_w_u(problem, candidate, store_qg=store_qg)

    def launch(
        k: torch.Tensor,
        v: torch.Tensor,
        beta: torch.Tensor,
        A: torch.Tensor,
        gk: torch.Tensor,
        q: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        B, T = k.shape[0], k.shape[1]
        w, kg, u = k.new_empty(B, T, HV, K), k.new_empty(B, T, HV, K), torch.empty_like(v)
        qg = k.new_empty(B, T, HV, K) if store_qg else None
        NT, N, chunks = chunk_counts(B, T, BT, cu_seqlens, chunk_indices)
        tasks = chunks * HV
        kernel(
            max(1, min(tasks, programs)),
            q,
            k,
            v,
            beta,
            A,
            gk,
            w,
            u,
            qg,
            kg,
            cu_seqlens,
            chunk_indices,
            T,
            NT,
            N,
            tasks,
        )
        return w, u, qg, kg

    return launch


def _bind(problem: Problem, candidate: Candidate) -> Launch:
    key, BT, programs = problem.key, problem.BT, problem.chip.cube_programs
    H, HV, K, dtype = key.H, key.HV, key.K, getattr(torch, key.dtype)
    scores = launcher.bind(
        kda_scores.chunk_kda_scores,
        H=H,
        HV=HV,
        K=K,
        BT=BT,
        BK=tiling.chunk_kda_fwd_intra_tiles(candidate.variant, K, problem.element_bytes, problem.chip.tiles),
        DIAGONAL=tiling.chunk_kda_diagonal(candidate.variant, problem.chip.kind),
        G_T_CONTIG=candidate.plan.t_contig("gk"),
        BETA_T_CONTIG=candidate.plan.t_contig("beta"),
        IS_VARLEN=key.varlen,
        DOT_PRECISION=DOT_PRECISION,
    )
    solve, head_blocks = bind_solve(problem, candidate, dtype)
    w_u, default_scale, wants_qg = _launch_w_u(problem, candidate), K**-0.5, problem.form.flag("disable_recompute")

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        gk: torch.Tensor,
        beta: torch.Tensor,
        scale: float | None,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        B, T = k.shape[0], k.shape[1]
        NT, N, chunks = chunk_counts(B, T, BT, cu_seqlens, chunk_indices)
        Aqk, Akk = k.new_empty(B, T, HV, BT), k.new_empty(B, T, HV, BT)
        M = torch.empty_like(Akk, dtype=torch.float32)
        scale = default_scale if scale is None else scale
        tasks = chunks * HV * (BT // 16)
        scores(
            max(1, min(tasks, programs)),
            q,
            k,
            gk,
            beta,
            Aqk,
            M,
            cu_seqlens,
            chunk_indices,
            scale,
            T,
            NT,
            N,
            tasks,
        )
        tasks = chunks * head_blocks
        solve(max(1, min(tasks, programs)), M, Akk, cu_seqlens, chunk_indices, T, NT, N, tasks)
        queries = q if wants_qg else None
        return *w_u(k, v, beta, Akk, gk, queries, cu_seqlens, chunk_indices), Aqk, Akk

    return launch


_GATE = Operand(name="gk", dims="B T HV K", time_axis=True, fill="cumulative_decay")
_BETA = Operand(name="beta", dims="B T HV", time_axis=True, fill="strength")

SPEC = register(
    OpSpec(
        name="chunk_kda_fwd_intra",
        operands=(
            Operand(name="q", dims="B T H K", fill="unit"),
            Operand(name="k", dims="B T H K", fill="unit"),
            Operand(name="v", dims="B T HV V"),
            _GATE,
            _BETA,
        ),
        outputs=(
            Output(name="w", dims="B T HV K"),
            Output(name="u", dims="B T HV V"),
            Output(name="qg", dims="B T HV K"),
            Output(name="kg", dims="B T HV K"),
            Output(name="Aqk", dims="B T HV BT"),
            Output(name="Akk", dims="B T HV BT"),
        ),
        options=(
            Option(name="chunk_size", default=64, entry="BT", size="BT"),
            Option(name="safe_gate", default=False),
            Option(name="disable_recompute", default=False),
        ),
        scalars=("scale",),
        layout_groups=(("gk",), ("beta",)),
        variants=("exact", "bounded"),
        offers=offers_bounded,
        bind=_bind,
        reference=reference.chunk_kda_fwd_intra,
        forms={"training": "BT=64,beta=float32@STRIDE_HV,gk=float32@STRIDE_HV"},
        more_forms=(
            "BT=64,beta=float32@STRIDE_HV,disable_recompute=1,gk=float32@STRIDE_HV,safe_gate=1",
            "BT=32,beta=bfloat16@OTHER,gk=float32@T_CONTIG",
            "BT=16,beta=float32@T_CONTIG,gk=float32@OTHER,safe_gate=1",
        ),
        tolerances=dict.fromkeys(("w", "u", "qg", "kg", "Aqk", "Akk"), 0.005),
    )
)

W_U_SPEC = register(
    OpSpec(
        name="recompute_w_u_fwd_kda",
        operands=(
            Operand(name="k", dims="B T H K", fill="unit"),
            Operand(name="v", dims="B T HV V"),
            _BETA,
            Operand(name="A", dims="B T HV BT", fill="unit_lower"),
            _GATE,
            Operand(name="q", dims="B T H K", fill="unit", optional=True),
        ),
        outputs=(
            Output(name="w", dims="B T HV K"),
            Output(name="u", dims="B T HV V"),
            Output(name="qg", dims="B T HV K", needs="q"),
            Output(name="kg", dims="B T HV K"),
        ),
        layout_groups=(("beta",), ("gk",)),
        variants=("full",),
        bind=_launch_w_u,
        reference=reference.recompute_w_u_fwd_kda,
        forms={"training": "BT=64,beta=float32@STRIDE_HV,gk=float32@STRIDE_HV,q=1"},
        more_forms=(
            "BT=64,beta=float32@T_CONTIG,gk=float32@STRIDE_HV",
            "BT=32,beta=bfloat16@OTHER,gk=float32@T_CONTIG",
            "BT=16,beta=float32@STRIDE_HV,gk=float32@OTHER,q=1",
        ),
        tolerances=dict.fromkeys(("w", "u", "qg", "kg"), 0.005),
    )
)
