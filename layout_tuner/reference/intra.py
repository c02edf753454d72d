"""Oracle of the steps within a chunk that come before the states."""

import torch
from torch import Tensor

from .kkt import chunk_scaled_dot_kkt_fwd
from .recompute_w_u import recompute_w_u_fwd
from .solve_tril import solve_tril


def chunk_gated_delta_rule_fwd_intra(
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """(w, u, A): kkt, its inverse A, then w and u."""
    if beta is None:
        raise ValueError("chunk_gated_delta_rule_fwd_intra: beta is required")
    M = chunk_scaled_dot_kkt_fwd(k, g, beta, cu_seqlens, chunk_size, compute_dtype=compute_dtype)
    A = solve_tril(M, cu_seqlens, compute_dtype=compute_dtype)
    w, u = recompute_w_u_fwd(k, v, beta, A, g, cu_seqlens, compute_dtype=compute_dtype)
    return w, u, A
