"""`tuner warmup --target`: decisions predicted from Ascend's compiler, on a machine without an NPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..ascend.predicting import decision_record, environment_record
from .common import console, print_json
from .explain import compiling

if TYPE_CHECKING:
    from layout_tuner.cache.records import DecisionRecord

    from ..ascend.candidates import CandidateReport
    from ..spec.keys import Key


def predict_shapes(
    shapes: Path,
    target: str,
    *,
    ops: Sequence[str] | None = None,
    cache: Path | None = None,
    config: Path | None = None,
    json: bool = False,
) -> None:
    """Predict and store a decision for every key that shapes ask for.

    Args:
        shapes: Shapes file.
        target: Name of the SoC to compile for.
        ops: Only these ops.
        cache: File of decisions; None takes the settings' one, else the user's cache folder.
        config: Settings file; None finds it as `Config.load` does.
        json: Print JSON instead of a table.

    Raises:
        ConfigError: Unknown target, unusable shapes, no toolchain; nothing was stored.
        typer.Exit: With 1: a candidate does not compile, no kernel serves a key, or the file could not be written.
    """
    from layout_tuner.cache.places.opening import open_store

    from .. import ops as _ops  # noqa: F401  registers every op
    from ..ascend.candidates import cases_of, compile_candidates
    from ..ascend.prediction import predict
    from ..ascend.targets import target_named
    from ..config import Config
    from ..spec.shapes import keys, load_shapes

    soc = target_named(target)
    settings = Config.load(config)
    wanted, refused = keys(load_shapes(shapes), settings.keys.bucket)
    wanted = [(spec, key) for spec, key in wanted if ops is None or spec.name in ops]
    open_keys = [(spec, key) for spec, key in wanted if not spec.nothing_to_choose(key)]
    cases = [case for spec, key in open_keys for case in cases_of(spec, key, soc)]
    with compiling(soc, config) as (compiler, progress, timeout_s):
        reports = compile_candidates(cases, compiler, progress, timeout_s)
        version = compiler.version
    rows: list[tuple[Key, list[CandidateReport], DecisionRecord | None]] = []
    store = open_store(cache or settings.cache.path or None)
    try:
        for spec, key in open_keys:
            of_key = [report for report in reports if report.key == key]
            prediction = predict(of_key)
            if prediction is None:
                rows.append((key, of_key, None))
                continue
            decision = decision_record(spec, key, of_key, prediction, target)
            store.publish(decision, environment_record(target, version))
            rows.append((key, of_key, decision))
        kept, name = store.healthy, store.place
    finally:
        store.close()
    if json:
        print_json(summary_json(target, version, name, rows, refused))
    else:
        print_summary(target, version, name, rows, refused)
    if refused or not kept or any(not all(report.ok for report in of_key) for _, of_key, _ in rows):
        raise typer.Exit(1)


def print_summary(
    target: str, compiler: str, store: str, rows: Sequence[tuple[Key, Any, DecisionRecord | None]], refused: list[str]
) -> None:
    """A row for each candidate of each key."""
    from rich.table import Table

    from .explain import said

    out = console()
    table = Table(pad_edge=False)
    for heading in ("op", "key", "candidate"):
        table.add_column(heading, overflow="fold")
    table.add_column("work units", justify="right")
    table.add_column("", overflow="fold")
    for key, reports, decision in rows:
        units: Mapping[str, Any] = (
            {each.candidate: each.counts.get("work units") for each in decision.measurements} if decision else {}
        )
        for place, report in enumerate(reports):
            number = units.get(report.candidate)
            wins = decision is not None and decision.candidate == report.candidate
            table.add_row(
                key.op if place == 0 else "",
                f"{key.sizes} {key.dtype}{' packed' if key.varlen else ''}\n{key.form}" if place == 0 else "",
                report.candidate,
                "-" if number is None else f"{number:,.0f}",
                "PREDICTED" if wins else "" if report.ok else "; ".join(said(report)),
            )
        table.add_section()
    if rows:
        out.print(table)
    for reason in refused:
        out.print(f"unsupported: {reason}", markup=False)
    count = sum(decision is not None for _, _, decision in rows)
    out.print(
        f"{count} predicted for {target} by {compiler}: counts, not times; any measurement replaces them; "
        f"decisions in {store}",
        markup=False,
    )


def summary_json(
    target: str, compiler: str, store: str, rows: Sequence[tuple[Key, Any, DecisionRecord | None]], refused: list[str]
) -> dict[str, Any]:
    """The same as one JSON object."""
    from .decisions import decision_json
    from .explain import said

    return {
        "target": target,
        "compiler": compiler,
        "store": store,
        "refused": refused,
        "keys": [
            {
                "key": str(key),
                "decision": decision_json(decision) if decision else None,
                "failed": {report.candidate: said(report) for report in reports if not report.ok},
            }
            for key, reports, decision in rows
        ],
    }
