"""`chunk_gla_fwd_o_gk`: the output of each chunk, with a decay for each key channel."""

from __future__ import annotations

import torch

from layout_tuner.kernels import kda_fwd_o as kernels
from layout_tuner.kernels import tiling

from .. import reference
from ..dispatch import router
from ..launch import launcher
from ..spec.declaration import Candidate, Launch, OpSpec, Problem
from ..spec.operands import Operand, Option, Output
from ..spec.registry import register
from .sizes import DOT_PRECISION, chunk_counts


def chunk_gla_fwd_o_gk(
    q: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    A: torch.Tensor,
    h: torch.Tensor,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Output of each chunk from the state at its start and from its own values.

    o = scale * (2**G * q) h + tril(A) v.

    Args:
        q: Queries `[B, T, H, K]`, fp32, bf16 or fp16.
        v: Values `[B, T, HV, V]`, v_new where the rule has a delta, the dtype of q; HV a multiple of H.
        g: Chunk-local cumulative gate G `[B, T, HV, K]`, log2 units, in any layout.
        A: Scores with their scale `[B, T, HV, chunk_size]`, the dtype of q; not used above the diagonal.
        h: State at the start of each chunk `[B, NT, HV, K, V]` (packed: `[1, chunks of all sequences, ...]`).
        scale: None: `K ** -0.5`.
        state_v_first: Whether h is `[..., V, K]`.
        cu_seqlens: Sequence starts of a packed batch `[N + 1]`, int32 or int64; needs B == 1.
        chunk_size: Tokens of a chunk: 16, 32 or 64.
        chunk_indices: `prepare_chunk_indices(cu_seqlens, chunk_size)`, where the caller has it.

    Returns:
        o `[B, T, HV, V]`, the dtype of v; zero for tokens outside every sequence.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together.
        UnsupportedProblemError: K or V above 256, another chunk size, or CPU tensors outside Triton's interpreter.

    Source: Yang et al. 2023, Gated Linear Attention, arXiv:2312.06635, section 4; Kimi Team 2025, arXiv:2510.26692.
    """
    options = (state_v_first, chunk_size)
    o = router.call(SPEC, (q, v, g, A, h), options, (scale,), cu_seqlens, chunk_indices)[0]
    assert o is not None
    return o


def _bind(problem: Problem, candidate: Candidate) -> Launch:
    key, BT = problem.key, problem.BT
    HV, K, V = key.HV, key.K, key.V
    BK, BV = tiling.chunk_gla_fwd_o_gk_tiles(candidate.variant, K, V, problem.element_bytes, problem.chip.tiles)
    kernel = launcher.bind(
        kernels.chunk_gla_fwd_o_gk,
        H=key.H,
        HV=HV,
        K=K,
        V=V,
        BT=BT,
        BK=BK,
        BV=BV,
        STATE_V_FIRST=problem.form.flag("state_v_first"),
        G_T_CONTIG=candidate.plan.t_contig("g"),
        IS_VARLEN=key.varlen,
        DOT_PRECISION=DOT_PRECISION,
    )
    programs, default_scale, tiles = problem.chip.cube_programs, K**-0.5, -(-V // BV)

    def launch(
        q: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        A: torch.Tensor,
        h: torch.Tensor,
        scale: float | None,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor]:
        B, T = q.shape[0], q.shape[1]
        o = torch.empty_like(v)
        NT, N, chunks = chunk_counts(B, T, BT, cu_seqlens, chunk_indices)
        tasks = chunks * HV * tiles
        kernel(
            max(1, min(tasks, programs)),
            q,
            v,
            g,
            A,
            h,
            o,
            cu_seqlens,
            chunk_indices,
            default_scale if scale is None else scale,
            T,
            NT,
            N,
            tasks,
        )
        return (o,)

    return launch


SPEC = register(
    OpSpec(
        name="chunk_gla_fwd_o_gk",
        operands=(
            Operand(name="q", dims="B T H K", fill="unit"),
            Operand(name="v", dims="B T HV V"),
            Operand(name="g", dims="B T HV K", time_axis=True, fill="cumulative_decay"),
            Operand(name="A", dims="B T HV BT", fill="unit_lower"),
            Operand(name="h", dims="B NT HV K V", dims_v_first="B NT HV V K", fill="small"),
        ),
        outputs=(Output(name="o", dims="B T HV V"),),
        options=(
            Option(name="state_v_first", default=False, turns_states=True),
            Option(name="chunk_size", default=64, entry="BT", size="BT"),
        ),
        scalars=("scale",),
        layout_groups=(("g",),),
        variants=("full",),
        bind=_bind,
        reference=reference.chunk_gla_fwd_o_gk,
        forms={"training": "BT=64,g=float32@STRIDE_HV"},
        more_forms=(
            "BT=64,g=float32@OTHER,state_v_first=1",
            "BT=32,g=bfloat16@STRIDE_HV",
            "BT=16,g=float32@T_CONTIG",
        ),
        tolerances={"o": 0.005},
    )
)
