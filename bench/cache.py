"""Speed of the decision cache: a large file, and many writers at once.

python bench/cache.py                                   # each command on a file with 100,000 decisions
python bench/cache.py --decisions 1000000               # on one with a million: some 1.5 GiB, and as much for each copy
python bench/cache.py --writers 64 --publishes 40       # the median publish of 64 processes on one file
python bench/cache.py --ranks 16 --keys 40              # what each of 16 ranks costs that start at once
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from layout_tuner.cache.layers import open_layers
from layout_tuner.cache.places.server import ServerStore
from layout_tuner.cache.records import DecisionRecord, EnvironmentRecord, KeyRecord, MeasurementRecord
from layout_tuner.cache.sharing.share import export_file
from layout_tuner.cache.sqlite.file import Store

ENVIRONMENT = EnvironmentRecord(id="bench-environment", facts={"device": "none", "compiler": "none"})
CANDIDATES = ("block/g=STRIDE_HV", "block/g=T_CONTIG", "full/g=STRIDE_HV", "full/g=T_CONTIG")


def decision(number: int, host: str) -> DecisionRecord:
    """A decision as tuning leaves it: four candidates with 30 samples each."""
    measurements = tuple(
        MeasurementRecord(
            candidate=candidate,
            revision="0123456789abcdef",
            state="ok",
            end_to_end_us=60.5 + place,
            kernel_us=50.25 + place,
            relayout_us=10.25,
            interval_low_us=60.0 + place,
            interval_high_us=61.0 + place,
            error=1.5e-4,
            samples=tuple(60.0 + place + round(0.032 * sample, 3) for sample in range(30)),
        )
        for place, candidate in enumerate(CANDIDATES)
    )
    key = KeyRecord(
        op="chunk_bwd_dv_local",
        B=1 + number % 8,
        T=1 + number,
        H=16,
        HV=32,
        K=128,
        V=128,
        varlen=bool(number % 2),
        dtype="bfloat16",
        form="BT=64,g=float32@STRIDE_HV",
    )
    return DecisionRecord(
        key=key,
        environment=ENVIRONMENT.id,
        candidate=CANDIDATES[0],
        revision="0123456789abcdef",
        default_candidate=CANDIDATES[1],
        source="measured",
        gain=0.016,
        gain_low=0.01,
        gain_high=0.02,
        measurements=measurements,
        host=host,
    )


def decisions(number: int) -> Iterator[DecisionRecord]:
    """Decisions of another host."""
    return (decision(each, "elsewhere") for each in range(number))


# Run in a process of its own, as the first call of a training job would. What a process had at most is read from /proc,
# because getrusage counts what its parent had at the fork.
FIRST_LOOKUP = """
import re, sys, time
from layout_tuner.cache.sqlite.file import Store
from layout_tuner.cache.records import KeyRecord
number = 54321 % int(sys.argv[2])
key = KeyRecord(op="chunk_bwd_dv_local", B=1 + number % 8, T=1 + number, H=16, HV=32, K=128, V=128,
                varlen=bool(number % 2), dtype="bfloat16", form="BT=64,g=float32@STRIDE_HV")
