"""Ranks with a GPU each, and NCCL: runs where there are two."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as spawning

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def losses(rank: int, folder: Path, *, routed: bool) -> list[float]:
    """The losses of a few DDP steps of one layer, with misses tuned after the first."""
    import layout_tuner
    from layout_tuner import ops
    from layout_tuner.config import Config

    torch.manual_seed(0)
    project = torch.nn.Linear(64, 2 * 64 + 2 * 64 + 4, device=rank)
    model = torch.nn.parallel.DistributedDataParallel(project, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(1, 128, 64, generator=torch.Generator().manual_seed(rank)).to(rank)
    bit_exact = Config(cache={"path": str(folder / "ddp.sqlite")}, tuning={"bit_exact": True})
    entry = layout_tuner.enable(bit_exact, on_miss="default", fla=False) if routed else None
    found = []
    for step in range(4):
        q, k, v, g, beta = model(x).split([64, 64, 128, 2, 2], dim=-1)
        q, k, v = q.unflatten(-1, (1, 64)), k.unflatten(-1, (1, 64)), v.unflatten(-1, (2, 64))
        o, _ = ops.chunk_gated_delta_rule(
            q, k, v, torch.nn.functional.logsigmoid(g), beta.sigmoid(), use_qk_l2norm_in_kernel=True
        )
        loss = o.float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
        if routed and step == 0:
            report = layout_tuner.tune_misses()
            assert report.rows and all(row.status == "tuned" for row in report.rows), report
            assert report.agreement is not None and report.agreement.agreed, str(report.agreement)
    if routed:
        checked = layout_tuner.check_ranks()
        assert checked.agreed and checked.keys, str(checked)
    layout_tuner.disable()
    del entry
    return found


def run(rank: int, port: int, folder: str, answers: Any) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=2)
    answers[rank] = [losses(rank, Path(folder), routed=routed) for routed in (False, True)]
    torch.distributed.destroy_process_group()


def test_ddp_over_nccl_tunes_together_and_trains_the_same(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with spawning.get_context("spawn").Manager() as manager:
        answers = manager.dict()
        spawning.spawn(run, (port, str(tmp_path), answers), nprocs=2)
        for rank in range(2):
            without, routed = answers[rank]
            assert routed == pytest.approx(without, rel=1e-3)
