"""Prepared lists: all launches of a function of tensors, made again for other tensors by one generated function.

The function runs once more on tensors without memory while `record` notes what it does. From the record one Python
function is generated, which takes each address once, allocates, and calls the launchers one after the other. It serves
tensors with the same facts whose addresses are multiples of 16, while nothing watches launches; for any other call the
function itself runs, which launches through `launcher`.

The list allocates a tensor that it returns, or that torch works on, when it is first needed, as the function does. All
other memory lies in shared `workspaces`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..device import driver, interpreter
from . import direct, guards, launcher
from .direct import AT
from .generated import define, distinct
from .record import Launched, Memory, Record, UnpreparedError, View, Worked
from .workspaces import workspaces

Tensors = tuple[Tensor | None, ...]
Function = Callable[..., Tensors]

MOST_PATTERNS = 64  # of one function; a caller with more has no use for lists


@dataclass(frozen=True)
class List:
    """A prepared list.

    Attributes:
        fits: Says whether tensors have the facts that the list was made for.
        run: Runs the list and returns the function's results; None where the list may not run just now.
        text: The generated function.
    """

    fits: Callable[[Tensors], bool]
    run: Callable[[Tensors], Tensors | None]
    text: str


def prepare(function: Function, tensors: Tensors, settings: tuple[Hashable, ...]) -> List | None:
    """The list of a function for tensors like these.

    Args:
        function: What it does depends on the facts of its tensors and on its settings alone.
        tensors: Its tensors, at least one of them not None, all on one device.
        settings: Its other arguments.

    Returns:
        None where the function does something that no list can do, or where a kernel has yet to compile.
    """
    device = next(x.device for x in tensors if x is not None)
    index = -1 if device.index is None else device.index
    given = tuple([None if x is None else stand_in(x) for x in tensors])
    record = Record(index, given)
    try:
        with torch.no_grad(), launcher.intercepting(record.launched), record:
            results = function(given, *settings)
    except UnpreparedError:
        return None
    text = Text(record, device).of(given, results)
    if text is None:
        return None
    fits = guards.fitting_tensors(text.given, guards.facts(tensors), guards.guard(tensors))
    return List(fits, define("run", text.text, "a prepared list", text.scope), text.text)


def stand_in(tensor: Tensor) -> Tensor:
    """A tensor with the same shape, strides and dtype, but without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class Written(NamedTuple):
    """A generated function.

    Attributes:
        text: Its source.
        scope: The values of the names in it.
        given: What it calls the function's tensors.
    """

    text: str
    scope: dict[str, Any]
    given: list[str]


