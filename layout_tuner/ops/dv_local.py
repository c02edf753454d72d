"""`chunk_bwd_dv_local`: the gradient of the chunk output with respect to the values, within each chunk."""

from __future__ import annotations

import torch

from layout_tuner.kernels import dv_local as kernels
from layout_tuner.kernels import tiling

from .. import reference
from ..dispatch import router
from ..launch import launcher
from ..launch.direct import Constant
from ..launch.prepared import present
from ..spec.declaration import Candidate, Launch, OpSpec, Problem
from ..spec.operands import DTYPES, Operand, Option, Output
from ..spec.registry import register
from .sizes import DOT_PRECISION, chunk_counts, require_room


def chunk_bwd_dv_local(
    q: torch.Tensor,
    k: torch.Tensor,
    do: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    A: torch.Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient of the chunk output with respect to the values, within each chunk.

    dv[t] = sum over s >= t of scale * <k[t], q[s]> * 2**(g[s] - g[t]) * do[s], s and t in one chunk.

    Args:
        q: Queries `[B, T, H, K]`, fp32, bf16 or fp16.
        k: Keys `[B, T, H, K]`, the dtype of q.
        do: Gradient of the output `[B, T, HV, V]`, the dtype of q; HV a multiple of H.
        g: Chunk-local cumulative gate `[B, T, HV]`, fp32, bf16 or fp16, log2 units, in any layout. None: no gate.
        g_gamma: In place of `g`, a gate that decays by the same factor every token, `[HV]`, log2 units.
        A: `scale * <q[s], k[t]> * 2**(g[s] - g[t])` as the forward computed it, `[B, T, HV, chunk_size]`, row s,
            column t of its chunk. Where given, q, k, g, g_gamma and scale are not read.
        scale: None: `K ** -0.5`.
        cu_seqlens: Sequence starts of a packed batch `[N + 1]`, int32 or int64; needs B == 1.
        chunk_size: Tokens of a chunk: 16, 32 or 64.
        chunk_indices: `prepare_chunk_indices(cu_seqlens, chunk_size)`, where the caller has it.

    Returns:
        dv `[B, T, HV, V]`, the dtype of `do`; zero for tokens outside every sequence.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together; `g` and `g_gamma` both given.
        UnsupportedProblemError: K or V above 256, another chunk size, or CPU tensors outside Triton's interpreter.

    Source: Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks, arXiv:2412.06464, section 3.3.
    """
    if g is not None and g_gamma is not None:
        raise ValueError("chunk_bwd_dv_local: g, g_gamma: wanted at most one of them, got both")
    if A is not None:
        g = g_gamma = None
    (dv,) = router.call(SPEC, (q, k, do, g, g_gamma, A), (chunk_size,), (scale,), cu_seqlens, chunk_indices)
    return present(dv)


def _bind(problem: Problem, candidate: Candidate) -> Launch:
    key, BT = problem.key, problem.BT
    H, HV, K, V = key.H, key.HV, key.K, key.V
    BC, BK, BV = tiling.chunk_bwd_dv_local_tiles(candidate.variant, K, V, BT, problem.element_bytes, problem.chip.tiles)
    if candidate.variant == "full":
        require_room(problem, candidate, "chunk_bwd_dv_local_full", BT=BT, BK=BK, BV=BV)
    constants: dict[str, Constant] = dict(
        H=H,
        HV=HV,
        K=K,
        V=V,
        BT=BT,
        BK=BK,
        BV=BV,
        USE_G=problem.has("g"),
        USE_G_GAMMA=problem.has("g_gamma"),
        USE_A=problem.has("A"),
        G_T_CONTIG=candidate.plan.t_contig("g"),
        IS_VARLEN=key.varlen,
        DOT_PRECISION=DOT_PRECISION,
    )
    if candidate.variant == "sub":
        kernel = launcher.bind(kernels.chunk_bwd_dv_local_sub, BC=BC, **constants)
    else:
        kernel = launcher.bind(kernels.chunk_bwd_dv_local_full, **constants)
    programs, default_scale = problem.chip.cube_programs, K**-0.5

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        do: torch.Tensor,
        g: torch.Tensor | None,
        g_gamma: torch.Tensor | None,
        A: torch.Tensor | None,
        scale: float | None,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor]:
        B, T = q.shape[0], q.shape[1]
        dv = torch.empty_like(do)
        NT, N, chunks = chunk_counts(B, T, BT, cu_seqlens, chunk_indices)
        tasks = chunks * HV
        kernel(
            max(1, min(tasks, programs)),
            q,
            k,
            do,
            g,
            g_gamma,
            A,
            dv,
            cu_seqlens,
            chunk_indices,
            default_scale if scale is None else scale,
            T,
            NT,
            N,
            tasks,
        )
        return (dv,)

    return launch


SPEC = register(
    OpSpec(
        name="chunk_bwd_dv_local",
        operands=(
            Operand(name="q", dims="B T H K", fill="unit"),
            Operand(name="k", dims="B T H K", fill="unit"),
            Operand(name="do", dims="B T HV V"),
            Operand(name="g", dims="B T HV", optional=True, time_axis=True, fill="cumulative_decay"),
            Operand(name="g_gamma", dims="HV", optional=True, fill="rate", dtypes=DTYPES, must_match=False),
            Operand(name="A", dims="B T HV BT", optional=True, fill="unit_lower", must_match=False),
        ),
        outputs=(Output(name="dv", dims="B T HV V"),),
        options=(Option(name="chunk_size", default=64, entry="BT", size="BT"),),
        scalars=("scale",),
        layout_groups=(("g",),),
        variants=("full", "sub"),
        bind=_bind,
        reference=reference.chunk_bwd_dv_local,
        forms={"training": "BT=64,g=float32@STRIDE_HV"},
        more_forms=(
            "BT=64",
            "BT=64,g_gamma=float32",
            "BT=64,A=float32",
            "BT=64,g=float32@T_CONTIG",
            "BT=64,g=float32@OTHER",
            "BT=64,g=bfloat16@STRIDE_HV",
            "BT=32,g=float32@STRIDE_HV",
            "BT=16,g=float32@STRIDE_HV",
        ),
        tolerances={"dv": 0.005},
    )
)
