"""The layers of decisions: the user's file, a server, site files, the file that comes with the package, or a pin file.

Evidence decides first: pinned > forced > own measured > imported measured > predicted. Of equal evidence, the nearer
layer wins.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .evidence import SOURCE_RANK, decides, failures, imported, rights, strength, with_failure
from .faults import Fault, StoreError
from .hosts import this_host
from .interface import DecisionStore
from .memory import MemoryStore
from .merge import Evidence
from .misses import by_key, frequency
from .names import resolved
from .places.folder import host_files
from .places.guarded import GuardedStore
from .places.opening import open_existing, open_store, stated_path
from .places.server import JOB_PATIENCE_S, ServerStore, parse_url
from .records import DecisionRecord, EnvironmentRecord, KeyRecord, MeasurementRecord, MissRecord
from .sharing.pins import read_pins
from .sqlite.file import Store
from .sqlite.seal import warn_about

log = logging.getLogger(__name__)

PACKAGED = Path(__file__).with_name("packaged.sqlite")
"""Decisions that ship with the package, where it ships any."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer.

    Attributes:
        kind: `user`, `server`, `site`, `packaged` or `pins`.
        store: What it holds.
    """

    kind: str
    store: DecisionStore

    @property
    def name(self) -> str:
        """Kind and place, for people."""
        return f"{self.kind}: {self.store.name}"


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """A decision and where it came from.

    Attributes:
        record: The decision; its source is what it counts as here, so another host's `measured` reads `imported`.
        layer: The layer that holds it.
        used: Whether it is the one that is used for its key.
    """

    record: DecisionRecord
    layer: Layer
    used: bool


class LayeredStore:
    """The layers as one store. Decisions are written to the user's file and to the server; other layers are only read.

    Attributes:
        layers: Every layer, the nearest first.
        pin_hash: Hash of the pin file, where one is used; nothing else then answers.
    """

    def __init__(
        self,
        user: DecisionStore,
        *,
        server: DecisionStore | None = None,
        sites: Sequence[DecisionStore] = (),
        packaged: DecisionStore | None = None,
        pins: DecisionStore | None = None,
        pin_hash: str = "",
        host: str | None = None,
    ) -> None:
        self._host = host or this_host()
        self._user = user
        self._server = server
        self.pin_hash = pin_hash
        stores = [("user", user), ("server", server), *(("site", site) for site in sites), ("packaged", packaged)]
        if pins is not None:
            stores = [("pins", pins)]
        self.layers = tuple(Layer(kind=kind, store=store) for kind, store in stores if store is not None)

    @property
    def name(self) -> str:
        """The layer that is written."""
        return self._user.name

    @property
    def kept(self) -> bool:
        """Whether what was published lies in the user's file, rather than in memory alone."""
        return not isinstance(self._user, GuardedStore) or self._user.healthy

    @property
    def place(self) -> str:
        """Where what was published lies, for people: the file, or memory while the file cannot be used."""
        return self._user.place if isinstance(self._user, GuardedStore) else self.name

    def resolve(
        self, key: KeyRecord, environments: Sequence[str], *, known: Mapping[str, str] | Iterable[str] | None = None
    ) -> Resolution | None:
        """The decision for a key.

        Args:
            key: The call.
            environments: Ids of environments to ask, one after the other; the first that has a decision answers.
            known: Ids of the candidates that exist; decisions for others are passed over. With their revisions,
                what others say of them is not believed where it would leave none.

        Returns:
            The decision and its layer, or None.
        """
        wanted = None if known is None else dict(known) if isinstance(known, Mapping) else dict.fromkeys(known, "")
        for environment in environments:
            if resolution := self._resolve(key, environment, wanted):
                return resolution
        return None

    def lookup(self, key: KeyRecord, environment: str) -> DecisionRecord | None:
        """The decision for a key in an environment, its source as it counts here."""
        resolution = self.resolve(key, (environment,))
        return resolution.record if resolution else None

    def evidence(self, key: KeyRecord, environment: str) -> tuple[DecisionRecord, ...]:
        """Every decision for a key in an environment, of all layers, their sources as they count here."""
        return tuple(record for _, record in self._evidence(key, environment, self.layers))

    def publish(self, decision: DecisionRecord, environment: EnvironmentRecord) -> DecisionRecord:
        """Stores a decision in the user's file and on the server."""
        stored = self._user.publish(decision, environment)
        if self._server is not None:
            self._server.publish(stored, environment)
        return stored

    def quarantine(self, record: DecisionRecord, failure: MeasurementRecord) -> None:
        """Stores that a decision's winner failed; while the failure is believed, the decision is not used.

        Args:
            record: The decision that was used.
            failure: How its winner failed. The fault of a device says nothing about a candidate and is not stored.
        """
        if failure.failure == "device":
            return
        facts = next((each for each in self.environments() if each.id == record.environment), None)
        environment = facts or EnvironmentRecord(id=record.environment)
        self._user.publish(with_failure(record, failure, self._host), environment)

    def decisions(self, *, environment: str | None = None, op: str | None = None) -> Iterator[DecisionRecord]:
        """The decision that is used for each key."""
        for resolution in self.resolutions(environment=environment, op=op):
            if resolution.used:
                yield resolution.record

    def resolutions(self, *, environment: str | None = None, op: str | None = None) -> Iterator[Resolution]:
        """Every decision of every layer, and whether it is the one that is used for its key."""
        groups: dict[tuple[str, KeyRecord], list[tuple[Layer, DecisionRecord]]] = {}
        for layer in self.layers:
            for record in layer.store.decisions(environment=environment, op=op):
                groups.setdefault((record.environment, record.key), []).append((layer, record))
        for group in groups.values():
            yield from self.ranked(group)

    def ranked(self, group: Iterable[tuple[Layer, DecisionRecord]]) -> list[Resolution]:
        """The decisions of one key with the layers that hold them: as what each counts, and which one is used."""
        counted = [(layer, self._counted(layer, record)) for layer, record in group]
        best = self._best(counted)
        return [
            Resolution(record=record, layer=layer, used=best is not None and record is best[1])
            for layer, record in counted
        ]

    def environments(self) -> list[EnvironmentRecord]:
        """Every environment of every layer, by id."""
        by_id: dict[str, EnvironmentRecord] = {}
        for layer in self.layers:
            by_id = {each.id: each for each in layer.store.environments()} | by_id
        return [by_id[name] for name in sorted(by_id)]

    def failures(
        self, key: KeyRecord, environment: str, *, known: Mapping[str, str] | None = None
    ) -> dict[tuple[str, str], MeasurementRecord]:
        """The failures recorded in all layers for a key in an environment, by candidate and revision.

        Only those still believed: compile errors, overflows and wrong results as long as the revision and the
        environment last, with its compiler; want of memory and timeouts for a time; faults of a device never.

        Args:
            key: The call.
            environment: Where.
            known: Revisions of the candidates that exist, by id. Where others say that every one of them fails, only
                what this host saw itself counts: one file must not keep a key from being tuned for good.
        """
        return failures(record for _, record in self._heard(self._evidence(key, environment, self.layers), known))

    def rights(self, key: KeyRecord, environment: str) -> set[tuple[str, str, str]]:
        """What was found right for a key in an environment, of all layers, as `evidence.rights`."""
        return rights(record for _, record in self._evidence(key, environment, self.layers))

    def record_misses(self, misses: Iterable[MissRecord]) -> None:
        """Adds misses to their counts, in the user's file and on the server.

        Any number of processes may add misses at once: none is lost and none counted twice.
        """
        kept = [miss if miss.host else replace(miss, host=self._host) for miss in misses]
        self._user.record_misses(kept)
        if self._server is not None:
            self._server.record_misses(kept)

    def misses(self, environment: str | None = None) -> list[MissRecord]:
        """Every miss of every host that the user's file and the server know, the most frequent first."""
        both = Evidence()
        for store in (self._user, self._server):
            for miss in store.misses(environment) if store is not None else ():
                both.add_miss(miss)
        return sorted(both.misses.values(), key=frequency)

    def missed(self, environment: str | None = None) -> list[MissRecord]:
        """The misses of all hosts added up: one record for each key and environment, the most frequent first."""
        return by_key(self.misses(environment))

    def close(self) -> None:
        """Closes every layer."""
        for store in {
            id(each): each for each in (self._user, self._server, *(layer.store for layer in self.layers))
        }.values():
            if store is not None:
                store.close()

    def _resolve(self, key: KeyRecord, environment: str, known: Mapping[str, str] | None) -> Resolution | None:
        near = [layer for layer in self.layers if layer.kind != "server"]
        evidence = self._evidence(key, environment, near)
        # The server is asked where the near layers miss, not for every key of every process.
        server = next((layer for layer in self.layers if layer.kind == "server"), None)
        best = self._best(evidence, known)
        if server is not None and (best is None or SOURCE_RANK[best[1].source] < SOURCE_RANK["imported"]):
            remote = self._evidence(key, environment, [server])
            evidence += remote
            best = self._best(evidence, known)
            if best is not None and best[0] is server:
                self._keep(best[1], server)
        return None if best is None else Resolution(record=best[1], layer=best[0], used=True)

    def _keep(self, record: DecisionRecord, server: Layer) -> None:
        """Copies a decision of the server into the user's file, which answers while the server is away."""
        facts = next((each for each in server.store.environments() if each.id == record.environment), None)
        self._user.publish(record, facts or EnvironmentRecord(id=record.environment))

    def _evidence(
        self, key: KeyRecord, environment: str, layers: Iterable[Layer]
    ) -> list[tuple[Layer, DecisionRecord]]:
        return [
            (layer, self._counted(layer, record))
            for layer in layers
            for record in layer.store.evidence(key, environment)
        ]

    def _counted(self, layer: Layer, record: DecisionRecord) -> DecisionRecord:
        """The record with the source that it counts as: `measured` only if this user or this host measured it."""
        if layer.kind == "user":
            return record
        return imported(record, self._host if layer.kind == "server" else "")

    def _heard(
        self, evidence: Sequence[tuple[Layer, DecisionRecord]], known: Mapping[str, str] | None
    ) -> Sequence[tuple[Layer, DecisionRecord]]:
        """The evidence that counts: only this host's own, where that of others would leave no candidate to run."""
        if not known or not known.items() <= failures(record for _, record in evidence).keys():
            return evidence
        return [each for each in evidence if each[0].kind == "user" and each[1].host == self._host]

    def _best(
        self, evidence: Sequence[tuple[Layer, DecisionRecord]], known: Mapping[str, str] | None = None
    ) -> tuple[Layer, DecisionRecord] | None:
        evidence = self._heard(evidence, known)
        bad = failures(record for _, record in evidence)
        usable = [
            each
            for each in evidence
            if decides(each[1])
            and (each[1].candidate, each[1].revision) not in bad
            and (known is None or each[1].candidate in known)
        ]
        if len(usable) <= 1:
            return usable[0] if usable else None
        order = {id(layer): -place for place, layer in enumerate(self.layers)}
        return max(usable, key=lambda each: (SOURCE_RANK[each[1].source], order[id(each[0])], strength(each[1])))


