"""Counts and constants that the launches of chunk-parallel kernels share."""

from __future__ import annotations

import torch

from layout_tuner.kernels import tiling

from ..device.driver import Chip
from ..errors import UnsupportedProblemError
from ..spec.declaration import Candidate, Problem
from ..spec.keys import Key

WIDE_COLUMNS = 64
# `input_precision` of dots on the main dtype: exact for fp32, without effect for 16-bit operands.
DOT_PRECISION = "ieee"


def chunk_counts(
    B: int, T: int, BT: int, cu_seqlens: torch.Tensor | None, chunk_indices: torch.Tensor | None
) -> tuple[int, int, int]:
    """`(NT, N, chunks)`: chunks of a batch row (of the whole packed batch), sequences (0 when dense), all chunks."""
    if cu_seqlens is None or chunk_indices is None:
        NT = -(-T // BT)
        return NT, 0, B * NT
    NT = chunk_indices.shape[0]
    return NT, cu_seqlens.shape[0] - 1, NT


def default_width(key: Key, chip: Chip) -> str:
    """`narrow` tiles of the state where `wide` ones would leave multiprocessors of a GPU without a program.

    On an H200 with 132 of them, bf16: 16 wide programs take 38 us against 25 us of narrow ones, 64 take 224 against
    155, 512 take 435 against 640 (`chunk_gated_delta_rule_fwd_h`, python bench/kernels.py).
    """
    wide_programs = key.B * key.HV * -(-key.V // WIDE_COLUMNS)
    return "narrow" if chip.kind == "cuda" and wide_programs < chip.cores else "wide"


def require_room(problem: Problem, candidate: Candidate, kernel: str, **tiles: int) -> None:
    """Refuse a kernel whose tiles an Ascend core has no memory for, even with one copy of each.

    Raises:
        UnsupportedProblemError: Names each memory with the bytes wanted and available.
    """
    if problem.chip.kind != "npu":
        return
    planned = tiling.on_chip_bytes(kernel, problem.element_bytes, **tiles)
    over = [
        f"{candidate.id}: tiles {', '.join(f'{name}={size}' for name, size in tiles.items())} need {wanted // 2:,} "
        f"bytes of {memory}, an Ascend core has {limit:,}"
        for wanted, (memory, limit) in zip(planned or (), tiling.ASCEND_BYTES.items())
        if wanted // 2 > limit
    ]
    if over:
        raise UnsupportedProblemError(problem.key.op, over)
