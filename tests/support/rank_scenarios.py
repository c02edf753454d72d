"""What ranks do in the tests of many ranks; in a module of its own, which their processes import."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from command import shape
from dv_local import CANDIDATES, SPEC, arguments, dv_local
from ranks import die
from timers import set_times

import layout_tuner
from layout_tuner.config import Config
from layout_tuner.device import driver
from layout_tuner.device.environment import environment
from layout_tuner.dispatch import decisions, router
from layout_tuner.dispatch.router import Router
from layout_tuner.errors import ConfigError, TuningError
from layout_tuner.ranks import together
from layout_tuner.warming import Report, warmup

CPU = torch.device("cpu")
Tune = Callable[..., Any]


def winner(rank: int) -> str:
    """The candidate that is the fastest by the clock of a rank: neighbours differ."""
    return CANDIDATES[2 + rank % 2]


def router_of(folder: Path, name: str, rank: int, **settings: Any) -> Router:
    """A router with a set clock."""
    config = Config(cache={"path": str(folder / f"{name}.sqlite")}, **settings)
    times = dict.fromkeys(CANDIDATES, 10.0) | {winner(rank): 5.0}
    return Router(config, on_miss="default", timer=set_times(times))


def told(report: Report, made: Router) -> dict[str, Any]:
    """A report in plain values, with what the calls of this process run and what its file holds."""
    rows = {row.key.T: row for row in report.rows if row.key is not None}
    return {
        "status": {T: row.status for T, row in rows.items()},
        "rank": {T: row.rank for T, row in rows.items()},
        "reason": {T: row.reason for T, row in rows.items()},
        "candidate": {T: row.decision.candidate for T, row in rows.items() if row.decision},
        "held": {key.T: choice.candidate.id for (key, _), choice in made.choices.items()},
        "file": {record.key.T: record.candidate for record in made.store.decisions()},
        "notes": report.notes,
        "kept": report.kept,
        "agreed": report.agreement and report.agreement.agreed,
        "agreement": str(report.agreement),
        "end": time.monotonic(),
    }


def tuning_by(change: Callable[[Tune, int], Tune]) -> Callable[[], None]:
    """Change how keys are tuned in this process; returns what undoes it."""
    original = Router.make

    def make(self: Router, spec: Any, key: Any, *more: Any) -> Any:
        return change(original, key.T)(self, spec, key, *more)

    Router.make = make  # type: ignore[method-assign]

    def undo() -> None:
        Router.make = original  # type: ignore[method-assign]

    return undo


def warm(
    rank: int,
    folder: Path,
    lengths: Sequence[Sequence[int]],
    files: Sequence[str],
    *,
    fault: str = "",
    at: int = 1,
    late_s: float = 0.0,
    budget_s: float | None = None,
    slack_s: float = 10.0,
    group_of: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Warm up together; rank `at` has a fault.

    Args:
        rank: This rank.
        folder: Of the cache files.
        lengths: For each rank the lengths of its keys.
        files: For each rank the name of its cache file.
        fault: What is wrong with rank `at`.
        at: The rank.
        late_s: Seconds that it comes late.
        budget_s: Of the warm-up.
        slack_s: As of `together.SLACK_S`.
        group_of: Ranks of a group to use in place of all.
    """
    tuned: list[int] = []
    writes: list[int] = []

    def change(tune: Tune, T: int) -> Tune:
        def changed(*arguments: Any) -> Any:
            tuned.append(T)
            if rank == at and fault == "dies":
                die()
            if rank == at and fault == "hangs":
                time.sleep(late_s)
            if rank == at and fault == "cannot compile":
                raise TuningError("ld: cannot find -lcuda")
            if rank == at and fault == "raises":
                raise KeyboardInterrupt
            return tune(*arguments)

        return changed

    undo = tuning_by(change)
    together.SLACK_S = slack_s
    distribution = driver.triton_distribution
    if rank == at and fault == "another Triton":
        driver.triton_distribution = lambda: ("triton", "9.9.9")
        environment.cache_clear()
    if rank == at and fault == "late":
        time.sleep(late_s)
    made = router_of(folder, files[rank], rank)
    publish = made.store.publish

    def publishing(decision: Any, facts: Any) -> Any:
        writes.append(decision.key.T)
        return publish(decision, facts)

    made.store.publish = publishing  # type: ignore[method-assign]
    group = dist.group.WORLD if group_of is None else dist.new_group(list(group_of))
    if group_of is not None and rank not in group_of:
        return {}
    shapes = [shape(T=list(lengths[rank]))] if lengths[rank] else []
    if rank == at and fault == "bad shapes":
        shapes = [shape(T=-1)]
    start = time.monotonic()
    try:
        report = warmup(shapes, config=made.config, device=CPU, router=made, group=group, budget_s=budget_s)
        return told(report, made) | {"tuned": tuned, "writes": writes, "seconds": time.monotonic() - start}
    except ConfigError as error:
        return {"error": str(error), "seconds": time.monotonic() - start}
    finally:
        undo()
        made.close()
        driver.triton_distribution = distribution
        environment.cache_clear()
        together.SLACK_S = 10.0