class Text:
    """Writes the function that does again what a record holds.

    Args:
        record: What the function did.
        device: Where the list is to run.
    """

    def __init__(self, record: Record, device: torch.device) -> None:
        self.record = record
        self.scope: dict[str, Any] = {
            "allocate": torch.empty_strided,
            "current_stream": driver.raw_stream(),
            "device": device,
            "index": record.index,
            "byte": torch.uint8,
        }
        self.addresses: dict[Memory, str] = {}
        self.used = {*self.scope, "run", "tensors", "stream", "absent"}
        self.constants: dict[int, str] = {}  # by identity; the scope keeps them alive
        self.name_memories()

    def name(self, wanted: str) -> str:
        """A name that is still free, and whose `_at` is free for the address of what it names."""
        (name,) = distinct([wanted], self.used, (AT,))
        self.used |= {name, name + AT}
        return name

    def name_memories(self) -> None:
        """Names each memory after the parameter of the first kernel that takes it."""
        for step in self.record.steps:
            if isinstance(step, Launched):
                assert step.bound.parameters is not None
                for parameter, argument in zip(step.bound.parameters, step.arguments, strict=True):
                    if isinstance(argument, View) and not argument.memory.name:
                        argument.memory.name = self.name(parameter.name)
        for memory in self.record.memories.values():
            memory.name = memory.name or self.name("given" if memory.given else "made")

    def constant(self, value: object, wanted: str = "constant") -> str:
        """A name for a value, or the value itself where a text can hold it."""
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if id(value) not in self.constants:
            said = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else wanted
            name = self.constants[id(value)] = self.name(str(getattr(value, "__name__", said)))
            self.scope[name] = value
        return self.constants[id(value)]

    def of(self, given: Tensors, results: Tensors) -> Written | None:
        """The text; None where a kernel has to be launched by Triton, for good or because it has not compiled yet."""
        how = direct.style()
        record = self.record
        if how is None:
            return None
        returned = [None if x is None else self.returned(x, given) for x in results]
        used = [memory for memory in record.memories.values() if memory.first >= 0 and not memory.given]
        owned = [memory for memory in used if memory.owner is not None]
        spaces = workspaces([memory for memory in used if memory.owner is None], owned, len(record.steps))

        arriving = [record.view(x).memory for x in given if x is not None]
        addressed = [
            argument.memory
            for step in record.steps
            if isinstance(step, Launched)
            for argument in step.arguments
            if isinstance(argument, View)
        ]
        pointers = [memory for memory in arriving if memory in addressed]
        self.addresses = {memory: f"{memory.name}{AT}" for memory in [*pointers, *owned]}
        rooms = [self.name("workspace") for _ in spaces]
        for name, space in zip(rooms, spaces):
            self.addresses |= {memory: f"{name}{AT} + {offset}" for memory, offset in space.offsets.items()}

        quiet: list[str] = []
        body: list[str] = []
        for number, step in enumerate(record.steps):
            for memory in owned:
                if memory.first == number and not memory.made:
                    body += self.allocated(memory, memory in addressed)
            for name, space in zip(rooms, spaces):
                if space.first == number:
                    body += [f"{name} = allocate(({space.bytes},), (1,), dtype=byte, device=device)"]
                    body += [f"{name}{AT} = {name}.data_ptr()"]
            if isinstance(step, Worked):
                body += self.worked(step, addressed)
            else:
                names = step.bound.names.get(step.facts)
                if names is None or step.grid > how.most_programs:
                    return None
                scope = {**names, "kernel": step.bound.kernel}
                named = {name: self.name(name) for name in scope}
                self.scope |= {named[name]: value for name, value in scope.items()}
                quiet += [how.quiet.format_map(named)]
                before = how.call.format_map({**named, "grid": step.grid, "stream": "stream"})
                body += [f"# {direct.name_of(step.bound.kernel)}"]
                body += [f"{named['start']}({before}, {', '.join(self.handed(step, how))})"]
            freed = [memory.name for memory in owned if memory.last == number]
            freed += [name for name, space in zip(rooms, spaces) if space.last == number]
            body += [f"del {', '.join(freed)}"] if freed else []
        for memory in owned:
            if memory.first == len(record.steps):
                body += self.allocated(memory, address=False)
        taken = ["absent" if x is None else record.view(x).memory.name for x in given]
        misaligned = [f"({' | '.join([f'{m.name}{AT}' for m in pointers])}) % {direct.ALIGNMENT}"] if pointers else []
        unfit = [*misaligned, *[f"not ({condition})" for condition in quiet]]
        lines = [
            f"{', '.join(taken)}, = tensors",
            *[f"{memory.name}{AT} = {memory.name}.data_ptr()" for memory in pointers],
            *(["if (", "    " + "\n        or ".join(unfit), "):", "    return None"] if unfit else []),
            "stream = current_stream(index)",
            *body,
            f"return ({''.join([f'{x}, ' for x in returned])})",
        ]
        text = "\n".join(["def run(tensors):", *[f"    {line}" for line in lines], ""])
        return Written(text, self.scope, taken)

    def returned(self, result: Tensor, given: Tensors) -> str:
        """Text of a result: a tensor that was given, or one that the list allocates."""
        if any(result is x for x in given):
            return self.record.view(result).memory.name
        return self.tensor(self.record.own(result))

    def tensor(self, view: View) -> str:
        """Text of a tensor: the name of the tensor that owns its memory, or a view of that one."""
        name = view.memory.name
        if view == (view.memory.whole if view.memory.given else view.memory.owner):
            return name
        # An offset counts from the storage's start, where what is given need not begin.
        offset = f"{name}.storage_offset() + {view.offset}" if view.memory.given else view.offset
        return f"{name}.as_strided({view.shape}, {view.stride}, {offset})"

    def allocated(self, memory: Memory, address: bool) -> list[str]:
        """Lines that allocate a tensor and, where a launch uses it, take its address."""
        assert memory.owner is not None
        _, _, shape, stride, dtype = memory.owner
        made = f"{memory.name} = allocate({shape}, {stride}, dtype={self.constant(dtype)}, device=device)"
        return [made, *([f"{memory.name}{AT} = {memory.name}.data_ptr()"] if address else [])]

    def worked(self, step: Worked, addressed: Sequence[Memory]) -> list[str]:
        """Lines that call an operator of torch."""
        handed = [self.tensor(x) if isinstance(x, View) else self.constant(x) for x in step.arguments]
        handed += [f"{name}={self.constant(value)}" for name, value in step.named.items()]
        call = f"{self.constant(step.function)}({', '.join(handed)})"
        if step.result is None:
            return [call]
        memory = step.result.memory
        address = [f"{memory.name}{AT} = {memory.name}.data_ptr()"] if memory in addressed else []
        return [f"{memory.name} = {call}", *address]

    def handed(self, step: Launched, how: direct.Style) -> list[str]:
        """Text of the arguments of a launch: the kernel's own, then the compile-time constants."""
        handed = []
        bound = step.bound
        assert bound.parameters is not None
        for parameter, argument in zip(bound.parameters, step.arguments, strict=True):
            if isinstance(argument, View):
                beyond = argument.offset * argument.dtype.itemsize
                handed.append(self.addresses[argument.memory] + (f" + {beyond}" if beyond else ""))
            else:
                handed.append(self.constant(argument, parameter.name))
        values = direct.reordered(bound.kernel, bound.constants) if how.constants else {}
        return [*handed, *[self.constant(value, name) for name, value in values.items()]]


