"""Follow the control flow of a compiled kernel with the arguments of one launch.

The final HIVM module is straight-line template calls inside ordinary loops and branches on integers. Executing the
integers (and nothing else) visits every call exactly as often as one program would, with the sizes it would have.
What depends on data in memory is unknown (None), except integer arrays whose contents the launch gives.
"""

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from .parser import (
    BITS,
    AffineMap,
    Block,
    MemRef,
    Opaque,
    Operation,
    TypedNumber,
    Value,
)

DYNAMIC: Final = -(1 << 63)
Scalar = int | float | None
# A launch's argument: a number, the contents of an integer array, or None for any other pointer.
Argument = int | float | Sequence[int] | None


@dataclass(frozen=True, slots=True)
class View:
    """A region of memory at run time; None where it depends on what is unknown.

    Attributes:
        base: Name of the argument it lies in, `workspace`, or `` for on-chip memory.
        space: `gm`, `ub`, `cbuf`, `cc`.
        offset: Elements from the base.
        sizes: Sizes.
        strides: Strides in elements.
        bits: Size of an element.
        contents: The integers that lie there, where the launch gives them.
    """

    base: str
    space: str
    offset: int | None
    sizes: tuple[int | None, ...]
    strides: tuple[int | None, ...]
    bits: int
    contents: Sequence[int] | None = None


class Visitor(Protocol):
    """Methods that a walk calls for everything but arithmetic, in order of execution."""

    def call(self, operation: Operation, callee: str, operands: list[Any]) -> None:
        """A template or vector function is called."""

    def access(self, operation: Operation, view: View, store: bool) -> None:
        """The scalar unit loads or stores one element."""

    def element_loop(self, operation: Operation, elements: int) -> None:
        """A loop that computes one element of an on-chip array at a time; its body is not visited."""

    def synchronise(self, operation: Operation, kind: str) -> None:
        """A flag, a barrier."""

    def unknown(self, operation: Operation) -> None:
        """A branch or loop bound depends on data; the branch is not taken, the loop is entered once."""


def entries(module: Operation) -> list[Operation]:
    """The device functions of a module that a launch starts: one per kind of core."""
    functions = []
    for function in module.regions[0][0].operations:
        if function.name != "func.func" or not any(block.operations for block in function.regions[0]):
            continue
        kind = function.attributes.get("hacc.function_kind")
        if isinstance(kind, Opaque) and kind.body == "HOST":
            continue
        if "hivm.vector_function" in function.attributes or "sym_visibility" in function.attributes:
            continue
        functions.append(function)
    return functions


def core_of(function: Operation) -> str:
    """`AIC` (cube) or `AIV` (vector)."""
    kind = function.attributes.get("hivm.func_core_type")
    return kind.body if isinstance(kind, Opaque) else ""


