"""Rules on the code that launches: LT003 strides, LT009 options, LT010 grids, LT011 gates, LT012 waiting."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .findings import Finding
from .reporting import here
from .sources import Source

OPTIONS = ("num_warps", "num_stages")
GATE = re.compile(r"d?(g|gk|gv|gate|gates|beta|g_?cumsum|decay|log_decay)\Z")
TRANSPOSING = ("transpose", "permute", "swapaxes", "movedim", "t", "mT", "T")
WAITING = ("item", "tolist", "cpu", "numpy", "synchronize")
# Methods after which a gate is still that gate.
SAME = (*TRANSPOSING, "to", "float", "view", "reshape", "squeeze", "unsqueeze", "detach")


def check(source: Source) -> Iterator[Finding]:
    """Findings of all host code of a file."""
    for name, nodes in source.scopes:
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        grids = _grids(nodes)
        launches = [call for call in calls if _is_launch(call, source, grids)]
        yield from _options(calls, launches, source, name)
        yield from _grid_findings(launches, grids, source, name)
        yield from _contiguous(calls, source, name)
        if launches:
            yield from _waiting(calls, source, name)
            yield from _mixed_strides(nodes, launches, source, name)


def _grids(nodes: list[ast.Call | ast.Assign]) -> dict[str, ast.expr]:
    """Tuples, and lambdas that return them, by the names they are bound to."""
    found: dict[str, ast.expr] = {}
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=(ast.Tuple() | ast.Lambda()) as value):
                found[name] = value
    return found


def _is_launch(call: ast.Call, source: Source, grids: dict[str, ast.expr]) -> bool:
    """Whether a call starts a kernel: `kernel[grid](...)`."""
    if not isinstance(call.func, ast.Subscript):
        return False
    index, owner = call.func.slice, call.func.value
    name = getattr(owner, "id", getattr(owner, "attr", ""))
    known = name in source.functions or "kernel" in name or name == "fn"
    grid = isinstance(index, ast.Tuple | ast.Lambda) or (isinstance(index, ast.Name) and index.id in grids)
    return bool(name) and (known or grid)


def _options(calls: list[ast.Call], launches: list[ast.Call], source: Source, function: str) -> Iterator[Finding]:
    for call in calls:
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if call in launches or name in ("Config", "dict"):
            given = [keyword.arg for keyword in call.keywords if keyword.arg in OPTIONS]
            if given:
                yield here(
                    call, source, function, "LT009", f"{' and '.join(map(str, given))}: an Ascend NPU has no such thing"
                )


def _grid_findings(
    launches: list[ast.Call], grids: dict[str, ast.expr], source: Source, function: str
) -> Iterator[Finding]:
    for call in launches:
        assert isinstance(call.func, ast.Subscript)
        grid: ast.expr = call.func.slice
        if isinstance(grid, ast.Name):
            grid = grids.get(grid.id, grid)
        if isinstance(grid, ast.Lambda):
            grid = grid.body
        if not isinstance(grid, ast.Tuple):
            continue
        axes = [axis for axis in grid.elts if not (isinstance(axis, ast.Constant) and axis.value == 1)]
        if len(axes) > 1 and not all(isinstance(axis, ast.Constant) for axis in axes):
            yield here(
                call,
                source,
                function,
                "LT010",
                f"a grid of {len(axes)} dimensions, {ast.unparse(grid)}: programs beyond the number of cores start in"
                " further rounds",
            )


def _gate(node: ast.expr) -> str | None:
    """The gate that an expression is, maybe transposed or cast."""
    while True:
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in SAME:
                node = value
            case ast.Attribute(value=value, attr="T" | "mT"):
                node = value
            case ast.Name(id=name):
                return name if GATE.match(name) else None
            case _:
                return None


def _contiguous(calls: list[ast.Call], source: Source, function: str) -> Iterator[Finding]:
    for call in calls:
        match call.func:
            case ast.Attribute(value=value, attr="contiguous") if (gate := _gate(value)) is not None:
                yield here(
                    call,
                    source,
                    function,
                    "LT011",
                    f"{ast.unparse(call)} copies a gate into one layout, whichever the kernel would rather read",
                    tensor=gate,
                )


def _waiting(calls: list[ast.Call], source: Source, function: str) -> Iterator[Finding]:
    for call in calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr in WAITING and not call.args:
            yield here(call, source, function, "LT012", f"{ast.unparse(call)} waits for the device between launches")


def _mixed_strides(
    nodes: list[ast.Call | ast.Assign], launches: list[ast.Call], source: Source, function: str
) -> Iterator[Finding]:
    """LT003: of two tensors that are transposed to one another a launch has the one, and strides of the other.

    A name that is bound again stands for another tensor, so that strides taken before are of the old one.
    """
    version: dict[str, int] = {}
    origin: dict[tuple[str, int], tuple[str, int]] = {}  # a transposed tensor: what it was made of
    strides: dict[str, tuple[str, int]] = {}  # names of strides: whose they are

    def current(name: str) -> tuple[str, int]:
        return name, version.get(name, 0)

    def owner(node: ast.expr) -> tuple[str, int] | None:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="stride")):
                return current(name)
            case ast.Subscript(value=value):
                return owner(value)
            case ast.Name(id=name):
                return strides.get(name)
        return None

    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            names = [each.id for each in ast.walk(target) if isinstance(each, ast.Name)]
            of, made_of = owner(node.value), _transposed(node.value)
            before = None if made_of is None else current(made_of)
            for name in names:
                version[name] = version.get(name, 0) + 1
                strides.pop(name, None)
                if of is not None:
                    strides[name] = of
                if before is not None:
                    origin[current(name)] = before
        elif isinstance(node, ast.Call) and node in launches:
            given = [*node.args, *[keyword.value for keyword in node.keywords]]
            tensors = {current(each.id) for each in given if isinstance(each, ast.Name)}
            for each in given:
                of = owner(each)
                if of is None or of in tensors:
                    continue
                mixed = next((tensor for tensor in sorted(tensors) if origin.get(tensor) == of), None)
                if mixed is not None:
                    yield here(
                        each,
                        source,
                        function,
                        "LT003",
                        f"{ast.unparse(each)} is a stride of {of[0]} as it was before {mixed[0]} was transposed from"
                        f" it, and the kernel is given {mixed[0]}",
                        tensor=mixed[0],
                    )


def _transposed(node: ast.expr) -> str | None:
    """The tensor that an expression transposes."""
    turned = False
    while True:
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr=attr)):
                turned = turned or attr in TRANSPOSING
                node = value
            case ast.Attribute(value=value, attr="T" | "mT"):
                turned = True
                node = value
            case ast.Name(id=name):
                return name if turned else None
            case _:
                return None
