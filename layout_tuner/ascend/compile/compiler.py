"""Requests to Ascend's compiler, and the worker processes that answer them.

The compiler runs in another interpreter (`worker.py`), several at a time, each answering one request after another.
A worker that crashes or hangs is ended and replaced; the answer to its request says what happened.
"""

import collections
import contextlib
import hashlib
import json
import os
import queue
import select
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePath
from typing import IO, Final, Literal

from ..targets import Target
from .toolchain import Toolchain

_WORKER: Final = Path(__file__).with_name("worker.py")
_FRONT_END_TIMEOUT_S: Final = 60.0
_EXIT_S: Final = 5.0
_STDERR_CHARACTERS: Final = 4000

# What triton-ascend passes, plus what makes the compiler explain itself. Single-threaded because the compiler's
# thread pool crashes now and then (1.2.0: about one run in twenty), and because the workers keep the cores busy.
_COMPILER_OPTIONS: Final = (
    "--enable-hfusion-compile=true",
    "--enable-triton-kernel-compile=true",
    "--enable-debug-info=true",
    "--mlir-print-debuginfo",
    "--mlir-disable-threading",
)
_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "A2": (
        "--enable-auto-bind-sub-block=True",
        "--enable-hivm-compile=true",
    ),
    "A5": ("--enable-auto-bind-sub-block=False",),
}
_FRONT_END_OPTIONS: Final[Mapping[str, Mapping[str, bool]]] = {
    "A2": {},
    "A5": {
        "compile_on_910_95": True,
        "enable_auto_bind_sub_block": False,
        "enable_select_analysis": True,
    },
}

# Whether triton-ascend asks for multi-buffering where a kernel does not say.
_MULTIBUFFER: Final[Mapping[str, bool]] = {"A2": True, "A5": False}

# Signals that a program raises by its own fault; every other one was sent to it.
_FAULTS: Final = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP)

