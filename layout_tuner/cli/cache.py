"""`tuner cache`: share decision files between machines, and look after them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import console, plain, print_json, print_json_list, progress_bar

if TYPE_CHECKING:
    from layout_tuner.cache.places.folder import FolderStore
    from layout_tuner.cache.places.server import ServerStore
    from layout_tuner.cache.records import DecisionRecord, KeyRecord
    from layout_tuner.cache.sqlite.bulk import Tally
    from layout_tuner.cache.sqlite.file import Store

app = typer.Typer(
    name="cache",
    help="Share decision files between machines, and look after them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

CacheOption = Annotated[
    str | None, typer.Option("--cache", help="File of decisions, or a server's URL; default: the user's file.")
]
ConfigOption = Annotated[Path | None, typer.Option(help="Settings; default: tuner.toml here, if any.")]
EnvironmentOption = Annotated[str | None, typer.Option(help="Only this environment.")]
OpOption = Annotated[str | None, typer.Option(help="Only this op.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]

# Conflicts and differences that are listed for people; --json has all.
LINES = 50
_AGE_UNITS = {"h": "hours", "d": "days", "w": "weeks"}


@app.command("export")
def export(
    out: Annotated[Path | None, typer.Argument(help="The file to write.")] = None,
    pin: Annotated[
        Path | None, typer.Option(help="Write a pin file: readable, hashed, used instead of all else.")
    ] = None,
    cache: CacheOption = None,
    environment: EnvironmentOption = None,
    op: OpOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Write decisions to one self-contained, sealed, read-only file: the way to copy a file that is in use."""
    from layout_tuner.cache.sharing.pins import write_pins
    from layout_tuner.cache.sharing.share import believed_by_key, export_file

    if (out is None) == (pin is None):
        raise typer.BadParameter("name one file: OUT, or --pin FILE")
    with _existing(cache, config) as store:
        _require_decisions(store, environment, op)
        if pin is not None:
            number = 0
            with progress_bar() as progress:

                def chosen() -> Iterator[DecisionRecord]:
                    nonlocal number
                    for record in believed_by_key(store, environment=environment, op=op):
                        number += 1
                        progress("pinning", number, None)
                        yield record

                digest, path = write_pins(pin, chosen()), pin
        else:
            assert out is not None
            with progress_bar() as progress:
                written = export_file(store, out, environment=environment, op=op, progress=progress)
            digest, path, number = written.sha256, written.path, written.decisions
    if json:
        print_json({"path": str(path), "decisions": number, "sha256": digest})
    else:
        typer.echo(f"{plain(path)}: {number} decisions, sha256 {digest}")


