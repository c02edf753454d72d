"""Decisions on their way between machines: export, import, merge, diff."""

import contextlib
import functools
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from datetime import datetime
from pathlib import Path

from sqlalchemy import Connection, insert

from layout_tuner.errors import CacheError

from ..atomic import replacing, require_replaceable
from ..evidence import choose, imported
from ..faults import Fault, StoreError
from ..hosts import this_host
from ..interface import DecisionStore
from ..merge import Conflict, conflicts
from ..places.folder import FolderStore, host_files
from ..records import DecisionRecord, KeyRecord, time_text, utc_now
from ..sqlite.bulk import Progress, Tally, silent, told
from ..sqlite.database import Database
from ..sqlite.file import Store, open_for_reading
from ..sqlite.migrations import product_version
from ..sqlite.models import Seal
from ..sqlite.seal import BLANK, SealState, seal, seal_state
from ..sqlite.sql import SqlStore

log = logging.getLogger(__name__)

MOST_CONFLICTS = 10_000
"""Conflicts that a merge keeps to be listed; beyond it they are counted."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What an export or a merge wrote.

    Attributes:
        path: The file.
        decisions: How many it holds.
        size_bytes: Its size.
        sha256: The hash in its seal.
    """

    path: Path
    decisions: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What a merge did.

    Attributes:
        exported: The file it wrote.
        tally: What became of the decisions.
        conflicts: Decisions in the result that contradict each other, the first `MOST_CONFLICTS` of them.
        disputes: How many such conflicts there are.
    """

    exported: Exported
    tally: Tally
    conflicts: tuple[Conflict, ...]
    disputes: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A key about which two files differ; None where a file has no decision.

    Attributes:
        environment: Id of the environment.
        key: The call.
        one: The decision that the first file believes.
        other: The decision that the second believes.
    """

    environment: str
    key: KeyRecord
    one: DecisionRecord | None
    other: DecisionRecord | None


def export_file(
    store: DecisionStore,
    out: str | os.PathLike[str],
    *,
    environment: str | None = None,
    op: str | None = None,
    progress: Progress = silent,
) -> Exported:
    """Writes decisions to one self-contained, sealed, read-only file, which appears whole or not at all.

    This is the way to copy a file that is in use: a copy made with `cp` lacks what SQLite keeps in the `-wal` file
    next to it.

    Args:
        store: Where from.
        out: The file.
        environment: Only decisions of this environment.
        op: Only decisions of this op.
        progress: Is told how far it is.

    Raises:
        CacheError: It cannot be read or written, or something that is no earlier export lies where it is to be written.
    """
    target = _target(out, _files_of(store))
    with replacing(target) as scratch:
        progress("copying", 0, None)
        if isinstance(store, Store):
            store.snapshot(scratch)
        else:
            with contextlib.closing(Store(scratch, journal="delete")) as copy:
                if isinstance(store, FolderStore):
                    store.pour_into(copy, progress)
                else:
                    found = store.decisions(environment=environment, op=op)
                    step = functools.partial(_told, progress, "copying", None)
                    copy.absorb(told(found, step), store.environments(), store.misses())
        _keep_only(scratch, environment, op)
        progress("sealing", 0, None)
        digest, decisions = _finish(scratch)
    return Exported(path=target, decisions=decisions, size_bytes=target.stat().st_size, sha256=digest)


def import_file(store: SqlStore | FolderStore, path: str | os.PathLike[str], *, progress: Progress = silent) -> Tally:
    """Takes over the decisions of a file. What another host measured counts as imported from then on.

    Args:
        store: Where to.
        path: The file.
        progress: Is told how far it is.

    Raises:
        CacheError: The file cannot be read, or was changed after it was exported.
    """
    target = store.own if isinstance(store, FolderStore) else store
    if isinstance(target, Store) and _same(Path(path), target.path):
        raise CacheError(f"{path}: is the file that decisions are to be brought to")
    with open_shared(Path(path)) as source:
        number = source.count()
        of_file = f"importing {path}"
        if isinstance(target, Store):
            return target.absorb_file(source, as_imported=True, progress=lambda done: progress(of_file, done, number))
        host = this_host()
        records = (imported(record, host) for record in source.decisions())
        tally = target.absorb(told(records, lambda done: progress(of_file, done, number)), source.environments())
        tally.refused = number - tally.seen
    return tally


