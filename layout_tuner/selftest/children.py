"""The self-test's processes as their parent sees them: what they say, and what their end says of what they did."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Pipe

from .. import processes
from ..errors import ConfigError
from .findings import Begun, Done, Finding, Machine, Message, Plan, Refused, Request, State

# Seconds a child may take to start, with torch, Triton and the device.
START_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A child that ended, or was ended, before it was done.

    Attributes:
        part: What it did then; empty where it had not begun.
        state: `dead`, `timeout`, `failed` where it ended by itself, or `left` where it was never begun.
        seen: How it ended.
        seconds: How long that part had taken.
    """

    part: str
    state: State
    seen: str
    seconds: float


class Child:
    """A process of the self-test, which waits for its request.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self) -> None:
        self.said = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        self.channel, its = Pipe()
        try:
            self.process = processes.start("selftest.child", (its.fileno(),), self.said.fileno())
        except BaseException:
            self.channel.close()
            self.said.close()
            raise
        finally:
            its.close()

    def close(self) -> None:
        """End it."""
        processes.end(self.process)
        self.channel.close()
        self.said.close()

    def messages(self, request: Request, part_s: float, deadline: float) -> Iterator[Message | Lost]:
        """Send the request, and give what comes back.

        Args:
            request: What to do.
            part_s: How long a part may take.
            deadline: When all of it has to be done, by `time.monotonic`.
        """
        part, begun = "", time.monotonic()
        limit_s = START_S
        try:
            self.channel.send(request)
            while True:
                left_s = min(begun + limit_s, deadline) - time.monotonic()
                if not self.channel.poll(max(0.0, left_s)):
                    seconds = time.monotonic() - begun
                    seen = f"no end after {seconds:.0f} s: its process was ended"
                    yield Lost(part=part, state="timeout", seen=seen, seconds=seconds)
                    return
                heard: Message = self.channel.recv()
                yield heard
                if isinstance(heard, Done):
                    return
                begun, limit_s = time.monotonic(), part_s
                part = heard.part if isinstance(heard, Begun) else ""
        except (EOFError, OSError):
            how, last = processes.ended(self.process), processes.last_line(self.said)
            seen = f"its process {how}" + (f": {last}" if last else "")
            state: State = "failed" if (self.process.returncode or 0) > 0 else "dead"
            yield Lost(part=part, state=state, seen=seen, seconds=time.monotonic() - begun)


class Children:
    """Starts children one ahead, so that the next one imports what it needs while one works.

    Args:
        deadline: When the self-test ends, by `time.monotonic`.
        part_s: How long a part of what a child does may take.
        heard: Is told every finding as it comes.
    """

    def __init__(self, deadline: float, part_s: float, heard: Callable[[Finding], None]) -> None:
        self.deadline = deadline
        self.part_s = part_s
        self.heard = heard
        self.spare: Child | None = None

    def close(self) -> None:
        """End the one that waits."""
        if self.spare is not None:
            self.spare.close()
            self.spare = None

    @property
    def left_s(self) -> float:
        """Seconds left of the self-test."""
        return self.deadline - time.monotonic()

    def work(self, request: Request, blame: Callable[[Lost], Finding], *, more: bool = True) -> Machine | None:
        """Let a child work, and another one on where a part ended it, until every part has its finding.

        Args:
            request: What to do.
            blame: The finding for a part that ended its process.
            more: Whether another request follows.

        Returns:
            What the child found out of the machine.

        Raises:
            ConfigError: What was asked for cannot be used.
        """
        machine: Machine | None = None
        planned: tuple[str, ...] = ()
        while True:
            lost: Lost | None = None
            found: list[Finding] = []
            child = self.take(more)
            with contextlib.closing(child):
                for message in child.messages(request, self.part_s, self.deadline):
                    if isinstance(message, Lost):
                        lost = message
                    elif isinstance(message, Machine):
                        machine = message
                    elif isinstance(message, Refused):
                        raise ConfigError(message.text)
                    elif isinstance(message, Plan):
                        planned = message.parts
                    elif isinstance(message, Finding):
                        found.append(message)
                        self.heard(message)
            if lost is None:
                return machine
            told = {finding.part or finding.name for finding in found}
            dead = next((finding for finding in reversed(found) if finding.state == "dead"), None)
            if dead is None:
                self.heard(blame(lost))
                told.add(lost.part)
            right = tuple(finding.part or finding.name for finding in found if finding.state == "right")
            request = replace(request, done=(*request.done, *told), right=(*request.right, *right))
            part = lost.part or (dead.part or dead.name if dead else "")
            left = [each for each in planned if each not in request.done]
            if part not in planned or not left:
                return machine
            if self.left_s <= 0:
                for each in left:
                    self.heard(blame(Lost(part=each, state="left", seen="no time was left", seconds=0.0)))
                return machine

    def take(self, more: bool) -> Child:
        """A child, and another one for later."""
        child, self.spare = self.spare or Child(), None
        if more:
            self.spare = Child()
        return child
