"""Workspaces: allocations that several memories of a record share.

What is returned, and what torch itself works on, has to be a tensor. Of any other memory only the address is used, so
it may lie anywhere in a workspace, at an offset where nothing else lies that is in use at the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .record import Memory


@dataclass(frozen=True, eq=False)
class Workspace:
    """One allocation that memories share.

    Attributes:
        bytes: Its size.
        first: The step before which it is allocated.
        last: The step after which it is freed.
        offsets: Where each memory begins in it, in bytes.
    """

    bytes: int
    first: int
    last: int
    offsets: dict[Memory, int]

    @classmethod
    def of(cls, memories: Iterable[Memory]) -> Workspace:
        """The workspace of these memories, each at the lowest offset where no other lies that is in use with it."""
        offsets: dict[Memory, int] = {}
        for memory in sorted(memories, key=lambda memory: (-memory.bytes, memory.first)):
            beside = [other for other in offsets if other.first <= memory.last and memory.first <= other.last]
            ends = [0, *[offsets[other] + other.bytes for other in beside]]
            offsets[memory] = min(
                start
                for start in ends
                if all(
                    start + memory.bytes <= offsets[other] or offsets[other] + other.bytes <= start for other in beside
                )
            )
        return cls(
            bytes=max(offset + memory.bytes for memory, offset in offsets.items()),
            first=min(memory.first for memory in offsets),
            last=max(memory.last for memory in offsets),
            offsets=offsets,
        )


def workspaces(addressed: Sequence[Memory], owned: Sequence[Memory], steps: int) -> list[Workspace]:
    """Workspaces for memories of which only addresses are used; few, because each allocation costs time.

    Two workspaces become one wherever that does not raise the peak: the most bytes that the list holds at any moment.

    Args:
        addressed: These memories.
        owned: The other memories that the list allocates, each as a tensor of its own.
        steps: Number of steps.
    """

    def peak(spaces: Sequence[Workspace]) -> int:
        held: list[Workspace | Memory] = [*spaces, *owned]
        return max(sum(x.bytes for x in held if x.first <= step <= x.last) for step in range(steps + 1))

    # Memories that are freed at the same step merge best, so they stand side by side.
    spaces = [Workspace.of([memory]) for memory in sorted(addressed, key=lambda memory: -memory.last)]
    allowed = peak(spaces)
    merging = True
    while merging:
        merging = False
        for one, other in itertools.combinations(spaces, 2):
            rest = [space for space in spaces if space not in (one, other)]
            merged = [*rest, Workspace.of([*one.offsets, *other.offsets])]
            if peak(merged) <= allowed:
                spaces, merging = merged, True
                break
    return spaces
