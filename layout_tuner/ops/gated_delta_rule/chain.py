"""`chunk_gated_delta_rule`: the whole op, forward and backward, as one decision about layouts.

The kernel that produces the cumulative gate writes it in the layout that every stage after it reads, and the backward
receives the same storage, so no stage copies a gate. The chain is an op of its own with the candidates STRIDE_HV and
T_CONTIG; each stage's kernel variant is the one stored for that stage, else its default.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ... import reference
from ...device.failures import first_line
from ...dispatch import router
from ...errors import PackingError, UnsupportedProblemError
from ...launch.prepared import Prepared
from ...launch.replay import Replayed
from ...spec import declaration, layouts
from ...spec.declaration import (
    Candidate,
    Launch,
    Operand,
    OpSpec,
    Option,
    Output,
    Problem,
    register,
)
from ...spec.keys import Form
from ...spec.layouts import Layout, LayoutPlan
from ...spec.packing import chunks_of, written
from ...spec.watched import plain
from .activations import BetaGate, RowNorm

log = logging.getLogger(__name__)

TWICE = (
    "its gradients cannot be differentiated again, so create_graph=True (gradient penalties, Hessians, optimizers that "
    "use them) is not served: detach what goes through this op, or leave create_graph off"
)
RCP_LN2 = 1.4426950408889634


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
    if is_compiling() or getattr(q, "is_meta", False) or not plain(q, k, v, g, beta, initial_state, A_log, dt_bias):
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
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
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


def of_type(things: Sequence[object], kind: type) -> bool:
    """Whether all are of a type or None."""
    return False not in [thing is None or isinstance(thing, kind) for thing in things]


def check(
    tensors: tuple[Tensor | None, ...],
    options: tuple[bool | int, ...],
    scale: float | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
    cp_context: object | None,
) -> None:
    """Refuse what no signature tells: arguments of a wrong type and options that contradict each other.

    Args:
        tensors: As `SPEC` lists them.
        options: As `SPEC` lists them, without `grad`.
    """
    g, A_log = tensors[3], tensors[5]
    *flags, chunk_size = options
    _, _, use_beta_sigmoid_in_kernel, allow_neg_eigval, _, use_gate_in_kernel = flags
    faults = []
    if allow_neg_eigval is True and use_beta_sigmoid_in_kernel is False:
        faults.append("allow_neg_eigval: wanted use_beta_sigmoid_in_kernel with it")
    if use_gate_in_kernel is True:
        faults += [f"{name}: wanted with use_gate_in_kernel, got None" for name, x in (("g", g), ("A_log", A_log))
                   if x is None]  # fmt: skip
    if cu_seqlens_cpu is not None and cu_seqlens is None:
        faults.append("cu_seqlens_cpu: wanted cu_seqlens with it")
    if cu_seqlens_cpu is not None and not isinstance(cu_seqlens_cpu, Tensor):
        faults.append(f"cu_seqlens_cpu: wanted a tensor, got {type(cu_seqlens_cpu).__name__}")
    whole = tensors[0] is not None and type(chunk_size) is int and {*map(type, flags)} == {bool}
    whole = whole and of_type((*tensors, cu_seqlens, chunk_indices), Tensor) and of_type((scale,), float)
    if faults or not whole:
        flat = [x.reshape(-1) if i in (5, 6) and isinstance(x, Tensor) else x for i, x in enumerate(tensors)]
        try:
            declaration.check_call(
                SPEC,
                declaration.Call(
                    tensors=(*flat, None, None),
                    options=(*options, False),
                    scalars=(scale,),
                    cu_seqlens=cu_seqlens,
                    chunk_indices=chunk_indices,
                ),
            )
        except (TypeError, ValueError) as error:
            more = str(error).removeprefix(f"{SPEC.name}: ")
            raise type(error)(f"{SPEC.name}: " + "; ".join([*faults, more])) from None
    if faults:
        raise ValueError(f"{SPEC.name}: " + "; ".join(faults))
    if cp_context is not None:
        raise UnsupportedProblemError(SPEC.name, ["cp_context: context parallelism is not served"])


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


class Inputs(NamedTuple):
    """The tensors of a call, as the kernels take them."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None