def train(rank: int, folder: Path, lengths: Sequence[Sequence[int]], *, files: Sequence[str]) -> dict[str, Any]:
    """Calls that miss, then `tune_misses`, then the same calls."""
    made = router_of(folder, files[rank], rank)
    ticket = router.push(made)
    before = {T: dv_local(arguments(CPU, T=T)) for T in lengths[rank]}
    held = {key.T: choice.candidate.id for (key, _), choice in made.choices.items()}
    report = layout_tuner.tune_misses(device=CPU)
    same = all(torch.equal(dv_local(arguments(CPU, T=T)), result) for T, result in before.items())
    again = layout_tuner.tune_misses(device=CPU)
    checked = layout_tuner.check_ranks()
    router.remove(ticket)
    made.close()
    return told(report, made) | {
        "before": held, "close": same, "again": [row.status for row in again.rows], "checked": str(checked),
        "all agree": checked.agreed,
    }  # fmt: skip


def differ(rank: int, folder: Path, at: int) -> dict[str, Any]:
    """Compare ranks of which one runs another candidate."""
    made = router_of(folder, "one", rank)
    if rank == at:
        from layout_tuner.spec.forcing import parse

        made.forced = dict(parse(f"{SPEC.name}=full/g=T_CONTIG"))
    router.push(made)
    dv_local(arguments(CPU, T=20))
    checked = layout_tuner.check_ranks()
    made.close()
    return {"agreed": checked.agreed, "text": str(checked), "keys": checked.keys}


def sync(rank: int, folder: Path, steps: int, every: int, scopes: str) -> dict[str, Any]:
    """Steps inside `enable(on_miss="sync")`; rank 1 meets a key that the others do not."""
    config = Config(cache={"path": str(folder / "sync.sqlite")}, routing={"sync_every": every, "fla": False})
    ran: list[list[str]] = []
    make_timer = decisions.make_timer
    decisions.make_timer = lambda device, config: set_times(dict.fromkeys(CANDIDATES, 10.0) | {winner(rank): 5.0})

    def step() -> None:
        for T in (20, 24) if rank == 1 else (20,):
            dv_local(arguments(CPU, T=T))
        choices = router.current().choices
        ran.append(sorted(f"{key.T} {choice.source}" for (key, _), choice in choices.items()))

    entry = layout_tuner.enable(config, on_miss="sync")
    decorated = entry(step)
    for _ in range(steps):
        if scopes == "decorator":
            decorated()
        else:
            with layout_tuner.enable(config, on_miss="sync"):
                step()
    decisions.make_timer = make_timer
    return {"ran": ran, "all agree": layout_tuner.check_ranks().agreed}
