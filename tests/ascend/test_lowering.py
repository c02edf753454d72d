"""Launches as requests; targets; finding the toolchain; the pool of workers."""

import contextlib
import inspect
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from layout_tuner import ops as _ops  # noqa: F401  registers every op
from layout_tuner.ascend.candidates import cases_of, launches
from layout_tuner.ascend.compile import compiler as compiler_module
from layout_tuner.ascend.compile import toolchain as toolchain_module
from layout_tuner.ascend.compile.compiler import Answer, Compiler, Request
from layout_tuner.ascend.compile.toolchain import Toolchain, find_native_tools, find_toolchain
from layout_tuner.ascend.lowering import Launch, Pointer, parameters
from layout_tuner.ascend.targets import TARGETS, target_named
from layout_tuner.config import Config
from layout_tuner.errors import ConfigError
from layout_tuner.spec import registry
from layout_tuner.spec.shapes import keys, parse_shapes
from layout_tuner.tuning.inputs import synthesize

B3 = target_named("Ascend910B3")


def scale_rows(sample: ModuleType, **changes: object) -> Launch:
    arguments = {"x": Pointer(dtype="fp32"), "y": Pointer(dtype="fp32"), "factor": 2.0, "TASKS": 48, **changes}
    return Launch(
        kernel=sample.scale_rows,
        grid=20,
        arguments=arguments,  # type: ignore[arg-type]
        constexprs={"N": 64, "STRIDE": 8},
    )


def test_a_launch_becomes_a_request(sample: ModuleType) -> None:
    launch = scale_rows(sample, y=Pointer(dtype="bf16", aligned=False))
    request = launch.request(stage="linalg")
    assert request.kernel == "scale_rows"
    assert request.signature == {"x": "*fp32", "y": "*bf16", "factor": "fp32", "TASKS": "i32"}
    assert list(request.signature) == ["x", "y", "factor", "TASKS"]
    assert request.constexprs == {"N": 64, "STRIDE": 8}
    # `TASKS` is declared do_not_specialize: its value must not be compiled in.
    assert (request.divisible_by_16, request.equal_to_1) == (["x"], [])
    assert request.path == (str(Path(inspect.getfile(sample.scale_rows.fn)).parent),)
    assert request.stage == "linalg"


def test_integers_are_specialised_as_triton_does(sample: ModuleType) -> None:
    kernel = sample.wide_integers
    values = {"x": Pointer(dtype="fp32"), "y": None}

    def request(n: int) -> Request:
        return Launch(kernel=kernel, grid=1, arguments={**values, "n": n}, constexprs={"N": 64}).request()

    assert request(1).equal_to_1 == ["n"]
    assert request(1).arguments == ["x"]
    assert request(32).divisible_by_16 == ["x", "n"]
    assert request(33).divisible_by_16 == ["x"]
    assert request(1 << 40).signature["n"] == "i64"
    assert request(33).signature["y"] is None


def test_interpreted_kernels_have_parameters_too(sample: ModuleType) -> None:
    function = getattr(sample.scale_rows, "fn", sample.scale_rows)
    interpreted = SimpleNamespace(fn=function, kwargs={"do_not_specialize": ["TASKS"]})
    assert parameters(interpreted) == parameters(sample.scale_rows)


@pytest.mark.parametrize("packed", [False, True])
def test_operands_without_values_launch_the_same(packed: bool) -> None:
    row = {"B": 1 if packed else 2, "T": 200, "H": 1, "HV": 2, "K": 64, "V": 64, "dtype": "bf16", "varlen": packed}
    wanted, _ = keys(parse_shapes([row], "test"), Config().keys.bucket)
    assert {spec.name for spec, _ in wanted} == set(registry.names())
    for spec, key in wanted:
        call = synthesize(spec, key, "cpu")
        for case in cases_of(spec, key):
            assert launches(case, B3) == launches(case, B3, call), (case.candidate.id, key)