clock, processor = time.perf_counter(), time.process_time()
store = Store(sys.argv[1])
(found,) = store.evidence(key, "bench-environment")
taken = time.perf_counter() - clock, time.process_time() - processor
assert len(found.measurements) == 4
most = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())
print(1e3 * taken[0], 1e3 * taken[1], int(most[1]) / 1024)
"""


def first_lookup(path: Path, number: int) -> dict[str, float]:
    """Opening a file and answering one lookup, imports left out; the medians of five processes."""
    command = [sys.executable, "-c", FIRST_LOOKUP, str(path), str(number)]
    answers = [subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() for _ in range(5)]
    wall_ms, processor_ms, mib = (statistics.median(float(each[place]) for each in answers) for place in range(3))
    return {"s": wall_ms / 1e3, "processor s": processor_ms / 1e3, "peak MiB": mib}


# As many decisions go through Python records; a larger file has copies of them for other lengths.
RECORDS = 100_000
TUNER = Path(sys.executable).with_name("tuner")


def build(path: Path, number: int) -> None:
    """Makes a file of many decisions."""
    first = min(number, RECORDS)
    with contextlib.closing(Store(path)) as store:
        store.absorb(decisions(first), [ENVIRONMENT])
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for copy in range(1, -(-number // first)):
            shift = {"shift": copy * first, "left": number - copy * first}
            for table, changed, which in (
                ("decisions", {"id": "id + :shift", "T": "T + :shift"}, "id <= :left"),
                ("measurements", {"id": "NULL", "decision_id": "decision_id + :shift"}, "decision_id <= :left"),
            ):
                names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
                values = ", ".join(changed.get(name, name) for name in names)
                within = f"{which} AND {'id' if table == 'decisions' else 'decision_id'} <= {first}"
                connection.execute(f"INSERT INTO {table} SELECT {values} FROM {table} WHERE {within}", shift)
            connection.commit()


def command(*arguments: object) -> dict[str, float]:
    """Runs the `tuner` command; says what it took by the clock and of the processor, and its memory at most."""
    start = time.perf_counter()
    process = subprocess.Popen([TUNER, *map(str, arguments)], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"tuner {arguments} ended with {process.returncode}")
    return {
        "s": time.perf_counter() - start,
        "processor s": used.ru_utime + used.ru_stime,
        "peak MiB": used.ru_maxrss / 1024,
    }


def large_file(folder: Path, number: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Everything about a file with many decisions, by name."""
    source, export, target = folder / "source.sqlite", folder / "export.sqlite", folder / "target.sqlite"
    # In a process of its own, whose memory is not counted as that of the commands.
    subprocess.run([sys.executable, __file__, "--decisions", str(number), "--build", str(source)], check=True)
    yield "open + first lookup", first_lookup(source, number)
    yield "tuner show", command("show", "--cache", source)
    yield "tuner show --like T=777 --json", command("show", "--cache", source, "--like", "T=777 ", "--json")
    yield "tuner cache export", command("cache", "export", export, "--cache", source)
    yield "tuner cache merge", command("cache", "merge", export, "-o", folder / "merged.sqlite")
    (folder / "merged.sqlite").unlink()
    with contextlib.closing(Store(target)) as store:
        # Begun with one, as a file in use is.
        store.publish(decision(number + 2, ""), ENVIRONMENT)
    yield "tuner cache import", command("cache", "import", export, "--cache", target)
    yield "tuner cache import, again", command("cache", "import", export, "--cache", target)


def write(path: Path, writer: int, publishes: int, output: int) -> None:
    """What one writer does; sends the seconds that each publish took through a pipe."""
    taken = []
    store = Store(path)
    for number in range(publishes):
        record = decision(writer * publishes + number, "")
        start = time.perf_counter()
        store.publish(record, ENVIRONMENT)
        taken.append(time.perf_counter() - start)
    store.close()
    with os.fdopen(output, "w") as pipe:
        json.dump(taken, pipe)


def many_writers(path: Path, writers: int, publishes: int) -> dict[str, float]:
    """Forks writers that all publish to one file; says how long a publish took, in ms, and how many rows there are."""
    children = []
    start = time.perf_counter()
    for writer in range(writers):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.close(reading)
                write(path, writer, publishes, writing)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writing)
        children.append((child, reading))
    taken: list[float] = []
    failed = 0
    for child, reading in children:
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        failed += os.waitpid(child, 0)[1] != 0
        taken += json.loads(text or "[]")
    taken.sort()
    with contextlib.closing(Store(path)) as store:
        rows = sum(1 for _ in store.decisions())
    return {
        "wall s": time.perf_counter() - start,
        "failed writers": failed,
        "rows": rows,
        "median publish ms": 1e3 * statistics.median(taken),
        "p95 publish ms": 1e3 * taken[int(0.95 * len(taken))],
        "slowest publish ms": 1e3 * taken[-1],
    }


