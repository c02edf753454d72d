"""Oracle of the inverse of a chunk's triangular matrix."""

import torch
from torch import Tensor

from .common import _join, _oracle, _split


@_oracle("token")
def solve_tril(
    A: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(I + A)^-1 of each chunk for strictly lower triangular `A [B, T, HV, BT]`; unit lower triangular."""
    BT = A.shape[-1]
    eye = torch.eye(BT, dtype=A.dtype, device=A.device)
    M = _split(A, BT).tril(-1) + eye
    inverse = torch.linalg.solve_triangular(M, eye.expand_as(M), upper=False, unitriangular=True)
    return _join(inverse, A.shape[1])
