"""A store that lasts as long as the process."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from layout_tuner.forking import ProcessLock

from .evidence import choose, storable, succeed
from .hosts import this_host
from .misses import added, frequency
from .records import DecisionRecord, EnvironmentRecord, KeyRecord, MissRecord
from .validation import check_decision, check_environment, check_miss


class MemoryStore:
    """Decisions in memory, with the operations of a file."""

    def __init__(self, host: str | None = None, *, name: str = "memory") -> None:
        self._name = name
        self._host = host or this_host()
        self._lock = ProcessLock()
        self._environments: dict[str, EnvironmentRecord] = {}
        self._decisions: dict[tuple[str, KeyRecord], dict[tuple[str, str], DecisionRecord]] = {}
        self._misses: dict[tuple[str, KeyRecord, str], MissRecord] = {}

    @property
    def name(self) -> str:
        """For people."""
        return self._name

    def publish(self, decision: DecisionRecord, environment: EnvironmentRecord) -> DecisionRecord:
        """Stores a decision and returns it as stored."""
        record = check_decision(storable(replace(decision, host=decision.host or self._host)))
        known = check_environment(environment)
        with self._lock:
            self._environments.setdefault(known.id, known)
            slots = self._decisions.setdefault((record.environment, record.key), {})
            slot = (record.source, record.host)
            if slot in slots:
                record = succeed(slots[slot], record)
            slots[slot] = record
        return record

    def evidence(self, key: KeyRecord, environment: str) -> tuple[DecisionRecord, ...]:
        """Every decision for a key in an environment."""
        with self._lock:
            return tuple(self._decisions.get((environment, key), {}).values())

    def lookup(self, key: KeyRecord, environment: str) -> DecisionRecord | None:
        """The strongest decision whose winner is not known to fail."""
        return choose(self.evidence(key, environment))

    def decisions(self, *, environment: str | None = None, op: str | None = None) -> Iterator[DecisionRecord]:
        """Every decision."""
        with self._lock:
            records = [record for slots in self._decisions.values() for record in slots.values()]
        for record in records:
            if environment in (None, record.environment) and op in (None, record.key.op):
                yield record

    def environments(self) -> list[EnvironmentRecord]:
        """Every environment, by id."""
        with self._lock:
            return sorted(self._environments.values(), key=lambda environment: environment.id)

    def record_misses(self, misses: Iterable[MissRecord]) -> None:
        """Adds misses to their counts."""
        checked = [check_miss(replace(miss, host=miss.host or self._host)) for miss in misses]
        with self._lock:
            for miss in checked:
                slot = (miss.environment, miss.key, miss.host)
                self._misses[slot] = added(self._misses[slot], miss) if slot in self._misses else miss

    def misses(self, environment: str | None = None) -> list[MissRecord]:
        """Every miss, the most frequent first."""
        with self._lock:
            counts = [miss for miss in self._misses.values() if environment in (None, miss.environment)]
        return sorted(counts, key=frequency)

    def close(self) -> None:
        """Nothing to give back."""
