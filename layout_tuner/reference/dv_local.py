"""Oracle of the gradient of the values within a chunk."""

import torch
from torch import Tensor

from .common import _decay, _gate, _heads, _join, _oracle, _scale, _split


@_oracle("token")
def chunk_bwd_dv_local(
    q: Tensor,
    k: Tensor,
    do: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    A: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """dv[s] = sum over t >= s in the chunk of scale * <k_s, q_t> * exp2(G_t - G_s) * do[t].

    A given `A [B, T, HV, BT]` (row: query token, column: position of the key) replaces the factor before do[t]: it
    holds scale and gate already, only the causal mask is applied to it, and q, k, g, g_gamma, scale are not read.
    """
    T, HV = do.shape[1:3]
    if A is not None:
        weights = _split(A, chunk_size).tril()
    else:
        product = _heads(q, HV, chunk_size) @ _heads(k, HV, chunk_size).mT
        weights = _scale(scale, q.shape[-1]) * product * _decay(_gate(do, chunk_size, g, g_gamma))
    return _join(weights.mT @ _split(do, chunk_size), T)
