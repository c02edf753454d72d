"""`chunk_gated_delta_rule` for callers: the public function."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from ...spec.packing import chunks_of
from ...spec.watched import any_nested, plain
from ..chain import autograd
from .arguments import check, operands
from .spec import SPEC


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: object | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule over whole sequences, with gradients.

    S = exp(g[t]) S;  S = S + k[t] (beta[t] (v[t] - k[t]^T S))^T;  o[t] = scale * q[t]^T S

    Args:
        q: Queries `[B, T, H, K]`, fp32, bf16 or fp16.
        k: Keys `[B, T, H, K]`, the dtype of q.
        v: Values `[B, T, HV, V]`, the dtype of q; HV a multiple of H.
        g: Gate `[B, T, HV]`, natural log, at most 0 where S is not to grow, fp32, bf16 or fp16, any layout; below -104,
            where exp is 0 in fp32, also -inf, it empties S. With `use_gate_in_kernel` what the gate is computed from.
            None: no gate.
        beta: Strength of each update `[B, T, HV]`, fp32, bf16 or fp16, any layout.
        scale: None: `K ** -0.5`.
        initial_state: `[N, HV, K, V]`, N sequences (B where not packed); None: zeros.
        output_final_state: Whether the states after the last token are wanted.
        use_qk_l2norm_in_kernel: Divide q and k by `sqrt(sum(x**2) + 1e-6)` first.
        use_beta_sigmoid_in_kernel: beta is `sigmoid(beta)`.
        allow_neg_eigval: beta is twice that.
        state_v_first: Whether all states are `[..., V, K]`.
        cu_seqlens: Sequence starts of a packed batch `[N + 1]`, int32 or int64; needs B == 1.
        cu_seqlens_cpu: The same on the host, where the caller has them: nothing waits for the device then.
        chunk_indices: `prepare_chunk_indices(cu_seqlens, chunk_size)`, where the caller has it; on a device it is
            compared with what is known of `cu_seqlens` on the host. Beyond that a wrong one costs results, never
            memory: kernels bound what they read from it.
        cp_context: Has to be None: context parallelism is not served.
        use_gate_in_kernel: The gate is `-exp(A_log) * softplus(g + dt_bias)`.
        A_log: `[HV]`, any shape of HV elements.
        dt_bias: `[HV]`, likewise; None: 0.
        chunk_size: Tokens of a chunk: 16, 32 or 64.

    Returns:
        `(o, final_state)`: `[B, T, HV, V]` in q's dtype, zero for tokens outside every sequence; `[N, HV, K, V]`, fp32,
        or None. Gradients flow to q, k, v, g, beta, initial_state, A_log and dt_bias.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together, or options that contradict each other.
        UnsupportedProblemError: K or V above 256, another chunk size, a `cp_context`, or CPU tensors outside Triton's
            interpreter; and a backward with `create_graph=True`, whose gradients could not be differentiated again.

    Source: Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks, arXiv:2412.06464, section 3.3.
    """
    tensors: tuple[torch.Tensor | None, ...] = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    options = (
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
        use_gate_in_kernel,
        chunk_size,
    )
    given = (tensors, options, scale, cu_seqlens, cu_seqlens_cpu, chunk_indices, cp_context)
    if is_compiling() or getattr(q, "is_meta", False) or not plain(*tensors) or any_nested(q, k, v, g, beta):
        from .compiled import traced_chain

        return traced_chain(*given)
    check(*given)
    tensors = operands(tensors, options)
    if cu_seqlens is not None and cu_seqlens_cpu is not None:
        chunk_indices = chunks_of(cu_seqlens, chunk_indices, chunk_size, q.shape[1], cu_seqlens_cpu)
    scalars = (None if scale is None else float(scale),)
    o, final_state = autograd.call(SPEC, tensors, options, scalars, cu_seqlens, chunk_indices)
    assert o is not None
    return o, final_state