Failure = Literal["", "compile", "crash", "overflow", "timeout", "device"]
Scalar = bool | int | float | str | None
Constexpr = Scalar | Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One kernel to lower.

    Attributes:
        module: Module of the kernel, importable from `packages` or `path`.
        kernel: Name of the kernel in it.
        signature: Type text (`*bf16`, `fp32`, `i32`) of each parameter that is no constexpr, in the kernel's order;
            None for an absent pointer.
        constexprs: Values of the constexpr parameters; a Triton dtype is `{"dtype": "fp32"}`.
        divisible_by_16: Parameters known to be multiples of 16 (pointers: aligned).
        equal_to_1: Integer parameters known to be 1, which become constants.
        packages: Folder of each package the module may import.
        path: Folders to import other modules from.
        stage: How far to go: `linalg` is the front end's output, `hivm` the compiler's, `verdict` whether it compiles.
        multibuffer: Whether the compiler buffers what loops load several times; None leaves it to the target.
        options: Extra options of the compiler.
        timeout_s: Limit of one run of the compiler.
    """

    module: str
    kernel: str
    signature: Mapping[str, str | None]
    constexprs: Mapping[str, Constexpr]
    divisible_by_16: Sequence[str] = ()
    equal_to_1: Sequence[str] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    path: Sequence[str] = ()
    stage: Literal["linalg", "hivm", "verdict"] = "hivm"
    multibuffer: bool | None = None
    options: Sequence[str] = ()
    timeout_s: float = 120.0

    @property
    def arguments(self) -> list[str]:
        """The parameters that remain arguments of the compiled kernel, in order."""
        return [name for name, kind in self.signature.items() if kind is not None and name not in self.equal_to_1]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a request.

    Attributes:
        stage: The stage that ended it: `front end`, `compiler`, or `worker` when the process itself died.
        exit_status: 0 for success.
        stderr: Error output of the stage that failed, or of the compiler.
        source: The line of Python that the front end failed on.
        linalg: The front end's output.
        hivm: The compiler's final module, in generic form.
        timed_out: Whether it was ended because it took too long.
        attempts: Runs of the compiler; more than 1 after a crash.
        cached: Whether the compiler's part came from the disk.
        key: Digest of everything that decides the compiler's part.
        seconds: Time the answer took.
    """

    stage: str
    exit_status: int
    stderr: str
    source: str = ""
    linalg: str | None = None
    hivm: str | None = None
    timed_out: bool = False
    attempts: int = 0
    cached: bool = False
    key: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the stage that was asked for was reached."""
        return self.exit_status == 0

    @property
    def notes(self) -> list[str]:
        """The compiler's `[NOTE]`s: optimisations it gave up in order to succeed."""
        return [line.strip() for line in self.stderr.splitlines() if "[NOTE]" in line]

    @property
    def error(self) -> str:
        """The line that says why it failed; empty if it did not."""
        if self.ok:
            return ""
        if self.timed_out:
            return f"the {self.stage} did not end in time and was stopped"
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        if self.crashed:
            crash = f"the {self.stage} crashed (exit status {self.exit_status})"
            return f"{crash}: {lines[-1]}" if self.stage == "worker" and lines else crash
        if self.stage == "worker" and lines:
            # Python's own words: the reason stands last, whatever the lines before it quote.
            return lines[-1]
        told = [line for line in lines if "error:" in line] or [line for line in lines if "[NOTE]" not in line]
        return told[-1] if told else f"the {self.stage} ended with status {self.exit_status}"

    @property
    def failure(self) -> Failure:
        """The class of the failure, which says for how long it is worth remembering; empty if it did not fail.

        A fault of the process and not of the kernel, such as a signal from outside, has the class `device`.
        """
        if self.ok:
            return ""
        if self.timed_out:
            return "timeout"
        if self.stage == "worker" or (self.exit_status < 0 and -self.exit_status not in _FAULTS):
            return "device"
        if self.crashed:
            return "crash"
        return "compile" if self.overflow is None else "overflow"

    @property
    def crashed(self) -> bool:
        """Whether the compiler, or one that it calls, was ended by a signal."""
        return self.exit_status < 0 or "Stack dump:" in self.stderr

    @property
    def error_source(self) -> str:
        """Where in the kernel's source it failed, as far as the compiler says."""
        if self.ok or self.source:
            return self.source
        # The compiler's messages start with `loc("file":line:column): error:`.
        _, _, place = self.error.partition('loc("')
        file, quote, rest = place.partition('":')
        return f"{PurePath(file).name}:{rest.partition(':')[0]}" if quote else ""

    @property
    def overflow(self) -> tuple[str, int, int] | None:
        """`(memory, bytes wanted, bytes available)` where the compiler's memory plan did not fit."""
        # "ub overflow, requires 25165824 bits while 1572864 bits available!"
        before, _, after = self.error.partition(" overflow, requires ")
        words = after.split()
        if len(words) < 5 or not (words[0].isdigit() and words[3].isdigit()):
            return None
        return before.split()[-1], int(words[0]) // 8, int(words[3]) // 8


Progress = Callable[[int, int], None]


