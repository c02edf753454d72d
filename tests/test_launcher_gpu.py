"""Direct launches on a GPU: right numbers whatever a kernel was compiled for first, on any stream, in any thread."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from launches import CONSTANTS, shifted
from layout_tuner.kernels import dv_local as kernels

from layout_tuner import ops, reference
from layout_tuner.launch import direct, launcher

pytestmark = pytest.mark.gpu


@pytest.fixture
def problem() -> SimpleNamespace:
    """The kernel's launch at any length, on a GPU, into poisoned results."""
    device = torch.device("cuda", 0)
    kernel = launcher.bind(kernels.chunk_bwd_dv_local_full, **CONSTANTS)

    def run(T: int, off: tuple[str, ...] = (), index: torch.dtype | None = None, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def drawn(name: str, *shape: int) -> torch.Tensor:
            made = torch.randn(1, T, *shape, device=device, generator=generator)
            return shifted(made) if name in off else made

        q, k, do = drawn("q", 2, 16), drawn("k", 2, 16), drawn("do", 4, 16)
        g = drawn("g", 4).abs().neg().cumsum(1) * 0.01
        g = shifted(g) if "g" in off else g
        dv = torch.full_like(do, float("nan"))
        dv = shifted(dv) if "dv" in off else dv
        NT, cu, chunks, bound = -(-T // 16), None, None, kernel
        if index is not None:
            cu = torch.tensor([0, T], dtype=index, device=device)
            chunks = torch.stack([torch.zeros(NT), torch.arange(NT)], 1).to(index).to(device)
            bound = launcher.bind(kernels.chunk_bwd_dv_local_full, **CONSTANTS | {"IS_VARLEN": True})
        bound(4, q, k, do, g, None, None, dv, cu, chunks, 0.25, T, NT, 0 if cu is None else 1, NT * 4)
        torch.testing.assert_close(
            dv, reference.chunk_bwd_dv_local(q, k, do, g, scale=0.25, chunk_size=16), rtol=1e-3, atol=1e-3
        )

    return SimpleNamespace(run=run, device=device)


@pytest.mark.parametrize("first", [1, 16, 17, 64, 1000])
@pytest.mark.parametrize("off", [(), ("q",), ("g",), ("q", "k", "do", "g", "dv")], ids=str)
def test_gpu_after_binding_at_another(problem: SimpleNamespace, first: int, off: tuple[str, ...]) -> None:
    problem.run(first)
    for T in (1, 16, 17, 64, 1000):
        problem.run(T)
        problem.run(T, off)
        problem.run(T)


def test_gpu_index_types(problem: SimpleNamespace) -> None:
    for index in (torch.int32, torch.int64, torch.int32, None, torch.int64):
        problem.run(70, index=index)
        problem.run(70, ("q",), index=index)


def test_gpu_is_launched_directly(problem: SimpleNamespace) -> None:
    problem.run(64)
    assert direct.style() is direct.STYLES[0]
    bound = launcher.bind(kernels.chunk_bwd_dv_local_full, **CONSTANTS)
    assert bound.direct is not launcher.not_yet
    assert bound.variants


def test_gpu_streams(problem: SimpleNamespace) -> None:
    """A launch waits for what its stream does, and is on that stream."""
    problem.run(1000)
    stream = torch.cuda.Stream()
    q = torch.zeros(1, 64, 2, 16, device=problem.device)
    do = torch.zeros(1, 64, 4, 16, device=problem.device)
    dv = torch.full_like(do, float("nan"))
    bound = launcher.bind(kernels.chunk_bwd_dv_local_full, **CONSTANTS | {"USE_G": False})
    given = (q, q, do, None, None, None, dv, None, None, 1.0, 64, 4, 0, 16)
    bound(4, *given)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        q.fill_(1.0)
        do.fill_(1.0)
        bound(4, *given)
        done = torch.cuda.Event()
        done.record(stream)
    assert not done.query()
    stream.synchronize()
    wanted_dv = torch.arange(16, 0, -1.0, device=problem.device).repeat(4)[None, :, None, None] * 16
    torch.testing.assert_close(dv, wanted_dv.expand_as(dv))


def test_gpu_threads(problem: SimpleNamespace) -> None:
    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for T in (17, 64, 100 + number):
                problem.run(T, ("q",) if number % 2 else (), seed=number)
            torch.cuda.current_stream().synchronize()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))


def test_gpu_profiler_hooks_fire(problem: SimpleNamespace) -> None:
    problem.run(64)
    seen: list[str] = []

    def enter(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(enter)
    try:
        problem.run(64)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(enter)
    problem.run(64)
    assert seen == ["chunk_bwd_dv_local_full"]


def test_gpu_second_device(problem: SimpleNamespace) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    made = []
    for index in (0, 1, 0, 1):
        device = torch.device("cuda", index)
        q = torch.ones(1, 64, 2, 16, device=device)
        do = torch.ones(1, 64, 4, 16, device=device)
        made.append(ops.chunk_bwd_dv_local(q, q, do, chunk_size=16).cpu())
    assert all(torch.equal(made[0], other) for other in made)
