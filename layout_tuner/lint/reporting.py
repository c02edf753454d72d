"""Makes findings of what was noted in kernels and of nodes of host code."""

from __future__ import annotations

import ast

from .findings import Finding
from .kernels import Noted
from .sources import Source


def at(noted: Noted, rule: str, message: str, *, tensor: str | None = None) -> Finding:
    """A finding in a kernel."""
    return here(noted.node, noted.source, noted.function, rule, message, tensor=tensor, loop=header(noted.loop))


def here(
    node: ast.expr,
    source: Source,
    function: str,
    rule: str,
    message: str,
    *,
    tensor: str | None = None,
    loop: str | None = None,
) -> Finding:
    """A finding at an expression."""
    return Finding(
        rule=rule,
        path=str(source.path),
        line=node.lineno,
        end_line=node.end_lineno or node.lineno,
        column=node.col_offset + 1,
        function=function,
        message=message,
        tensor=tensor,
        loop=loop,
    )


def header(loop: ast.For | ast.While | None) -> str | None:
    """The first line of a loop, with the number of its line."""
    if loop is None:
        return None
    if isinstance(loop, ast.While):
        return f"line {loop.lineno}: while {ast.unparse(loop.test)}"
    return f"line {loop.lineno}: for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}"
