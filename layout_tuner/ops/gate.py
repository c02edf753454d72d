"""`gdn_gate_chunk_cumsum` and `gdn_gate_bwd`: the gate of Gated DeltaNet with its cumulative sum, and its gradients."""

from __future__ import annotations

import torch

from layout_tuner.kernels import gate as kernels
from layout_tuner.kernels import tiling

from .. import reference
from ..dispatch import router
from ..launch import launcher
from ..spec import layouts
from ..spec.declaration import Candidate, Launch, OpSpec, Problem
from ..spec.operands import Operand, Option, Output
from ..spec.registry import register
from .local_cumsum import output_dtype_name, output_dtype_of, sum_precision, sums_resets
from .sizes import chunk_counts

TOKENS = 64  # of a task of the backward, which knows no chunks


def gdn_gate_chunk_cumsum(
    g: torch.Tensor,
    A_log: torch.Tensor,
    chunk_size: int,
    scale: float | None = None,
    dt_bias: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
) -> torch.Tensor:
    """The gate of each token from its raw input, summed within each chunk.

    out[t] = scale * (sum of -exp(A_log) * softplus(g[s] + dt_bias), s <= t in the chunk of t).

    Args:
        g: Raw gate input `[B, T, HV]` in any layout; fp32, bf16 or fp16.
        A_log: Log of the decay rate, one for each value head (HV elements in any shape).
        chunk_size: Tokens of a chunk: 16, 32 or 64.
        scale: Multiplies the sum; None: 1. `1 / ln 2` gives the base-2 gates of other ops.
        dt_bias: Added to `g`, one for each value head. None: nothing.
        cu_seqlens: Sequence starts of a packed batch `[N + 1]`, int32 or int64; needs B == 1.
        chunk_indices: `prepare_chunk_indices(cu_seqlens, chunk_size)`, where the caller has it.
        output_dtype: Dtype of the result; None: that of `g`.

    Returns:
        The sums `[B, T, HV]`; zero for tokens outside every sequence.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together.
        UnsupportedProblemError: Another chunk size, or CPU tensors outside Triton's interpreter.
    """
    dtype = output_dtype_name(SPEC.name, output_dtype, g)
    tensors = (g, row(A_log), row(dt_bias))
    out = router.call(SPEC, tensors, (chunk_size, dtype), (scale,), cu_seqlens, chunk_indices)[0]
    assert out is not None
    return out


