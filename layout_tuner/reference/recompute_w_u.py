"""Oracle of the WY representation's `w` and `u`."""

import torch
from torch import Tensor

from .common import _gate, _heads, _join, _oracle, _split


@_oracle("token", "token")
def recompute_w_u_fwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    g: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """w = A (beta * exp2(G) * k) `[B, T, HV, K]` and u = A (beta * v) `[B, T, HV, V]`; A is used as it is."""
    (T, HV), BT = v.shape[1:3], A.shape[-1]
    b_A, b_beta = _split(A, BT), _split(beta, BT)[..., None]
    decay = _gate(v, BT, g).exp2()[..., None]
    return _join(b_A @ (b_beta * decay * _heads(k, HV, BT)), T), _join(b_A @ (b_beta * _split(v, BT)), T)
