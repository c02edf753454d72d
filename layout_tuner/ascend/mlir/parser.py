"""A parser of MLIR's generic form.

    %0:2 = "dialect.name"(%a, %b)[^bb1] <{property = 1 : i32}> ({regions}) {attribute} : (types) -> types loc(...)

`--mlir-print-op-generic --mlir-print-local-scope` prints every operation of every dialect by this one grammar, so the
parser knows no dialect. Attributes become Python values where the text says which (numbers, strings, lists,
dictionaries, affine maps), types stay text except memrefs, which `MemRef.parse` reads.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn

from .affine import AffineMap, parse_affine_map

_SPACE: Final = re.compile(r"(?:\s+|//[^\n]*)*")
_STRING: Final = re.compile(r'"((?:[^"\\]|\\.)*)"')
_VALUE: Final = re.compile(r"%[\w$.-]+(?:#\d+)?")
_RESULT: Final = re.compile(r"(%[\w$.-]+)(?::(\d+))?")
_LABEL: Final = re.compile(r"\^\w+")
_NUMBER: Final = re.compile(r"-?(?:0x[0-9A-Fa-f]+|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)")
_NAME: Final = re.compile(r"[A-Za-z_][\w$.-]*")
_TYPE_NAME: Final = re.compile(r"!?[A-Za-z_][\w$.]*")
_OPAQUE: Final = re.compile(r"#[\w$.]+")
_SYMBOL: Final = re.compile(r'@(?:[\w$.-]+|"[^"]*")')
# What bracket matching must see: quoted text and arrows, which it skips, and brackets.
_BRACKET: Final = re.compile(r'"(?:[^"\\]|\\.)*"|->|[<>]=|[()\[\]{}<>]')
_BOOLEANS: Final = {"true": 1, "false": 0}
_CLOSING: Final = {"(": ")", "[": "]", "{": "}", "<": ">"}

BITS: Final = {
    name: bits
    for bits, names in (
        (1, "i1"),
        (8, "i8 ui8 f8E4M3FN f8E5M2"),
        (16, "i16 ui16 bf16 f16"),
        (32, "i32 ui32 f32"),
        (64, "i64 ui64 f64 index"),
    )
    for name in names.split()
}


class ParseError(ValueError):
    """Text that is not MLIR's generic form."""


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a source file; `caller` is where the function that it lies in was inlined."""

    file: str
    line: int
    column: int
    caller: "Location | None" = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Opaque:
    """An attribute whose meaning belongs to a dialect: `#name<body>`."""

    name: str
    body: str


@dataclass(frozen=True, slots=True)
class TypedNumber:
    """A number whose bits are given (`0xFF800000 : f32`), or a float."""

    text: str
    type: str


@dataclass(eq=False, slots=True)
class Value:
    """A result of an operation, or an argument of a block."""

    name: str
    type: str
    owner: "Operation | Block | None" = None
    index: int = 0


@dataclass(eq=False, slots=True)
class Block:
    """Operations in order, with the block's arguments."""

    label: str
    arguments: list[Value]
    operations: list["Operation"]
    parent: "Operation | None" = None


@dataclass(eq=False, slots=True)
class Operation:
    """One operation. Properties and discardable attributes are in `attributes` together."""

    name: str
    operands: list[Value] = field(default_factory=list)
    results: list[Value] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    regions: list[list[Block]] = field(default_factory=list)
    successors: list[str] = field(default_factory=list)
    location: Location | None = None
    parent: Block | None = None

    def walk(self) -> Iterator["Operation"]:
        """This operation and all inside it, in order."""
        yield self
        for region in self.regions:
            for block in region:
                for operation in block.operations:
                    yield from operation.walk()

    def ancestors(self) -> Iterator["Operation"]:
        """The operations around this one, innermost first."""
        block = self.parent
        while block is not None and block.parent is not None:
            yield block.parent
            block = block.parent.parent


