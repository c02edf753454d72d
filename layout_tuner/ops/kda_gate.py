"""The gate of Kimi Delta Attention, one for each key channel, with its cumulative sum, and its gradients."""

from __future__ import annotations

import torch

from layout_tuner.kernels import kda_gate as kernels
from layout_tuner.kernels import tiling

from .. import reference
from ..dispatch import router
from ..launch import launcher
from ..spec import layouts
from ..spec.declaration import Candidate, Launch, OpSpec, Problem
from ..spec.operands import Operand, Option, Output
from ..spec.registry import register
from .gate import row
from .local_cumsum import output_dtype_name, output_dtype_of, sums_resets
from .sizes import chunk_counts

TOKENS = 64  # of a task that knows no chunks
LOWER_BOUND = -5.0  # where a bounded form is tried without a number


def kda_gate_chunk_cumsum(
    g: torch.Tensor,
    A_log: torch.Tensor | None,
    chunk_size: int,
    scale: float | None = None,
    dt_bias: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: torch.Tensor | None = None,
    lower_bound: float | None = None,
) -> torch.Tensor:
    """The gate of each token and channel from its raw input, summed within each chunk.

    out[t] = scale * (sum of gate[s], s <= t in the chunk of t), the gate -exp(A_log) * softplus(g + dt_bias), or with
    a bound lower_bound * sigmoid(exp(A_log) * (g + dt_bias)).

    Args:
        g: Raw gate input `[B, T, HV, K]` in any layout; fp32, bf16 or fp16.
        A_log: One for each value head (HV elements in any shape). None, with a bound only: a factor of 1.
        chunk_size: Tokens of a chunk: 16, 32 or 64.
        scale: Multiplies the sum; None: 1. `1 / ln 2` gives the base-2 gates of other ops.
        dt_bias: Added to `g`, HV * K elements in any shape. None: nothing.
        cu_seqlens: Sequence starts of a packed batch `[N + 1]`, int32 or int64; needs B == 1.
        output_dtype: Dtype of the result; None: that of `g`.
        chunk_indices: `prepare_chunk_indices(cu_seqlens, chunk_size)`, where the caller has it.
        lower_bound: Smallest gate of a token, negative. None: the gate has no bound.

    Returns:
        The sums `[B, T, HV, K]`; zero for tokens outside every sequence.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together; neither A_log nor a bound; a bound of 0 or more.
        UnsupportedProblemError: K above 256, another chunk size, or CPU tensors outside Triton's interpreter.
    """
    check_gate(SPEC.name, A_log, lower_bound)
    dtype = output_dtype_name(SPEC.name, output_dtype, g)
    tensors = (g, row(A_log), by_head(dt_bias, g))
    options, scalars = (chunk_size, dtype, lower_bound is not None), (scale, lower_bound)
    out = router.call(SPEC, tensors, options, scalars, cu_seqlens, chunk_indices)[0]
    assert out is not None
    return out


def kda_gate_fwd(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype | None = torch.float,
) -> torch.Tensor:
    """The gate of each token and channel, natural log: `kda_gate_chunk_cumsum` without its sum.

    Args:
        g: Raw gate input `[..., HV, K]`; fp32, bf16 or fp16.
        A_log: One for each value head (HV elements in any shape). None, with a bound only: a factor of 1.
        dt_bias: Added to `g`, HV * K elements in any shape. None: nothing.
        lower_bound: Smallest gate of a token, negative. None: the gate has no bound.
        output_dtype: Dtype of the result; None: that of `g`.

    Returns:
        The gate, the shape of `g`.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together; neither A_log nor a bound; a bound of 0 or more.
        UnsupportedProblemError: K above 256, or CPU tensors outside Triton's interpreter.
    """
    check_gate(FWD_SPEC.name, A_log, lower_bound)
    dtype = output_dtype_name(FWD_SPEC.name, output_dtype, g)
    tensors = (as_batch(g), row(A_log), by_head(dt_bias, g))
    out = router.call(FWD_SPEC, tensors, (dtype, lower_bound is not None), (lower_bound,))[0]
    assert out is not None
    return out.view(g.shape)


