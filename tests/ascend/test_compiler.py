"""The real compiler on small kernels: verdicts, counts, its own numbers against ours."""

import dataclasses
import stat
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from layout_tuner.ascend.compile.compiler import Answer, Compiler
from layout_tuner.ascend.compile.toolchain import Toolchain
from layout_tuner.ascend.facts import KernelFacts
from layout_tuner.ascend.lowering import Launch, Pointer
from layout_tuner.ascend.mlir.parser import parse_module
from layout_tuner.ascend.targets import target_named

pytestmark = pytest.mark.ascend

FP32 = Pointer(dtype="fp32")


def scale_rows(sample: ModuleType, stride: int, rows: int = 48) -> Launch:
    return Launch(
        kernel=sample.scale_rows,
        grid=20,
        arguments={"x": FP32, "y": FP32, "factor": 2.0, "TASKS": rows},
        constexprs={"N": 64, "STRIDE": stride},
    )


def counted(compiler: Compiler, launch: Launch, **settings: bool) -> KernelFacts:
    answer = compiler.lower(launch.request())
    assert answer.ok, answer.error
    return launch.facts(answer, target=compiler.target.name, compiler=compiler.version, **settings)


def test_a_contiguous_load_is_one_burst(compiler: Compiler, sample: ModuleType) -> None:
    facts = counted(compiler, scale_rows(sample, stride=1))
    load, store = facts.transfers
    assert (load.route, load.argument, load.pattern) == ("GM->UB", "x", "contiguous")
    assert (store.route, store.argument, store.pattern) == ("UB->GM", "y", "contiguous")
    assert (load.calls, load.bytes, load.bursts, load.short_bursts) == (1, 256, 1, 0)
    assert load.source.startswith("sample_kernels.py:")
    assert not facts.deinterleaves
    assert not facts.unknown
    assert not facts.over(compiler.target)


def test_a_strided_load_is_a_burst_an_element(compiler: Compiler, sample: ModuleType) -> None:
    facts = counted(compiler, scale_rows(sample, stride=8))
    load = next(transfer for transfer in facts.transfers if transfer.load)
    assert (load.pattern, load.calls, load.bursts, load.short_bursts) == ("strided", 1, 64, 64)
    assert sum(count.count for count in facts.deinterleaves) == 1
    # The line is the load's own.
    source = Path(sample.__file__ or "").read_text().splitlines()
    assert "tl.load" in source[int(load.source.rpartition(":")[2]) - 1]


def test_the_first_program_of_the_real_grid(compiler: Compiler, sample: ModuleType) -> None:
    # 48 rows on 20 programs: the first does 3.
    facts = counted(compiler, scale_rows(sample, stride=1), per_task=False)
    assert facts.summary()["bursts"] == 6


def test_wide_integers_are_scalarised(compiler: Compiler, sample: ModuleType) -> None:
    launch = Launch(
        kernel=sample.wide_integers, grid=1, arguments={"x": FP32, "y": FP32, "n": 40}, constexprs={"N": 64}
    )
    facts = counted(compiler, launch)
    assert facts.summary()["scalarised_elements"] >= 64
    assert any("cmpi" in count.name for count in facts.scalarised)


def test_a_matrix_product(compiler: Compiler, sample: ModuleType) -> None:
    bf16 = Pointer(dtype="bf16")
    launch = Launch(
        kernel=sample.masked_product,
        grid=1,
        arguments={"a": bf16, "b": bf16, "c": bf16, "n": 64},
        constexprs={"N": 64, "DOT_PRECISION": "ieee"},
    )
    facts = counted(compiler, launch)
    assert facts.flops == 2 * 64**3
    assert {transfer.argument for transfer in facts.transfers} == {"a", "b", "c"}
    assert facts.l1_bytes > 0
    assert facts.l0c_bytes >= 64 * 64 * 4


