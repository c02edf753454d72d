"""`chunk_gated_delta_rule`: the whole op, forward and backward, as one decision about layouts.

The kernel that produces the cumulative gate writes it in the layout that every stage after it reads, and the backward
receives the same storage, so no stage copies a gate. The chain is an op of its own with the candidates STRIDE_HV and
T_CONTIG; each stage's kernel variant is the one stored for that stage, else its default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from ...spec import layouts
from ...spec.declaration import Problem
from ...spec.layouts import Layout
from ...spec.operands import Outputs
from ...spec.packing import chunks_of
from ..chain import chain
from ..chain.chain import Packed, Scalars
from ..chain.stages import Facts
from . import fused
from .activations import BetaGate, RowNorm

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


class Chain(chain.Chain[Saved]):
    """Every stage of a problem bound to one layout of the gates; called, it runs forward and, with `grad`, backward.

    Args:
        problem: Key and chip of the whole op.
        layout: Of the cumulative gate, beta and their gradients, between the stages.
        variant: `chain` runs stage after stage; `fused` keeps the state on the chip; `fused_forward` does so in the
            forward alone.
    """

    saved_type = Saved
    sources: ClassVar[Mapping[str, str]] = {**{name: name for name in Inputs._fields}, "raw_g": "g"}
    made: ClassVar[Mapping[str, str]] = {"A": "B T HV BT", "q_rstd": "B T H", "k_rstd": "B T H"}
    turning = ("g", "beta")
    arriving = ("raw_g",)
    output_like = "v"
    linear = ("v", "initial_state")

    def __init__(self, problem: Problem, layout: Layout, variant: str = "chain") -> None:
        super().__init__(problem, layout)
        form, main = problem.form, problem.key.dtype
        self.gated, self.fused_gate = problem.has("g"), form.flag("use_gate_in_kernel")
        last, v_first = form.flag("output_final_state"), form.flag("state_v_first")

        def given(operand: str, name: str = "") -> dict[str, Facts]:
            """Facts of an operand of the chain that a stage knows under that name; nothing where it is absent."""
            return {name or operand: Facts(form.entries[operand])} if operand in form else {}

        self.raw_layout = layouts.as_read(form.arrival("g") or Layout.STRIDE_HV)
        raw = {"g": Facts(form.dtype("g") or main, self.raw_layout)}
        parameters = {**given("A_log"), **given("dt_bias")}
        gate = {"g": Facts("float32", layout)} if self.gated else {}
        gates = {**gate, "beta": Facts("float32", layout)}
        state, h0 = given("initial_state"), given("initial_state", "h0")
        if self.fused_gate:
            self.sum_gate = self.stage(
                "gdn_gate_chunk_cumsum", {**raw, **parameters}, {"out": layout}, output_dtype="float32", resets=True
            )
        elif self.gated:
            self.sum_gate = self.stage("chunk_local_cumsum", raw, {"out": layout}, output_dtype="float32", resets=True)
        if variant != "chain":
            self.inner_forward = fused.bind_forward(problem, layout)
        else:
            self.inner_forward = self._staged_forward
            self.intra = self.stage("chunk_gated_delta_rule_fwd_intra", gates)
            self.fwd_h = self.stage(
                "chunk_gated_delta_rule_fwd_h", {**gate, **state}, output_final_state=last, state_v_first=v_first
            )
            self.fwd_o = self.stage("chunk_fwd_o", gate, state_v_first=v_first)
        if self.grad:
            dht = {"dht": Facts("float32")} if last else {}
            through = {**gate, "w": Facts(main), "dv": Facts(main)}
            if variant == "fused":
                self.inner_backward = self._fused_backward
                self.scores = fused.bind_scores(problem, layout)
                self.states = fused.bind_states(problem, layout)
                self.walk_back = fused.bind_walk_back(problem, layout, last=False)
                self.walk_back_last = fused.bind_walk_back(problem, layout, last=True)
                self.dqkwg = self.stage("chunk_bwd_dqkwg", through)
                self.inverse_backward = fused.bind_inverse_backward(problem, layout)
            else:
                self.inner_backward = self._staged_backward
                self.recompute_w_u = self.stage("recompute_w_u_fwd", gates)
                self.recompute_h = self.stage("chunk_gated_delta_rule_fwd_h", {**gate, **state}, state_v_first=v_first)
                self.dv_local = self.stage("chunk_bwd_dv_local", gate)
                dhu = "chunk_gated_delta_rule_bwd_dhu"
                self.dhu = self.stage(dhu, {**gate, **h0}, state_v_first=v_first)
                self.dhu_last = self.stage(dhu, {**gate, **h0, **dht}, state_v_first=v_first)
                self.dqkwg = self.stage("chunk_bwd_dqkwg", through, state_v_first=v_first)
                self.wy_bwd = self.stage("prepare_wy_repr_bwd", gates)
            if self.gated:
                summed = {"out": layout if self.fused_gate else Layout.STRIDE_HV}
                self.sum_dg = self.stage("chunk_local_cumsum", gate, summed, output_dtype="float32", reverse=True)
            if self.fused_gate:
                gate_reads = {**raw, **parameters, "dyg": Facts("float32", layout)}
                self.gate_bwd = self.stage("gdn_gate_bwd", gate_reads, {"dg": Layout.STRIDE_HV}, resets=True)
        self.beta_gate = BetaGate(problem, layout)
        self.row_norm = RowNorm(problem) if form.flag("use_qk_l2norm_in_kernel") else None

    def launch_forward(self, inputs: Sequence[Any], scalars: Scalars, packed: Packed) -> tuple[Outputs, Saved]:
        """The forward, stage by stage."""
        q, k, v, g, beta, *parameters, initial_state = inputs
        (scale,), (cu_seqlens, chunk_indices) = scalars, packed
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
            (G,) = self.sum_gate(g, *parameters, RCP_LN2, *packed)
        elif self.gated:
            (G,) = self.sum_gate(g, RCP_LN2, *packed)
        strength = self.beta_gate.forward(beta)
        o, final_state, A = self.inner_forward(q, k, v, G, strength, initial_state, scale, packed)
        saved = Saved(q, k, v, G, strength, A, initial_state, q_rstd, k_rstd, raw_g, *parameters)
        return (o, final_state), saved

    def _staged_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        G: Tensor | None,
        beta: Tensor,
        initial_state: Tensor | None,
        scale: float | None,
        packed: Packed,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Output, final state and A from the activated inputs and the cumulative gate, stage by stage."""
        w, u, A = self.intra(k, v, G, beta, *packed)
        h, v_new, final_state = self.fwd_h(k, w, u, G, None, initial_state, *packed)
        del w, u
        (o,) = self.fwd_o(q, k, v_new, h, G, None, scale, *packed)
        return present(o), final_state, present(A)

    def launch_backward(
        self, saved: Saved, grads: Sequence[Tensor | None], wanted: Sequence[bool], scalars: Scalars, packed: Packed
    ) -> Gradients:
        """The backward, stage by stage; what only gradients that are not wanted need is not run.

        Saved-tensor hooks may hand a gate back in another layout, so its arrival is read, not assumed.
        """
        (scale,), (cu_seqlens, chunk_indices) = scalars, packed
        do, dht = present(grads[0]), grads[1]
        if cu_seqlens is not None:
            chunk_indices = chunks_of(cu_seqlens, chunk_indices, self.BT, saved.v.shape[1])
        packed = (cu_seqlens, chunk_indices)
        wants_q, wants_k, _, wants_g, wants_beta, *wants_parameters, _ = wanted
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
        dg, *dparameters = self._gate_gradients(saved, dG, wants_g, any(wants_parameters), packed)
        if wants_beta:
            dbeta = self.beta_gate.backward(beta, present(dbeta))
        found = (dq, dk, dv, dg, dbeta, *dparameters, dh0)
        return Gradients._make([gradient if wants else None for gradient, wants in zip(found, wanted, strict=True)])

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
        packed: Packed,
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
        packed: Packed,
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
        packed: Packed,
    ) -> Outputs:
        """Gradients of the gate and its parameters from that of the cumulative gate; row-major."""
        if dG is None or not (wants_g or wants_parameters):
            return None, None, None
        (dg,) = self.sum_dg(dG, None, *packed)
        if not self.fused_gate:
            return dg, None, None
        raw_g = layouts.in_layout(present(saved.raw_g), self.raw_layout)
        return self.gate_bwd(raw_g, saved.A_log, saved.dt_bias, dg, *packed)
