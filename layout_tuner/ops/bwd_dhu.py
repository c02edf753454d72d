"""`chunk_gated_delta_rule_bwd_dhu`: the gradient of the chunk states, and the corrected gradient of the values."""

from __future__ import annotations

import torch

from layout_tuner.kernels import bwd_dhu as kernels
from layout_tuner.kernels import tiling

from .. import reference
from ..dispatch import router
from ..launch import launcher
from ..spec.declaration import Candidate, Launch, OpSpec, Problem
from ..spec.operands import Operand, Option, Output
from ..spec.packing import prepare_chunk_offsets
from ..spec.registry import register
from .sizes import DOT_PRECISION, default_width, require_room


def chunk_gated_delta_rule_bwd_dhu(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    do: torch.Tensor,
    dv: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    h0: torch.Tensor | None = None,
    dht: torch.Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: torch.Tensor | None = None,
    chunk_offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Gradient of the loss with respect to the state at the end of every chunk, and to `u`.

    With D that gradient for one head, walked from the last chunk to the first: dh[c] = D at the end of chunk c;
    dv2 = dv + 2**(g_last - g) * (k D); D = 2**g_last D + q^T (scale * 2**g * do) - w^T dv2.

    Args:
        q: Queries `[B, T, H, K]`, fp32, bf16 or fp16.
        k: Keys `[B, T, H, K]`, the dtype of q.
        w: As `recompute_w_u_fwd` makes it, `[B, T, HV, K]`, the dtype of q; HV a multiple of H.
        do: Gradient of the output `[B, T, HV, V]`, the dtype of q.
        dv: What `chunk_bwd_dv_local` returns, `[B, T, HV, V]`, the dtype of q.
        g: Chunk-local cumulative gate `[B, T, HV]`, fp32, bf16 or fp16, log2 units, in any layout. None: no gate.
        gk: A gate for each key channel, chunk-local cumulative, `[B, T, HV, K]`, log2 units, in any layout. It decays
            D alone; the q, k and w given with it are gated already.
        h0: The forward's initial state `[N, HV, K, V]`, N sequences (B where not packed). Its values are not read.
        dht: Gradient of the final state `[N, HV, K, V]`; None: zeros.
        scale: None: `K ** -0.5`.
        state_v_first: Whether all states are `[..., V, K]`.
        cu_seqlens: Sequence starts of a packed batch `[N + 1]`, int32 or int64; needs B == 1.
        chunk_size: Tokens of a chunk: 16, 32 or 64.
        chunk_indices: `prepare_chunk_indices(cu_seqlens, chunk_size)`, where the caller has it.
        chunk_offsets: Not read: what is remembered with `cu_seqlens` serves.

    Returns:
        `(dh, dh0, dv2)`: `[B, NT, HV, K, V]` in q's dtype (packed: `[1, chunks of all sequences, ...]`);
        `[N, HV, K, V]` fp32, or None without `h0`; `[B, T, HV, V]` in dv's dtype, zero outside every sequence.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together.
        UnsupportedProblemError: K or V above 256, another chunk size, or CPU tensors outside Triton's interpreter.

    Source: Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks, arXiv:2412.06464, section 3.3.
    """
    dh, dh0, dv2 = router.call(
        SPEC,
        (q, k, w, do, dv, g, gk, h0, dht),
        (state_v_first, chunk_size),
        (scale,),
        cu_seqlens,
        chunk_indices,
    )
    assert dh is not None and dv2 is not None
    return dh, dh0, dv2


def _bind(problem: Problem, candidate: Candidate) -> Launch:
    key, BT = problem.key, problem.BT
    H, HV, K, V = key.H, key.HV, key.K, key.V
    BK, BV, prefetch = tiling.chunk_gated_delta_rule_bwd_dhu_tiles(
        candidate.variant, K, V, BT, problem.element_bytes, problem.chip.tiles
    )
    require_room(problem, candidate, "chunk_gated_delta_rule_bwd_dhu", BT=BT, BK=BK, BV=BV)
    v_first, wants_dh0 = problem.form.flag("state_v_first"), problem.has("h0")
    kernel = launcher.bind(
        kernels.chunk_gated_delta_rule_bwd_dhu,
        H=H,
        HV=HV,
        K=K,
        V=V,
        BT=BT,
        BK=BK,
        BV=BV,
        USE_G=problem.has("g"),
        USE_GK=problem.has("gk"),
        USE_FINAL_STATE_GRADIENT=problem.has("dht"),
        STORE_INITIAL_STATE_GRADIENT=wants_dh0,
        STATE_V_FIRST=v_first,
        G_T_CONTIG=candidate.plan.t_contig("g"),
        GK_T_CONTIG=candidate.plan.t_contig("gk"),
        IS_VARLEN=key.varlen,
        PREFETCH=prefetch,
        JOIN_PRODUCTS=problem.chip.tiles == "ascend",
        DOT_PRECISION=DOT_PRECISION,
    )
    programs, default_scale = problem.chip.cube_programs, K**-0.5
    state = (V, K) if v_first else (K, V)

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        w: torch.Tensor,
        do: torch.Tensor,
        dv: torch.Tensor,
        g: torch.Tensor | None,
        gk: torch.Tensor | None,
        h0: torch.Tensor | None,
        dht: torch.Tensor | None,
        scale: float | None,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        B, T = do.shape[0], do.shape[1]
        if cu_seqlens is None or chunk_indices is None:
            NT, N, chunk_offsets = -(-T // BT), B, None
        else:
            NT, N = chunk_indices.shape[0], cu_seqlens.shape[0] - 1
            chunk_offsets = prepare_chunk_offsets(cu_seqlens, BT)
        dh = q.new_empty(B, NT, HV, *state)
        dh0 = q.new_empty(N, HV, *state, dtype=torch.float32) if wants_dh0 else None
        dv2 = torch.empty_like(dv)
        tasks = N * HV * -(-V // BV)
        kernel(
            min(tasks, programs),
            q,
            k,
            w,
            do,
            dv,
            g,
            gk,
            dht,
            dh,
            dv2,
            dh0,
            cu_seqlens,
            chunk_offsets,
            default_scale if scale is None else scale,
            T,
            NT,
            N,
            tasks,
        )
        return dh, dh0, dv2

    return launch


def _state(name: str) -> Operand:
    """A state for each sequence, which the caller may leave out."""
    return Operand(name=name, dims="N HV K V", dims_v_first="N HV V K", optional=True, must_match=False)


SPEC = register(
    OpSpec(
        name="chunk_gated_delta_rule_bwd_dhu",
        operands=(
            Operand(name="q", dims="B T H K", fill="unit"),
            Operand(name="k", dims="B T H K", fill="unit"),
            Operand(name="w", dims="B T HV K", fill="weak"),
            Operand(name="do", dims="B T HV V"),
            Operand(name="dv", dims="B T HV V"),
            Operand(name="g", dims="B T HV", optional=True, time_axis=True, fill="cumulative_decay"),
            Operand(
                name="gk",
                dims="B T HV K",
                optional=True,
                time_axis=True,
                fill="cumulative_decay",
                as_it_lies=True,
            ),
            _state("h0"),
            _state("dht"),
        ),
        outputs=(
            Output(name="dh", dims="B NT HV K V"),
            Output(name="dh0", needs="h0"),
            Output(name="dv2", dims="B T HV V"),
        ),
        options=(
            Option(name="state_v_first", default=False, turns_states=True),
            Option(name="chunk_size", default=64, entry="BT", size="BT"),
        ),
        scalars=("scale",),
        layout_groups=(("g",), ("gk",)),
        variants=("wide", "narrow"),
        default_variant=default_width,
        bind=_bind,
        reference=reference.chunk_gated_delta_rule_bwd_dhu,
        forms={"training": "BT=64,g=float32@STRIDE_HV"},
        more_forms=(
            "BT=64",
            "BT=64,dht=float32,g=float32@STRIDE_HV,h0=float32",
            "BT=64,dht=float32,g=float32@T_CONTIG,h0=float32,state_v_first=1",
            "BT=64,g=float32@OTHER,h0=float32",
            "BT=64,dht=float32,gk=float32@STRIDE_HV",
            "BT=64,gk=float32@T_CONTIG,h0=float32",
            "BT=64,g=bfloat16@STRIDE_HV,gk=float32@OTHER,h0=float32",
            "BT=32,g=float32@STRIDE_HV",
            "BT=16,dht=float32,g=float32@STRIDE_HV",
        ),
        tolerances={"dh": 0.006, "dh0": 0.006, "dv2": 0.006},
    )
)