def test_batched_products_that_are_added_lose_the_first(compiler: Compiler, sample: ModuleType) -> None:
    # Why `solve_tril` takes one head a task on Ascend. Fails when the compiler is mended.
    def products(heads: int) -> float:
        launch = Launch(
            kernel=sample.added_products,
            grid=1,
            arguments=dict.fromkeys(("a", "b", "c", "d", "out"), FP32),
            constexprs={"HEADS": heads},
        )
        return counted(compiler, launch).flops / (2 * 16**3 * heads)

    assert products(1) == 2
    assert products(4) == 1


def test_contents_steer_the_walk(compiler: Compiler, sample: ModuleType) -> None:
    def launch(offsets: list[int]) -> Launch:
        return Launch(
            kernel=sample.starts,
            grid=len(offsets) - 1,
            arguments={"x": FP32, "y": FP32, "offsets": Pointer(dtype="i32", contents=offsets)},
            constexprs={"N": 64},
        )

    assert counted(compiler, launch([0, 64])).summary()["bursts"] == 2
    assert counted(compiler, launch([0, 640])).summary()["bursts"] == 20
    # The average of an empty sequence and a short one.
    assert counted(compiler, launch([5, 5, 9])).summary()["bursts"] == 1


def test_an_overflow_says_how_much(compiler: Compiler, sample: ModuleType) -> None:
    answer = compiler.lower(Launch(kernel=sample.wide, grid=1, arguments={"x": FP32}, constexprs={"N": 512}).request())
    assert not answer.ok
    memory, wanted, available = answer.overflow or ("", 0, 0)
    assert (memory, available) == ("ub", 192 * 1024)
    assert wanted >= 512 * 512 * 4
    assert answer.error_source.startswith("sample_kernels.py:")
    assert answer.notes


def test_a_front_end_error_names_the_line(compiler: Compiler, sample: ModuleType) -> None:
    answer = compiler.lower(
        Launch(kernel=sample.unknown_name, grid=1, arguments={"x": FP32}, constexprs={"N": 64}).request()
    )
    assert (answer.ok, answer.stage) == (False, "front end")
    assert "missing is not defined" in answer.error
    assert "values + missing" in answer.error_source


def test_answers_are_kept(compiler: Compiler, sample: ModuleType, tmp_path: Path) -> None:
    request = scale_rows(sample, stride=1).request()

    def lower(cache: Path) -> Answer:
        with Compiler(compiler.toolchain, compiler.target, cache=cache, processes=1) as fresh:
            return fresh.lower(request)

    first, second = lower(tmp_path), lower(tmp_path)
    assert (first.cached, second.cached) == (False, True)
    assert (first.hivm, first.key) == (second.hivm, second.key)
    for entry in tmp_path.rglob("*.gz"):
        entry.write_bytes(b"broken")
    assert lower(tmp_path).cached is False


