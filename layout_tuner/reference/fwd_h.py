"""Oracle of the states, chunk after chunk."""

import torch
from torch import Tensor

from .common import _heads, _join, _oracle, _split
from .state import _state_decays


@_oracle("chunk", "token", "sequence")
def chunk_gated_delta_rule_fwd_h(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    save_new_value: bool = True,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(h, v_new, final_state): h[c] = S at the START of chunk c, v_new = u - w S (before any decay), then

    S <- exp2(G_last) S + k^T (exp2(G_last - G) * v_new). `gk [B, T, HV, K]` (cumulative, log2) also decays S, by
    diag(exp2(gk_last)), and nothing else: the k and w given with it are gated already.
    """
    (T, HV, V), K = u.shape[1:], k.shape[-1]
    b_k, b_w, b_u = _heads(k, HV, chunk_size), _split(w, chunk_size), _split(u, chunk_size)
    keep, to_end = _state_decays(u, chunk_size, g, gk)
    S = u.new_zeros(u.shape[0], HV, K, V)
    if initial_state is not None:
        S = initial_state.mT if state_v_first else initial_state
    states, new_values = [], []
    for c in range(b_k.shape[2]):
        states.append(S)
        v_new = b_u[:, :, c] - b_w[:, :, c] @ S
        new_values.append(v_new)
        S = keep[:, :, c] * S + b_k[:, :, c].mT @ (to_end[:, :, c] * v_new)
    h = torch.stack(states, 1) if states else u.new_zeros(u.shape[0], 0, HV, K, V)
    v_new = _join(torch.stack(new_values, 2), T) if new_values else u
    if state_v_first:
        h, S = h.mT, S.mT
    return h, v_new if save_new_value else None, S if output_final_state else None
