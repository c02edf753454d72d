"""Chunks of a packed batch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def prepare_chunk_indices(cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """(sequence, chunk of the sequence) of every chunk of a packed batch: `[NT, 2]`, dtype of `cu_seqlens`."""
    counts = [-(-length // chunk_size) for length in cu_seqlens.diff().tolist()]
    pairs = [(n, c) for n, count in enumerate(counts) for c in range(count)]
    return torch.tensor(pairs, dtype=cu_seqlens.dtype, device=cu_seqlens.device).reshape(-1, 2)


def prepare_chunk_offsets(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """The number of chunks before each sequence and, last, of all: `[N + 1]`, int64."""
    counts = (cu_seqlens.diff() + chunk_size - 1).div(chunk_size, rounding_mode="floor")
    return F.pad(counts, (1, 0)).cumsum(0)
