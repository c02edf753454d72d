"""What of a call a prepared launch depends on, and a quick test whether a later call has the same.

The facts of a call are the options and, of every operand, shape, dtype, device and whether it is row-major; of a
time-axis operand that is not, the strides. (Any other operand that is not row-major is copied, whatever its strides.)
Facts make a signature, which is hashed; the test compares with one known signature, operand by operand, and stops at
the first difference. It is one generated function for each pattern of operands: unrolled, it costs half of a loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .registry import OpSpec, Value

Signature = tuple[object, ...]
Operands = Sequence["torch.Tensor | None"]
Fits = Callable[[Operands, tuple[Value, ...], "torch.Tensor | None", "torch.Tensor | None"], bool]


class Facts(NamedTuple):
    """Of one tensor; a shape of None stands for any that describes a packed batch."""

    shape: torch.Size | None
    dtype: torch.dtype
    device: torch.device
    memory: tuple[int, ...] | bool


def signature(
    spec: OpSpec,
    tensors: Operands,
    options: tuple[Value, ...],
    cu_seqlens: torch.Tensor | None,
    chunk_indices: torch.Tensor | None,
) -> Signature:
    """All of a call that a check or a choice depends on; a thing that is no tensor makes one that never hits."""
    try:
        return (
            spec.name,
            options,
            packing_facts(spec, cu_seqlens, 1),
            packing_facts(spec, chunk_indices, 2),
            *[
                None if tensor is None else (tensor.shape, tensor.dtype, tensor.device, memory(tensor, axis))
                for tensor, axis in zip(tensors, time_axes(spec))
            ],
        )
    except AttributeError:
        return (object(),)


def memory(tensor: torch.Tensor, time_axis: bool) -> tuple[int, ...] | bool:
    """How an operand lies: whether it is row-major, or the strides of a time-axis operand that is not."""
    return tensor.is_contiguous() or (tensor.stride() if time_axis else False)


def packing_facts(spec: OpSpec, tensor: torch.Tensor | None, dims: int) -> Facts | None:
    """The facts of `cu_seqlens` (of 1 dimension) or `chunk_indices` (of 2).

    How many sequences and chunks a batch has matters only for an op with an operand of that many rows: a step that
    packs its tokens in another way is the same call.
    """
    if tensor is None:
        return None
    shape = tensor.shape
    free = not counts_matter(spec) and len(shape) == dims and (shape[0] > 1 if dims == 1 else shape[1] == 2)
    return Facts(None if free else shape, tensor.dtype, tensor.device, tensor.is_contiguous())


@functools.cache
def counts_matter(spec: OpSpec) -> bool:
    """Whether an operand of the op has one row for each sequence or each chunk."""
    return any(symbol in ("N", "NT") for operand in spec.operands for symbol in operand.dims.split())


@functools.cache
def time_axes(spec: OpSpec) -> tuple[bool, ...]:
    """Which operands are time-axis tensors."""
    return tuple(operand.time_axis for operand in spec.operands)


def fitting(known: Signature) -> Fits:
    """The test for calls of one signature: `fits(operands, options, cu_seqlens, chunk_indices)`.

    An operand that is no tensor fails it or leads to an AttributeError.

    Args:
        known: What `signature` made of a call.
    """
    _, options, *tensors = known
    facts = [None if fact is None else Facts(*fact) for fact in tensors]  # type: ignore[misc]
    patterns = tuple(None if fact is None else pattern(fact) for fact in facts)
    compared = [part for fact in facts if fact is not None for part in (*fact[:2], place(fact), fact.memory)]
    made: Fits = maker(patterns)(options, *compared)
    return made


class Pattern(NamedTuple):
    """How a tensor is tested; tests of the same patterns differ in what they compare with only."""

    place: str
    counted: bool
    memory: bool | None


def pattern(fact: Facts) -> Pattern:
    """How a tensor of these facts is tested: a device by what is quickest to ask and says as much."""
    place = "cpu" if fact.device.type == "cpu" else "any" if fact.device.index is None else "index"
    return Pattern(place, fact.shape is None, None if isinstance(fact.memory, tuple) else fact.memory)


def place(fact: Facts) -> torch.device | int:
    """What a tensor's device is compared with: a process has one kind of accelerator, so its index says all."""
    return fact.device if fact.device.index is None else fact.device.index


def conditions(x: str, how: Pattern, dims: int) -> list[str]:
    """What has to hold for the tensor named `x`; what differs most often comes first."""
    enough = f"{x}.shape[0] > 1" if dims == 1 else f"{x}.shape[1] == 2"
    return [
        f"{x}.dim() == {dims} and {enough}" if how.counted else f"{x}.shape == {x}_shape",
        f"{x}.dtype is {x}_dtype",
        {
            "cpu": f"{x}.is_cpu",
            "index": f"{x}.get_device() == {x}_device",
            "any": f"{x}.device == {x}_device",
        }[how.place],
        {
            True: f"{x}.is_contiguous()",
            False: f"not {x}.is_contiguous()",
            None: f"{x}.stride() == {x}_memory",
        }[how.memory],
    ]


@functools.cache
def maker(patterns: tuple[Pattern | None, ...]) -> Callable[..., Fits]:
    """The function that makes a test of what it compares with.

    Args:
        patterns: Of `cu_seqlens`, `chunk_indices` and the operands; None for what is not given.
    """
    operands = [f"x{i}" for i in range(len(patterns) - 2)]
    names = ["cu_seqlens", "chunk_indices", *operands]
    tests: dict[str, list[str]] = {}
    for dims, (x, how) in enumerate(zip(names, patterns), start=1):
        tests[x] = [f"{x} is None"] if how is None else conditions(x, how, dims)
    # The main tensor's shape is what differs most often.
    ordered = [test for x in (*operands, "cu_seqlens", "chunk_indices") for test in tests[x]]
    facts = [f"{x}_{fact}" for x, how in zip(names, patterns) if how is not None for fact in Facts._fields]
    text = f"""
def make(wanted, {", ".join(facts)}):
    def fits(operands, options, cu_seqlens, chunk_indices):
        {", ".join(operands)}, = operands
        return {" and ".join(ordered)} and options == wanted
    return fits
"""
    scope: dict[str, Callable[..., Fits]] = {}
    exec(text, scope)
    return scope["make"]
