"""Adds up and merges counts of misses: calls that found no decision.

A count belongs to one key, environment and host. Counts of different calls are added; two states of one count are not,
because a host's count only grows and the larger state holds the smaller.
"""

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from .records import MAX_COUNT, KeyRecord, MissRecord


def frequency(miss: MissRecord) -> tuple[int, datetime, str]:
    """Sort key of misses: the most frequent first, then the oldest."""
    return -miss.count, miss.first_seen, str(miss.key)


def added(one: MissRecord, other: MissRecord) -> MissRecord:
    """Counts of different calls as one; a count that has reached its bound stays there."""
    return replace(_together(one, other), count=min(one.count + other.count, MAX_COUNT))


def merged(one: MissRecord, other: MissRecord) -> MissRecord:
    """Two states of one count as one."""
    return replace(_together(one, other), count=max(one.count, other.count))


def by_key(misses: Iterable[MissRecord]) -> list[MissRecord]:
    """The counts of all hosts added up: one record for each key and environment, the most frequent first.

    Args:
        misses: One record at most for each key, environment and host.
    """
    sums: dict[tuple[str, KeyRecord], MissRecord] = {}
    for miss in misses:
        place = (miss.environment, miss.key)
        sums[place] = added(sums[place], miss) if place in sums else miss
    return sorted(sums.values(), key=frequency)


def _together(one: MissRecord, other: MissRecord) -> MissRecord:
    """The later of two counts, with the earlier one's first moment."""
    # The count comes last: that of what was merged before is no longer that of the one whose reason it has.
    last = max(one, other, key=lambda miss: (miss.last_seen, miss.reason, miss.count))
    return replace(last, first_seen=min(one.first_seen, other.first_seen))
