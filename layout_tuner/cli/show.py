"""`tuner show`: list stored decisions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import console, print_json


def show(
    cache: Annotated[Path | None, typer.Option(help="File of decisions; default: the user's cache folder.")] = None,
    op: Annotated[str | None, typer.Option(help="Only this op.")] = None,
    environment: Annotated[str | None, typer.Option(help="Only this environment.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings; default: tuner.toml here, if any.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """List what is stored: every decision with its candidates' times."""
    from layout_tuner.cache.store import open_store
    from layout_tuner.config import Config

    from .decisions import decision_json, decision_table

    settings = Config.load(config)
    store = open_store(cache or settings.cache.path or None)
    decisions = list(store.decisions(environment=environment, op=op))
    if json:
        print_json({"decisions": [decision_json(decision) for decision in decisions]})
        return
    out = console()
    if not decisions:
        out.print(f"no decisions in {store.name}", markup=False)
        return
    for place in dict.fromkeys(decision.environment for decision in decisions):
        out.print(f"environment {place}", markup=False)
        out.print(decision_table([(d, d.source) for d in decisions if d.environment == place]))
    out.print(f"{len(decisions)} decisions in {store.name}", markup=False)
