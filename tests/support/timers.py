"""Timers with a set clock: the test says what each callable takes, so that it decides who wins."""

import random
from collections.abc import Callable, Mapping, Sequence

from layout_tuner.launch.prepared import Prepared
from layout_tuner.tuning.timing import Run
from layout_tuner.tuning.tuner import Check, Runs, Trial

RIGHT = Check(error=0.0, limit=1e-4, output="out")
WRONG = Check(error=0.5, limit=1e-4, output="out")


class SetTimer:
    """Answers for each callable what `time_us` says of its name; runs nothing.

    Args:
        time_us: Time of a callable by its name and by its place in the round.
    """

    def __init__(self, time_us: Callable[[str, int], float]) -> None:
        self.time_us = time_us
        self.orders: list[tuple[str, ...]] = []
        self.comes_back = True

    def round_us(self, runs: Sequence[Run]) -> list[float]:
        names = tuple(name_of(run) for run in runs)
        self.orders.append(names)
        return [self.time_us(name, place) for place, name in enumerate(names)]

    def settled(self, seconds: float) -> bool:
        return self.comes_back


def set_times(times: Mapping[str, float]) -> SetTimer:
    """A timer without noise; what is not named takes 1 us."""
    return SetTimer(lambda name, place: times.get(name, 1.0))


def noisy_times(times: Mapping[str, float], seed: int, noise: float = 0.02) -> SetTimer:
    """A timer whose samples vary around the named times, a burst in twenty takes half as long again."""
    generator = random.Random(seed)

    def time_us(name: str, place: int) -> float:
        burst = 1.5 if generator.random() < 0.05 else 1.0
        return times[name] * generator.gauss(1.0, noise) * burst

    return SetTimer(time_us)


class Named:
    """A callable that does nothing and has a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> None:
        pass


def name_of(run: Run) -> str:
    """A callable's name: its own, or its candidate's id; a bare copy has none."""
    if isinstance(run, Named):
        return run.name
    prepared = getattr(run, "func", None)
    return prepared.candidate.id if isinstance(prepared, Prepared) else "copy"


def trial(name: str, check: Check | Callable[[], Check] = RIGHT, revision: str = "r1", relayout: bool = False) -> Trial:
    """A candidate without a kernel.

    Args:
        name: Its id.
        check: What comparing it with the oracle finds, or does.
        revision: Its revision.
        relayout: Whether it copies, so that its kernel and its copies are timed too.
    """

    def prepare() -> Runs:
        return Runs(
            end_to_end=Named(name),
            kernel=Named(f"{name} kernel") if relayout else None,
            relayout=Named(f"{name} relayout") if relayout else None,
            check=check if callable(check) else lambda: check,
        )

    return Trial(id=name, revision=revision, prepare=prepare)
