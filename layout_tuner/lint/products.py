"""LT008: the left operand of `tl.dot` is used again, in a later statement or in the next turn of the loop."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from .findings import Finding
from .reporting import header, here
from .sources import Source, children

# Names whose values are used, left operands with their products, names that are bound.
Parts = tuple[list[ast.Name], list[tuple[str, ast.Call]], list[str]]
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
                f"{name.id} is the left operand of this tl.dot and is used again in"
                f" {_where(name, dot)}: Ascend's compiler may have overwritten it",
                tensor=name.id,
                loop=header(loop),
            ),
        )

    parts: dict[ast.AST, Parts] = {}

    def expressions(node: ast.AST, spent: Spent, loop: ast.For | ast.While | None) -> None:
        """Uses in one statement, then the products in it, then what it binds."""
        if node not in parts:
            parts[node] = _parts(node)
        used, dots, bound = parts[node]
        for name in used:
            if name.id in spent:
                use(name, spent)
        for left, call in dots:
            spent[left] = (call, loop)
        for each in bound:
            spent.pop(each, None)

    def block(statements: Iterable[ast.stmt], spent: Spent, loop: ast.For | ast.While | None) -> bool:
        """Goes through statements; True where nothing behind them runs."""
        for node in statements:
            match node:
                case ast.If(test=test, body=body, orelse=orelse):
                    expressions(test, spent, loop)
                    other = dict(spent)
                    ended, other_ended = block(body, spent, loop), block(orelse, other, loop)
                    if ended and other_ended:
                        return True
                    if ended:
                        spent.clear()
                    if not other_ended:
                        spent.update(other)
                case ast.For() | ast.While():
                    expressions(node.iter if isinstance(node, ast.For) else node.test, spent, loop)
                    for _ in range(2):
                        if isinstance(node, ast.For):
                            expressions(node.target, spent, node)
                        block(node.body, spent, node)
                    block(node.orelse, spent, loop)
                case ast.With(body=body):
                    block(body, spent, loop)
                case ast.FunctionDef() | ast.ClassDef():
                    pass
                case _:
                    expressions(node, spent, loop)
                    if isinstance(node, ast.Return | ast.Break | ast.Continue):
                        return True
        return False

    block(function.body, {}, None)
    yield from found.values()


def _where(name: ast.Name, dot: ast.Call) -> str:
    again = dot.lineno <= name.lineno <= (dot.end_lineno or 0) or name.lineno < dot.lineno
    return f"line {name.lineno}, in the next turn of a loop" if again else f"line {name.lineno}"


def _parts(node: ast.AST) -> Parts:
    """What a statement uses, multiplies and binds."""
    used: list[ast.Name] = []
    dots: list[tuple[str, ast.Call]] = []
    bound: list[str] = []
    left: list[ast.AST] = [node]
    while left:
        each = left.pop()
        if isinstance(each, ast.Name):
            if isinstance(each.ctx, ast.Load):
                used.append(each)
            else:
                bound.append(each.id)
            continue
        if isinstance(each, ast.Attribute) and each.attr in ("dtype", "shape", "type"):
            continue  # known without the values of the tile
        if isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name):
            used.append(each.target)
        elif isinstance(each, ast.Call) and getattr(each.func, "attr", getattr(each.func, "id", "")) == "dot":
            dots += [(left_operand.id, each) for left_operand in each.args[:1] if isinstance(left_operand, ast.Name)]
        left += children(each)
    return used, dots, bound