def merge_files(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    allow_empty: bool = True,
    progress: Progress = silent,
) -> Merged:
    """Merges files into a new, sealed one, by evidence: in any order, in any grouping, however often, with the same
    result.

    Args:
        paths: The files.
        out: The new file; nothing but an earlier export is replaced.
        allow_empty: Whether one without decisions may be written.
        progress: Is told how far it is.

    Raises:
        CacheError: Files cannot be read, hold no decision among them, or the result cannot be written; nothing is.
    """
    target = _target(out, [Path(path) for path in paths])
    require_shared(paths)
    tally = Tally()
    shown: list[Conflict] = []
    disputes = 0
    with replacing(target) as scratch:
        with contextlib.closing(Store(scratch, journal="delete")) as merged:
            for path in paths:
                with open_shared(Path(path)) as source:
                    step = functools.partial(_told, progress, f"merging {path}", source.count())
                    try:
                        tally += merged.absorb_file(source, as_imported=False, progress=step)
                    except StoreError as error:
                        # What it says was stored lies in the scratch file, which goes.
                        cause = error.__cause__
                        raise cause if isinstance(cause, StoreError) else error from None
            if not allow_empty and next(merged.decisions(), None) is None:
                named = ", ".join(map(str, paths))
                raise CacheError(f"{named}: no sound decision to merge, so {target} is not written")
            progress("comparing", 0, None)
            for records in merged.disputed():
                for conflict in conflicts(records):
                    disputes += 1
                    if disputes <= MOST_CONFLICTS:
                        shown.append(conflict)
        progress("sealing", 0, None)
        digest, decisions = _finish(scratch)
    exported = Exported(path=target, decisions=decisions, size_bytes=target.stat().st_size, sha256=digest)
    return Merged(exported=exported, tally=tally, conflicts=tuple(shown), disputes=disputes)


def _told(progress: Progress, what: str, total: int | None, done: int) -> None:
    progress(what, done, total)


def differences(one: DecisionStore, other: DecisionStore) -> Iterator[Difference]:
    """Every key for which two stores do not believe in the same candidate, in their order; raises `StoreError`."""
    first, second = believed_by_key(one), believed_by_key(other)
    left, right = next(first, None), next(second, None)
    while left is not None or right is not None:
        # Texts and numbers sort in a file as they do here.
        places = [_place(record) for record in (left, right) if record is not None]
        place = min(places, key=lambda each: (each[0], *astuple(each[1])))
        mine = left if left is not None and _place(left) == place else None
        theirs = right if right is not None and _place(right) == place else None
        if mine is None or theirs is None or (mine.candidate, mine.revision) != (theirs.candidate, theirs.revision):
            yield Difference(environment=place[0], key=place[1], one=mine, other=theirs)
        left = next(first, None) if mine is not None else left
        right = next(second, None) if theirs is not None else right


def prune(
    store: SqlStore | FolderStore,
    *,
    older_than: datetime | None = None,
    environment: str | None = None,
    op: str | None = None,
) -> int:
    """Removes decisions that meet every condition given, on a network file system from this host's file.

    Returns:
        How many.

    Raises:
        StoreError: They cannot be removed; none is.
    """
    target = store.own if isinstance(store, FolderStore) else store
    return target.prune(older_than=older_than, environment=environment, op=op)


def sweep(store: SqlStore | FolderStore) -> int:
    """As `SqlStore.sweep`, on a network file system in this host's file."""
    return (store.own if isinstance(store, FolderStore) else store).sweep()


@contextlib.contextmanager
def open_shared(path: Path) -> Iterator[Store]:
    """A file from elsewhere, for reading.

    Raises:
        CacheError: It cannot be read, or was changed after it was exported.
    """
    require_file(path)
    state = require_unbroken(path)
    if state is SealState.NONE and not Path(f"{path}-wal").exists():
        log.info("%s: carries no seal, so it is no export; whether it is complete cannot be told", path)
    opened = Store(path, immutable=True) if state is SealState.SOUND else open_for_reading(path)
    with contextlib.closing(opened) as store:
        yield store


