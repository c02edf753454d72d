"""The `tuner` command: what it prints, how it exits, and what is left when it is stopped."""

import contextlib
import functools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import TUNER, Result, finish, rows, run_here, shape, shapes_file, start, wait_for_rows
from dv_local import CANDIDATES, FORM, SPEC, key
from layout_tuner.cache.faults import Fault, StoreError
from layout_tuner.cache.places.opening import open_store
from layout_tuner.cache.records import DecisionRecord, EnvironmentRecord, MeasurementRecord
from timers import set_times

import layout_tuner
from layout_tuner import warming
from layout_tuner.device.environment import environment
from layout_tuner.dispatch.router import Router
from layout_tuner.errors import REFUSAL, ConfigError, TuningError, UnsupportedProblemError
from layout_tuner.tuning.records import key_record

WINNER = "full/g=T_CONTIG"
SLOW = shape(T=20_000)  # minutes in the interpreter
Tuner = Callable[..., Result]


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Tuner:
    """The command in this process and in an empty folder; a set clock decides for `WINNER`."""
    monkeypatch.chdir(tmp_path)
    times = dict.fromkeys(CANDIDATES, 10.0) | {WINNER: 8.0}
    monkeypatch.setattr(warming, "Router", functools.partial(Router, timer=set_times(times)))
    return lambda *arguments: run_here(arguments, monkeypatch, capsys)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "decisions.sqlite"


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
sys.argv = ["tuner", "--help"]
from layout_tuner.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code
heavy = {"torch", "triton", "numpy", "sqlalchemy", "pydantic", "platformdirs", "rich"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warmup" in done.stdout
    assert "show" in done.stdout


def test_version_of_the_installed_command() -> None:
    done = subprocess.run([TUNER, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"tuner {layout_tuner.__version__}\n"


def test_the_whole_command_in_processes_of_its_own(tmp_path: Path, cache: Path) -> None:
    shapes = shapes_file(tmp_path, shape())
    first = finish(start("warmup", "--shapes", shapes, "--cache", cache))
    assert first.status == 0, first.err
    assert "1 tuned, 0 stored before; environment Triton interpreter #" in first.out
    assert "these times say nothing about an NPU or a GPU" in first.out
    for word in (SPEC.name, "end to end us", "kernel us", "transpose us", "error", "WINNER (tuned now)", *CANDIDATES):
        assert word in first.out
    second = finish(start("warmup", "--shapes", shapes, "--cache", cache))
    assert second.status == 0, second.err
    assert "nothing to tune, 1 stored before" in second.out
    assert "WINNER (stored before)" in second.out


def test_warmup_json_is_all_that_goes_to_stdout(tuner: Tuner, tmp_path: Path, cache: Path) -> None:
    shapes = shapes_file(tmp_path, shape(), shape(HV=1))
    report = json.loads(tuner("warmup", "--shapes", shapes, "--cache", cache, "--json").out)
    assert [(row["status"], row["reason"] != "") for row in report["keys"]] == [("tuned", False), ("trivial", True)]
    assert report["interpreted"] is True
    assert report["environment"]["id"].startswith("Triton interpreter #")
    assert report["store"] == str(cache)
    decision = report["keys"][0]["decision"]
    assert (decision["op"], decision["T"], decision["candidate"]) == (SPEC.name, 16, WINNER)
    assert [found["candidate"] for found in decision["measurements"]] == list(CANDIDATES)
    assert decision["gain"] == pytest.approx(0.2)


def test_a_second_run_tunes_nothing_and_says_so(tuner: Tuner, tmp_path: Path, cache: Path) -> None:
    shapes = shapes_file(tmp_path, shape())
    assert "1 tuned, 0 stored before" in tuner("warmup", "--shapes", shapes, "--cache", cache).out
    again = tuner("warmup", "--shapes", shapes, "--cache", cache)
    assert (again.status, rows(cache)) == (0, 1)
    assert "nothing to tune, 1 stored before" in again.out


def test_the_table_says_who_wins_and_by_how_much(tuner: Tuner, tmp_path: Path, cache: Path) -> None:
    out = tuner("warmup", "--shapes", shapes_file(tmp_path, shape()), "--cache", cache).out
    (winner,) = [line for line in out.splitlines() if "WINNER" in line]
    assert WINNER in winner
    assert "-20.0 %" in winner
    assert f"{CANDIDATES[0]} (default)" in out
    assert str(cache) in out


def test_show(tuner: Tuner, tmp_path: Path, cache: Path) -> None:
    tuner("warmup", "--shapes", shapes_file(tmp_path, shape()), "--cache", cache)
    shown = tuner("show", "--cache", cache)
    assert shown.status == 0
    for word in ("environment Triton interpreter #", WINNER, "measured", f"1 decisions in {cache}"):
        assert word in shown.out
    (decision,) = json.loads(tuner("show", "--cache", cache, "--json").out)["decisions"]
    assert (decision["candidate"], decision["source"], decision["varlen"]) == (WINNER, "measured", False)
    assert len(decision["measurements"]) == 4
    assert json.loads(tuner("show", "--cache", cache, "--op", "chunk_fwd_o", "--json").out) == {"decisions": []}


def test_show_of_nothing(tuner: Tuner, cache: Path) -> None:
    assert tuner("show", "--cache", cache).status == 2  # a typo, not a file without decisions
    assert not cache.exists()
    cache.touch()
    empty = tuner("show", "--cache", cache)
    assert (empty.status, empty.out) == (0, f"no decisions in {cache}\n")
    assert json.loads(tuner("show", "--cache", cache, "--json").out) == {"decisions": []}


def test_only_the_named_ops(tuner: Tuner, tmp_path: Path, cache: Path) -> None:
    shapes = shapes_file(tmp_path, shape())
    done = tuner("warmup", "--shapes", shapes, "--cache", cache, "--ops", "chunk_fwd_o", "--json")
    assert (done.status, json.loads(done.out)["keys"]) == (0, [])


def test_a_spent_budget_leaves_keys(tuner: Tuner, tmp_path: Path, cache: Path) -> None:
    shapes = shapes_file(tmp_path, shape())
    done = tuner("warmup", "--shapes", shapes, "--cache", cache, "--budget", "1e-9")
    assert (done.status, rows(cache)) == (1, 0)
    assert "1 left" in done.out


# -- explain -----------------------------------------------------------------------------------------------------

SHAPE = "T=16,H=1,HV=2,K=16,dtype=fp32"


def test_explain_says_what_is_stored_and_stores_nothing(tuner: Tuner, tmp_path: Path, cache: Path) -> None:
    tuner("warmup", "--shapes", shapes_file(tmp_path, shape()), "--cache", cache)
    before = cache.read_bytes()
    asked = ("explain", "--op", SPEC.name, "--form", FORM, "--cache", cache, "--device", "cpu")
    done = tuner(*asked, "--shape", SHAPE)
    assert done.status == 0, done.err
    saved = f"{WINNER} saves 20.0 % [20.0, 20.0] of full/g=STRIDE_HV"
    assert f"runs {WINNER}: measured in user: {cache}: {saved}" in done.out
    (found,) = json.loads(tuner(*asked, "--shape", SHAPE, "--json").out)["keys"]
    assert (found["candidate"], found["source"], found["layer"]) == (WINNER, "measured", f"user: {cache}")
    assert {each["candidate"] for each in found["decision"]["measurements"]} == set(CANDIDATES)
    (near,) = json.loads(tuner(*asked, "--shape", SHAPE.replace("16", "32", 1), "--json").out)["keys"]
    assert (near["source"], near["decision"]) == ("default", None)
    assert near["differing"] == {"T": ["32", "16"]}
    assert cache.read_bytes() == before


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("B=²", "B: Input should be a valid integer, got '²'"),
        ("T=" + "1" * 5000, "T=111111111...: a number of 5000 digits"),
        ("T=-" + "1" * 5000 + ",K", "T=-11111111...: a number of 5000 digits; 'K' is not name=value"),
        ("T=-5", "T: Input should be greater than or equal to 1, got -5"),
        ("T=" + "1" * 30, "T: Input should be less than or equal to 2147483647, got 111"),
    ],
    ids=["superscript", "5000 digits", "two faults", "negative", "30 digits"],
)
def test_a_number_that_cannot_be_used_is_bad_input(part: str, said: str, tuner: Tuner) -> None:
    rest = [each for each in SHAPE.split(",") if each[:2] != part[:2]]
    done = tuner("explain", "--op", SPEC.name, "--shape", ",".join([part, *rest]), "--device", "cpu")
    assert (done.status, done.out) == (2, "")
    assert said in done.err
    assert "Traceback" not in done.err
    assert len(done.err) < 500


def test_explain_complains_of_what_it_cannot_use(tuner: Tuner, tmp_path: Path, cache: Path) -> None:
    missing = tuner("explain", "--op", SPEC.name, "--shape", SHAPE, "--cache", cache)
    assert (missing.status, missing.out) == (2, "")
    assert "decisions.sqlite" in missing.err
    assert not cache.exists()
    both = tuner("explain", "--op", SPEC.name, "--shape", SHAPE, "--cache", cache, "--target", "Ascend910B3")
    assert both.status == 2
    assert "neither --cache nor --device" in both.err
    refused = tuner("explain", "--op", SPEC.name, "--shape", SHAPE.replace("K=16", "K=300"), "--device", "cpu")
    assert refused.status == 1
    assert "unsupported: chunk_bwd_dv_local: K=300" in refused.out


def predicted(candidate: str, counts: dict[str, float | None], place: str) -> DecisionRecord:
    """A prediction as `tuner warmup --target` stores it; None: that candidate does not compile."""
    revisions = {each.id: each.revision for each in SPEC.candidates(key(T=16))}
    measurements = [
        MeasurementRecord(candidate=name, revision=revisions[name], state="ok", counts={"work units": number})
        if number is not None
        else MeasurementRecord(
            candidate=name, revision=revisions[name], state="failed", reason="UB overflow", failure="overflow"
        )
        for name, number in counts.items()
    ]
    return DecisionRecord(
        key=key_record(key(T=16)),
        environment=place,
        candidate=candidate,
        revision=revisions[candidate],
        default_candidate=CANDIDATES[0],
        source="predicted",
        measurements=tuple(measurements),
    )


@pytest.mark.parametrize(
    ("candidate", "default", "said"),
    [
        (WINNER, 123_456.0, f"{WINNER}, by the compiler's counts: 1,234 work units against 123,456 of {CANDIDATES[0]}"),
        (WINNER, None, f"{WINNER}, by the compiler's counts: 1,234 work units and no count of {CANDIDATES[0]}"),
        (CANDIDATES[0], 1_000.0, f"{CANDIDATES[0]}, the default, by the compiler's counts: 1,000 work units;"),
    ],
)
def test_a_prediction_is_told_from_a_measurement(
    candidate: str, default: float | None, said: str, tuner: Tuner, cache: Path
) -> None:
    place = environment(torch.device("cpu")).id
    counts = {CANDIDATES[0]: default, WINNER: 1_234.0}
    with contextlib.closing(open_store(cache)) as store:
        store.publish(predicted(candidate, counts, place), EnvironmentRecord(id=place))
    asked = ("--op", SPEC.name, "--form", FORM, "--cache", cache, "--device", "cpu", "--shape", SHAPE)
    done = tuner("explain", *asked)
    assert done.status == 0, done.err
    assert said in done.out
    assert "no time was measured, and any measurement (`tuner warmup` on the device) replaces it" in done.out
    assert "beyond the noise" not in done.out
    shown = tuner("show", "--cache", cache).out
    lines = {name: next(line for line in shown.splitlines() if f" {name} " in line) for name in counts}
    assert "work units" in shown
    assert " 1,234 " in lines[WINNER]
    assert (" - " if default is None else f" {default:,.0f} ") in lines[CANDIDATES[0]]
    assert "WINNER (predicted)" in lines[candidate]


# -- exit status 1 and 2 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (ConfigError("bad"), 2),
        (UnsupportedProblemError("op", ["bad"]), 2),
        (StoreError("bad", Fault.FOREIGN), 2),
        (StoreError("bad", Fault.BUSY), 1),
        (StoreError("bad", Fault.READ_ONLY), 1),
        (TuningError("bad"), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: value if isinstance(value, int) else type(value).__name__,
)
def test_the_exit_status_tells_bad_input_from_failed_work(
    raised: BaseException, status: int, tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object, **named: object) -> None:
        raise raised

    monkeypatch.setattr(warming, "warmup", fail)
    done = tuner("warmup", "--shapes", "any.json")
    assert (done.status, done.out) == (status, "")
    assert done.err.strip().endswith("" if status == 130 else "bad")


# -- what fails, and what cannot be used -------------------------------------------------------------------------


def test_what_no_kernel_serves_fails_and_the_rest_is_tuned(tuner: Tuner, tmp_path: Path, cache: Path) -> None:
    done = tuner("warmup", "--shapes", shapes_file(tmp_path, shape(), shape(K=300)), "--cache", cache)
    assert (done.status, rows(cache)) == (1, 1)
    assert "unsupported: chunk_bwd_dv_local: K=300" in done.out
    assert "1 tuned, 0 stored before, 1 unsupported" in done.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["warmup"], "--shapes"),
        (["warmup", "--shapes", "none.json"], "none.json: No such file"),
        (["warmup", "--shapes", "good.json", "--ops", "nothing"], "no op 'nothing' (there are "),
        (["warmup", "--shapes", "good.json", "--device", "warp"], "device 'warp'"),
        (["warmup", "--shapes", "good.json", "--device", "npu"], "device 'npu'"),
        (["warmup", "--shapes", "good.json", "--config", "none.toml"], "none.toml: No such file"),
        (["warmup", "--shapes", "good.json", "--num-warps", "4"], "--num-warps"),
        (["warmup", "--shapes", "good.json", "--config", "pin.toml"], "pins.json': a pin is used instead of all else"),
        (
            ["warmup", "--target", "Ascend910B3", "--budget", "5", "--resume", "--device", "cpu", "--from-misses"],
            "--target wants --shapes; --target compiles and measures nothing: "
            "it takes no --from-misses, --resume, --device, --budget",
        ),
        (["show", "--config", "bad.toml"], "[tuning] min_gian: unknown (known: "),
        (["nothing"], "nothing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_usage(tuner: Tuner, tmp_path: Path, cache: Path, arguments: list[str], said: str) -> None:
    shapes_file(tmp_path, shape()).rename(tmp_path / "good.json")
    (tmp_path / "bad.toml").write_text("[tuning]\nmin_gian = 1\n")
    (tmp_path / "pin.toml").write_text("[tuning]\npin = 'pins.json'\n")
    done = tuner(*arguments, *(["--cache", cache] if arguments[0] != "nothing" else []))
    assert (done.status, done.out) == (2, "")
    assert said in " ".join(done.err.split())
    assert not cache.exists()


def test_bad_shapes_are_named_together_and_nothing_is_written(tuner: Tuner, tmp_path: Path, cache: Path) -> None:
    shapes = shapes_file(tmp_path, shape(), shape(T=0, dtype="int8"), shape(num_warps=4))
    done = tuner("warmup", "--shapes", shapes, "--cache", cache)
    assert (done.status, done.out) == (2, "")
    for part in ("row 1: T", "row 1: dtype", f"row 2: num_warps: {REFUSAL}"):
        assert part in done.err
    assert "row 0" not in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["shapes.json"]


# -- stopped, and a cache that is no good ------------------------------------------------------------------------


def test_ctrl_c_keeps_finished_keys(tmp_path: Path, cache: Path) -> None:
    process = start("warmup", "--shapes", shapes_file(tmp_path, shape(), SLOW), "--cache", cache)
    wait_for_rows(cache, 1, process)
    time.sleep(1.0)  # from the row in the file to the row in the report
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.status == 130, done.err
    assert "1 tuned" in done.out
    assert rows(cache) == 1


def test_a_kill_loses_only_the_key_in_flight(tmp_path: Path, cache: Path) -> None:
    shapes = shapes_file(tmp_path, shape(), shape(dtype="fp16"), SLOW)
    process = start("warmup", "--shapes", shapes, "--cache", cache)
    wait_for_rows(cache, 2, process)
    process.kill()
    finish(process)
    assert rows(cache) == 2


def test_a_cache_that_cannot_be_written_after_all(
    tuner: Tuner, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.symlink_to(cache.name)  # a link to itself
    done = tuner("warmup", "--shapes", shapes_file(tmp_path, shape()), "--cache", cache)
    assert done.status == 1
    assert "1 tuned" in done.out
    assert "decisions in memory only" in done.out
    assert WINNER in done.out
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert cache.name in warning
    assert "kept in memory" in warning


def test_a_damaged_file_is_set_aside(
    tuner: Tuner, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    garbage = b"this is no database" * 1000
    cache.write_bytes(garbage)
    done = tuner("warmup", "--shapes", shapes_file(tmp_path, shape()), "--cache", cache)
    assert (done.status, rows(cache)) == (0, 1)
    (aside,) = [path for path in tmp_path.iterdir() if path.is_file() and path.read_bytes() == garbage]
    assert aside.name in caplog.text
