"""`chunk_gated_delta_rule_fwd_h`: the state at the start of every chunk, and the corrected values."""

from __future__ import annotations

import torch

from layout_tuner.kernels import fwd_h as kernels
from layout_tuner.kernels import tiling

from .. import reference
from ..dispatch import router
from ..launch import launcher
from ..spec.declaration import Candidate, Launch, OpSpec, Problem
from ..spec.operands import Operand, Option, Output
from ..spec.packing import chunks_of, prepare_chunk_offsets
from ..spec.registry import register
from .sizes import DOT_PRECISION, default_width, require_room


def chunk_gated_delta_rule_fwd_h(
    k: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    save_new_value: bool = True,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    chunk_offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """States of the gated delta rule, chunk after chunk, and the values that the states leave to add.

    With S the state of one head, h[c] = S at the start of chunk c; v_new = u - w S;
    S = 2**g_last S + k^T (2**(g_last - g) * v_new).

    Args:
        k: Keys `[B, T, H, K]`, fp32, bf16 or fp16, not gated by `g`.
        w: As `recompute_w_u_fwd` makes it, `[B, T, HV, K]`, the dtype of k; HV a multiple of H.
        u: Likewise, `[B, T, HV, V]`, the dtype of k.
        g: Chunk-local cumulative gate `[B, T, HV]`, fp32, bf16 or fp16, log2 units, in any layout. None: no gate.
        gk: A gate for each key channel, chunk-local cumulative, `[B, T, HV, K]`, log2 units, in any layout. It decays
            S alone, by `diag(2**gk_last)`; the k and w given with it are gated already.
        initial_state: `[N, HV, K, V]`, N sequences (B where not packed); None: zeros.
        output_final_state: Whether the states after the last chunk are wanted.
        chunk_size: Tokens of a chunk: 16, 32 or 64.
        save_new_value: Whether v_new is wanted.
        state_v_first: Whether all states are `[..., V, K]`.
        cu_seqlens: Sequence starts of a packed batch `[N + 1]`, int32 or int64; needs B == 1.
        cu_seqlens_cpu: The same on the host, where the caller has them.
        chunk_indices: `prepare_chunk_indices(cu_seqlens, chunk_size)`, where the caller has it.
        chunk_offsets: Not read: what is remembered with `cu_seqlens` serves.

    Returns:
        `(h, v_new, final_state)`: `[B, NT, HV, K, V]` in k's dtype (packed: `[1, chunks of all sequences, ...]`);
        `[B, T, HV, V]` in u's dtype, zero outside every sequence, or None; `[N, HV, K, V]` fp32, or None. An empty
        sequence's final state is its initial state.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together.
        UnsupportedProblemError: K or V above 256, another chunk size, or CPU tensors outside Triton's interpreter.

    Source: Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks, arXiv:2412.06464, section 3.3.
    """
    if cu_seqlens_cpu is not None and cu_seqlens is None:
        raise ValueError("chunk_gated_delta_rule_fwd_h: cu_seqlens_cpu: wanted cu_seqlens with it")
    if cu_seqlens is not None and cu_seqlens_cpu is not None:
        chunk_indices = chunks_of(cu_seqlens, chunk_indices, chunk_size, k.shape[1], cu_seqlens_cpu)
    h, v_new, final_state = router.call(
        SPEC,
        (k, w, u, g, gk, initial_state),
        (output_final_state, chunk_size, save_new_value, state_v_first),
        (),
        cu_seqlens,
        chunk_indices,
    )
    assert h is not None
    return h, v_new, final_state


def _bind(problem: Problem, candidate: Candidate) -> Launch:
    key, BT, form = problem.key, problem.BT, problem.form
    H, HV, K, V = key.H, key.HV, key.K, key.V
    BK, BV, prefetch = tiling.chunk_gated_delta_rule_fwd_h_tiles(
        candidate.variant, K, V, BT, problem.element_bytes, problem.chip.tiles
    )
    require_room(problem, candidate, "chunk_gated_delta_rule_fwd_h", BT=BT, BK=BK, BV=BV)
    output_final_state, v_first = form.flag("output_final_state"), form.flag("state_v_first")
    save_new_value = form.entries.get("save_new_value") != "0"
    kernel = launcher.bind(
        kernels.chunk_gated_delta_rule_fwd_h,
        H=H,
        HV=HV,
        K=K,
        V=V,
        BT=BT,
        BK=BK,
        BV=BV,
        USE_G=problem.has("g"),
        USE_GK=problem.has("gk"),
        USE_INITIAL_STATE=problem.has("initial_state"),
        STORE_FINAL_STATE=output_final_state,
        SAVE_NEW_VALUE=save_new_value,
        STATE_V_FIRST=v_first,
        G_T_CONTIG=candidate.plan.t_contig("g"),
        GK_T_CONTIG=candidate.plan.t_contig("gk"),
        IS_VARLEN=key.varlen,
        PREFETCH=prefetch,
        DOT_PRECISION=DOT_PRECISION,
    )
    programs, state = problem.chip.cube_programs, (V, K) if v_first else (K, V)

    def launch(
        k: torch.Tensor,
        w: torch.Tensor,
        u: torch.Tensor,
        g: torch.Tensor | None,
        gk: torch.Tensor | None,
        initial_state: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        B, T = u.shape[0], u.shape[1]
        if cu_seqlens is None or chunk_indices is None:
            NT, N, chunk_offsets = -(-T // BT), B, None
        else:
            NT, N = chunk_indices.shape[0], cu_seqlens.shape[0] - 1
            chunk_offsets = prepare_chunk_offsets(cu_seqlens, BT)
        h = k.new_empty(B, NT, HV, *state)
        v_new = torch.empty_like(u) if save_new_value else None
        final_state = k.new_empty(N, HV, *state, dtype=torch.float32) if output_final_state else None
        tasks = N * HV * -(-V // BV)
        kernel(
            min(tasks, programs),
            k,
            w,
            u,
            g,
            gk,
            initial_state,
            h,
            v_new,
            final_state,
            cu_seqlens,
            chunk_offsets,
            T,
            NT,
            N,
            tasks,
        )
        return h, v_new, final_state

    return launch


SPEC = register(
    OpSpec(
        name="chunk_gated_delta_rule_fwd_h",
        operands=(
            Operand(name="k", dims="B T H K", fill="unit"),
            Operand(name="w", dims="B T HV K", fill="weak"),
            Operand(name="u", dims="B T HV V"),
            Operand(name="g", dims="B T HV", optional=True, time_axis=True, fill="cumulative_decay"),
            Operand(
                name="gk",
                dims="B T HV K",
                optional=True,
                time_axis=True,
                fill="cumulative_decay",
                as_it_lies=True,
            ),
            Operand(
                name="initial_state",
                dims="N HV K V",
                dims_v_first="N HV V K",
                optional=True,
                must_match=False,
            ),
        ),
        outputs=(
            Output(name="h", dims="B NT HV K V"),
            Output(name="v_new", dims="B T HV V"),
            Output(name="final_state", dims="N HV K V"),
        ),
        options=(
            Option(name="output_final_state", default=False),
            Option(name="chunk_size", default=64, entry="BT", size="BT"),
            Option(name="save_new_value", default=True),
            Option(name="state_v_first", default=False, turns_states=True),
        ),
        layout_groups=(("g",), ("gk",)),
        variants=("wide", "narrow"),
        default_variant=default_width,
        bind=_bind,
        reference=reference.chunk_gated_delta_rule_fwd_h,
        forms={
            "training": "BT=64,g=float32@STRIDE_HV",
            "prefill": "BT=64,g=float32@STRIDE_HV,initial_state=float32,output_final_state=1",
        },
        more_forms=(
            "BT=64,output_final_state=1",
            "BT=64,g=float32@T_CONTIG,initial_state=float32,output_final_state=1,state_v_first=1",
            "BT=64,g=float32@OTHER,save_new_value=0,output_final_state=1",
            "BT=64,gk=float32@STRIDE_HV,output_final_state=1",
            "BT=64,gk=float32@T_CONTIG",
            "BT=64,g=bfloat16@STRIDE_HV,gk=float32@OTHER",
            "BT=32,g=float32@STRIDE_HV",
            "BT=16,g=float32@STRIDE_HV,output_final_state=1",
        ),
        tolerances={"h": 0.006, "v_new": 0.006, "final_state": 0.006},
    )
)
