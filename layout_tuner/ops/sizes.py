"""Counts that the launches of chunk-parallel kernels share."""

from __future__ import annotations

import torch


def chunk_counts(
    B: int, T: int, BT: int, cu_seqlens: torch.Tensor | None, chunk_indices: torch.Tensor | None
) -> tuple[int, int, int]:
    """`(NT, N, chunks)`: chunks of a batch row (of the whole packed batch), sequences (0 when dense), all chunks."""
    if cu_seqlens is None or chunk_indices is None:
        NT = -(-T // BT)
        return NT, 0, B * NT
    NT = chunk_indices.shape[0]
    return NT, cu_seqlens.shape[0] - 1, NT
