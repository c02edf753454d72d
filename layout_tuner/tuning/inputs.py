"""Synthetic arguments made from a key: what the tuner, warm-up and tests run an op on.

The same key gives the same arguments in every process on the same kind of device: values are drawn where they are used,
from a generator seeded by the key; sequence lengths are drawn on the CPU and are the same everywhere.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable

import torch

from ..spec.declaration import OpSpec
from ..spec.keys import Form, Key
from ..spec.layouts import Layout, relayout
from ..spec.operands import Call, Operand, Value

LN2 = 0.6931471805599453


def sequence_starts(T: int, generator: torch.Generator) -> torch.Tensor:
    """Starts of a packed batch of `T` tokens: about `T / 256` sequences (at least 2), lengths uniform.

    The boundaries are drawn uniformly from the positions between tokens and sorted, so that lengths are
    exponential-like: many short, few long, as in packed training data.

    Returns:
        `cu_seqlens [N + 1]`, int32, on the CPU, from 0 to T.
    """
    inner = torch.randint(0, T + 1, (max(1, T // 256),), generator=generator, device="cpu")
    edges = torch.cat([torch.tensor([0, T], device="cpu"), inner])
    return edges.sort().values.to(torch.int32)


def chunk_starts(cu_seqlens: torch.Tensor | None, T: int, BT: int) -> list[tuple[int, int]]:
    """First and last token (exclusive) of every chunk of a batch row."""
    starts = cu_seqlens.tolist() if cu_seqlens is not None else [0, T]
    return [(t, min(t + BT, eos)) for bos, eos in itertools.pairwise(starts) for t in range(bos, eos, BT)]


class Drawing:
    """One set of synthetic arguments being drawn."""

    def __init__(self, key: Key, device: torch.device, seed: int, cu_seqlens: torch.Tensor | None = None) -> None:
        digest = hashlib.sha256(f"{key} {seed}".encode()).digest()
        number = int.from_bytes(digest[:7], "big")
        self.device = device
        # There is no generator for `meta`, where nothing is drawn.
        self.generator = torch.Generator("cpu" if device.type == "meta" else device).manual_seed(number)
        self.BT = key.form.integer("BT", 64)
        self.T = key.T
        if key.varlen and cu_seqlens is None:
            cu_seqlens = sequence_starts(key.T, torch.Generator("cpu").manual_seed(number))
        self.cu_seqlens = cu_seqlens
        self.chunks = chunk_starts(self.cu_seqlens, key.T, self.BT)

    def starts(self) -> torch.Tensor | None:
        """Sequence starts where the operands are; beside operands without values on the CPU: hosts read them."""
        if self.cu_seqlens is None or self.device.type == "meta":
            return self.cu_seqlens
        return self.cu_seqlens.to(self.device)

    def normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Standard normal values."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float32, device=self.device)

    def unit(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Rows of length 1, as queries and keys are after l2 normalisation."""
        return torch.nn.functional.normalize(self.normal(shape), dim=-1)

    def decay(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Natural-log gates of one token, negative, of the size a trained layer has."""
        return torch.nn.functional.logsigmoid(self.normal(shape) + 2.0)

    def cumulative_decay(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Base-2 gates summed from the start of their chunk, `[B, T, ...]`."""
        steps = self.decay(shape) / LN2
        total = torch.zeros_like(steps)
        for first, last in self.chunks:
            total[:, first:last] = steps[:, first:last].cumsum(1)
        return total

    def rate(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Base-2 decay a token, negative and small."""
        return -torch.rand(shape, generator=self.generator, dtype=torch.float32, device=self.device) / 16

    def strength(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Values between 0 and 1, as `beta` after its sigmoid."""
        return torch.sigmoid(self.normal(shape))

    def small(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Normal values of a tenth's size, for states and what multiplies them."""
        return self.normal(shape) * 0.1

    def weak(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Rows of length 1/4: corrections too weak to let a state grow over many chunks."""
        return self.unit(shape) / 4

    def strictly_lower(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Chunk matrices `[B, T, HV, BT]`, strictly lower triangular, zero past the end of their sequence."""
        return self._triangle(shape, unit_diagonal=False)

    def unit_lower(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Chunk matrices `[B, T, HV, BT]`, lower triangular with ones on the diagonal."""
        return self._triangle(shape, unit_diagonal=True)

    def _triangle(self, shape: tuple[int, ...], unit_diagonal: bool) -> torch.Tensor:
        values = self.small(shape)
        columns = torch.arange(shape[-1], device=self.device)
        row = torch.zeros(shape[1], dtype=torch.long, device="cpu")
        for first, last in self.chunks:
            row[first:last] = torch.arange(last - first, device="cpu")
        row = row.to(self.device)
        below = (columns[None, :] < row[:, None])[None, :, None, :]
        values = torch.where(below, values, 0.0)
        if unit_diagonal:
            values += (columns[None, :] == row[:, None])[None, :, None, :].to(values.dtype)
        return values


FILLS: dict[str, Callable[[Drawing, tuple[int, ...]], torch.Tensor]] = {
    "normal": Drawing.normal,
    "unit": Drawing.unit,
    "decay": Drawing.decay,
    "cumulative_decay": Drawing.cumulative_decay,
    "rate": Drawing.rate,
    "strength": Drawing.strength,
    "small": Drawing.small,
    "weak": Drawing.weak,
    "strictly_lower": Drawing.strictly_lower,
    "unit_lower": Drawing.unit_lower,
}


def synthesize(
    spec: OpSpec, key: Key, device: torch.device | str, seed: int = 0, cu_seqlens: torch.Tensor | None = None
) -> Call:
    """Arguments of a call whose exact key is `key`.

    Args:
        spec: The op.
        key: The key; optional operands, dtypes and arrivals as its form says.
        device: Where the tensors go; on `meta` they have no values and take no memory.
        seed: Another seed gives other values and other sequence lengths.
        cu_seqlens: Sequence starts of a packed key, on the CPU; None draws them.
    """
    form = key.form
    drawing = Drawing(key, torch.device(device), seed, cu_seqlens)
    sizes = {name: getattr(key, name) for name in ("B", "T", "H", "HV", "K", "V")}
    sizes |= {"BT": drawing.BT, "NT": len(drawing.chunks)}
    sizes["N"] = len(drawing.cu_seqlens) - 1 if drawing.cu_seqlens is not None else key.B
    tensors: list[torch.Tensor | None] = []
    for operand in spec.operands:
        if not given(operand, form):
            tensors.append(None)
            continue
        dims = operand.shape_symbols(spec.v_first(form))
        shape = tuple(int(symbol) if symbol.isdigit() else sizes[symbol] for symbol in dims)
        tensors.append(make(operand, drawing, shape, form, key))
    return Call(
        tensors=tuple(tensors),
        options=tuple(option_value(option.default, form, option.label) for option in spec.options),
        scalars=(None,) * len(spec.scalars),
        cu_seqlens=drawing.starts(),
    )


def given(operand: Operand, form: Form) -> bool:
    """Whether a form brings an operand."""
    if operand.given_with:
        return all(form.flag(option) for option in operand.given_with)
    return not operand.optional or operand.name in form


def make(operand: Operand, drawing: Drawing, shape: tuple[int, ...], form: Form, key: Key) -> torch.Tensor:
    """One operand in the dtype and layout that the form gives it."""
    dtype = getattr(torch, form.dtype(operand.name) or key.dtype)
    tensor = FILLS[operand.fill](drawing, shape).to(dtype)
    layout = form.arrival(operand.name) if operand.time_axis else None
    if layout is Layout.T_CONTIG:
        return relayout(tensor, layout)
    if layout is Layout.OTHER:  # every second head of a wider tensor: neither layout, as a slice of a projection
        wide = torch.empty((*shape[:2], 2 * shape[2], *shape[3:]), dtype=dtype, device=drawing.device)
        wide[:, :, ::2] = tensor
        return wide[:, :, ::2]
    return tensor


def option_value(default: Value, form: Form, label: str) -> Value:
    """An option's value as the form says, else its default."""
    if label not in form:
        return default
    text = form.entries[label]
    if isinstance(default, bool):
        return text == "1"
    return int(text) if isinstance(default, int) else text


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in memory of its own, with NaN beyond the last element, so that an overrun shows."""
    if not tensor.is_floating_point():
        return tensor
    flat = torch.full((tensor.numel() + 256,), float("nan"), dtype=tensor.dtype, device=tensor.device)
    copy = flat[: tensor.numel()].as_strided(tensor.shape, tensor.stride()) if dense(tensor) else tensor
    if copy is not tensor:
        copy.copy_(tensor)
    return copy


def dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill exactly the memory they span."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return span == tensor.numel()
