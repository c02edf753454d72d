"""`chunk_bwd_dqkwg`: gradients with respect to queries, keys, `w` and the gate, chunk by chunk."""

from __future__ import annotations

import torch

from layout_tuner.kernels import dg as dg_kernels
from layout_tuner.kernels import dqkwg_full, dqkwg_rows, dqkwg_sub, tiling

from .. import reference
from ..dispatch import router
from ..launch import launcher
from ..launch.direct import Constant
from ..spec import layouts
from ..spec.declaration import Candidate, Launch, OpSpec, Problem
from ..spec.operands import DTYPES, Operand, Option, Output
from ..spec.registry import register
from .sizes import DOT_PRECISION, chunk_counts


def chunk_bwd_dqkwg(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    h: torch.Tensor,
    dh: torch.Tensor,
    w: torch.Tensor | None = None,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients with respect to q, k, w and the gate, given the states at both ends of each chunk.

    With ds = scale * tril(do v^T * 2**(G[t] - G[s])), per head and chunk:
    dq = scale * 2**G * (do h^T) + ds k, dk = 2**(G_last - G) * (v dh^T) + ds^T q, dw = -dv h^T,
    dG = sum_K(dq * q) - sum_K(dk * k), dG[last] += 2**G_last * sum(h * dh) + sum(2**(G_last - G) * (v dh^T) * k).

    Args:
        q: Queries `[B, T, H, K]`, fp32, bf16 or fp16.
        k: Keys `[B, T, H, K]`, the dtype of q.
        v: Corrected values, v_new of `chunk_gated_delta_rule_fwd_h`, `[B, T, HV, V]`; HV a multiple of H.
        do: Gradient of the output `[B, T, HV, V]`.
        h: States at the starts of the chunks `[B, NT, HV, K, V]` (packed: `[1, chunks of all sequences, ...]`).
        dh: Gradients of the states at the ends of the chunks, the shape of h.
        w: Asks for dw; only its shape `[B, T, HV, K]` and dtype matter. Needs dv.
        g: Chunk-local cumulative gate `[B, T, HV]`, fp32, bf16 or fp16, log2 units, in any layout. None: no gate.
        g_gamma: In place of `g`, a gate that decays by the same factor every token, `[HV]`, log2 units.
        dv: Gradient of the corrected values, dv2 of `chunk_gated_delta_rule_bwd_dhu`, `[B, T, HV, V]`; for dw only.
        scale: None: `K ** -0.5`.
        state_v_first: Whether h and dh are `[..., V, K]`.
        cu_seqlens: Sequence starts of a packed batch `[N + 1]`, int32 or int64; needs B == 1.
        chunk_size: Tokens of a chunk: 16, 32 or 64.
        chunk_indices: `prepare_chunk_indices(cu_seqlens, chunk_size)`, where the caller has it.

    Returns:
        `(dq, dk, dw, dg)`: dq, dk `[B, T, H, K]`, summed over the value heads of a group; dw `[B, T, HV, K]`, None
        without w; dg `[B, T, HV]`, fp32, with respect to G in natural-log units, None without g. All are zero for
        tokens outside every sequence.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together; `g` and `g_gamma` both given; w without dv.
        UnsupportedProblemError: K or V above 256, another chunk size, or CPU tensors outside Triton's interpreter.

    Source: Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks, arXiv:2412.06464, section 3.3.
    """
    faults = []
    if g is not None and g_gamma is not None:
        faults.append("g, g_gamma: wanted at most one of them, got both")
    if w is not None and dv is None:
        faults.append("dv: wanted [B, T, HV, V] with w, got None")
    if faults:
        raise ValueError("chunk_bwd_dqkwg: " + "; ".join(faults))
    if w is None:
        dv = None
    dq, dk, dw, dg = router.call(
        SPEC,
        (q, k, v, do, h, dh, w, g, g_gamma, dv),
        (state_v_first, chunk_size),
        (scale,),
        cu_seqlens,
        chunk_indices,
    )
    assert dq is not None and dk is not None
    return dq, dk, dw, dg


def _bind(problem: Problem, candidate: Candidate) -> Launch:
    key, BT = problem.key, problem.BT
    H, HV, K, V = key.H, key.HV, key.K, key.V
    BC, BK, BV, dg_from_values = tiling.chunk_bwd_dqkwg_tiles(
        candidate.variant, K, V, BT, problem.element_bytes, problem.chip.tiles
    )
    wants_dw, wants_dg, v_first = problem.has("w"), problem.has("g"), problem.form.flag("state_v_first")
    shared: dict[str, Constant] = dict(
        H=H,
        HV=HV,
        K=K,
        V=V,
        BT=BT,
        BK=BK,
        BV=BV,
        STATE_V_FIRST=v_first,
        G_T_CONTIG=candidate.plan.t_contig("g"),
        IS_VARLEN=key.varlen,
        DOT_PRECISION=DOT_PRECISION,
    )
    gates: dict[str, Constant] = dict(
        USE_G=wants_dg,
        USE_G_GAMMA=problem.has("g_gamma"),
    )
    dg_layout, dg_t_contig = candidate.plan["dg"], candidate.plan.t_contig("dg")
    dg_apart = candidate.variant == "sub"
    from_rows = wants_dg and not dg_apart and not dg_from_values
    computed_right = problem.chip.tiles == "cuda"
    if dg_apart:
        kernel = launcher.bind(dqkwg_sub.chunk_bwd_dqkwg_sub, BC=BC, USE_DW=wants_dw, **gates, **shared)
    elif from_rows:
        kernel = launcher.bind(
            dqkwg_rows.chunk_bwd_dqkwg_rows,
            GROUP=tiling.power_of_two(HV // H, 1, HV),
            USE_DW=wants_dw,
            DG_T_CONTIG=dg_t_contig,
            COMPUTED_RIGHT=computed_right,
            **shared,
        )
    else:
        kernel = launcher.bind(
            dqkwg_full.chunk_bwd_dqkwg_full,
            USE_DW=wants_dw,
            DG_T_CONTIG=dg_t_contig,
            COMPUTED_RIGHT=computed_right,
            **gates,
            **shared,
        )
    dg_kernel = launcher.bind(dg_kernels.chunk_bwd_dg, DG_T_CONTIG=dg_t_contig, **shared)
    programs, default_scale = problem.chip.cube_programs, K**-0.5

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        do: torch.Tensor,
        h: torch.Tensor,
        dh: torch.Tensor,
        w: torch.Tensor | None,
        g: torch.Tensor | None,
        g_gamma: torch.Tensor | None,
        dv: torch.Tensor | None,
        scale: float | None,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        B, T = q.shape[0], q.shape[1]
        NT, N, chunks = chunk_counts(B, T, BT, cu_seqlens, chunk_indices)
        scale = default_scale if scale is None else scale
        dq, dk = torch.empty_like(q), torch.empty_like(k)
        dw = q.new_empty(B, T, HV, K) if wants_dw else None
        dg = layouts.empty((B, T, HV), dg_layout, torch.float32, q.device) if wants_dg else None
        gate = (g,) if from_rows else (g, g_gamma)
        results = (dq, dk, dw) if dg_apart else (dq, dk, dw, dg)
        kernel(
            max(1, min(chunks * H, programs)),
            q,
            k,
            v,
            do,
            h,
            dh,
            dv,
            *gate,
            *results,
            cu_seqlens,
            chunk_indices,
            scale,
            T,
            NT,
            N,
            chunks * H,
        )
        if wants_dg and dg_apart:
            dg_kernel(
                max(1, min(chunks * HV, programs)),
                q,
                k,
                v,
                do,
                h,
                dh,
                g,
                dg,
                cu_seqlens,
                chunk_indices,
                scale,
                T,
                NT,
                N,
                chunks * HV,
            )
        return dq, dk, dw, dg

    return launch


def _state(name: str) -> Operand:
    """A state for each chunk."""
    return Operand(name=name, dims="B NT HV K V", dims_v_first="B NT HV V K", fill="small")


SPEC = register(
    OpSpec(
        name="chunk_bwd_dqkwg",
        operands=(
            Operand(name="q", dims="B T H K", fill="unit"),
            Operand(name="k", dims="B T H K", fill="unit"),
            Operand(name="v", dims="B T HV V"),
            Operand(name="do", dims="B T HV V"),
            _state("h"),
            _state("dh"),
            Operand(name="w", dims="B T HV K", optional=True, fill="weak"),
            Operand(name="g", dims="B T HV", optional=True, time_axis=True, fill="cumulative_decay"),
            Operand(name="g_gamma", dims="HV", optional=True, fill="rate", dtypes=DTYPES, must_match=False),
            Operand(name="dv", dims="B T HV V", optional=True),
        ),
        outputs=(
            Output(name="dq"),
            Output(name="dk"),
            Output(name="dw", needs="w"),
            Output(name="dg", time_axis=True, needs="g"),
        ),
        options=(
            Option(name="state_v_first", default=False, turns_states=True),
            Option(name="chunk_size", default=64, entry="BT", size="BT"),
        ),
        scalars=("scale",),
        layout_groups=(("g",), ("dg",)),
        variants=("full", "sub"),
        bind=_bind,
        reference=reference.chunk_bwd_dqkwg,
        forms={"training": "BT=64,dv=1,g=float32@STRIDE_HV,w=1"},
        more_forms=(
            "BT=64",
            "BT=64,dv=1,w=1",
            "BT=64,dv=1,g_gamma=float32,state_v_first=1,w=1",
            "BT=64,g=float32@T_CONTIG",
            "BT=32,dv=1,g=bfloat16@OTHER,state_v_first=1,w=1",
            "BT=16,g=float32@STRIDE_HV",
        ),
        tolerances={"dq": 0.006, "dk": 0.006, "dw": 0.006, "dg": 0.006},
        term_rms=lambda wanted, **named: reference.chunk_bwd_dqkwg_term_rms(**named),
    )
)
