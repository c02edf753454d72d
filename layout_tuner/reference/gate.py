"""Oracles of the gate and its gradients."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .local_cumsum import chunk_local_cumsum


def gdn_gate_chunk_cumsum(
    g: Tensor,
    A_log: Tensor,
    chunk_size: int,
    scale: float | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`chunk_local_cumsum` of the natural-log gate -exp(A_log) * softplus(g + dt_bias), for raw `g [B, T, HV]`."""
    gate = gdn_gate(g, A_log, dt_bias, compute_dtype=compute_dtype)
    return chunk_local_cumsum(gate, chunk_size, scale=scale, cu_seqlens=cu_seqlens, compute_dtype=compute_dtype)


def gdn_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, *, compute_dtype: torch.dtype = torch.float32
) -> Tensor:
    """The natural-log gate -exp(A_log) * softplus(g + dt_bias); `A_log` and `dt_bias` have HV elements."""
    HV = g.shape[-1]
    x = g.to(compute_dtype)
    if dt_bias is not None:
        x = x + dt_bias.to(compute_dtype).reshape(HV)
    return -A_log.to(compute_dtype).reshape(HV).exp() * F.softplus(x)


def gdn_gate_bwd(
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    dyg: Tensor,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the fused gate; `dyg [B, T, HV]` is the gradient of the natural-log gate of each token.

    dg = -dyg * exp(A_log) * sigmoid(g + dt_bias), dA_log = sum(dyg * gate), ddt_bias = sum(dg): sums over B and T, no
    chunks, so that rows outside every sequence must be zero in `dyg`. dA_log has A_log's shape, ddt_bias dt_bias's.
    """
    dyg = dyg.to(compute_dtype)
    x = g.to(compute_dtype)
    if dt_bias is not None:
        x = x + dt_bias.to(compute_dtype).reshape(-1)
    dg = -dyg * A_log.to(compute_dtype).reshape(-1).exp() * x.sigmoid()
    gate = gdn_gate(g, A_log, dt_bias, compute_dtype=compute_dtype)
    dA_log = (dyg * gate).flatten(0, -2).sum(0).reshape(A_log.shape)
    return dg, dA_log, None if dt_bias is None else dg.flatten(0, -2).sum(0).reshape(dt_bias.shape)


def gate_parameter_term_rms(
    dg: Tensor,
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> dict[str, Tensor]:
    """Scales for errors of a chain's dA_log and ddt_bias, sums over all tokens whose terms cancel.

    The terms of ddt_bias are dg, the gradient of the raw gate `g`, and those of dA_log dg * softplus(x) / sigmoid(x),
    x = g + dt_bias. A chain rounds what a chunk's gradients are made from, and the gradient of a token's gate is a sum
    over the later tokens of its chunk: errors of one chunk have one sign and add up, those of different chunks are
    independent. So the scale is the root of the sum over chunks of the squared sum of the terms' magnitudes, and of
    that the root mean square over heads.
    """
    x = g.to(dg.dtype)
    if dt_bias is not None:
        x = x + dt_bias.to(dg.dtype).reshape(-1)
    x = torch.where(dg == 0, 0.0, x).clamp(min=-30.0)  # softplus(x) / sigmoid(x) is 1 below
    terms = {"dA_log": dg * F.softplus(x) / x.sigmoid()}
    if dt_bias is not None:
        terms["ddt_bias"] = dg
    scales = {}
    for name, term in terms.items():
        size = term.abs()
        up_to, from_there = (
            chunk_local_cumsum(size, chunk_size, reverse, None, cu_seqlens, compute_dtype=dg.dtype)
            for reverse in (False, True)
        )
        # Every token of a chunk finds the chunk's whole sum; times its own size, it is the square when all are added.
        scales[name] = (size * (up_to + from_there - size)).flatten(0, -2).sum(0).mean().sqrt()
    return scales
