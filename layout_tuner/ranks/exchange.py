"""What ranks tell each other, through the store of their group.

Nothing here is a collective of a backend, which hangs where one rank does not come: a rank writes what it has to say,
and waits for what others wrote no longer than the group's timeout. A meeting is judged once, by whoever comes last or
runs out of patience first, and everybody reads that verdict. A log is one list that all ranks append to and read in
the same order, so that what follows from it is the same for all.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import ConfigError, LayoutTunerError

if dist.is_available():  # there are builds of torch without it
    from torch._C._distributed_c10d import HashStore, PrefixStore, Store
    from torch.distributed.rendezvous import rendezvous

Said = dict[str, Any]

# A wait holds the connection of a store, which other threads of a process may share: never for longer at a time.
SLICE_S = 1.0
# How long the process that may keep the store stays for the others to read it.
STAYS_S = 10.0


class StoreLostError(LayoutTunerError):
    """The store of the group does not answer: the process that keeps it, often that of rank 0, is gone."""


class Ranks:
    """The ranks of a group, as one of them sees them.

    Args:
        store: The store of the group; any of torch.distributed's.
        rank: This process's rank in the group.
        size: Number of ranks.
        timeout_s: Seconds of silence after which a rank is given up.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self.store = PrefixStore("layout_tuner", store)
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> Ranks:
        """The ranks of a group; None means the default group.

        Raises:
            ConfigError: There is no such group, this process is not in it, or it has no store.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError("group: torch.distributed is not initialised: call init_process_group first")
        chosen = dist.group.WORLD if group is None else group
        rank = -1 if chosen is None or not isinstance(chosen, dist.ProcessGroup) else dist.get_rank(chosen)
        if chosen is None or rank < 0:
            raise ConfigError(f"group: wanted a process group that this process is in, got {group!r}")
        store: Store | None = dist.distributed_c10d._world.pg_map[chosen][1]
        if store is None:
            raise ConfigError("group: its backend keeps no store that ranks could talk through")
        clone = getattr(store, "clone", None)  # a connection of its own, from torch 2.8 on
        return cls(store if clone is None else clone(), rank, dist.get_world_size(chosen), timeout_of(chosen, store))

    @classmethod
    def started(cls, timeout_s: float) -> Ranks:
        """The ranks that a launcher such as torchrun started. No backend is needed: they talk through its store.

        Raises:
            StoreLostError: The launcher's store is not there.
        """
        with answering():
            store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        return cls(store, rank, size, timeout_s)

    @classmethod
    def alone(cls) -> Ranks:
        """A group of one, where torch.distributed is not in use."""
        return cls(HashStore(), 0, 1, 1.0)

    def meet(
        self,
        kind: str,
        said: Said,
        judge: Callable[[Mapping[int, Said]], Said],
        *,
        expected: Collection[int] | None = None,
        patience_s: float | None = None,
    ) -> Meeting:
        """Say something, and wait for the verdict over what all ranks said.

        Args:
            kind: What the meeting is about; a rank that missed one joins the latest of its kind.
            said: What this rank says, as JSON takes it. Ranks that say the same store and read it once.
            judge: Makes the verdict of what was said, by rank; called in one rank only.
            expected: The ranks that are waited for; None means all of them.
            patience_s: Seconds to wait for them; None means the group's timeout.

        Returns:
            The meeting; its verdict is the same for every rank.

        Raises:
            StoreLostError: The store does not answer.
        """
        awaited = set(range(self.size)) if expected is None else set(expected)
        patience_s = self.timeout_s if patience_s is None else min(patience_s, self.timeout_s)
        with answering():
            store = PrefixStore(f"{kind}/{self._number(kind)}", self.store)
            text = json.dumps(said, sort_keys=True)
            name = hashlib.sha256(text.encode()).hexdigest()[:24]
            store.set(f"said/{name}", text)
            store.set(f"hello/{self.rank}", name)
            last = self.rank in awaited and store.add("arrived", 1) == len(awaited)
            if last or not waited(store, "verdict", patience_s):
                present = [rank for rank in range(self.size) if store.check([f"hello/{rank}"])]
                names = {rank: bytes(store.get(f"hello/{rank}")).decode() for rank in present}
                heard = {each: json.loads(store.get(f"said/{each}")) for each in set(names.values())}
                judged = judge({rank: heard[names[rank]] for rank in present})
                verdict = json.dumps({"present": present, "verdict": judged})
                store.compare_set("verdict", "", verdict)
            answer = json.loads(store.get("verdict"))
        return Meeting(store=store, present=tuple(answer["present"]), verdict=answer["verdict"], ranks=self)

    def worst(self, status: int, patience_s: float) -> int:
        """The greatest exit status of all ranks, at least 1 where one is missing.

        Rank 0, whose process may keep the store, stays until the others have read it.
        """
        try:
            meeting = self.meet("status", {"status": status}, worst_status, patience_s=patience_s)
            worst = max(int(meeting.verdict["status"]), int(bool(meeting.absent)), status)
            with answering():
                self.store.add("left", 1)
                deadline = time.monotonic() + STAYS_S
                while (
                    self.rank == 0 and self.store.add("left", 0) < len(meeting.present) and time.monotonic() < deadline
                ):
                    time.sleep(0.02)
        except StoreLostError:
            return max(status, 1)
        return worst

    def _number(self, kind: str) -> int:
        """The number of the meeting to join: the latest that this rank was not in, else a new one.

        Where a rank was late or missed one, it meets the others again at the next.
        """
        own = f"joined/{kind}/{self.rank}"
        joined = self.store.add(own, 0)
        latest = f"latest/{kind}"
        # Held as text, because a counter could be raised twice by two that both open the next.
        number = int(self.store.compare_set(latest, "", "0"))
        if number <= joined:
            number = int(self.store.compare_set(latest, str(number), str(joined + 1)))
        self.store.add(own, number - joined)
        return number


def worst_status(heard: Mapping[int, Said]) -> Said:
    """The judge of exit statuses."""
    return {"status": max(said["status"] for said in heard.values())}


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """A meeting that was judged.

    Attributes:
        store: What was written in it.
        present: The ranks that the verdict knows of; one that came later reads it all the same.
        verdict: What the judge made of what they said.
        ranks: The ranks of the group.
    """

    store: Store
    present: tuple[int, ...]
    verdict: Said
    ranks: Ranks

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks that did not come in time."""
        return tuple(rank for rank in range(self.ranks.size) if rank not in self.present)


