"""The chain's inner part with its state on the chip: few kernels, and little between them in memory.

Bound once for a problem and a layout, as the stages are; `gated_delta_rule.Chain` runs them in place of its stages.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from layout_tuner.kernels import fused_bwd, fused_fwd, tiling

from ...launch import launcher
from ...spec import layouts
from ...spec.declaration import Candidate, Problem
from ...spec.layouts import Layout, LayoutPlan
from ...spec.packing import prepare_chunk_offsets
from ..intra import bind_inverse
from ..sizes import DOT_PRECISION, chunk_counts

Tensor = torch.Tensor
Packed = tuple["Tensor | None", "Tensor | None"]
Forward = Callable[
    [Tensor, Tensor, Tensor, "Tensor | None", Tensor, "Tensor | None", "float | None", Packed],
    tuple[Tensor, "Tensor | None", Tensor],
]


def state_tile(problem: Problem) -> int:
    """Columns of the state that a walk's task holds: as many as leave every multiprocessor of a GPU a task."""
    key = problem.key
    BV = tiling.fused_columns(key.K, key.V, problem.element_bytes, problem.chip.tiles)
    while problem.chip.kind == "cuda" and BV > 16 and problem.chip.cores > key.B * key.HV * -(-key.V // BV):
        BV //= 2
    return BV


def bind_scores(problem: Problem, layout: Layout) -> Callable[..., Tensor]:
    """P = scale * tril(q k^T * decay) of every chunk, `[B, T, HV, BT]` in q's dtype."""
    key, BT, programs = problem.key, problem.BT, problem.chip.cube_programs
    H, HV, default_scale = key.H, key.HV, key.K**-0.5
    kernel = launcher.bind(
        fused_fwd.chunk_scores,
        H=H,
        HV=HV,
        K=key.K,
        BT=BT,
        BK=tiling.chunk_scores_tile(key.K, problem.element_bytes, problem.chip.tiles),
        USE_G=problem.has("g"),
        G_T_CONTIG=layout is Layout.T_CONTIG,
        IS_VARLEN=key.varlen,
        DOT_PRECISION=DOT_PRECISION,
    )

    def scores(q: Tensor, k: Tensor, G: Tensor | None, scale: float | None, packed: Packed) -> Tensor:
        B, T = q.shape[0], q.shape[1]
        P = q.new_empty(B, T, HV, BT)
        NT, N, chunks = chunk_counts(B, T, BT, *packed)
        tasks = chunks * H
        kernel(
            max(1, min(tasks, programs)),
            q,
            k,
            G,
            P,
            *packed,
            default_scale if scale is None else scale,
            T,
            NT,
            N,
            tasks,
        )
        return P

    return scores


def sequences(B: int, T: int, BT: int, packed: Packed) -> tuple[int, int, Tensor | None]:
    """`(NT, N, chunk_offsets)`: chunks of a row (of a whole packed batch), sequences, where their chunks begin."""
    cu_seqlens, chunk_indices = packed
    if cu_seqlens is None or chunk_indices is None:
        return -(-T // BT), B, None
    return chunk_indices.shape[0], cu_seqlens.shape[0] - 1, prepare_chunk_offsets(cu_seqlens, BT)


def bind_walk(problem: Problem, layout: Layout, *, states: bool) -> tuple[launcher.BoundKernel, int]:
    """The walk, for the output or for the states, and the columns of a task."""
    key, BT, form = problem.key, problem.BT, problem.form
    BK, BV = tiling.power_of_two(key.K, 16, 256), state_tile(problem)
    stage = BT * (BK + BV + BT if states else 2 * BK + BV + 2 * BT)
    scratch = BV * (BK + BT)
    size = problem.element_bytes
    kernel = launcher.bind(
        fused_fwd.chunk_gated_delta_rule_fwd_walk,
        H=key.H,
        HV=key.HV,
        K=key.K,
        V=key.V,
        BT=BT,
        BK=BK,
        BV=BV,
        USE_G=problem.has("g"),
        USE_INITIAL_STATE=problem.has("initial_state"),
        STORE_OUTPUT=not states,
        STORE_STATES=states,
        STORE_FINAL_STATE=not states and form.flag("output_final_state"),
        STATE_V_FIRST=form.flag("state_v_first"),
        G_T_CONTIG=layout is Layout.T_CONTIG,
        BETA_T_CONTIG=layout is Layout.T_CONTIG,
        IS_VARLEN=key.varlen,
        PREFETCH=tiling.prefetch_fits(stage * size, scratch * size, problem.chip.tiles),
        RELOAD_LEFT=problem.chip.tiles == "ascend",
        DOT_PRECISION=DOT_PRECISION,
    )
    return kernel, BV


def bind_forward(problem: Problem, layout: Layout) -> Forward:
    """Output, final state and A from the activated inputs and the cumulative gate."""
    key, BT, programs = problem.key, problem.BT, problem.chip.cube_programs
    HV, V, default_scale = key.HV, key.V, key.K**-0.5
    plan = LayoutPlan.of({"g": layout, "beta": layout})
    inverse = bind_inverse(problem, Candidate(variant="full", plan=plan, revision=""))
    scores = bind_scores(problem, layout)
    walk, BV = bind_walk(problem, layout, states=False)
    output_final_state = problem.form.flag("output_final_state")
    state = (V, key.K) if problem.form.flag("state_v_first") else (key.K, V)

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        G: Tensor | None,
        beta: Tensor,
        initial_state: Tensor | None,
        scale: float | None,
        packed: Packed,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        A = inverse(k, G, beta, *packed)
        P = scores(q, k, G, scale, packed)
        B, T = v.shape[0], v.shape[1]
        NT, N, chunk_offsets = sequences(B, T, BT, packed)
        o = torch.empty_like(v)
        final_state = v.new_empty(N, HV, *state, dtype=torch.float32) if output_final_state else None
        tasks = N * HV * -(-V // BV)
        walk(
            min(tasks, programs),
            q,
            k,
            v,
            G,
            beta,
            A,
            P,
            initial_state,
            o,
            None,
            None,
            final_state,
            packed[0],
            chunk_offsets,
            default_scale if scale is None else scale,
            T,
            NT,
            N,
            tasks,
        )
        return o, final_state, A

    return forward


def bind_states(problem: Problem, layout: Layout) -> Callable[..., tuple[Tensor, Tensor]]:
    """The states at the start of every chunk and v_new, made again from A."""
    key, BT, programs = problem.key, problem.BT, problem.chip.cube_programs
    HV, K, V = key.HV, key.K, key.V
    walk, BV = bind_walk(problem, layout, states=True)

    def states(
        k: Tensor, v: Tensor, G: Tensor | None, beta: Tensor, A: Tensor, initial_state: Tensor | None, packed: Packed
    ) -> tuple[Tensor, Tensor]:
        NT, N, chunk_offsets = sequences(v.shape[0], v.shape[1], BT, packed)
        h, v_new = k.new_empty(v.shape[0], NT, HV, K, V), torch.empty_like(v)
        tasks = N * HV * -(-V // BV)
        walk(
            min(tasks, programs),
            None,
            k,
            v,
            G,
            beta,
            A,
            None,
            initial_state,
            None,
            h,
            v_new,
            None,
            packed[0],
            chunk_offsets,
            1.0,
            v.shape[1],
            NT,
            N,
            tasks,
        )
        return h, v_new

    return states


def bind_walk_back(
    problem: Problem, layout: Layout, *, last: bool
) -> Callable[..., tuple[Tensor, Tensor, Tensor | None]]:
    """dS at the end of every chunk, dx, and the gradient of the initial state where there is one.

    Args:
        problem: The chain's.
        layout: Of the gate and beta.
        last: Whether the last state has a gradient.
    """
    key, BT, form, programs = problem.key, problem.BT, problem.form, problem.chip.cube_programs
    HV, K, V, default_scale = key.HV, key.K, key.V, key.K**-0.5
    BK, BV, size = tiling.power_of_two(K, 16, 256), state_tile(problem), problem.element_bytes
    wants_dh0, v_first = problem.has("initial_state"), form.flag("state_v_first")
    state = (V, K) if v_first else (K, V)
    kernel = launcher.bind(
        fused_bwd.chunk_gated_delta_rule_bwd_walk,
        H=key.H,
        HV=HV,
        K=K,
        V=V,
        BT=BT,
        BK=BK,
        BV=BV,
        USE_G=problem.has("g"),
        USE_FINAL_STATE_GRADIENT=last,
        STORE_INITIAL_STATE_GRADIENT=wants_dh0,
        STATE_V_FIRST=v_first,
        G_T_CONTIG=layout is Layout.T_CONTIG,
        BETA_T_CONTIG=layout is Layout.T_CONTIG,
        IS_VARLEN=key.varlen,
        PREFETCH=tiling.prefetch_fits(
            BT * (2 * BK + BV + 2 * BT) * size, BV * (BK + 2 * BT) * size, problem.chip.tiles
        ),
        RELOAD_LEFT=problem.chip.tiles == "ascend",
        DOT_PRECISION=DOT_PRECISION,
    )

    def walk_back(
        q: Tensor,
        k: Tensor,
        do: Tensor,
        G: Tensor | None,
        beta: Tensor,
        A: Tensor,
        P: Tensor,
        dht: Tensor | None,
        scale: float | None,
        packed: Packed,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        B, T = do.shape[0], do.shape[1]
        NT, N, chunk_offsets = sequences(B, T, BT, packed)
        dh, dx = q.new_empty(B, NT, HV, K, V), torch.empty_like(do)
        dh0 = q.new_empty(N, HV, *state, dtype=torch.float32) if wants_dh0 else None
        tasks = N * HV * -(-V // BV)
        kernel(
            min(tasks, programs),
            q,
            k,
            do,
            G,
            beta,
            A,
            P,
            dht,
            dh,
            dx,
            dh0,
            packed[0],
            chunk_offsets,
            default_scale if scale is None else scale,
            T,
            NT,
            N,
            tasks,
        )
        return dh, dx, dh0

    return walk_back


def bind_inverse_backward(problem: Problem, layout: Layout) -> Callable[..., Tensor]:
    """dbeta; adds to dk and dG what comes through the inverse, and turns dx into dv where it lies."""
    key, BT, programs = problem.key, problem.BT, problem.chip.cube_programs
    H, contiguous = key.H, layout is Layout.T_CONTIG
    BK, BV = tiling.chunk_bwd_inverse_tiles(key.K, key.V, problem.element_bytes, problem.chip.tiles)
    kernel = launcher.bind(
        fused_bwd.chunk_bwd_inverse,
        H=H,
        HV=key.HV,
        K=key.K,
        V=key.V,
        BT=BT,
        BK=BK,
        BV=BV,
        USE_G=problem.has("g"),
        G_T_CONTIG=contiguous,
        BETA_T_CONTIG=contiguous,
        DG_T_CONTIG=contiguous,
        DB_T_CONTIG=contiguous,
        IS_VARLEN=key.varlen,
        RELOAD_LEFT=problem.chip.tiles == "ascend",
        DOT_PRECISION=DOT_PRECISION,
    )

    def inverse_backward(
        k: Tensor,
        v: Tensor,
        G: Tensor | None,
        beta: Tensor,
        v_new: Tensor,
        y: Tensor,
        dx: Tensor,
        dk: Tensor,
        dG: Tensor | None,
        packed: Packed,
    ) -> Tensor:
        B, T, HV = beta.shape
        NT, N, chunks = chunk_counts(B, T, BT, *packed)
        dbeta = layouts.empty((B, T, HV), layout, torch.float32, k.device)
        tasks = chunks * H
        kernel(max(1, min(tasks, programs)), k, v, beta, v_new, y, G, dx, dk, dbeta, dG, *packed, T, NT, N, tasks)
        return dbeta

    return inverse_backward
