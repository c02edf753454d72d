"""`tuner doctor`: look the installation and a decision file over."""

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
    """Say what is wrong or doubtful with the installation and with a decision file.

    Of the former: Triton's two distributions, torch_npu, CANN, Python; of the latter: integrity, orphans, schema,
    locks, file system. tuner selftest tries the device.
    """
    examine_cache(cache, config, json, installation=True)
