"""The miss path: candidates -> correct? -> time -> decide.

It sees callables and knows no op: what a candidate is, how its results are checked and where the outcome is stored
come from outside. A candidate that fails is a value with a reason, never an exception.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from ..config import Measure, Tuning
from ..device.failures import Failure, classify, fatal, first_line
from ..errors import DeviceLostError, NoRightCandidateError, TuningError
from .deadline import left_behind, run_within
from .timing import Interval, Rounds, Run, Timer, time_rounds

log = logging.getLogger(__name__)

FALSE_WINS = 0.01
# How long a device that has nothing left to do may take to answer.
ANSWER_S = 10.0
# Share of the budget within which candidates have to be ready; the rest is for timing them.
CHECKING = 0.8

State = Literal["ok", "wrong", "failed", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """How a candidate's results compare with the oracle.

    Attributes:
        error: Largest relative error of any output.
        limit: What is allowed for that output.
        output: The output it was seen in.
        exact: Whether every bit is the default's; None where that is not known.
        differs: The output whose bits differ from another layout of the same variant; empty where none does.
    """

    error: float
    limit: float
    output: str
    exact: bool | None = None
    differs: str = ""

    @property
    def right(self) -> bool:
        """Whether every output is within its tolerance, and only addresses depend on the layout."""
        return self.error <= self.limit and not self.differs


@dataclass(frozen=True, kw_only=True)
class Runs:
    """A candidate made ready on arguments of its own.

    Attributes:
        end_to_end: The whole op, every relayout included.
        kernel: The kernels alone, on operands already in the plan's layouts; None where that is the same.
        relayout: The copies alone; None where there are none.
        check: Runs it into poisoned outputs and compares them with the oracle.
    """

    end_to_end: Run
    kernel: Run | None
    relayout: Run | None
    check: Callable[[], Check]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The result of checking and timing one candidate. Times are medians in microseconds, None where not taken.

    Attributes:
        id, revision: Which candidate.
        state: `ok`, `wrong` (its results are off), `failed` (it raised, or did not end) or `skipped` (not timed: the
            budget was spent, or only bit-exact candidates are wanted).
        failure: Class of the failure, which says how long it is believed.
        reason: Why it is not `ok`.
        error: Largest relative error against the oracle.
        end_to_end_us, kernel_us, relayout_us: The whole op; its kernels alone; its copies alone.
        gain: Fraction of the default's time that it saves, with its 95 % interval; None for the default itself.
        samples: End-to-end samples.
        binary: Digest of what it was compiled to, where that may be another in the next process.
        measured_at: When it was measured, if that was before this tuning.
    """

    id: str
    revision: str
    state: State
    failure: Failure = ""
    reason: str = ""
    error: float | None = None
    end_to_end_us: float | None = None
    kernel_us: float | None = None
    relayout_us: float | None = None
    gain: Interval | None = None
    samples: tuple[float, ...] = ()
    binary: str = ""
    measured_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A candidate as the tuner sees it.

    Attributes:
        id: Its text id.
        revision: Its revision.
        prepare: Compiles it and makes its arguments; may raise.
        known: Its earlier measurement, where that is still believed: the candidate is not tried again.
        binary: Says what it was compiled to, once it has run.
    """

    id: str
    revision: str
    prepare: Callable[[], Runs]
    known: Measurement | None = None
    binary: Callable[[], str] = str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of tuning a key.

    Attributes:
        winner: Id of the candidate to use.
        default: Id of the default.
        measurements: One for each candidate, in the order they were given.
        rounds: Kept rounds; `discarded` ones had an unusable sample.
        discarded: See `rounds`.
        stopped: Why timing ended: `narrow`, `rounds`, `budget` or `broken`.
        seconds: Wall-clock time of compiling, checking and timing.
    """

    winner: str
    default: str
    measurements: tuple[Measurement, ...]
    rounds: int = 0
    discarded: int = 0
    stopped: str = ""
    seconds: float = 0.0
    gain: Interval | None = field(default=None)

    def measurement(self, candidate: str) -> Measurement:
        """The measurement of a candidate, by id."""
        return next(each for each in self.measurements if each.id == candidate)