class Replayed:
    """Calls a function of tensors: from the second call with tensors of the same facts on, through a prepared list.

    Args:
        function: `function(tensors, *settings)`. The tensors are on one device, the settings can be hashed, and what
            the function does depends on the facts of the tensors and on the settings alone.

    Attributes:
        newest: For each of the settings, the list that ran last.
        seen: For each pattern of settings and facts the list, or the number of calls where there is none.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.newest: dict[tuple[Hashable, ...], List] = {}
        self.seen: dict[tuple[object, ...], List | int] = {}

    def __call__(self, tensors: Tensors, *settings: Hashable) -> Tensors:
        # Where launches are recorded or a mode of torch's watches its operators, they see what the function does.
        if launcher.intercepted() or torch._C._len_torch_dispatch_stack():
            return self.function(tensors, *settings)
        prepared = self.newest.get(settings)
        if prepared is None or not prepared.fits(tensors):
            prepared = self.find(tensors, settings)
        results = None if prepared is None else prepared.run(tensors)
        return self.function(tensors, *settings) if results is None else results

    def find(self, tensors: Tensors, settings: tuple[Hashable, ...]) -> List | None:
        """The list for these tensors, prepared at the second call with their facts.

        Where that fails it is tried again at the fourth, the eighth and so on: kernels may have compiled by then.
        """
        how = None if interpreter.interpreting() else direct.style()
        if how is None or not how.addresses:
            return None
        pattern = (settings, guards.facts(tensors))
        seen = self.seen.get(pattern, 0)
        if isinstance(seen, int):
            if seen == 0 and len(self.seen) >= MOST_PATTERNS:
                return None
            calls = self.seen[pattern] = seen + 1
            made = prepare(self.function, tensors, settings) if calls > 1 and calls & (calls - 1) == 0 else None
            if made is None:
                return None
            self.seen[pattern] = seen = made
        self.newest[settings] = seen
        return seen