def test_tasks_are_found_by_name() -> None:
    def launch(**arguments: int) -> Launch:
        return Launch(kernel=None, grid=7, arguments=arguments, constexprs={})

    assert launch(TASKS=30).tasks == 30
    assert launch(n_tasks=31).tasks == 31
    assert launch(other=32).tasks == 7


def test_targets() -> None:
    assert (B3.cube_cores, B3.vector_cores, B3.ub_bytes) == (20, 40, 192 * 1024)
    assert target_named("Ascend910_9391").generation == "A3"
    assert target_named("Ascend950PR_9589").ub_bytes == 248 * 1024
    assert len(TARGETS) == 59
    with pytest.raises(ConfigError, match="unknown Ascend target 'Ascend910'; known targets: Ascend910B1, "):
        target_named("Ascend910")


def test_a_missing_toolchain_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no Ascend toolchain: .*does not run.*`make ascend` installs it"):
        find_toolchain(tmp_path / "python")
    with pytest.raises(ConfigError, match=r"has no triton-ascend and no ascendnpu-ir.*`make ascend`"):
        find_toolchain(sys.executable)


@pytest.fixture
def toolchain_of(tmp_path: Path) -> Callable[[str], Path]:
    """A Python whose compiler is a shell script."""

    def make(script: str) -> Path:
        package = tmp_path / "ascendnpuir"
        (package / "bin").mkdir(parents=True)
        (package / "__init__.py").touch()
        compiler = package / "bin" / "bishengir-compile"
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        return python

    return make


def ends(state: Path) -> bool:
    """Whether a process that was killed ends, collected or not; the system may take a moment for it."""
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if state.read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.1)
                continue
        return True
    return False


def test_a_compiler_that_does_not_answer_is_named_and_ended(
    toolchain_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain_module, "_PROBE_TIMEOUT_S", 3.0)
    python = toolchain_of(f"sleep 987 & echo $$ $! > {tmp_path}/processes\nwait")
    with pytest.raises(ConfigError) as caught:
        find_toolchain(python)
    message = str(caught.value)
    command = f"{tmp_path}/ascendnpuir/bin/bishengir-compile --version"
    assert f"{command} did not answer within 3 s and was ended" in message
    assert "import" not in message
    for process in (tmp_path / "processes").read_text().split():
        assert ends(Path(f"/proc/{process}/stat"))


def test_a_probe_that_fails_says_why_in_a_line(toolchain_of: Callable[[str], Path], tmp_path: Path) -> None:
    python = toolchain_of("")
    (tmp_path / "ascendnpuir" / "bin" / "bishengir-compile").chmod(0o644)
    with pytest.raises(ConfigError, match=r"does not run \(exit status 1: PermissionError: .*\)") as caught:
        find_toolchain(python)
    assert "import" not in str(caught.value)


def test_missing_native_tools_name_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    find_native_tools.cache_clear()
    try:
        with pytest.raises(ConfigError, match="apt-get install mlir-19-tools llvm-19 clang-19"):
            find_native_tools()
    finally:
        find_native_tools.cache_clear()


# --- The pool, with a worker that answers what a request's kernel tells it to. ---

WORKER = """
import json, os, sys, time
for line in sys.stdin:
    request = json.loads(line)
    what = request["kernel"]
    if what == "die":
        sys.stderr.write("something broke\\n")
        os._exit(3)
    if what == "raise":
        # Python closes its output before it ends.
        sys.stdout.close()
        time.sleep(0.5)
        sys.stderr.write("error: quoted\\nzlib.error: broken\\n")
        os._exit(1)
    if what == "kill":
        os.kill(os.getpid(), 9)
    if what == "hang":
        time.sleep(600)
    print(json.dumps({"stage": "compiler", "exit_status": 0, "stderr": what, "hivm": str(os.getpid())}), flush=True)
"""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(compiler_module, "_WORKER", worker)
    monkeypatch.setattr(compiler_module, "_FRONT_END_TIMEOUT_S", 1.0)
    toolchain = Toolchain(
        python=Path(sys.executable),
        triton_ascend="0",
        ascendnpu_ir="0",
        folder=tmp_path,
        compilers=("compiler 0", "compiler 0 a5"),
    )
    return Compiler(toolchain, B3, processes=2)