def open_layers(
    path: str | os.PathLike[str] | None = None,
    *,
    shared: Sequence[str | os.PathLike[str]] = (),
    url: str | None = None,
    pin: str | os.PathLike[str] | None = None,
    read_only: bool = False,
) -> LayeredStore:
    """The layers that settings name. A layer that cannot be used is logged once and left out.

    Args:
        path: The user's file; None means the default one.
        shared: Site files, the nearest first; they are only read.
        url: A server, as `postgresql+psycopg://user@host/name`.
        pin: A pin file: nothing else answers then.
        read_only: To look at what is stored: nothing is made or changed, and trouble with the user's file is raised.

    Raises:
        CacheError: The pin file cannot be used, or the URL is none. Both would silently change what runs.
    """
    pins, pin_hash = (None, "") if pin is None else open_pins(pin)
    if url is not None:
        parse_url(url)
    user = stated_path(path)
    return LayeredStore(
        _looked_at(user) if read_only else open_store(user),
        server=None if url is None else _guarded_server(url, create=not read_only),
        sites=[_site(each) for each in map(stated_path, shared) if each != user],
        packaged=_site(PACKAGED) if PACKAGED.exists() else None,
        pins=pins,
        pin_hash=pin_hash,
    )


def _looked_at(path: Path) -> DecisionStore:
    """The user's file for reading; an empty store where there is no file yet."""
    try:
        begun = path.stat().st_size > 0 if path.is_file() else path.exists() or bool(host_files(resolved(path)))
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}", Fault.UNAVAILABLE) from error
    return open_existing(path) if begun else MemoryStore(name=str(path))


def open_pins(path: str | os.PathLike[str]) -> tuple[MemoryStore, str]:
    """The decisions of a pin file, and its hash; raises `CacheError`."""
    digest, decisions = read_pins(path)
    store = MemoryStore()
    for record in decisions:
        store.publish(record, EnvironmentRecord(id=record.environment))
    log.info("%s: %d pinned decisions, sha256 %s; nothing else is used", path, len(decisions), digest)
    return store, digest


def _guarded_server(url: str, *, create: bool) -> GuardedStore:
    return GuardedStore("server", lambda fault: ServerStore(url, create=create, patience_s=JOB_PATIENCE_S))


def _site(path: Path) -> GuardedStore:
    def opened(fault: Fault | None) -> Store:
        if fault is None:
            warn_about(path)
        return Store(path, immutable=True)

    return GuardedStore(str(path), opened)
