"""Lists the chunks of a packed batch: the sequence of each, and its number in that sequence.

The number of chunks sizes outputs and grids, so listing them reads `cu_seqlens` on the host once. A batch is packed
once and used by every layer and by the backward, hence the memo by tensor. Whoever has the list (`chunk_indices`) waits
for nothing: where each sequence's chunks begin is then computed on the device.

A write that torch does not see (through memory shared with numpy, by `.data`, by a custom kernel, in a graph's replay)
leaves a tensor's version as it was. Starts on the host are therefore read at every call. Starts on a device are not:
kernels bound what they read from lists, so that such a write costs results and no other memory.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

from ..errors import PackingError
from ..forking import ProcessLock


class _Chunks(NamedTuple):
    """The lists of one packed batch, with the tensor, its version and the values they were made from."""

    of: weakref.ref[torch.Tensor]
    version: tuple[int, int]
    starts: torch.Tensor
    indices: torch.Tensor
    offsets: torch.Tensor
    last: int


_lock = ProcessLock()
# By the tensor's identity and chunk size; a buffer that is written to again and again has the newest lists alone.
_memo: dict[tuple[int, int], _Chunks] = {}
# Offsets that were computed on a device, likewise.
_computed: dict[tuple[int, int], tuple[weakref.ref[torch.Tensor], tuple[int, int], torch.Tensor]] = {}


def prepare_chunk_indices(
    cu_seqlens: torch.Tensor,
    chunk_size: int,
    cu_seqlens_cpu: torch.Tensor | None = None,
    tokens: int | None = None,
) -> torch.Tensor:
    """Sequence and chunk number of every chunk of a packed batch.

    Args:
        cu_seqlens: Sequence starts `[N + 1]`, int32 or int64.
        chunk_size: Tokens in a chunk.
        cu_seqlens_cpu: The same values on the host; given them, the function does not wait for the device.
        tokens: Length of the batch, where it is known.

    Returns:
        `[NT, 2]`, the dtype and device of `cu_seqlens`; empty sequences own no chunk.

    Raises:
        ValueError: Starts that are negative, that fall, or that pass `tokens`, or other ones on the host.
    """
    indices, _, last = _prepared(cu_seqlens, chunk_size, cu_seqlens_cpu)
    if tokens is not None and last > tokens:
        raise PackingError(f"cu_seqlens: wanted an end of at most T={tokens}, got {last}")
    return indices


def chunks_of(
    cu_seqlens: torch.Tensor,
    chunk_indices: torch.Tensor | None,
    chunk_size: int,
    tokens: int,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> torch.Tensor:
    """The chunks of a packed batch: the caller's list, checked as far as the host can, or one made here.

    The caller's list is compared with one made from starts on the host, or with one made here before. Otherwise, so as
    not to wait for the device, a list is refused only if it has more chunks than `tokens` allow.

    Raises:
        ValueError: Chunks of other sequences or of another chunk size, or starts that `prepare_chunk_indices` refuses.
    """
    if chunk_indices is None:
        return prepare_chunk_indices(cu_seqlens, chunk_size, cu_seqlens_cpu, tokens)
    on_host = cu_seqlens.device.type == "cpu" or cu_seqlens_cpu is not None
    if on_host or _known(cu_seqlens, chunk_size) is not None:
        wanted = prepare_chunk_indices(cu_seqlens, chunk_size, cu_seqlens_cpu, tokens)
        right = chunk_indices is wanted or chunk_indices.shape == wanted.shape
        if right and chunk_indices is not wanted and chunk_indices.device.type == "cpu":
            right = torch.equal(chunk_indices.long(), wanted.long())
        most = wanted.shape[0]
    else:
        most = -(-tokens // chunk_size) + cu_seqlens.shape[0] - 1
        right = chunk_indices.shape[0] <= most
    if not right:
        raise PackingError(
            f"chunk_indices: wanted prepare_chunk_indices(cu_seqlens, {chunk_size}), of at most {most} chunks, got "
            f"{list(chunk_indices.shape)} of other sequences or another chunk size"
        )
    return chunk_indices


def prepare_chunk_offsets(
    cu_seqlens: torch.Tensor, chunk_size: int, cu_seqlens_cpu: torch.Tensor | None = None
) -> torch.Tensor:
    """Number of chunks before each sequence of a packed batch, `[N + 1]`, int64, from 0 to the total.

    Args:
        cu_seqlens: Sequence starts `[N + 1]`, int32 or int64.
        chunk_size: Tokens in a chunk.
        cu_seqlens_cpu: The same on the host, where the caller has them.
    """
    alone = cu_seqlens_cpu is None and type(cu_seqlens) is torch.Tensor and type(chunk_size) is int
    if alone and not cu_seqlens.is_cpu and _known(cu_seqlens, chunk_size) is None:
        return _computed_offsets(cu_seqlens, chunk_size)
    return _prepared(cu_seqlens, chunk_size, cu_seqlens_cpu)[1]


def _computed_offsets(cu_seqlens: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """`prepare_chunk_offsets` on the device, without waiting for it, so that nobody sees whether starts fall.

    It is for callers who brought `chunk_indices`, and for an inference tensor, whose lists are not remembered.
    """
    slot, version = (id(cu_seqlens), chunk_size), _version(cu_seqlens)
    lasting = not cu_seqlens.is_inference() and not torch._C._len_torch_dispatch_stack()
    kept = _computed.get(slot) if lasting else None
    if kept is not None and kept[0]() is cu_seqlens and kept[1] == version:
        return kept[2]
    counts = (cu_seqlens.diff().long().clamp_min(0) + (chunk_size - 1)) // chunk_size
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    if lasting:
        computed = _computed  # as in `_remember`
        of = weakref.ref(cu_seqlens, lambda _: computed.pop(slot, None))
        with _lock:
            _computed[slot] = of, version, offsets
    return offsets


def written(tensor: torch.Tensor) -> object:
    """A value that changes whenever a tensor is written to: its values on the host, else torch's version counter."""
    return tensor.tolist() if _on_host(tensor) else _version(tensor)


