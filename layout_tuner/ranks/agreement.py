"""Whether ranks run the same candidates: what they hold is compared key by key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .exchange import Said


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A key for which ranks of one environment run different candidates.

    Attributes:
        environment: The environment.
        key: The key.
        candidates: For each candidate with its revision, the ranks that run it and the files they read.
    """

    environment: str
    key: str
    candidates: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]]

    def __str__(self) -> str:
        parts = [
            f"{candidate} on {of_ranks(ranks)} ({', '.join(files)})"
            for candidate, (ranks, files) in self.candidates.items()
        ]
        return f"{self.key} in {self.environment}: {'; '.join(parts)}"


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What comparing the ranks found.

    Attributes:
        ranks: The ranks that were compared.
        absent: The ranks that said nothing in time.
        environments: The ranks of each environment; those of different ones are not compared.
        keys: Number of keys that at least two ranks of one environment hold.
        differences: Keys for which ranks run different candidates.
    """

    ranks: tuple[int, ...]
    absent: tuple[int, ...]
    environments: Mapping[str, tuple[int, ...]]
    keys: int
    differences: tuple[Difference, ...]

    @property
    def agreed(self) -> bool:
        """Whether every rank was there and no two differ."""
        return not self.absent and not self.differences

    def __str__(self) -> str:
        parts = [str(each) for each in self.differences]
        if self.absent:
            parts.append(f"{of_ranks(self.absent)} said nothing in time")
        return "; ".join(parts) or f"{of_ranks(self.ranks)} agree on {self.keys} keys"


def compared(heard: Mapping[int, Said]) -> Said:
    """What differs among ranks; each said its `file` and its `choices`: environment, key, candidate.

    A key that only some ranks hold, as with pipeline parallelism, is no difference.
    """
    held: dict[tuple[str, str], dict[str, list[int]]] = {}
    environments: dict[str, list[int]] = {}
    for rank, said in sorted(heard.items()):
        environments.setdefault(said["environment"], []).append(rank)
        for environment, key, candidate in said["choices"]:
            held.setdefault((environment, key), {}).setdefault(candidate, []).append(rank)
    differences = [
        {
            "environment": environment,
            "key": key,
            "candidates": {
                candidate: [ranks, sorted({heard[rank]["file"] for rank in ranks})]
                for candidate, ranks in by_candidate.items()
            },
        }
        for (environment, key), by_candidate in held.items()
        if len(by_candidate) > 1
    ]
    keys = sum(sum(map(len, by_candidate.values())) > 1 for by_candidate in held.values())
    return {"differences": differences, "environments": environments, "keys": keys}


def agreement_of(verdict: Said, present: tuple[int, ...], absent: tuple[int, ...]) -> Agreement:
    """The verdict of a meeting, as it is given to the caller."""
    return Agreement(
        ranks=present,
        absent=absent,
        environments={name: tuple(ranks) for name, ranks in verdict["environments"].items()},
        keys=verdict["keys"],
        differences=tuple(
            Difference(
                environment=each["environment"],
                key=each["key"],
                candidates={
                    candidate: (tuple(ranks), tuple(files)) for candidate, (ranks, files) in each["candidates"].items()
                },
            )
            for each in verdict["differences"]
        ),
    )


def of_ranks(ranks: tuple[int, ...]) -> str:
    """Ranks by number, long lists shortened."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