@dataclass(frozen=True, slots=True)
class MemRef:
    """A memref type. None stands for a size or stride known only at run time.

    Attributes:
        shape: Sizes.
        element: Type of an element.
        strides: Strides in elements; those of a packed array where the type gives none.
        space: Memory: `gm`, `ub`, `cbuf` (L1), `cc` (L0C), or `` for none.
    """

    shape: tuple[int | None, ...]
    element: str
    strides: tuple[int | None, ...]
    space: str = ""

    @property
    def bits(self) -> int:
        """Size of an element."""
        return BITS.get(self.element, 0)

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def parse(text: str) -> "MemRef | None":
        """The memref of a type's text; None for any other type."""
        if not text.startswith("memref<"):
            return None
        head, *rest = split(text[len("memref<") : -1])
        sizes: list[int | None] = []
        while (size := re.match(r"(\d+|\?)x", head)) is not None:
            sizes.append(None if size[1] == "?" else int(size[1]))
            head = head[size.end() :]
        strides: tuple[int | None, ...] | None = None
        space = ""
        for part in rest:
            if part.startswith("strided<["):
                inner = part[len("strided<[") : part.index("]")]
                strides = tuple(None if s == "?" else int(s) for s in split(inner))
            elif part.startswith("#hivm.address_space<"):
                space = part[len("#hivm.address_space<") : -1]
        return MemRef(tuple(sizes), head, _packed(sizes) if strides is None else strides, space)


def _packed(sizes: list[int | None]) -> tuple[int | None, ...]:
    strides: list[int | None] = []
    step: int | None = 1
    for size in reversed(sizes):
        strides.append(step)
        step = None if step is None or size is None else step * size
    return tuple(reversed(strides))


def split(text: str, separator: str = ",") -> list[str]:
    """The parts of `text` between separators that lie in no bracket."""
    parts, start, at = [], 0, 0
    while at < len(text):
        char = text[at]
        if char == separator:
            parts.append(text[start:at].strip())
            start = at = at + 1
        elif char in _CLOSING:
            at = _after_group(text, at)
        elif char == '"':
            at = _match(_STRING, text, at).end()
        else:
            at += 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def _match(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str]:
    match = pattern.match(text, at)
    if match is None:
        raise ParseError(f"wanted {pattern.pattern} at {text[at : at + 60]!r}")
    return match


def _after_group(text: str, at: int) -> int:
    """Where the bracket group that opens at `at` has ended."""
    stack: list[str] = []
    for match in _BRACKET.finditer(text, at):
        token = match[0]
        if token in _CLOSING:
            stack.append(_CLOSING[token])
        elif len(token) == 1:
            if token != stack[-1]:
                raise ParseError(f"{token!r} where {stack[-1]!r} was wanted: {text[at : match.end()][-80:]!r}")
            stack.pop()
            if not stack:
                return match.end()
    raise ParseError(f"no end of {text[at : at + 60]!r}")


