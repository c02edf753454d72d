"""Tunes what ranks want together: deals the keys, gathers what was found, and has every rank follow it.

Between two of its own keys a rank reads what others found, and writes it down where it is the one that does so for its
cache file. No lock is held meanwhile, and every wait has an end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from layout_tuner.cache.evidence import strength
from layout_tuner.cache.hosts import this_host
from layout_tuner.cache.records import DecisionRecord, EnvironmentRecord, time_text
from layout_tuner.cache.validation import DECISION, check_decision

from ..device.environment import environment
from ..dispatch.router import Router, entries, push, remove
from ..errors import DeviceLostError, LayoutTunerError
from ..spec.declaration import OpSpec
from ..spec.keys import Key
from ..tuning.memory import counts
from ..tuning.records import key_of, key_record
from .agreement import Agreement, agreement_of, compared, of_ranks
from .dealing import Place, Table, plan_of
from .exchange import Log, Meeting, Ranks, Said, StoreLostError, first_line

log = logging.getLogger(__name__)

SLACK_S = 10.0
"""How long after the end of a budget a rank may still be heard of."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What ranks did together.

    Attributes:
        places: Each key of this rank's environment that was open, and what became of it.
        notes: What is to be said of ranks: absent, silent, of another environment.
        agreement: Whether all hold the same afterwards; None where the store of the group was lost.
    """

    places: tuple[Place, ...]
    notes: tuple[str, ...]
    agreement: Agreement | None


class Together:
    """One rank's part in tuning keys together.

    Args:
        ranks: The ranks.
        made: Tunes, and holds what this rank knows.
        device: This rank's device.
        op_of: The op of a key, which another rank may have asked for.
        budget_s: Seconds for all of it.
        progress: Called with the number of settled keys, their total, and the key that comes next.
    """

    def __init__(
        self,
        ranks: Ranks,
        made: Router,
        device: torch.device,
        *,
        op_of: Callable[[Key], OpSpec],
        budget_s: float | None = None,
        progress: Callable[[int, int, Key], None] | None = None,
    ) -> None:
        self.ranks = ranks
        self.made = made
        self.device = device
        self.where = environment(device)
        self.op_of = op_of
        self.budget_s = budget_s
        self.progress = progress
        self.file = f"{this_host()}:{made.store.name}"
        self.end = None if budget_s is None else time.monotonic() + budget_s
        self.table = Table({"keys": [], "ranks": []})
        self.published: set[int] = set()
        self.writers: dict[int, str] = {}
        self.writes = False  # whether this rank is the one that writes its cache file

    def run(
        self, kind: str, wanted: Sequence[tuple[OpSpec, Key]], held: Callable[[OpSpec, Key], DecisionRecord | None]
    ) -> Outcome:
        """Tune the keys that no rank has a decision for, and follow the decisions of all.

        Args:
            kind: What the ranks meet for.
            wanted: This rank's keys.
            held: This rank's decision for a key.
        """
        notes: list[str] = []
        agreement = None
        try:
            # Half of the budget at most is spent on waiting for ranks that are late.
            meeting = self.ranks.meet(
                kind,
                {
                    "environment": self.where.id,
                    "file": self.file,
                    "keys": [self.said_of(spec, key, held(spec, key)) for spec, key in wanted],
                },
                plan_of,
                patience_s=None if self.budget_s is None else self.budget_s / 2,
            )
            notes += self.notes_of(meeting)
            plan = meeting.verdict["environments"].get(self.where.id)
            if plan is None:
                notes.append(f"rank {self.ranks.rank} came when the others had begun: its environment is left untuned")
            else:
                self.table = Table(plan)
                self.writers = {int(rank): file for rank, file in plan["files"].items()}
                self.work(Log(meeting.store, self.where.id), held)
                notes += dict.fromkeys(self.table.gone.values())
            gone = {*self.table.gone, *map(int, meeting.verdict["excused"])}
            self.follow()
            agreement = self.check(f"{kind} end", [rank for rank in meeting.present if rank not in gone])
            self.publish([rank for rank in agreement.ranks if self.writer_of(rank) == self.file])
            if not agreement.agreed:
                log.warning("%s", agreement)
        except StoreLostError as error:
            notes.append(str(error))
            self.table._leave(str(error))
            self.publish([self.ranks.rank])
            self.follow()
        for note in notes:
            log.warning("%s", note)
        return Outcome(places=tuple(self.table.places), notes=tuple(notes), agreement=agreement)

    def writer_of(self, rank: int) -> str:
        """The cache file of a rank."""
        return self.file if rank == self.ranks.rank else self.writers.get(rank, "")

    def said_of(self, spec: OpSpec, key: Key, decision: DecisionRecord | None) -> Said:
        """A key as it is told to the others."""
        known = None
        if decision is not None and decision.source != "predicted":
            rank, certain, samples, moment, content = strength(decision)
            known = {
                "candidate": decision.candidate,
                "revision": decision.revision,
                "strength": [rank, certain, samples, time_text(moment), content],
            }
        return {"key": key.plain(), "cost": sum(counts(spec, key)), "decision": known}

    def notes_of(self, meeting: Meeting) -> list[str]:
        """What is to be said of ranks that are absent, or of another environment."""
        notes = []
        if meeting.absent:
            late = self.ranks.rank in meeting.absent
            notes.append(f"{of_ranks(meeting.absent)} did not come in time" + (", this one among them" if late else ""))
        notes += [f"rank {rank}: {text.splitlines()[0]}" for rank, text in meeting.verdict["excused"].items()]
        for name, plan in meeting.verdict["environments"].items():
            if name != self.where.id:
                notes.append(f"{of_ranks(tuple(plan['ranks']))}: a group of their own, with environment {name}")
        return notes

    # -- tuning ------------------------------------------------------------------------------------------------

    def work(self, said: Log, held: Callable[[OpSpec, Key], DecisionRecord | None]) -> None:
        """Take keys as long as there are any, and read what becomes of the others'."""
        me = self.ranks.rank
        if me not in self.table.active:
            self.say(said, {"what": "joined", "rank": me})
        try:
            while True:
                self.read(said)
                if self.table.over:
                    return
                left_s = None if self.end is None else self.end - time.monotonic()
                spent = left_s is not None and left_s <= 0
                if spent and me not in self.table.resting:
                    reason = f"the budget of {self.budget_s:g} s was spent"
                    said.append({"what": "rests", "rank": me, "reason": reason})
                    continue
                number = self.table.next_for(me, telling=spent)
                if number is None:
                    self.await_others(said, left_s)
                elif self.table.places[number].teller == me:
                    self.tell(said, number, held)
                elif said.append({"what": "takes", "rank": me, "number": number}):
                    self.read(said)
                    self.tune(said, number, left_s)
        except StoreLostError:
            raise
        except BaseException as error:
            # Whatever ends this rank's part, the others need not wait for it.
            reason = "it was interrupted" if isinstance(error, KeyboardInterrupt) else first_line(error)
            self.say(said, {"what": "quit", "rank": me, "reason": reason})
            raise

    def await_others(self, said: Log, left_s: float | None) -> None:
        """Wait for what others find; where nothing is heard for too long, give them up for all."""
        patience_s = self.ranks.timeout_s
        if left_s is not None:
            patience_s = min(patience_s, max(left_s, 0.0) + SLACK_S)
        if said.wait(patience_s):
            return
        silent = sorted(
            {place.rank for place in self.table.places if place.state == "taken" and place.rank is not None}
            | {place.teller for place in self.table.places if place.state == "open" and place.teller is not None}
        )
        about = of_ranks(tuple(silent)) if silent else "no rank"
        reason = f"{about} said nothing for {patience_s:g} s" if silent else "no rank took it in time"
        said.append({"what": "silent", "rank": self.ranks.rank, "ranks": silent, "reason": reason})

    def tell(self, said: Log, number: int, held: Callable[[OpSpec, Key], DecisionRecord | None]) -> None:
        """Tell the others a decision that this rank has."""
        key = Key.of(self.table.places[number].key)
        decision = held(self.op_of(key), key)
        if decision is None:
            self.say(said, self.failure(number, "its decision is gone", final=False))
            return
        self.say(said, self.done(number, "stored", decision, 0.0), number)

    def tune(self, said: Log, number: int, left_s: float | None) -> None:
        """Tune a key that this rank took, and tell the others what came of it."""
        key = Key.of(self.table.places[number].key)
        if self.progress is not None:
            settled = sum(place.settled for place in self.table.places)
            self.progress(settled, len(self.table.places), key)
        # Longer than that the others would not wait for it.
        left_s = min(left_s or self.ranks.timeout_s, self.ranks.timeout_s)
        start = time.monotonic()
        entry = push(self.made)  # another library's function is compared with ours as it is routed
        self.made.publishes = False  # one rank for each file does, once the others know
        try:
            _, choice = self.made.tuned_choice(self.op_of(key), key, self.device, left_s)
        except DeviceLostError as error:
            self.say(said, self.failure(number, str(error), final=True), number)
            self.say(said, {"what": "quit", "rank": self.ranks.rank, "reason": str(error)})
        except Exception as error:  # what fails here may work in another rank
            self.say(said, self.failure(number, first_line(error), final=False), number)
        else:
            assert choice.record is not None
            self.say(said, self.done(number, "tuned", choice.record, time.monotonic() - start), number)
        finally:
            self.made.publishes = True
            remove(entry)

    def done(self, number: int, state: str, decision: DecisionRecord, seconds: float) -> Said:
        """The entry that says what was decided."""
        whole = replace(decision, host=decision.host or this_host())
        text = DECISION.dump_json(whole).decode()
        entry: Said = {"what": "done", "rank": self.ranks.rank, "number": number, "state": state}
        return entry | {"decision": text, "seconds": round(seconds, 3)}

    def failure(self, number: int, reason: str, *, final: bool) -> Said:
        """The entry that says that a key failed here."""
        return {"what": "failed", "rank": self.ranks.rank, "number": number, "reason": reason[:500], "final": final}

    def say(self, said: Log, entry: Said, number: int | None = None) -> None:
        """Append an entry, after whatever others append first, unless the key it is about is settled meanwhile."""
        while not said.append(entry):
            self.read(said)
            if number is not None and self.table.places[number].settled:
                return
        self.read(said)

    def read(self, said: Log) -> None:
        """Read what is new, and write it down where that is this rank's to do."""
        entries = said.read()
        for entry in entries:
            self.table.follow(entry)
        if entries:
            self.publish([rank for rank in self.table.active if self.writer_of(rank) == self.file])

    # -- what is kept and followed -----------------------------------------------------------------------------

    def publish(self, ranks: Sequence[int]) -> None:
        """Store what was decided, if this rank is the first of those that have its cache file."""
        self.writes = bool(ranks) and min(ranks) == self.ranks.rank
        if not self.writes:
            return
        facts = EnvironmentRecord(id=self.where.id, facts=dict(self.where.facts))
        for number, place in enumerate(self.table.places):
            if place.decision and number not in self.published:
                self.published.add(number)
                try:
                    self.made.store.publish(record_of(place), facts)
                except Exception as error:  # a cache never fails an op
                    log.warning("cache: %s: the decision is kept in memory only", error)

    def follow(self) -> None:
        """Have the calls of this process follow what all ranks found, and run the default where nothing was."""
        routers = [each for each in dict.fromkeys([self.made, *entries()]) if not each.config.tuning.pin]
        for place in self.table.places:
            try:
                key = Key.of(place.key)
                spec = self.op_of(key)
                for each in routers:
                    if place.decision:
                        each.adopt(spec, key, self.device, record_of(place))
                    else:
                        each.abide(spec, key, self.device, place.reason)
            except LayoutTunerError as error:
                log.warning("%s: not followed: %s", place.key, error)

    def check(self, kind: str, expected: Sequence[int]) -> Agreement:
        """Compare what the ranks hold now."""
        left_s = None if self.end is None else max(self.end - time.monotonic(), 0.0) + SLACK_S
        said = said_of_choices([self.made], self.where.id)
        meeting = self.ranks.meet(kind, said, compared, expected=expected, patience_s=left_s)
        absent = tuple(rank for rank in expected if rank not in meeting.present)
        return agreement_of(meeting.verdict, meeting.present, absent)


def record_of(place: Place) -> DecisionRecord:
    """The decision of a place, validated as any that comes from elsewhere."""
    record = check_decision(DECISION.validate_json(place.decision))
    if key_record(key_of(record.key)) != record.key or record.key != key_record(Key.of(place.key)):
        raise LayoutTunerError(f"a rank sent a decision for {record.key}, which is not what was asked")
    return record


def said_of_choices(routers: Sequence[Router], environment_id: str) -> Said:
    """What a rank says of the candidates that its calls run, so that ranks can be compared."""
    choices: dict[tuple[str, str], str] = {}
    for each in routers:
        for (key, where), choice in list(each.choices.items()):
            choices[where, str(key)] = f"{choice.candidate.id} {choice.candidate.revision}"
    file = f"{this_host()}:{routers[-1].store.name}" if routers else this_host()
    return {
        "environment": environment_id,
        "file": file,
        "choices": sorted([where, key, candidate] for (where, key), candidate in choices.items()),
    }
