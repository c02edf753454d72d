"""What the self-test finds, and what its processes say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

State = Literal["fact", "right", "skipped", "doubt", "wrong", "failed", "dead", "timeout", "left"]
Kind = Literal["machine", "device", "compile", "op", "afterwards"]
# Doubts are to be known, and nothing that was tried went wrong.
GOOD: tuple[State, ...] = ("fact", "right", "skipped", "doubt")

REPORT = "report it with this text"
MORE_TIME = "give it more time (--budget, or --ops for some of them): what was compiled is kept"
# The part of an op that is torch's.
ORACLE = "oracle"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One row.

    Attributes:
        group: `machine`, `device` or `ops`.
        name: What was looked at: a fact, a question to the device, an op.
        part: An op's candidate, or `oracle`; empty for a row of its own.
        state: `fact`; `right`; `skipped` (does not apply here); `doubt`; `wrong` (another result than wanted);
            `failed` (raised); `dead` (its process ended, or lost the device); `timeout`; `left` (no time for it).
        seen: What was found.
        cure: What to do; empty where nothing is wrong.
        seconds: What it took.
    """

    group: str
    name: str
    part: str = ""
    state: State
    seen: str
    cure: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether nothing is to be done about it."""
        return self.state in GOOD


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a child is to do.

    Attributes:
        kind: Which part of the self-test.
        device: Where, by name; None lets the child pick.
        ops: Names of the ops to compile, or of the one to try.
        shape: Sizes and dtype, by name.
        done: Parts that are not to be tried, or not again.
        right: Of those, the ones that were right.
        seconds: How long it may take.
        free_bytes: Free memory of the device before anything ran on it.
    """

    kind: Kind
    device: str | None
    ops: tuple[str, ...] = ()
    shape: Mapping[str, int | str] = field(default_factory=dict)
    done: tuple[str, ...] = ()
    right: tuple[str, ...] = ()
    seconds: float = 0.0
    free_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Says what a child will look at, in order."""

    parts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Begun:
    """Says what a child does now."""

    part: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What later children need to know.

    Attributes:
        device: Name of the device that was picked.
        interpreted: Whether kernels run in Triton's interpreter.
        ops: Names of the ops to try.
        free_bytes: Free memory of the device.
    """

    device: str
    interpreted: bool
    ops: tuple[str, ...]
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Says that what was asked for cannot be used."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Done:
    """Says that a child has done all of its part."""


Message = Plan | Begun | Finding | Machine | Refused | Done


@dataclass(frozen=True, kw_only=True)
class Report:
    """The whole self-test.

    Attributes:
        findings: All rows.
        device: Name of the device; empty where none was found out.
        interpreted: Whether kernels ran in Triton's interpreter.
        seconds: What it took.
        started: When, ISO 8601, UTC.
        interrupted: Whether Ctrl-C ended it.
    """

    findings: tuple[Finding, ...]
    device: str
    interpreted: bool
    seconds: float
    started: str
    interrupted: bool = False

    @property
    def right(self) -> bool:
        """Whether all that was looked at is right, and everything was looked at."""
        return not self.interrupted and all(finding.good for finding in self.findings)

    @property
    def rows(self) -> list[Finding]:
        """One row for each thing that was looked at: an op has one, and one for each of its parts that is not right."""
        rows = []
        for name in dict.fromkeys((finding.group, finding.name) for finding in self.findings):
            found = [finding for finding in self.findings if (finding.group, finding.name) == name]
            rows += op_rows(found) if any(finding.part for finding in found) else found
        return rows

    @property
    def counts(self) -> dict[str, int]:
        """How many rows of each state there are, facts apart."""
        states = [row.state for row in self.rows if row.state != "fact" and not row.part]
        return {state: states.count(state) for state in dict.fromkeys(states)}


def op_rows(found: list[Finding]) -> list[Finding]:
    """An op's row, and those of its parts that are not right; the default is the first of its candidates."""
    op = found[0].name
    candidates = [each for each in found if each.part != ORACLE]
    right = [each for each in candidates if each.state == "right"]
    bad = [each for each in found if not each.good]
    seconds = sum(each.seconds for each in found)
    if not bad:
        plural = "" if len(candidates) == 1 else "s"
        seen = f"{len(candidates)} candidate{plural} in {seconds:.1f} s; {candidates[0].seen if candidates else ''}"
        return [Finding(group="ops", name=op, state="right", seen=seen, seconds=seconds)]
    cure = "calls are safe: what fails its check is never chosen"
    if bad[0].part == ORACLE:
        cure = "no kernel can be judged where torch's own operators fail"
    elif bad[0] is candidates[0] and right:
        cure = f'LAYOUT_TUNER_FORCE="{op}={right[0].part}" runs a candidate that is right'
    elif bad[0] is candidates[0]:
        cure = f"[routing] on_wrong says what calls of {op} do then"
    times = {each.state for each in bad} <= {"timeout", "left"}
    cure = f"{cure}; {MORE_TIME if times else REPORT}"
    seen = f"{len(right)} of {len(candidates)} candidates are right"
    return [Finding(group="ops", name=op, state=bad[0].state, seen=seen, cure=cure, seconds=seconds), *bad]