def parse_module(text: str) -> Operation:
    """The single top operation of a module's text.

    Raises:
        ParseError: the text is not in generic form.
    """
    parser = _Parser(text)
    module = parser.operation(None)
    parser.end()
    return module


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._scopes: list[dict[str, Value]] = [{}]
        self._skip()

    def _skip(self) -> None:
        self._at = _match(_SPACE, self._text, self._at).end()

    def _fail(self, wanted: str) -> NoReturn:
        line = self._text.count("\n", 0, self._at) + 1
        raise ParseError(f"line {line}: wanted {wanted} at {self._text[self._at : self._at + 60]!r}")

    def _accept(self, token: str) -> bool:
        if not self._text.startswith(token, self._at):
            return False
        self._at += len(token)
        self._skip()
        return True

    def _expect(self, token: str) -> None:
        if not self._accept(token):
            self._fail(repr(token))

    def _take(self, pattern: re.Pattern[str], wanted: str) -> re.Match[str]:
        match = self._try(pattern)
        if match is None:
            self._fail(wanted)
        return match

    def _try(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
            self._skip()
        return match

    def _group(self) -> str:
        """The text inside the bracket group that starts here."""
        end = _after_group(self._text, self._at)
        inner = self._text[self._at + 1 : end - 1]
        self._at = end
        self._skip()
        return inner

    def end(self) -> None:
        if self._at != len(self._text):
            self._fail("the end")

    def operation(self, parent: Block | None) -> Operation:
        names: list[tuple[str, int | None]] = []
        if self._text.startswith("%", self._at):
            while True:
                match = self._take(_RESULT, "a result")
                names.append((match[1], int(match[2]) if match[2] else None))
                if not self._accept(","):
                    break
            self._expect("=")
        operation = Operation(self._take(_STRING, "an operation's name in quotes")[1], parent=parent)
        self._expect("(")
        operands: list[str] = []
        while not self._accept(")"):
            operands.append(self._take(_VALUE, "an operand")[0])
            self._accept(",")
        if self._accept("["):
            while not self._accept("]"):
                operation.successors.append(self._take(_LABEL, "a successor")[0])
                self._accept(",")
        if self._accept("<"):
            operation.attributes.update(self._dictionary())
            self._expect(">")
        if self._accept("("):
            while not self._accept(")"):
                operation.regions.append(self._region(operation))
                self._accept(",")
        if self._text.startswith("{", self._at):
            operation.attributes.update(self._dictionary())
        self._expect(":")
        operand_types = self._types()
        self._expect("->")
        result_types = self._types()
        operation.location = self._location()
        if len(operands) != len(operand_types):
            self._fail(f"{len(operands)} operand types of {operation.name}")
        operation.operands = [self._value(*pair) for pair in zip(operands, operand_types, strict=True)]
        self._define(operation, names, result_types)
        return operation

    def _define(self, operation: Operation, names: list[tuple[str, int | None]], types: list[str]) -> None:
        full = [name if count is None else f"{name}#{i}" for name, count in names for i in range(count or 1)]
        if len(full) != len(types):
            self._fail(f"{len(full)} result types of {operation.name}")
        for index, (name, type_) in enumerate(zip(full, types, strict=True)):
            value = self._value(name, type_, new=True)
            value.owner, value.index = operation, index
            operation.results.append(value)

    def _value(self, name: str, type_: str, new: bool = False) -> Value:
        for scope in reversed(self._scopes):
            value = scope.get(name)
            if value is not None and (not new or value.owner is None):
                return value
        value = self._scopes[-1][name] = Value(name, type_)
        return value

    def _region(self, operation: Operation) -> list[Block]:
        self._expect("{")
        self._scopes.append({})
        blocks: list[Block] = []
        while not self._accept("}"):
            label = self._try(_LABEL)
            if label is not None or not blocks:
                block = Block(label[0] if label else "", [], [], operation)
                blocks.append(block)
            if label is not None:
                if self._accept("("):
                    while not self._accept(")"):
                        self._argument(block)
                        self._accept(",")
                self._expect(":")
            else:
                block.operations.append(self.operation(block))
        self._scopes.pop()
        return blocks

    def _argument(self, block: Block) -> None:
        name = self._take(_VALUE, "a block's argument")[0]
        self._expect(":")
        value = self._value(name, self._type(), new=True)
        value.owner, value.index = block, len(block.arguments)
        block.arguments.append(value)
        self._location()

    def _types(self) -> list[str]:
        if not self._text.startswith("(", self._at):
            return [self._type()]
        return split(self._group())

    def _type(self) -> str:
        start = self._at
        if self._text.startswith("(", start):
            self._group()
            self._expect("->")
            self._types()
            return self._text[start : self._at].strip()
        end = _match(_TYPE_NAME, self._text, start).end()
        if self._text.startswith("<", end):
            end = _after_group(self._text, end)
        self._at = end
        self._skip()
        return self._text[start:end]

    def _location(self) -> Location | None:
        if not self._accept("loc("):
            return None
        location = self._place()
        self._expect(")")
        return location

    def _place(self) -> Location | None:
        """The inside of `loc(...)`."""
        if self._accept("callsite("):
            callee = self._place()
            self._expect("at")
            caller = self._place()
            self._expect(")")
            return callee and replace(callee, caller=caller)
        if self._accept("fused"):
            if self._text.startswith("<", self._at):
                self._group()
            self._expect("[")
            places = []
            while not self._accept("]"):
                places.append(self._place())
                self._accept(",")
            return next((place for place in places if place is not None), None)
        if self._accept("unknown"):
            return None
        file = self._take(_STRING, "a location")[1]
        if self._accept("("):
            place = self._place()
            self._expect(")")
            return place
        if not self._accept(":"):
            return None
        line = int(self._take(_NUMBER, "a line")[0])
        self._expect(":")
        column = int(self._take(_NUMBER, "a column")[0])
        # Newer printers give ranges: "to :line:column".
        if self._accept("to"):
            while self._accept(":"):
                self._take(_NUMBER, "a number")
        return Location(file, line, column)

    def _dictionary(self) -> dict[str, Any]:
        self._expect("{")
        entries: dict[str, Any] = {}
        while not self._accept("}"):
            quoted = self._try(_STRING)
            key = quoted[1] if quoted else self._take(_NAME, "an attribute's name")[0]
            entries[key] = self._attribute() if self._accept("=") else True
            self._accept(",")
        return entries

    def _attribute(self) -> Any:
        text, at = self._text, self._at
        char = text[at]
        if char == "{":
            return self._dictionary()
        if char == "[":
            self._expect("[")
            items = []
            while not self._accept("]"):
                items.append(self._attribute())
                self._accept(",")
            return items
        if char == "@":
            symbol = self._take(_SYMBOL, "a symbol")[0].removeprefix("@")
            while self._accept("::"):
                symbol += "::" + self._take(_SYMBOL, "a symbol")[0]
            return symbol
        if char == "#":
            name = self._take(_OPAQUE, "an attribute")[0].removeprefix("#")
            return Opaque(name, self._group() if self._text.startswith("<", self._at) else "")
        if char == '"':
            value = self._take(_STRING, "a string")[1]
            if self._accept(":"):
                self._type()
            return value
        if char == "(" or char == "!":
            return self._type()
        if (number := self._try(_NUMBER)) is not None:
            return self._number(number[0])
        return self._word()

    def _number(self, text: str) -> int | TypedNumber:
        type_ = self._type() if self._accept(":") else "i64"
        if text.lstrip("-").isdigit() and (type_ == "index" or type_.lstrip("us").startswith("i")):
            return int(text)
        return TypedNumber(text, type_)

    def _word(self) -> Any:
        for word, value in (("true", True), ("false", False), ("unit", True)):
            if self._try(re.compile(rf"{word}\b")):
                return value
        name = self._take(_NAME, "an attribute")[0]
        if not self._text.startswith("<", self._at):
            return name
        if name == "affine_map":
            return parse_affine_map(self._group())
        body = self._group()
        if name == "array":
            kind, _, items = body.partition(":")
            if kind.strip().startswith("i"):
                return [_BOOLEANS[item] if item in _BOOLEANS else int(item) for item in split(items)]
            return split(items)
        if name in ("dense", "dense_resource", "sparse", "opaque") and self._accept(":"):
            return Opaque(name, f"{body} : {self._type()}")
        return f"{name}<{body}>"


__all__ = [
    "BITS",
    "AffineMap",
    "Block",
    "Location",
    "MemRef",
    "Opaque",
    "Operation",
    "ParseError",
    "TypedNumber",
    "Value",
    "parse_module",
    "split",
]
