"""`chunk_fwd_o`: the output, from the chunk states and the corrected values."""

from __future__ import annotations

import torch

from layout_tuner.kernels import fwd_o as kernels
from layout_tuner.kernels import tiling

from .. import reference
from ..dispatch import router
from ..launch import launcher
from ..spec.declaration import Candidate, Launch, OpSpec, Problem
from ..spec.operands import Operand, Option, Output
from ..spec.registry import register
from .sizes import DOT_PRECISION, chunk_counts, require_room


def chunk_fwd_o(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    h: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Output of each token: what the state at the start of its chunk gives, and what the chunk's own values add.

    o[t] = scale * (2**g[t] * q[t]^T h + sum over s <= t of <q[t], k[s]> * 2**(g[t] - g[s]) * v[s]), s and t in a chunk.

    Args:
        q: Queries `[B, T, H, K]`, fp32, bf16 or fp16.
        k: Keys `[B, T, H, K]`, the dtype of q.
        v: Values as the states leave them, v_new of `chunk_gated_delta_rule_fwd_h`, `[B, T, HV, V]`, the dtype of q;
            HV a multiple of H.
        h: States at the starts of the chunks `[B, NT, HV, K, V]` (packed: `[1, chunks of all sequences, ...]`).
        g: Chunk-local cumulative gate `[B, T, HV]`, fp32, bf16 or fp16, log2 units, in any layout. None: no gate.
        g_gamma: In place of `g`, a gate that decays by the same factor every token, `[HV]`, log2 units.
        scale: None: `K ** -0.5`.
        state_v_first: Whether h is `[..., V, K]`.
        cu_seqlens: Sequence starts of a packed batch `[N + 1]`, int32 or int64; needs B == 1.
        chunk_size: Tokens of a chunk: 16, 32 or 64.
        chunk_indices: `prepare_chunk_indices(cu_seqlens, chunk_size)`, where the caller has it.

    Returns:
        o `[B, T, HV, V]`, the dtype of `v`; zero for tokens outside every sequence.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together; `g` and `g_gamma` both given.
        UnsupportedProblemError: K or V above 256, another chunk size, or CPU tensors outside Triton's interpreter.

    Source: Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks, arXiv:2412.06464, section 3.3.
    """
    if g is not None and g_gamma is not None:
        raise ValueError("chunk_fwd_o: g, g_gamma: wanted at most one of them, got both")
    o = router.call(SPEC, (q, k, v, h, g, g_gamma), (state_v_first, chunk_size), (scale,), cu_seqlens, chunk_indices)[0]
    assert o is not None
    return o


def _bind(problem: Problem, candidate: Candidate) -> Launch:
    key, BT = problem.key, problem.BT
    H, HV, K, V = key.H, key.HV, key.K, key.V
    BK, BV = tiling.chunk_fwd_o_tiles(candidate.variant, K, V, BT, problem.element_bytes, problem.chip.tiles)
    require_room(problem, candidate, "chunk_fwd_o", BT=BT, BK=BK, BV=BV)
    kernel = launcher.bind(
        kernels.chunk_fwd_o,
        H=H,
        HV=HV,
        K=K,
        V=V,
        BT=BT,
        BK=BK,
        BV=BV,
        USE_G=problem.has("g"),
        USE_G_GAMMA=problem.has("g_gamma"),
        STATE_V_FIRST=problem.form.flag("state_v_first"),
        G_T_CONTIG=candidate.plan.t_contig("g"),
        IS_VARLEN=key.varlen,
        DOT_PRECISION=DOT_PRECISION,
    )
    programs, default_scale = problem.chip.cube_programs, K**-0.5

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        h: torch.Tensor,
        g: torch.Tensor | None,
        g_gamma: torch.Tensor | None,
        scale: float | None,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor]:
        B, T = v.shape[0], v.shape[1]
        o = torch.empty_like(v)
        NT, N, chunks = chunk_counts(B, T, BT, cu_seqlens, chunk_indices)
        tasks = chunks * HV * -(-V // BV)
        kernel(
            max(1, min(tasks, programs)),
            q,
            k,
            v,
            h,
            g,
            g_gamma,
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
        name="chunk_fwd_o",
        operands=(
            Operand(name="q", dims="B T H K", fill="unit"),
            Operand(name="k", dims="B T H K", fill="unit"),
            Operand(name="v", dims="B T HV V"),
            Operand(name="h", dims="B NT HV K V", dims_v_first="B NT HV V K"),
            Operand(name="g", dims="B T HV", optional=True, time_axis=True, fill="cumulative_decay"),
            Operand(name="g_gamma", dims="HV", optional=True, fill="rate", must_match=False),
        ),
        outputs=(Output(name="o", dims="B T HV V"),),
        options=(
            Option(name="state_v_first", default=False, turns_states=True),
            Option(name="chunk_size", default=64, entry="BT", size="BT"),
        ),
        scalars=("scale",),
        layout_groups=(("g",),),
        variants=("full", "tiled"),
        bind=_bind,
        reference=reference.chunk_fwd_o,
        forms={"training": "BT=64,g=float32@STRIDE_HV"},
        more_forms=(
            "BT=64",
            "BT=64,g_gamma=float32",
            "BT=64,g=float32@T_CONTIG,state_v_first=1",
            "BT=64,g=float32@OTHER",
            "BT=64,g=bfloat16@STRIDE_HV",
            "BT=32,g=float32@STRIDE_HV",
            "BT=16,g=float32@STRIDE_HV,state_v_first=1",
        ),
        tolerances={"o": 0.006},
    )
)