class Compiler:
    """A pool of worker processes of one toolchain for one target.

    Args:
        toolchain: Has the compiler.
        target: The SoC to compile for.
        cache: Folder of results kept between runs; None keeps none.
        processes: Workers; they start when first needed.
    """

    def __init__(self, toolchain: Toolchain, target: Target, cache: Path | None = None, processes: int = 2) -> None:
        self.toolchain = toolchain
        self.target = target
        self._cache = cache
        self._processes = max(1, processes)
        self._workers: list[_Worker] = []

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    @property
    def version(self) -> str:
        """The versions the answers hold for."""
        return self.toolchain.version(self.target)

    def lower(self, request: Request) -> Answer:
        """The answer to one request."""
        return self.lower_all([request])[0]

    def lower_all(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Answer]:
        """The answers to all requests, in their order.

        Args:
            requests: What to lower; equal requests are answered once.
            progress: Called with the number done and the number of requests after each.
        """
        answers: dict[int, Answer] = {}
        for places, answer in self.answers(requests):
            answers.update(dict.fromkeys(places, answer))
            if progress is not None:
                progress(len(answers), len(requests))
        return [answers[place] for place in range(len(requests))]

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[list[int], Answer]]:
        """Each answer as it comes, with the places of the equal requests that it answers.

        The workers go on while the caller looks at an answer; few answers wait, because one is megabytes of text.
        """
        texts = [self._text(request) for request in requests]
        places = collections.defaultdict(list)
        for place, text in enumerate(texts):
            places[text].append(place)
        waiting = iter(places.items())
        lock = threading.Lock()
        answered: queue.Queue[tuple[list[int], Answer]] = queue.Queue(maxsize=2 * self._processes)
        stopped = threading.Event()

        def serve(worker: _Worker) -> None:
            while not stopped.is_set():
                with lock:
                    item = next(waiting, None)
                if item is None:
                    return
                text, where = item
                limit_s = _FRONT_END_TIMEOUT_S + 3 * requests[where[0]].timeout_s
                try:
                    answer = worker.ask(text, limit_s)
                except (OSError, ValueError) as error:
                    answer = Answer(stage="worker", exit_status=1, stderr=f"{type(error).__name__}: {error}")
                while not stopped.is_set():
                    with contextlib.suppress(queue.Full):
                        answered.put((where, answer), timeout=0.2)
                        break

        threads = [
            threading.Thread(target=serve, args=(worker,), daemon=True)
            for worker in self._started(min(self._processes, len(places)))
        ]
        finished = False
        try:
            for thread in threads:
                thread.start()
            for _ in range(len(places)):
                while True:
                    # With a timeout, or Ctrl-C would wait for the end.
                    with contextlib.suppress(queue.Empty):
                        finished_one = answered.get(timeout=0.2)
                        break
                yield finished_one
            finished = True
        finally:
            stopped.set()
            if not finished:
                self.close()
            for thread in threads:
                thread.join()

    def _started(self, count: int) -> Iterator["_Worker"]:
        while len(self._workers) < count:
            self._workers.append(_Worker(self.toolchain.python))
        yield from self._workers[:count]

    def _text(self, request: Request) -> str:
        family = "A5" if self.target.generation == "A5" else "A2"
        multibuffer = _MULTIBUFFER[family] if request.multibuffer is None else request.multibuffer
        message = {
            **asdict(request),
            "target": self.target.name,
            "front_end_options": {**_FRONT_END_OPTIONS[family], "multibuffer": multibuffer},
            "compiler": str(self.toolchain.compiler(self.target)),
            "printer": str(self.toolchain.printer(self.target)),
            "compiler_options": [
                f"--enable-auto-multi-buffer={multibuffer}",
                *_OPTIONS[family],
                *_COMPILER_OPTIONS,
                *request.options,
            ],
            "compiler_version": self.version,
            "revision": _revision(),
            "cache": None if self._cache is None else str(self._cache),
        }
        return json.dumps(message)


def _revision() -> str:
    """Digest of the worker's own source: a change there makes the cache's entries another's."""
    return hashlib.sha256(_WORKER.read_bytes()).hexdigest()[:16]


class _Worker:
    """One process that answers requests; started again after it died."""

    def __init__(self, python: Path) -> None:
        self._python = python
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._pending = b""

    def ask(self, text: str, limit_s: float) -> Answer:
        """The answer to a request's text, or one that says how the worker ended."""
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(text.encode() + b"\n")
            process.stdin.flush()
            line = self._line(limit_s)
        except BrokenPipeError:
            line = b""
        if line:
            said = json.loads(line)
            known = {each.name for each in fields(Answer)}
            return Answer(**{name: value for name, value in said.items() if name in known})
        # Its output ended: it is about to exit by itself, with a status and words that say why.
        status, errors = self.close(grace_s=_EXIT_S if line == b"" else 0.0)
        return Answer(stage="worker", exit_status=status or 1, stderr=errors, timed_out=line is None)

    def close(self, grace_s: float = 0.0) -> tuple[int, str]:
        """End the process and whatever it started: `(exit status, what it said)`.

        Args:
            grace_s: How long it may take to end by itself first.
        """
        process, errors = self._process, self._errors
        self._process, self._errors, self._pending = None, None, b""
        if process is None or errors is None:
            return 0, ""
        if grace_s > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        # The worker ends its compiler on SIGTERM; the rest of its group goes with SIGKILL.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        with errors:
            errors.seek(0)
            return status, errors.read().decode(errors="replace")[-_STDERR_CHARACTERS:]

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
            self._process = subprocess.Popen(
                [self._python, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
            )
        return self._process

    def _line(self, limit_s: float) -> bytes | None:
        """The next line of output: empty when the process ended, None after `limit_s`."""
        assert self._process is not None and self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._pending:
            ready, _, _ = select.select([descriptor], [], [], limit_s)
            if not ready:
                return None
            chunk = os.read(descriptor, 1 << 20)
            if not chunk:
                return b""
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line
