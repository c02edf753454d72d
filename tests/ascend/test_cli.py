"""`tuner explain` and `tuner warmup --target` with the real compiler; what they say to input that cannot be used."""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Result, run_here
from layout_tuner.cache.places.opening import open_store
from layout_tuner.cache.records import DecisionRecord
from layout_tuner.kernels import tiling

from layout_tuner.ascend import candidates
from layout_tuner.ascend.compile import toolchain as toolchain_module
from layout_tuner.ascend.compile.toolchain import Toolchain
from layout_tuner.ascend.targets import TARGETS
from layout_tuner.spec.declaration import OpSpec
from layout_tuner.spec.keys import Key
from layout_tuner.spec.operands import Call

pytestmark = pytest.mark.ascend

OP = "chunk_bwd_dv_local"
SHAPE = "B=1,T=128,H=1,HV=2,K=64,V=64,dtype=bf16"
BUFFERED = ["full/g=STRIDE_HV", "full/g=T_CONTIG", "sub/g=STRIDE_HV", "sub/g=T_CONTIG"]
CANDIDATES = [*BUFFERED, "full+single_buffer/g=STRIDE_HV", "full+single_buffer/g=T_CONTIG"]
FULL = [candidate for candidate in CANDIDATES if candidate.startswith("full")]
SUB = [candidate for candidate in CANDIDATES if candidate.startswith("sub")]

Tuner = Callable[..., Result]


def settings(folder: Path, python: object, timeout_s: float = 120.0) -> Path:
    """A settings file that says where the compiler is."""
    file = folder / "tuner.toml"
    file.write_text(f'[ascend]\npython = "{python}"\nprocesses = 1\ntimeout_s = {timeout_s}\n')
    return file


