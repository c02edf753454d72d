"""How much is lost by believing a tuning: its decision against a long measurement of every candidate.

    python bench/regret.py [--seconds 330] [--reference 200] [--ops NAME,...] [--shapes NAME,...] [--json FILE]

For each key of a list over all ops that have a choice, small to large, dense and packed: tune it as a miss is tuned, at
the settings' defaults, into a file of its own; then time every right candidate anew, in `--reference` rounds and
with a timer of its own. Regret is the reference median of what was decided over that of the fastest candidate, less
one; beside it stands what of that is certain, the lower end of the 95 % interval of their paired difference. Keys come
shape by shape; none is begun after `--seconds`.

Exit status: 0, 1 where the median regret is 1 % or more, the worst 3 % or more, a key failed or fewer than 24 were
measured, and 2 without an accelerator, where times say nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import layout_tuner.ops  # noqa: F401  registers every op
from layout_tuner.config import Config
from layout_tuner.device import driver
from layout_tuner.dispatch.router import Router
from layout_tuner.launch.prepared import Prepared
from layout_tuner.spec import registry
from layout_tuner.spec.declaration import OpSpec
from layout_tuner.spec.keys import Key, bucketed
from layout_tuner.tuning.experiment import Experiment
from layout_tuner.tuning.timing import EventTimer, median_interval, time_rounds

KEYS = 24
MEDIAN, WORST = 0.01, 0.03

# B, T, H, HV, K, V, packed. What Triton compiles for a kernel serves every length: most of these share heads and sizes.
SHAPES = {
    "small": (2, 2048, 4, 8, 64, 64, False),
    "packed": (1, 8192, 4, 8, 64, 64, True),
    "large": (8, 8192, 4, 8, 64, 64, False),
    "packed+": (1, 65536, 4, 8, 64, 64, True),
    "tiny": (1, 512, 4, 8, 64, 64, False),
    "model": (1, 8192, 16, 32, 128, 128, False),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One key.

    Attributes:
        shape: Name of its shape.
        key: The key.
        decided, best: Candidates: the tuning's and the reference's.
        decided_us, best_us: Their reference times.
        regret: What the decision loses, as a fraction of the best.
        certain: What of that is certain.
        gain: What the decision saves of the default, by the reference.
        tuning_s: Wall-clock time of tuning it, compilation included.
        stopped: Why its timing ended.
        rounds: Rounds of the tuning.
        left_out: Candidates that were not right, with their reasons.
    """

    shape: str
    key: str
    decided: str
    best: str
    decided_us: float
    best_us: float
    regret: float
    certain: float
    gain: float
    tuning_s: float
    stopped: str
    rounds: int
    left_out: Mapping[str, str]


def wanted_keys(ops: list[str], shapes: list[str], bucket: str) -> list[tuple[str, OpSpec, Key]]:
    """Every op at every shape, in its training form, where there is a choice; shape by shape."""
    found = []
    for shape in shapes:
        B, T, H, HV, K, V, packed = SHAPES[shape]
        for name in ops:
            spec = registry.lookup(name)
            form = spec.form_named(next(iter(spec.forms)))
            sizes = {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V}
            key = bucketed(spec.key_for(sizes, dtype="bfloat16", form=form, varlen=packed), bucket)
            if not spec.nothing_to_choose(key) and len(spec.candidates(key)) > 1:
                found.append((shape, spec, key))
    return found


def reference(
    experiment: Experiment, right: list[str], rounds: int, timer: EventTimer
) -> tuple[dict[str, float], Callable[[str, str], float]]:
    """Long-run times of candidates, and what one loses against another for certain."""
    by_id = {candidate.id: candidate for candidate in experiment.spec.candidates(experiment.key)}
    call = experiment.call
    runs = {
        name: functools.partial(
            Prepared(experiment.spec, experiment.problem, by_id[name], call),
            call.tensors, call.scalars, call.cu_seqlens, call.chunk_indices,
        )
        for name in right
    }  # fmt: skip
    with torch.no_grad():
        taken = time_rounds(
            runs, right[0], timer, warmup_rounds=5, min_rounds=rounds, max_rounds=rounds, interval=0.0,
            deadline=time.monotonic() + 60,
        )  # fmt: skip
    if taken.error is not None:
        raise taken.error

    def certain_loss(slower: str, faster: str) -> float:
        pairs = zip(taken.samples[slower], taken.samples[faster])
        return max(0.0, median_interval([slow / fast - 1 for slow, fast in pairs]).low)

    return {name: taken.median(name) for name in right}, certain_loss


