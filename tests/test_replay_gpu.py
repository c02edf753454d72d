"""Prepared lists on a GPU: the bits that the stages give, with fewer allocations and no more memory."""

from collections.abc import Callable

import pytest
import torch

from layout_tuner import ops
from layout_tuner.dispatch import router
from layout_tuner.launch import launcher, replay

pytestmark = pytest.mark.gpu


def step() -> Callable[[], list[torch.Tensor]]:
    """A step on a GPU, at a size where its memory is far above what an allocator rounds."""
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(2, 2048, 4, 64, device=device), dim=-1) for _ in range(2))
    v, do = (torch.randn(2, 2048, 8, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    g, beta = torch.rand(2, 2048, 8, device=device).log(), torch.rand(2, 2048, 8, device=device)
    given = [x.requires_grad_() for x in (q.bfloat16(), k.bfloat16(), v, g, beta)]

    def run() -> list[torch.Tensor]:
        o, _ = ops.chunk_gated_delta_rule(*given)
        return [o.detach(), *torch.autograd.grad(o, given, do)]

    return run


def test_gpu_a_list_gives_the_same_bits_in_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    run = step()

    def measured() -> tuple[list[torch.Tensor], int, int]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, held = torch.cuda.memory_stats()["allocation.all.allocated"], torch.cuda.memory_allocated()
        results = run()
        torch.cuda.synchronize()
        made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        return results, made, torch.cuda.max_memory_allocated() - held

    with monkeypatch.context() as patched:
        patched.setattr(replay, "prepare", lambda *_: None)
        for _ in range(2):
            run()
        wanted, by_stages, stages_peak = measured()
    router.current().prepared.clear()
    for _ in range(2):
        run()
    called: list[object] = []
    call = launcher.BoundKernel.__call__
    monkeypatch.setattr(
        launcher.BoundKernel, "__call__", lambda self, *given: called.append(self) or call(self, *given)
    )
    found, allocations, peak = measured()
    assert not called
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert allocations <= 16 < by_stages
    assert peak <= stages_peak + (1 << 20)  # an allocator hands a block out whole where less would be left
