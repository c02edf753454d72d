"""Oracles of the gradients of q, k, w and g, and of the terms they are sums of."""

import torch
from torch import Tensor

from .common import _decay, _gate, _group_sum, _heads, _join, _oracle, _rms, _scale, _split


@_oracle("token", "token", "token", "token")
def _dqkwg(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    w: Tensor | None = None,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    dv: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """dq, dk, dw, and the terms of dg `[B, T, HV, 6]`."""
    (T, HV), H, BT = v.shape[1:3], q.shape[2], chunk_size
    if w is not None and dv is None:
        raise ValueError("chunk_bwd_dqkwg: w asks for dw, which needs dv")
    b_q, b_k, b_v, b_do = _heads(q, HV, BT), _heads(k, HV, BT), _split(v, BT), _split(do, BT)
    b_h, b_dh = (x.mT.movedim(1, 2) if state_v_first else x.movedim(1, 2) for x in (h, dh))
    G = _gate(v, BT, g, g_gamma)
    scale = _scale(scale, q.shape[-1])
    ds = scale * (b_do @ b_v.mT) * _decay(G)
    dq_inter = scale * G.exp2()[..., None] * (b_do @ b_h.mT)
    dk_inter = (G[..., -1:] - G).exp2()[..., None] * (b_v @ b_dh.mT)
    dq = _group_sum(dq_inter + ds @ b_k, T, H)
    dk = _group_sum(dk_inter + ds.mT @ b_q, T, H)
    dw = None if w is None or dv is None else _join(-(_split(dv, BT) @ b_h.mT), T)
    if g is None:
        return dq, dk, dw, None
    # sum_K(dq * q) and sum_K(dk * k) share the diagonal of ds * q k^T, which cancels: it is left out of both.
    E = (ds * (b_q @ b_k.mT)).tril(-1)
    k_dk_inter = (dk_inter * b_k).sum(-1)
    last = torch.zeros_like(G)
    valid = torch.arange(G.shape[2], 0, -1, device=G.device) > 1
    last_token = torch.where(valid, BT - 1, (T - 1) % BT)[None, None, :, None].expand(*G.shape[:3], 1)
    state_term = last.scatter(3, last_token, G[..., -1:].exp2() * (b_h * b_dh).sum((-2, -1))[..., None])
    value_term = last.scatter(3, last_token, k_dk_inter.sum(-1, keepdim=True))
    terms = [(dq_inter * b_q).sum(-1), E.sum(-1), -k_dk_inter, -E.sum(-2), state_term, value_term]
    return dq, dk, dw, _join(torch.stack(terms, -1), T)


def chunk_bwd_dqkwg(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    w: Tensor | None = None,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    dv: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(dq, dk, dw, dg): what the outputs and the states' gradient give; `v` is v_new, `dv` is dhu's dv2.

    ds = scale * tril(do v^T * exp2(G_t - G_s)), dq_inter = scale * exp2(G) * (do h^T),
    dk_inter = exp2(G_last - G) * (v dh^T), dq = dq_inter + ds k, dk = dk_inter + ds^T q, dw = -dv h^T,
    dG = sum_K(dq * q) - sum_K(dk * k), and dG[last] += exp2(G_last) * sum(h * dh) + sum(dk_inter * k).

    dq and dk are `[B, T, H, K]`. dw `[B, T, HV, K]` is None without w (whose values are not read). dg `[B, T, HV]` is
    None without g, also with g_gamma; it is the gradient of the cumulative gate in natural-log units.
    """
    dq, dk, dw, terms = _dqkwg(
        q, k, v, do, h, dh, w, g, g_gamma, dv, scale, state_v_first, cu_seqlens, chunk_size, compute_dtype=compute_dtype
    )
    return dq, dk, dw, None if terms is None else terms.sum(-1)


def chunk_bwd_dqkwg_term_rms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    w: Tensor | None = None,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    dv: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """`{"dg": rms}` of the terms whose sum is dg, a scale for errors where they cancel; empty without g."""
    *_, terms = _dqkwg(
        q, k, v, do, h, dh, None, g, g_gamma, dv, scale, state_v_first, cu_seqlens, chunk_size,
        compute_dtype=compute_dtype,
    )  # fmt: skip
    return {} if terms is None else {"dg": _rms(terms)}