class Log:
    """A list that ranks append to; an entry that one of them has read stays where it is for all.

    Args:
        store: Where it lies.
        name: Its name there.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.name = name
        self.entries: list[Said] = []

    def _place(self) -> str:
        return f"log/{self.name}/{len(self.entries)}"

    def read(self) -> list[Said]:
        """Read what was appended since the last time."""
        before = len(self.entries)
        with answering():
            while self.store.check([self._place()]):
                self.entries.append(json.loads(self.store.get(self._place())))
        return self.entries[before:]

    def append(self, entry: Said) -> bool:
        """Append an entry unless somebody else appended first; answers whether it was appended.

        Either way the entry that lies in that place is read by the next `read`.
        """
        text = json.dumps(entry, sort_keys=True)
        with answering():
            return bool(bytes(self.store.compare_set(self._place(), "", text)).decode() == text)

    def wait(self, seconds: float) -> bool:
        """Wait for the next entry; answers whether there is one."""
        with answering():
            return waited(self.store, self._place(), seconds)


@contextmanager
def answering() -> Iterator[None]:
    """Within it, trouble with the store is a `StoreLostError`."""
    try:
        yield
    except (RuntimeError, ConnectionError) as error:
        raise StoreLostError(f"the store of the group does not answer: {first_line(error)}") from error


def waited(store: Store, name: str, seconds: float) -> bool:
    """Whether a value is there, after waiting for it so long at most."""
    deadline = time.monotonic() + max(seconds, 0.0)
    while not store.check([name]):
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        start = time.monotonic()
        try:
            store.wait([name], timedelta(seconds=min(left, SLICE_S)))
        except RuntimeError:
            # Out of time, or out of a connection: the latter comes at once, and the next `check` raises.
            if time.monotonic() - start < 0.5 * min(left, SLICE_S):
                store.check([name])
                time.sleep(0.05)
    return True


def timeout_of(group: dist.ProcessGroup, store: Store) -> float:
    """The timeout of a group, in seconds; where its backend does not tell, that of its store."""
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout.total_seconds()
    timeout = getattr(store, "timeout", None)
    return (
        timeout.total_seconds() if isinstance(timeout, timedelta) else dist.constants.default_pg_timeout.total_seconds()
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).splitlines() or [type(error).__name__])[0]
