"""`chunk_gated_delta_rule`: the whole op, forward and backward, as one decision about layouts.

The kernel that produces the cumulative gate writes it in the layout that every stage after it reads, and the backward
receives the same storage, so no stage copies a gate. The chain is an op of its own with the candidates STRIDE_HV and
T_CONTIG; each stage's kernel variant is the one stored for that stage, else its default.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...device.failures import first_line
from ...errors import PackingError
from ...launch.prepared import bind_candidate
from ...launch.replay import Replayed
from ...spec import layouts, registry
from ...spec.declaration import Candidate, Launch, Problem
from ...spec.keys import Form
from ...spec.layouts import Layout, LayoutPlan
from ...spec.operands import SIZES
from ...spec.packing import chunks_of
from . import fused
from .activations import BetaGate, RowNorm

log = logging.getLogger(__name__)

RCP_LN2 = 1.4426950408889634


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


def present(tensor: Tensor | None) -> Tensor:
    """The tensor, which is known to be there."""
    assert tensor is not None
    return tensor


class Chain:
    """Every stage of a problem bound to one layout of the gates; called, it runs forward and, with `grad`, backward.

    Args:
        problem: Key and chip of the whole op.
        layout: Of the cumulative gate, beta and their gradients, between the stages.
        variant: `chain` runs stage after stage; `fused` keeps the state on the chip; `fused_forward` does so in the
            forward alone.
    """

    def __init__(self, problem: Problem, layout: Layout, variant: str = "chain") -> None:
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
        if variant != "chain":
            self.inner_forward = fused.bind_forward(problem, layout)
        else:
            self.inner_forward = self._staged_forward
            self.intra = self._stage("chunk_gated_delta_rule_fwd_intra", {**gate, **beta})
            self.fwd_h = self._stage("chunk_gated_delta_rule_fwd_h", {**gate, **state, **last, **v_first})
            self.fwd_o = self._stage("chunk_fwd_o", {**gate, **v_first})
        if self.grad:
            dht = {"dht": "float32"} if output_final_state and problem.key.dtype != "float32" else {}
            dht = {"dht": "1"} if output_final_state and not dht else dht
            h0 = {"h0": state_dtype} if state_dtype else {}
            if variant == "fused":
                self.inner_backward = self._fused_backward
                self.scores = fused.bind_scores(problem, layout)
                self.states = fused.bind_states(problem, layout)
                self.walk_back = fused.bind_walk_back(problem, layout, last=False)
                self.walk_back_last = fused.bind_walk_back(problem, layout, last=True)
                self.dqkwg = self._stage("chunk_bwd_dqkwg", {**gate, "w": "1", "dv": "1"})
                self.inverse_backward = fused.bind_inverse_backward(problem, layout)
            else:
                self.inner_backward = self._staged_backward
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
        spec, key = registry.lookup(op), self.problem.key
        if op != "gdn_gate_bwd":  # the one stage that knows no chunks
            entries = {**entries, "BT": str(self.BT)}
        sizes = {name: getattr(key, name) for name in SIZES}
        stage = spec.key_for(sizes, dtype=dtype or key.dtype, form=Form(entries), varlen=key.varlen)
        default = spec.default(stage, self.problem.chip)
        variant = self.problem.variant_of(spec, stage) or default.variant
        if plan is None:
            plan = LayoutPlan.of(dict.fromkeys(spec.time_operands, self.layout))
        candidate = Candidate(variant=variant, plan=plan, revision=spec.revision)
        return bind_candidate(spec, Problem(key=stage, chip=self.problem.chip), candidate)

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
        o, final_state, A = self.inner_forward(q, k, v, G, strength, initial_state, scale, packed)
        saved = Saved(q, k, v, G, strength, A, initial_state, q_rstd, k_rstd, raw_g, A_log, dt_bias)
        return o, final_state, saved

    def _staged_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        G: Tensor | None,
        beta: Tensor,
        initial_state: Tensor | None,
        scale: float | None,
        packed: fused.Packed,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Output, final state and A from the activated inputs and the cumulative gate, stage by stage."""
        w, u, A = self.intra(k, v, G, beta, *packed)
        h, v_new, final_state = self.fwd_h(k, w, u, G, None, initial_state, *packed)
        del w, u
        (o,) = self.fwd_o(q, k, v_new, h, G, None, scale, *packed)
        return present(o), final_state, present(A)

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
            spec = registry.lookup(key.op)
            instead = bind_candidate(spec, Problem(key=key, chip=chip), spec.default(key, chip))
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

        inverse = any(wanted[1:-1])
        dq, dk, dv, dG, dbeta, dh0 = self.inner_backward(
            q, k, v, G, beta, A, initial_state, do, dht, scale, any(wanted[:-1]), inverse, packed
        )
        if not any(wanted[:-1]):
            return Gradients(None, None, None, None, None, None, None, dh0)
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

    def _staged_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        G: Tensor | None,
        beta: Tensor,
        A: Tensor,
        initial_state: Tensor | None,
        do: Tensor,
        dht: Tensor | None,
        scale: float | None,
        chunks: bool,
        inverse: bool,
        packed: fused.Packed,
    ) -> tuple[Tensor | None, ...]:
        """dq, dk, dv, dG, dbeta, dh0 of the activated inputs, stage by stage.

        Args:
            q, k, v, G, beta, A, initial_state, do, dht, scale: As the forward had them.
            chunks: Whether anything but dh0 is wanted.
            inverse: Whether anything but dq and dh0 is wanted.
            packed: `cu_seqlens` and `chunk_indices`.
        """
        w, u = self.recompute_w_u(k, v, beta, A, G, *packed)
        h, v_new, _ = self.recompute_h(k, w, u, G, None, initial_state, *packed)
        del u
        (dv_local,) = self.dv_local(q, k, do, G, None, None, scale, *packed)
        if dht is None:
            dh, dh0, du = self.dhu(q, k, w, do, dv_local, G, None, initial_state, None, scale, *packed)
        else:
            dh, dh0, du = self.dhu_last(q, k, w, do, dv_local, G, None, initial_state, dht, scale, *packed)
        del dv_local
        if not chunks:
            return None, None, None, None, None, dh0
        dq, dk, dw, dG = self.dqkwg(q, k, v_new, do, h, dh, w, G, None, du, scale, *packed)
        del h, dh, v_new, w
        dv = dbeta = None
        if inverse:
            dk_wy, dv, dbeta, dG_wy = self.wy_bwd(k, v, beta, A, dw, du, G, *packed)
            present(dk).add_(present(dk_wy))
            if dG is not None:
                dG.add_(present(dG_wy))
        return dq, dk, dv, dG, dbeta, dh0

    def _fused_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        G: Tensor | None,
        beta: Tensor,
        A: Tensor,
        initial_state: Tensor | None,
        do: Tensor,
        dht: Tensor | None,
        scale: float | None,
        chunks: bool,
        inverse: bool,
        packed: fused.Packed,
    ) -> tuple[Tensor | None, ...]:
        """The same around one walk back over the chunks; see `kernels/fused_bwd.py`."""
        P = self.scores(q, k, G, scale, packed)
        walk_back = self.walk_back if dht is None else self.walk_back_last
        dh, dx, dh0 = walk_back(q, k, do, G, beta, A, P, dht, scale, packed)
        del P
        if not chunks:
            return None, None, None, None, None, dh0
        h, v_new = self.states(k, v, G, beta, A, initial_state, packed)
        dq, dk, y, dG = self.dqkwg(q, k, v_new, do, h, dh, None, G, None, dx, scale, *packed)
        del h, dh
        if not inverse:
            return dq, dk, None, dG, None, dh0
        dbeta = self.inverse_backward(k, v, G, beta, v_new, present(y), dx, present(dk), dG, packed)
        return dq, dk, dx, dG, dbeta, dh0

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
