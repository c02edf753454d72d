"""What ranks of a running program do together: tune what any of them missed, and compare what they run.

`enable(on_miss="sync")` does the former by itself, where scopes are entered.
"""

from __future__ import annotations

import weakref

import torch

from layout_tuner.cache.records import DecisionRecord

from .config import Config
from .device import driver
from .device.environment import environment
from .dispatch import counters, router
from .dispatch.choices import in_backward
from .dispatch.router import Router
from .errors import ConfigError, LayoutTunerError
from .ranks.agreement import Agreement, agreement_of, compared
from .ranks.exchange import Ranks
from .ranks.together import Together, record_of, said_of_choices
from .spec.declaration import OpSpec
from .spec.keys import Key
from .warming import Report, op_of, row_of

# What ranks agreed on in this process, for scopes that open later, and keys for which they found nothing.
_agreed: dict[tuple[Key, str], DecisionRecord] = {}
_given_up: dict[tuple[Key, str], str] = {}


def ranks_of(group: torch.distributed.ProcessGroup | None) -> Ranks:
    """The ranks of a group; without one and without torch.distributed this process alone."""
    distributed = torch.distributed
    if group is None and not (distributed.is_available() and distributed.is_initialized()):
        return Ranks.alone()
    return Ranks.of(group)


def routing() -> Router:
    """The newest entry that is open, else the newest that there was; without any, one that routes nothing."""
    if router.active():
        return router.current()
    live = router.live()
    return live[-1] if live else Router(Config.load(), on_miss="default")


def tune_misses(
    group: torch.distributed.ProcessGroup | None = None,
    *,
    device: str | torch.device | None = None,
    budget_s: float | None = None,
) -> Report:
    """Tune what calls of any rank missed, and have all ranks follow the outcome from here on.

    Every rank calls it at the same place, outside of a forward and a backward pass: after the first step, say, or at
    a checkpoint. Ranks need not have missed the same. One that joined later takes the decisions of the others.

    Args:
        group: The ranks; None means the default group, or this process alone without torch.distributed.
        device: This rank's device; None takes the current accelerator, else the CPU.
        budget_s: Seconds for all of it; None: a rank is given up after the group's timeout.

    Returns:
        What was done, key by key, in this rank's environment.

    Raises:
        ConfigError: There is no such group or device.
    """
    ranks = ranks_of(group)
    where = driver.resolve(str(device) if device is not None else None)
    made = routing()
    return together(ranks, made, where, budget_s)


def together(ranks: Ranks, made: Router, device: torch.device, budget_s: float | None = None) -> Report:
    """As `tune_misses`, for an entry."""
    where = environment(device)

    def held(spec: OpSpec, key: Key) -> DecisionRecord | None:
        choice = made.choices.get((key, where.id))
        if choice is not None and choice.record is not None:
            return choice.record
        decision = _agreed.get((key, where.id)) or made.stored_decision(spec, key, device)
        return decision if decision is not None and decision.source != "predicted" else None

    done = Together(ranks, made, device, op_of=op_of, budget_s=budget_s)
    outcome = done.run("misses", wanted(made, where.id), held)
    for place in outcome.places:
        key = Key.of(place.key)
        if place.decision:
            _agreed[key, where.id] = record_of(place)
        elif place.state == "failed":
            _given_up[key, where.id] = place.reason
    return Report(
        rows=tuple(map(row_of, outcome.places)),
        environment=where,
        store=made.store.place,
        kept=made.store.kept,
        notes=outcome.notes,
        agreement=outcome.agreement,
    )


def wanted(made: Router, where: str) -> list[tuple[OpSpec, Key]]:
    """The keys of an environment that this process missed, or has a decision for.

    Misses are counted for the process, also those of scopes that are gone.
    """
    missed = (each for each in counters.together() if each.missed and each.reason)
    asked = [each.key for each in missed if each.environment == where]
    asked += [key for (key, place), choice in list(made.choices.items()) if choice.record and place == where]
    asked += [key for key, place in _agreed if place == where]
    found = []
    for key in dict.fromkeys(key for key in asked if key is not None):
        try:
            spec = op_of(key)
        except LayoutTunerError:  # another library's that is not here
            continue
        if (key, where) not in _given_up:
            found.append((spec, key))
    return found


def check_ranks(group: torch.distributed.ProcessGroup | None = None) -> Agreement:
    """Compare which candidate each rank runs for each key; every rank of the group calls it.

    Ranks of one environment are compared; keys that only some of them hold, as with pipeline parallelism, are no
    difference.

    Args:
        group: The ranks; None means the default group, or this process alone without torch.distributed.

    Returns:
        The same on every rank; its text names the ranks, keys, candidates and cache files that differ.

    Raises:
        ConfigError: There is no such group.
        LayoutTunerError: Its store does not answer.
    """
    ranks = ranks_of(group)
    made = [routing()] if router.active() else router.live()
    said = said_of_choices(made, environment(driver.resolve()).id)
    meeting = ranks.meet("check", said, compared)
    return agreement_of(meeting.verdict, meeting.present, meeting.absent)


# -- enable(on_miss="sync") ------------------------------------------------------------------------------------

_entered = 0
_told: weakref.WeakSet[Router] = weakref.WeakSet()


def entering(made: Router) -> None:
    """At the entry of a scope: every so many of them tune what the ranks missed since the last time.

    Every rank has to enter as often. Scopes within scopes, and those that a backward pass repeats, do not count.
    """
    global _entered
    device = driver.resolve()
    others = [each for each in router.entries() if each is not made]
    if made.policy(device) != "sync" or others or in_backward() or driver.capturing(device):
        return
    if made not in _told:
        _told.add(made)
        for (key, where), record in list(_agreed.items()):
            if where == environment(device).id:
                made.adopt(op_of(key), key, device, record)
    number, _entered = _entered, _entered + 1
    if number % made.config.routing.sync_every == 0:
        try:
            together(Ranks.of(), made, device)
        except ConfigError as error:  # a group without a store: calls run the default
            router.log.warning("%s", error)


def forget() -> None:
    """Begin anew, as where a program makes another group."""
    global _entered
    _entered = 0
    _agreed.clear()
    _given_up.clear()
    _told.clear()
