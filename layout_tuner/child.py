"""The child process that tries candidates for its parent; `tuning.isolation` starts it.

It knows the parent's modules, variables and settings, reads decisions from the same files and writes none. Before a
candidate runs it writes the candidate's number where the parent finds it, whatever becomes of this process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

from .device import driver, interpreter
from .device.environment import environment
from .dispatch.router import Router, push
from .errors import ConfigError, DeviceLostError, NoRightCandidateError
from .processes import die_with_parent
from .tuning.ahead import compile_ahead, units
from .tuning.isolation import Answer, Request
from .tuning.tuner import Outcome, Runs, Trial
from .warming import op_of

log = logging.getLogger(__name__)

# How many budgets a candidate may take to compile: nobody waits for it, and another library tries many configurations.
COMPILING = 5


class Doing:
    """Notes in a file which candidate is running.

    Args:
        file: Descriptor of the file.
        candidates: Ids, as the parent numbers them.
    """

    def __init__(self, file: int, candidates: list[str]) -> None:
        self.file = file
        self.numbers = {name: str(number).encode().ljust(32) for number, name in enumerate(candidates)}

    def __call__(self, candidate: str) -> None:
        os.pwrite(self.file, self.numbers[candidate], 0)

    def watched(self, trial: Trial) -> Trial:
        """A trial that notes in the file when it runs."""

        def say_and(run: Callable[[], object]) -> object:
            self(trial.id)
            return run()

        def prepare() -> Runs:
            self(trial.id)
            made = trial.prepare()
            return Runs(
                end_to_end=functools.partial(say_and, made.end_to_end),
                kernel=made.kernel and functools.partial(say_and, made.kernel),
                relayout=made.relayout and functools.partial(say_and, made.relayout),
                check=made.check,
            )

        return replace(trial, prepare=prepare)


def main(channel: int, doing: int, parent: int) -> None:
    """Answer one request, then end without waiting for anything: the device may never come back."""
    die_with_parent(parent)
    logging.basicConfig(level=logging.INFO)
    connection = Connection(channel)
    request = connection.recv()
    assert isinstance(request, Request)
    try:
        answer = Answer(outcome=tune(request, doing, connection.send))
    except DeviceLostError as error:
        answer = Answer(error=type(error).__name__, text=str(error), candidate=error.candidate, failure=error.failure)
    except NoRightCandidateError as error:
        answer = Answer(error=type(error).__name__, text=str(error), measurements=error.measurements)
    except Exception as error:
        log.exception("tuning in a process of its own")
        answer = Answer(error=type(error).__name__, text=str(error) or type(error).__name__)
    with contextlib.suppress(OSError):
        connection.send(answer)
    os._exit(0)


def tune(request: Request, doing: int, announce: Callable[[float], None]) -> Outcome:
    """Compile, check and time the candidates of a request's key.

    Args:
        request: What to tune.
        doing: Descriptor of the file that says which candidate runs.
        announce: Called with how many seconds the next step may take.

    Raises:
        ConfigError: This process sees another device, environment or op than its parent.
        LayoutTunerError: As of `Router.measured`.
    """
    device = driver.named(request.device)
    here = environment(device).id
    if (here, driver.identity(device)) != (request.environment, request.identity):
        raise ConfigError(f"another process sees {here} as {device}, not {request.environment}")
    spec = op_of(request.key)
    made = Router(request.config, on_miss="default")
    made.vetting = False  # that is what this process is for
    push(made)  # another library's function is compared with ours as it is routed
    with driver.guard(device):
        candidates = spec.candidates(request.key, buffers=driver.chip(device).buffers)
        compile_s = None if interpreter.interpreting() else COMPILING * request.budget_s
        if compile_s is not None and "." not in spec.name:  # what another library launches is not known before
            wanted = [
                each
                for each in candidates
                if (each.id, each.revision) not in request.known and request.only in ("", each.id)
            ]
            compile_ahead(units(spec, made.problem(request.key, device), wanted), device, compile_s, announce)
        # What `tune` allows at most; one that is stuck where no thread of this process can stop it takes all of it.
        announce((COMPILING * len(candidates) + 3) * request.budget_s)
        watch = Doing(doing, [each.id for each in candidates])
        return made.measured(
            spec,
            request.key,
            device,
            request.known,
            request.budget_s,
            watched=watch.watched,
            compile_s=compile_s,
            only=request.only,
        )