def ask(place: str, keys: int, start_at: float) -> list[float]:
    """What one rank does: opens the layers and asks for every key.

    Returns:
        Seconds by the clock and of the processor, and the number of keys that nobody answered.
    """
    path, _, url = place.partition(" ")
    time.sleep(max(0.0, start_at - time.time()))
    clock, processor = time.perf_counter(), time.process_time()
    nowhere = tempfile.mkdtemp()
    layers = open_layers(Path(nowhere) / "own.sqlite", shared=[path] if path else (), url=url or None)
    unanswered = sum(layers.lookup(decision(each, "").key, ENVIRONMENT.id) is None for each in range(keys))
    layers.close()
    shutil.rmtree(nowhere)
    return [time.perf_counter() - clock, time.process_time() - processor, unanswered]


def meet(place: str, rank: int, size: int, keys: int) -> list[float]:
    """What one rank costs that compares its decisions with the others' through a TCPStore kept by rank 0."""
    from torch.distributed import TCPStore

    from layout_tuner.ranks.agreement import compared
    from layout_tuner.ranks.exchange import Ranks

    port = int(place)
    store = TCPStore("localhost", port, size, rank == 0, timedelta(seconds=120), wait_for_workers=True)
    ranks = Ranks(store, rank, size, 120.0)
    said = {
        "environment": ENVIRONMENT.id,
        "file": "here",
        "choices": [[ENVIRONMENT.id, str(decision(number, "").key), "full/g=T_CONTIG"] for number in range(keys)],
    }
    clock, processor = time.perf_counter(), time.process_time()
    ranks.meet("check", said, compared)
    taken = [time.perf_counter() - clock, time.process_time() - processor]
    ranks.worst(0, 60.0)  # rank 0 stays until all have read
    return taken


def many_ranks(folder: Path, size: int, keys: int, url: str) -> Iterator[tuple[str, dict[str, float]]]:
    """What starting at once costs each rank, by where decisions lie."""
    site = folder / "site.sqlite"
    with contextlib.closing(Store(folder / "made.sqlite")) as store:
        store.absorb((decision(number, "elsewhere") for number in range(keys)), [ENVIRONMENT])
        export_file(store, site)
    places = {"one file in use": str(folder / "made.sqlite"), "an exported file": str(site)}
    if url:
        with contextlib.closing(ServerStore(url)) as server:
            for number in range(keys):
                server.publish(decision(number, "elsewhere"), ENVIRONMENT)
        places["a server"] = f" {url}"
    context = multiprocessing.get_context("spawn")
    with context.Pool(size) as pool:
        pool.map(ready, range(4 * size), chunksize=1)
        for name, place in places.items():
            at = time.time() + 1.0
            yield name, spread(pool.starmap(ask, [(place, keys, at)] * size, chunksize=1))
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        jobs = [(port, rank, size, keys) for rank in range(size)]
        yield "check_ranks", spread(pool.starmap(meet, jobs, chunksize=1))


def ready(number: int) -> None:
    """Gives every process of a pool something to do, so that all have started."""
    time.sleep(0.2)


def spread(taken: list[list[float]]) -> dict[str, float]:
    """Median and worst of what ranks took, and how many of all their keys nobody answered in time."""
    clocks, processors, *unanswered = zip(*taken)
    return {
        "median ms": 1e3 * statistics.median(clocks),
        "slowest ms": 1e3 * max(clocks),
        "processor ms": 1e3 * statistics.median(processors),
        "unanswered": sum(map(sum, unanswered)),
    }


def main() -> None:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=100_000)
    parser.add_argument("--writers", type=int, default=0)
    parser.add_argument("--publishes", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--keys", type=int, default=40, help="decisions that each rank asks for")
    parser.add_argument("--url", default="", help="a server to ask too")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        build(options.build, options.decisions)
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.writers:
            result = many_writers(Path(folder) / "decisions.sqlite", options.writers, options.publishes)
            print(json.dumps(result) if options.json else "\n".join(f"{k:34} {v:12.2f}" for k, v in result.items()))
            return
        timings = large_file(Path(folder), options.decisions)
        if options.ranks:
            timings = many_ranks(Path(folder), options.ranks, options.keys, options.url)
        for name, values in timings:
            if options.json:
                print(json.dumps({name: values}), flush=True)
            else:
                print(f"{name:34}", *(f"{value:10.2f} {unit}" for unit, value in values.items()), flush=True)


if __name__ == "__main__":
    main()