def _on_host(tensor: torch.Tensor) -> bool:
    """Whether values can be read without waiting for a device; a traced tensor has none."""
    return type(tensor) is torch.Tensor and tensor.is_cpu


def _version(cu_seqlens: torch.Tensor) -> tuple[int, int]:
    """A value that changes whenever torch writes to a tensor or moves it; a traced tensor has no address."""
    address = cu_seqlens.data_ptr() if type(cu_seqlens) is torch.Tensor else 0
    return (0 if cu_seqlens.is_inference() else cu_seqlens._version), address


def _known(cu_seqlens: torch.Tensor, chunk_size: int) -> _Chunks | None:
    """The remembered lists of a tensor; None where there are none for its present version."""
    chunks = _memo.get((id(cu_seqlens), chunk_size))
    if chunks is None or chunks.of() is not cu_seqlens or chunks.version != _version(cu_seqlens):
        return None
    return chunks


def _remember(
    cu_seqlens: torch.Tensor,
    version: tuple[int, int],
    chunk_size: int,
    starts: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    last: int,
) -> None:
    """Remember lists, in place of those for an older version, as long as the tensor lives."""
    slot = id(cu_seqlens), chunk_size
    with _lock:
        chunks = _memo.get(slot)
        if chunks is not None and chunks.of() is cu_seqlens and chunks.version[0] > version[0]:
            return  # another thread was here after the next write
        memo = _memo  # a module's names are gone before its last tensors are
        of = weakref.ref(cu_seqlens, lambda _: memo.pop(slot, None))
        _memo[slot] = _Chunks(of, version, starts, indices, offsets, last)


