"""Follows a kernel through its assignments, branches, loops and helpers, and notes what the rules ask about."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from .sources import Library, Source
from .values import (
    SCALAR,
    TILE,
    UNKNOWN,
    UNSET,
    Alternatives,
    Value,
    computed,
    elementwise,
    multiplied,
    pairs,
    plus,
    unique,
)

Bindings = dict[str, Alternatives]
# Of helpers that call helpers.
DEPTH = 5


@dataclass(frozen=True, kw_only=True)
class Noted:
    """An expression of a kernel that a rule may be about.

    Attributes:
        node: The expression: a call, a comparison or a subscript.
        source: The file it stands in, which may be that of a helper.
        function: The function it stands in.
        what: `load`, `store`, `dot`, `block pointer`, `comparison`, `subscript`, or what Triton calls the function.
        values: What its operands may be: of an access the address, of the rest all operands.
        loop: The innermost loop around it.
        constants: Parameters of the kernel that are known when it is compiled.
    """

    node: ast.Call | ast.Compare | ast.Subscript
    source: Source
    function: str
    what: str
    values: tuple[Alternatives, ...]
    loop: ast.For | ast.While | None
    constants: frozenset[str]


SHAPED_ALIKE = {"max_contiguous", "multiple_of", "advance", "debug_barrier"}
TAKEN_APART = {"reshape", "view", "join", "split", "interleave", "cat"}
REDUCING = {"sum", "max", "min", "argmax", "argmin", "reduce", "xor_sum"}


def argument(call: ast.Call, place: int, name: str) -> ast.expr | None:
    """An argument by its place or its name."""
    if len(call.args) > place:
        return call.args[place]
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def is_constexpr(annotation: ast.expr | None) -> bool:
    """Whether a parameter is known when the kernel is compiled."""
    return annotation is not None and any(
        getattr(node, "attr", getattr(node, "id", "")) == "constexpr" for node in ast.walk(annotation)
    )


def parameters(node: ast.FunctionDef) -> list[ast.arg]:
    """All parameters in their order."""
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def notes(kernel: ast.FunctionDef, source: Source, library: Library) -> list[Noted]:
    """What is to be known of a jit function and of the helpers that it calls."""
    constants = frozenset(each.arg for each in parameters(kernel) if is_constexpr(each.annotation))
    bindings: Bindings = {
        each.arg: (Value(tensor=None if each.arg in constants else each.arg, term=(each.arg,)),)
        for each in parameters(kernel)
    }
    walk = _Walk(library=library, constants=constants)
    _Frame(walk=walk, source=source, function=kernel, bindings=bindings).block(kernel.body)
    return walk.noted


@dataclass(kw_only=True)
class _Walk:
    """What all functions of one kernel share."""

    library: Library
    constants: frozenset[str]
    noted: list[Noted] = field(default_factory=list)
    loops: list[ast.For | ast.While] = field(default_factory=list)
    calls: list[ast.FunctionDef] = field(default_factory=list)


@dataclass(kw_only=True)
class _Frame:
    """One function with what its names are bound to."""

    walk: _Walk
    source: Source
    function: ast.FunctionDef
    bindings: Bindings
    returned: list[Value] = field(default_factory=list)

    def block(self, statements: Iterable[ast.stmt]) -> bool:
        """Goes through statements; True where nothing behind them runs."""
        return any(self.statement(statement) for statement in statements)

    def statement(self, node: ast.stmt) -> bool:
        match node:
            case ast.Assign(targets=targets, value=value):
                values = self.value(value)
                for target in targets:
                    self.bind(target, values)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.bind(target, self.value(value))
            case ast.AugAssign(target=target, op=op, value=value):
                if isinstance(target, ast.Name):
                    old = self.name(target.id)
                    self.bind(target, self.binary(op, old, self.value(value)))
            case ast.If():
                return self.branch(node)
            case ast.For(target=target, iter=iterated):
                self.value(iterated)
                self.bind(target, (SCALAR,))
                self.loop(node)
            case ast.While(test=test):
                self.value(test)
                self.loop(node)
            case ast.Return(value=value):
                self.returned += self.value(value) if value is not None else ()
                return True
            case ast.Expr(value=value):
                self.value(value)
            case ast.With(body=body):
                return self.block(body)
        return False

    def loop(self, node: ast.For | ast.While) -> None:
        before = dict(self.bindings)
        self.walk.loops.append(node)
        self.block(node.body)
        self.walk.loops.pop()
        self.bindings = _joined(before, self.bindings)
        self.block(node.orelse)

    def branch(self, node: ast.If) -> bool:
        known = self.truth(node.test)
        self.value(node.test)
        if known is not None:
            return self.block(node.body if known else node.orelse)
        before = dict(self.bindings)
        left = self.block(node.body)
        taken, self.bindings = self.bindings, before
        right = self.block(node.orelse)
        if left or right:
            self.bindings = self.bindings if left else taken
            return left and right
        self.bindings = _joined(taken, self.bindings)
        return False

    def truth(self, test: ast.expr) -> bool | None:
        """The outcome of a condition where it is known."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                known = self.truth(operand)
                return None if known is None else not known
            case ast.BoolOp(op=op, values=values):
                all_known = [self.truth(value) for value in values]
                decisive = isinstance(op, ast.Or)
                if decisive in all_known:
                    return decisive
                return None if None in all_known else not decisive
            case ast.Name() | ast.Constant():
                literals = {value.literal for value in self.value(test) if isinstance(value.literal, int | None)}
                unknown = any(value.literal is UNSET for value in self.value(test))
                outcomes = {bool(literal) for literal in literals}
                return outcomes.pop() if len(outcomes) == 1 and not unknown else None
        return None

    def bind(self, target: ast.expr, values: Alternatives) -> None:
        match target:
            case ast.Name(id=name):
                # A scalar that nothing is known of is known by its name.
                self.bindings[name] = tuple(
                    replace(each, term=(name,)) if each.axes == () and each.term == UNKNOWN else each for each in values
                )
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                tuples = [each.items for each in values if each.items is not None and len(each.items) == len(targets)]
                for place, each in enumerate(targets):
                    self.bind(each, unique([value for items in tuples for value in items[place]]) or (SCALAR,))

    def name(self, name: str) -> Alternatives:
        if name in self.bindings:
            return self.bindings[name]
        literal = self.source.constants.get(name, UNSET)
        return (Value(term=(name,), literal=literal),)

    def value(self, node: ast.expr) -> Alternatives:
        """What an expression may be."""
        match node:
            case ast.Name(id=name):
                return self.name(name)
            case ast.Constant(value=literal):
                if isinstance(literal, int) and not isinstance(literal, bool):
                    return (Value(term=() if literal == 1 else (str(literal),), literal=literal),)
                return (Value(literal=literal),)
            case ast.BinOp(left=left, op=op, right=right):
                return self.binary(op, self.value(left), self.value(right))
            case ast.Compare(left=left, comparators=others):
                operands = tuple(self.value(each) for each in (left, *others))
                self.note(node, "comparison", operands)
                found = unique([computed(a, b) for a, b in pairs(operands[0], operands[-1])])
                return tuple(replace(each, wide=False) for each in found)
            case ast.UnaryOp(operand=operand):
                return unique([computed(each, SCALAR) for each in self.value(operand)])
            case ast.BoolOp(values=values):
                for each in values:
                    self.value(each)
                return (SCALAR,)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                known = self.truth(test)
                self.value(test)
                if known is not None:
                    return self.value(body if known else orelse)
                return unique([*self.value(body), *self.value(orelse)])
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return (Value(items=tuple(self.value(each) for each in elements)),)
            case ast.Subscript():
                return self.subscript(node)
            case ast.Call():
                return self.call(node)
        return (SCALAR,)

    def binary(self, op: ast.operator, left: Alternatives, right: Alternatives) -> Alternatives:
        combine = plus if isinstance(op, ast.Add | ast.Sub) else multiplied if isinstance(op, ast.Mult) else computed
        return unique([combine(a, b) for a, b in pairs(left, right)])

    def subscript(self, node: ast.Subscript) -> Alternatives:
        values = self.value(node.value)
        self.note(node, "subscript", (values,))
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        found: list[Value] = []
        for value in values:
            place = index[0].value if isinstance(index[0], ast.Constant) else None
            if value.items is not None and isinstance(place, int) and -len(value.items) <= place < len(value.items):
                found += value.items[place]
            elif value.axes:
                found.append(_indexed(value, index))
            else:
                found.append(TILE if value.is_tile else SCALAR)
        return unique(found)

    def call(self, node: ast.Call) -> Alternatives:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        method = isinstance(node.func, ast.Attribute) and not _is_module(node.func.value)
        owner = [node.func.value] if isinstance(node.func, ast.Attribute) and method else []
        if not method and (helper := self.walk.library.helper(self.source, name)) is not None:
            return self.helper(node, *helper)
        operands = [self.value(each) for each in [*owner, *node.args]]
        named = {keyword.arg: self.value(keyword.value) for keyword in node.keywords if keyword.arg}
        first = operands[0] if operands else next(iter(named.values()), (SCALAR,))
        match name:
            case "arange":
                return (Value(axes=((),), extents=(self.text(node.args[-1]) if node.args else "",)),)
            case "make_block_ptr":
                return self.block_pointer(node, first)
            case "load" | "store":
                address = operands[0] if operands else named.get("pointer", (SCALAR,))
                self.note(node, name, (address,))
                return unique([elementwise(replace(each, tensor=None)) for each in address])
            case "to" | "cast":
                wanted = node.args[-1] if node.args else node.keywords[0].value if node.keywords else None
                wide = wanted is not None and getattr(wanted, "attr", "") in ("int64", "uint64")
                return tuple(replace(each, wide=wide) for each in first)
            case "expand_dims":
                axis = node.args[-1] if node.args else None
                place = axis.value if isinstance(axis, ast.Constant) else None
                return unique([_expanded(each, place) for each in first])
            case "zeros" | "full":
                shape = argument(node, 0, "shape")
                rank = len(shape.elts) if isinstance(shape, ast.Tuple | ast.List) else None
                return (Value(axes=None if rank is None else (UNKNOWN,) * rank),)
            case "dot":
                self.note(node, "dot", (first,))
                return (Value(axes=(UNKNOWN, UNKNOWN)),)
            case "where":
                return unique([computed(a, b) for a, b in pairs(first, operands[-1] if operands else (SCALAR,))])
        if name in TAKEN_APART:
            self.note(node, name, (first,))
            return (TILE,)
        if name in SHAPED_ALIKE:
            return first
        if name in REDUCING or name in ("trans", "permute", "broadcast_to"):
            return (TILE if name in ("trans", "permute", "broadcast_to") else SCALAR,)
        tiles = [each for values in operands for each in values if each.is_tile]
        return unique([elementwise(each) for each in tiles]) or (SCALAR,)

    def text(self, node: ast.expr) -> str:
        """A length as the kernel calls it, if it is a name of a helper's."""
        terms = {value.term for value in self.value(node)}
        term = terms.pop() if len(terms) == 1 else UNKNOWN
        return ast.unparse(node) if term == UNKNOWN else "*".join(term) or "1"

    def block_pointer(self, node: ast.Call, base: Alternatives) -> Alternatives:
        strides, shape = argument(node, 2, "strides"), argument(node, 4, "block_shape")
        axes: tuple[Alternatives, ...] = ()
        if strides is not None:
            for value in self.value(strides):
                axes = value.items or axes
        extents = tuple(map(self.text, shape.elts)) if isinstance(shape, ast.Tuple | ast.List) else ()
        found = [
            replace(value, axes=None if not axes else chosen, extents=extents, wide=False)
            for value in base
            for chosen in _choices(axes)
        ]
        values = unique(found)
        self.note(node, "block pointer", (values,))
        return values

    def helper(self, node: ast.Call, source: Source, function: ast.FunctionDef) -> Alternatives:
        """What a jit function returns for these arguments; what it does is noted on the way."""
        given = [self.value(each) for each in node.args]
        named = {keyword.arg: self.value(keyword.value) for keyword in node.keywords if keyword.arg}
        if function in self.walk.calls or len(self.walk.calls) >= DEPTH:
            return (SCALAR,)
        wanted = [each.arg for each in parameters(function)]
        bindings: Bindings = {name: (Value(term=(name,)),) for name in wanted}
        defaults = function.args.defaults
        positional = wanted[: len(wanted) - len(function.args.kwonlyargs)]
        for name, default in zip(positional[len(positional) - len(defaults) :], defaults):
            bindings[name] = self.value(default)
        bindings.update(zip(wanted, given))
        bindings.update({name: values for name, values in named.items() if name in bindings})
        frame = _Frame(walk=self.walk, source=source, function=function, bindings=bindings)
        self.walk.library.called.add(function)
        self.walk.calls.append(function)
        frame.block(function.body)
        self.walk.calls.pop()
        return unique(frame.returned) or (SCALAR,)

    def note(self, node: ast.Call | ast.Compare | ast.Subscript, what: str, values: tuple[Alternatives, ...]) -> None:
        loops = self.walk.loops
        self.walk.noted.append(
            Noted(
                node=node,
                source=self.source,
                function=self.function.name,
                what=what,
                values=values,
                loop=loops[-1] if loops else None,
                constants=self.walk.constants,
            )
        )


