"""`chunk_gated_delta_rule` for callers: the public function and its place in autograd."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...dispatch import router
from ...errors import UnsupportedProblemError
from ...launch.prepared import Prepared
from ...spec.packing import chunks_of, written
from ...spec.watched import any_nested, plain, settled
from .arguments import check
from .chain import Chain, Inputs, Saved
from .spec import SPEC

TWICE = (
    "its gradients cannot be differentiated again, so create_graph=True (gradient penalties, Hessians, optimizers that "
    "use them) is not served: detach what goes through this op, or leave create_graph off"
)


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
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    if is_compiling() or getattr(q, "is_meta", False) or not plain(*tensors) or any_nested(q, k, v, g, beta):
        from .compiled import traced_chain

        return traced_chain(
            q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens, cu_seqlens_cpu, chunk_indices,
            cp_context, use_gate_in_kernel, A_log, dt_bias, chunk_size,
        )  # fmt: skip
    flags = (
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
        use_gate_in_kernel,
    )
    check(tensors, (*flags, chunk_size), scale, cu_seqlens, cu_seqlens_cpu, chunk_indices, cp_context)
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    A_log = None if A_log is None else A_log.reshape(-1)
    dt_bias = None if dt_bias is None else dt_bias.reshape(-1)
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if cu_seqlens is not None and cu_seqlens_cpu is not None:
        chunk_indices = chunks_of(cu_seqlens, chunk_indices, chunk_size, q.shape[1], cu_seqlens_cpu)
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    grad = torch.is_grad_enabled() and wants_grad(tensors)
    call = _Call((*flags, chunk_size, grad), None if scale is None else float(scale), cu_seqlens, chunk_indices, kind)
    if grad:
        o, final_state = _Function.apply(call, *tensors)  # type: ignore[no-untyped-call]
        return o, final_state
    (o, final_state), _ = _forward(call, tensors)
    return o, final_state


def wants_grad(tensors: Sequence[Tensor | None]) -> bool:
    """Whether any of them requires a gradient."""
    return True in [tensor is not None and tensor.requires_grad for tensor in tensors]


class _Call(NamedTuple):
    """What a call says beside its tensors, and the kind of device they are on."""

    options: tuple[bool | int, ...]
    scale: float | None
    cu_seqlens: Tensor | None
    chunk_indices: Tensor | None
    kind: str

    def versions(self) -> list[object]:
        """What changes when what describes a packed batch is written to."""
        return [written(tensor) for tensor in (self.cu_seqlens, self.chunk_indices) if tensor is not None]


def _forward(call: _Call, tensors: Sequence[Tensor | None]) -> tuple[tuple[Tensor, Tensor | None], tuple[Chain, Saved]]:
    """Run the forward of what the router chooses; the chosen chain runs the backward too."""

    def run(prepared: Prepared) -> tuple[tuple[Tensor, Tensor | None], tuple[Chain, Saved]]:
        chain = prepared.launch
        assert isinstance(chain, Chain)
        inputs = Inputs._make(prepared.arrange(tensors))
        with prepared.on_device():
            o, final_state, saved = chain.forward(inputs, call.scale, call.cu_seqlens, call.chunk_indices)
        return (o, final_state), (chain, saved)

    operands = (*tensors, None, None)
    return router.call_by(SPEC, run, operands, call.options, (call.scale,), call.cu_seqlens, call.chunk_indices)


class _Function(torch.autograd.Function):
    """The chain for autograd; the backward runs the chain that its forward chose and looks nothing up."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        with without_autocast(call.kind):
            (o, final_state), (chain, saved) = _forward(call, tensors)
        ctx.save_for_backward(*saved)
        ctx.chain, ctx.call, ctx.versions = chain, call, call.versions()
        ctx.set_materialize_grads(False)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        return o, final_state

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return _Function.gradients(ctx, do, dht)
        # With `create_graph` the gradients may be differentiated themselves. They depend on the inputs also where
        # nothing that arrives here requires a gradient, as the ones of a sum: torch's `once_differentiable` would hand
        # those on as constants. They are constants where only v and the initial state, in which o is linear, vary.
        varies = dict(zip(Inputs._fields, ctx.needs_input_grad[1:]))
        linear = not any(wants for name, wants in varies.items() if name not in ("v", "initial_state"))
        if not linear or wants_grad((do, dht)):
            raise UnsupportedProblemError(SPEC.name, [TWICE])
        with torch.no_grad():
            return _Function.gradients(ctx, do, dht)

    @staticmethod
    def gradients(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of what `forward` took."""
        call: _Call = ctx.call
        saved = Saved._make(ctx.saved_tensors)
        do, dht = settled(do), settled(dht)
        with without_autocast(call.kind):
            if do is None:
                do = torch.zeros_like(saved.v)
            if call.versions() != ctx.versions:
                raise RuntimeError(
                    f"{SPEC.name}: cu_seqlens or chunk_indices were written to between forward and backward: "
                    "hand over a copy"
                )
            gradients = ctx.chain.backward_or_default(
                saved, do, dht, ctx.needs_input_grad[1:], call.scale, call.cu_seqlens, call.chunk_indices
            )
        cast = [
            gradient if gradient is None or gradient.dtype is dtype else gradient.to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes)
        ]
        return (None, *cast)


def without_autocast(kind: str) -> AbstractContextManager[object]:
    """Turns autocast off for a kind of device, where it is on: entering its context takes longer than a launch."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
