"""Ranks: processes that stay, and run one scenario after the other in a gloo group made for it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PATIENCE_S = 120.0

Scenario = Callable[..., Any]


class Crew:
    """Processes that are ranks; one that a scenario killed is started anew for the next."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.members: list[tuple[BaseProcess, Connection]] = []
        self.groups = 0

    def run(self, folder: Path, size: int, scenario: Scenario, *, timeout_s: float = 60.0, **named: Any) -> list[Any]:
        """What a scenario returned in each rank; None for a rank that died.

        Args:
            folder: For the file through which the ranks meet, and for theirs.
            size: Number of ranks.
            scenario: A function of a module that ranks can import: takes its rank, the folder and the named arguments.
            timeout_s: The group's timeout.
            named: Arguments of the scenario.
        """
        self.members = [member for member in self.members if member[0].is_alive()]
        while len(self.members) < size:
            mine, theirs = self.context.Pipe()
            process = self.context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.members.append((process, mine))
        for _, connection in self.members[:size]:
            connection.send(None)
        for _, connection in self.members[:size]:  # all of them have started: what a test times is not their imports
            assert connection.poll(PATIENCE_S)
            assert connection.recv() == "ready"
        self.groups += 1
        place = f"file://{folder}/group{self.groups}"
        for rank, (_, connection) in enumerate(self.members[:size]):
            connection.send((place, folder, rank, size, timeout_s, scenario, named))
        answers: list[Any] = [None] * size
        waiting = {connection: rank for rank, (_, connection) in enumerate(self.members[:size])}
        deadline = time.monotonic() + PATIENCE_S
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(waiting.values())} did not come to an end"
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    right, answers[rank] = connection.recv()
                except EOFError:
                    continue
                assert right, f"rank {rank}:\n{answers[rank]}"
        return answers

    def end(self) -> None:
        """End the processes."""
        for process, connection in self.members:
            connection.close()
            process.kill()
            process.join()


def serve(connection: Connection) -> None:
    """What a rank's process does."""
    import torch
    import torch.distributed as dist

    import layout_tuner.ops  # noqa: F401  compiled once, whatever the scenario

    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)
    while True:
        try:
            given = connection.recv()
        except EOFError:
            return
        if given is None:
            connection.send("ready")
            continue
        place, folder, rank, size, timeout_s, scenario, named = given
        try:
            dist.init_process_group(
                "gloo", init_method=place, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
            )
            dist.barrier()  # else one that is done at once could leave while others still connect to it
            answer = True, scenario(rank, folder, **named)
        except BaseException:
            answer = False, traceback.format_exc()
        from layout_tuner import syncing
        from layout_tuner.dispatch import counters, router

        router.clear()
        router.current().prepared.clear()
        counters.reset()
        syncing.forget()
        connection.send(answer)
        if dist.is_initialized():
            dist.destroy_process_group()


def die() -> None:
    """End this process as the kernel's memory killer does."""
    os.kill(os.getpid(), signal.SIGKILL)
