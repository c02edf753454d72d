"""Oracle of the products of keys within a chunk."""

import torch
from torch import Tensor

from .common import _decay, _gate, _heads, _join, _oracle, _split


@_oracle("token")
def chunk_scaled_dot_kkt_fwd(
    k: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    output_dtype: torch.dtype = torch.float32,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """M[t, s] = beta_t <k_t, k_s> exp2(G_t - G_s) for s < t in one chunk, else 0: `[B, T, HV, BT]`, s a position."""
    if beta is None:
        raise ValueError("chunk_scaled_dot_kkt_fwd: beta is required")
    b_k = _heads(k, beta.shape[2], chunk_size)
    M = (b_k @ b_k.mT) * _decay(_gate(beta, chunk_size, g)) * _split(beta, chunk_size)[..., None]
    return _join(M.tril(-1), k.shape[1])
