"""Oracles of the gradients through the WY representation, and of the terms they are sums of."""

import torch
from torch import Tensor

from .common import _decay, _gate, _group_sum, _heads, _join, _oracle, _rms, _split


@_oracle("token", "token", "token", "token")
def _wy_repr_bwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    dw: Tensor,
    du: Tensor,
    g: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dk, dv, and the terms of dbeta and of dg, `[B, T, HV, 3]` each."""
    (T, HV), BT = v.shape[1:3], A.shape[-1]
    b_k, b_v, b_A, b_dw, b_du = _heads(k, HV, BT), _split(v, BT), _split(A, BT), _split(dw, BT), _split(du, BT)
    b_beta, G = _split(beta, BT)[..., None], _gate(v, BT, g)
    k_gated = G.exp2()[..., None] * b_k
    dA = b_du @ (b_beta * b_v).mT + b_dw @ (b_beta * k_gated).mT
    dM = -(b_A.mT @ dA @ b_A.mT).tril(-1)
    product = b_k @ b_k.mT * _decay(G)
    weights = dM * b_beta * _decay(G)
    t_w, t_u = b_A.mT @ b_dw, b_A.mT @ b_du
    dk = b_beta * G.exp2()[..., None] * t_w + weights @ b_k + weights.mT @ b_k
    dbeta = [(t_u * b_v).sum(-1), (t_w * k_gated).sum(-1), (dM * product).sum(-1)]
    dg = [(b_beta * t_w * k_gated).sum(-1), (dM * b_beta * product).sum(-1), -(dM * b_beta * product).sum(-2)]
    dbeta_terms, dg_terms = (_join(torch.stack(terms, -1), T) for terms in (dbeta, dg))
    return _group_sum(dk, T, k.shape[2]), _join(b_beta * t_u, T), dbeta_terms, None if g is None else dg_terms


def prepare_wy_repr_bwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    dw: Tensor,
    du: Tensor,
    g: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dk, dv, dbeta, dg) through w, u and the inverse; `dw` is dqkwg's, sign as it comes, `du` is dhu's dv2.

    dA = du (beta * v)^T + dw (beta * exp2(G) * k)^T, dM = -strict_tril(A^T dA A^T), P = k k^T * exp2(G_t - G_s),
    t_w = A^T dw, t_u = A^T du, W = dM * beta_t * exp2(G_t - G_s); then dv = beta * t_u,
    dk = beta * exp2(G) * t_w + W k + W^T k, dbeta = sum_V(t_u * v) + sum_K(t_w * exp2(G) * k) + rowsum(dM * P),
    dG = sum_K(t_w * beta * exp2(G) * k) + rowsum(dM * beta_t * P) - colsum(dM * beta_t * P).

    dk is `[B, T, H, K]`; dg is None without g. Masking dA to its strictly lower part first gives the same dM.
    """
    dk, dv, dbeta, dg = _wy_repr_bwd(k, v, beta, A, dw, du, g, cu_seqlens, compute_dtype=compute_dtype)
    return dk, dv, dbeta.sum(-1), None if dg is None else dg.sum(-1)


def prepare_wy_repr_bwd_term_rms(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    dw: Tensor,
    du: Tensor,
    g: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """`{"dbeta": rms, "dg": rms}` of the terms whose sums they are, scales for errors where these cancel."""
    _, _, dbeta, dg = _wy_repr_bwd(k, v, beta, A, dw, du, g, cu_seqlens, compute_dtype=compute_dtype)
    return {name: _rms(terms) for name, terms in (("dbeta", dbeta), ("dg", dg)) if terms is not None}
