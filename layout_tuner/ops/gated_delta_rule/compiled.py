"""`chunk_gated_delta_rule` while torch traces, transforms or watches it."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from ...launch.prepared import present
from .. import tracing
from ..chain import compiled
from . import arguments
from .chain import Inputs
from .spec import SPEC


def traced_chain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
    cp_context: object | None,
    use_gate_in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gated_delta_rule` while torch traces, transforms or watches it."""
    flags = (
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
        use_gate_in_kernel,
    )
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    tunable = False
    if not torch.compiler.is_dynamo_compiling():
        named = {**dict(zip(Inputs._fields, inputs)), "cu_seqlens": cu_seqlens, "chunk_indices": chunk_indices}
        tracing.require_seen(SPEC, named)
        tunable = tracing.real(list(named.values()))
    arguments.check(inputs, (*flags, chunk_size), scale, cu_seqlens, cu_seqlens_cpu, chunk_indices, cp_context)
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    A_log = None if A_log is None else A_log.reshape(-1)
    dt_bias = None if dt_bias is None else dt_bias.reshape(-1)
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    options = (*flags, operator.index(chunk_size))
    packed = (cu_seqlens, chunk_indices, cu_seqlens_cpu)
    o, final_state = compiled.traced(SPEC, inputs, options, (scale,), *packed, tunable=tunable)
    return present(o), final_state


compiled.trace(SPEC)
