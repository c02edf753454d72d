"""Who tunes which key: a plan that follows from what all ranks want and know, and what became of it so far.

The state follows from the plan and the entries of a log alone, so every rank that read as many entries has the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .exchange import Said

ATTEMPTS = 2
"""Ranks that try a key which fails: one rank's failure may be that rank's own, and two are the key's."""


def plan_of(heard: Mapping[int, Said]) -> Said:
    """The plan: for each environment its ranks and the keys that are open there, longest first.

    A key that all of an environment's ranks decide alike is not in it. One on which they differ, or that some do not
    know, has a `teller`: the rank with the strongest evidence. The others are to be tuned.

    Args:
        heard: What each rank said: the `error` that keeps it from taking part, or its `environment`, its `file`, and
            its `keys`, each with `key`, `cost`, and `decision` (its `candidate`, `revision` and `strength`, or None).
    """
    environments: dict[str, Said] = {}
    excused = {rank: said["error"] for rank, said in heard.items() if "error" in said}
    heard = {rank: said for rank, said in heard.items() if rank not in excused}
    for name in dict.fromkeys(said["environment"] for said in heard.values()):
        ranks = sorted(rank for rank in heard if heard[rank]["environment"] == name)
        held: dict[str, dict[int, Said]] = {}
        for rank in ranks:
            for each in heard[rank]["keys"]:
                held.setdefault(text_of(each["key"]), {})[rank] = each
        opened = [each for holders in held.values() if (each := opened_key(holders, ranks)) is not None]
        opened.sort(key=lambda each: (each["teller"] is None, -each["cost"], text_of(each["key"])))
        environments[name] = {"ranks": ranks, "keys": opened, "files": {rank: heard[rank]["file"] for rank in ranks}}
    return {"environments": environments, "excused": excused}


def opened_key(holders: Mapping[int, Said], ranks: Sequence[int]) -> Said | None:
    """A key as the plan has it; None where every rank decides it alike."""
    first = next(iter(holders.values()))
    deciding = {rank: each["decision"] for rank, each in holders.items() if each["decision"] is not None}
    if len(deciding) == len(ranks) and len({(each["candidate"], each["revision"]) for each in deciding.values()}) == 1:
        return None
    teller = max(deciding, key=lambda rank: (deciding[rank]["strength"], -rank)) if deciding else None
    return {"key": first["key"], "cost": max(each["cost"] for each in holders.values()), "teller": teller}


def text_of(key: Mapping[str, Any]) -> str:
    """A key in one text."""
    return "|".join(f"{name}={value}" for name, value in sorted(key.items()))


@dataclass
class Place:
    """A key of the plan and what became of it.

    Attributes:
        key: The key, in plain values.
        teller: The rank that has its decision; None: it is to be tuned.
        state: Nobody has it, a rank has it, or how it ended.
        rank: The rank that has it, or that ended it.
        tried: Ranks that it failed in.
        reason: Why there is no decision.
        decision: The decision, as JSON.
        seconds: How long it took.
    """

    key: Mapping[str, Any]
    teller: int | None
    state: Literal["open", "taken", "stored", "tuned", "failed", "left"] = "open"
    rank: int | None = None
    tried: list[int] = field(default_factory=list)
    reason: str = ""
    decision: str = ""
    seconds: float = 0.0

    @property
    def settled(self) -> bool:
        return self.state not in ("open", "taken")


class Table:
    """The keys of one environment's plan.

    Args:
        plan: The environment's part of the plan.

    Attributes:
        places: The keys.
        active: Ranks that take keys.
        gone: Why ranks take no more: they ended, or fell silent.
    """

    def __init__(self, plan: Said) -> None:
        self.places = [Place(key=each["key"], teller=each["teller"]) for each in plan["keys"]]
        self.active: set[int] = set(plan["ranks"])
        self.gone: dict[int, str] = {}
        self.resting: set[int] = set()

    @property
    def over(self) -> bool:
        """Whether nothing more will become of any key."""
        return all(place.settled for place in self.places)

    def next_for(self, rank: int, telling: bool = False) -> int | None:
        """The key that a rank is to take: one that it has to tell, else the longest that nobody has.

        Args:
            rank: The rank.
            telling: Whether it only tells.
        """
        for number, place in enumerate(self.places):
            if place.state != "open":
                continue
            if place.teller == rank:
                return number
            if not telling and place.teller is None and rank not in place.tried:
                return number
        return None

    def follow(self, entry: Said) -> None:
        """What an entry of the log changes."""
        rank: int = entry["rank"]
        what = entry["what"]
        if what == "joined":
            self.active.add(rank)
        elif what == "rests":
            self.resting.add(rank)
            if self.active <= self.resting and not any(place.state == "taken" for place in self.places):
                self._leave(entry["reason"])
        elif what == "quit":
            self._part(rank, entry["reason"])
        elif what == "silent":
            # A key that a rank may have died of is not tried by another.
            self.active -= {*entry["ranks"]}
            self.gone |= dict.fromkeys(entry["ranks"], entry["reason"])
            self._leave(entry["reason"])
        else:
            self._about(self.places[entry["number"]], entry)
            if self.active <= self.resting and not any(place.state == "taken" for place in self.places):
                self._leave("the budget was spent")

    def _about(self, place: Place, entry: Said) -> None:
        rank: int = entry["rank"]
        if place.settled:
            return
        if entry["what"] == "takes":
            place.state, place.rank = "taken", rank
        elif entry["what"] == "done":
            place.state, place.rank, place.seconds = entry["state"], rank, entry["seconds"]
            place.decision = entry["decision"]
        else:
            self._failed(place, rank, entry["reason"], final=entry["final"])

    def _failed(self, place: Place, rank: int, reason: str, *, final: bool = False) -> None:
        place.tried.append(rank)
        told = f"rank {rank}: {reason}"
        place.reason = f"{place.reason}; {told}" if place.reason else told
        place.rank, place.teller, place.state = rank, None, "open"
        if final or len(place.tried) >= ATTEMPTS or self.active <= {*place.tried}:
            place.state = "failed"

    def _part(self, rank: int, reason: str) -> None:
        """A rank takes no more keys; what it had goes to others."""
        self.active.discard(rank)
        self.gone[rank] = f"rank {rank}: {reason}"
        for place in self.places:
            if place.teller == rank and place.state == "open":
                place.teller = None
            if place.state == "taken" and place.rank == rank:
                self._failed(place, rank, reason)
            elif place.state == "open" and self.active <= {*place.tried}:
                place.state, place.reason = "left", place.reason or f"rank {rank}: {reason}"

    def _leave(self, reason: str) -> None:
        for place in self.places:
            if not place.settled:
                place.state, place.reason = "left", place.reason or reason
