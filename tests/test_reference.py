"""The oracles against the token recurrence, in float64: forward, gradients, packed batches, every option."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from layout_tuner import reference

F64 = torch.float64
LN2 = math.log(2.0)


@dataclass(frozen=True)
class Case:
    """Sizes of one problem; `cu_seqlens` makes it a packed one."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    BT: int = 64
    cu_seqlens: tuple[int, ...] | None = None

    @property
    def cu(self) -> Tensor | None:
        return None if self.cu_seqlens is None else torch.tensor(self.cu_seqlens, dtype=torch.int32)

    @property
    def N(self) -> int:
        return self.B if self.cu_seqlens is None else len(self.cu_seqlens) - 1


CASES = {
    "gva": Case(2, 147, 2, 4, 16, 24),
    "whole-chunks": Case(2, 64, 2, 2, 8, 12, 32),
    "T=HV": Case(1, 5, 1, 5, 6, 4),
    "one-token": Case(2, 1, 2, 2, 8, 4),
    "packed": Case(1, 101, 2, 4, 8, 12, 16, (0, 37, 37, 38, 101)),
    "packed-gaps": Case(1, 110, 1, 3, 12, 8, 32, (7, 7, 71, 72, 72, 99)),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
dense_case = pytest.mark.parametrize("case", [c for c in CASES.values() if c.cu is None])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def inputs(case: Case, seed: int = 0) -> dict[str, Tensor]:
    """Inputs of the chain and gradients of its outputs."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    B, T, H, HV, K, V = case.B, case.T, case.H, case.HV, case.K, case.V
    return {
        "q": normal(B, T, H, K),
        "k": torch.nn.functional.normalize(normal(B, T, H, K), dim=-1),
        "v": normal(B, T, HV, V),
        "g": torch.nn.functional.logsigmoid(normal(B, T, HV)),
        "beta": normal(B, T, HV).sigmoid(),
        "initial_state": normal(case.N, HV, K, V),
        "do": normal(B, T, HV, V),
        "dht": normal(case.N, HV, K, V),
    }


def close(got: Tensor | None, want: Tensor | None, tolerance: float = 1e-10) -> None:
    """Equal up to float64 rounding, relative to the largest value."""
    assert got is not None and want is not None
    assert got.shape == want.shape
    if got.numel():
        bound = tolerance * max(1.0, want.abs().max().item())
        assert (got - want).abs().max().item() <= bound


def gradients(loss: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, of, allow_unused=False)


def stages(case: Case, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Cumulative gate, A, w, u, h and v_new of one forward pass."""
    options: dict[str, Any] = {"cu_seqlens": case.cu, "compute_dtype": F64}
    G = reference.chunk_local_cumsum(x["g"], case.BT, scale=1 / LN2, **options)
    w, u, A = reference.chunk_gated_delta_rule_fwd_intra(x["k"], x["v"], G, x["beta"], chunk_size=case.BT, **options)
    h, v_new, _ = reference.chunk_gated_delta_rule_fwd_h(
        x["k"], w, u, G, initial_state=x["initial_state"], chunk_size=case.BT, **options
    )
    assert v_new is not None
    return {"G": G, "A": A, "w": w, "u": u, "h": h, "v_new": v_new}


@each_case
@pytest.mark.parametrize("state", [False, True], ids=["no-state", "state"])
@pytest.mark.parametrize("gated", [False, True], ids=["no-gate", "gate"])
def test_chain_follows_the_recurrence(case: Case, state: bool, gated: bool) -> None:
    """Outputs and every gradient of the chunked chain equal those of the recurrence and of its autograd."""
    x = inputs(case)
    names = ["q", "k", "v", "beta", *(["g"] if gated else []), *(["initial_state"] if state else [])]
    leaves = {name: x[name].requires_grad_() for name in names}
    options: dict[str, Any] = {"g": leaves.get("g"), "initial_state": leaves.get("initial_state")}
    options |= {"cu_seqlens": case.cu, "compute_dtype": F64, "chunk_size": case.BT, "scale": 0.3}
    q, k, v, beta = (leaves[name] for name in ("q", "k", "v", "beta"))
    o, ht = reference.gated_delta_rule_recurrence(q, k, v, beta=beta, output_final_state=True, **options)
    assert ht is not None
    with torch.no_grad():
        chunked_o, chunked_ht = reference.chunk_gated_delta_rule(q, k, v, beta=beta, output_final_state=True, **options)
    close(chunked_o, o)
    close(chunked_ht, ht)

    loss = (o * x["do"]).sum() + ((ht * x["dht"]).sum() if state else 0.0)
    want = dict(zip(names, gradients(loss, *leaves.values()), strict=True))
    with torch.no_grad():
        got = reference.chunk_gated_delta_rule_bwd(
            q, k, v, beta=beta, do=x["do"], dht=x["dht"] if state else None, **options
        )
    pairs = {"q": got.dq, "k": got.dk, "v": got.dv, "beta": got.dbeta, "g": got.dg, "initial_state": got.dh0}
    for name in names:
        close(pairs[name], want[name])
    assert (got.dg is None) == (not gated)
    assert (got.dh0 is None) == (not state)


@each_case
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("negative", [False, True], ids=["beta<1", "beta<2"])
def test_fused_activations_follow_autograd(case: Case, bias: bool, negative: bool) -> None:
    """Fused gate, beta sigmoid, l2norm and V-first states, with all their gradients."""
    x = inputs(case)
    generator = torch.Generator().manual_seed(1)
    A_log = torch.randn(case.HV, generator=generator, dtype=F64)
    dt_bias = torch.randn(case.HV, generator=generator, dtype=F64) if bias else None
    state, dht = (x[name].mT.contiguous() for name in ("initial_state", "dht"))
    leaves = [x["q"], x["k"] * 3, x["v"], x["g"], x["beta"], state, A_log, *([dt_bias] if dt_bias is not None else [])]
    for leaf in leaves:
        leaf.requires_grad_()
    options: dict[str, Any] = {
        "initial_state": state,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": negative,
        "state_v_first": True,
        "cu_seqlens": case.cu,
        "use_gate_in_kernel": True,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "chunk_size": case.BT,
        "compute_dtype": F64,
    }
    o, ht = reference.gated_delta_rule_recurrence(*leaves[:5], output_final_state=True, **options)
    assert ht is not None
    chunked_o, chunked_ht = reference.chunk_gated_delta_rule(*leaves[:5], output_final_state=True, **options)
    close(chunked_o, o)
    close(chunked_ht, ht)
    want = gradients((o * x["do"]).sum() + (ht * dht).sum(), *leaves)
    got = reference.chunk_gated_delta_rule_bwd(*leaves[:5], do=x["do"], dht=dht, **options)
    results = [got.dq, got.dk, got.dv, got.dg, got.dbeta, got.dh0, got.dA_log, got.ddt_bias]
    assert (got.ddt_bias is None) == (not bias)
    for result, gradient in zip(results, want, strict=False):
        close(result, gradient)


@dense_case
@pytest.mark.parametrize("state_v_first", [False, True])
def test_chunk_states_are_the_recurrences_states(case: Case, state_v_first: bool) -> None:
    """h[c] is the state before chunk c, dh[c] the gradient of the state after it, v_new the recurrence's update."""
    x = inputs(case)
    s, BT = stages(case, x), case.BT
    turn = (lambda y: y.mT) if state_v_first else (lambda y: y)
    tokens = {name: x[name] for name in ("q", "k", "v", "g", "beta")}
    options: dict[str, Any] = {"state_v_first": state_v_first, "compute_dtype": F64}
    h, v_new, _ = reference.chunk_gated_delta_rule_fwd_h(
        x["k"], s["w"], s["u"], s["G"], initial_state=turn(x["initial_state"]), chunk_size=BT, **options
    )
    dv = reference.chunk_bwd_dv_local(x["q"], x["k"], x["do"], s["G"], chunk_size=BT, compute_dtype=F64)
    dh, dh0, _ = reference.chunk_gated_delta_rule_bwd_dhu(
        x["q"], x["k"], s["w"], x["do"], dv, s["G"], None, turn(x["initial_state"]), turn(x["dht"]),
        chunk_size=BT, **options,
    )  # fmt: skip
    for c in range(-(-case.T // BT)):
        _, before = reference.gated_delta_rule_recurrence(
            **{name: y[:, : c * BT] for name, y in tokens.items()},
            initial_state=turn(x["initial_state"]), output_final_state=True, **options,
        )  # fmt: skip
        close(h[:, c], before)
        after = torch.zeros_like(turn(x["initial_state"])).requires_grad_()
        o, ht = reference.gated_delta_rule_recurrence(
            **{name: y[:, (c + 1) * BT :] for name, y in tokens.items()},
            initial_state=after, output_final_state=True, **options,
        )  # fmt: skip
        assert ht is not None
        loss = (o * x["do"][:, (c + 1) * BT :]).sum() + (ht * turn(x["dht"])).sum()
        close(dh[:, c], gradients(loss, after)[0])
    assert v_new is not None and dh0 is not None
    k = x["k"].repeat_interleave(case.HV // case.H, 2)
    for t in (0, case.T - 1):
        states = [
            reference.gated_delta_rule_recurrence(
                **{name: y[:, :stop] for name, y in tokens.items()},
                initial_state=x["initial_state"], output_final_state=True, compute_dtype=F64,
            )[1]
            for stop in (t, t + 1)
        ]  # fmt: skip
        assert states[0] is not None and states[1] is not None
        update = states[1] - x["g"][:, t, :, None, None].exp() * states[0]
        close(k[:, t, :, :, None] * v_new[:, t, :, None, :], update)


@each_case
def test_the_inverse_and_its_matrix(case: Case) -> None:
    """kkt element by element, and (I + M) A = I on the tokens that exist."""
    x = inputs(case)
    s, cu = stages(case, x), case.cu
    M = reference.chunk_scaled_dot_kkt_fwd(
        x["k"], s["G"], x["beta"], cu_seqlens=cu, chunk_size=case.BT, compute_dtype=F64
    )
    assert M.shape == s["A"].shape == (case.B, case.T, case.HV, case.BT)
    bounds = [(0, case.T)] if cu is None else list(itertools.pairwise(cu.tolist()))
    outside = torch.ones(case.T, dtype=torch.bool)
    for bos, eos in bounds:
        outside[bos:eos] = False
        for start in range(bos, eos, case.BT):
            n, i_h = min(case.BT, eos - start), case.HV - 1
            k = x["k"][0, start : start + n, i_h // (case.HV // case.H)]
            G, beta = s["G"][0, start : start + n, i_h], x["beta"][0, start : start + n, i_h]
            want = (beta[:, None] * (k @ k.T) * 2.0 ** (G[:, None] - G[None, :])).tril(-1)
            rows = M[0, start : start + n, i_h]
            close(rows[:, :n], want)
            assert not rows[:, n:].any()
            identity = torch.eye(n, dtype=F64)
            close((identity + want) @ s["A"][0, start : start + n, i_h, :n], identity)
    assert not M[:, outside].any() and not s["A"][:, outside].any()


@each_case
@pytest.mark.parametrize("gate", ["none", "g", "g_gamma", "A"])
def test_dv_local_is_the_gradient_of_the_outputs(case: Case, gate: str) -> None:
    """Through v_new, with the states held fixed; a given A already holds scale and gate."""
    x = inputs(case)
    s = stages(case, x)
    g_gamma = -torch.arange(1, case.HV + 1, dtype=F64) / 7
    gates: dict[str, Any] = {"g": s["G"] if gate in ("g", "A") else None}
    gates["g_gamma"] = g_gamma if gate == "g_gamma" else None
    options: dict[str, Any] = {"cu_seqlens": case.cu, "chunk_size": case.BT, "compute_dtype": F64}
    v_new = s["v_new"].requires_grad_()
    o = reference.chunk_fwd_o(x["q"], x["k"], v_new, s["h"], **gates, **options)
    (want,) = gradients((o * x["do"]).sum(), v_new)
    if gate != "A":
        close(reference.chunk_bwd_dv_local(x["q"], x["k"], x["do"], **gates, **options), want)
        return
    # Column j of A is the output's share of the chunk's token j: what unit values at the positions j give.
    cu = case.cu
    starts = torch.zeros(case.T, dtype=torch.long) if cu is None else cu.long()[
        torch.searchsorted(cu, torch.arange(case.T, dtype=cu.dtype), right=True).sub(1).clamp(0)
    ]  # fmt: skip
    position = (torch.arange(case.T) - starts) % case.BT
    unit = torch.nn.functional.one_hot(position, case.BT).to(F64)[None, :, None].expand(case.B, -1, case.HV, -1)
    no_state = s["h"].new_zeros(*s["h"].shape[:-1], case.BT)
    A = reference.chunk_fwd_o(x["q"], x["k"], unit, no_state, **gates, **options)
    nonsense = torch.full_like(x["q"], math.nan)
    poisoned = A + torch.full((case.BT, case.BT), 9.0, dtype=F64).triu(1)[position][None, :, None]
    close(reference.chunk_bwd_dv_local(nonsense, nonsense, x["do"], A=poisoned, **options), want)


@each_case
@pytest.mark.parametrize("gate", ["none", "g", "gk", "g+gk"])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_dhu_is_the_gradient_of_the_states(case: Case, gate: str, state_v_first: bool) -> None:
    """Of any loss that is linear in inter-chunk outputs, v_new and the final state, through u and the first state."""
    x = inputs(case)
    s = stages(case, x)
    G = s["G"] if gate in ("g", "g+gk") else None
    channel = torch.nn.functional.logsigmoid(torch.randn(case.B, case.T, case.HV, case.K, dtype=F64))
    gk = reference.chunk_local_cumsum(channel, case.BT, cu_seqlens=case.cu, compute_dtype=F64)
    gk_or_none = gk if gate in ("gk", "g+gk") else None
    options: dict[str, Any] = {"cu_seqlens": case.cu, "chunk_size": case.BT, "compute_dtype": F64}
    options["state_v_first"] = state_v_first
    h0, dht = (x[name].mT if state_v_first else x[name] for name in ("initial_state", "dht"))
    h0, u = h0.requires_grad_(), s["u"].requires_grad_()
    dv = torch.randn_like(u)
    h, v_new, ht = reference.chunk_gated_delta_rule_fwd_h(
        x["k"], s["w"], u, G, gk_or_none, h0, output_final_state=True, **options
    )
    assert v_new is not None and ht is not None
    inter = reference.chunk_fwd_o(x["q"], torch.zeros_like(x["k"]), v_new, h, G, scale=0.7, **options)
    inside = torch.ones(case.T, dtype=F64) if case.cu is None else torch.zeros(case.T, dtype=F64)
    if case.cu is not None:
        inside[int(case.cu[0]) : int(case.cu[-1])] = 1.0
    dv = dv * inside[None, :, None, None]
    want = gradients((inter * x["do"]).sum() + (v_new * dv).sum() + (ht * dht).sum(), u, h0)
    dh, dh0, dv2 = reference.chunk_gated_delta_rule_bwd_dhu(
        x["q"], x["k"], s["w"], x["do"], dv, G, gk_or_none, h0, dht, scale=0.7, **options
    )
    close(dv2, want[0])
    close(dh0, want[1])
    assert dh.shape == h.shape
    assert reference.chunk_gated_delta_rule_bwd_dhu(
        x["q"], x["k"], s["w"], x["do"], dv, G, gk_or_none, None, dht, scale=0.7, **options
    )[1] is None  # fmt: skip


@dense_case
def test_gk_decays_the_state_channel_by_channel(case: Case) -> None:
    """S <- diag(exp2(step)) S + k u^T token by token, with the keys gated by the caller."""
    BT, HV = case.BT, case.HV
    step = -torch.rand(case.B, case.T, HV, case.K, dtype=F64)
    k, u = torch.randn(case.B, case.T, HV, case.K, dtype=F64), torch.randn(case.B, case.T, HV, case.V, dtype=F64)
    gk = reference.chunk_local_cumsum(step, BT, compute_dtype=F64)
    gk_last = torch.stack([gk[:, min((t // BT + 1) * BT, case.T) - 1] for t in range(case.T)], 1)
    h, v_new, ht = reference.chunk_gated_delta_rule_fwd_h(
        k * (gk_last - gk).exp2(), torch.zeros_like(k), u, gk=gk, output_final_state=True, chunk_size=BT,
        compute_dtype=F64,
    )  # fmt: skip
    S = u.new_zeros(case.B, HV, case.K, case.V)
    for t in range(case.T):
        if t % BT == 0:
            close(h[:, t // BT], S)
        S = step[:, t, ..., None].exp2() * S + k[:, t, ..., None] * u[:, t, :, None, :]
    close(ht, S)
    close(v_new, u)


@dense_case
@pytest.mark.parametrize("gate", ["none", "g", "g_gamma"])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_dqkwg_is_the_gradient_of_a_chunk(case: Case, gate: str, state_v_first: bool) -> None:
    """Of the chunk's outputs and of the state it leaves, with v_new and the state before it held fixed."""
    x = inputs(case)
    s, BT = stages(case, x), case.BT
    turn = (lambda y: y.mT) if state_v_first else (lambda y: y)
    g_gamma = -torch.arange(1, case.HV + 1, dtype=F64) / 7 if gate == "g_gamma" else None
    G = s["G"].requires_grad_() if gate == "g" else None
    q, k, w = (y.requires_grad_() for y in (x["q"], x["k"], s["w"]))
    h, dh, dv = s["h"], torch.randn_like(s["h"]), torch.randn_like(s["u"])
    o = reference.chunk_fwd_o(q, k, s["v_new"], h, G, g_gamma, 0.4, chunk_size=BT, compute_dtype=F64)
    loss = (o * x["do"]).sum()
    for c in range(-(-case.T // BT)):
        n = min(BT, case.T - c * BT)
        rows = slice(c * BT, c * BT + n)
        gate_c = torch.zeros(case.B, n, case.HV, dtype=F64) if G is None else G[:, rows]
        if g_gamma is not None:
            gate_c = gate_c + torch.arange(1, n + 1, dtype=F64)[:, None] * g_gamma
        b_k = k[:, rows].repeat_interleave(case.HV // case.H, 2)
        v_decayed = (gate_c[:, -1:] - gate_c).exp2()[..., None] * s["v_new"][:, rows]
        S = gate_c[:, -1, :, None, None].exp2() * h[:, c] + torch.einsum("bthk,bthv->bhkv", b_k, v_decayed)
        loss = loss + (S * dh[:, c]).sum() - (torch.einsum("bthk,bhkv->bthv", w[:, rows], h[:, c]) * dv[:, rows]).sum()
    want = gradients(loss, q, k, w, *([G] if G is not None else []))
    arguments = (q, k, s["v_new"], x["do"], turn(h), turn(dh), w, G, g_gamma, dv, 0.4, state_v_first)
    dq, dk, dw, dg = reference.chunk_bwd_dqkwg(*arguments, chunk_size=BT, compute_dtype=F64)
    close(dq, want[0])
    close(dk, want[1])
    close(dw, want[2])
    scales = reference.chunk_bwd_dqkwg_term_rms(*arguments, chunk_size=BT, compute_dtype=F64)
    if G is None:
        assert dg is None and scales == {}
    else:
        close(dg, want[3] / LN2)
        assert dg is not None and scales["dg"] > 0 and dg.square().mean().sqrt() < 3 * scales["dg"]
    no_w = reference.chunk_bwd_dqkwg(*arguments[:6], None, *arguments[7:], chunk_size=BT, compute_dtype=F64)
    assert no_w[2] is None
    close(no_w[0], dq)


@each_case
@pytest.mark.parametrize("gated", [False, True], ids=["no-gate", "gate"])
def test_wy_gradients_follow_autograd(case: Case, gated: bool) -> None:
    """Of w and u, through kkt and its inverse."""
    x = inputs(case)
    s, options = stages(case, x), {"cu_seqlens": case.cu, "compute_dtype": F64}
    k, v, beta, G = (y.detach().requires_grad_() for y in (x["k"], x["v"], x["beta"], s["G"]))
    g = G if gated else None
    w, u, A = reference.chunk_gated_delta_rule_fwd_intra(k, v, g, beta, chunk_size=case.BT, **options)
    dw, du = torch.randn_like(w), torch.randn_like(u)
    want = gradients((w * dw).sum() + (u * du).sum(), k, v, beta, *([G] if gated else []))
    dk, dv, dbeta, dg = reference.prepare_wy_repr_bwd(k, v, beta, A, dw, du, g, **options)
    close(dk, want[0])
    close(dv, want[1])
    close(dbeta, want[2])
    scales = reference.prepare_wy_repr_bwd_term_rms(k, v, beta, A, dw, du, g, **options)
    assert set(scales) == ({"dbeta", "dg"} if gated else {"dbeta"})
    if gated:
        close(dg, want[3] / LN2)
    else:
        assert dg is None


@each_case
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("S", [None, 3])
def test_cumsum_restarts_in_every_chunk_and_sequence(case: Case, reverse: bool, S: int | None) -> None:
    shape = (case.B, case.T, case.HV) if S is None else (case.B, case.T, case.HV, S)
    g, want = torch.randn(*shape, dtype=F64), torch.zeros(*shape, dtype=F64)
    bounds = [0, case.T] if case.cu is None else case.cu.tolist()
    for bos, eos in itertools.pairwise(bounds):
        for t in range(bos, eos):
            start = bos + (t - bos) // case.BT * case.BT
            rows = slice(t, min(start + case.BT, eos)) if reverse else slice(start, t + 1)
            want[:, t] = 1.5 * g[:, rows].sum(1)
    got = reference.chunk_local_cumsum(g, case.BT, reverse, 1.5, case.cu, compute_dtype=F64)
    close(got, want)


@each_case
@pytest.mark.parametrize("bias", [False, True])
def test_fused_gate_follows_autograd(case: Case, bias: bool) -> None:
    g = (5 * torch.randn(case.B, case.T, case.HV, dtype=F64)).requires_grad_()
    A_log = torch.randn(1, 1, case.HV, dtype=F64).requires_grad_()
    dt_bias = torch.randn(case.HV, dtype=F64).requires_grad_() if bias else None
    x = g if dt_bias is None else g + dt_bias
    gate = -A_log.exp() * (1 + x.exp()).log()
    cumulative = reference.gdn_gate_chunk_cumsum(g, A_log, case.BT, 2.0, dt_bias, case.cu, compute_dtype=F64)
    close(cumulative, reference.chunk_local_cumsum(gate, case.BT, False, 2.0, case.cu, compute_dtype=F64), 1e-8)
    dyg = torch.randn_like(g)
    want = gradients((gate * dyg).sum(), g, A_log, *([dt_bias] if dt_bias is not None else []))
    dg, dA_log, ddt_bias = reference.gdn_gate_bwd(g, A_log, dt_bias, dyg, compute_dtype=F64)
    close(dg, want[0])
    close(dA_log, want[1], 1e-8)
    if bias:
        close(ddt_bias, want[2])
    else:
        assert ddt_bias is None


@each_case
@pytest.mark.parametrize("bias", [False, True])
def test_scales_of_parameter_gradients_add_up_chunks(case: Case, bias: bool) -> None:
    """Magnitudes within a chunk, squares over chunks; what lies outside every sequence may be anything."""
    g = 5 * torch.randn(case.B, case.T, case.HV, dtype=F64)
    A_log, dt_bias = torch.randn(case.HV, dtype=F64), torch.randn(case.HV, dtype=F64)
    dyg = torch.randn_like(g)
    bounds = [0, case.T] if case.cu is None else case.cu.tolist()
    dyg[:, : bounds[0]] = dyg[:, bounds[-1] :] = 0
    dg, _, _ = reference.gdn_gate_bwd(g, A_log, dt_bias if bias else None, dyg, compute_dtype=F64)
    dA = dyg * reference.gdn_gate(g, A_log, dt_bias if bias else None, compute_dtype=F64)
    want = {"dA_log": torch.zeros(case.HV, dtype=F64), "ddt_bias": torch.zeros(case.HV, dtype=F64)}
    for bos, eos in itertools.pairwise(bounds):
        for start in range(bos, eos, case.BT):
            rows = slice(start, min(start + case.BT, eos))
            want["dA_log"] += dA[:, rows].abs().sum(1).square().sum(0)
            want["ddt_bias"] += dg[:, rows].abs().sum(1).square().sum(0)
    g[:, : bounds[0]] = g[:, bounds[-1] :] = float("nan")
    found = reference.gate_parameter_term_rms(dg, g, A_log, dt_bias if bias else None, case.cu, case.BT)
    assert set(found) == ({"dA_log", "ddt_bias"} if bias else {"dA_log"})
    for name, scale in found.items():
        close(scale, want[name].mean().sqrt())


@pytest.mark.parametrize("name", ["packed", "packed-gaps"])
def test_packed_is_every_sequence_on_its_own(name: str) -> None:
    """States in the order of the chunk indices, a state row for an empty sequence, zeros outside."""
    case = CASES[name]
    x, cu = inputs(case), case.cu
    assert cu is not None
    s = stages(case, x)
    indices = reference.prepare_chunk_indices(cu, case.BT)
    offsets = reference.prepare_chunk_offsets(cu, case.BT)
    assert s["h"].shape[:2] == (1, len(indices)) and offsets[-1] == len(indices) and indices.dtype == cu.dtype
    _, ht = reference.chunk_gated_delta_rule(
        *(x[n] for n in ("q", "k", "v", "g", "beta")), initial_state=x["initial_state"], output_final_state=True,
        cu_seqlens=cu, chunk_size=case.BT, compute_dtype=F64,
    )  # fmt: skip
    assert ht is not None and len(ht) == case.N
    for n, (bos, eos) in enumerate(itertools.pairwise(cu.tolist())):
        if bos == eos:
            close(ht[n], x["initial_state"][n])
            assert offsets[n] == offsets[n + 1]
            continue
        own = {k: (y[n : n + 1] if k in ("initial_state", "dht") else y[:, bos:eos]) for k, y in x.items()}
        alone = stages(Case(1, eos - bos, case.H, case.HV, case.K, case.V, case.BT), own)
        close(s["h"][:, offsets[n] : offsets[n + 1]], alone["h"])
        close(s["w"][:, bos:eos], alone["w"])
    for tensor in (s[n] for n in ("G", "A", "w", "u", "v_new")):
        assert not tensor[:, : cu[0]].any() and not tensor[:, cu[-1] :].any()


@each_case
def test_g_gamma_is_a_gate_that_grows_with_the_position(case: Case) -> None:
    """The first token of a chunk is decayed once; a new sequence starts at its own first token."""
    x = inputs(case)
    g_gamma = -torch.arange(1, case.HV + 1, dtype=F64) / 7
    options: dict[str, Any] = {"cu_seqlens": case.cu, "chunk_size": case.BT, "compute_dtype": F64}
    g = reference.chunk_local_cumsum(g_gamma.expand(case.B, case.T, case.HV), **options)
    h = stages(case, x)["h"]
    q, k, v, do = (x[name] for name in ("q", "k", "v", "do"))
    close(
        reference.chunk_fwd_o(q, k, v, h, g_gamma=g_gamma, **options), reference.chunk_fwd_o(q, k, v, h, g, **options)
    )
    close(
        reference.chunk_bwd_dv_local(q, k, do, g_gamma=g_gamma, **options),
        reference.chunk_bwd_dv_local(q, k, do, g, **options),
    )
    got = reference.chunk_bwd_dqkwg(q, k, v, do, h, h, g_gamma=g_gamma, **options)
    want = reference.chunk_bwd_dqkwg(q, k, v, do, h, h, g=g, **options)
    close(got[0], want[0])
    close(got[1], want[1])
    assert got[3] is None


def test_dg_of_one_token_without_a_state_is_exactly_zero() -> None:
    case = CASES["one-token"]
    x = inputs(case)
    got = reference.chunk_gated_delta_rule_bwd(*(x[n] for n in ("q", "k", "v", "g", "beta", "do")))
    assert got.dg is not None and not got.dg.any()
    no_state = torch.zeros(case.B, 1, case.HV, case.K, case.V)
    scales = reference.chunk_bwd_dqkwg_term_rms(x["q"], x["k"], x["v"], x["do"], no_state, no_state, g=x["g"])
    assert scales["dg"] == 0


def test_strong_decay_stays_finite() -> None:
    case = CASES["gva"]
    x = inputs(case)
    tokens = (x["q"], x["k"], x["v"], x["g"] * 200, x["beta"])
    o, _ = reference.chunk_gated_delta_rule(*tokens)
    got = reference.chunk_gated_delta_rule_bwd(*tokens, do=x["do"])
    assert o.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in got if gradient is not None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_inputs_of_any_dtype_and_strides(dtype: torch.dtype) -> None:
    """T-contiguous, sliced and stride-0 inputs give what their copies give, in the compute dtype."""
    case = CASES["gva"]
    x = {name: y.to(dtype) for name, y in inputs(case).items()}
    x["do"] = torch.ones((), dtype=dtype).expand(x["do"].shape)
    strange = dict(x)
    for name in ("g", "beta"):
        strange[name] = x[name].transpose(1, 2).contiguous().transpose(1, 2)
    qk = torch.cat([x["q"], x["k"]], -1)
    strange["q"], strange["k"] = qk[..., : case.K], qk[..., case.K :]
    order = ("q", "k", "v", "g", "beta", "do", "dht")
    plain = reference.chunk_gated_delta_rule_bwd(*(x[n].contiguous() for n in order), initial_state=x["initial_state"])
    got = reference.chunk_gated_delta_rule_bwd(*(strange[n] for n in order), initial_state=x["initial_state"])
    exact = reference.chunk_gated_delta_rule_bwd(
        *(x[n] for n in order), initial_state=x["initial_state"], compute_dtype=F64
    )
    for a, b, c in zip(got[:6], plain[:6], exact[:6], strict=True):
        assert a is not None and b is not None and c is not None and a.dtype == torch.float32
        close(a, b, 1e-6)
        close(a.double(), c, 1e-4)


def test_refusals() -> None:
    x = inputs(CASES["one-token"])
    gate = torch.zeros(2)
    h = torch.zeros(2, 1, 2, 8, 4)
    with pytest.raises(ValueError, match="exclude"):
        reference.chunk_fwd_o(x["q"], x["k"], x["v"], h, x["g"], gate)
    with pytest.raises(ValueError, match="beta is required"):
        reference.chunk_scaled_dot_kkt_fwd(x["k"], x["g"])
    with pytest.raises(ValueError, match="B == 1"):
        reference.chunk_local_cumsum(x["g"], 16, cu_seqlens=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="allow_neg_eigval"):
        reference.chunk_gated_delta_rule(*(x[n] for n in ("q", "k", "v", "g", "beta")), allow_neg_eigval=True)
