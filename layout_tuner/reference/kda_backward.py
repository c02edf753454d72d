"""Oracles of the backward stages with a decay for each key channel.

dG, the gradient of a cumulative gate, is with respect to G divided by ln 2: its reverse sum in a chunk is the gradient
of the natural-log gate.
"""

import torch
from torch import Tensor

from .common import _heads, _join, _oracle, _rms, _scale, _split
from .kda_forward import _decay_from


@_oracle("token", "token")
def chunk_kda_bwd_dAv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    A: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """(dA, dv): dA = scale * tril(do v^T), the gradient of the score without its scale, and dv = tril(A)^T do."""
    if A is None:
        raise ValueError("chunk_kda_bwd_dAv: A is required")
    T, BT = v.shape[1], chunk_size
    b_do = _split(do, BT)
    dA = _scale(scale, q.shape[-1]) * (b_do @ _split(v, BT).mT).tril()
    return _join(dA, T), _join(_split(A, BT).tril().mT @ b_do, T)


@_oracle("token", "token", "token", "token", "token", "token", "token", "token")
def _wy_dqkg(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    v_new: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,
    h: Tensor,
    do: Tensor,
    dh: Tensor,
    dv: Tensor,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    """dq, dk, dv, db, dG, dA, and the terms of db and of dG."""
    (T, HV), K, BT = v.shape[1:3], q.shape[-1], chunk_size
    b_q, b_k, G = _heads(q, HV, BT), _heads(k, HV, BT), _split(g, BT, fill_last=True)
    b_beta, b_A, b_v, du = _split(beta, BT)[..., None], _split(A, BT), _split(v, BT), _split(dv, BT)
    b_h, b_dh = ((x.mT if state_v_first else x).movedim(2, 1) for x in (h, dh))
    gated = G.exp2() * b_k
    dw = -du @ b_h.mT
    t_u, t_w = b_A.mT @ du, b_A.mT @ dw
    dq = _scale(scale, K) * G.exp2() * (_split(do, BT) @ b_h.mT)
    dk_end = (G[..., -1:, :] - G).exp2() * (_split(v_new, BT) @ b_dh.mT)
    dA = (b_beta.mT * (du @ b_v.mT + dw @ gated.mT)).tril(-1)
    dAkk = -(b_A.mT @ dA @ b_A.mT).tril(-1)
    db = torch.stack([(t_u * b_v).sum(-1), (t_w * gated).sum(-1)], -1)
    at_end = G[..., -1, :].exp2() * (b_h * b_dh).sum(-1) + (b_k * dk_end).sum(-2)
    # A filled-up chunk's last row is no token: the last token of the sequence has what belongs to G_last.
    position = torch.arange(G.shape[2] * BT, device=G.device).reshape(-1, BT)
    last = (position == position[:, -1:].clamp(max=T - 1)).to(G.dtype)
    dG = torch.stack([b_q * dq, -b_k * dk_end, b_beta * gated * t_w, last[..., None] * at_end[..., None, :]], -1)
    dk = dk_end + b_beta * G.exp2() * t_w
    results = (dq, dk, b_beta * t_u, db.sum(-1), dG.sum(-1), dAkk, db, dG)
    return tuple(_join(x, T) for x in results)


def chunk_kda_bwd_wy_dqkg_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    v_new: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,
    h: Tensor,
    do: Tensor,
    dh: Tensor,
    dv: Tensor,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv, db, dG, dA) through the states, w, u and the inverse; `dv` is dhu's dv2, the gradient of u.

    With dw = -du h^T, t_u = A^T du, t_w = A^T dw: dq = scale * exp2(G) * (do h^T),
    dk_end = exp2(G_last - G) * (v_new dh^T), dk = dk_end + beta * exp2(G) * t_w, dv = beta * t_u,
    db = sum_V(t_u * v) + sum_K(t_w * exp2(G) * k), dA = -stril(A^T stril(beta_s * (du v^T + dw (exp2(G) * k)^T)) A^T),
    dG = q * dq - k * dk_end + beta * exp2(G) * k * t_w, and in a chunk's last row besides
    exp2(G_last) * sum_V(h * dh) + sum_t(k * dk_end). dq and dk are per value head.
    """
    arguments = (q, k, v, v_new, g, beta, A, h, do, dh, dv, scale, state_v_first, cu_seqlens, chunk_size)
    return _wy_dqkg(*arguments, compute_dtype=compute_dtype)[:6]


def chunk_kda_bwd_wy_dqkg_fused_term_rms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    v_new: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,
    h: Tensor,
    do: Tensor,
    dh: Tensor,
    dv: Tensor,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """`{"db": rms, "dg": rms}` of the terms whose sums they are, scales for errors where these cancel."""
    arguments = (q, k, v, v_new, g, beta, A, h, do, dh, dv, scale, state_v_first, cu_seqlens, chunk_size)
    *_, db, dG = _wy_dqkg(*arguments, compute_dtype=compute_dtype)
    return {"db": _rms(db), "dg": _rms(dG)}


@_oracle("token", "token", "token", "token")
def chunk_kda_bwd_intra(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    dAqk: Tensor,
    dAkk: Tensor,
    dq: Tensor,
    dk: Tensor,
    db: Tensor,
    dg: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_size: int = 64,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, db, dG), each the one given and what flows through the scores, with D = exp2(G_t - G_s):

    a_t = sum over s < t of dAqk[t,s] k_s D, row_t = the same of dAkk, col_s = sum over t > s of
    (dAqk[t,s] q_t + dAkk[t,s] beta_t k_t) D; dq += a + dAqk[t,t] k, dk += beta * row + col + dAqk[t,t] q,
    db += sum_K(row * k), dG += q * a + k * (beta * row - col). The terms of s = t in dG cancel and are left out.
    """
    (T, HV), BT = g.shape[1:3], chunk_size
    b_q, b_k, G = _heads(q, HV, BT), _heads(k, HV, BT), _split(g, BT, fill_last=True)
    b_beta, b_dA, b_dM = _split(beta, BT)[..., None], _split(dAqk, BT).tril(), _split(dAkk, BT).tril(-1)
    own, b_dA = b_dA.diagonal(dim1=-2, dim2=-1)[..., None], b_dA.tril(-1)
    a, row, columns = torch.zeros_like(b_q), torch.zeros_like(b_q), []
    for s in range(BT):
        decay = _decay_from(G, s)
        q_s, k_s = b_dA[..., s : s + 1], b_dM[..., s : s + 1]
        decayed = b_k[..., s : s + 1, :] * decay
        a, row = a + q_s * decayed, row + k_s * decayed
        columns.append((decay * (q_s * b_q + k_s * b_beta * b_k)).sum(-2))
    col = torch.stack(columns, -2)
    return (
        dq + _join(a + own * b_k, T),
        dk + _join(b_beta * row + col + own * b_q, T),
        db + _join((row * b_k).sum(-1), T),
        dg + _join(b_q * a + b_k * (b_beta * row - col), T),
    )
