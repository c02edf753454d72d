"""`tuner show`: list stored decisions."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cache import CacheOption, require_known_op
from .common import console, plain, plain_lines, print_json_list

if TYPE_CHECKING:
    from layout_tuner.cache.layers import LayeredStore, Resolution
    from layout_tuner.cache.listing import Listing

LIMIT = 50
# Keys of one table: the widths of its columns need all of its rows at once.
TABLE = 50


def show(
    cache: CacheOption = None,
    op: Annotated[str | None, typer.Option(help="Only this op.")] = None,
    environment: Annotated[str | None, typer.Option(help="Only this environment.")] = None,
    like: Annotated[
        str | None,
        typer.Option(
            help='Only keys whose text holds this, such as "T=2048", "K=128 V=128 bfloat16 packed" or a form.'
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=0, help=f"So many keys, the newest first; 0: all. Default: {LIMIT}, with --json all."),
    ] = None,
    page: Annotated[int, typer.Option(min=1, help="Which so many.")] = 1,
    config: Annotated[Path | None, typer.Option(help="Settings; default: tuner.toml here, if any.")] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Every layer's decisions, and which one is used.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """List what is stored, the newest first: decisions with their candidates' times."""
    from layout_tuner.cache.listing import listing

    most = limit if limit is not None else 0 if json else LIMIT
    if page > 1 and not most:
        raise typer.BadParameter("--page goes through what --limit leaves out; with all of it there is one page")
    with closing(_layers(cache, config)) as store:
        _warn_of_change(store.name)
        asked = {"op": op, "environment": environment, "like": like}
        listed = listing(store, op=op, environment=environment, like=like)
        require_known_op(range(listed.keys), op)
        start = most * (page - 1)
        end = start + most if most else None
        shown = (
            [each for each in group if layers or each.used] for group in itertools.islice(listed.groups, start, end)
        )
        left = max(0, listed.keys - start - most) + min(start, listed.keys) if most else 0
        if json:
            more = {} if limit is None else {"left_out": left}
            print_json_list("decisions", (_json(each, layers) for group in shown for each in group), more)
            return
        if not listed.keys:
            console().print(_nothing(store, asked))
            return
        _print_paged(_tables(shown, store.name, left, page, layers))


def _json(resolution: Resolution, layers: bool) -> dict[str, Any]:
    from .decisions import decision_json

    row = decision_json(resolution.record)
    return row | {"layer": resolution.layer.name, "used": resolution.used} if layers else row


def _nothing(store: LayeredStore, asked: dict[str, str | None]) -> str:
    """The message for no decision that meets the conditions: it says what is stored instead."""
    from layout_tuner.cache.listing import listing

    there: Listing = listing(store)
    if not there.keys:
        return f"no decisions in {plain(store.name)}"
    chosen = " and ".join(f"{name} {value!r}" for name, value in asked.items() if value is not None)
    ops = sorted({group[0].record.key.op for group in itertools.islice(there.groups, 1000)})
    return f"no decisions of {chosen} in {plain(store.name)}; it holds {there.keys}, of {plain(', '.join(ops))}"


def _tables(groups: Iterable[list[Resolution]], name: str, left: int, page: int, layers: bool) -> Iterator[str]:
    """The text of one table after the other, then of a line with the numbers of decisions shown and keys left out."""
    from .decisions import decision_table

    out = console()
    count = 0
    groups = iter(groups)
    while some := list(itertools.islice(groups, TABLE)):
        resolutions = [each for group in some for each in group]
        count += len(resolutions)
        with out.capture() as captured:
            for place in dict.fromkeys(each.record.environment for each in resolutions):
                out.print(f"environment {plain(place)}")
                here = [each for each in resolutions if each.record.environment == place]
                out.print(decision_table([(each.record, word(each, layers)) for each in here]))
        yield captured.get()
    rest = f"; {left} keys left out: see --limit, --page {page + 1}, --op, --like" if left else ""
    yield f"{count} decisions in {plain(name)}{rest}\n"


def _print_paged(texts: Iterator[str]) -> None:
    """Prints texts as they come, on a terminal through the user's pager."""
    from ..config import pager

    command = pager()
    paged = sys.stdout.isatty() and sys.stdin is not None and sys.stdin.isatty() and shutil.which(command[0])
    if not paged:
        for text in texts:
            sys.stdout.write(text)
        return
    # What is read is not waited for: the first page is there while later ones are looked up.
    with subprocess.Popen(command, stdin=subprocess.PIPE, encoding="utf-8", errors="backslashreplace") as process:
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:
            for text in texts:
                process.stdin.write(text)


def _layers(cache: str | None, config: Path | None) -> LayeredStore:
    """The layers that settings name, for reading, or a server alone where its URL was typed in."""
    from layout_tuner.cache.layers import LayeredStore, open_layers
    from layout_tuner.cache.memory import MemoryStore
    from layout_tuner.cache.places.opening import require_existing
    from layout_tuner.cache.places.server import ServerStore

    from ..config import Config

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
    """Warns on stderr about an export that was changed."""
    from layout_tuner.cache.sharing.share import require_unbroken

    from ..errors import CacheError

    place = Path(name)
    if not place.is_file():
        return
    try:
        require_unbroken(place)
    except CacheError as error:
        typer.echo(f"warning: {plain_lines(error)}", err=True)


def word(resolution: Resolution, layers: bool) -> str:
    """How a decision came about and, where asked for, the layer it lies in and whether it is used."""
    source: str = resolution.record.source
    if not layers:
        return source
    return f"{source}, {'used' if resolution.used else 'not used'}, {resolution.layer.name}"
