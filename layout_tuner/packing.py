"""Chunks of a packed batch: which sequence and which chunk of it each one is.

The number of chunks sizes outputs and grids, so making these lists reads `cu_seqlens` on the host once. A batch is
packed once and used by every layer and by the backward, hence the memo by tensor.
"""

from __future__ import annotations

import threading
import weakref

import torch

_lock = threading.Lock()
_memo: dict[tuple[int, int, int], tuple[weakref.ref[torch.Tensor], torch.Tensor, torch.Tensor]] = {}


def prepare_chunk_indices(
    cu_seqlens: torch.Tensor, chunk_size: int, cu_seqlens_cpu: torch.Tensor | None = None
) -> torch.Tensor:
    """Sequence and chunk number of every chunk of a packed batch.

    Args:
        cu_seqlens: Sequence starts `[N + 1]`, int32 or int64.
        chunk_size: Tokens of a chunk.
        cu_seqlens_cpu: The same on the host, where the caller has them: nothing waits for the device then.

    Returns:
        `[NT, 2]`, the dtype and device of `cu_seqlens`; empty sequences own no chunk.
    """
    return _prepared(cu_seqlens, chunk_size, cu_seqlens_cpu)[0]


def prepare_chunk_offsets(
    cu_seqlens: torch.Tensor, chunk_size: int, cu_seqlens_cpu: torch.Tensor | None = None
) -> torch.Tensor:
    """Number of chunks before each sequence of a packed batch, `[N + 1]`, int64, from 0 to the total.

    Args:
        cu_seqlens: Sequence starts `[N + 1]`, int32 or int64.
        chunk_size: Tokens of a chunk.
        cu_seqlens_cpu: The same on the host, where the caller has them.
    """
    return _prepared(cu_seqlens, chunk_size, cu_seqlens_cpu)[1]


def _prepared(
    cu_seqlens: torch.Tensor, chunk_size: int, cu_seqlens_cpu: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both lists, remembered as long as the tensor lives and is not written to by torch."""
    version = 0 if cu_seqlens.is_inference() else cu_seqlens._version
    slot = (id(cu_seqlens), version, chunk_size)
    known = _memo.get(slot)
    if known is not None and known[0]() is cu_seqlens:
        return known[1], known[2]
    starts = cu_seqlens_cpu if cu_seqlens_cpu is not None else cu_seqlens.cpu()
    counts = (starts.diff().clamp(min=0) + chunk_size - 1) // chunk_size
    sequence = torch.repeat_interleave(torch.arange(len(counts)), counts)
    offsets = torch.nn.functional.pad(counts.long().cumsum(0), (1, 0))
    within = torch.arange(len(sequence)) - offsets[sequence]
    device = cu_seqlens.device
    indices = torch.stack([sequence, within], dim=1).to(cu_seqlens.dtype).to(device)
    device_offsets = offsets.to(device)
    with _lock:
        if cu_seqlens.is_inference():  # written to without a trace: not remembered
            return indices, device_offsets
        forget = weakref.ref(cu_seqlens, lambda _: _memo.pop(slot, None))
        _memo[slot] = (forget, indices, device_offsets)
    return indices, device_offsets


def stand_in(cu_seqlens: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Chunks of sequence starts that have no values, while a compiler traces: no result depends on their number."""
    indices = cu_seqlens.new_empty((1, 2))
    offsets = cu_seqlens.new_empty(cu_seqlens.shape, dtype=torch.int64)
    slot = (id(cu_seqlens), cu_seqlens._version, chunk_size)
    with _lock:
        _memo[slot] = (weakref.ref(cu_seqlens, lambda _: _memo.pop(slot, None)), indices, offsets)
    return indices