@pytest.fixture
def tuner(
    toolchain: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Tuner:
    """The command with the toolchain in its settings."""
    config = settings(tmp_path, toolchain.python)

    def run(*arguments: object) -> Result:
        return run_here([*arguments, "--config", config], monkeypatch, capsys)

    return run


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tuner:
    """The command on a machine where no interpreter has the compiler."""
    config = settings(tmp_path, tmp_path / "nowhere" / "python")

    def run(*arguments: object) -> Result:
        result = run_here([*arguments, "--config", config], monkeypatch, capsys)
        assert (result.status, result.out) == (2, "")
        return result

    return run


def shapes_file(folder: Path, **changes: object) -> Path:
    row = {"op": OP, "B": 1, "T": 128, "H": 1, "HV": 2, "K": 64, "V": 64, "dtype": "bf16", **changes}
    file = folder / "shapes.json"
    file.write_text(json.dumps({"shapes": [row]}))
    return file


def stored(file: Path) -> DecisionRecord:
    """The one decision of a file."""
    with contextlib.closing(open_store(file)) as store:
        (decision,) = store.decisions()
    return decision


@pytest.fixture
def one_too_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The `full` candidates take tiles that no memory holds; the others are what they are."""
    tiles = tiling.chunk_bwd_dv_local_tiles

    def wide(variant: str, *sizes: object) -> tuple[int, int, int]:
        BC, BK, BV = tiles(variant, *sizes)  # type: ignore[arg-type]
        return (BC, BK, 2048) if variant == "full" else (BC, BK, BV)

    monkeypatch.setattr(tiling, "chunk_bwd_dv_local_tiles", wide)
    # Or they would be refused before the compiler sees them.
    monkeypatch.setattr(tiling, "on_chip_bytes", lambda *_, **__: None)


def test_candidates_stand_side_by_side(tuner: Tuner) -> None:
    result = tuner("explain", "--op", OP, "--shape", SHAPE, "--target", "Ascend910B3")
    assert result.status == 0, result.err
    for text in (*CANDIDATES, "UB bytes of 196,608", "bursts under 32 bytes", "triton-ascend 3.2.0"):
        assert text in result.out
    # What differs is the gate's loads, and their line is a load of the kernel's.
    lines = [line for line in result.out.splitlines() if "GM->UB g" in line]
    assert lines
    assert all("dv_local.py:" in line for line in lines)
    assert "predicted: " in result.out


def test_the_same_as_json(tuner: Tuner) -> None:
    result = tuner("explain", "--op", OP, "--shape", SHAPE, "--target", "Ascend910B3", "--json")
    assert result.status == 0, result.err
    (key,) = json.loads(result.out)["keys"]
    found = {each["candidate"]: each for each in key["candidates"]}
    assert list(found) == CANDIDATES
    assert all(each["ok"] for each in found.values())
    assert found["full/g=T_CONTIG"]["totals"]["strided_loads"] == 0
    assert found["full/g=STRIDE_HV"]["totals"]["strided_loads"] > 0
    assert any(row["what"] == "GM->UB g: bursts under 32 bytes" for row in key["differences"])
    assert key["prediction"]["candidate"] in CANDIDATES


def test_what_does_not_compile_is_a_row_and_the_rest_goes_on(tuner: Tuner, one_too_wide: None) -> None:
    result = tuner("explain", "--op", OP, "--shape", SHAPE, "--target", "Ascend910B3")
    assert result.status == 1
    failed = [line for line in result.out.splitlines() if "does not compile" in line]
    assert [line.partition(":")[0] for line in failed] == FULL
    for line in failed:
        assert "overflow, requires" in line
        assert "dv_local.py:" in line
    assert "predicted: sub/" in result.out


def test_a_key_larger_than_any_memory_is_compiled(tuner: Tuner) -> None:
    shape = "B=4096,T=65536,H=32,HV=64,K=256,V=256,dtype=bf16"
    result = tuner("explain", "--op", OP, "--shape", shape, "--target", "Ascend910B3")
    assert result.status == 0, result.err
    assert "predicted: " in result.out


def test_operands_that_cannot_be_made_are_a_row_and_the_rest_goes_on(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    synthesize = candidates.synthesize

    def faulty(spec: OpSpec, key: Key, device: str) -> Call:
        if key.form.flag("reverse"):
            raise RuntimeError("not enough memory")
        return synthesize(spec, key, device)

    monkeypatch.setattr(candidates, "synthesize", faulty)
    what = ("--op", "chunk_local_cumsum", "--shape", SHAPE, "--target", "Ascend910B3")
    result = tuner("explain", *what, "--json")
    assert result.status == 1
    sound, failed = json.loads(result.out)["keys"]
    assert len(sound["candidates"]) == len(failed["candidates"]) == 8
    assert {each["error"] for each in failed["candidates"]} == {"RuntimeError: not enough memory"}
    assert all(each["ok"] for each in sound["candidates"])
    assert sound["prediction"]
    assert not failed["prediction"]
    assert tuner("explain", *what).out.count("RuntimeError: not enough memory") == 8


def test_a_compiler_that_takes_too_long_is_a_row(
    toolchain: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(tmp_path, toolchain.python, timeout_s=0.01)
    result = run_here(
        ["explain", "--op", OP, "--shape", SHAPE, "--target", "Ascend910B3", "--config", config], monkeypatch, capsys
    )
    assert result.status == 1
    assert result.out.count("the compiler did not end in time and was stopped") == len(CANDIDATES)


def test_predictions_are_stored_with_what_was_counted(tuner: Tuner, tmp_path: Path) -> None:
    file = tmp_path / "decisions.sqlite"
    arguments = ("warmup", "--shapes", shapes_file(tmp_path), "--target", "Ascend910B3", "--cache", file)
    result = tuner(*arguments)
    assert result.status == 0, result.err
    assert "counts, not times" in result.out
    decision = stored(file)
    assert (decision.source, decision.environment) == ("predicted", "predicted:Ascend910B3")
    counted = {measured.candidate: measured for measured in decision.measurements}
    assert list(counted) == CANDIDATES
    units = {name: measured.counts["work units"] for name, measured in counted.items()}
    assert units[decision.candidate] == min(units.values())
    for measured in counted.values():
        assert str(measured.counts["compiler"]).startswith("triton-ascend 3.2.0, ")
        assert measured.counts["bursts"] > 0
        # No time is ever predicted.
        assert (measured.end_to_end_us, measured.kernel_us, measured.relayout_us) == (None, None, None)
        assert not {"us", "ms", "s", "cycles"} & {word for name in measured.counts for word in name.split()}


def test_predictions_that_cannot_be_kept_are_no_success(
    tuner: Tuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's folder is gone when the compiler is done, though it was there when the command began."""
    folder = tmp_path / "shared"
    folder.mkdir()
    compile_them = candidates.compile_candidates

    def while_the_folder_goes(*arguments: object) -> object:
        found = compile_them(*arguments)  # type: ignore[arg-type]
        folder.rmdir()
        folder.touch()
        return found

    monkeypatch.setattr(candidates, "compile_candidates", while_the_folder_goes)
    file = folder / "decisions.sqlite"
    result = tuner("warmup", "--shapes", shapes_file(tmp_path), "--target", "Ascend910B3", "--cache", file)
    assert result.status == 1
    assert "memory only" in " ".join(result.out.split())


def test_a_prediction_without_one_candidate(tuner: Tuner, tmp_path: Path, one_too_wide: None) -> None:
    file = tmp_path / "decisions.sqlite"
    result = tuner("warmup", "--shapes", shapes_file(tmp_path), "--target", "Ascend910B3", "--cache", file, "--json")
    assert result.status == 1
    (key,) = json.loads(result.out)["keys"]
    assert list(key["failed"]) == FULL
    decision = stored(file)
    assert decision.candidate.startswith("sub/")
    failures = {measured.candidate: measured.failure for measured in decision.measurements}
    assert failures == {**dict.fromkeys(FULL, "overflow"), **dict.fromkeys(SUB, "")}


@pytest.mark.parametrize(
    ("act", "failure"),
    [
        ("exec sleep 600", "timeout"),
        ("kill -SEGV $$", "crash"),
        # Whoever ended the compiler, or the process that waits for it, said nothing about the kernel.
        ("kill -KILL $$", None),
        ("kill -TERM $$", None),
        ("kill -KILL $PPID", None),
    ],
)
def test_failures_are_stored_for_what_they_are(
    toolchain: Toolchain,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    act: str,
    failure: str | None,
) -> None:
    """The compiler of one kernel of the two, which is the real one, does something else first."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for program in toolchain.folder.iterdir():
        (folder / program.name).symlink_to(program)
    compiler = folder / "bishengir-compile"
    compiler.unlink()
    full = "grep -q chunk_bwd_dv_local_full kernel.mlir"
    compiler.write_text(f'#!/bin/sh\nif {full}; then {act}; fi\nexec {toolchain.folder}/bishengir-compile "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(toolchain_module, "find_toolchain", lambda *_: dataclasses.replace(toolchain, folder=folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = settings(tmp_path, toolchain.python, timeout_s=5.0)
    file = tmp_path / "decisions.sqlite"
    what = ("warmup", "--shapes", shapes_file(tmp_path), "--target", "Ascend910B3", "--cache", file, "--json")
    result = run_here([*what, "--config", config], monkeypatch, capsys)
    assert result.status == 1
    (key,) = json.loads(result.out)["keys"]
    assert list(key["failed"]) == FULL
    decision = stored(file)
    failures = {measured.candidate: measured.failure for measured in decision.measurements}
    failed = {} if failure is None else dict.fromkeys(FULL, failure)
    assert failures == {**failed, **dict.fromkeys(SUB, "")}


@pytest.mark.parametrize("command", ["explain", "warmup"])
def test_an_unknown_target_lists_the_known_ones(refused: Tuner, tmp_path: Path, command: str) -> None:
    what = ("--shape", SHAPE) if command == "explain" else ("--shapes", shapes_file(tmp_path))
    message = refused(command, *what, "--target", "Ascend910").err
    assert "unknown Ascend target 'Ascend910'" in message
    assert all(name in message for name in TARGETS)


@pytest.mark.parametrize("command", ["explain", "warmup"])
def test_a_missing_toolchain_names_the_command(refused: Tuner, tmp_path: Path, command: str) -> None:
    what = ("--shape", SHAPE) if command == "explain" else ("--shapes", shapes_file(tmp_path))
    message = refused(command, *what, "--target", "Ascend910B3").err
    assert "no Ascend toolchain" in message
    assert "`make ascend` installs it" in message


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("B=1,T", "'T' is not name=value"),
        ("B=1,B=2", "B stands twice"),
        ("B=1,T=many,H=1,HV=2,K=64,V=64,dtype=bf16", "T"),
        ("B=1,T=128,H=1,HV=2,K=64,V=64,dtype=int7", "int7"),
        ("B=1,T=128,H=3,HV=2,K=64,V=64,dtype=bf16", "HV"),
    ],
)
def test_shapes_that_cannot_be_used(refused: Tuner, shape: str, message: str) -> None:
    assert message in refused("explain", "--op", OP, "--shape", shape, "--target", "Ascend910B3").err


def test_an_op_that_is_none(refused: Tuner) -> None:
    message = refused("explain", "--op", "no_such_op", "--shape", SHAPE, "--target", "Ascend910B3").err
    assert "no_such_op" in message
    assert OP in message


def test_a_target_wants_shapes(refused: Tuner) -> None:
    assert "--target wants --shapes" in refused("warmup", "--target", "Ascend910B3").err
