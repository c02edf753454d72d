"""Oracles of the gate with channels and its gradients."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .local_cumsum import chunk_local_cumsum


def kda_gate_fwd(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype | None = torch.float,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The natural-log gate of raw `g [..., HV, K]`, `A_log` of HV elements and `dt_bias` of HV * K.

    -exp(A_log) * softplus(g + dt_bias), or lower_bound * sigmoid(exp(A_log) * (g + dt_bias)) with a bound.
    """
    x, rate = _biased_and_rate(g, A_log, dt_bias, compute_dtype)
    if lower_bound is None:
        return -rate * F.softplus(x)
    return lower_bound * (rate * x).sigmoid()


def kda_gate_chunk_cumsum(
    g: Tensor,
    A_log: Tensor | None,
    chunk_size: int,
    scale: float | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: Tensor | None = None,
    lower_bound: float | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`chunk_local_cumsum` of `kda_gate_fwd`, for raw `g [B, T, HV, K]`."""
    gate = kda_gate_fwd(g, A_log, dt_bias, lower_bound, compute_dtype=compute_dtype)
    return chunk_local_cumsum(gate, chunk_size, scale=scale, cu_seqlens=cu_seqlens, compute_dtype=compute_dtype)


def kda_gate_bwd(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dyg: Tensor | None = None,
    lower_bound: float | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dg, dA_log, ddt_bias) from `dyg [B, T, HV, K]`, the gradient of the natural-log gate of each token.

    Rows outside every sequence must be zero in `dyg`: sums are over B and T, and know no sequences.
    """
    if dyg is None:
        raise ValueError("kda_gate_bwd: dyg is required")
    dg, terms = _gradient_terms(g, A_log, dt_bias, dyg, lower_bound, compute_dtype)
    dA_log = None if A_log is None else terms.flatten(0, -3).sum((0, 2)).reshape(A_log.shape)
    return dg, dA_log, None if dt_bias is None else dg.flatten(0, -3).sum(0).reshape(dt_bias.shape)


def kda_gate_bwd_term_rms(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dyg: Tensor | None = None,
    lower_bound: float | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Scales for errors of dA_log and ddt_bias, sums over tokens whose terms cancel.

    Rounding of independent terms adds up as their squares do: the root of a sum's sum of squared terms, and of that
    the root mean square over the elements.
    """
    if dyg is None:
        raise ValueError("kda_gate_bwd: dyg is required")
    dg, terms = _gradient_terms(g, A_log, dt_bias, dyg, lower_bound, compute_dtype)
    squares = {"dA_log": terms.square().flatten(0, -3).sum((0, 2)), "ddt_bias": dg.square().flatten(0, -3).sum(0)}
    return {name: square.mean().sqrt() for name, square in squares.items()}


def _gradient_terms(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    dyg: Tensor,
    lower_bound: float | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """dg, and the terms that dA_log is the sum of, both in the shape of `g`."""
    x, rate = _biased_and_rate(g, A_log, dt_bias, dtype)
    dyg = dyg.to(dtype)
    if lower_bound is None:
        return -rate * x.sigmoid() * dyg, -rate * F.softplus(x) * dyg
    dg = dyg * lower_bound * (rate * x).sigmoid() * (-rate * x).sigmoid() * rate
    return dg, dg * x


def _biased_and_rate(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """g + dt_bias, and exp(A_log) for each value head, `[HV, 1]`."""
    HV, K = g.shape[-2:]
    x = g.to(dtype)
    if dt_bias is not None:
        x = x + dt_bias.to(dtype).reshape(HV, K)
    if A_log is None:
        return x, x.new_ones(HV, 1)
    return x, A_log.to(dtype).reshape(HV, 1).exp()
