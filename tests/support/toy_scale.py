"""`toy_scale`: an op as CONTRIBUTING says, oracle included."""

import torch
import toy_kernels
from layout_tuner.kernels import tiling

from layout_tuner.dispatch import router
from layout_tuner.launch import launcher
from layout_tuner.launch.prepared import present
from layout_tuner.spec.declaration import Candidate, Launch, OpSpec, Problem
from layout_tuner.spec.operands import Operand, Option, Output


def toy_scale(x: torch.Tensor, g: torch.Tensor, chunk_size: int = 16) -> torch.Tensor:
    """x `[B, T, HV, V]` times two to the gate `[B, T, HV]`."""
    return present(router.call(SPEC, (x, g), (chunk_size,), ())[0])


def reference(x: torch.Tensor, g: torch.Tensor, chunk_size: int = 16, cu_seqlens: object = None) -> torch.Tensor:
    """The oracle."""
    return x * torch.exp2(g.to(x.dtype))[..., None]


def _bind(problem: Problem, candidate: Candidate) -> Launch:
    key, BT = problem.key, problem.BT
    kernel = launcher.bind(
        toy_kernels.toy_scale,
        HV=key.HV,
        V=key.V,
        BT=BT,
        BV=tiling.power_of_two(key.V, 16, 256),
        G_T_CONTIG=candidate.plan.t_contig("g"),
    )
    programs = problem.chip.vector_programs

    def launch(x: torch.Tensor, g: torch.Tensor, *_: object) -> tuple[torch.Tensor]:
        out, T = torch.empty_like(x), x.shape[1]
        tasks = x.shape[0] * key.HV * -(-T // BT)
        kernel(min(tasks, programs), x, g, out, T, tasks)
        return (out,)

    return launch


SPEC = OpSpec(
    name="toy_scale",
    operands=(
        Operand(name="x", dims="B T HV V"),
        Operand(name="g", dims="B T HV", time_axis=True, fill="decay"),
    ),
    outputs=(Output(name="out", dims="B T HV V"),),
    options=(Option(name="chunk_size", default=64, entry="BT", size="BT"),),
    layout_groups=(("g",),),
    variants=("tokens",),
    unsupported=lambda key: ["packed batches"] if key.varlen else [],
    bind=_bind,
    reference=reference,
    forms={"training": "BT=16,g=float32@STRIDE_HV"},
    tolerances={"out": 0.005},
)
