"""`chunk_local_cumsum`: cumulative sum of a gate within each chunk."""

from __future__ import annotations

import torch

from layout_tuner.kernels import local_cumsum as kernels
from layout_tuner.kernels import tiling

from .. import reference
from ..dispatch import router
from ..launch import launcher
from ..spec import layouts
from ..spec.declaration import Candidate, Launch, OpSpec, Problem
from ..spec.operands import DTYPES, Operand, Option, Output
from ..spec.registry import register
from .sizes import chunk_counts


def chunk_local_cumsum(
    g: torch.Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cumulative sum of a gate within each chunk.

    out[t] = scale * (sum of g[s], s <= t), or s >= t where reversed, s and t in one chunk.

    Args:
        g: Gate of each token `[B, T, HV]` in any layout, or with channels `[B, T, HV, S]`; fp32, bf16 or fp16.
        chunk_size: Tokens of a chunk: 16, 32 or 64.
        reverse: Sum from the end of the chunk.
        scale: Multiplies the sum; None: 1. With `1 / ln 2` natural-log gates become the base-2 ones of other ops.
        cu_seqlens: Sequence starts of a packed batch `[N + 1]`, int32 or int64; needs B == 1.
        output_dtype: Dtype of the result; None: that of `g`.
        chunk_indices: `prepare_chunk_indices(cu_seqlens, chunk_size)`, where the caller has it.

    Returns:
        The sums, the shape of `g`; zero for tokens outside every sequence.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together.
        UnsupportedProblemError: Another chunk size, or CPU tensors outside Triton's interpreter.
    """
    dtype = output_dtype_name(SPEC.name, output_dtype, g)
    flat = g.flatten(2) if isinstance(g, torch.Tensor) and g.dim() == 4 else g  # channels are heads to a sum along time
    out = router.call(SPEC, (flat,), (chunk_size, reverse, dtype), (scale,), cu_seqlens, chunk_indices)[0]
    assert out is not None
    return out.view(g.shape)


def output_dtype_name(op: str, output_dtype: torch.dtype | None, like: torch.Tensor) -> str:
    """The name of a requested dtype, `like`'s where None.

    Raises:
        ValueError: Not one that kernels write.
    """
    name = str(getattr(like, "dtype", "float32") if output_dtype is None else output_dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"{op}: output_dtype: wanted one of {', '.join(DTYPES)}, got {name}")
    return name


def output_dtype_of(problem: Problem) -> torch.dtype:
    """The dtype that a form asks for; fp32 where it does not say."""
    return getattr(torch, problem.form.entries.get("output_dtype", "float32"))  # type: ignore[no-any-return]


def sum_precision(problem: Problem) -> str:
    """`input_precision` of products with ones: three tf32 terms on a GPU hold 22 bits of what is summed."""
    return "tf32x3" if problem.chip.kind == "cuda" else "ieee"


def sums_resets(problem: Problem) -> bool:
    """Whether the sum is a chain's own, of gates that may reset a state; the public op sums what it is given."""
    return problem.form.flag("resets")


def _bind(problem: Problem, candidate: Candidate) -> Launch:
    key, BT, plan = problem.key, problem.BT, candidate.plan
    HV, BH = key.HV, tiling.head_block(key.HV, problem.chip.tiles)
    dtype = output_dtype_of(problem)
    kernel = launcher.bind(
        kernels.chunk_local_cumsum,
        HV=HV,
        BT=BT,
        BH=BH,
        REVERSE=problem.form.flag("reverse"),
        RESETS=sums_resets(problem),
        G_T_CONTIG=plan.t_contig("g"),
        OUT_T_CONTIG=plan.t_contig("out"),
        IS_VARLEN=key.varlen,
        DOT_PRECISION=sum_precision(problem),
    )
    programs, head_blocks = problem.chip.cube_programs, -(-HV // BH)

    def launch(
        g: torch.Tensor,
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


SPEC = register(
    OpSpec(
        name="chunk_local_cumsum",
        operands=(Operand(name="g", dims="B T HV", time_axis=True, fill="decay"),),
        outputs=(Output(name="out", dims="B T HV", time_axis=True),),
        options=(
            Option(name="chunk_size", default=64, entry="BT", size="BT"),
            Option(name="reverse", default=False),
            Option(name="output_dtype", default="float32", names_dtype=True),
        ),
        scalars=("scale",),
        layout_groups=(("g",), ("out",)),
        reads_heads=True,
        variants=("triangle",),
        bind=_bind,
        reference=reference.chunk_local_cumsum,
        forms={
            "training": "BT=64,g=float32@STRIDE_HV,output_dtype=float32",
            "gradient": "BT=64,g=float32@STRIDE_HV,output_dtype=float32,reverse=1",
        },
        more_forms=(
            "BT=64,g=float32@T_CONTIG,output_dtype=float32",
            "BT=64,g=float32@T_CONTIG,output_dtype=float32,reverse=1",
            "BT=64,g=float32@OTHER,output_dtype=float32",
            "BT=32,g=float32@STRIDE_HV,output_dtype=float32",
            "BT=16,g=float32@STRIDE_HV,output_dtype=float32,reverse=1",
        ),
    )
)
