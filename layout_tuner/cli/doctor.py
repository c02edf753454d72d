"""`tuner doctor`: look a decision file over."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cache import CacheOption, examine_cache


def doctor(
    cache: CacheOption = None,
    config: Annotated[Path | None, typer.Option(help="Settings; default: tuner.toml here, if any.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Say what is wrong or doubtful with a decision file: integrity, orphans, schema, locks, file system."""
    examine_cache(cache, config, json)
