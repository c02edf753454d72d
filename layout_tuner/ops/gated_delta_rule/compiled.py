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
    tensors: tuple[Tensor | None, ...],
    options: tuple[bool | int, ...],
    scale: float | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
    cp_context: object | None,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gated_delta_rule` while torch traces, transforms or watches it; takes what `arguments.check` takes."""
    tunable = False
    if not torch.compiler.is_dynamo_compiling():
        named = {**dict(zip(Inputs._fields, tensors)), "cu_seqlens": cu_seqlens, "chunk_indices": chunk_indices}
        tracing.require_seen(SPEC, named)
        tunable = tracing.real(list(named.values()))
    arguments.check(tensors, options, scale, cu_seqlens, cu_seqlens_cpu, chunk_indices, cp_context)
    inputs = arguments.operands(tensors, options)
    *flags, chunk_size = options
    packed = (cu_seqlens, chunk_indices, cu_seqlens_cpu)
    whole = (*flags, operator.index(chunk_size))
    o, final_state = compiled.traced(SPEC, inputs, whole, (scale,), *packed, tunable=tunable)
    return present(o), final_state


compiled.trace(SPEC)
