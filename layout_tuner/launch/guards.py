"""What of a call a prepared launch depends on, and a quick test whether a later call has the same.

The facts of a call are the options and, of every operand, shape, dtype, device and whether it is row-major; of a
time-axis operand that is not, the strides. (Any other operand that is not row-major is copied, whatever its strides.)
Facts make a signature, which is hashed; the test compares with one known signature, operand by operand, and stops at
the first difference. It is one generated function for each pattern of operands: unrolled, it costs half of a loop.

Where torch has the guards that its own compiler puts before compiled code, one call of them compares all operands at
once, for less than half of what asking in Python costs. They refuse more than has to be refused (other strides of a
dimension of size 1, one tensor given twice, another `requires_grad`), so that what they refuse is compared in Python.
They refuse whatever torch traces, transforms or watches, too; Python asks for that once all else is the same.
"""

from __future__ import annotations

import functools
import itertools
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ..spec.declaration import OpSpec
from ..spec.operands import Outputs, Value
from ..spec.watched import plain
from .generated import define, distinct
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


class Names(NamedTuple):
    """What a generated text calls the parts of a call.

    Attributes:
        about: What calls, for tracebacks.
        operands: Names of the operands.
        options: Names of the options.
        scalars: Names of the numbers.
    """

    about: str
    operands: tuple[str, ...]
    options: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()


@functools.cache
def names(spec: OpSpec) -> Names:
    """The names that an op's declaration gives."""
    operands = tuple(operand.name for operand in spec.operands)
    return Names(spec.name, operands, tuple(option.name for option in spec.options), spec.scalars)


def fitting(spec: OpSpec, known: Signature, check: Check | None = None) -> Fits:
    """The test for calls of one signature: `fits(operands, options, cu_seqlens, chunk_indices)`.

    An operand that is no tensor fails it.

    Args:
        spec: The op.
        known: What `signature` made of a call.
        check: The `guard` of its operands; without one Python alone compares.
    """
    made: Fits = made_for(names(spec), known, check, "fits", None)
    return made


def fitting_tensors(
    names: Sequence[str], known: Sequence[Facts | None], check: Check | None = None
) -> Callable[[Operands], bool]:
    """The test for tensors of these facts alone.

    Args:
        names: What the test calls them.
        known: What `facts` made of tensors.
        check: Their `guard`.
    """
    named = Names("a prepared list", tuple(names))
    fits: Fits = made_for(named, ("", (), (), None, None, *known), check, "fits", None)
    return lambda tensors: fits(tensors, (), None, None)


def running(
    spec: OpSpec,
    known: Signature,
    check: Check | None,
    launch: Callable[..., Outputs],
    *,
    spread: bool,
    tally: Tally = UNROUTED,
) -> Run:
    """Test and launch at once: `run(operands, options, scalars, cu_seqlens, chunk_indices)`, None where none fits.

    A number that is neither a float nor None does not fit.

    Args:
        spec: The op.
        known: What `signature` made of a call.
        check: The `guard` of its operands.
        launch: What runs a call that fits.
        spread: Whether `launch` takes all of a call one by one; else operands, scalars and what describes a packed
            batch.
        tally: Counts the calls that fit.
    """
    made: Run = made_for(names(spec), known, check, "spread" if spread else "whole", launch, tally)
    return made


def made_for(
    names: Names,
    known: Signature,
    check: Check | None,
    does: Does,
    launch: Callable[..., Outputs] | None,
    tally: Tally = UNROUTED,
) -> Callable[..., Any]:
    """The function of `fitting` or `running`."""
    _, options, _, *tensors = known
    assert isinstance(options, tuple)
    facts = [None if fact is None else Facts(*fact) for fact in tensors]  # type: ignore[misc]
    patterns = tuple(None if fact is None else pattern(fact) for fact in facts)
    compared = [part for fact in facts if fact is not None for part in (*fact[:2], place(fact), fact.memory)]
    make = maker(names, patterns, check is not None, does)
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


