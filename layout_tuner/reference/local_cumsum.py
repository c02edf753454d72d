"""Oracle of the gate's sums within chunks."""

import torch
from torch import Tensor

from .common import _join, _oracle, _split


@_oracle("token")
def chunk_local_cumsum(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """out[t] = scale * (sum of g[s], s <= t in the chunk of t), or s >= t with `reverse`; t itself counts in both.

    `g` is `[B, T, H]` or, each s of S on its own, `[B, T, H, S]`. The scale multiplies the sum; None is 1.
    """
    x = _split(g, chunk_size)
    x = x.flip(3).cumsum(3).flip(3) if reverse else x.cumsum(3)
    return _join(x if scale is None else x * scale, g.shape[1])