class Walk:
    """Executes one device function for one program.

    Args:
        function: The function.
        arguments: Values of the kernel's arguments by name, in order.
        grid: Number of programs.
        visitor: Its methods are called.
    """

    def __init__(self, function: Operation, arguments: Mapping[str, Argument], grid: int, visitor: Visitor) -> None:
        self._function = function
        self._arguments = arguments
        self._grid = grid
        self._visitor = visitor
        self._environment: dict[Value, Any] = {}
        self._program = 0
        self._sub_block = 0
        self._handlers: dict[str, Callable[[Operation, list[Any]], Any]] = {
            "func.call": self._call,
            "func.return": _nothing,
            "scf.yield": _nothing,
            "scf.if": self._if,
            "scf.for": self._for,
            "memref.load": self._load,
            "memref.store": self._store,
            "hivm.hir.get_block_idx": lambda *_: [self._program],
            "hivm.hir.get_block_num": lambda *_: [self._grid],
            "hivm.hir.get_sub_block_idx": lambda *_: [self._sub_block],
            "hivm.hir.get_sub_block_num": lambda *_: [2],
            **_MEMORY,
        }

    def run(self, program: int, sub_block: int = 0) -> None:
        """Visit everything that `program` does, on one of the two vector cores."""
        self._program, self._sub_block = program, sub_block
        blocks = self._function.regions[0]
        self._environment = dict(zip(blocks[0].arguments, self._bound(blocks[0]), strict=True))
        by_label = {block.label: block for block in blocks}
        block = blocks[0]
        while True:
            self._block(block)
            last = block.operations[-1]
            if not last.successors:
                return
            block = self._branch(last, by_label)

    def value(self, value: Value) -> Any:
        """The value that an SSA value had when it was last computed."""
        return self._environment.get(value)

    def _bound(self, block: Block) -> Iterator[Any]:
        """Values of the function's arguments: the compiler's own, the kernel's, the grid."""
        own = len(block.arguments) - len(self._arguments) - 3
        attributes = self._function.attributes.get("arg_attrs", [])
        for index, argument in enumerate(block.arguments[:own]):
            kind = attributes[index].get("hacc.arg_type") if index < len(attributes) else None
            memref = MemRef.parse(argument.type)
            name = kind.body if isinstance(kind, Opaque) else ""
            yield View(name, memref.space, 0, (None,), (1,), memref.bits) if memref else 0
        for argument, (name, value) in zip(block.arguments[own:], self._arguments.items(), strict=False):
            memref = MemRef.parse(argument.type)
            if memref is None:
                yield value
            else:
                contents = None if value is None or isinstance(value, int | float) else value
                yield View(name, memref.space, 0, (None,), (1,), memref.bits, contents)
        yield from (self._grid, 1, 1)

    def _branch(self, operation: Operation, blocks: Mapping[str, Block]) -> Block:
        operands = [self._environment.get(value) for value in operation.operands]
        label = operation.successors[0]
        if operation.name == "cf.cond_br":
            _, first, second = operation.attributes["operandSegmentSizes"]
            condition, operands = operands[0], operands[1:]
            if condition is None:
                self._visitor.unknown(operation)
            if condition:
                operands = operands[:first]
            else:
                label, operands = operation.successors[1], operands[first : first + second]
        block = blocks[label]
        self._environment.update(zip(block.arguments, operands, strict=True))
        return block

    def _block(self, block: Block) -> list[Any]:
        """Execute a block; the operands of its last operation."""
        environment = self._environment
        operands: list[Any] = []
        for operation in block.operations:
            operands = [environment.get(value) for value in operation.operands]
            results = self._operation(operation, operands)
            if results is not None:
                environment.update(zip(operation.results, results, strict=False))
        return operands

    def _operation(self, operation: Operation, operands: list[Any]) -> Any:
        name = operation.name
        handler = self._handlers.get(name)
        if handler is not None:
            place = _VIEW_AT.get(name, 0 if name in _MEMORY and operation.operands else None)
            if place is not None and operands[place] is None:
                operands[place] = _unknown_view(operation.operands[place])
            return handler(operation, operands)
        dialect, _, rest = name.partition(".")
        if dialect in ("arith", "llvm"):
            return [_integer(operation, rest, operands)]
        if dialect == "affine":
            if None in operands:
                return [None]
            values = operation.attributes["map"](*operands)
            return [{"min": min, "max": max}[rest](values) if rest in ("min", "max") else values[0]]
        if name in _SYNCHRONISATIONS:
            self._visitor.synchronise(operation, _SYNCHRONISATIONS[name])
        return [None] * len(operation.results)

    def _call(self, operation: Operation, operands: list[Any]) -> list[Any]:
        self._visitor.call(operation, operation.attributes["callee"], operands)
        return [None] * len(operation.results)

    def _if(self, operation: Operation, operands: list[Any]) -> list[Any]:
        if operands[0] is None:
            self._visitor.unknown(operation)
        region = operation.regions[0] if operands[0] else operation.regions[1]
        return self._block(region[0]) if region else []

    def _for(self, operation: Operation, operands: list[Any]) -> list[Any]:
        start, stop, step, *carried = operands
        body = operation.regions[0][0]
        if None in (start, stop, step):
            self._visitor.unknown(operation)
            steps: Sequence[int] = (0,)
        else:
            steps = range(start, stop, step)
        if _computes_elements(body):
            self._visitor.element_loop(operation, len(steps))
            return [None] * len(carried)
        for index in steps:
            self._environment.update(zip(body.arguments, [index, *carried], strict=True))
            carried = self._block(body)
        return carried

    def _load(self, operation: Operation, operands: list[Any]) -> list[Any]:
        view, *indices = operands
        self._visitor.access(operation, view, store=False)
        if view.contents is None or view.offset is None or None in indices:
            return [None]
        place = view.offset + sum(map(operator.mul, indices, view.strides))
        return [view.contents[place] if 0 <= place < len(view.contents) else None]

    def _store(self, operation: Operation, operands: list[Any]) -> list[Any]:
        self._visitor.access(operation, operands[1], store=True)
        return []


def _nothing(operation: Operation, operands: list[Any]) -> None:
    return None


_SYNCHRONISATIONS: Final = {
    f"hivm.hir.{kind}": kind
    for kind in ("set_flag", "wait_flag", "pipe_barrier", "sync_block_set", "sync_block_wait", "sync_block")
}