def _is_module(node: ast.expr) -> bool:
    """Whether something is called by the way of a module: tl.load, triton.language.load, tl.math.exp2."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in (
        "tl",
        "triton",
        "language",
        "libdevice",
        "math",
        "extra",
        "tldevice",
    )


def _joined(left: Mapping[str, Alternatives], right: Mapping[str, Alternatives]) -> Bindings:
    """What names may be where two ways meet."""
    found = {**left, **right}
    for name in left.keys() & right.keys():
        if left[name] is not right[name]:
            found[name] = unique([*left[name], *right[name]])
    return found


def _choices(axes: tuple[Alternatives, ...]) -> list[tuple[tuple[str, ...], ...]]:
    """Strides of a block pointer, one tuple for each combination of what they may be."""
    found: list[tuple[tuple[str, ...], ...]] = [()]
    for values in axes:
        found = [(*chosen, term) for chosen in found for term in dict.fromkeys(value.term for value in values)][:6]
    return found


def _indexed(value: Value, index: list[ast.expr]) -> Value:
    """A tile with axes put in by None; other indices leave a tile of unknown strides."""
    assert value.axes is not None
    axes: list[tuple[str, ...] | None] = []
    extents: list[str] = []
    left = list(zip(value.axes, value.extents or ("",) * len(value.axes)))
    for each in index:
        if isinstance(each, ast.Constant) and each.value is None:
            axes.append(None)
            extents.append("")
        elif isinstance(each, ast.Slice) and left:
            axis, extent = left.pop(0)
            axes.append(axis)
            extents.append(extent)
        else:
            return TILE
    return replace(value, axes=(*axes, *[axis for axis, _ in left]), extents=(*extents, *[text for _, text in left]))


def _expanded(value: Value, place: object) -> Value:
    if not value.axes or not isinstance(place, int) or not 0 <= place <= len(value.axes):
        return TILE if value.is_tile else SCALAR
    axes, extents = list(value.axes), list(value.extents or ("",) * len(value.axes))
    axes.insert(place, None)
    extents.insert(place, "")
    return replace(value, axes=tuple(axes), extents=tuple(extents))
