"""Oracles of the whole op: the token recurrence, the chain of chunked oracles, and its gradients."""

from typing import NamedTuple

import torch
from torch import Tensor

from .bwd_dhu import chunk_gated_delta_rule_bwd_dhu
from .common import L2NORM_EPS, RCP_LN2, RESET, _oracle, _scale
from .dqkwg import chunk_bwd_dqkwg
from .dv_local import chunk_bwd_dv_local
from .fwd_h import chunk_gated_delta_rule_fwd_h
from .fwd_o import chunk_fwd_o
from .gate import gdn_gate, gdn_gate_bwd
from .intra import chunk_gated_delta_rule_fwd_intra
from .local_cumsum import chunk_local_cumsum
from .wy_bwd import prepare_wy_repr_bwd


class _Activated(NamedTuple):
    """The chain's inputs after the activations that the op may fuse."""

    q: Tensor
    k: Tensor
    beta: Tensor
    g: Tensor | None
    q_rstd: Tensor
    k_rstd: Tensor


def _activate(
    q: Tensor,
    k: Tensor,
    g: Tensor | None,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    use_gate_in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    dtype: torch.dtype,
) -> _Activated:
    """q and k normalised, beta in (0, 1) or (0, 2), g the natural-log gate: each where asked for."""
    q, k, beta = q.to(dtype), k.to(dtype), beta.to(dtype)
    q_rstd, k_rstd = ((x.square().sum(-1, keepdim=True) + L2NORM_EPS).rsqrt() for x in (q, k))
    if use_qk_l2norm_in_kernel:
        q, k = q * q_rstd, k * k_rstd
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval needs use_beta_sigmoid_in_kernel")
    if use_beta_sigmoid_in_kernel:
        beta = (2.0 if allow_neg_eigval else 1.0) * beta.sigmoid()
    if use_gate_in_kernel:
        if g is None or A_log is None:
            raise ValueError("use_gate_in_kernel needs g and A_log")
        g = gdn_gate(g, A_log, dt_bias, compute_dtype=dtype)
    return _Activated(q, k, beta, None if g is None else g.to(dtype), q_rstd, k_rstd)