def kda_gate_bwd(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dyg: torch.Tensor | None = None,
    lower_bound: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of `kda_gate_fwd`.

    dg = -exp(A_log) * sigmoid(g + dt_bias) * dyg and dA_log = sum of dyg * gate, or with a bound and s the sigmoid
    dg = dyg * lower_bound * s (1 - s) * exp(A_log) and dA_log = sum of dg * (g + dt_bias); ddt_bias = sum of dg.

    Args:
        g: Raw gate input `[..., HV, K]`; fp32, bf16 or fp16.
        A_log: One for each value head (HV elements in any shape), or None with a bound.
        dt_bias: Added to `g`, HV * K elements in any shape, or None.
        dyg: Gradient of the gate of each token, natural log, the shape of `g`, in any layout; required. Zero for
            tokens outside every sequence.
        lower_bound: As in the forward.

    Returns:
        dg in g's shape and dtype, dA_log in A_log's, ddt_bias in dt_bias's; None for what was not given.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together; no dyg; neither A_log nor a bound.
        UnsupportedProblemError: K above 256, or CPU tensors outside Triton's interpreter.
    """
    check_gate(BWD_SPEC.name, A_log, lower_bound)
    tensors = (as_batch(g), row(A_log), by_head(dt_bias, g), as_batch(dyg))
    dg, dA_log, ddt_bias = router.call(BWD_SPEC, tensors, (lower_bound is not None,), (lower_bound,))
    assert dg is not None
    return (
        dg.view(g.shape),
        None if A_log is None or dA_log is None else dA_log.view(A_log.shape),
        None if dt_bias is None or ddt_bias is None else ddt_bias.view(dt_bias.shape),
    )


def fused_kda_gate(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype | None = torch.float,
) -> torch.Tensor:
    """`kda_gate_fwd` with gradients to g, A_log and dt_bias."""
    out: torch.Tensor = _FusedGate.apply(g, A_log, dt_bias, lower_bound, output_dtype)  # type: ignore[no-untyped-call]
    return out


class _FusedGate(torch.autograd.Function):
    """`kda_gate_fwd` and its backward."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        g: torch.Tensor,
        A_log: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        lower_bound: float | None,
        output_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(g, A_log, dt_bias)  # type: ignore[arg-type]
        ctx.lower_bound = lower_bound  # type: ignore[attr-defined]
        return kda_gate_fwd(g, A_log, dt_bias, lower_bound, output_dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: torch.autograd.function.FunctionCtx, dyg: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None]:
        g, A_log, dt_bias = ctx.saved_tensors  # type: ignore[attr-defined]
        return *kda_gate_bwd(g, A_log, dt_bias, dyg, ctx.lower_bound), None, None  # type: ignore[attr-defined]


def chunk_local_cumsum_channels(
    g: torch.Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cumulative sum of a gate with channels within each chunk, in either layout of it.

    out[t] = scale * (sum of g[s], s <= t), or s >= t where reversed, s and t in one chunk.

    Args:
        g: Gate of each token and channel `[B, T, HV, K]` in any layout; fp32, bf16 or fp16.
        chunk_size: Tokens of a chunk: 16, 32 or 64.
        reverse: Sum from the end of the chunk.
        scale: Multiplies the sum; None: 1. With `1 / ln 2` natural-log gates become the base-2 ones of other ops.
        cu_seqlens: Sequence starts of a packed batch `[N + 1]`, int32 or int64; needs B == 1.
        output_dtype: Dtype of the result; None: that of `g`.
        chunk_indices: `prepare_chunk_indices(cu_seqlens, chunk_size)`, where the caller has it.

    Returns:
        The sums `[B, T, HV, K]`; zero for tokens outside every sequence.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together.
        UnsupportedProblemError: K above 256, another chunk size, or CPU tensors outside Triton's interpreter.
    """
    dtype = output_dtype_name(CUMSUM_SPEC.name, output_dtype, g)
    out = router.call(CUMSUM_SPEC, (g,), (chunk_size, reverse, dtype), (scale,), cu_seqlens, chunk_indices)[0]
    assert out is not None
    return out


def check_gate(op: str, A_log: torch.Tensor | None, lower_bound: float | None) -> None:
    """Refuse a gate without a rate, and a bound that is none."""
    if A_log is None and lower_bound is None:
        raise ValueError(f"{op}: A_log: wanted [HV], got None, which is a factor of 1 with a lower_bound only")
    if isinstance(lower_bound, (int, float)) and not lower_bound < 0.0:
        raise ValueError(f"{op}: lower_bound: wanted a number below 0, got {lower_bound}")


def by_head(dt_bias: torch.Tensor | None, g: torch.Tensor) -> torch.Tensor | None:
    """A bias of any shape as `[HV, K]`; what does not fit is left to the check of the call."""
    if isinstance(dt_bias, torch.Tensor) and isinstance(g, torch.Tensor) and g.dim() >= 2:
        return dt_bias.reshape(g.shape[-2:]) if dt_bias.numel() == g.shape[-2] * g.shape[-1] else dt_bias
    return dt_bias


def as_batch(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """`[..., HV, K]` as `[B, T, HV, K]`."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() == 4 or tensor.dim() < 2:
        return tensor
    return tensor.reshape(1, -1, *tensor.shape[-2:])


def _kind(problem: Problem) -> str:
    """Which gate a form asks for."""
    return "bounded" if problem.form.flag("bounded") else "softplus"


def _split(problem: Problem) -> bool:
    """Whether sums are products of bf16 parts: a GPU's matrix unit has no other way to add up 24 bits."""
    return problem.chip.kind == "cuda"


def _bind_sums(problem: Problem, candidate: Candidate, gate: str, *, cumulative: bool) -> Launch:
    """The launch of a gate, of its sums or of both."""
    key, plan, form = problem.key, candidate.plan, problem.form
    HV, K, BT = key.HV, key.K, problem.BT
    BK = tiling.kda_gate_columns(K, problem.chip.tiles)
    dtype, packed = output_dtype_of(problem), key.varlen and cumulative
    kernel = launcher.bind(
        kernels.kda_gate_chunk_cumsum,
        HV=HV,
        K=K,
        BT=BT,
        BK=BK,
        GATE=gate,
        USE_A_LOG=problem.has("A_log"),
        USE_DT_BIAS=problem.has("dt_bias"),
        CUMULATIVE=cumulative,
        REVERSE=form.flag("reverse"),
        RESETS=sums_resets(problem),
        G_T_CONTIG=plan.t_contig("g"),
        OUT_T_CONTIG=plan.t_contig("out"),
        IS_VARLEN=packed,
        SPLIT=_split(problem),
    )
    programs, blocks = problem.chip.cube_programs, -(-K // BK)

    def launch(
        g: torch.Tensor,
        A_log: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        scale: float | None,
        lower_bound: float | None,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor]:
        B, T = g.shape[0], g.shape[1]
        out = layouts.empty((B, T, HV, K), plan["out"], dtype, g.device)
        starts, chunks_of = (cu_seqlens, chunk_indices) if packed else (None, None)
        NT, N, chunks = chunk_counts(B, T, BT, starts, chunks_of)
        tasks = chunks * HV * blocks
        kernel(
            max(1, min(tasks, programs)),
            g,
            A_log,
            dt_bias,
            out,
            starts,
            chunks_of,
            1.0 if scale is None else scale,
            LOWER_BOUND if lower_bound is None else lower_bound,
            T,
            NT,
            N,
            tasks,
        )
        return (out,)

    return launch


def _bind(problem: Problem, candidate: Candidate) -> Launch:
    return _bind_sums(problem, candidate, _kind(problem), cumulative=True)


def _bind_fwd(problem: Problem, candidate: Candidate) -> Launch:
    gate = _bind_sums(problem, candidate, _kind(problem), cumulative=False)

    def launch(
        g: torch.Tensor,
        A_log: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        lower_bound: float | None,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        return gate(g, A_log, dt_bias, None, lower_bound, None, None)

    return launch


def _bind_cumsum(problem: Problem, candidate: Candidate) -> Launch:
    sums = _bind_sums(problem, candidate, "plain", cumulative=True)

    def launch(
        g: torch.Tensor,
        scale: float | None,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        return sums(g, None, None, scale, None, cu_seqlens, chunk_indices)

    return launch


def _bind_bwd(problem: Problem, candidate: Candidate) -> Launch:
    key, plan = problem.key, candidate.plan
    HV, K = key.HV, key.K
    BK = tiling.kda_gate_columns(K, problem.chip.tiles)
    kernel = launcher.bind(
        kernels.kda_gate_bwd,
        HV=HV,
        K=K,
        BT=TOKENS,
        BK=BK,
        GATE=_kind(problem),
        USE_A_LOG=problem.has("A_log"),
        USE_DT_BIAS=problem.has("dt_bias"),
        RESETS=sums_resets(problem),
        G_T_CONTIG=plan.t_contig("g"),
        DGATE_T_CONTIG=plan.t_contig("dyg"),
        DG_T_CONTIG=plan.t_contig("dg"),
        SPLIT=_split(problem),
    )
    programs, columns = problem.chip.cube_programs, HV * -(-K // BK)

    def launch(
        g: torch.Tensor,
        A_log: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        dyg: torch.Tensor,
        lower_bound: float | None,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        B, T = g.shape[0], g.shape[1]
        dg = layouts.empty((B, T, HV, K), plan["dg"], g.dtype, g.device)
        row_blocks = -(-T // TOKENS)
        blocks = B * row_blocks
        segment = -(-blocks // max(1, programs // columns))
        segments = -(-blocks // segment)
        sums = torch.empty((segments, 2, HV, K), dtype=torch.float32, device=g.device)
        bound, tasks = LOWER_BOUND if lower_bound is None else lower_bound, segments * columns
        grid = max(1, min(tasks, programs))
        kernel(grid, g, A_log, dt_bias, dyg, dg, sums, bound, T, row_blocks, blocks, segment, tasks)
        dA_log, ddt_bias = sums.sum(0)
        return (
            dg,
            None if A_log is None else dA_log.sum(1).to(A_log.dtype),
            None if dt_bias is None else ddt_bias.to(dt_bias.dtype),
        )

    return launch


def _bound(bounded: bool, lower_bound: float | None) -> float | None:
    """The bound of a call; `LOWER_BOUND` where its form has one and its numbers do not."""
    return (LOWER_BOUND if lower_bound is None else lower_bound) if bounded else None


def _reference(
    g: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    chunk_size: int,
    output_dtype: str,
    bounded: bool,
    scale: float | None,
    lower_bound: float | None,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    bound = _bound(bounded, lower_bound)
    return reference.kda_gate_chunk_cumsum(g, A_log, chunk_size, scale, dt_bias, cu_seqlens, lower_bound=bound)


def _reference_fwd(
    g: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    output_dtype: str,
    bounded: bool,
    lower_bound: float | None,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    return reference.kda_gate_fwd(g, A_log, dt_bias, _bound(bounded, lower_bound))


def _reference_bwd(
    g: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dyg: torch.Tensor,
    bounded: bool,
    lower_bound: float | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    return reference.kda_gate_bwd(g, A_log, dt_bias, dyg, _bound(bounded, lower_bound))


def _term_rms(
    wanted: object,
    g: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dyg: torch.Tensor,
    bounded: bool,
    lower_bound: float | None,
    cu_seqlens: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    return reference.kda_gate_bwd_term_rms(g, A_log, dt_bias, dyg, _bound(bounded, lower_bound))


_RAW = (
    Operand(name="g", dims="B T HV K", time_axis=True),
    Operand(name="A_log", dims="HV", optional=True, fill="small", must_match=False),
    Operand(name="dt_bias", dims="HV K", optional=True, must_match=False),
)
_OUT = (Output(name="out", dims="B T HV K", time_axis=True),)
_CHUNK = Option(name="chunk_size", default=64, entry="BT", size="BT")
_DTYPE = Option(name="output_dtype", default="float32", names_dtype=True)
_BOUNDED = Option(name="bounded", default=False)

SPEC = register(
    OpSpec(
        name="kda_gate_chunk_cumsum",
        operands=_RAW,
        outputs=_OUT,
        options=(_CHUNK, _DTYPE, _BOUNDED),
        scalars=("scale", "lower_bound"),
        layout_groups=(("g",), ("out",)),
        variants=("triangle",),
        bind=_bind,
        reference=_reference,
        forms={"training": "BT=64,A_log=float32,dt_bias=float32,g=float32@STRIDE_HV,output_dtype=float32"},
        more_forms=(
            "BT=64,A_log=float32,bounded=1,dt_bias=float32,g=float32@T_CONTIG,output_dtype=float32",
            "BT=32,bounded=1,g=float32@OTHER,output_dtype=float32",
            "BT=16,A_log=float32,dt_bias=bfloat16,g=float32@STRIDE_HV,output_dtype=float32",
        ),
    )
)

FWD_SPEC = register(
    OpSpec(
        name="kda_gate_fwd",
        operands=_RAW,
        outputs=_OUT,
        options=(_DTYPE, _BOUNDED),
        scalars=("lower_bound",),
        layout_groups=(("g",), ("out",)),
        variants=("tokens",),
        bind=_bind_fwd,
        reference=_reference_fwd,
        forms={"training": "A_log=float32,dt_bias=float32,g=float32@STRIDE_HV,output_dtype=float32"},
        more_forms=("bounded=1,g=float32@T_CONTIG,output_dtype=float32",),
    )
)

BWD_SPEC = register(
    OpSpec(
        name="kda_gate_bwd",
        operands=(*_RAW, Operand(name="dyg", dims="B T HV K", time_axis=True)),
        outputs=(
            Output(name="dg", time_axis=True),
            Output(name="dA_log", needs="A_log"),
            Output(name="ddt_bias", needs="dt_bias"),
        ),
        options=(_BOUNDED,),
        scalars=("lower_bound",),
        layout_groups=(("g", "dg"), ("dyg",)),
        variants=("tokens",),
        bind=_bind_bwd,
        reference=_reference_bwd,
        term_rms=_term_rms,
        forms={"training": "A_log=float32,dt_bias=float32,dyg=float32@STRIDE_HV,g=float32@STRIDE_HV"},
        more_forms=(
            "bounded=1,dyg=float32@T_CONTIG,g=float32@STRIDE_HV",
            "A_log=float32,bounded=1,dt_bias=float32,dyg=float32@OTHER,g=float32@T_CONTIG",
        ),
    )
)

CUMSUM_SPEC = register(
    OpSpec(
        name="chunk_local_cumsum_channels",
        operands=(Operand(name="g", dims="B T HV K", time_axis=True, fill="decay"),),
        outputs=_OUT,
        options=(_CHUNK, Option(name="reverse", default=False), _DTYPE),
        scalars=("scale",),
        layout_groups=(("g",), ("out",)),
        variants=("triangle",),
        bind=_bind_cumsum,
        reference=reference.chunk_local_cumsum,
        forms={
            "training": "BT=64,g=float32@STRIDE_HV,output_dtype=float32",
            "gradient": "BT=64,g=float32@STRIDE_HV,output_dtype=float32,reverse=1",
        },
        more_forms=(
            "BT=32,g=float32@T_CONTIG,output_dtype=float32,reverse=1",
            "BT=16,g=float32@OTHER,output_dtype=float32",
        ),
    )
)