def tune(
    trials: Sequence[Trial],
    default: str,
    timer: Timer,
    measure: Measure,
    tuning: Tuning,
    clock: Callable[[], float] = time.monotonic,
    compile_s: float | None = None,
    timing: bool = True,
) -> Outcome:
    """Check, time and choose.

    The default stays unless another candidate is faster by more than `tuning.min_gain` and its gain is certain: were
    all candidates equal, one would be chosen in at most `FALSE_WINS / 2` of all tunings, however noisy the clock. Among
    those the larger gain wins, ties go to the smaller id, so that repeated runs and different ranks agree.

    `tuning.budget_s` covers compiling, checking and timing. The default has all of it to become ready, the others have
    `CHECKING` of it, together; one that is not ready by then is recorded, and what is ready is timed.

    After some errors a device does nothing more for a process, and torch_npu says so once; candidates that never ran
    then seem to be wrong, or fast. So there is an outcome only where the device answers before and after.

    Args:
        trials: The candidates.
        default: Id of the one that runs where nothing was measured.
        timer: Takes the samples.
        measure, tuning: Settings.
        clock: Seconds, for the budget.
        compile_s: Seconds that each candidate may take to compile and run once before the budget begins; None leaves
            compiling to the budget.
        timing: Whether anything is timed; else the default is chosen where it is right.

    Raises:
        NoRightCandidateError: Not one candidate is right.
        TuningError: None but the default could be chosen untimed.
        DeviceLostError: The device does not answer, or no more after a candidate, which is named.
    """
    if compile_s is not None:
        trials = [compiled(trial, compile_s, tuning.budget_s, timer) for trial in trials]
    start = clock()
    if not timer.settled(tuning.budget_s):
        what = "a candidate that an earlier tuning gave up still occupies the device"
        raise DeviceLostError(what if left_behind() else "the device does not answer")
    deadline = start + tuning.budget_s
    check_by = start + CHECKING * tuning.budget_s
    measurements: dict[str, Measurement] = {}
    runs: dict[str, Runs] = {}
    for trial in sorted(trials, key=lambda trial: trial.id != default):  # the default first: it must have its turn
        if trial.known is not None:
            measurements[trial.id] = trial.known
            continue
        left = (deadline if trial.id == default else check_by) - clock()
        if left <= 0 and trial.id != default:
            reason = f"the budget of {tuning.budget_s:g} s was spent before its turn"
            measurements[trial.id] = Measurement(
                id=trial.id, revision=trial.revision, state="skipped", failure="timeout", reason=reason
            )
            continue
        measurement, ready = examine(trial, left, exact_only=tuning.bit_exact and trial.id != default)
        measurements[trial.id] = measurement
        if ready is not None:
            runs[trial.id] = ready
    hung = next((m.id for m in measurements.values() if m.failure == "timeout" and m.state == "failed"), "")
    while runs and timing:
        baseline = default if default in runs else min(runs)
        if hung and not timer.settled(max(0.0, deadline - clock())):
            raise DeviceLostError(f"{hung}, which was given up, still occupies the device", hung, "timeout")
        rounds = time_ready(runs, baseline, timer, measure, deadline, clock)
        if rounds.error is None:
            break
        broken = rounds.broken.partition(" ")[0]
        if fatal(rounds.error):
            raise lost_to(broken, rounds.error) from rounds.error
        measurements[broken] = failure_of(measurements[broken], rounds.error)
        if isinstance(rounds.error, TimeoutError) and broken != baseline:
            break  # a device that does not come back has no time for the others
        del runs[broken]  # without it, they are timed anew
        hung = broken if isinstance(rounds.error, TimeoutError) else hung
    if not timer.settled(ANSWER_S):
        after = f" after {hung}" if hung else ""
        raise DeviceLostError(f"the device does not answer any more{after}", hung, "timeout")
    if not runs:
        reasons = "; ".join(f"{m.id}: {m.state}: {m.reason}" for m in measurements.values())
        raise NoRightCandidateError(f"no candidate is right: {reasons}", tuple(measurements.values()))
    if not timing:
        return Outcome(
            winner=default, default=default, measurements=tuple(measurements.values()), seconds=clock() - start
        )
    kept = len(rounds.samples[baseline])
    if not kept and baseline != default:
        raise TuningError(
            f"nothing could be timed, and the default is {measurements[default].state}: {measurements[default].reason}"
        )
    if kept:
        for name in runs:
            measurements[name] = replace(
                measurements[name],
                end_to_end_us=rounds.median(name),
                kernel_us=rounds.median(f"{name} kernel" if runs[name].kernel else name),
                relayout_us=rounds.median(f"{name} relayout") if runs[name].relayout else 0.0,
                gain=rounds.gain(name, baseline) if name != baseline else None,
                samples=tuple(rounds.samples[name]),
            )
    doubt = FALSE_WINS / max(1, len(runs) - 1)
    rivals = [name for name in runs if kept and name != baseline and measurements[name].state == "ok"]
    certain = [measurements[name] for name in rivals if rounds.gain(name, baseline, doubt).low > 0]
    winner = choose(certain, baseline, tuning.min_gain)
    return Outcome(
        winner=winner,
        default=default,
        measurements=tuple(measurements[trial.id] for trial in trials),
        rounds=kept,
        discarded=rounds.discarded,
        stopped=rounds.stopped,
        seconds=clock() - start,
        gain=measurements[winner].gain,
    )