def _computes_elements(body: Block) -> bool:
    """Whether the loop's body stores single elements on chip and does nothing wider."""
    stores = False
    for operation in body.operations:
        if operation.name in ("scf.for", "scf.if", "func.call"):
            return False
        if operation.name == "memref.store":
            memref = MemRef.parse(operation.operands[1].type)
            stores = stores or (memref is not None and memref.space != "gm")
    return stores


# --- Integers. ---


def _truncating(divide: Callable[[int, int], int]) -> Callable[[int, int], int]:
    return lambda a, b: divide(abs(a), abs(b)) if (a >= 0) == (b >= 0) else -divide(abs(a), abs(b))


_quotient = _truncating(operator.floordiv)
_BINARY: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shl": operator.lshift,
    "shrs": operator.rshift,
    "ashr": operator.rshift,
    "lshr": operator.rshift,
    "divs": _quotient,
    "sdiv": _quotient,
    "divu": operator.floordiv,
    "udiv": operator.floordiv,
    "rems": lambda a, b: a - _quotient(a, b) * b,
    "srem": lambda a, b: a - _quotient(a, b) * b,
    "remu": operator.mod,
    "urem": operator.mod,
    "floordivs": operator.floordiv,
    "ceildivs": lambda a, b: -(-a // b),
    "mins": min,
    "maxs": max,
    "minu": min,
    "maxu": max,
    "intr.smin": min,
    "intr.smax": max,
    "intr.umin": min,
    "intr.umax": max,
}
_COMPARE: Final = (
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt),
    *(operator.ge, operator.lt, operator.le, operator.gt, operator.ge),
)
_CONVERT: Final = frozenset(
    ("index_cast", "index_castui", "extsi", "extui", "trunci", "bitcast", "sext", "zext", "trunc")
)


def _integer(operation: Operation, name: str, operands: list[Any]) -> Any:
    """The value of an `arith` or `llvm` operation on integers; None for anything else."""
    if name in ("constant", "mlir.constant"):
        value = operation.attributes["value"]
        return None if isinstance(value, Opaque) else _number(value)
    if name == "select":
        condition, first, second = operands
        # Two buffers of a double-buffered array differ in nothing that is counted.
        return second if condition == 0 else first
    if any(operand is None or isinstance(operand, View) for operand in operands):
        return None
    if name in _CONVERT:
        return _wrap(operands[0], operation.results[0].type)
    if name in ("cmpi", "icmp"):
        return int(_COMPARE[operation.attributes["predicate"]](*operands))
    apply = _BINARY.get(name) or _BINARY.get(name.removesuffix("i"))
    if apply is None or len(operands) != 2 or not all(isinstance(operand, int) for operand in operands):
        return None
    return _wrap(apply(*operands), operation.results[0].type)


def _number(value: Any) -> Scalar:
    if isinstance(value, TypedNumber):
        try:
            return float(value.text)
        except ValueError:
            return None
    return int(value) if isinstance(value, bool | int) else None


def _wrap(value: Any, type_: str) -> Any:
    if not isinstance(value, int) or type_ == "index":
        return value
    bits = BITS.get(type_, 64)
    value &= (1 << bits) - 1
    return value - (1 << bits) if bits > 1 and value >> (bits - 1) else value


# --- Memory. ---


# Which operand of an operation is a region of memory, where that is not the first.
_VIEW_AT: Final = {"memref.load": 0, "memref.store": 1}


def _unknown_view(value: Value) -> View | None:
    """A region of which only the type is known, as the result of an operation that is not followed."""
    memref = MemRef.parse(value.type)
    return None if memref is None else View("", memref.space, None, memref.shape, memref.strides, memref.bits)


def _filled(static: Sequence[int], dynamic: Iterator[Any]) -> tuple[int | None, ...]:
    return tuple(next(dynamic) if value == DYNAMIC else value for value in static)


def _parts(operation: Operation, operands: list[Any]) -> tuple[tuple[int | None, ...], ...]:
    """Offsets, sizes and strides of a subview or reinterpret_cast."""
    _, *counts = operation.attributes["operandSegmentSizes"]
    dynamic = iter(operands[1:])
    return tuple(
        _filled(operation.attributes[f"static_{part}"], itertools.islice(dynamic, count))
        for part, count in zip(("offsets", "sizes", "strides"), counts, strict=True)
    )


