"""`toy_chain`: the gate's sum along a chunk, then `toy_scale`; a chain as CONTRIBUTING says."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import toy_scale

from layout_tuner import reference
from layout_tuner.ops.chain import autograd, by_reference, chain, compiled
from layout_tuner.ops.chain.stages import Facts
from layout_tuner.spec import layouts
from layout_tuner.spec.declaration import OpSpec, Problem
from layout_tuner.spec.layouts import Layout
from layout_tuner.spec.operands import Operand, Option, Output, Outputs


class Saved(NamedTuple):
    x: torch.Tensor
    G: torch.Tensor


class Toy(chain.Chain[Saved]):
    saved_type = Saved
    sources: ClassVar[dict[str, str]] = {"x": "x"}
    made: ClassVar[dict[str, str]] = {"G": "B T HV"}
    turning, output_like, linear = ("G",), "x", ("x",)

    def __init__(self, problem: Problem, layout: Layout) -> None:
        super().__init__(problem, layout)
        raw = {"g": Facts("float32", layouts.as_read(problem.form.arrival("g") or Layout.STRIDE_HV))}
        self.sum = self.stage("chunk_local_cumsum", raw, {"out": layout}, output_dtype="float32")
        self.scale = self.stage("toy_scale", {"g": Facts("float32", layout)})
        rows = {"out": Layout.STRIDE_HV}
        self.sum_back = self.stage(
            "chunk_local_cumsum", {"g": Facts("float32")}, rows, output_dtype="float32", reverse=True
        )

    def launch_forward(self, inputs: Sequence[Any], scalars: object, packed: chain.Packed) -> tuple[Outputs, Saved]:
        x, g = inputs
        (G,) = self.sum(g, None, *packed)
        return self.scale(x, G, *packed), Saved(x, G)

    def launch_backward(
        self, saved: Saved, grads: Sequence[Any], wanted: Sequence[bool], scalars: object, packed: chain.Packed
    ) -> Outputs:
        (dx,) = self.scale(grads[0], layouts.in_layout(saved.G, self.layout), *packed)
        (dg,) = self.sum_back((dx * saved.x).float().sum(-1) * 0.6931471805599453, None, *packed)
        return dx if wanted[0] else None, dg if wanted[1] else None


def toy_chain(x: torch.Tensor, g: torch.Tensor, chunk_size: int = 16) -> torch.Tensor:
    """x `[B, T, HV, V]` times two to the sum of g `[B, T, HV]` within the chunk."""
    call = compiled.traced if torch.compiler.is_compiling() else autograd.call
    return call(SPEC, (x, g), (chunk_size,))[0]


def oracle(x: Any, g: Any, do: Any, chunk_size: int, grad: bool, cu_seqlens: object = None) -> tuple[Any, ...]:
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(), g.detach().requires_grad_()]
        out = toy_scale.reference(leaves[0], reference.chunk_local_cumsum(leaves[1], chunk_size))
    return (out.detach(), *(torch.autograd.grad(out, leaves, do) if grad else (None, None)))


SPEC = OpSpec(
    name="toy_chain",
    operands=(*toy_scale.SPEC.operands, Operand(name="do", dims="B T HV V", optional=True, given_with=("grad",))),
    outputs=(Output(name="out", dims="B T HV V"), Output(name="dx"), Output(name="dg")),
    options=(*toy_scale.SPEC.options, Option(name="grad", default=False, differentiates=True)),
    layout_groups=(("g",),),
    variants=("chain",),
    moves_inputs=False,
    unsupported=toy_scale.SPEC.unsupported,
    bind=lambda problem, candidate: Toy(problem, candidate.plan["g"]),
    by_reference=by_reference.ChainByReference,
    reference=oracle,
    forms={"training": "BT=16,g=float32@STRIDE_HV,grad=1"},
    tolerances={"out": 0.005, "dx": 0.005, "dg": 0.005},
)
