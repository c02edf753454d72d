"""Guards a store that may fail: trouble is logged once, memory takes over, and the store is tried again later."""

import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from layout_tuner.forking import ProcessLock

from ..evidence import choose
from ..faults import Fault, store_error
from ..interface import DecisionStore
from ..memory import MemoryStore
from ..merge import Slot, slot_of
from ..records import DecisionRecord, EnvironmentRecord, KeyRecord, MissRecord
from ..validation import RefusedRowError

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

FIRST_RETRY_S = 5.0
LAST_RETRY_S = 300.0


class GuardedStore:
    """The operations of a store, none of which raises anything but `RefusedRowError`.

    While the store cannot be used, what is published is kept in memory, answers lookups, and is written once the store
    answers again. The store is tried again after a pause that grows from outage to outage.
    """

    def __init__(
        self,
        name: str,
        opener: Callable[[Fault | None], DecisionStore],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens the store, or starts without it.

        Args:
            name: Where it keeps things, for people.
            opener: Opens it; is told the fault that ended its last use.
            clock: Seconds that only go forward.
        """
        self.name = name
        self._opener = opener
        self._clock = clock
        self._lock = ProcessLock()
        self._store: DecisionStore | None = None
        self._memory = MemoryStore()
        self._pending: dict[Slot, tuple[DecisionRecord, EnvironmentRecord]] = {}
        self._pending_misses = MemoryStore()
        self._fault: Fault | None = None
        self._said = False
        self._pause_s = FIRST_RETRY_S
        self._open_at = self._write_at = clock()
        self._opened()

    @property
    def healthy(self) -> bool:
        """Whether the last operation of the guarded store succeeded."""
        return not self._said

    @property
    def place(self) -> str:
        """Where what was published lies, for people: the file, or memory while the file cannot be used."""
        return self.name if self.healthy else f"memory only, {self.name} cannot be used"

    def behind(self) -> DecisionStore | None:
        """The guarded store, for long reads; None where it cannot be used now."""
        return self._opened()

    def publish(self, decision: DecisionRecord, environment: EnvironmentRecord) -> DecisionRecord:
        """Stores a decision, in memory where the store cannot be used; returns it as stored."""
        stored = self._try(lambda store: store.publish(decision, environment), write=True)
        if stored is not None:
            return stored
        kept = self._memory.publish(decision, environment)
        with self._lock:
            self._pending[slot_of(kept)] = (kept, environment)
        return kept

    def evidence(self, key: KeyRecord, environment: str) -> tuple[DecisionRecord, ...]:
        """Every decision for a key in an environment."""
        stored = self._try(lambda store: store.evidence(key, environment)) or ()
        return tuple(self._with_waiting(stored, lambda record: record.key == key and record.environment == environment))

    def lookup(self, key: KeyRecord, environment: str) -> DecisionRecord | None:
        """The strongest decision whose winner is not known to fail."""
        return choose(self.evidence(key, environment))

    def decisions(self, *, environment: str | None = None, op: str | None = None) -> Iterator[DecisionRecord]:
        """Every decision."""
        stored = self._try(lambda store: list(store.decisions(environment=environment, op=op))) or []
        yield from self._with_waiting(
            stored, lambda record: environment in (None, record.environment) and op in (None, record.key.op)
        )

    def environments(self) -> list[EnvironmentRecord]:
        """Every environment, by id."""
        by_id = {each.id: each for each in self._memory.environments()}
        by_id |= {each.id: each for each in self._try(lambda store: store.environments()) or []}
        return [by_id[name] for name in sorted(by_id)]

    def record_misses(self, misses: Iterable[MissRecord]) -> None:
        """Adds misses to their counts."""
        kept = list(misses)

        def record(store: DecisionStore) -> bool:
            store.record_misses(kept)
            return True

        if not self._try(record, write=True):
            with self._lock:
                self._pending_misses.record_misses(kept)

    def misses(self, environment: str | None = None) -> list[MissRecord]:
        """Every miss, the most frequent first."""
        both = MemoryStore()
        both.record_misses(self._try(lambda store: store.misses(environment)) or [])
        with self._lock:
            both.record_misses(self._pending_misses.misses(environment))
        return both.misses()

    def close(self) -> None:
        """Writes what waits, if that works at once, and gives the store back."""
        with self._lock:
            if self._waiting():
                self._try(lambda store: True, write=True)
            if self._store is not None:
                with contextlib.suppress(Exception):
                    self._store.close()

    def _with_waiting(
        self, stored: Iterable[DecisionRecord], wanted: Callable[[DecisionRecord], bool]
    ) -> list[DecisionRecord]:
        """The stored records, with the waiting ones in place of those that they will replace."""
        with self._lock:
            waiting = {slot: record for slot, (record, _) in self._pending.items() if wanted(record)}
        return [*(record for record in stored if slot_of(record) not in waiting), *waiting.values()]

    def _try(self, action: Callable[[DecisionStore], _Result], *, write: bool = False) -> _Result | None:
        """The result of an action on the store; None where the store cannot be used."""
        store = self._opened()
        if store is None or (write and self._clock() < self._write_at):
            return None
        try:
            if self._waiting():
                self._flush(store)
            result = action(store)
        except RefusedRowError:
            # What was asked is at fault, not the store.
            raise
        except Exception as error:
            self._failed(error)
            return None
        if self._said and (write or self._fault is not Fault.READ_ONLY):
            self._healed()
        return result

    def _opened(self) -> DecisionStore | None:
        """The store, opened if it is not and its time has come."""
        store = self._store
        if store is not None and not (self._fault is Fault.READ_ONLY and self._clock() >= self._write_at):
            return store
        with self._lock:
            if self._clock() < self._open_at:
                return self._store
            try:
                # What could only be read may be writable by now, which only opening it anew shows.
                if self._store is not None:
                    self._store.close()
                self._store = self._opener(self._fault)
            except Exception as error:
                self._failed(error)
            return self._store

    def _flush(self, store: DecisionStore) -> None:
        with self._lock:
            if self._clock() < self._write_at:
                return
            for slot, (record, environment) in list(self._pending.items()):
                store.publish(record, environment)
                del self._pending[slot]
            if waiting := self._pending_misses.misses():
                store.record_misses(waiting)
                self._pending_misses = MemoryStore()

    def _waiting(self) -> bool:
        """Whether there is something to write as soon as the store answers again."""
        return bool(self._pending) or bool(self._pending_misses.misses())

    def _failed(self, trouble: Exception) -> None:
        # What was not foreseen is trouble with the store like any other: an op goes on without it.
        error = store_error(self.name, trouble)
        with self._lock:
            self._fault = error.fault
            self._write_at = self._clock() + random.uniform(0.5, 1.0) * self._pause_s
            self._pause_s = min(2 * self._pause_s, LAST_RETRY_S)
            if error.fault is not Fault.READ_ONLY:
                self._open_at = self._write_at
                if self._store is not None:
                    with contextlib.suppress(Exception):
                        self._store.close()
                    self._store = None
            if not self._said:
                self._said = True
                log.warning("%s; decisions are kept in memory until it can be used again", error)

    def _healed(self) -> None:
        with self._lock:
            self._fault, self._said, self._pause_s = None, False, FIRST_RETRY_S
        log.info("%s: answers again", self.name)