def measure_key(
    shape: str, spec: OpSpec, key: Key, router: Router, device: torch.device, timer: EventTimer, rounds: int
) -> Row:
    """Tune a key, then time all its right candidates for long."""
    start = time.perf_counter()
    outcome = router.tune(spec, key, device)
    tuning_s = time.perf_counter() - start
    right = [found.id for found in outcome.measurements if found.state == "ok"]
    times, certain_loss = reference(
        Experiment(spec, key, device, problem=router.problem(key, device)), right, rounds, timer
    )
    best = min(times, key=lambda name: times[name])
    decided = outcome.winner
    return Row(
        shape=shape,
        key=str(key),
        decided=decided,
        best=best,
        decided_us=times[decided],
        best_us=times[best],
        regret=times[decided] / times[best] - 1,
        certain=0.0 if decided == best else certain_loss(decided, best),
        gain=1 - times[decided] / times[outcome.default] if outcome.default in times else 0.0,
        tuning_s=tuning_s,
        stopped=outcome.stopped,
        rounds=outcome.rounds,
        left_out={m.id: f"{m.state}: {m.reason}" for m in outcome.measurements if m.state != "ok"},
    )


def print_row(row: Row) -> None:
    """One line of the table."""
    op = row.key.partition(" ")[0]
    print(
        f"{row.shape:7} {op:32} {row.decided:44} {row.decided_us:9.1f} {row.best:44} {row.best_us:9.1f} "
        f"{100 * row.regret:7.2f} {100 * row.certain:9.2f} {100 * row.gain:7.1f} {row.tuning_s:7.1f} "
        f"{row.rounds:4d} {row.stopped}",
        flush=True,
    )
    for name, reason in row.left_out.items():
        print(f"        left out: {name}: {reason}", flush=True)


def main() -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=330.0, help="begin no further key after so long")
    parser.add_argument("--reference", type=int, default=200, help="rounds of the long measurement")
    parser.add_argument("--ops", default=",".join(registry.names()), help="only these, separated by commas")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="only these, separated by commas")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    chosen = parser.parse_args()
    unknown = sorted({*chosen.ops.split(",")} - {*registry.names()}) + sorted({*chosen.shapes.split(",")} - {*SHAPES})
    if unknown:
        known = f"ops: {', '.join(registry.names())}; shapes: {', '.join(SHAPES)}"
        parser.error(f"no such op or shape: {', '.join(unknown)}; {known}")
    device = driver.resolve()
    if device.type == "cpu":
        print("no accelerator: times in the interpreter say nothing", file=sys.stderr)
        return 2
    begun = time.monotonic()
    rows: list[Row] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        settings = Config(cache={"path": str(Path(folder) / "decisions.sqlite")})
        router = Router(settings, on_miss="tune")
        timer = EventTimer(device, settings.measure.l2)
        keys = wanted_keys(chosen.ops.split(","), chosen.shapes.split(","), settings.keys.bucket)
        print(f"{driver.chip(device).name}, torch {torch.__version__}, {' '.join(driver.triton_distribution())}")
        print(
            f"{'shape':7} {'op':32} {'decided':44} {'us':>9} {'best':44} {'us':>9} {'regret%':>7} {'certain %':>9} "
            f"{'saved%':>7} {'tune s':>7} rounds"
        )
        for shape, spec, key in keys:
            if time.monotonic() - begun > chosen.seconds:
                break
            try:
                rows.append(measure_key(shape, spec, key, router, device, timer, chosen.reference))
            except Exception as error:  # one key that cannot be measured hides no other
                failed.append(f"{key}: {type(error).__name__}: {error}")
                print(f"failed: {failed[-1]}", flush=True)
                continue
            print_row(rows[-1])
        router.close()
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if not rows:
        return 1
    regrets = [row.regret for row in rows]
    seconds = [row.tuning_s for row in rows]
    print(
        f"{len(rows)} of {len(keys)} keys over {len({row.key.partition(' ')[0] for row in rows})} ops, {len(failed)} "
        f"failed, in {time.monotonic() - begun:.0f} s: regret median {100 * statistics.median(regrets):.2f} %, worst "
        f"{100 * max(regrets):.2f} % ({100 * max(row.certain for row in rows):.2f} % certain); "
        f"tuning a key took {statistics.median(seconds):.1f} s in the median, {max(seconds):.1f} s at most"
    )
    missed = len(rows) < KEYS or statistics.median(regrets) >= MEDIAN or max(regrets) >= WORST or bool(failed)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
