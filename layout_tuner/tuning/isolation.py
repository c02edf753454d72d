"""Tuning in a process of its own: what a candidate does to it, or to its queue, happens to nobody else.

A child (see `child`) compiles, checks and times the candidates of one key and answers with the outcome. Where it dies,
does not end or loses its device, the candidate that ran is recorded as failed, and another child tries the rest. The
parent's queue is never used. `beside` does that while calls go on, one key of a device at a time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Pipe
from typing import Literal

import torch

from .. import processes
from ..config import Config
from ..device import driver, interpreter
from ..device.environment import environment
from ..device.failures import Failure
from ..errors import DeviceLostError, NoRightCandidateError, TuningError, UnsupportedProblemError
from ..forking import ProcessLock, in_child
from ..spec.declaration import OpSpec
from ..spec.keys import Key
from .tuner import Measurement, Outcome

log = logging.getLogger(__name__)

# Seconds a child may take to start, with torch, Triton and the device.
START_S = 300.0
# What a child may take beyond the limits that it keeps itself.
GRACE_S = 60.0
# Signals that no candidate raises: somebody, or the system, ended the child.
FROM_OUTSIDE = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a child needs to know.

    Attributes:
        key: What to tune.
        device: Where, by name.
        environment: Id of the parent's; the child refuses to measure in another one.
        identity: Of the device, as `device.identity`.
        config: Settings.
        known: What is known of candidates, by id and revision: they are not tried.
        budget_s: Seconds for checking and timing.
        only: Id of the one candidate to check, without timing anything; empty to tune.
    """

    key: Key
    device: str
    environment: str
    identity: str
    config: Config
    known: Mapping[tuple[str, str], Measurement]
    budget_s: float
    only: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a child says: an outcome, or why there is none.

    Attributes:
        outcome: Of the tuning.
        error: Name of the class of what it raised, `DeviceLostError` among them.
        text: What that says.
        candidate: The candidate that lost the device.
        failure: Class of its failure.
        measurements: What was found of candidates of which none is right.
    """

    outcome: Outcome | None = None
    error: str = ""
    text: str = ""
    candidate: str = ""
    failure: Literal["crash", "timeout"] = "crash"
    measurements: tuple[Measurement, ...] = ()


def tune_isolated(
    spec: OpSpec,
    key: Key,
    device: torch.device,
    config: Config,
    known: Mapping[tuple[str, str], Measurement],
    budget_s: float,
    only: str = "",
) -> Outcome:
    """Tune a key in children of this process, one after the other where a candidate takes one with it.

    Args:
        spec: The op.
        key: The key, T as it is tuned.
        device: Where.
        config: Settings.
        known: What is known of candidates, by id and revision.
        budget_s: Seconds that a child has for checking and timing, beyond compiling.
        only: Id of the one candidate to check, without timing anything; empty to tune.

    Raises:
        DeviceLostError: The device answers no child, or no child can be blamed on a candidate.
        NoRightCandidateError: No candidate is right.
        TuningError: No child can be started.
    """
    known = dict(known)
    candidates = spec.candidates(key, buffers=driver.chip(device).buffers)
    revisions = {candidate.id: candidate.revision for candidate in candidates}
    while True:
        request = Request(
            key=key,
            device=str(device),
            environment=environment(device).id,
            identity=driver.identity(device),
            config=config,
            known=dict(known),
            budget_s=budget_s,
            only=only,
        )
        answer = ask(request, list(revisions))
        if answer.outcome is not None:
            for measurement in answer.outcome.measurements:
                if measurement.state in ("failed", "wrong") and (measurement.id, measurement.revision) not in known:
                    log.warning("candidate %s is %s: %s", measurement.id, measurement.state, measurement.reason)
            return answer.outcome
        place = (answer.candidate, revisions.get(answer.candidate, ""))
        if answer.error == DeviceLostError.__name__ and place[1] and place not in known:
            log.warning("candidate %s failed: %s", answer.candidate, answer.text)
            known[place] = failed(*place, answer.failure, answer.text)
            continue
        if answer.error == DeviceLostError.__name__:
            raise DeviceLostError(answer.text)
        if answer.error == UnsupportedProblemError.__name__:
            raise UnsupportedProblemError(spec.name, [answer.text.removeprefix(f"{spec.name}: ")])
        if answer.measurements:
            raise NoRightCandidateError(answer.text, answer.measurements)
        raise TuningError(answer.text)


def failed(candidate: str, revision: str, failure: Failure, reason: str) -> Measurement:
    """The measurement of a candidate that took its process with it."""
    now = datetime.now(UTC)
    return Measurement(id=candidate, revision=revision, state="failed", failure=failure, reason=reason, measured_at=now)


# -- one child -------------------------------------------------------------------------------------------------


def ask(request: Request, candidates: list[str]) -> Answer:
    """Start a child, let it tune, and end it; its death is an answer too."""
    with contextlib.ExitStack() as stack:
        mine, its = Pipe()
        stack.callback(mine.close)
        doing = stack.enter_context(tempfile.TemporaryFile())
        said = stack.enter_context(tempfile.TemporaryFile())
        try:
            # It runs kernels as this process does.
            variables = {"TRITON_INTERPRET": "1" if interpreter.interpreting() else "0"}
            child = processes.start("child", (its.fileno(), doing.fileno()), said.fileno(), variables)
        except OSError as error:
            return Answer(error=TuningError.__name__, text=f"no process to tune in: {error}")
        finally:
            its.close()
        stack.callback(processes.end, child)
        limit_s = START_S
        try:
            mine.send(request)
            while mine.poll(limit_s):
                heard = mine.recv()
                if isinstance(heard, Answer):
                    return heard
                limit_s = heard + GRACE_S  # what it is about to do takes at most so long
            how, failure = "did not end in its time and was ended", "timeout"
        except (EOFError, OSError):
            how, failure = processes.ended(child), "crash"
            if child.returncode is not None and -child.returncode in FROM_OUTSIDE:
                return Answer(error=TuningError.__name__, text=f"the process that tunes {how}")
        last = processes.last_line(said)
        text = f"the process that tried it {how}" + (f": {last}" if last else "")
        index = os.pread(doing.fileno(), 32, 0).strip()
        if not index:
            return Answer(error=TuningError.__name__, text=f"{text} before it tried a candidate")
        candidate = candidates[int(index)]
        return Answer(
            error=DeviceLostError.__name__,
            text=text,
            candidate=candidate,
            failure="timeout" if failure == "timeout" else "crash",
        )


# -- beside the calls ------------------------------------------------------------------------------------------

Job = Callable[[], None]

_lock = ProcessLock()
_waiting: dict[torch.device, queue.SimpleQueue[Job]] = {}


def beside(device: torch.device, job: Job) -> None:
    """Queue work for a device; it runs in a thread while calls go on, after earlier work for that device."""
    with _lock:
        jobs = _waiting.get(device)
        if jobs is not None:
            jobs.put(job)
            return
        jobs = _waiting[device] = queue.SimpleQueue()
        jobs.put(job)
    threading.Thread(target=work, args=(device, jobs), name=f"layout_tuner {device}", daemon=True).start()


def work(device: torch.device, jobs: queue.SimpleQueue[Job]) -> None:
    """Run the queued work until there is none left."""
    while True:
        with _lock:
            if jobs.empty():
                del _waiting[device]
                return
        try:
            jobs.get()()
        except Exception:
            log.exception("tuning beside the calls")


def idle(seconds: float) -> bool:
    """Wait until no queued work runs; say whether that came within `seconds`."""
    give_up = time.monotonic() + seconds
    while _waiting:
        if time.monotonic() > give_up:
            return False
        time.sleep(0.01)
    return True


@in_child
def _forget() -> None:
    """A forked child has none of its parent's threads."""
    _waiting.clear()