def request(kernel: str) -> Request:
    return Request(module="m", kernel=kernel, signature={}, constexprs={}, timeout_s=0.0)


def test_answers_keep_the_order_of_requests(pool: Compiler) -> None:
    seen: list[tuple[int, int]] = []
    with pool:
        answers = pool.lower_all([request(f"k{i % 5}") for i in range(10)], lambda *done: seen.append(done))
    assert [answer.stderr for answer in answers] == [f"k{i % 5}" for i in range(10)]
    assert len({answer.hivm for answer in answers}) <= 2
    assert seen[-1] == (10, 10)


def test_a_dead_worker_is_an_answer_and_is_replaced(pool: Compiler) -> None:
    with pool:
        answers = pool.lower_all([request("a"), request("die"), request("b"), request("c")])
    assert [answer.ok for answer in answers] == [True, False, True, True]
    assert (answers[1].stage, answers[1].exit_status) == ("worker", 3)
    assert answers[1].error == "something broke"


def test_a_worker_that_ends_by_itself_says_why(pool: Compiler) -> None:
    with pool:
        raised, killed = pool.lower_all([request("raise"), request("kill")])
    assert (raised.stage, raised.exit_status, raised.error) == ("worker", 1, "zlib.error: broken")
    assert (killed.stage, killed.exit_status) == ("worker", -9)
    crashed = Answer(stage="worker", exit_status=-6, stderr="first\nterminate called\n")
    assert crashed.error == "the worker crashed (exit status -6): terminate called"


def test_a_hung_worker_is_ended(pool: Compiler) -> None:
    start = time.monotonic()
    with pool:
        answers = pool.lower_all([request("hang"), request("a")])
        assert pool.lower(request("b")).ok
    assert time.monotonic() - start < 60
    assert (answers[0].ok, answers[0].timed_out, answers[1].ok) == (False, True, True)
    assert "did not end in time" in answers[0].error
    assert threading.active_count() == 1


def test_what_an_answer_says() -> None:
    stderr = """[NOTE] Ub overflow detected; retrying compilation.
loc("/some/where/k.py":11:0): error: Failed to run the pipeline
loc("/some/where/k.py":11:4): error: ub overflow, requires 1908736 bits while 1572864 bits available! (possible reason)
[ERROR] Failed
"""
    answer = Answer(stage="compiler", exit_status=1, stderr=stderr)
    assert answer.error.startswith('loc("/some/where/k.py":11:4): error: ub overflow')
    assert answer.error_source == "k.py:11"
    assert answer.overflow == ("ub", 238592, 196608)
    assert answer.notes == ["[NOTE] Ub overflow detected; retrying compilation."]
    crashed = Answer(stage="compiler", exit_status=-11, stderr="")
    assert crashed.error == "the compiler crashed (exit status -11)"
    assert Answer(stage="compiler", exit_status=0, stderr="[NOTE] x").error == ""
    assert (answer.failure, crashed.failure) == ("overflow", "crash")


@pytest.mark.parametrize(
    ("stage", "exit_status", "timed_out", "failure"),
    [
        ("compiler", 0, False, ""),
        ("front end", 1, False, "compile"),
        ("compiler", 1, False, "compile"),
        ("compiler", -6, False, "crash"),
        ("compiler", -9, False, "device"),
        ("compiler", -15, False, "device"),
        ("compiler", -9, True, "timeout"),
        ("worker", -11, False, "device"),
        ("worker", 1, False, "device"),
        ("worker", 1, True, "timeout"),
    ],
)
def test_the_class_of_a_failure(stage: str, exit_status: int, timed_out: bool, failure: str) -> None:
    assert Answer(stage=stage, exit_status=exit_status, stderr="", timed_out=timed_out).failure == failure


def test_requests_are_plain_data(pool: Compiler) -> None:
    message = json.loads(pool._text(request("k")))
    assert message["target"] == "Ascend910B3"
    assert message["compiler"].endswith("/bishengir-compile")
    assert "num_warps" not in str(message)
