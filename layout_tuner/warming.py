"""Warm-up: tune keys ahead of the calls that will need them, on the path that those calls take."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from layout_tuner.cache.records import DecisionRecord

from . import device as devices
from . import ops as _ops  # noqa: F401  registers every op
from .config import Config
from .decisions import key_record
from .environment import Environment, environment
from .errors import LayoutTunerError
from .keys import Key
from .registry import OpSpec
from .router import Router
from .shapes import Shape, keys, load_shapes, parse_shapes

log = logging.getLogger(__name__)

Status = Literal["tuned", "stored", "trivial", "failed", "unsupported", "left"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What warm-up did for one key.

    Attributes:
        key: The key, T as it is tuned; None for a shape that no kernel serves.
        status: `tuned` now, `stored` before, `trivial` (nothing to choose), `failed`, `unsupported`, or `left` (the
            budget was spent).
        decision: What is stored for the key.
        reason: Why there is none.
        seconds: Time spent on it.
    """

    key: Key | None
    status: Status
    decision: DecisionRecord | None = None
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a warm-up did.

    Attributes:
        rows: One for each key, in order.
        environment: Where the timings hold.
        store: Where decisions are kept.
        interrupted: Whether Ctrl-C ended it; finished keys are kept.
    """

    rows: tuple[Row, ...]
    environment: Environment
    store: str
    interrupted: bool = False

    def count(self, status: Status) -> int:
        """Keys of a status."""
        return sum(row.status == status for row in self.rows)


def warmup(
    shapes: str | os.PathLike[str] | Sequence[Shape | Mapping[str, Any]],
    *,
    config: Config | str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
    ops: Sequence[str] | None = None,
    budget_s: float | None = None,
    router: Router | None = None,
    progress: Callable[[int, int, Key], None] | None = None,
) -> Report:
    """Tune every key that shapes ask for and that has no measured decision yet.

    Each result is stored as soon as it is known; a kill loses only the key in flight.

    Args:
        shapes: Path of a shapes file, or its rows.
        config: Settings, or the path of a `tuner.toml`; None finds them as `Config.load` does.
        cache: File of decisions; None takes the settings' one, else the user's cache folder.
        device: Where to tune; None takes the accelerator there is, else the CPU (Triton's interpreter).
        ops: Names of the ops to tune; None means every one the shapes ask for.
        budget_s: Seconds after which no further key is begun.
        router: Tunes and stores; tests pass one with a timer of their own.
        progress: Called before each key with its number, the number of keys, and the key.

    Returns:
        What was done, key by key.

    Raises:
        ConfigError: Shapes or settings that cannot be used; nothing was tuned.
        UnsupportedProblemError: The CPU is asked for without Triton's interpreter.
    """
    settings = config if isinstance(config, Config) else Config.load(config)
    if cache is not None:
        settings = settings.model_copy(update={"cache": settings.cache.model_copy(update={"path": os.fspath(cache)})})
    entries = load_shapes(shapes) if isinstance(shapes, (str, os.PathLike)) else parse_shapes(shapes)
    wanted, refused = keys(entries, settings.keys.bucket)
    if ops is not None:
        wanted = [(spec, key) for spec, key in wanted if spec.name in ops]
    where = devices.resolve(str(device) if device is not None else None)
    for spec, _ in wanted[:1]:
        devices.require_running(spec.name, "float32", where)
    made = router or Router(settings, on_miss="tune")
    rows = [Row(key=None, status="unsupported", reason=reason) for reason in refused]
    start = time.monotonic()
    interrupted = False
    try:
        for number, (spec, key) in enumerate(wanted):
            if budget_s is not None and time.monotonic() - start > budget_s:
                rows.append(Row(key=key, status="left", reason=f"the budget of {budget_s:g} s was spent"))
                continue
            if progress is not None:
                progress(number, len(wanted), key)
            rows.append(warm_key(made, spec, key, where))
    except KeyboardInterrupt:
        interrupted = True
    return Report(rows=tuple(rows), environment=environment(where), store=made.store.place, interrupted=interrupted)


def warm_key(router: Router, spec: OpSpec, key: Key, device: torch.device) -> Row:
    """Tune one key unless its measured decision is stored."""
    if spec.nothing_to_choose(key) or len(spec.candidates(key)) == 1:
        return Row(key=key, status="trivial", reason="one head, one token or one candidate: nothing to choose")
    where = environment(device)
    found = router.stored_decision(spec, key, device)
    if found is not None and found.source != "predicted":
        return Row(key=key, status="stored", decision=found)
    start = time.monotonic()
    try:
        router.tune(spec, key, device)
    except LayoutTunerError as error:
        return Row(key=key, status="failed", reason=str(error), seconds=time.monotonic() - start)
    decision = router.store.lookup(key_record(key), where.id)
    return Row(key=key, status="tuned", decision=decision, seconds=time.monotonic() - start)
