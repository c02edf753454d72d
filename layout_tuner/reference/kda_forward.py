"""Oracles of the forward stages with a decay for each key channel.

A decay depends on two tokens and a channel; the oracles take one column s of it at a time, in memory of a few operands.
"""

import math

import torch
from torch import Tensor

from .common import _heads, _join, _oracle, _scale, _split
from .solve_tril import solve_tril


def _decay_from(G: Tensor, s: int) -> Tensor:
    """exp2(G_t - G_s) for t >= s, else 0, `[..., BT, K]`; masked first, since exp2 could overflow."""
    earlier = torch.arange(G.shape[-2], device=G.device) < s
    return (G - G[..., s : s + 1, :]).masked_fill(earlier[:, None], -math.inf).exp2()


@_oracle("token", "token")
def _scores(
    q: Tensor,
    k: Tensor,
    gk: Tensor,
    beta: Tensor,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Aqk with the scale, s <= t, and M with beta, s < t."""
    (T, HV, K), BT = gk.shape[1:], chunk_size
    b_q, b_k, G = _heads(q, HV, BT), _heads(k, HV, BT), _split(gk, BT, fill_last=True)
    columns = []
    for s in range(BT):
        decayed = b_k[..., s : s + 1, :] * _decay_from(G, s)
        columns.append(torch.stack([(b_q * decayed).sum(-1), (b_k * decayed).sum(-1)]))
    Aqk, M = torch.stack(columns, -1)
    return _join(_scale(scale, K) * Aqk, T), _join(_split(beta, BT)[..., None] * M.tril(-1), T)


def chunk_kda_fwd_intra(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """(w, u, qg, kg, Aqk, Akk): the scores, the inverse Akk = (I + M)^-1, and what `recompute_w_u_fwd_kda` makes of it.

    Aqk[t, s] = scale * sum_c q_t k_s exp2(G_t - G_s), M[t, s] = beta_t * sum_c k_t k_s exp2(G_t - G_s). qg is None
    unless `disable_recompute`. A bound changes how kernels form decays, not what they are.
    """
    if gk is None or beta is None:
        raise ValueError("chunk_kda_fwd_intra: gk and beta are required")
    Aqk, M = _scores(q, k, gk, beta, scale, cu_seqlens, chunk_size, compute_dtype=compute_dtype)
    Akk = solve_tril(M, cu_seqlens, compute_dtype=compute_dtype)
    queries = q if disable_recompute else None
    w, u, qg, kg = recompute_w_u_fwd_kda(k, v, beta, Akk, gk, queries, cu_seqlens, compute_dtype=compute_dtype)
    return w, u, qg, kg, Aqk, Akk


@_oracle("token", "token", "token", "token")
def recompute_w_u_fwd_kda(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    gk: Tensor,
    q: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(w, u, qg, kg): w = A (beta * exp2(G) * k), u = A (beta * v), qg = exp2(G) * q, kg = exp2(G_last - G) * k."""
    (T, HV), BT = v.shape[1:3], A.shape[-1]
    b_A, b_beta, G = _split(A, BT), _split(beta, BT)[..., None], _split(gk, BT, fill_last=True)
    b_k = _heads(k, HV, BT)
    w = _join(b_A @ (b_beta * G.exp2() * b_k), T)
    u = _join(b_A @ (b_beta * _split(v, BT)), T)
    qg = None if q is None else _join(G.exp2() * _heads(q, HV, BT), T)
    return w, u, qg, _join((G[..., -1:, :] - G).exp2() * b_k, T)


@_oracle("token")
def chunk_gla_fwd_o_gk(
    q: Tensor,
    v: Tensor,
    g: Tensor,
    A: Tensor,
    h: Tensor,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """o = scale * (exp2(G) * q) h + tril(A) v, `[B, T, HV, V]`; A has the scale already."""
    (T, HV), K = v.shape[1:3], q.shape[-1]
    b_q = _split(g, chunk_size, fill_last=True).exp2() * _heads(q, HV, chunk_size)
    b_h = (h.mT if state_v_first else h).movedim(2, 1)
    return _join(_scale(scale, K) * (b_q @ b_h) + _split(A, chunk_size).tril() @ _split(v, chunk_size), T)