class Saved(NamedTuple):
    """What the forward leaves for the backward, in the layouts of the chain's plan."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor
    A: Tensor
    initial_state: Tensor | None
    q_rstd: Tensor | None
    k_rstd: Tensor | None
    raw_g: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None


class Gradients(NamedTuple):
    """Gradients of the inputs; None where none was asked for or the input is absent."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dg: Tensor | None
    dbeta: Tensor | None
    dA_log: Tensor | None
    ddt_bias: Tensor | None
    dh0: Tensor | None


def _forward(call: _Call, tensors: Sequence[Tensor | None]) -> tuple[tuple[Tensor, Tensor | None], tuple[Chain, Saved]]:
    """Run the forward of what the router chooses; the chosen chain runs the backward too."""
    operands = (*tensors, None, None)
    found, signature, prepared = router.find(
        SPEC, operands, call.options, (call.scale,), call.cu_seqlens, call.chunk_indices
    )

    def run(prepared: Prepared) -> tuple[tuple[Tensor, Tensor | None], tuple[Chain, Saved]]:
        chain = prepared.launch
        assert isinstance(chain, Chain)
        arranged = prepared.arrange(operands)[:-2] if prepared.contiguous or prepared.moves else tensors
        with prepared.on_device():
            inputs = Inputs._make(arranged)
            o, final_state, saved = chain.forward(inputs, call.scale, call.cu_seqlens, call.chunk_indices)
        return (o, final_state), (chain, saved)

    try:
        results = run(prepared)
    except Exception as error:  # any fault of a chosen candidate must leave the call as if it had not been chosen
        arguments = declaration.Call(
            tensors=operands, options=call.options, cu_seqlens=call.cu_seqlens, chunk_indices=call.chunk_indices
        )
        if prepared.proven:
            return found.rescue(SPEC, signature, arguments, prepared, error, run)
        prepared = found.recover(SPEC, signature, arguments, prepared, error)
        results = run(prepared)
    prepared.proven = True
    return results


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


def present(tensor: Tensor | None) -> Tensor:
    """The tensor, which is known to be there."""
    assert tensor is not None
    return tensor