def all_of(conditions: Sequence[str]) -> str:
    """The condition that all hold, one a line."""
    return "\nand ".join(conditions)


# What the text below calls things itself.
WORDS = (
    "make", "fits", "run", "operands", "options", "scalars", "check", "launch", "tally", "plain", "fitting",
    "type", "float", "AttributeError", "RuntimeError",
)  # fmt: skip
WANTED = "_wanted"


@functools.cache
def maker(names: Names, patterns: tuple[Pattern | None, ...], guarded: bool, does: Does) -> Callable[..., Any]:
    """The function that makes a test of what it compares with; `generated` shows one.

    Args:
        names: What to call things.
        patterns: Of `cu_seqlens`, `chunk_indices` and the operands; None for what is not given.
        guarded: Whether torch's guards compare the operands first.
        does: `fits` tests; `spread` and `whole` launch what passes.
    """
    endings = [*[f"_{fact}" for fact in Facts._fields], WANTED]
    called = distinct(["cu_seqlens", "chunk_indices", *sum(names[1:], ())], WORDS, endings)
    parts = iter(called)
    cu_seqlens, chunk_indices = itertools.islice(parts, 2)
    operands, options, scalars = ([*itertools.islice(parts, len(part))] for part in names[1:])
    tensors = [cu_seqlens, chunk_indices, *operands]
    tests: dict[str, list[str]] = {}
    for dims, (x, how) in enumerate(zip(tensors, patterns, strict=True), start=1):
        tests[x] = [f"{x} is None"] if how is None else conditions(x, how, dims)
    given = [x for x, how in zip(operands, patterns[2:]) if how is not None]
    # The main tensor's shape is what differs most often.
    compared = [*[test for x in given for test in tests[x]], f"plain({', '.join(given)})"]
    ordered = [test for x in operands if x not in given for test in tests[x]]
    ordered += [*tests[cu_seqlens], *tests[chunk_indices]]
    ordered += [
        f"(\n    {o} is {o}{WANTED}\n    or type({o}) is type({o}{WANTED})\n    and {o} == {o}{WANTED}\n)"
        for o in options
    ]
    if does != "fits":
        ordered += [f"(type({s}) is float or {s} is None)" for s in scalars]
    if guarded:
        same = textwrap.indent(all_of(compared), " " * 8)
        ordered += [f"(\n    check({', '.join(given)})\n    or (\n{same}\n    )\n)"]
    else:
        ordered += compared
    facts = [f"{x}_{fact}" for x, how in zip(tensors, patterns) if how is not None for fact in Facts._fields]
    made = [*[f"{o}{WANTED}" for o in options], "check", "launch", "tally", *facts]
    name = "fits" if does == "fits" else "run"
    taken = ["operands", "options", *([] if does == "fits" else ["scalars"]), "cu_seqlens", "chunk_indices"]
    body = [f"{', '.join(operands)}, = operands"]
    body += [f"{', '.join(options)}, = options"] if options else []
    body += [f"{', '.join(scalars)}, = scalars"] if scalars and does != "fits" else []
    body += [
        "try:",
        "    fitting = (",
        textwrap.indent(all_of(ordered), " " * 8),
        "    )",
        "except (AttributeError, RuntimeError):  # of what is no tensor, and of nested and sparse ones",
        "    fitting = False",
    ]
    if does == "fits":
        body += ["return fitting"]
    else:
        handed = [*operands, *scalars] if does == "spread" else ["operands", "scalars"]
        body += [
            "if not fitting:",
            "    return None",
            "tally.calls += 1",
            f"return launch({', '.join([*handed, 'cu_seqlens', 'chunk_indices'])})",
        ]
    inner = textwrap.indent("\n".join(body), " " * 8)
    text = f"def make({', '.join(made)}):\n    def {name}({', '.join(taken)}):\n{inner}\n    return {name}\n"
    return define("make", text, f"{'a test' if does == 'fits' else 'a hit'} of {names.about}", {"plain": plain})
