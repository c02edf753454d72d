"""Launches: bound, recorded, and never with a number of warps or stages."""

import ast
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import dv_local
import pytest
import torch
from dv_local import SPEC
from layout_tuner.kernels import dv_local as kernels
from triton.runtime.errors import PTXASError

from layout_tuner.device.driver import Chip
from layout_tuner.errors import REFUSAL
from layout_tuner.launch import launcher
from layout_tuner.launch.prepared import Prepared
from layout_tuner.spec.declaration import Problem
from layout_tuner.tuning.inputs import synthesize

ROOT = Path(__file__).parents[1]
SOURCES = [path for folder in ("layout_tuner", "kernels", "cache", "bench") for path in (ROOT / folder).rglob("*.py")]
CHIP = Chip(kind="npu", name="an NPU", cube_programs=3, vector_programs=6)


class Kernel:
    """Stands for a jitted function: remembers its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[object, ...], dict[str, object]]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *arguments, **named: self.launches.append((grid, arguments, named))


class Crashing(Kernel):
    """One whose compiler fails so many times."""

    def __init__(self, times: int, error: Exception | None = None) -> None:
        super().__init__()
        self.times = times
        self.error = error or PTXASError("`ptxas` raised SIGSEGV")
        self.attempts = 0

    def __getitem__(self, grid: tuple[int, ...]):
        self.attempts += 1
        if self.attempts <= self.times:
            raise self.error
        return super().__getitem__(grid)


def test_a_launch_is_the_kernel_with_its_constants() -> None:
    kernel = Kernel()
    launcher.bind(kernel, BT=64, USE_G=True)(5, "q", None, 3)
    assert kernel.launches == [((5,), ("q", None, 3), {"BT": 64, "USE_G": True})]


def test_an_empty_grid_launches_nothing() -> None:
    kernel = Kernel()
    launcher.bind(kernel)(0)
    assert not kernel.launches


@pytest.mark.parametrize(("crashes", "launched"), [(1, True), (2, True), (3, False)])
def test_a_compiler_that_crashes_is_run_three_times(crashes: int, launched: bool) -> None:
    kernel = Crashing(crashes)
    bound = launcher.bind(kernel, BT=64)
    if launched:
        bound(5, "q")
        assert kernel.launches == [((5,), ("q",), {"BT": 64})]
    else:
        with pytest.raises(PTXASError, match="SIGSEGV"):
            bound(5, "q")
    assert kernel.attempts == min(crashes + 1, 3)


def test_a_kernel_that_a_compiler_refuses_is_not_compiled_again() -> None:
    kernel = Crashing(1, PTXASError("no such instruction"))
    with pytest.raises(PTXASError, match="no such instruction"):
        launcher.bind(kernel)(5, "q")
    assert kernel.attempts == 1


def test_recording_keeps_a_launch_and_runs_nothing() -> None:
    kernel = Kernel()
    bound = launcher.bind(kernel, BT=64)
    with launcher.recording() as outer:
        bound(1, "a")
        with launcher.recording() as inner:
            bound(0, "b")
        bound(2, "c")
    assert [(record.grid, record.arguments) for record in outer] == [(1, ("a",)), (2, ("c",))]
    assert [(record.grid, dict(record.constants)) for record in inner] == [(0, {"BT": 64})]
    assert not kernel.launches
    bound(1, "d")
    assert len(kernel.launches) == 1


def test_an_interceptor_gets_launches_at_once() -> None:
    kernel, seen = Kernel(), []
    bound = launcher.bind(kernel, BT=64)

    def handler(record: launcher.LaunchRecord) -> None:
        seen.append((record.grid, record.arguments, dict(record.constants)))

    with launcher.intercepting(handler):
        bound(1, "a")
        assert seen == [(1, ("a",), {"BT": 64})]
        with launcher.recording() as inner:
            bound(2, "b")
        bound(3, "c")
    assert [grid for grid, *_ in seen] == [1, 3]
    assert len(inner) == 1
    assert not kernel.launches
    bound(4, "d")
    assert len(kernel.launches) == 1


def test_recording_ends_with_an_exception() -> None:
    kernel = Kernel()
    with pytest.raises(KeyError), launcher.recording():
        raise KeyError
    launcher.bind(kernel)(1)
    assert kernel.launches


@pytest.mark.parametrize("varlen", [False, True])
def test_ops_record_on_meta_tensors(varlen: bool) -> None:
    key = dv_local.key(T=70, varlen=varlen)
    made = synthesize(SPEC, key, "cpu")
    tensors = tuple(None if tensor is None else tensor.to("meta") for tensor in made.tensors)
    call = replace(made, tensors=tensors, cu_seqlens=None if made.cu_seqlens is None else made.cu_seqlens.to("meta"))
    candidate = SPEC.candidates(key)[1]
    indices = torch.empty((6, 2), dtype=torch.int32, device="meta") if varlen else None
    with launcher.recording() as records:
        prepared = Prepared(SPEC, Problem(key=key, chip=CHIP), candidate, call)
        (dv,) = prepared(call.tensors, (None,), call.cu_seqlens, indices)
    (record,) = records
    assert dv.shape == (1, 70, 2, 16)
    assert record.kernel is kernels.chunk_bwd_dv_local_full
    assert record.grid == CHIP.cube_programs
    assert record.constants["G_T_CONTIG"] is True
    assert record.constants["IS_VARLEN"] is varlen
    assert len(record.arguments) + len(record.constants) == len(record.kernel.arg_names)


def test_threads_take_turns_in_the_interpreter(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("launches on a device")
    given = [dv_local.arguments(device, T=T) for T in (20, 33, 17, 40)]
    wanted = [dv_local.dv_local(each) for each in given]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(dv_local.dv_local, given * 2))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted * 2, strict=True))


@pytest.mark.parametrize("name", ["num_warps", "num_stages"])
def test_binding_refuses_warps_and_stages(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: {re.escape(REFUSAL)}"):
        launcher.bind(Kernel(), **{name: 4})


def names_set(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that a source sets: keywords, parameters, assignments and keys of dictionaries."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg:
            yield node.value.lineno, node.arg
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Dict):
            yield from ((key.lineno, str(key.value)) for key in node.keys if isinstance(key, ast.Constant))
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            yield node.lineno, str(node.slice.value)


def test_no_source_sets_warps_or_stages() -> None:
    assert len(SOURCES) > 50
    refused = {"num_warps", "num_stages", "num_ctas", "maxnreg", "autotune", "Autotuner", "heuristics"}
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in SOURCES
        for line, name in names_set(ast.parse(path.read_text()))
        if name in refused
    ]
    assert not found


def test_every_launch_goes_through_the_launcher() -> None:
    """`kernel[grid](...)` stands in the launcher, and where the interpreter itself is probed."""
    found = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.slice, ast.Tuple)
        and path.parts[-2] != "bench"
    }
    assert found == {"layout_tuner/launch/launcher.py", "layout_tuner/device/interpreter.py"}
