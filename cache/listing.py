"""Lists the decisions of several layers by key, the key with the newest decision first, page by page."""

import heapq
import logging
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from datetime import datetime

from .faults import StoreError
from .interface import DecisionStore
from .layers import Layer, LayeredStore, Resolution
from .places.folder import FolderStore
from .places.guarded import GuardedStore
from .records import DecisionRecord, KeyRecord
from .sqlite.sql import SqlStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Keys and their decisions.

    Attributes:
        keys: How many keys there are.
        groups: The decisions of each, of all layers; to be gone through once.
    """

    keys: int
    groups: Iterator[list[Resolution]]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One source of a layer, with its keys and decisions."""

    layer: Layer
    keys: int
    groups: Iterator[list[DecisionRecord]]
    source: DecisionStore


def listing(
    store: LayeredStore, *, environment: str | None = None, op: str | None = None, like: str | None = None
) -> Listing:
    """The keys of all layers that meet every condition given, the newest first.

    Args:
        store: The layers.
        environment: Only of this environment.
        op: Only of this op.
        like: Only of keys whose text, as `queries.key_text` has it, holds this one, in capitals or not.

    Raises:
        StoreError: The first layer cannot be read; another one that cannot is logged and left out.
    """
    wanted = {"environment": environment, "op": op, "like": like}
    parts = [part for layer in store.layers for part in _parts(store, layer, wanted) if part.keys]
    if len(parts) <= 1:
        groups = (group for part in parts for group in part.groups)
        return Listing(keys=sum(part.keys for part in parts), groups=_resolved(store, groups))
    hashes: set[int] = set()
    for part in parts:
        hashes |= _hashes(part.source, wanted)
    return Listing(keys=len(hashes), groups=_resolved(store, _once(parts)))


def _parts(store: LayeredStore, layer: Layer, wanted: dict[str, str | None]) -> Iterator[_Part]:
    sources: list[DecisionStore] = [layer.store]
    if isinstance(layer.store, GuardedStore):
        behind = layer.store.behind()
        sources = [] if behind is None else [behind]
    if isinstance(layer.store, FolderStore):
        sources = list(layer.store.stores())
    for source in sources:
        try:
            if isinstance(source, SqlStore):
                keys, groups = source.newest(**wanted)
            else:
                held = _in_memory(source, wanted)
                keys, groups = len(held), iter(held)
        except StoreError as error:
            if layer is store.layers[0]:
                raise
            log.warning("%s; left out", error)
            continue
        yield _Part(layer=layer, keys=keys, groups=groups, source=source)


def _in_memory(source: DecisionStore, wanted: dict[str, str | None]) -> list[list[DecisionRecord]]:
    groups: dict[tuple[str, KeyRecord], list[DecisionRecord]] = {}
    like = (wanted["like"] or "").lower()
    for record in source.decisions(environment=wanted["environment"], op=wanted["op"]):
        if like in _key_text(record).lower():
            groups.setdefault((record.environment, record.key), []).append(record)
    return sorted(groups.values(), key=_newest, reverse=True)


def _key_text(record: DecisionRecord) -> str:
    """As `queries.key_text`."""
    key = record.key
    sizes = " ".join(f"{name}={getattr(key, name)}" for name in ("B", "T", "H", "HV", "K", "V"))
    return f"{key.op} {sizes} {key.dtype} {'packed' if key.varlen else 'dense'} {key.form} {record.environment}"


def _newest(group: list[DecisionRecord]) -> datetime:
    return max(record.created_at for record in group)


def _hashes(source: DecisionStore, wanted: dict[str, str | None]) -> set[int]:
    if isinstance(source, SqlStore):
        return source.key_hashes(**wanted)
    return {hash((group[0].environment, *astuple(group[0].key))) for group in _in_memory(source, wanted)}


def _once(parts: list[_Part]) -> Iterator[list[DecisionRecord]]:
    """The groups of all parts, each key once: where it was decided last."""
    seen: set[int] = set()
    for group in heapq.merge(*(part.groups for part in parts), key=_newest, reverse=True):
        place = hash((group[0].environment, *astuple(group[0].key)))
        if place not in seen:
            seen.add(place)
            yield group


def _resolved(store: LayeredStore, groups: Iterator[list[DecisionRecord]]) -> Iterator[list[Resolution]]:
    """Each key's decisions of all layers, and which of them is used."""
    alone = len(store.layers) == 1 and isinstance(store.layers[0].store, SqlStore)
    for group in groups:
        if alone:
            ranked = store.ranked((store.layers[0], record) for record in group)
        else:
            ranked = store.ranked(
                (layer, record)
                for layer in store.layers
                for record in layer.store.evidence(group[0].key, group[0].environment)
            )
        yield ranked
