"""Warm-up: tune keys ahead of the calls that will need them, on the path that those calls take."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import math
import numbers
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from layout_tuner.cache.records import MAX_REASON, DecisionRecord, MissRecord

from . import ops as _ops  # noqa: F401  registers every op
from .config import Config, with_cache
from .device import driver, interpreter
from .device.environment import Environment, environment
from .dispatch.decisions import require_server
from .dispatch.router import Router, push, remove
from .errors import ConfigError, DeviceLostError, Faults, LayoutTunerError
from .ranks.agreement import Agreement
from .ranks.dealing import Place, plan_of
from .ranks.exchange import Ranks, StoreLostError
from .ranks.together import Outcome, Together, record_of
from .spec import registry
from .spec.declaration import OpSpec
from .spec.keys import Key, bucketed
from .spec.shapes import Shape, keys, load_shapes, parse_shapes
from .tuning.records import key_of, key_record
from .tuning.tuner import CHECKING

log = logging.getLogger(__name__)

Status = Literal["tuned", "stored", "trivial", "failed", "unsupported", "left"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What warm-up did for one key.

    Attributes:
        key: The key, T as it is tuned; None for a shape that no kernel serves.
        status: `tuned` now, `stored` before, `trivial` (nothing to choose), `failed`, `unsupported`, or `left` (the
            budget was spent, or it failed before).
        decision: What is stored for the key.
        reason: Why there is none.
        seconds: Time spent on it.
        rank: The rank that tuned it, or had its decision; None where ranks had nothing to do with it.
    """

    key: Key | None
    status: Status
    decision: DecisionRecord | None = None
    reason: str = ""
    seconds: float = 0.0
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a warm-up did.

    Attributes:
        rows: One for each key, in order.
        environment: Where the timings hold.
        store: Where decisions are kept.
        interrupted: Whether Ctrl-C ended it; finished keys are kept.
        kept: Whether decisions lie in the store, rather than in this process's memory alone.
        notes: What is to be said of ranks: absent, silent, failed, of another environment.
        agreement: Whether all ranks hold the same afterwards; None without a group, or where its store was lost.
    """

    rows: tuple[Row, ...]
    environment: Environment
    store: str
    interrupted: bool = False
    kept: bool = True
    notes: tuple[str, ...] = ()
    agreement: Agreement | None = None

    def count(self, status: Status) -> int:
        """How many rows have a status."""
        return sum(row.status == status for row in self.rows)


def warmup(
    shapes: str | os.PathLike[str] | Sequence[Shape | Mapping[str, Any]] | Shape | Mapping[str, Any] | None = None,
    *,
    from_misses: bool = False,
    resume: bool = False,
    config: Config | str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
    ops: str | Sequence[str] | None = None,
    budget_s: float | None = None,
    router: Router | None = None,
    progress: Callable[[int, int, Key], None] | None = None,
    group: torch.distributed.ProcessGroup | Ranks | None = None,
) -> Report:
    """Tune every key that shapes or recorded misses ask for and that has no measured decision yet.

    Each result is stored as soon as it is known; a kill loses only the key in flight. On an accelerator with
    flash-linear-attention installed (`[routing] fla`), that library's function is measured against the best of ours.

    With a group every rank of it calls this, whatever its shapes: the keys that no rank has a decision for are dealt to
    all, longest first, and afterwards the ranks of one environment hold the same decisions, also in scopes that are
    open. A rank that fails, hangs or dies is waited for no longer than the group's timeout, or the budget.

    Args:
        shapes: Path of a shapes file, its content, its rows, or one row.
        from_misses: Also tune the recorded misses of this environment, the most frequent first, ahead of the shapes.
        resume: Go on after earlier runs: a key whose budget ended before every candidate had its turn is tuned again,
            one that failed is not.
        config: Settings, or the path of a `tuner.toml`; None finds them as `Config.load` does.
        cache: File of decisions; None takes the settings' one, else the user's cache folder.
        device: Where to tune; None takes the accelerator there is, else the CPU (Triton's interpreter).
        ops: Names of the ops to tune, or one name; None means every one that is asked for.
        budget_s: Seconds for all of it: no key is begun after it, and the last one has what is left.
        router: Tunes and stores; tests pass one with a timer of their own.
        progress: Called before each key with its number, the number of keys, and the key.
        group: The ranks that do it together, such as `torch.distributed.group.WORLD`; None: this process alone.

    Returns:
        What was done, key by key.

    Raises:
        ConfigError: Shapes, settings or arguments that cannot be used, all in one message; nothing was tuned.
        UnsupportedProblemError: The CPU is asked for without Triton's interpreter.
    """
    ops = (ops,) if isinstance(ops, str) else ops
    faults = Faults()
    settings = Config()
    ranks = None
    with faults.gathered():
        ranks = group if group is None or isinstance(group, Ranks) else Ranks.of(group)
    with faults.gathered():
        settings = config if isinstance(config, Config) else Config.load(config)
        if settings.tuning.pin:
            raise ConfigError(
                f"[tuning] pin = {settings.tuning.pin!r}: a pin is used instead of all else, so what is tuned is not: "
                "warm up with pin = '', then write a new pin with `tuner cache export --pin FILE`"
            )
    entries: Sequence[Shape] = ()
    with faults.gathered():
        if shapes is None and not from_misses:
            raise ConfigError("nothing to warm up: name shapes (--shapes), or ask for the misses (--from-misses)")
        if shapes is not None:
            entries = load_shapes(shapes) if isinstance(shapes, (str, os.PathLike)) else parse_shapes(rows_of(shapes))
    for name in ops or ():
        with faults.gathered():
            registry.lookup(name)
    with faults.gathered():
        numeric = isinstance(budget_s, numbers.Real) and not isinstance(budget_s, bool)
        if budget_s is not None and not (numeric and math.isfinite(budget_s) and budget_s > 0):
            raise ConfigError(f"budget: wanted a number of seconds above 0, got {budget_s!r}")
    where = torch.device("cpu")
    with faults.gathered():
        where = driver.resolve(str(device) if device is not None else None)
    with faults.gathered():
        settings = with_cache(settings, cache)
    with faults.gathered():
        require_server(settings)
    if faults.texts and ranks is not None:
        excuse(ranks, "warmup", "\n".join(faults.texts))
    faults.complain()
    made = router or Router(settings, on_miss="tune")
    wanted, refused = keys(entries, settings.keys.bucket)
    if from_misses:
        missed, unknown = missed_keys(made, where, settings.keys.bucket)
        wanted = list(dict.fromkeys([*missed, *wanted]))
        refused += unknown
    if ops is not None:
        wanted = [(spec, key) for spec, key in wanted if spec.name in ops]
    for spec, _ in wanted[:1]:
        interpreter.require_running(spec.name, "float32", where)
    if settings.routing.fla and where.type != "cpu":
        wanted = with_rivals(wanted)
    rows = [Row(key=None, status="unsupported", reason=reason) for reason in refused]
    failed = failed_before(made, where) if resume else {}
    start = time.monotonic()
    interrupted = False
    gone = ""  # why the device does nothing more for this process
    outcome: Outcome | None = None
    try:
        if ranks is not None:
            more, outcome = warm_together(ranks, made, wanted, where, failed, budget_s, progress, again=resume)
            rows += more
            wanted = []
        for number, (spec, key) in enumerate(wanted):
            left_s = None if budget_s is None else budget_s - (time.monotonic() - start)
            if left_s is not None and left_s <= 0:
                rows.append(Row(key=key, status="left", reason=f"the budget of {budget_s:g} s was spent"))
                continue
            if key in failed:
                rows.append(Row(key=key, status="left", reason=f"{failed[key]}; without --resume it is tried again"))
                continue
            if gone:
                rows.append(Row(key=key, status="left", reason=f"{gone}: another run goes on from here"))
                continue
            if progress is not None:
                progress(number, len(wanted), key)
            try:
                rows.append(warm_key(made, spec, key, where, left_s, again=resume))
            except DeviceLostError as error:
                gone = str(error)
                rows.append(Row(key=key, status="failed", reason=gone))
    except KeyboardInterrupt:
        interrupted = True
    report = Report(
        rows=tuple(rows),
        environment=environment(where),
        store=made.store.place,
        interrupted=interrupted,
        kept=made.store.kept,
        notes=outcome.notes if outcome else (),
        agreement=outcome.agreement if outcome else None,
    )
    if router is None:
        # Everything is in the file itself then, and nothing beside it.
        made.close()
    return report


def rows_of(shapes: object) -> Sequence[Shape | Mapping[str, Any]]:
    """The rows of shapes that are given as such: a list of rows, one row, or what a shapes file holds.

    Raises:
        ConfigError: None of these.
    """
    if isinstance(shapes, Mapping) and set(shapes) == {"shapes"}:
        shapes = shapes["shapes"]
    if isinstance(shapes, (Shape, Mapping)):
        return [shapes]
    if isinstance(shapes, Sequence):
        return shapes
    raise ConfigError(f"shapes: wanted the path of a file, rows or a row, got {type(shapes).__name__}")


TRIVIAL = "one head, one token or one candidate: nothing to choose"
OUT_OF_TIME = "the budget was spent before a candidate was ready: give more (--budget), or go on with another run"


def warm_key(
    router: Router, spec: OpSpec, key: Key, device: torch.device, left_s: float | None = None, *, again: bool = False
) -> Row:
    """Tune one key unless its measured decision is stored.

    Args:
        router: Tunes and stores.
        spec: The op.
        key: The key, T as it is tuned.
        device: Where.
        left_s: Seconds left of the run; None for no end.
        again: Whether a decision that was made before every candidate had its turn is made anew.

    Raises:
        DeviceLostError: The device does nothing more for this process; nothing is noted of the key.
    """
    if nothing_to_tune(spec, key, device):
        return Row(key=key, status="trivial", reason=TRIVIAL)
    where = environment(device)
    decision = router.stored_decision(spec, key, device)
    if decision is not None and decision.source != "predicted" and not (again and unfinished(decision)):
        return Row(key=key, status="stored", decision=decision)
    start = time.monotonic()
    entry = push(router)  # another library's function is compared with ours as it is routed
    try:
        router.tune(spec, key, device, left_s)
    except DeviceLostError:
        raise
    except LayoutTunerError as error:
        seconds = time.monotonic() - start
        if left_s is not None and seconds >= CHECKING * left_s:
            return Row(key=key, status="left", reason=OUT_OF_TIME, seconds=seconds)
        remember_failure(router, key, where, str(error))
        return Row(key=key, status="failed", reason=str(error), seconds=seconds)
    finally:
        remove(entry)
    decision = router.store.lookup(key_record(key), where.id)
    return Row(key=key, status="tuned", decision=decision, seconds=time.monotonic() - start)


def nothing_to_tune(spec: OpSpec, key: Key, device: torch.device) -> bool:
    """Whether a key has one candidate, or candidates that do the same."""
    return spec.nothing_to_choose(key) or len(spec.candidates(key, buffers=driver.chip(device).buffers)) == 1


def unfinished(decision: DecisionRecord) -> bool:
    """Whether a decision was made before every candidate had its turn, or before anything was timed."""
    skipped = any(each.state == "skipped" and each.failure == "timeout" for each in decision.measurements)
    ready = [each for each in decision.measurements if each.state == "ok"]
    return skipped or bool(ready and all(each.end_to_end_us is None for each in ready))


# -- several ranks ----------------------------------------------------------------------------------------------


def excuse(ranks: Ranks, kind: str, reason: str) -> None:
    """Tell ranks that this one takes no part in what they meet for, so that none waits for it."""
    try:
        ranks.meet(kind, {"error": reason}, plan_of)
    except StoreLostError as error:
        log.warning("%s", error)


def warm_together(
    ranks: Ranks,
    made: Router,
    wanted: Sequence[tuple[OpSpec, Key]],
    device: torch.device,
    failed: Mapping[Key, str],
    budget_s: float | None,
    progress: Callable[[int, int, Key], None] | None,
    *,
    again: bool,
) -> tuple[list[Row], Outcome]:
    """Tune keys with the other ranks; arguments are those of `warmup` and `warm_key`.

    Returns:
        A row for each key that this rank or another one of its environment asked for, and what the ranks did.
    """

    def held(spec: OpSpec, key: Key) -> DecisionRecord | None:
        decision = made.stored_decision(spec, key, device)
        usable = decision is not None and decision.source != "predicted" and not (again and unfinished(decision))
        return decision if usable else None

    rows: dict[Key, Row] = {}
    asked = []
    for spec, key in wanted:
        if nothing_to_tune(spec, key, device):
            rows[key] = Row(key=key, status="trivial", reason=TRIVIAL)
        elif key in failed:
            rows[key] = Row(key=key, status="left", reason=f"{failed[key]}; without --resume it is tried again")
        else:
            asked.append((spec, key))
    together = Together(ranks, made, device, op_of=op_of, budget_s=budget_s, progress=progress)
    outcome = together.run("warmup", asked, held)
    rows |= {row.key: row for row in map(row_of, outcome.places) if row.key is not None}
    for spec, key in asked:
        if key not in rows:
            decision = held(spec, key)
            missing = "; ".join(outcome.notes) or "no rank took it"
            rows[key] = (
                Row(key=key, status="stored", decision=decision)
                if decision
                else Row(key=key, status="left", reason=missing)
            )
    for place in outcome.places:
        if place.state == "failed" and together.writes:
            remember_failure(made, Key.of(place.key), together.where, place.reason)
    return list(rows.values()), outcome


def row_of(place: Place) -> Row:
    """The row of a key that ranks tuned together."""
    key = Key.of(place.key)
    if place.decision and place.state in ("tuned", "stored"):
        decision = record_of(place)
        return Row(key=key, status=place.state, decision=decision, seconds=place.seconds, rank=place.rank)
    status: Status = "failed" if place.state == "failed" else "left"
    return Row(key=key, status=status, reason=place.reason, rank=place.rank)


# -- what failed before, and what was missed ---------------------------------------------------------------------

FAILED = "warm-up failed: "


def remember_failure(router: Router, key: Key, where: Environment, reason: str) -> None:
    """Record with a key's misses that tuning it failed."""
    note = MissRecord(key=key_record(key), environment=where.id, count=0, reason=(FAILED + reason)[:MAX_REASON])
    try:
        router.store.record_misses([note])
    except Exception as error:  # a cache never fails an op
        log.warning("cache: %s", error)


def failed_before(router: Router, device: torch.device) -> dict[Key, str]:
    """Keys that an earlier warm-up failed on, and why."""
    misses = router.store.missed(environment(device).id)
    return {key_of(miss.key): miss.reason for miss in misses if miss.reason.startswith(FAILED)}


def missed_keys(router: Router, device: torch.device, bucket: str) -> tuple[list[tuple[OpSpec, Key]], list[str]]:
    """Keys of this environment's misses, the most frequent first, and a row for each that no kernel serves."""
    wanted: dict[Key, OpSpec] = {}
    refused = []
    for miss in router.store.missed(environment(device).id):
        key = bucketed(key_of(miss.key), bucket)
        try:
            spec = op_of(key)
            spec.require(key)
        except LayoutTunerError as error:
            refused.append(f"{key}: {error}")
            continue
        wanted.setdefault(key, spec)
    return [(spec, key) for key, spec in wanted.items()], refused


# -- another library's functions -------------------------------------------------------------------------------


def op_of(key: Key) -> OpSpec:
    """The op of a key: one of ours, or a rivalry of ours with another library's.

    Raises:
        ConfigError: There is no such op here.
    """
    library, dot, name = key.op.partition(".")
    if not dot:
        return registry.lookup(key.op)
    rival = rival_of(name) if library == "fla" else None
    if rival is None:
        raise ConfigError(f"no op {key.op!r} here: flash-linear-attention is not installed, or has no {name}")
    return rival


def with_rivals(wanted: Sequence[tuple[OpSpec, Key]]) -> list[tuple[OpSpec, Key]]:
    """Each key, followed by the key of its rivalry with flash-linear-attention's function, where there is one."""
    if importlib.util.find_spec("fla") is None:
        return list(wanted)
    both: dict[Key, OpSpec] = {}
    for spec, key in wanted:
        both.setdefault(key, spec)
        rival = rival_of(spec.name)
        if rival is not None:
            both.setdefault(replace(key, op=rival.name), rival)
    return [(spec, key) for key, spec in both.items()]


@functools.cache
def rival_of(op: str) -> OpSpec | None:
    """The rivalry of an op with flash-linear-attention's; None where that has none, or cannot be imported."""
    try:
        integration = importlib.import_module(".integrations.fla", __package__)
        if op not in integration.HOMES or not integration.installed():
            return None
        importlib.import_module(integration.HOMES[op][0])
        rival: OpSpec | None = integration.takeover(op).rivalry()
    except Exception as error:  # whatever is wrong with a library, ours are tuned
        log.warning("flash-linear-attention: %s is not measured: %s", op, error)
        return None
    return rival
