"""Why a call runs what it runs: the decision for its key and its evidence, or the nearest key that has one."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from layout_tuner.cache.records import DecisionRecord

from . import ops as _ops  # noqa: F401  registers every op
from .api import forced_candidates
from .config import Config, disabled
from .device import driver
from .device.environment import environment
from .dispatch.router import Router
from .errors import ConfigError, Faults
from .spec import forcing
from .spec.declaration import REFERENCE, OpSpec
from .spec.keys import Key
from .spec.operands import SIZES
from .spec.shapes import keys, parse_shapes
from .tuning.records import key_of, key_record


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a key runs what it runs.

    Attributes:
        key: The key, T as it is tuned.
        environment: Id of the environment it was asked for.
        candidate: What runs.
        source: `pinned`, `forced`, `measured`, `imported`, `predicted`, `default`, or `reference`: torch computes it.
        reason: One sentence.
        decision: The decision it follows, with its evidence; None for the default.
        layer: Which file or server holds the decision.
        nearest: The stored key of the op, in the same environment, that differs least; only where there is no decision.
        differing: Names of what differs between the two keys, each with what is asked for and what is stored.
    """

    key: Key
    environment: str
    candidate: str
    source: str
    reason: str
    decision: DecisionRecord | None = None
    layer: str = ""
    nearest: DecisionRecord | None = None
    differing: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def explain(
    op: str,
    shape: Mapping[str, Any],
    *,
    form: str | None = None,
    config: Config | str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
) -> tuple[Explanation, ...]:
    """Say what runs for a shape, and why; nothing is run, tuned or stored.

    Args:
        op: Name of an op.
        shape: A row of a shapes file without `op`: `{"B": 2, "T": 2048, "H": 4, "K": 64, "dtype": "bf16"}`.
        form: A standard form's name, or a form's text; None means each of the op's standard forms.
        config: Settings, or the path of a `tuner.toml`; None finds them as `Config.load` does.
        cache: File of decisions; None takes the settings' one, else the user's cache folder.
        device: Where it would run; None takes the accelerator there is, else the CPU.

    Returns:
        One explanation for each form.

    Raises:
        ConfigError: Something that cannot be used; one message names all of it.
    """
    faults = Faults()
    settings = Config()
    with faults.gathered():
        settings = config if isinstance(config, Config) else Config.load(config)
    wanted: list[tuple[OpSpec, Key]] = []
    with faults.gathered():
        if not isinstance(shape, Mapping):
            raise ConfigError(f"shape: wanted a row as {{'T': 2048, 'H': 4, 'K': 64, 'dtype': 'bf16'}}, got {shape!r}")
        row = dict(shape) | {"op": op} | ({} if form is None else {"forms": [form]})
        wanted, refused = keys(parse_shapes([row], "shape"), settings.keys.bucket)
        faults.texts += refused
    with faults.gathered():
        driver.resolve(str(device) if device is not None else None)
    with faults.gathered():
        disabled()
    faults.complain()
    return explain_keys(wanted, config=settings, cache=cache, device=device)


def explain_keys(
    wanted: Sequence[tuple[OpSpec, Key]],
    *,
    config: Config | str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
) -> tuple[Explanation, ...]:
    """Say what runs for keys, T as it is tuned, and why; arguments as `explain` has them."""
    settings = config if isinstance(config, Config) else Config.load(config)
    if cache is not None:
        settings = settings.model_copy(update={"cache": settings.cache.model_copy(update={"path": os.fspath(cache)})})
    where = driver.resolve(str(device) if device is not None else None)
    router = Router(settings, on_miss="default", forced=forced_candidates())
    with closing(router):
        say = explain_disabled if disabled() else explain_key
        return tuple(say(router, spec, key, where) for spec, key in wanted)


def explain_disabled(router: Router, spec: OpSpec, key: Key, device: torch.device) -> Explanation:
    """What a key runs while nothing is routed."""
    return Explanation(
        key=key,
        environment=environment(device).id,
        candidate=spec.default(key, driver.chip(device)).id,
        source="default",
        reason="LAYOUT_TUNER_DISABLE=1: nothing is routed",
    )


def explain_key(router: Router, spec: OpSpec, key: Key, device: torch.device) -> Explanation:
    """Why a key runs what it runs, or why nothing that there is may run it."""
    found = explain_choice(router, spec, key, device)
    default = spec.default(key, driver.chip(device))
    wrong = router.known_wrong(spec, key, device, default) if found.candidate == default.id else ""
    if not wrong or found.source == "forced":
        return found
    instead = "torch's oracle computes it"
    if router.config.routing.on_wrong == "error":
        instead = "[routing] on_wrong makes that an error"
    reason = f"{default.id} computes wrongly on this device ({wrong}), and no other candidate was chosen: {instead}"
    return replace(found, candidate=REFERENCE, source="reference", reason=reason)


