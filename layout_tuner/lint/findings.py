"""What the linter says: its rules by id, and one finding of one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A thing to look for; `docs/lint.md` has a section for each.

    Attributes:
        id: What a finding, and the comment that suppresses it, calls the rule.
        title: What is wrong, in a few words.
    """

    id: str
    title: str


RULES: Final = {
    rule.id: rule
    for rule in (
        Rule(id="LT001", title="load or store along time whose stride is the number of heads"),
        Rule(id="LT002", title="block pointer whose innermost dimension is not contiguous"),
        Rule(id="LT003", title="stride of one tensor beside the transposed other one"),
        Rule(id="LT004", title="tile indexed by an integer, a slice or a tensor"),
        Rule(id="LT005", title="tile taken apart or put together"),
        Rule(id="LT006", title="int64 comparison of a tile"),
        Rule(id="LT007", title="masked load of a tile without other"),
        Rule(id="LT008", title="left operand of tl.dot used again"),
        Rule(id="LT009", title="num_warps or num_stages"),
        Rule(id="LT010", title="launch over a grid of several dimensions"),
        Rule(id="LT011", title=".contiguous() on a gate"),
        Rule(id="LT012", title="host waits for the device in a launcher"),
    )
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One place that a rule is about.

    Attributes:
        rule: Id of the rule.
        path: The file.
        line: First line of the expression, from 1.
        end_line: Its last line.
        column: Its first column, from 1.
        function: The function it stands in.
        message: What is wrong there and what it costs.
        tensor: The tensor it is about, where there is one.
        loop: Header of the innermost loop around it, in the function or in what calls it.
    """

    rule: str
    path: str
    line: int
    end_line: int
    column: int
    function: str
    message: str
    tensor: str | None = None
    loop: str | None = None
