"""Prepared lists: what a function of tensors launches, launched again for other tensors without asking anything again.

The function runs once more on tensors without memory, its launches and allocations recorded. From the record one
Python function is generated that takes each address once, allocates, and calls the launchers one after the other. It
serves tensors of the same facts, aligned as kernels like them, while nobody watches launches; all else runs the
function itself, which launches through `launcher`.

What is returned, and what torch itself works on, is allocated when it is first needed, as the function does. All else
is only ever an address, so it shares workspaces, at offsets that depend on when it is in use; two workspaces become
one where that raises the most memory held at any moment by nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..device import driver, interpreter
from . import direct, guards, launcher
from .direct import AT
from .generated import define, distinct

Tensors = tuple[Tensor | None, ...]
Function = Callable[..., Tensors]

BLOCK = 512  # torch's allocators hand out multiples of it
MOST_PATTERNS = 64  # of one function; a caller with more has no use for lists
ALLOCATIONS = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)


# -- the record ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Memory:
    """Memory of the record.

    Attributes:
        bytes: Its size, as an allocator rounds it.
        whole: The tensor that it was made as.
        given: Whether the caller owns it.
        made: Whether torch makes it, as the result of some work.
        owner: The tensor that has to own it; None while nothing but addresses is wanted.
        first: The step that uses it first; -1: none does.
        last: The step that uses it last; what is returned is in use after all of them.
        name: Of the tensor that owns it, in the generated text.
    """

    bytes: int
    whole: View
    given: bool = False
    made: bool = False
    owner: View | None = None
    first: int = -1
    last: int = -1
    name: str = ""

    def use(self, step: int) -> None:
        """Note a use."""
        self.first = step if self.first < 0 else self.first
        self.last = step


class View(NamedTuple):
    """A tensor of the record, by the memory that it lies in; `offset` counts elements."""

    memory: Memory
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Launched:
    """A launch; a tensor among its arguments is a view."""

    bound: launcher.BoundKernel
    grid: int
    arguments: tuple[Any, ...]
    facts: direct.Facts


@dataclass(frozen=True)
class Worked:
    """What torch itself does between launches; the result is None where it writes in place."""

    function: Callable[..., object]
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    result: View | None


class UnpreparedError(Exception):
    """What a function does cannot become a list."""


class Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Everything that a function does to tensors without memory, as a context around it.

    Args:
        index: Of the device that they stand for.
        given: The function's tensors.
    """

    def __init__(self, index: int, given: Sequence[Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.index = index
        self.steps: list[Launched | Worked] = []
        self.memories: dict[int, Memory] = {}
        self.alive: list[Tensor] = []  # freed, one would give its identity to another
        for tensor in given:
            if tensor is not None:
                self.remember(tensor).given = True

    def remember(self, tensor: Tensor) -> Memory:
        """Take note of new memory."""
        storage = tensor.untyped_storage()
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        memory = Memory(size, None)  # type: ignore[arg-type]
        self.memories[storage._cdata] = memory
        memory.whole = self.view(tensor)
        self.alive.append(tensor)
        return memory

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that is known."""
        return tensor.untyped_storage()._cdata in self.memories

    def view(self, tensor: Tensor) -> View:
        """The tensor, by its memory."""
        memory = self.memories[tensor.untyped_storage()._cdata]
        return View(memory, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def own(self, tensor: Tensor) -> View:
        """The same for one that has to be a tensor when the list runs, used by the next step."""
        view = self.view(tensor)
        memory, whole = view.memory, view.memory.whole
        memory.use(len(self.steps))
        if memory.owner is None:
            covers = view.offset == 0 and view.dtype is whole.dtype and math.prod(view.shape) == math.prod(whole.shape)
            memory.owner = view if covers else whole
        return view

    def launched(self, record: launcher.LaunchRecord) -> None:
        """Take note of a launch."""
        bound = launcher.bind(record.kernel, **record.constants)
        known = None if bound.parameters is None else direct.facts(bound.parameters, record.arguments)
        if known is None or record.grid < 1:
            raise UnpreparedError
        arguments = tuple([self.view(x) if isinstance(x, Tensor) else x for x in record.arguments])
        for argument in arguments:
            if isinstance(argument, View):
                argument.memory.use(len(self.steps))
        self.steps.append(Launched(bound, record.grid, arguments, (self.index, known[1])))

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        if func in ALLOCATIONS:
            self.remember(result)
            return result
        in_place = func._schema.is_mutable
        results = result if isinstance(result, (list, tuple)) else [result]
        if not in_place and all(isinstance(x, Tensor) and self.knows(x) for x in results):
            return result  # a view
        nested = [x for values in args if isinstance(values, (list, tuple)) for x in values] + list(named.values())
        hidden = any(isinstance(x, (Tensor, torch.device)) for x in nested)
        if not isinstance(result, Tensor) or self.knows(result) != in_place or hidden:
            raise UnpreparedError
        arguments = tuple([self.own(x) if isinstance(x, Tensor) else x for x in args])
        made = None
        if not in_place:
            self.remember(result).made = True
            made = self.own(result)
        # A method of a tensor costs less than an operator of torch.
        method = getattr(Tensor, func._schema.name.removeprefix("aten::"), func)
        self.steps.append(Worked(method, arguments, named, made))
        return result


# -- workspaces ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Workspace:
    """Memories that share one allocation.

    Attributes:
        bytes: Its size.
        first: The step before which it is allocated.
        last: The step after which it is freed.
        offsets: Where each memory lies.
    """

    bytes: int
    first: int
    last: int
    offsets: dict[Memory, int]

    @classmethod
    def of(cls, memories: Iterable[Memory]) -> Workspace:
        """The workspace of these memories: each at the lowest offset where nothing lies that is in use with it."""
        offsets: dict[Memory, int] = {}
        for memory in sorted(memories, key=lambda memory: (-memory.bytes, memory.first)):
            beside = [other for other in offsets if other.first <= memory.last and memory.first <= other.last]
            ends = [0, *[offsets[other] + other.bytes for other in beside]]
            offsets[memory] = min(
                start
                for start in ends
                if all(
                    start + memory.bytes <= offsets[other] or offsets[other] + other.bytes <= start for other in beside
                )
            )
        return cls(
            bytes=max(offset + memory.bytes for memory, offset in offsets.items()),
            first=min(memory.first for memory in offsets),
            last=max(memory.last for memory in offsets),
            offsets=offsets,
        )


def workspaces(addressed: Sequence[Memory], owned: Sequence[Memory], steps: int) -> list[Workspace]:
    """As few workspaces for what is only addressed as hold no more at the worst moment than one for each would.

    Args:
        addressed: Memories that need no tensor.
        owned: The other ones that the list allocates.
        steps: How many steps there are.
    """

    def most(spaces: Sequence[Workspace]) -> int:
        held: list[Workspace | Memory] = [*spaces, *owned]
        return max(sum(x.bytes for x in held if x.first <= step <= x.last) for step in range(steps + 1))

    # What is freed together comes together: it merges best.
    found = [Workspace.of([memory]) for memory in sorted(addressed, key=lambda memory: -memory.last)]
    allowed = most(found)
    merging = True
    while merging:
        merging = False
        for one, other in itertools.combinations(found, 2):
            rest = [space for space in found if space not in (one, other)]
            merged = [*rest, Workspace.of([*one.offsets, *other.offsets])]
            if most(merged) <= allowed:
                found, merging = merged, True
                break
    return found


# -- the list --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class List:
    """A prepared list.

    Attributes:
        fits: Whether tensors have the facts it was made for.
        run: Runs it; None where it may not run now.
        text: What was generated.
    """

    fits: Callable[[Tensors], bool]
    run: Callable[[Tensors], Tensors | None]
    text: str


def prepare(function: Function, tensors: Tensors, settings: tuple[Hashable, ...]) -> List | None:
    """The list of a function for tensors like these; None where it does what no list does, or has yet to compile.

    Args:
        function: What it does depends on the facts of its tensors and on its settings alone.
        tensors: All on one device, one of them given.
        settings: What else it takes.
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
    """A tensor of the same facts, without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class Written(NamedTuple):
    """A generated text, what it names, and what it calls the given tensors."""

    text: str
    scope: dict[str, Any]
    given: list[str]


class Text:
    """Writes the function that does again what a record holds.

    Args:
        record: The record.
        device: Where.
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
        """A name that stands for nothing yet, nor does the name of its address."""
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
        """The text; None where Triton has to launch something, at least now."""
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
        """A result: a tensor that was given, or one of the list's own."""
        if any(result is x for x in given):
            return self.record.view(result).memory.name
        return self.tensor(self.record.own(result))

    def tensor(self, view: View) -> str:
        """A tensor: the owner of its memory, or a view of that."""
        name = view.memory.name
        if view == (view.memory.whole if view.memory.given else view.memory.owner):
            return name
        # An offset counts from the storage's start, where what is given need not begin.
        offset = f"{name}.storage_offset() + {view.offset}" if view.memory.given else view.offset
        return f"{name}.as_strided({view.shape}, {view.stride}, {offset})"

    def allocated(self, memory: Memory, address: bool) -> list[str]:
        """The allocation of a tensor, and its address where a launch wants that."""
        assert memory.owner is not None
        _, _, shape, stride, dtype = memory.owner
        made = f"{memory.name} = allocate({shape}, {stride}, dtype={self.constant(dtype)}, device=device)"
        return [made, *([f"{memory.name}{AT} = {memory.name}.data_ptr()"] if address else [])]

    def worked(self, step: Worked, addressed: Sequence[Memory]) -> list[str]:
        """What torch does."""
        handed = [self.tensor(x) if isinstance(x, View) else self.constant(x) for x in step.arguments]
        handed += [f"{name}={self.constant(value)}" for name, value in step.named.items()]
        call = f"{self.constant(step.function)}({', '.join(handed)})"
        if step.result is None:
            return [call]
        memory = step.result.memory
        address = [f"{memory.name}{AT} = {memory.name}.data_ptr()"] if memory in addressed else []
        return [f"{memory.name} = {call}", *address]

    def handed(self, step: Launched, how: direct.Style) -> list[str]:
        """A launch's arguments, the kernel's own and the compile-time constants."""
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
    """A function of tensors that runs from a prepared list from its second call with tensors of the same facts on.

    Args:
        function: `function(tensors, *settings)`; what it does depends on the facts of the tensors, which are on one
            device, and on the settings, which can be hashed, alone.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.newest: dict[tuple[Hashable, ...], List] = {}
        self.seen: dict[tuple[object, ...], List | int] = {}

    def __call__(self, tensors: Tensors, *settings: Hashable) -> Tensors:
        # Where launches are recorded or a mode of torch's watches its operators, they see what the function does.
        if launcher.intercepted() or torch._C._len_torch_dispatch_stack():
            return self.function(tensors, *settings)
        found = self.newest.get(settings)
        if found is None or not found.fits(tensors):
            found = self.find(tensors, settings)
        results = None if found is None else found.run(tensors)
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