def row(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor of any shape as a row; what is none is left to the check of the call."""
    return tensor.reshape(-1) if isinstance(tensor, torch.Tensor) else tensor


def gdn_gate_bwd(
    g: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor | None, dyg: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of the gate -exp(A_log) * softplus(g + dt_bias).

    dg = -exp(A_log) * sigmoid(g + dt_bias) * dyg; dA_log = sum of dyg * gate, ddt_bias = sum of dg over all tokens.

    Args:
        g: Raw gate input `[B, T, HV]` in any layout; fp32, bf16 or fp16.
        A_log: Log of the decay rate, one for each value head (HV elements in any shape).
        dt_bias: Added to `g`, one for each value head, or None.
        dyg: Gradient of the gate of each token, natural log, `[B, T, HV]` in any layout.

    Returns:
        dg `[B, T, HV]` in g's dtype, dA_log in A_log's shape and dtype, ddt_bias in dt_bias's, None without it.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together.
        UnsupportedProblemError: CPU tensors outside Triton's interpreter.
    """
    dg, dA_log, ddt_bias = router.call(BWD_SPEC, (g, row(A_log), row(dt_bias), dyg), (), ())
    assert dg is not None and dA_log is not None
    dA_log = dA_log.view(A_log.shape)
    return dg, dA_log, None if dt_bias is None or ddt_bias is None else ddt_bias.view(dt_bias.shape)


def _bind(problem: Problem, candidate: Candidate) -> Launch:
    key, BT, plan = problem.key, problem.BT, candidate.plan
    HV, BH = key.HV, tiling.head_block(key.HV, problem.chip.tiles)
    dtype = output_dtype_of(problem)
    kernel = launcher.bind(
        kernels.gdn_gate_chunk_cumsum,
        HV=HV,
        BT=BT,
        BH=BH,
        USE_DT_BIAS=problem.has("dt_bias"),
        RESETS=sums_resets(problem),
        G_T_CONTIG=plan.t_contig("g"),
        OUT_T_CONTIG=plan.t_contig("out"),
        IS_VARLEN=key.varlen,
        DOT_PRECISION=sum_precision(problem),
    )
    programs, head_blocks = problem.chip.cube_programs, -(-HV // BH)

    def launch(
        g: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor | None,
        scale: float | None,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor]:
        B, T = g.shape[0], g.shape[1]
        out = layouts.empty((B, T, HV), plan["out"], dtype, g.device)
        NT, N, chunks = chunk_counts(B, T, BT, cu_seqlens, chunk_indices)
        tasks = chunks * head_blocks
        kernel(
            max(1, min(tasks, programs)),
            g,
            A_log,
            dt_bias,
            out,
            cu_seqlens,
            chunk_indices,
            1.0 if scale is None else scale,
            T,
            NT,
            N,
            tasks,
        )
        return (out,)

    return launch


def _bind_bwd(problem: Problem, candidate: Candidate) -> Launch:
    key, plan = problem.key, candidate.plan
    HV = key.HV
    kernel = launcher.bind(
        kernels.gdn_gate_bwd,
        HV=HV,
        BT=TOKENS,
        BH=tiling.head_block(HV, problem.chip.tiles),
        USE_DT_BIAS=problem.has("dt_bias"),
        RESETS=sums_resets(problem),
        G_T_CONTIG=plan.t_contig("g"),
        DGATE_T_CONTIG=plan.t_contig("dyg"),
        DG_T_CONTIG=plan.t_contig("dg"),
        DOT_PRECISION=sum_precision(problem),
    )
    programs = problem.chip.cube_programs

    def launch(
        g: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor | None,
        dyg: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        B, T = g.shape[0], g.shape[1]
        dg = layouts.empty((B, T, HV), plan["dg"], g.dtype, g.device)
        row_blocks = -(-T // TOKENS)
        tasks = B * row_blocks
        grid = min(tasks, programs)
        sums = torch.empty((grid, 2, HV), dtype=torch.float32, device=g.device)
        kernel(grid, g, A_log, dt_bias, dyg, dg, sums, T, row_blocks, tasks)
        dA_log, ddt_bias = sums.sum(0)
        dA_log = dA_log.to(A_log.dtype).view(A_log.shape)
        return dg, dA_log, None if dt_bias is None else ddt_bias.to(dt_bias.dtype).view(dt_bias.shape)

    return launch


def _reference_bwd(
    g: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None,
    dyg: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The oracle: tokens are summed whatever sequence they belong to."""
    return reference.gdn_gate_bwd(g, A_log, dt_bias, dyg)


SPEC = register(
    OpSpec(
        name="gdn_gate_chunk_cumsum",
        operands=(
            Operand(name="g", dims="B T HV", time_axis=True),
            Operand(name="A_log", dims="HV", must_match=False),
            Operand(name="dt_bias", dims="HV", optional=True, must_match=False),
        ),
        outputs=(Output(name="out", dims="B T HV", time_axis=True),),
        options=(
            Option(name="chunk_size", default=64, entry="BT", size="BT"),
            Option(name="output_dtype", default="float32", names_dtype=True),
        ),
        scalars=("scale",),
        layout_groups=(("g",), ("out",)),
        reads_heads=True,
        variants=("triangle",),
        bind=_bind,
        reference=reference.gdn_gate_chunk_cumsum,
        forms={"training": "BT=64,A_log=float32,dt_bias=float32,g=float32@STRIDE_HV,output_dtype=float32"},
        more_forms=(
            "BT=64,A_log=float32,g=float32@STRIDE_HV,output_dtype=float32",
            "BT=64,A_log=float32,dt_bias=float32,g=float32@T_CONTIG,output_dtype=float32",
            "BT=64,A_log=float32,dt_bias=bfloat16,g=float32@OTHER,output_dtype=float32",
            "BT=16,A_log=float32,dt_bias=float32,g=float32@STRIDE_HV,output_dtype=float32",
        ),
    )
)

BWD_SPEC = register(
    OpSpec(
        name="gdn_gate_bwd",
        operands=(
            Operand(name="g", dims="B T HV", time_axis=True),
            Operand(name="A_log", dims="HV", must_match=False),
            Operand(name="dt_bias", dims="HV", optional=True, must_match=False),
            Operand(name="dyg", dims="B T HV", time_axis=True),
        ),
        outputs=(
            Output(name="dg", time_axis=True),
            Output(name="dA_log"),
            Output(name="ddt_bias", needs="dt_bias"),
        ),
        layout_groups=(("g", "dg"), ("dyg",)),
        reads_heads=True,
        variants=("tokens",),
        bind=_bind_bwd,
        reference=_reference_bwd,
        forms={"training": "A_log=float32,dt_bias=float32,dyg=float32@STRIDE_HV,g=float32@STRIDE_HV"},
        more_forms=(
            "A_log=float32,dyg=float32@T_CONTIG,g=float32@STRIDE_HV",
            "A_log=float32,dt_bias=float32,dyg=float32@T_CONTIG,g=float32@T_CONTIG",
            "A_log=float32,dt_bias=float32,dyg=bfloat16@OTHER,g=float32@OTHER",
        ),
    )
)
