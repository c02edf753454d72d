"""Oracle of the gradients of the states, last chunk first."""

import torch
from torch import Tensor

from .common import _gate, _heads, _join, _oracle, _scale, _split
from .state import _state_decays


@_oracle("chunk", "sequence", "token")
def chunk_gated_delta_rule_bwd_dhu(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    do: Tensor,
    dv: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    h0: Tensor | None = None,
    dht: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(dh, dh0, dv2): dh[c] = gradient of S at the END of chunk c, dv2 = dv + exp2(G_last - G) * (k dh), and backwards

    dh <- exp2(G_last) dh + (scale * exp2(G) * q)^T do - w^T dv2, from dht or 0. `dv` is dv_local's result, dv2 the
    gradient of u. dh0 is None without h0 (whose values are not read). `gk` only decays dh, by diag(exp2(gk_last)).
    """
    (T, HV, V), K = do.shape[1:], q.shape[-1]
    b_q, b_k = _heads(q, HV, chunk_size), _heads(k, HV, chunk_size)
    b_w, b_do, b_dv = _split(w, chunk_size), _split(do, chunk_size), _split(dv, chunk_size)
    b_q = _scale(scale, K) * _gate(do, chunk_size, g).exp2()[..., None] * b_q
    keep, to_end = _state_decays(do, chunk_size, g, gk)
    dS = do.new_zeros(do.shape[0], HV, K, V)
    if dht is not None:
        dS = dht.mT if state_v_first else dht
    states, corrected = [], []
    for c in reversed(range(b_k.shape[2])):
        states.append(dS)
        dv2 = b_dv[:, :, c] + to_end[:, :, c] * (b_k[:, :, c] @ dS)
        corrected.append(dv2)
        dS = keep[:, :, c] * dS + b_q[:, :, c].mT @ b_do[:, :, c] - b_w[:, :, c].mT @ dv2
    dh = torch.stack(states[::-1], 1) if states else do.new_zeros(do.shape[0], 0, HV, K, V)
    dv2 = _join(torch.stack(corrected[::-1], 2), T) if corrected else dv
    if state_v_first:
        dh, dS = dh.mT, dS.mT
    return dh, None if h0 is None else dS, dv2