def time_ready(
    runs: Mapping[str, Runs],
    baseline: str,
    timer: Timer,
    measure: Measure,
    deadline: float,
    clock: Callable[[], float],
) -> Rounds:
    """Rounds of everything that is ready: each candidate, and its kernels and copies apart where it copies."""
    timed: dict[str, Run] = {}
    for name, ready in runs.items():
        timed[name] = ready.end_to_end
        if ready.kernel is not None:
            timed[f"{name} kernel"] = ready.kernel
        if ready.relayout is not None:
            timed[f"{name} relayout"] = ready.relayout
    return time_rounds(
        timed,
        baseline,
        timer,
        warmup_rounds=measure.warmup_rounds,
        min_rounds=measure.min_rounds,
        max_rounds=measure.max_rounds,
        interval=measure.interval,
        deadline=deadline,
        may_be_zero=timed.keys() - runs.keys(),
        clock=clock,
    )


def compiled(trial: Trial, seconds: float, running_s: float, timer: Timer) -> Trial:
    """The trial, compiled and run once; if that fails, the trial with its failure as `known`.

    Args:
        trial: The candidate.
        seconds: How long compiling may take.
        running_s: How long the device may then take.
        timer: Knows whether the device is done.

    Raises:
        DeviceLostError: The device does nothing more for this process.
    """
    if trial.known is not None:
        return trial
    try:
        run_within(seconds, lambda: trial.prepare().end_to_end())
    except Exception as error:
        if fatal(error):
            raise lost_to(trial.id, error) from error
        failed = failure_of(Measurement(id=trial.id, revision=trial.revision, state="failed"), error)
        trial = replace(trial, known=failed)
    if not timer.settled(running_s):
        raise DeviceLostError(f"{trial.id} does not end", trial.id, "timeout")
    return trial


def examine(trial: Trial, seconds: float, *, exact_only: bool = False) -> tuple[Measurement, Runs | None]:
    """Compile a candidate and compare its results with the oracle, before it is ever timed.

    Args:
        trial: The candidate.
        seconds: How long that may take.
        exact_only: Whether one with other bits than the default's is left out.

    Raises:
        DeviceLostError: The device does nothing more for this process.
    """
    described = Measurement(id=trial.id, revision=trial.revision, state="failed")

    def ready_and_checked() -> tuple[Runs, Check]:
        ready = trial.prepare()
        return ready, ready.check()

    try:
        ready, check = run_within(seconds, ready_and_checked)
    except Exception as error:  # whatever a compiler or a driver throws belongs to this candidate alone
        if fatal(error):
            raise lost_to(trial.id, error) from error
        return failure_of(described, error), None
    if not check.right:
        reason = check.differs or f"{check.output}: error {check.error:.3g} over {check.limit:.3g}"
        log.warning("candidate %s is wrong: %s", trial.id, reason)
        return replace(described, state="wrong", failure="wrong", reason=reason, error=check.error), None
    if exact_only and not check.exact:
        reason = "[tuning] bit_exact: its bits are not the default's"
        return replace(described, state="skipped", reason=reason, error=check.error), None
    return replace(described, state="ok", error=check.error, binary=trial.binary()), ready


def lost_to(candidate: str, error: Exception) -> DeviceLostError:
    """The error that ends a tuning whose candidate brought the device down."""
    said = f"{type(error).__name__}: {first_line(error)}"
    return DeviceLostError(f"the device stopped answering at {candidate} ({said})", candidate)


def failure_of(described: Measurement, error: Exception) -> Measurement:
    """The measurement of a candidate that raised, or did not end."""
    reason = f"{type(error).__name__}: {first_line(error)}"
    log.warning("candidate %s failed: %s", described.id, reason)
    return replace(described, state="failed", failure=classify(error), reason=reason)


def choose(measurements: Sequence[Measurement], baseline: str, min_gain: float) -> str:
    """The candidate to use: the baseline, unless a certainly faster one is so by more than the margin."""
    better = [each for each in measurements if each.gain is not None and each.gain.median > min_gain]
    if not better:
        return baseline
    best = max(each.gain.median for each in better if each.gain)
    # Within the margin of the best, the id decides, so that noise does not.
    close = [each.id for each in better if each.gain and each.gain.median >= best - min_gain]
    return min(close)