def _cumulative_gate(g: Tensor | None, BT: int, cu_seqlens: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The chain's natural-log gate per token -> the stages' log2 cumulative gate, which no reset may fill."""
    if g is None:
        return None
    return chunk_local_cumsum(g.clamp(min=RESET), BT, False, RCP_LN2, cu_seqlens, compute_dtype=dtype)


def gated_delta_rule_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:
    """(o, final_state) token by token, the definition of the op; a `chunk_size` changes nothing.

    S <- exp(g_t) S, S <- S + k_t (beta_t (v_t - k_t^T S))^T, o_t = scale * q_t^T S, with g a natural logarithm.

    `use_gate_in_kernel`: g is -exp(A_log) * softplus(g + dt_bias); `use_beta_sigmoid_in_kernel`: beta is sigmoid(beta),
    twice that with `allow_neg_eigval`; `use_qk_l2norm_in_kernel`: q and k are x / sqrt(sum(x^2) + 1e-6).
    """
    x = _activate(
        q, k, g, beta, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        use_gate_in_kernel, A_log, dt_bias, compute_dtype,
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
    g: Tensor | None,
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
    decay = v.new_ones(B, T, HV) if g is None else g.exp()
    S = v.new_zeros(B, HV, k.shape[-1], V)
    if initial_state is not None:
        S = initial_state.mT if state_v_first else initial_state
    outputs = []
    for t in range(T):
        S = decay[:, t, :, None, None] * S
        v_new = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, None, :] @ S).squeeze(-2))
        S = S + k[:, t, :, :, None] * v_new[:, :, None, :]
        outputs.append((q[:, t, :, None, :] @ S).squeeze(-2))
    o = _scale(scale, q.shape[-1]) * torch.stack(outputs, 1) if outputs else torch.zeros_like(v)
    return o, S.mT if state_v_first else S


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:
    """(o, final_state) of `gated_delta_rule_recurrence`, computed chunk by chunk from the oracles above."""
    x = _activate(
        q, k, g, beta, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        use_gate_in_kernel, A_log, dt_bias, compute_dtype,
    )  # fmt: skip
    G = _cumulative_gate(x.g, chunk_size, cu_seqlens, compute_dtype)
    w, u, _ = chunk_gated_delta_rule_fwd_intra(x.k, v, G, x.beta, cu_seqlens, chunk_size, compute_dtype=compute_dtype)
    h, v_new, final_state = chunk_gated_delta_rule_fwd_h(
        x.k, w, u, G, None, initial_state, output_final_state, chunk_size, True, state_v_first, cu_seqlens,
        compute_dtype=compute_dtype,
    )  # fmt: skip
    assert v_new is not None
    o = chunk_fwd_o(
        x.q, x.k, v_new, h, G, None, scale, state_v_first, cu_seqlens, chunk_size, compute_dtype=compute_dtype
    )
    return o, final_state


class ChainGradients(NamedTuple):
    """Gradients of `chunk_gated_delta_rule`, each in the shape of its input; None where that input is absent."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor | None
    dbeta: Tensor
    dh0: Tensor | None
    dA_log: Tensor | None
    ddt_bias: Tensor | None


def chunk_gated_delta_rule_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    do: Tensor,
    dht: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    compute_dtype: torch.dtype = torch.float32,
) -> ChainGradients:
    """Gradients of the chain for `do [B, T, HV, V]` and the final state's `dht`, from the oracles of its stages."""
    cu, BT, dtype = cu_seqlens, chunk_size, compute_dtype
    x = _activate(
        q, k, g, beta, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        use_gate_in_kernel, A_log, dt_bias, dtype,
    )  # fmt: skip
    G = _cumulative_gate(x.g, BT, cu, dtype)
    w, u, A = chunk_gated_delta_rule_fwd_intra(x.k, v, G, x.beta, cu, BT, compute_dtype=dtype)
    h, v_new, _ = chunk_gated_delta_rule_fwd_h(
        x.k, w, u, G, None, initial_state, False, BT, True, state_v_first, cu, compute_dtype=dtype
    )
    assert v_new is not None
    dv_local = chunk_bwd_dv_local(x.q, x.k, do, G, None, None, scale, cu, BT, compute_dtype=dtype)
    dh, dh0, du = chunk_gated_delta_rule_bwd_dhu(
        x.q, x.k, w, do, dv_local, G, None, initial_state, dht, scale, state_v_first, cu, BT, compute_dtype=dtype
    )
    dq, dk, dw, dG = chunk_bwd_dqkwg(
        x.q, x.k, v_new, do, h, dh, w, G, None, du, scale, state_v_first, cu, BT, compute_dtype=dtype
    )
    assert dw is not None
    dk2, dv, dbeta, dG2 = prepare_wy_repr_bwd(x.k, v, x.beta, A, dw, du, G, cu, compute_dtype=dtype)
    dk = dk + dk2
    dg, dA_log, ddt_bias = None, None, None
    if dG is not None and dG2 is not None:
        dg = chunk_local_cumsum(dG + dG2, BT, True, None, cu, compute_dtype=dtype)
    if use_gate_in_kernel and g is not None and A_log is not None and dg is not None:
        dgate = dg.where(gdn_gate(g, A_log, dt_bias, compute_dtype=dtype) >= RESET, 0.0)
        dg, dA_log, ddt_bias = gdn_gate_bwd(g, A_log, dt_bias, dgate, compute_dtype=dtype)
    if use_beta_sigmoid_in_kernel:
        dbeta = dbeta * x.beta * (1 - beta.to(dtype).sigmoid())
    if use_qk_l2norm_in_kernel:
        dq = x.q_rstd * (dq - x.q * (x.q * dq).sum(-1, keepdim=True))
        dk = x.k_rstd * (dk - x.k * (x.k * dk).sum(-1, keepdim=True))
    return ChainGradients(dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias)