def require_shared(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Raises one `StoreError` that names every file among these which cannot be read as `open_shared` does."""
    faults = []
    for path in paths:
        try:
            with open_shared(Path(path)):
                pass
        except CacheError as error:
            faults.append(error)
    if faults:
        kinds = [getattr(error, "fault", Fault.UNAVAILABLE) for error in faults]
        # What was given wrongly outweighs what another time may go well.
        kind = next((kind for kind in kinds if kind not in (Fault.BUSY, Fault.READ_ONLY)), kinds[0])
        raise StoreError("\n".join(dict.fromkeys(map(str, faults))), kind) from faults[0]


def require_unbroken(path: Path) -> SealState:
    """What a file's seal says; one in use has none. Not for a file that this process has open for writing.

    Raises:
        CacheError: It was changed after it was exported, or cannot be read.
    """
    if Path(f"{path}-wal").exists():
        return SealState.NONE
    state = seal_state(path)
    if state is SealState.BROKEN:
        raise StoreError(f"{path}: was changed after it was exported (its seal is broken)", Fault.DAMAGED)
    return state


def require_file(path: Path) -> None:
    """Raises `StoreError` unless a path is a file that can be brought from elsewhere."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is no regular file" if path.exists() else "no such file"
        raise StoreError(f"{path}: {what}", Fault.UNAVAILABLE)


def _target(out: str | os.PathLike[str], sources: Iterable[Path]) -> Path:
    """The path to write. Nothing but an earlier export is written over, and no file that the result comes from.

    Over a file in use, SQLite would mix the new one with what lies beside it.
    """
    target = Path(out)
    instead = "write elsewhere, or bring decisions to it with `tuner cache import`"
    if any(_same(target, source) for source in sources):
        raise CacheError(f"{target}: is read and would be overwritten; {instead}")
    for suffix in ("-wal", "-journal"):
        if Path(f"{target}{suffix}").exists():
            raise CacheError(f"{target}: is in use; {instead}")
    require_replaceable(target)
    if target.exists() and target.stat().st_size and seal_state(target) is SealState.NONE:
        what = f"is a file of decisions and no export; {instead}" if _ours(target) else "is there and no export"
        raise CacheError(f"{target}: {what}")
    return target


def _ours(path: Path) -> bool:
    """Whether a file that is no export holds decisions."""
    try:
        open_for_reading(path).close()
    except StoreError as error:
        return error.fault not in (Fault.FOREIGN, Fault.DAMAGED)
    return True


def _files_of(store: DecisionStore) -> list[Path]:
    """The files that a store reads."""
    if isinstance(store, FolderStore):
        return host_files(store.path)
    return [store.path] if isinstance(store, Store) else []


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _keep_only(path: Path, environment: str | None, op: str | None) -> None:
    if environment is None and op is None:
        return
    with contextlib.closing(Store(path, journal="delete")) as store:
        store.keep_only(environment=environment, op=op)


def _finish(path: Path) -> tuple[str, int]:
    """Makes a finished file of a scratch one: in rollback mode, compact, sealed, read-only."""
    database = Database(path, journal="delete")
    with contextlib.closing(database):
        row = {
            "id": 1,
            "seal": BLANK,
            "sealed_at": time_text(utc_now()),
            "host": this_host(),
            "product_version": product_version(),
        }

        def blank(connection: Connection) -> int:
            connection.exec_driver_sql("DELETE FROM seals")
            connection.execute(insert(Seal), row)
            return int(connection.exec_driver_sql("SELECT count(*) FROM decisions").scalar_one())

        decisions = database.run(blank, write=True)
        if _free_pages(database):
            database.vacuum()
    digest = seal(path)
    os.chmod(path, path.stat().st_mode & 0o444)
    return digest, decisions


def _free_pages(database: Database) -> int:
    """Pages of a file that hold nothing."""
    return database.run(lambda connection: int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()))


def believed_by_key(
    store: DecisionStore, *, environment: str | None = None, op: str | None = None
) -> Iterator[DecisionRecord]:
    """The decision that is believed for each environment and key, in the order of these; raises `StoreError`."""
    by_key = store.by_key if isinstance(store, (SqlStore, FolderStore)) else functools.partial(_by_key, store)
    for records in by_key(environment=environment, op=op):
        chosen = choose(records)
        if chosen is not None:
            yield chosen


def _by_key(store: DecisionStore, *, environment: str | None, op: str | None) -> Iterable[list[DecisionRecord]]:
    groups: dict[tuple[str, KeyRecord], list[DecisionRecord]] = {}
    for record in store.decisions(environment=environment, op=op):
        groups.setdefault(_place(record), []).append(record)
    order = sorted(groups, key=lambda place: (place[0], *astuple(place[1])))
    return [groups[place] for place in order]


def _place(record: DecisionRecord) -> tuple[str, KeyRecord]:
    return record.environment, record.key
