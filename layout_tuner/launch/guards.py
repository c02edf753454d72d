"""What of a call a prepared launch depends on, and a quick test whether a later call has the same.

The facts of a call are the options and, of every operand, shape, dtype, device and whether it is row-major; of a
time-axis operand that is not, the strides. (Any other operand that is not row-major is copied, whatever its strides.)
Facts make a signature, which is hashed; the test compares with one known signature, operand by operand, and stops at
the first difference. It is one generated function for each pattern of operands: unrolled, it costs half of a loop.

Where torch has the guards that its own compiler puts before compiled code, one call of them compares all operands at
once, for less than half of what asking in Python costs. They refuse more than has to be refused (other strides of a
dimension of size 1, one tensor given twice, another `requires_grad`), so that what they refuse is compared in Python.
They refuse whatever torch traces, transforms or watches, too; Python asks for that once all else is the same. Nested
tensors of strided layout are the one thing that they cannot be asked about: in torch 2.13 it ends the process. To ask
each operand first would make a hit a quarter slower, so that the chain alone asks (see `watched.any_nested`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ..spec.declaration import OpSpec
from ..spec.operands import Outputs, Value
from ..spec.watched import plain
from .tally import UNROUTED, Tally

Signature = tuple[object, ...]
Operands = Sequence["torch.Tensor | None"]
Scalars = tuple["float | None", ...]
Check = Callable[..., bool]
Fits = Callable[[Operands, tuple[Value, ...], "torch.Tensor | None", "torch.Tensor | None"], bool]
Run = Callable[[Operands, tuple[Value, ...], Scalars, "torch.Tensor | None", "torch.Tensor | None"], "Outputs | None"]
Does = Literal["fits", "spread", "whole"]


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
            tuple(map(type, options)),  # 64, 64.0 and a number of numpy's are equal
            packing_facts(spec, cu_seqlens, 1),
            packing_facts(spec, chunk_indices, 2),
            *[
                None if tensor is None else (tensor.shape, tensor.dtype, tensor.device, memory(tensor, axis))
                for tensor, axis in zip(tensors, time_axes(spec))
            ],
        )
    except AttributeError:
        return (object(),)


def facts(tensors: Operands) -> tuple[Facts | None, ...]:
    """Every fact of tensors, strides included."""
    return tuple([None if x is None else Facts(x.shape, x.dtype, x.device, memory(x, True)) for x in tensors])


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


def fitting(known: Signature, check: Check | None = None) -> Fits:
    """The test for calls of one signature: `fits(operands, options, cu_seqlens, chunk_indices)`.

    An operand that is no tensor fails it.

    Args:
        known: What `signature` made of a call.
        check: The `guard` of its operands; without one Python alone compares.
    """
    made: Fits = generated(known, check, "fits", None, 0)
    return made


def fitting_tensors(known: Sequence[Facts | None], check: Check | None = None) -> Callable[[Operands], bool]:
    """The test for tensors of these facts alone.

    Args:
        known: What `facts` made of tensors.
        check: Their `guard`.
    """
    fits = fitting(("", (), (), None, None, *known), check)
    return lambda tensors: fits(tensors, (), None, None)


def running(
    known: Signature,
    check: Check | None,
    launch: Callable[..., Outputs],
    scalars: int,
    *,
    spread: bool,
    tally: Tally = UNROUTED,
) -> Run:
    """Test and launch at once: `run(operands, options, scalars, cu_seqlens, chunk_indices)`, None where none fits.

    Args:
        known: What `signature` made of a call.
        check: The `guard` of its operands.
        launch: What runs a call that fits.
        scalars: How many numbers it takes; one that is neither a float nor None does not fit.
        spread: Whether `launch` takes all of a call one by one; else operands, scalars and what describes a packed
            batch.
        tally: Counts the calls that fit.
    """
    made: Run = generated(known, check, "spread" if spread else "whole", launch, scalars, tally)
    return made


def generated(
    known: Signature,
    check: Check | None,
    does: Does,
    launch: Callable[..., Outputs] | None,
    scalars: int,
    tally: Tally = UNROUTED,
) -> Callable[..., Any]:
    """The function of `fitting` or `running`."""
    _, options, _, *tensors = known
    assert isinstance(options, tuple)
    facts = [None if fact is None else Facts(*fact) for fact in tensors]  # type: ignore[misc]
    patterns = tuple(None if fact is None else pattern(fact) for fact in facts)
    compared = [part for fact in facts if fact is not None for part in (*fact[:2], place(fact), fact.memory)]
    make = maker(patterns, len(options), check is not None, does, scalars)
    made: Callable[..., Any] = make(*options, check, launch, tally, *compared)
    return made


# -- torch's guards --------------------------------------------------------------------------------------------


def guard(operands: Operands) -> Check | None:
    """A function that tells tensors like these, in order, from all others; None where torch has none such.

    Args:
        operands: Those that are None are left out.
    """
    present = [tensor for tensor in operands if tensor is not None]
    if not present or not guards_work():
        return None
    make: Any = torch._C._dynamo.guards.TensorGuards
    check: Check = make(*present, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check if check(*present) else None  # refuses one tensor given twice


@functools.cache
def guards_work() -> bool:
    """Whether this torch has guards that see every fact of a call; they are not public, so they are tried."""
    one, like, beside = (
        torch.empty(shape, dtype=torch.float32, device="cpu") for shape in ((2, 3, 4), (2, 3, 4), (2,))
    )
    others: list[object] = [
        torch.empty((2, 4, 4), dtype=torch.float32, device="cpu"),
        torch.empty((2, 3, 4), device="cpu", dtype=torch.int32),
        torch.empty((2, 3, 4), dtype=torch.float32, device="meta"),
        torch.empty((2, 4, 3), dtype=torch.float32, device="cpu").transpose(1, 2),
        None,
        [],
    ]
    try:
        make: Any = torch._C._dynamo.guards.TensorGuards
        check = make(one, beside, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check(like, beside) is True and not any(check(other, beside) for other in others)
    except (AttributeError, TypeError, RuntimeError):
        return False


# -- the generated test ----------------------------------------------------------------------------------------


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
def maker(
    patterns: tuple[Pattern | None, ...], options: int, guarded: bool, does: Does, scalars: int
) -> Callable[..., Any]:
    """The function that makes a test of what it compares with.

    Args:
        patterns: Of `cu_seqlens`, `chunk_indices` and the operands; None for what is not given.
        options: How many options a call has.
        guarded: Whether torch's guards compare the operands first.
        does: `fits` tests; `spread` and `whole` launch what passes.
        scalars: How many numbers a launch takes.
    """
    operands = [f"x{i}" for i in range(len(patterns) - 2)]
    numbers = [f"s{i}" for i in range(scalars)]
    chosen, wanted = [f"o{i}" for i in range(options)], [f"w{i}" for i in range(options)]
    names = ["cu_seqlens", "chunk_indices", *operands]
    tests: dict[str, list[str]] = {}
    for dims, (x, how) in enumerate(zip(names, patterns), start=1):
        tests[x] = [f"{x} is None"] if how is None else conditions(x, how, dims)
    given = [x for x, how in zip(operands, patterns[2:]) if how is not None]
    # The main tensor's shape is what differs most often.
    compared = " and ".join([test for x in given for test in tests[x]] + [f"plain({', '.join(given)})"])
    if guarded:
        compared = f"(check({', '.join(given)}) or {compared})"
    ordered = [test for x in operands if x not in given for test in tests[x]]
    ordered += [*tests["cu_seqlens"], *tests["chunk_indices"]]
    ordered += [f"(o{i} is w{i} or (type(o{i}) is type(w{i}) and o{i} == w{i}))" for i in range(options)]
    if does != "fits":
        ordered += [f"(type({s}) is float or {s} is None)" for s in numbers]
    facts = [f"{x}_{fact}" for x, how in zip(names, patterns) if how is not None for fact in Facts._fields]
    taken = "operands, options, cu_seqlens, chunk_indices"
    answer, counted = "fitting", ""
    if does != "fits":
        taken = "operands, options, scalars, cu_seqlens, chunk_indices"
        handed = ", ".join([*operands, *numbers]) if does == "spread" else "operands, scalars"
        answer = f"launch({handed}, cu_seqlens, chunk_indices) if fitting else None"
        counted = "if fitting: tally.calls += 1"
    text = f"""
def make({"".join(f"{w}, " for w in wanted)}check, launch, tally, {", ".join(facts)}):
    def test({taken}):
        {", ".join(operands)}, = operands
        {f"{', '.join(chosen)}, = options" if chosen else ""}
        {f"{', '.join(numbers)}, = scalars" if numbers and does != "fits" else ""}
        try:
            fitting = {" and ".join([*ordered, compared])}
        except (AttributeError, RuntimeError):  # of what is no tensor, and of nested and sparse ones
            fitting = False
        {counted}
        return {answer}
    return test
"""
    scope: dict[str, Callable[..., Any]] = {"plain": plain}
    exec(text, scope)
    return scope["make"]
