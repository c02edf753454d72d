"""The facts of a call that a prepared launch depends on, and a quick test whether a later call has the same facts.

The facts of a call are its options and, of every operand, shape, dtype, device and whether it is row-major; of a
time-axis operand that is not row-major, also the strides. (Any other operand that is not row-major is copied, whatever
its strides.) The facts make a signature, which can be hashed. The test compares a call with one known signature,
operand by operand, and stops at the first difference. It is one generated function for each pattern of operands, which
costs half of what a loop over the operands does.

Some releases of torch have guards, which its own compiler puts before compiled code: one call of them compares all
operands at once, for less than half of what the same questions cost in Python. They refuse more calls than the test
has to (other strides of a dimension of size 1, one tensor given twice, another `requires_grad`), so Python compares a
call again that they refuse. They also refuse every call that torch traces, transforms or watches; Python asks about
that last. Nested tensors of strided layout are
the one thing that the guards cannot be asked about: in torch 2.13 that ends the process. To ask each operand first
would make a hit a quarter slower, so the chain alone asks (see `watched.any_nested`).
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
    """The facts of one tensor.

    Attributes:
        shape: Its shape. None stands for every shape that describes a packed batch.
        dtype: Its dtype.
        device: Its device.
        memory: How it lies in memory, see `memory`.
    """

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
    """Everything of a call that its checks and the choice of a candidate depend on.

    Where an operand is no tensor, the signature equals no other one, so such a call is always checked.
    """
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
    """The facts of tensors, with the strides of every one that is not row-major."""
    return tuple([None if x is None else Facts(x.shape, x.dtype, x.device, memory(x, True)) for x in tensors])


def memory(tensor: torch.Tensor, time_axis: bool) -> tuple[int, ...] | bool:
    """True for a row-major operand; else the strides of a time-axis operand, and False for any other operand."""
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
        about: The op, for tracebacks.
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
    """The names of a call's parts in an op's declaration."""
    operands = tuple(operand.name for operand in spec.operands)
    return Names(spec.name, operands, tuple(option.name for option in spec.options), spec.scalars)


def fitting(spec: OpSpec, known: Signature, check: Check | None = None) -> Fits:
    """The test for calls of one signature: `fits(operands, options, cu_seqlens, chunk_indices)`.

    A call with an operand that is no tensor does not pass.

    Args:
        spec: The op.
        known: What `signature` made of a call.
        check: The `guard` of its operands; None: Python alone compares.
    """
    made: Fits = made_for(names(spec), known, check, "fits", None)
    return made


def fitting_tensors(
    names: Sequence[str], known: Sequence[Facts | None], check: Check | None = None
) -> Callable[[Operands], bool]:
    """The test whether tensors have these facts, for tensors that are no operands of an op.

    Args:
        names: What the test calls the tensors.
        known: What `facts` made of tensors that pass.
        check: The `guard` of these tensors.
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
    """Test and launch in one function, `run(operands, options, scalars, cu_seqlens, chunk_indices)`.

    It returns None where the call does not pass the test; a call with a number that is neither a float nor None does
    not pass.

    Args:
        spec: The op.
        known: What `signature` made of a call.
        check: The `guard` of its operands.
        launch: Runs a call that passes.
        spread: Whether `launch` takes each operand and each number as an argument of its own, ahead of `cu_seqlens`
            and `chunk_indices`; else it takes operands and numbers as two tuples.
        tally: Counts the calls that pass.
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
    """The function that `fitting` or `running` returns."""
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
    """The check of torch's that lets tensors pass which are like these, in order; None where torch has none.

    Args:
        operands: The operands of a call. The check is called without those that are None.
    """
    present = [tensor for tensor in operands if tensor is not None]
    if not present or not guards_work():
        return None
    make: Any = torch._C._dynamo.guards.TensorGuards
    check: Check = make(*present, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check if check(*present) else None  # refuses one tensor given twice


@functools.cache
def guards_work() -> bool:
    """Whether this torch has guards that see every fact of a call. They are not public, so this tries them."""
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
    """How a tensor is tested. Tests of the same patterns have the same text, but compare with values of their own.

    Attributes:
        place: The question about its device: `cpu`, `index` or `any`.
        counted: Whether the test asks for the number of dimensions in place of the shape.
        memory: Whether it has to be row-major, or must not be; None: its strides are compared.
    """

    place: str
    counted: bool
    memory: bool | None


def pattern(fact: Facts) -> Pattern:
    """How a tensor of these facts is tested. A device is told by the quickest question that tells it."""
    place = "cpu" if fact.device.type == "cpu" else "any" if fact.device.index is None else "index"
    return Pattern(place, fact.shape is None, None if isinstance(fact.memory, tuple) else fact.memory)


def place(fact: Facts) -> torch.device | int:
    """The value for a tensor's device. A process has one kind of accelerator, so an index tells the device."""
    return fact.device if fact.device.index is None else fact.device.index


def conditions(x: str, how: Pattern, dims: int) -> list[str]:
    """Python text of all that has to hold for a tensor named `x`; what differs between calls most often comes first."""
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
    """The condition that all of these hold, one of them in each line."""
    return "\nand ".join(conditions)


# Names that the text below uses itself.
WORDS = (
    "make", "fits", "run", "operands", "options", "scalars", "check", "launch", "tally", "plain", "fitting",
    "type", "float", "AttributeError", "RuntimeError",
)  # fmt: skip
WANTED = "_wanted"


@functools.cache
def maker(names: Names, patterns: tuple[Pattern | None, ...], guarded: bool, does: Does) -> Callable[..., Any]:
    """`make`, which returns the test for the values that it is given to compare with; `generated` shows one.

    Args:
        names: The names of a call's parts.
        patterns: Those of `cu_seqlens`, `chunk_indices` and the operands; None for what is not given.
        guarded: Whether torch's guards compare the operands first.
        does: Whether the function only tests (`fits`) or launches a call that passes; `spread` and `whole` say how the
            launch takes it, see `running`.
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