@app.command("import")
def import_(
    files: Annotated[list[Path], typer.Argument(help="Exports, or files of decisions.")],
    cache: CacheOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Take over decisions of other machines; what they measured counts as imported from then on."""
    from layout_tuner.cache.sharing.share import import_file, require_shared

    # All of them are looked at before anything is made or changed.
    require_shared(files)
    tallies = {}
    with _store(cache, config) as store:
        for file in files:
            with progress_bar() as progress:
                tallies[str(file)] = import_file(store, file, progress=progress)
            if not json:
                typer.echo(f"{plain(file)}: {_tally_text(tallies[str(file)])}")
    if json:
        print_json({"imported": {file: _tally_json(tally) for file, tally in tallies.items()}})


@app.command("merge")
def merge(
    files: Annotated[list[Path], typer.Argument(help="Exports, or files of decisions.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The file to write.")],
    json: JsonOption = False,
) -> None:
    """Merge files into a new one, by evidence: their order does not matter."""
    from layout_tuner.cache.sharing.share import merge_files

    with progress_bar() as progress:
        merged = merge_files(files, out, allow_empty=False, progress=progress)
    if json:
        conflicts = (
            {
                "key": _key_text(conflict.one.key),
                "environment": conflict.one.environment,
                "hosts": [conflict.one.host, conflict.other.host],
                "reason": conflict.reason,
            }
            for conflict in merged.conflicts
        )
        print_json_list(
            "conflicts",
            conflicts,
            {
                "path": str(merged.exported.path),
                "decisions": merged.exported.decisions,
                "sha256": merged.exported.sha256,
                "rows": _tally_json(merged.tally),
                "conflicts_left_out": merged.disputes - len(merged.conflicts),
            },
        )
        return
    for conflict in merged.conflicts[:LINES]:
        key, place = plain(_key_text(conflict.one.key)), plain(conflict.one.environment)
        typer.echo(f"conflict: {key} in {place}: {plain(conflict.reason)}")
    if merged.disputes > LINES:
        typer.echo(f"{merged.disputes - LINES} more conflicts: see --json")
    typer.echo(f"{plain(merged.exported.path)}: {merged.exported.decisions} decisions, {merged.disputes} conflicts")


@app.command("diff")
def diff(
    one: Annotated[Path, typer.Argument(help="A file of decisions.")],
    other: Annotated[Path, typer.Argument(help="Another.")],
    json: JsonOption = False,
) -> None:
    """List the keys for which two files do not believe in the same candidate."""
    from rich.table import Table

    from layout_tuner.cache.sharing.share import differences, open_shared, require_shared

    require_shared((one, other))
    with open_shared(one) as first, open_shared(other) as second:
        differing = differences(first, second)
        if json:
            rows = (
                {
                    "environment": each.environment,
                    "key": _key_text(each.key),
                    "one": _choice_json(each.one),
                    "other": _choice_json(each.other),
                }
                for each in differing
            )
            print_json_list("differences", rows)
            return
        shown = list(islice(differing, LINES))
        more = sum(1 for _ in differing)
    if not shown:
        typer.echo("no differences")
        return
    table = Table("environment", "key", plain(one), plain(other))
    for each in shown:
        cells = (each.environment, _key_text(each.key), _choice_text(each.one), _choice_text(each.other))
        table.add_row(*map(plain, cells))
    console().print(table)
    if more:
        typer.echo(f"{more} more differences: see --json")


@app.command("prune")
def prune(
    older_than: Annotated[str | None, typer.Option(help="Only what is older: 12h, 30d, 8w.")] = None,
    environment: EnvironmentOption = None,
    op: OpOption = None,
    orphans: Annotated[
        bool, typer.Option("--orphans", help="Instead, put in order what the doctor calls orphans.")
    ] = False,
    cache: CacheOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Remove decisions that meet every condition given."""
    from layout_tuner.cache.sharing.share import prune as remove
    from layout_tuner.cache.sharing.share import sweep

    conditions = older_than is not None or environment is not None or op is not None
    if conditions == orphans:
        raise typer.BadParameter("name at least one of --older-than, --environment, --op, or --orphans alone")
    moment = None if older_than is None else _moment(older_than)
    with _store(cache, config, existing=True) as store:
        require_known_op(store.decisions(op=op), op)
        removed = sweep(store) if orphans else remove(store, older_than=moment, environment=environment, op=op)
    if json:
        print_json({"removed": removed})
    else:
        typer.echo(f"{removed} {'orphans' if orphans else 'decisions'} removed")


def examine_cache(cache: str | None, config: Path | None, json: bool, *, installation: bool = False) -> None:
    """Print what is wrong or doubtful with a decision file; exit status 1 where something is wrong.

    Args:
        cache: The file, or a server's URL; None takes the settings' one.
        config: Settings.
        json: Whether to print JSON.
        installation: Whether to say first what is wrong with the installation.
    """
    from layout_tuner.cache.sharing.doctor import Finding, examine, examine_server

    from ..installation import faults

    place = stated_path(cache, config)
    findings: list[Finding] = []
    if installation:
        found = faults()
        findings += [Finding(level="error", subject=each.subject, text=f"{each.text}: {each.cure}") for each in found]
        findings += [] if found else [Finding(level="ok", subject="installation", text="nothing is in the way")]
    findings += examine_server(place) if isinstance(place, str) else examine(place)
    if json:
        rows = [{"level": each.level, "subject": each.subject, "text": each.text} for each in findings]
        print_json({"path": _shown(place), "findings": rows})
    else:
        typer.echo(plain(_shown(place)))
        for each in findings:
            typer.echo(f"  {each.level:8} {each.subject:12} {plain(each.text)}")
    if any(each.level == "error" for each in findings):
        raise typer.Exit(1)


def stated_path(cache: str | None, config: Path | None) -> Path | str:
    """The file that a command reads, or a server's URL; one that was typed in has to exist.

    Raises:
        CacheError: It does not exist.
    """
    from layout_tuner.cache.places.opening import default_path, require_existing

    from ..config import Config

    if cache is not None:
        if "://" in cache:
            return cache
        path = Path(cache).expanduser()
        require_existing(path)
        return path
    stated = Config.load(config).cache.path
    return Path(stated).expanduser() if stated else default_path()


def _shown(place: Path | str) -> str:
    """A path or URL for people, without a password."""
    from layout_tuner.cache.places.server import ServerDatabase

    return ServerDatabase(place).name if isinstance(place, str) else str(place)


def _existing(cache: str | None, config: Path | None) -> AbstractContextManager[Store | FolderStore | ServerStore]:
    """The store for reading; raises where there is none, or where it is an export that was changed."""
    from layout_tuner.cache.places.opening import open_existing
    from layout_tuner.cache.places.server import ServerStore
    from layout_tuner.cache.sharing.share import require_unbroken

    place = stated_path(cache, config)
    if isinstance(place, Path) and place.is_file():
        require_unbroken(place)
    return closing(ServerStore(place, create=False) if isinstance(place, str) else open_existing(place))


def _store(
    cache: str | None, config: Path | None, *, existing: bool = False
) -> AbstractContextManager[Store | FolderStore | ServerStore]:
    """The store for writing, without a guard: where it fails, the command fails.

    Args:
        cache: The file, or a server's URL.
        config: Settings.
        existing: Whether the store has to exist and be sound.
    """
    from layout_tuner.cache.places.opening import (
        default_path,
        open_existing,
        open_path,
        require_no_export,
    )
    from layout_tuner.cache.places.server import ServerStore

    from ..config import Config

    if cache is not None and "://" in cache:
        return closing(ServerStore(cache, create=not existing))
    stated = cache or Config.load(config).cache.path
    path = Path(stated).expanduser() if stated else default_path()
    if existing:
        open_existing(path).close()
    require_no_export(path)
    return closing(open_path(path))


def require_known_op(decisions: Iterable[object], op: str | None) -> None:
    """Raises `ConfigError` for an op that has no decision and does not exist: a typo."""
    if op is None or "." in op or next(iter(decisions), None) is not None:
        return
    import layout_tuner.ops  # noqa: F401  registers every op

    from ..spec import registry

    registry.lookup(op)


def _require_decisions(store: Store | FolderStore | ServerStore, environment: str | None, op: str | None) -> None:
    """Raises `CacheError` where nothing is to be exported: a typo must not replace an export by an empty one."""
    from ..errors import CacheError

    if next(store.decisions(environment=environment, op=op), None) is not None:
        return
    stored = {(record.environment, record.key.op) for record in store.decisions()}
    if not stored:
        raise CacheError(f"{store.name}: holds no decisions")
    wanted = " and ".join(
        f"{name} {value!r}" for name, value in (("environment", environment), ("op", op)) if value is not None
    )
    there = "; ".join(
        f"{place!r}: {', '.join(sorted(op for where, op in stored if where == place))}"
        for place in sorted({where for where, _ in stored})
    )
    raise CacheError(f"{store.name}: no decisions of {wanted}; there are, by environment, {there}")


def _moment(text: str) -> datetime:
    """The moment that is an age (`30d`) before now; raises `typer.BadParameter`."""
    match = re.fullmatch(r"(\d{1,6})([hdw])", text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no age; wanted a number and h, d or w, as in 30d")
    try:
        return datetime.now(UTC) - timedelta(**{_AGE_UNITS[match[2]]: int(match[1])})
    except OverflowError:
        raise typer.BadParameter(f"{text!r} reaches back before the year 1") from None


def _tally_text(tally: Tally) -> str:
    text = f"{tally.added} added, {tally.replaced} replaced, {tally.kept} known already"
    return text + (f", {tally.refused} refused as unsound" if tally.refused else "")


def _tally_json(tally: Tally) -> dict[str, int]:
    return {"added": tally.added, "replaced": tally.replaced, "kept": tally.kept, "refused": tally.refused}


def _key_text(key: KeyRecord) -> str:
    from ..spec.keys import Key

    return str(Key(**{name: getattr(key, name) for name in Key.__dataclass_fields__}))


def _choice_text(record: DecisionRecord | None) -> str:
    return "-" if record is None else f"{record.candidate} ({record.source}, {record.host})"


def _choice_json(record: DecisionRecord | None) -> dict[str, str] | None:
    if record is None:
        return None
    return {
        "candidate": record.candidate,
        "revision": record.revision,
        "source": record.source,
        "host": record.host,
    }