def explain_choice(router: Router, spec: OpSpec, key: Key, device: torch.device) -> Explanation:
    """Why a key runs what it runs, as far as decisions say."""
    here = environment(device).id
    by_default = spec.default(key, driver.chip(device))
    default = by_default.id
    if router.trivial(spec, key, device):
        reason = "one head, one token or one candidate: nothing to choose"
        return Explanation(key=key, environment=here, candidate=default, source="default", reason=reason)
    choice = router.decided(spec, key, device, by_default)
    if choice is not None:
        reason = f"{forcing.NAME} forces it, whatever was measured"
        if choice.record is not None:
            reason = f"{choice.source} in {choice.layer}: " + gain_text(choice.record)
        return Explanation(
            key=key, environment=here, candidate=choice.candidate.id, source=choice.source, reason=reason,
            decision=choice.record, layer=choice.layer,
        )  # fmt: skip
    stored = [record for record in router.store.decisions(environment=here, op=key.op) if record.key != key_record(key)]
    unpinned = "not in the pin; " if router.config.tuning.pin else ""
    nearest = min(stored, key=lambda record: distance(key, key_of(record.key)), default=None)
    if nearest is None:
        reason = f"{unpinned}no decision of {key.op} is stored for this environment"
        return Explanation(key=key, environment=here, candidate=default, source="default", reason=reason)
    differing = differences(key, key_of(nearest.key))
    reason = f"{unpinned}no decision for this key; the nearest one differs in " + ", ".join(
        f"{name} ({ours} asked for, {theirs} stored)" for name, (ours, theirs) in differing.items()
    )
    return Explanation(
        key=key, environment=here, candidate=default, source="default", reason=reason,
        nearest=nearest, differing=differing,
    )  # fmt: skip


def gain_text(record: DecisionRecord) -> str:
    """By how much a decision's winner wins, or why nobody knows."""
    if record.source == "predicted":
        return predicted_text(record)
    own = next((each for each in record.measurements if each.candidate == record.candidate), None)
    if own is not None and own.reason and own.end_to_end_us is None:
        return f"{record.candidate}, {own.reason}"
    if record.candidate == record.default_candidate or not record.gain:
        return f"{record.candidate}, the default: nothing is faster beyond the noise"
    bounds = ""
    if record.gain_low is not None and record.gain_high is not None:
        bounds = f" [{100 * record.gain_low:.1f}, {100 * record.gain_high:.1f}]"
    return f"{record.candidate} saves {100 * record.gain:.1f} %{bounds} of {record.default_candidate}"


def predicted_text(record: DecisionRecord) -> str:
    """What a prediction rests on, and what it does not."""
    units = {
        each.candidate: number
        for each in record.measurements
        if isinstance(number := each.counts.get("work units"), int | float)
    }
    own, default = units.get(record.candidate), units.get(record.default_candidate)
    is_default = record.candidate == record.default_candidate
    text = f"{record.candidate}, {'the default, ' if is_default else ''}by the compiler's counts"
    if own is not None:
        text += f": {own:,.0f} work units"
        if not is_default:
            against = f"against {default:,.0f} of" if default is not None else "and no count of"
            text += f" {against} {record.default_candidate}, the default"
    return f"{text}; no time was measured, and any measurement (`tuner warmup` on the device) replaces it"


def fields_of(key: Key) -> dict[str, str]:
    """What makes a key, by name; entries of its form apart."""
    named = {name: str(getattr(key, name)) for name in SIZES}
    named |= {"varlen": str(key.varlen), "dtype": key.dtype}
    return named | {f"form {name}": value for name, value in key.form.entries.items()}


def differences(asked: Key, stored: Key) -> dict[str, tuple[str, str]]:
    """What differs between two keys of an op: name, what the one has, what the other has."""
    ours, theirs = fields_of(asked), fields_of(stored)
    return {
        name: (ours.get(name, "absent"), theirs.get(name, "absent"))
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name)
    }


def distance(asked: Key, stored: Key) -> tuple[int, float, str]:
    """Sort key of nearness: how many things differ, then how far apart the sizes are, by octaves."""
    octaves = sum(
        abs(math.log2(max(getattr(asked, name), 1)) - math.log2(max(getattr(stored, name), 1))) for name in SIZES
    )
    return len(differences(asked, stored)), octaves, str(stored)