class Chain:
    """Every stage of a problem bound to one layout of the gates; called, it runs forward and, with `grad`, backward.

    Args:
        problem: Key and chip of the whole op.
        layout: Of the cumulative gate, beta and their gradients, between the stages.
    """

    def __init__(self, problem: Problem, layout: Layout) -> None:
        form = problem.form
        self.problem, self.layout, self.BT = problem, layout, problem.BT
        self.grad, self.gated = form.flag("grad"), problem.has("g")
        self.fused_gate = form.flag("use_gate_in_kernel")
        output_final_state, state_v_first = form.flag("output_final_state"), form.flag("state_v_first")
        state_dtype = form.entries.get("initial_state", "")
        state = {"initial_state": state_dtype} if state_dtype else {}
        last = {"output_final_state": "1"} if output_final_state else {}
        v_first = {"state_v_first": "1"} if state_v_first else {}
        gate = {"g": f"float32@{layout.value}"} if self.gated else {}
        beta = {"beta": f"float32@{layout.value}"}
        self.raw_layout = layouts.as_read(form.arrival("g") or Layout.STRIDE_HV)
        raw_dtype = form.dtype("g") or problem.key.dtype
        raw = {"g": f"{raw_dtype}@{self.raw_layout.value}"}
        bias = {name: form.entries[name] for name in ("A_log", "dt_bias") if name in form}
        if self.gated:
            plan = LayoutPlan.of({"g": self.raw_layout, "out": layout})
            op = "gdn_gate_chunk_cumsum" if self.fused_gate else "chunk_local_cumsum"
            self.sum_gate = self._stage(op, {**raw, **bias, "output_dtype": "float32", "resets": "1"}, plan, raw_dtype)
        self.intra = self._stage("chunk_gated_delta_rule_fwd_intra", {**gate, **beta})
        self.fwd_h = self._stage("chunk_gated_delta_rule_fwd_h", {**gate, **state, **last, **v_first})
        self.fwd_o = self._stage("chunk_fwd_o", {**gate, **v_first})
        if self.grad:
            dht = {"dht": "float32"} if output_final_state and problem.key.dtype != "float32" else {}
            dht = {"dht": "1"} if output_final_state and not dht else dht
            h0 = {"h0": state_dtype} if state_dtype else {}
            self.recompute_w_u = self._stage("recompute_w_u_fwd", {**gate, **beta})
            self.recompute_h = self._stage("chunk_gated_delta_rule_fwd_h", {**gate, **state, **v_first})
            self.dv_local = self._stage("chunk_bwd_dv_local", gate)
            self.dhu = self._stage("chunk_gated_delta_rule_bwd_dhu", {**gate, **h0, **v_first})
            self.dhu_last = self._stage("chunk_gated_delta_rule_bwd_dhu", {**gate, **h0, **dht, **v_first})
            self.dqkwg = self._stage("chunk_bwd_dqkwg", {**gate, "w": "1", "dv": "1", **v_first})
            self.wy_bwd = self._stage("prepare_wy_repr_bwd", {**gate, **beta})
            if self.gated:
                plan = LayoutPlan.of({"g": layout, "out": layout if self.fused_gate else Layout.STRIDE_HV})
                summed = {**gate, "output_dtype": "float32", "reverse": "1"}
                self.sum_dg = self._stage("chunk_local_cumsum", summed, plan, "float32")
            if self.fused_gate:
                plan = LayoutPlan.of({"g": self.raw_layout, "dyg": layout, "dg": Layout.STRIDE_HV})
                raw["dyg"] = f"float32@{layout.value}"
                self.gate_bwd = self._stage("gdn_gate_bwd", {**raw, **bias, "resets": "1"}, plan, raw_dtype)
        self.beta_gate = BetaGate(problem, layout)
        self.row_norm = RowNorm(problem) if form.flag("use_qk_l2norm_in_kernel") else None
        self.instead: Chain | None = None
        self.dense_forward, self.dense_backward = Replayed(self._dense_forward), Replayed(self._dense_backward)

    def _stage(
        self, op: str, entries: dict[str, str], plan: LayoutPlan | None = None, dtype: str | None = None
    ) -> Launch:
        """One stage's launch: its stored variant, else its default, with every gate in the chain's layout.

        Args:
            op: The stage.
            entries: Its form without the chunk size.
            plan: Its layouts; None puts every time-axis tensor into the chain's.
            dtype: Of its first tensor; None: the chain's.
        """
        spec, key = declaration.lookup(op), self.problem.key
        if op != "gdn_gate_bwd":  # the one stage that knows no chunks
            entries = {**entries, "BT": str(self.BT)}
        sizes = {name: getattr(key, name) for name in declaration.SIZES}
        stage = spec.key_for(sizes, dtype=dtype or key.dtype, form=Form(entries), varlen=key.varlen)
        default = spec.default(stage, self.problem.chip)
        variant = self.problem.variant_of(spec, stage) or default.variant
        if plan is None:
            plan = LayoutPlan.of(dict.fromkeys(spec.time_operands, self.layout))
        candidate = Candidate(variant=variant, plan=plan, revision=spec.revision)
        return spec.bind(Problem(key=stage, chip=self.problem.chip), candidate)

    def forward(
        self,
        inputs: Inputs,
        scale: float | None,
        cu_seqlens: Tensor | None,
        chunk_indices: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Saved]:
        """Output, final state, and what the backward needs; from a prepared list where the batch is not packed."""
        if cu_seqlens is None:
            o, final_state, *saved = self.dense_forward(tuple(inputs), scale)
            return present(o), final_state, Saved(*saved)  # type: ignore[arg-type]
        return self.launch_forward(inputs, scale, cu_seqlens, chunk_indices)

    def _dense_forward(self, tensors: Sequence[Tensor | None], scale: float | None) -> tuple[Tensor | None, ...]:
        """The forward as a function of tensors."""
        o, final_state, saved = self.launch_forward(Inputs._make(tensors), scale, None, None)
        return (o, final_state, *saved)

    def launch_forward(
        self,
        inputs: Inputs,
        scale: float | None,
        cu_seqlens: Tensor | None,
        chunk_indices: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Saved]:
        """The forward, stage by stage."""
        q, k, v, g, beta, A_log, dt_bias, initial_state = inputs
        if cu_seqlens is not None:
            chunk_indices = chunks_of(cu_seqlens, chunk_indices, self.BT, v.shape[1])
        packed = (cu_seqlens, chunk_indices)
        q_rstd = k_rstd = raw_g = None
        if self.row_norm is not None:
            q, q_rstd = self.row_norm.forward(q, cu_seqlens)
            k, k_rstd = self.row_norm.forward(k, cu_seqlens)
        G = g
        if self.fused_gate:
            raw_g = g
            (G,) = self.sum_gate(g, A_log, dt_bias, RCP_LN2, *packed)
        elif self.gated:
            (G,) = self.sum_gate(g, RCP_LN2, *packed)
        strength = self.beta_gate.forward(beta)
        w, u, A = self.intra(k, v, G, strength, *packed)
        h, v_new, final_state = self.fwd_h(k, w, u, G, None, initial_state, *packed)
        del w, u
        (o,) = self.fwd_o(q, k, v_new, h, G, None, scale, *packed)
        saved = Saved(q, k, v, G, strength, present(A), initial_state, q_rstd, k_rstd, raw_g, A_log, dt_bias)
        return present(o), final_state, saved

    def backward_or_default(
        self,
        saved: Saved,
        do: Tensor,
        dht: Tensor | None,
        wanted: Sequence[bool],
        scale: float | None,
        cu_seqlens: Tensor | None,
        chunk_indices: Tensor | None,
    ) -> Gradients:
        """`backward`; where it fails, that of the default candidates, from then on.

        Raises:
            Exception: What the chain raised, where the default does not run either.
        """
        arguments = (saved, do, dht, wanted, scale, cu_seqlens, chunk_indices)
        if self.instead is not None:
            return self.instead.backward(*arguments)
        try:
            return self.backward(*arguments)
        except Exception as error:
            if isinstance(error, PackingError):
                raise
            key, chip = self.problem.key, self.problem.chip
            spec = declaration.lookup(key.op)
            instead = spec.bind(Problem(key=key, chip=chip), spec.default(key, chip))
            assert isinstance(instead, Chain)
            try:
                gradients = instead.backward(*arguments)
            except Exception:
                raise error from None
            if not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
                log.warning("%s: the backward failed (%s): the default candidates run", key, first_line(error))
                self.instead = instead
            return gradients

    def backward(
        self,
        saved: Saved,
        do: Tensor,
        dht: Tensor | None,
        wanted: Sequence[bool],
        scale: float | None,
        cu_seqlens: Tensor | None,
        chunk_indices: Tensor | None,
    ) -> Gradients:
        """Gradients of the inputs that `wanted` names, in the forward's order; from a prepared list likewise."""
        do = do.contiguous()
        dht = None if dht is None else dht.contiguous()
        if cu_seqlens is None:
            gradients = self.dense_backward((*saved, do, dht), tuple(wanted), scale)
            return Gradients._make(gradients)
        return self.launch_backward(saved, do, dht, wanted, scale, cu_seqlens, chunk_indices)

    def _dense_backward(
        self, tensors: Sequence[Tensor | None], wanted: Sequence[bool], scale: float | None
    ) -> tuple[Tensor | None, ...]:
        """The backward as a function of tensors."""
        *saved, do, dht = tensors
        return self.launch_backward(Saved._make(saved), present(do), dht, wanted, scale, None, None)

    def launch_backward(
        self,
        saved: Saved,
        do: Tensor,
        dht: Tensor | None,
        wanted: Sequence[bool],
        scale: float | None,
        cu_seqlens: Tensor | None,
        chunk_indices: Tensor | None,
    ) -> Gradients:
        """The backward, stage by stage; what only gradients that are not wanted need is not run.

        Saved-tensor hooks may hand a gate back in another layout, so its arrival is read, not assumed.
        """
        if cu_seqlens is not None:
            chunk_indices = chunks_of(cu_seqlens, chunk_indices, self.BT, saved.v.shape[1])
        packed = (cu_seqlens, chunk_indices)
        wants_q, wants_k, wants_v, wants_g, wants_beta, wants_A, wants_bias, wants_h0 = wanted
        q, k, v, A, initial_state = saved.q, saved.k, saved.v, saved.A, saved.initial_state
        G = None if saved.g is None else layouts.in_layout(saved.g, self.layout)
        beta = layouts.in_layout(saved.beta, self.layout)

        w, u = self.recompute_w_u(k, v, beta, A, G, *packed)
        h, v_new, _ = self.recompute_h(k, w, u, G, None, initial_state, *packed)
        del u
        (dv_local,) = self.dv_local(q, k, do, G, None, None, scale, *packed)
        if dht is None:
            dh, dh0, du = self.dhu(q, k, w, do, dv_local, G, None, initial_state, None, scale, *packed)
        else:
            dh, dh0, du = self.dhu_last(q, k, w, do, dv_local, G, None, initial_state, dht, scale, *packed)
        del dv_local
        if not any(wanted[:-1]):
            return Gradients(None, None, None, None, None, None, None, dh0)
        dq, dk, dw, dG = self.dqkwg(q, k, v_new, do, h, dh, w, G, None, du, scale, *packed)
        del h, dh, v_new, w
        dv = dbeta = None
        if wants_k or wants_v or wants_g or wants_beta or wants_A or wants_bias:
            dk_wy, dv, dbeta, dG_wy = self.wy_bwd(k, v, beta, A, dw, du, G, *packed)
            present(dk).add_(present(dk_wy))
            if dG is not None:
                dG.add_(present(dG_wy))
        del dw, du
        if self.row_norm is not None:
            norm = self.row_norm
            dq = norm.backward(q, present(saved.q_rstd), present(dq), cu_seqlens) if wants_q else None
            dk = norm.backward(k, present(saved.k_rstd), present(dk), cu_seqlens) if wants_k else None
        dg, dA_log, ddt_bias = self._gate_gradients(saved, dG, wants_g, wants_A or wants_bias, packed)
        if wants_beta:
            dbeta = self.beta_gate.backward(beta, present(dbeta))
        return Gradients(
            dq if wants_q else None,
            dk if wants_k else None,
            dv if wants_v else None,
            dg if wants_g else None,
            dbeta if wants_beta else None,
            dA_log if wants_A else None,
            ddt_bias if wants_bias else None,
            dh0 if wants_h0 else None,
        )

    def _gate_gradients(
        self,
        saved: Saved,
        dG: Tensor | None,
        wants_g: bool,
        wants_parameters: bool,
        packed: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of the gate and its parameters from that of the cumulative gate; row-major."""
        if dG is None or not (wants_g or wants_parameters):
            return None, None, None
        (dg,) = self.sum_dg(dG, None, *packed)
        if not self.fused_gate:
            return dg, None, None
        raw_g = layouts.in_layout(present(saved.raw_g), self.raw_layout)
        dg, dA_log, ddt_bias = self.gate_bwd(raw_g, saved.A_log, saved.dt_bias, dg, *packed)
        return dg, dA_log, ddt_bias

    def __call__(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        """Forward and, with `grad`, backward, as the tuner runs it: the operands with do and dht, then the rest."""
        *given, do, dht, scale, cu_seqlens, chunk_indices = arguments
        inputs = Inputs._make(given)
        o, final_state, saved = self.forward(inputs, scale, cu_seqlens, chunk_indices)
        if not self.grad:
            return (o, final_state, *[None] * len(Gradients._fields))
        wanted = [tensor is not None for tensor in inputs]
        gradients = self.backward(saved, do, dht, wanted, scale, cu_seqlens, chunk_indices)
        return (o, final_state, *gradients)


def _bind(problem: Problem, candidate: Candidate) -> Launch:
    return Chain(problem, candidate.plan["g"] if problem.has("g") else candidate.plan["beta"])


def _reference(
    do: Tensor | None, dht: Tensor | None, grad: bool, A_log: Tensor | None, dt_bias: Tensor | None, **named: Any
) -> tuple[Tensor | None, ...]:
    """Output, final state and every gradient, from the oracles of the stages."""
    gate: dict[str, Any] = {"A_log": A_log, "dt_bias": dt_bias}
    o, final_state = reference.chunk_gated_delta_rule(**named, **gate)
    if not grad or do is None:
        return (o, final_state, *[None] * len(Gradients._fields))
    named.pop("output_final_state")
    found = reference.chunk_gated_delta_rule_bwd(**named, **gate, do=do, dht=dht)
    return (o, final_state, *[getattr(found, name) for name in Gradients._fields])


def _term_rms(
    wanted: Mapping[str, Tensor | None],
    g: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    chunk_size: int,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> dict[str, Tensor]:
    """How large the terms of the gradients are that are sums over tokens."""
    dg = wanted["dg"]
    if dg is None or g is None or A_log is None:
        return {}
    return reference.gate_parameter_term_rms(dg, g, A_log, dt_bias, cu_seqlens, chunk_size)


def _state(name: str, given_with: tuple[str, ...] = ()) -> Operand:
    """A state for each sequence."""
    return Operand(
        name=name,
        dims="N HV K V",
        dims_v_first="N HV V K",
        optional=True,
        must_match=False,
        fill="small",
        given_with=given_with,
    )


def _gates(name: str, fill: str, optional: bool = False) -> Operand:
    return Operand(name=name, dims="B T HV", optional=optional, time_axis=True, fill=fill)


def _flag(name: str) -> Option:
    return Option(name=name, default=False)


_IN_LAYER = (
    "A_log=float32,BT=64,beta=bfloat16@STRIDE_HV,dt_bias=float32,g=bfloat16@STRIDE_HV,state_v_first=1,"
    "use_beta_sigmoid_in_kernel=1,use_gate_in_kernel=1,use_qk_l2norm_in_kernel=1"
)

SPEC = register(
    OpSpec(
        name="chunk_gated_delta_rule",
        operands=(
            Operand(name="q", dims="B T H K", fill="unit"),
            Operand(name="k", dims="B T H K", fill="unit"),
            Operand(name="v", dims="B T HV V"),
            _gates("g", "decay", optional=True),
            _gates("beta", "strength"),
            Operand(name="A_log", dims="HV", optional=True, must_match=False, fill="small"),
            Operand(name="dt_bias", dims="HV", optional=True, must_match=False),
            _state("initial_state"),
            Operand(name="do", dims="B T HV V", optional=True, given_with=("grad",)),
            _state("dht", given_with=("grad", "output_final_state")),
        ),
        outputs=(
            Output(name="o", dims="B T HV V"),
            Output(name="final_state", dims="N HV K V"),
            *[Output(name=name, dims="N HV K V" if name == "dh0" else "") for name in Gradients._fields],
        ),
        options=(
            _flag("output_final_state"),
            _flag("use_qk_l2norm_in_kernel"),
            _flag("use_beta_sigmoid_in_kernel"),
            _flag("allow_neg_eigval"),
            Option(name="state_v_first", default=False, turns_states=True),
            _flag("use_gate_in_kernel"),
            Option(name="chunk_size", default=64, entry="BT", size="BT"),
            Option(name="grad", default=False, differentiates=True),
        ),
        scalars=("scale",),
        layout_groups=(("g", "beta"),),
        variants=("chain",),
        sources=(
            "beta",
            "bwd_dhu",
            "dqkwg",
            "dv_local",
            "fwd_h",
            "fwd_o",
            "gate",
            "intra",
            "kkt",
            "l2norm",
            "local_cumsum",
            "recompute_w_u",
            "solve_tril",
            "state",
            "wy_bwd",
        ),
        moves_inputs=False,
        bind=_bind,
        reference=_reference,
        forms={
            "training": "BT=64,beta=float32@STRIDE_HV,g=float32@STRIDE_HV,grad=1",
            "prefill": "BT=64,beta=float32@STRIDE_HV,g=float32@STRIDE_HV,output_final_state=1",
            "layer": f"{_IN_LAYER},grad=1",
        },
        more_forms=(
            "BT=64,beta=float32@STRIDE_HV,grad=1",
            "BT=64,beta=float32@T_CONTIG,g=float32@T_CONTIG,grad=1",
            "BT=64,beta=float32@OTHER,g=float32@OTHER,grad=1",
            "BT=64,beta=float32@STRIDE_HV,g=float32@STRIDE_HV,grad=1,initial_state=float32,output_final_state=1",
            "BT=32,allow_neg_eigval=1,beta=float32@STRIDE_HV,g=float32@STRIDE_HV,grad=1,initial_state=float32,"
            "output_final_state=1,state_v_first=1,use_beta_sigmoid_in_kernel=1",
            "BT=16,beta=float32@STRIDE_HV,g=float32@STRIDE_HV,grad=1,use_qk_l2norm_in_kernel=1",
        ),
        tolerances=dict.fromkeys(("o", "final_state", *Gradients._fields), 0.008),
        term_rms=_term_rms,
    )
)
