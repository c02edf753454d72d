"""`chunk_gated_delta_rule`, declared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ... import reference
from ...spec.declaration import Candidate, Launch, OpSpec, Problem
from ...spec.operands import Operand, Option, Output
from ...spec.registry import register

# The stages, which a chain looks up by name: with their sources it is another chain.
from .. import bwd_dhu, dqkwg, dv_local, fwd_h, fwd_o, gate, intra, local_cumsum, recompute_w_u, wy_bwd  # noqa: F401
from ..chain.by_reference import ChainByReference
from .chain import Chain, Gradients


def _bind(problem: Problem, candidate: Candidate) -> Launch:
    layout = candidate.plan["g"] if problem.has("g") else candidate.plan["beta"]
    return Chain(problem, layout, candidate.variant)


def _reference(
    do: Tensor | None, dht: Tensor | None, grad: bool, A_log: Tensor | None, dt_bias: Tensor | None, **named: Any
) -> tuple[Tensor | None, ...]:
    """Output, final state and every gradient, from the oracles of the stages."""
    parameters: dict[str, Any] = {"A_log": A_log, "dt_bias": dt_bias}
    o, final_state = reference.chunk_gated_delta_rule(**named, **parameters)
    if not grad or do is None:
        return (o, final_state, *[None] * len(Gradients._fields))
    named.pop("output_final_state")
    found = reference.chunk_gated_delta_rule_bwd(**named, **parameters, do=do, dht=dht)
    return (o, final_state, *[getattr(found, name) for name in Gradients._fields])


def _term_rms(
    wanted: Mapping[str, Tensor | None],
    g: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    chunk_size: int,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> dict[str, Tensor]:
    """How large the terms of the gradients are that are sums over tokens."""
    dg = wanted["dg"]
    if dg is None or g is None or A_log is None:
        return {}
    return reference.gate_parameter_term_rms(dg, g, A_log, dt_bias, cu_seqlens, chunk_size)


def _state(name: str, given_with: tuple[str, ...] = ()) -> Operand:
    """A state for each sequence."""
    return Operand(
        name=name,
        dims="N HV K V",
        dims_v_first="N HV V K",
        optional=True,
        must_match=False,
        fill="small",
        given_with=given_with,
    )


def _gates(name: str, fill: str, optional: bool = False) -> Operand:
    return Operand(name=name, dims="B T HV", optional=optional, time_axis=True, fill=fill)


def _flag(name: str) -> Option:
    return Option(name=name, default=False)


_IN_LAYER = (
    "A_log=float32,BT=64,beta=bfloat16@STRIDE_HV,dt_bias=float32,g=bfloat16@STRIDE_HV,state_v_first=1,"
    "use_beta_sigmoid_in_kernel=1,use_gate_in_kernel=1,use_qk_l2norm_in_kernel=1"
)

_HUGGING_FACE = "BT=64,beta=bfloat16@STRIDE_HV,g=float32@STRIDE_HV,use_qk_l2norm_in_kernel=1"
_MEGATRON = "BT=64,beta=bfloat16@STRIDE_HV,g=float32@STRIDE_HV"
_VLLM = "BT=64,beta=float32@STRIDE_HV,g=float32@STRIDE_HV,initial_state=float32,output_final_state=1,state_v_first=1"

# A model under gradient checkpointing runs its layers as in an evaluation first. In training mode transformers keeps a
# cache, and asks for the final state, unless `use_cache` is off.
_CALLERS = {
    "transformers/training": f"{_HUGGING_FACE},grad=1",
    "transformers/training/cache": f"{_HUGGING_FACE},grad=1,output_final_state=1",
    "transformers/evaluation": _HUGGING_FACE,
    "transformers/prefill": f"{_HUGGING_FACE},output_final_state=1",
    "fla/training": f"{_IN_LAYER},grad=1",
    "fla/evaluation": _IN_LAYER,
    "fla/prefill": f"{_IN_LAYER},output_final_state=1",
    "megatron/training": f"{_MEGATRON},grad=1",
    "megatron/evaluation": _MEGATRON,
    "vllm/prefill": _VLLM,
    "vllm/prefill/l2norm": f"{_VLLM},use_qk_l2norm_in_kernel=1",
}

SPEC = register(
    OpSpec(
        name="chunk_gated_delta_rule",
        operands=(
            Operand(name="q", dims="B T H K", fill="unit"),
            Operand(name="k", dims="B T H K", fill="unit"),
            Operand(name="v", dims="B T HV V"),
            _gates("g", "decay", optional=True),
            _gates("beta", "strength"),
            Operand(name="A_log", dims="HV", optional=True, must_match=False, fill="small"),
            Operand(name="dt_bias", dims="HV", optional=True, must_match=False),
            _state("initial_state"),
            Operand(name="do", dims="B T HV V", optional=True, given_with=("grad",)),
            _state("dht", given_with=("grad", "output_final_state")),
        ),
        outputs=(
            Output(name="o", dims="B T HV V"),
            Output(name="final_state", dims="N HV K V"),
            *[Output(name=name, dims="N HV K V" if name == "dh0" else "") for name in Gradients._fields],
        ),
        options=(
            _flag("output_final_state"),
            _flag("use_qk_l2norm_in_kernel"),
            _flag("use_beta_sigmoid_in_kernel"),
            _flag("allow_neg_eigval"),
            Option(name="state_v_first", default=False, turns_states=True),
            _flag("use_gate_in_kernel"),
            Option(name="chunk_size", default=64, entry="BT", size="BT"),
            Option(name="grad", default=False, differentiates=True),
        ),
        scalars=("scale",),
        layout_groups=(("g", "beta"),),
        variants=("chain", "fused_forward", "fused"),
        offers=lambda variant, key: variant != "fused_forward" or key.form.flag("grad"),
        moves_inputs=False,
        bind=_bind,
        by_reference=ChainByReference,
        reference=_reference,
        forms={
            "training": "BT=64,beta=float32@STRIDE_HV,g=float32@STRIDE_HV,grad=1",
            "prefill": "BT=64,beta=float32@STRIDE_HV,g=float32@STRIDE_HV,output_final_state=1",
            "layer": f"{_IN_LAYER},grad=1",
        },
        callers=_CALLERS,
        more_forms=(
            "BT=64,beta=float32@STRIDE_HV,grad=1",
            "BT=64,beta=float32@T_CONTIG,g=float32@T_CONTIG,grad=1",
            "BT=64,beta=float32@OTHER,g=float32@OTHER,grad=1",
            "BT=64,beta=float32@STRIDE_HV,g=float32@STRIDE_HV,grad=1,initial_state=float32,output_final_state=1",
            "BT=32,allow_neg_eigval=1,beta=float32@STRIDE_HV,g=float32@STRIDE_HV,grad=1,initial_state=float32,"
            "output_final_state=1,state_v_first=1,use_beta_sigmoid_in_kernel=1",
            "BT=16,beta=float32@STRIDE_HV,g=float32@STRIDE_HV,grad=1,use_qk_l2norm_in_kernel=1",
        ),
        tolerances=dict.fromkeys(("o", "final_state", *Gradients._fields), 0.008),
        term_rms=_term_rms,
    )
)
