"""Oracles of Kimi Delta Attention as a whole: the token recurrence, the chain of chunked oracles, and its gradients."""

from typing import NamedTuple

import torch
from torch import Tensor

from .bwd_dhu import chunk_gated_delta_rule_bwd_dhu
from .common import L2NORM_EPS, RCP_LN2, RESET, _oracle, _scale
from .fwd_h import chunk_gated_delta_rule_fwd_h
from .kda_backward import chunk_kda_bwd_dAv, chunk_kda_bwd_intra, chunk_kda_bwd_wy_dqkg_fused
from .kda_forward import chunk_gla_fwd_o_gk, chunk_kda_fwd_intra
from .kda_gate import kda_gate_fwd
from .local_cumsum import chunk_local_cumsum


class _Activated(NamedTuple):
    """The inputs after the activations that the op may fuse."""

    q: Tensor
    k: Tensor
    g: Tensor
    beta: Tensor


def _activate(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    lower_bound: float | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    dtype: torch.dtype,
) -> _Activated:
    """q and k normalised, beta in (0, 1) or (0, 2), g the natural-log gate: each where asked for."""
    q, k, g, beta = (x.to(dtype) for x in (q, k, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * (x.square().sum(-1, keepdim=True) + L2NORM_EPS).rsqrt() for x in (q, k))
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval needs use_beta_sigmoid_in_kernel")
    if use_beta_sigmoid_in_kernel:
        beta = (2.0 if allow_neg_eigval else 1.0) * beta.sigmoid()
    if use_gate_in_kernel:
        g = kda_gate_fwd(g, A_log, dt_bias, lower_bound, compute_dtype=dtype)
    return _Activated(q, k, g, beta)


def kda_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:
    """(o, final_state) token by token, the definition of the op.

    S <- diag(exp(g_t)) S, S <- S + k_t (beta_t (v_t - k_t^T S))^T, o_t = scale * q_t^T S, with `g [B, T, HV, K]` a
    natural logarithm.

    `use_gate_in_kernel`: g is `kda_gate_fwd` of it; `use_beta_sigmoid_in_kernel`: beta is sigmoid(beta), twice that
    with `allow_neg_eigval`; `use_qk_l2norm_in_kernel`: q and k are x / sqrt(sum(x^2) + 1e-6).
    """
    x = _activate(
        q, k, g, beta, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        lower_bound, A_log, dt_bias, compute_dtype,
    )  # fmt: skip
    o, final_state = _recurrence(
        x.q, x.k, v, x.g, x.beta, scale, initial_state, state_v_first, cu_seqlens, compute_dtype=compute_dtype
    )
    return o, final_state if output_final_state else None


@_oracle("token", "sequence")
def _recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    *,
    compute_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    B, T, HV, V = v.shape
    q, k = (x.repeat_interleave(HV // x.shape[2], 2) for x in (q, k))
    S = v.new_zeros(B, HV, k.shape[-1], V)
    if initial_state is not None:
        S = initial_state.mT if state_v_first else initial_state
    outputs = []
    for t in range(T):
        S = g[:, t, :, :, None].exp() * S
        v_new = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, None, :] @ S).squeeze(-2))
        S = S + k[:, t, :, :, None] * v_new[:, :, None, :]
        outputs.append((q[:, t, :, None, :] @ S).squeeze(-2))
    o = _scale(scale, q.shape[-1]) * torch.stack(outputs, 1) if outputs else torch.zeros_like(v)
    return o, S.mT if state_v_first else S


class KdaGradients(NamedTuple):
    """Gradients of q, k, v, the natural-log gate, beta and the initial state, each in the shape of its input."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dh0: Tensor | None


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int = 64,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:
    """(o, final_state) of `kda_recurrence` of activated inputs, chunk by chunk from the oracles of the stages."""
    cu, BT, dtype = cu_seqlens, chunk_size, compute_dtype
    G = chunk_local_cumsum(g.to(dtype).clamp(min=RESET), BT, False, RCP_LN2, cu, compute_dtype=dtype)
    w, u, _, kg, Aqk, _ = chunk_kda_fwd_intra(q, k, v, G, beta, scale, cu, BT, compute_dtype=dtype)
    h, v_new, final_state = chunk_gated_delta_rule_fwd_h(
        kg, w, u, None, G, initial_state, output_final_state, BT, True, state_v_first, cu, compute_dtype=dtype
    )
    assert v_new is not None
    o = chunk_gla_fwd_o_gk(q, v_new, G, Aqk, h, scale, state_v_first, cu, BT, compute_dtype=dtype)
    return o, final_state


def chunk_kda_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    do: Tensor,
    dht: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int = 64,
    compute_dtype: torch.dtype = torch.float32,
) -> KdaGradients:
    """Gradients of `chunk_kda` for `do [B, T, HV, V]` and the final state's `dht`, from the oracles of its stages."""
    cu, BT, dtype = cu_seqlens, chunk_size, compute_dtype
    G = chunk_local_cumsum(g.to(dtype).clamp(min=RESET), BT, False, RCP_LN2, cu, compute_dtype=dtype)
    w, u, qg, kg, Aqk, Akk = chunk_kda_fwd_intra(
        q, k, v, G, beta, scale, cu, BT, disable_recompute=True, compute_dtype=dtype
    )
    assert qg is not None
    h, v_new, _ = chunk_gated_delta_rule_fwd_h(
        kg, w, u, None, G, initial_state, False, BT, True, state_v_first, cu, compute_dtype=dtype
    )
    assert v_new is not None
    dAqk, dv_local = chunk_kda_bwd_dAv(q, k, v_new, do, Aqk, scale, cu, BT, compute_dtype=dtype)
    dh, dh0, du = chunk_gated_delta_rule_bwd_dhu(
        qg, kg, w, do, dv_local, None, G, initial_state, dht, _scale(scale, q.shape[-1]), state_v_first, cu, BT,
        compute_dtype=dtype,
    )  # fmt: skip
    dq, dk, dv, db, dG, dAkk = chunk_kda_bwd_wy_dqkg_fused(
        q, k, v, v_new, G, beta, Akk, h, do, dh, du, scale, state_v_first, cu, BT, compute_dtype=dtype
    )
    dq, dk, db, dG = chunk_kda_bwd_intra(
        q, k, G, beta, dAqk, dAkk, dq, dk, db, dG, cu, chunk_size=BT, compute_dtype=dtype
    )
    dg = chunk_local_cumsum(dG, BT, True, None, cu, compute_dtype=dtype)
    dq, dk = (x.reshape(*x.shape[:2], q.shape[2], -1, x.shape[3]).sum(3) for x in (dq, dk))
    return KdaGradients(dq, dk, dv, dg.where(g.to(dtype) >= RESET, 0.0), db, dh0)
