"""LT008: the left operand of `tl.dot` is used again, in a later statement or in the next turn of the loop."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from .findings import Finding
from .reporting import header, here
from .sources import Source

Spent = dict[str, tuple[ast.Call, ast.For | ast.While | None]]


def used_again(function: ast.FunctionDef, source: Source) -> Iterator[Finding]:
    """Findings of one jit function, at the products."""
    found: dict[ast.Call, Finding] = {}

    def use(name: ast.Name, spent: Spent) -> None:
        dot, loop = spent[name.id]
        found.setdefault(
            dot,
            here(
                dot,
                source,
                function.name,
                "LT008",
                f"{name.id} is the left operand of this tl.dot and is used again in line {name.lineno}: Ascend's"
                " compiler may have overwritten it",
                tensor=name.id,
                loop=header(loop),
            ),
        )

    def expressions(node: ast.AST, spent: Spent, loop: ast.For | ast.While | None) -> None:
        """Uses in one statement, then the products in it."""
        for name in _names(node):
            if name.id in spent:
                use(name, spent)
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and _is_dot(call) and call.args and isinstance(call.args[0], ast.Name):
                spent[call.args[0].id] = (call, loop)

    def block(statements: Iterable[ast.stmt], spent: Spent, loop: ast.For | ast.While | None) -> bool:
        """Goes through statements; True where nothing behind them runs."""
        for node in statements:
            match node:
                case ast.If(test=test, body=body, orelse=orelse):
                    expressions(test, spent, loop)
                    other = dict(spent)
                    left, right = block(body, spent, loop), block(orelse, other, loop)
                    if left and right:
                        return True
                    if left:
                        spent.clear()
                    if not right:
                        spent.update(other)
                case ast.For() | ast.While():
                    expressions(node.iter if isinstance(node, ast.For) else node.test, spent, loop)
                    for _ in range(2):
                        if isinstance(node, ast.For):
                            _forget(node.target, spent)
                        block(node.body, spent, node)
                    block(node.orelse, spent, loop)
                case ast.With(body=body):
                    block(body, spent, loop)
                case ast.FunctionDef() | ast.ClassDef():
                    pass
                case _:
                    expressions(node, spent, loop)
                    for target in ast.walk(node):
                        if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                            spent.pop(target.id, None)
                    if isinstance(node, ast.Return | ast.Break | ast.Continue):
                        return True
        return False

    block(function.body, {}, None)
    yield from found.values()


def _forget(target: ast.expr, spent: Spent) -> None:
    for name in ast.walk(target):
        if isinstance(name, ast.Name):
            spent.pop(name.id, None)


def _is_dot(call: ast.Call) -> bool:
    return getattr(call.func, "attr", getattr(call.func, "id", "")) == "dot"


def _names(node: ast.AST) -> Iterator[ast.Name]:
    """Names whose values are used; the type and the shape of a tile are known without it."""
    if isinstance(node, ast.Attribute) and node.attr in ("dtype", "shape", "type"):
        return
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        yield node.target
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _names(child)
