"""The operations of a store that speaks SQL, whether to a file or to a server."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Protocol, TypeVar

from sqlalchemy import Connection

from ..evidence import choose, storable
from ..faults import Fault, StoreError
from ..hosts import this_host
from ..misses import frequency
from ..records import DecisionRecord, EnvironmentRecord, KeyRecord, MissRecord
from ..validation import check_decision, check_environment, check_miss
from . import queries
from .bulk import Tally, batches, put_decisions, saying_what_is_stored

_Result = TypeVar("_Result")


class Transactions(Protocol):
    """Runs work in a transaction of its own."""

    def run(self, work: Callable[[Connection], _Result], *, write: bool = False) -> _Result:
        """What `work` returns; raises `StoreError`."""

    def close(self) -> None:
        """Gives connections back."""


class SqlStore:
    """The operations of a store that speaks SQL; how a transaction is had is its database's business."""

    def __init__(self, database: Transactions, host: str | None = None) -> None:
        self._database = database
        self._host = host or this_host()

    def publish(self, decision: DecisionRecord, environment: EnvironmentRecord) -> DecisionRecord:
        """Stores a decision at once, in the slot of its key, environment, source and host; returns it as stored.

        Raises:
            StoreError: It cannot be stored; nothing of it is.
            RefusedRowError: A field is out of bounds.
        """
        checked = check_decision(storable(replace(decision, host=decision.host or self._host)))
        known = check_environment(environment)
        if known.id != checked.environment:
            raise StoreError(
                f"decision of environment {checked.environment!r} with facts of {known.id!r}", Fault.FOREIGN
            )

        def work(connection: Connection) -> DecisionRecord:
            queries.put_environment(connection, known)
            return queries.put_decision(connection, checked)

        return self._database.run(work, write=True)

    def evidence(self, key: KeyRecord, environment: str) -> tuple[DecisionRecord, ...]:
        """Every decision for a key in an environment, whatever its source and host; raises `StoreError`."""
        return self._database.run(lambda connection: queries.evidence(connection, key, environment))

    def lookup(self, key: KeyRecord, environment: str) -> DecisionRecord | None:
        """The strongest decision whose winner is not known to fail, or None; raises `StoreError`."""
        return choose(self.evidence(key, environment))

    def decisions(self, *, environment: str | None = None, op: str | None = None) -> Iterator[DecisionRecord]:
        """Every decision, in the order of storing, read page by page; raises `StoreError`."""
        after: int | None = 0
        while after is not None:
            page, after = self._database.run(
                functools.partial(queries.page_of_decisions, after=after, environment=environment, op=op)
            )
            yield from page

    def environments(self) -> list[EnvironmentRecord]:
        """Every environment, by id; raises `StoreError`."""
        return self._database.run(queries.environments)

    def record_misses(self, misses: Iterable[MissRecord]) -> None:
        """Adds misses to their counts, all or none; raises `StoreError`."""
        checked = [check_miss(replace(miss, host=miss.host or self._host)) for miss in misses]

        def work(connection: Connection) -> None:
            for miss in checked:
                queries.put_miss(connection, miss)

        if checked:
            self._database.run(work, write=True)

    def misses(self, environment: str | None = None) -> list[MissRecord]:
        """Every miss, the most frequent first; raises `StoreError`."""
        counts = self._database.run(lambda connection: queries.misses(connection, environment))
        return sorted(counts, key=frequency)

    def each_miss(self) -> Iterator[MissRecord]:
        """Every miss, read page by page; raises `StoreError`."""
        after: int | None = 0
        while after is not None:
            page, after = self._database.run(functools.partial(queries.page_of_misses, after=after))
            yield from page

    def absorb(
        self,
        decisions: Iterable[DecisionRecord],
        environments: Iterable[EnvironmentRecord] = (),
        misses: Iterable[MissRecord] = (),
    ) -> Tally:
        """Merges what another store holds: of two decisions in one slot the later stays, of two miss counts the larger.

        Raises:
            StoreError: It cannot be stored. Some of it may be; absorbing it again does no harm.
        """
        tally = Tally()
        known = [check_environment(each) for each in environments]
        with saying_what_is_stored(tally):
            self._database.run(lambda connection: _put_environments(connection, known), write=True)
            for batch in batches(decisions):
                checked = [check_decision(storable(record)) for record in batch]
                tally += self._database.run(functools.partial(_put_batch, records=checked), write=True)
            for counted in batches(misses):
                counts = [check_miss(each) for each in counted]
                self._database.run(functools.partial(queries.merge_misses, records=counts), write=True)
        return tally

    def disputed(self) -> Iterator[list[DecisionRecord]]:
        """The decisions of every key about which there may be a contradiction; raises `StoreError`."""
        yield from self._groups(self._database.run(queries.disputed_keys))

    def newest(
        self, *, environment: str | None = None, op: str | None = None, like: str | None = None
    ) -> tuple[int, Iterator[list[DecisionRecord]]]:
        """The decisions by key, the key with the newest decision first, read page by page; raises `StoreError`.

        Args:
            environment: Only of this environment.
            op: Only of this op.
            like: Only of keys whose text holds this one, as `queries.key_text` has it.

        Returns:
            How many keys there are, and the decisions of each.
        """
        keys = self._database.run(functools.partial(queries.newest_keys, environment=environment, op=op, like=like))
        return len(keys), self._groups(keys)

    def key_hashes(self, *, environment: str | None = None, op: str | None = None, like: str | None = None) -> set[int]:
        """A number for each environment and key, the same in every store of this process; raises `StoreError`."""
        return self._database.run(functools.partial(queries.key_hashes, environment=environment, op=op, like=like))

    def by_key(
        self, *, environment: str | None = None, op: str | None = None, most: int | None = None
    ) -> Iterator[list[DecisionRecord]]:
        """The decisions of each environment and key, in the order of these, read page by page; raises `StoreError`.

        Args:
            environment: Only of this environment.
            op: Only of this op.
            most: Keys of a page.
        """
        after: tuple[object, ...] | None = ()
        while after is not None:
            page, after = self._database.run(
                functools.partial(queries.page_by_key, after=after, environment=environment, op=op, most=most)
            )
            yield from page

    def _groups(self, ids: Sequence[int]) -> Iterator[list[DecisionRecord]]:
        """The decisions of the keys that rows have, in the order of the rows."""
        for start in range(0, len(ids), queries.KEYS):
            yield from self._database.run(
                functools.partial(queries.decisions_beside, ids=ids[start : start + queries.KEYS])
            )

    def count(self) -> int:
        """How many decisions there are, unreadable ones included; raises `StoreError`."""
        return self._database.run(queries.count)

    def keep_only(self, *, environment: str | None = None, op: str | None = None) -> None:
        """Removes every decision and miss that is not of an environment and an op; raises `StoreError`."""
        self._database.run(lambda connection: queries.keep_only(connection, environment=environment, op=op), write=True)

    def sweep(self) -> int:
        """Removes measurements and environments of no decision, gives decisions of no environment one without facts.

        Returns:
            How many rows that took.

        Raises:
            StoreError: They cannot be changed; none is.
        """
        return self._database.run(queries.sweep, write=True)

    def prune(
        self, *, older_than: datetime | None = None, environment: str | None = None, op: str | None = None
    ) -> int:
        """Removes decisions and misses that meet every condition given; returns how many decisions.

        Raises:
            StoreError: They cannot be removed; none is.
        """
        conditions = {"older_than": older_than, "environment": environment, "op": op}
        if all(condition is None for condition in conditions.values()):
            return 0
        return self._database.run(
            lambda connection: queries.prune(connection, older_than=older_than, environment=environment, op=op),
            write=True,
        )

    def close(self) -> None:
        """Closes the file; the next use opens it again."""
        self._database.close()


def _put_environments(connection: Connection, environments: Iterable[EnvironmentRecord]) -> None:
    for environment in environments:
        queries.merge_environment(connection, environment)


def _put_batch(connection: Connection, records: list[DecisionRecord]) -> Tally:
    for environment in {record.environment for record in records}:
        queries.put_environment(connection, EnvironmentRecord(id=environment))
    return put_decisions(connection, records)