def _product(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a * b


def _reinterpret_cast(operation: Operation, operands: list[Any]) -> list[View]:
    offsets, sizes, strides = _parts(operation, operands)
    memref = _result_type(operation)
    return [replace(operands[0], offset=offsets[0], sizes=sizes, strides=strides, bits=memref.bits)]


def _subview(operation: Operation, operands: list[Any]) -> list[View]:
    view: View = operands[0]
    offsets, sizes, steps = _parts(operation, operands)
    shifts = [_product(offset, stride) for offset, stride in zip(offsets, view.strides, strict=True)]
    unknown = view.offset is None or None in shifts
    offset = None if unknown else view.offset + sum(shift for shift in shifts if shift is not None)  # type: ignore[operator]
    strides = tuple(_product(step, stride) for step, stride in zip(steps, view.strides, strict=True))
    memref = _result_type(operation)
    if len(memref.shape) != len(sizes):
        kept = _kept_dimensions(operation.attributes["static_sizes"], strides, memref)
        sizes, strides = tuple(sizes[i] for i in kept), tuple(strides[i] for i in kept)
    return [replace(view, offset=offset, sizes=sizes, strides=strides)]


def _kept_dimensions(static: Sequence[int], strides: Sequence[int | None], memref: MemRef) -> list[int]:
    """Dimensions that a rank-reducing subview keeps: it drops sizes of 1 until its type fits."""

    def fits(at: int, want: int) -> list[int] | None:
        if want == len(memref.shape):
            return [] if all(size == 1 for size in static[at:]) else None
        if len(static) - at < len(memref.shape) - want:
            return None
        size, stride = memref.shape[want], memref.strides[want]
        same_size = size is None or static[at] in (DYNAMIC, size)
        if same_size and (stride is None or strides[at] in (None, stride)):
            rest = fits(at + 1, want + 1)
            if rest is not None:
                return [at, *rest]
        return fits(at + 1, want) if static[at] == 1 else None

    kept = fits(0, 0)
    if kept is None:
        raise ValueError(f"no dimensions of {list(static)} give {memref}")
    return kept


def _collapse_shape(operation: Operation, operands: list[Any]) -> list[View]:
    view: View = operands[0]
    if not view.strides:
        return [view]
    sizes: list[int | None] = []
    strides: list[int | None] = []
    for group in operation.attributes["reassociation"]:
        members = [view.sizes[i] for i in group]
        sizes.append(None if None in members else math.prod(size for size in members if size is not None))
        wide = [i for i in group if view.sizes[i] != 1]
        strides.append(view.strides[wide[-1] if wide else group[-1]])
    return [replace(view, sizes=tuple(sizes), strides=tuple(strides))]


def _expand_shape(operation: Operation, operands: list[Any]) -> list[View]:
    view: View = operands[0]
    sizes = _filled(operation.attributes["static_output_shape"], iter(operands[1:]))
    strides: list[int | None] = [None] * len(sizes)
    for group, step in zip(operation.attributes["reassociation"], view.strides, strict=True):
        for i in reversed(group):
            strides[i] = step
            step = _product(step, sizes[i])
    return [replace(view, sizes=sizes, strides=tuple(strides))]


def _pointer_cast(operation: Operation, operands: list[Any]) -> list[View]:
    memref = _result_type(operation)
    return [View("", memref.space, 0, memref.shape, memref.strides, memref.bits)]


def _byte_view(operation: Operation, operands: list[Any]) -> list[View]:
    memref = _result_type(operation)
    return [View(operands[0].base, memref.space, None, memref.shape, memref.strides, memref.bits)]


def _same(operation: Operation, operands: list[Any]) -> list[Any]:
    return operands[:1]


def _metadata(operation: Operation, operands: list[Any]) -> list[Any]:
    view: View = operands[0]
    return [replace(view, offset=0), view.offset, *view.sizes, *view.strides]


def _result_type(operation: Operation) -> MemRef:
    memref = MemRef.parse(operation.results[0].type)
    if memref is None:
        raise ValueError(f"{operation.name} gives {operation.results[0].type}, not a memref")
    return memref


_MEMORY: Final[Mapping[str, Callable[[Operation, list[Any]], Any]]] = {
    "memref.reinterpret_cast": _reinterpret_cast,
    "memref.subview": _subview,
    "memref.collapse_shape": _collapse_shape,
    "memref.expand_shape": _expand_shape,
    "memref.cast": _same,
    "memref.memory_space_cast": _same,
    "memref.extract_strided_metadata": _metadata,
    "memref.view": _byte_view,
    "hivm.hir.pointer_cast": _pointer_cast,
    "builtin.unrealized_conversion_cast": _same,
}
__all__ = ["AffineMap", "Argument", "View", "Visitor", "Walk", "core_of", "entries"]
