"""`tuner show`: list stored decisions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .cache import CacheOption, require_known_op
from .common import console, print_json

if TYPE_CHECKING:
    from layout_tuner.cache.layers import LayeredStore, Resolution


def show(
    cache: CacheOption = None,
    op: Annotated[str | None, typer.Option(help="Only this op.")] = None,
    environment: Annotated[str | None, typer.Option(help="Only this environment.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings; default: tuner.toml here, if any.")] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Every layer's decisions, and which one is used.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """List what is stored: every decision with its candidates' times."""
    from .decisions import decision_json, decision_table

    store = _layers(cache, config)
    _warn_of_change(store.name)
    found = [each for each in store.resolutions(environment=environment, op=op) if layers or each.used]
    all_ops = [] if found else [each.record.key.op for each in store.resolutions() if layers or each.used]
    store.close()
    require_known_op(found, op)
    if json:
        rows = [decision_json(each.record) for each in found]
        if layers:
            rows = [row | {"layer": each.layer.name, "used": each.used} for row, each in zip(rows, found)]
        print_json({"decisions": rows})
        return
    out = console()
    if not found:
        asked = {"op": op, "environment": environment}
        chosen = [f"{name} {value!r}" for name, value in asked.items() if value is not None]
        wanted = f" of {' and '.join(chosen)}" if all_ops else ""
        there = f"; it holds {len(all_ops)}, of {', '.join(sorted(set(all_ops)))}" if all_ops else ""
        out.print(f"no decisions{wanted} in {store.name}{there}", markup=False)
        return
    for place in dict.fromkeys(each.record.environment for each in found):
        out.print(f"environment {place}", markup=False)
        here = [each for each in found if each.record.environment == place]
        out.print(decision_table([(each.record, word(each, layers)) for each in here]))
    out.print(f"{len(found)} decisions in {store.name}", markup=False)


def _layers(cache: str | None, config: Path | None) -> LayeredStore:
    """The layers that settings name, for reading, or a server alone where its URL was typed in."""
    from layout_tuner.cache.layers import LayeredStore, open_layers
    from layout_tuner.cache.memory import MemoryStore
    from layout_tuner.cache.server import ServerStore
    from layout_tuner.cache.store import require_existing
    from layout_tuner.config import Config

    settings = Config.load(config)
    if cache is not None:
        if "://" in cache:
            server = ServerStore(cache, create=False)
            return LayeredStore(MemoryStore(name=server.name), server=server)
        require_existing(Path(cache).expanduser())
    return open_layers(
        cache or settings.cache.path or None,
        shared=settings.cache.shared,
        url=settings.cache.url or None,
        pin=settings.tuning.pin or None,
        read_only=True,
    )


def _warn_of_change(name: str) -> None:
    """Says on stderr where what is shown is an export that was changed."""
    from layout_tuner.cache.share import require_unbroken
    from layout_tuner.errors import CacheError

    place = Path(name)
    if not place.is_file():
        return
    try:
        require_unbroken(place)
    except CacheError as error:
        typer.echo(f"warning: {error}", err=True)


def word(resolution: Resolution, layers: bool) -> str:
    """How a decision came about and, where asked for, the layer it lies in and whether it is used."""
    source: str = resolution.record.source
    if not layers:
        return source
    return f"{source}, {'used' if resolution.used else 'not used'}, {resolution.layer.name}"