def _prepared(
    cu_seqlens: torch.Tensor, chunk_size: int, cu_seqlens_cpu: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Indices, offsets and the last sequence's end, remembered until the tensor goes or torch writes to it."""
    known = _known(cu_seqlens, chunk_size) if type(chunk_size) is int else None
    if known is not None and cu_seqlens_cpu is None and not _on_host(cu_seqlens):
        return known.indices, known.offsets, known.last  # a hit
    named = {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu}
    faults = [
        f"{name}: wanted a tensor, got {type(x).__name__}"
        for name, x in named.items()
        if not isinstance(x, torch.Tensor)
    ]
    if isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.is_neg():  # kernels would read the other sign
        faults.append("cu_seqlens: wanted a plain tensor, got a negative view: call resolve_neg()")
    if type(chunk_size) is not int or chunk_size < 1:
        faults.append(f"chunk_size: wanted a number of at least 1, got {chunk_size!r}")
    if faults:
        raise TypeError("; ".join(faults))
    if cu_seqlens_cpu is not None and (cu_seqlens_cpu.shape, cu_seqlens_cpu.device.type) != (cu_seqlens.shape, "cpu"):
        raise PackingError(
            f"cu_seqlens_cpu: wanted {list(cu_seqlens.shape)} as cu_seqlens on the CPU, got "
            f"{list(cu_seqlens_cpu.shape)} on {cu_seqlens_cpu.device}"
        )
    on_host = _on_host(cu_seqlens)
    if known is not None and not on_host and cu_seqlens_cpu is not None and _equal(cu_seqlens_cpu, known.starts):
        return known.indices, known.offsets, known.last
    version = _version(cu_seqlens)  # before the values: a write in between makes these lists the older ones
    # What the host says of starts on a device is believed, unless something else was known of them.
    read = cu_seqlens if cu_seqlens_cpu is None or on_host or known is not None else cu_seqlens_cpu
    starts = torch.empty(read.shape, dtype=torch.int64, device="cpu").copy_(read)
    if starts.ndim != 1 or len(starts) < 1:
        raise PackingError(f"cu_seqlens: wanted starts [N + 1], got {list(starts.shape)}")
    if cu_seqlens_cpu is not None and not _equal(cu_seqlens_cpu, starts):
        raise PackingError(
            f"cu_seqlens_cpu: wanted the values of cu_seqlens, {_shown(starts)}, got {_shown(cu_seqlens_cpu)}"
        )
    if int(starts[0]) < 0 or bool((starts.diff() < 0).any()):
        raise PackingError(f"cu_seqlens: wanted starts from 0 that never fall, got {_shown(starts)}")
    last = int(starts[-1])
    counts = (starts.diff() + chunk_size - 1) // chunk_size
    sequence = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    within = torch.arange(len(sequence), device="cpu") - offsets[sequence]
    indices = torch.stack([sequence, within], dim=1).to(cu_seqlens.dtype)
    if known is not None and on_host and torch.equal(known.indices, indices) and torch.equal(known.offsets, offsets):
        return known.indices, known.offsets, last
    indices, offsets = indices.to(cu_seqlens.device), offsets.to(cu_seqlens.device)
    # On a device inference tensors are written to without a trace; what a mode of torch's made may have no values.
    if (on_host or not cu_seqlens.is_inference()) and not torch._C._len_torch_dispatch_stack():
        _remember(cu_seqlens, version, chunk_size, starts, indices, offsets, last)
    return indices, offsets, last


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two lists on the host hold the same numbers, in whatever dtype."""
    return one.shape == other.shape and torch.equal(one.long(), other.long())


def _shown(starts: torch.Tensor) -> list[int]:
    """As many starts as a message holds."""
    shown: list[int] = starts[:16].tolist()
    return shown


def stand_in(cu_seqlens: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Chunks of sequence starts that have no values, while a compiler traces: no result depends on their number."""
    indices = cu_seqlens.new_empty((1, 2))
    offsets = cu_seqlens.new_empty(cu_seqlens.shape, dtype=torch.int64)
    _remember(cu_seqlens, _version(cu_seqlens), chunk_size, cu_seqlens, indices, offsets, 0)
    return indices