def test_a_damaged_answer_is_made_anew(compiler: Compiler, sample: ModuleType, tmp_path: Path) -> None:
    request = scale_rows(sample, stride=1).request()
    with Compiler(compiler.toolchain, compiler.target, cache=tmp_path, processes=1) as fresh:
        key = fresh.lower(request).key
        (entry,) = tmp_path.rglob("*.gz")
        sound = entry.read_bytes()
        # In the header, in the deflated text, in the checksum behind it.
        for place in (0, len(sound) // 2, len(sound) - 8):
            entry.write_bytes(sound[:place] + b"\xff" * 10 + sound[place + 10 :])
            damaged = fresh.lower(request)
            assert (damaged.error, damaged.cached, damaged.key) == ("", False, key)
            assert damaged.hivm
            # And overwritten.
            assert fresh.lower(request).cached


def test_a_cache_that_is_no_folder_fails_nothing(compiler: Compiler, sample: ModuleType, tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.touch()
    with Compiler(compiler.toolchain, compiler.target, cache=taken / "ascend", processes=1) as fresh:
        answer = fresh.lower(scale_rows(sample, stride=1).request())
    assert (answer.error, answer.cached) == ("", False)
    assert answer.hivm


def test_an_answer_that_cannot_be_written_leaves_nothing(
    compiler: Compiler, sample: ModuleType, tmp_path: Path
) -> None:
    request = scale_rows(sample, stride=1).request()
    with Compiler(compiler.toolchain, compiler.target, cache=tmp_path, processes=1) as fresh:
        key = fresh.lower(request).key
        (entry,) = tmp_path.rglob("*.gz")
        entry.unlink()
        entry.mkdir()
        answer = fresh.lower(request)
    assert (answer.error, answer.cached, answer.key) == ("", False, key)
    assert [each.name for each in entry.parent.iterdir()] == [entry.name]


def test_a_compiler_that_does_not_start_is_the_workers_error(
    toolchain: Toolchain, sample: ModuleType, tmp_path: Path
) -> None:
    broken = dataclasses.replace(toolchain, folder=tmp_path)
    with Compiler(broken, target_named("Ascend910B3"), processes=1) as compiler:
        answers = [compiler.lower(scale_rows(sample, stride=stride).request()) for stride in (1, 8)]
        # The worker lives on.
        assert compiler.lower(scale_rows(sample, stride=1).request(stage="linalg")).ok
    for answer in answers:
        assert (answer.ok, answer.stage, answer.exit_status) == (False, "worker", 1)
        assert "FileNotFoundError" in answer.error
        assert str(tmp_path / "bishengir-compile") in answer.error


@pytest.mark.parametrize("name", ["Ascend910B1", "Ascend910_9391", "Ascend950PR_9589"])
def test_targets_have_the_compilers_numbers(
    name: str, compiler_for: Callable[[str], Compiler], sample: ModuleType
) -> None:
    answer = compiler_for(name).lower(scale_rows(sample, stride=1).request())
    assert answer.ok, answer.error
    spec = parse_module(answer.hivm or "").attributes["dlti.target_system_spec"].body
    target = target_named(name)
    for entry, value in (
        ("CUBE_CORE_COUNT", target.cube_cores),
        ("VECTOR_CORE_COUNT", target.vector_cores),
        ("UB_SIZE", 8 * target.ub_bytes),
        ("L1_SIZE", 8 * target.l1_bytes),
        ("L0C_SIZE", 8 * target.l0c_bytes),
    ):
        assert f'"{entry}", {value} : i32' in spec


def test_a_hung_compiler_is_ended(toolchain: Toolchain, sample: ModuleType, tmp_path: Path) -> None:
    # A compiler that leaves a child behind and never ends: both have to go.
    fake = tmp_path / "bishengir-compile"
    fake.write_text(f"#!/bin/sh\nsleep 987 & echo $! > {tmp_path}/child\nsleep 987\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    broken = dataclasses.replace(toolchain, folder=tmp_path)
    with Compiler(broken, target_named("Ascend910B3"), processes=1) as compiler:
        answer = compiler.lower(scale_rows(sample, stride=1).request(timeout_s=1.0))
    assert (answer.ok, answer.timed_out) == (False, True)
    assert "did not end in time" in answer.error
    state = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    # Ended, whether or not anyone has collected it yet.
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_crashing_compiler_is_tried_again(toolchain: Toolchain, sample: ModuleType, tmp_path: Path) -> None:
    fake = tmp_path / "bishengir-compile"
    fake.write_text(f"#!/bin/sh\necho run >> {tmp_path}/runs\nkill -SEGV $$\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    broken = dataclasses.replace(toolchain, folder=tmp_path)
    with Compiler(broken, target_named("Ascend910B3"), cache=tmp_path / "cache", processes=1) as compiler:
        answer = compiler.lower(scale_rows(sample, stride=1).request())
    assert answer.error == "the compiler crashed (exit status -11)"
    assert answer.attempts == 3
    assert len((tmp_path / "runs").read_text().split()) == 3
    assert not list((tmp_path / "cache").rglob("*.gz"))
