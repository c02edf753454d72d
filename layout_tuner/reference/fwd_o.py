"""Oracle of a chunk's output."""

import torch
from torch import Tensor

from .common import _decay, _gate, _heads, _join, _oracle, _scale, _split


@_oracle("token")
def chunk_fwd_o(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    h: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """o = scale * ((exp2(G) * q) h + tril(q k^T * exp2(G_t - G_s)) v); `v` is fwd_h's v_new, the triangle keeps s = t.

    `g_gamma [HV]` (log2) stands for G_t = g_gamma * (position in the chunk + 1); not together with `g`.
    """
    T, HV = v.shape[1:3]
    b_q, b_k = _heads(q, HV, chunk_size), _heads(k, HV, chunk_size)
    G = _gate(v, chunk_size, g, g_gamma)
    b_h = (h.mT if state_v_first else h).movedim(1, 2)
    o = (G.exp2()[..., None] * b_q) @ b_h + (b_q @ b_k.mT * _decay(G)) @ _split(v, chunk_size)
    return _join(_scale(scale, q.shape[-1]) * o, T)
