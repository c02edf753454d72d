"""Kimi Delta Attention, stage by stage and put together: against the token recurrence, and what has to hold exactly."""

import math

import accesses
import pytest
import torch
from cases import key_for
from hardware import INTERPRETED
from kda import RCP_LN2, Case, Stages, variant
from layout_tuner.kernels import tiling

from layout_tuner import ops, reference
from layout_tuner.device.driver import Chip
from layout_tuner.launch import launcher
from layout_tuner.launch.prepared import Prepared
from layout_tuner.spec import registry
from layout_tuner.spec.declaration import Problem
from layout_tuner.spec.layouts import Layout, relayout
from layout_tuner.tuning import numerics
from layout_tuner.tuning.experiment import Experiment

F64 = torch.float64
PACKED = (2, 2, 9, 10, 28, 30)  # outside tokens first, an empty sequence, one of a single token, one past a chunk
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dh0")


def recurrence(case: Case, x: dict[str, torch.Tensor | None], scale: float = 0.3):  # type: ignore[no-untyped-def]
    """Results and gradients of the token recurrence in float64."""
    leaves = {name: None if t is None else t.to(F64).requires_grad_() for name, t in x.items()}
    o, ht = reference.kda_recurrence(
        *(leaves[name] for name in ("q", "k", "v", "g", "beta")), scale, leaves["h0"], True,
        state_v_first=case.v_first, cu_seqlens=case.starts, compute_dtype=F64,
    )  # fmt: skip
    outputs, gradients = [o], [leaves["do"].detach()]
    if x["dht"] is not None:
        outputs, gradients = [o, ht], [*gradients, leaves["dht"].detach()]
    torch.autograd.backward(outputs, gradients)
    named = dict(zip(GRADIENTS, ("q", "k", "v", "g", "beta", "h0")))
    return o.detach(), ht.detach(), {d: None if x[n] is None else leaves[n].grad for d, n in named.items()}


ORACLES = [
    Case(B=2, T=37, H=2, HV=4, K=8, V=12, BT=16, state=True),
    Case(T=30, cu=PACKED, BT=16, state=True, v_first=True),
    Case(T=33, BT=32, gate=5.0),
]


@pytest.mark.parametrize("case", ORACLES, ids=str)
def test_the_chunked_oracles_are_the_recurrence(case: Case) -> None:
    x = case.inputs(torch.device("cpu"))
    o, ht, wanted = recurrence(case, x)
    named = {name: x[name] for name in ("q", "k", "v", "g", "beta")}
    options = {"state_v_first": case.v_first, "cu_seqlens": case.starts, "chunk_size": case.BT, "compute_dtype": F64}
    got = reference.chunk_kda(**named, scale=0.3, initial_state=x["h0"], output_final_state=True, **options)
    assert numerics.error(got[0], o) < 1e-12
    assert numerics.error(got[1], ht) < 1e-12
    gradients = reference.chunk_kda_bwd(**named, do=x["do"], dht=x["dht"], scale=0.3, initial_state=x["h0"], **options)
    for name, ours in gradients._asdict().items():
        assert (ours is None) == (wanted[name] is None)
        if ours is not None:
            assert numerics.error(ours, wanted[name]) < 1e-12, name


GIVEN = [(("A_log", "dt_bias"), None), (("A_log",), None)]
GIVEN += [(given, -5.0) for given in (("A_log", "dt_bias"), ("A_log",), ("dt_bias",), ())]


@pytest.mark.parametrize(("given", "lower_bound"), GIVEN)
def test_the_gate_s_oracle_has_the_gradients_of_autograd(given: tuple[str, ...], lower_bound: float | None) -> None:
    torch.manual_seed(0)
    g, dyg = torch.randn(2, 5, 3, 4, dtype=F64, requires_grad=True), torch.randn(2, 5, 3, 4, dtype=F64)
    named = {"A_log": torch.randn(1, 3, 1, dtype=F64), "dt_bias": torch.randn(12, dtype=F64)}
    leaves = {name: named[name].requires_grad_() for name in given}
    gate = reference.kda_gate_fwd(g, **leaves, lower_bound=lower_bound, compute_dtype=F64)
    gate.backward(dyg)
    dg, dA_log, ddt_bias = reference.kda_gate_bwd(g, **leaves, dyg=dyg, lower_bound=lower_bound, compute_dtype=F64)
    torch.testing.assert_close(dg, g.grad)
    for name, ours in (("A_log", dA_log), ("dt_bias", ddt_bias)):
        assert (ours is None) == (name not in given)
        if ours is not None:
            torch.testing.assert_close(ours, leaves[name].grad)


def test_the_fused_gate_in_any_shape(device: torch.device) -> None:
    torch.manual_seed(0)
    g = torch.randn(7, 2, 16).to(device).requires_grad_()
    A_log, dt_bias = torch.randn(1, 1, 2, 1).to(device).requires_grad_(), torch.randn(32).to(device).requires_grad_()
    dyg = torch.randn(7, 2, 16).to(device)
    out = ops.fused_kda_gate(g, A_log, dt_bias)
    out.backward(dyg)
    wanted = reference.kda_gate_fwd(g, A_log, dt_bias, compute_dtype=F64)
    gradients = reference.kda_gate_bwd(g, A_log, dt_bias, dyg, compute_dtype=F64)
    assert numerics.error(out, wanted) < 1e-6
    for leaf, gradient in zip((g, A_log, dt_bias), gradients):
        assert leaf.grad is not None and leaf.grad.shape == leaf.shape
        assert numerics.error(leaf.grad, gradient) < 1e-5


def test_a_saturated_bounded_gate_keeps_its_gradient(device: torch.device) -> None:
    """1 - s has no digits left where s is next to 1."""
    g = torch.full((1, 1, 1, 16), 20.0).to(device)
    dg = ops.kda_gate_bwd(g, None, None, torch.ones_like(g), lower_bound=-5.0)[0]
    assert (
        numerics.error(dg, reference.kda_gate_bwd(g, None, None, torch.ones_like(g), -5.0, compute_dtype=F64)[0]) < 1e-5
    )


def test_what_is_no_gate(device: torch.device) -> None:
    g = torch.zeros(1, 2, 1, 16).to(device)
    with pytest.raises(ValueError, match=r"A_log: wanted \[HV\], got None"):
        ops.kda_gate_fwd(g)
    with pytest.raises(ValueError, match="lower_bound: wanted a number below 0, got 0"):
        ops.kda_gate_chunk_cumsum(g, None, 16, lower_bound=0.0)
    with pytest.raises(ValueError, match="dt_bias: wanted"):
        ops.kda_gate_fwd(g, torch.zeros(1).to(device), torch.zeros(3).to(device))


CHAINS = [
    (Case(B=2, T=20, H=2, HV=4, K=24, V=8, state=True), False),
    (Case(T=30, cu=PACKED, state=True, v_first=True), False),
    (Case(T=30, cu=PACKED, state=True), True),
    (Case(T=40, BT=32, K=8, V=24), False),
    (Case(T=20, gate_of_all=-5.0, state=True), True),
    (Case(T=20, gate_of_all=-5.0, state=True), False),
    (Case(T=20, gate=30.0), False),
    (Case(T=1, state=True), False),
    (Case(T=18, H=1, HV=1, equal_keys=True, beta=1.0, gate=0.01), False),
    (Case(T=18, H=1, HV=1, equal_keys=True, beta=2.0, gate=0.01), True),
]


@pytest.mark.parametrize(("case", "safe_gate"), CHAINS, ids=str)
def test_the_stages_together_are_the_recurrence(case: Case, safe_gate: bool, device: torch.device) -> None:
    x = case.inputs(device)
    stages = Stages(case=case, safe_gate=safe_gate)
    o, ht = stages.forward(**x)
    gradients = stages.backward(**x)
    wanted_o, wanted_ht, wanted = recurrence(case, x)
    assert numerics.error(o, wanted_o) < 1e-5
    assert numerics.error(ht, wanted_ht) < 1e-5
    for name, ours in gradients.items():
        assert (ours is None) == (wanted[name] is None)
        if ours is not None:
            # What is left of dg where terms cancel is small beside them.
            assert numerics.error(ours, wanted[name]) < (1e-4 if name == "dg" else 2e-5), name


def test_g_in_the_other_layout_gives_the_same_bits(device: torch.device) -> None:
    case = Case(T=30, cu=PACKED, state=True)
    x = case.inputs(device)
    found = []
    for layout in (Layout.STRIDE_HV, Layout.T_CONTIG):
        stages = Stages(case=case, layout=layout)
        found.append([*stages.forward(**x), *stages.backward(**x).values()])
    for ours, theirs in zip(*found):
        assert numerics.identical(ours, theirs)


def test_equal_gates_in_all_channels_are_the_gated_delta_rule(device: torch.device) -> None:
    case = Case(T=20, state=True)
    x = case.inputs(device)
    x["g"] = x["g"][..., :1].expand_as(x["g"]).contiguous()
    stages = Stages(case=case)
    o, ht = stages.forward(**x)
    dg = stages.backward(**x)["dg"]
    named = [x[name].to(F64).requires_grad_() for name in ("q", "k", "v")]
    g = x["g"][..., 0].to(F64).requires_grad_()
    wanted, wanted_ht = reference.gated_delta_rule_recurrence(
        *named, g, x["beta"], 0.3, x["h0"], True, compute_dtype=F64
    )
    torch.autograd.backward([wanted, wanted_ht], [x["do"].to(F64), x["dht"].to(F64)])
    assert numerics.error(o, wanted) < 1e-5
    assert numerics.error(ht, wanted_ht) < 1e-5
    assert g.grad is not None
    assert numerics.error(dg.sum(-1), g.grad) < 1e-4


@pytest.mark.parametrize("safe_gate", [False, True])
def test_a_smaller_loss_scales_every_gradient_bit_for_bit(safe_gate: bool, device: torch.device) -> None:
    """The backward is linear; factors that underflow at a gate of -5 would show here."""
    case = Case(T=32, BT=32, gate_of_all=-5.0, state=True)
    x = case.inputs(device)
    stages = Stages(case=case, safe_gate=safe_gate)
    stages.forward(**x)
    small = {name: x[name] * 2.0**-20 for name in ("do", "dht")}
    large, scaled = stages.backward(**x), stages.backward(**{**x, **small})
    for name, ours in large.items():
        assert numerics.identical(ours * 2.0**-20, scaled[name]), name


def scores(case: Case, x: dict[str, torch.Tensor | None], name: str):  # type: ignore[no-untyped-def]
    """What a variant of the stage ahead of the states returns."""
    G = reference.chunk_local_cumsum(x["g"], case.BT, scale=RCP_LN2)
    run = variant("chunk_kda_fwd_intra", name)
    return run((x["q"], x["k"], x["v"], G, x["beta"]), (case.BT, name == "bounded", True), (0.3,))


@pytest.mark.parametrize("name", ["exact", "bounded"])
def test_the_past_is_blind_to_the_future(name: str, device: torch.device) -> None:
    case = Case(T=32, BT=32, gate=2.0)
    x = case.inputs(device)
    before = scores(case, x, name)
    for token in (5, 16, 23):
        changed = {key: None if t is None else t.clone() for key, t in x.items()}
        for key in ("q", "k", "v", "g", "beta"):
            changed[key][:, token:] *= 0.75
        after = scores(case, changed, name)
        for output, ours, theirs in zip(("w", "u", "qg", "kg", "Aqk", "Akk"), before, after):
            if output != "kg":  # decays towards the chunk's end
                assert numerics.identical(ours[:, :token], theirs[:, :token]), (output, token)


@pytest.mark.parametrize("diagonal", ["columns", "halves", "product"])
def test_every_diagonal_at_the_bound(diagonal: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """All channels at -5 for a whole chunk, the worst that a bounded gate can be, with gradients of any size."""
    monkeypatch.setattr(tiling, "chunk_kda_diagonal", lambda variant, kind: diagonal)
    case = Case(T=30, BT=32, gate_of_all=-5.0)
    x = case.inputs(device)
    G = reference.chunk_local_cumsum(x["g"], case.BT, scale=RCP_LN2)
    got = ops.chunk_kda_fwd_intra(x["q"], x["k"], x["v"], G, x["beta"], chunk_size=case.BT)
    wanted = reference.chunk_kda_fwd_intra(x["q"], x["k"], x["v"], G, x["beta"], chunk_size=case.BT, compute_dtype=F64)
    for ours, theirs in zip(got, wanted):
        assert theirs is None or numerics.error(ours, theirs) < 1e-5
    torch.manual_seed(0)
    for size in (1.0, 1e-8):
        dA, dM = (size * torch.randn(1, 30, 2, 32).to(device) for _ in range(2))
        zeros = [torch.zeros(1, 30, 2, *rest).to(device) for rest in ((16,), (16,), (), (16,))]
        arguments = (x["q"], x["k"], G, x["beta"], dA, dM, *zeros)
        found = ops.chunk_kda_bwd_intra(*arguments, chunk_size=case.BT)
        right = reference.chunk_kda_bwd_intra(*arguments, chunk_size=case.BT, compute_dtype=F64)
        for ours, theirs in zip(found, right):
            assert numerics.error(ours, theirs) < 2e-5


@pytest.mark.parametrize("name", ["exact", "bounded"])
def test_a_token_alone_has_no_gradient_of_its_gate_from_the_scores(name: str, device: torch.device) -> None:
    x = Case(T=1).inputs(device)
    dA, dM = torch.ones(1, 1, 2, 16).to(device), torch.ones(1, 1, 2, 16).to(device)
    zeros = [torch.zeros(1, 1, 2, *rest).to(device) for rest in ((16,), (16,), (), (16,))]
    run = variant("chunk_kda_bwd_intra", name)
    dq, dk, db, dG = run((x["q"], x["k"], x["g"], x["beta"], dA, dM, *zeros), (16, name == "bounded"))
    assert not dG.any()
    assert not db.any()
    assert torch.equal(dq, x["k"].expand_as(dq))
    assert torch.equal(dk, x["q"].expand_as(dk))


def test_nothing_above_the_diagonal_of_the_scores_is_used(device: torch.device) -> None:
    case = Case(T=20)
    x = case.inputs(device)
    stages = Stages(case=case)
    stages.forward(**x)
    right = stages.backward(**x)
    position = torch.arange(20) % case.BT
    above = (torch.arange(case.BT)[None, :] > position[:, None])[None, :, None, :].to(device)
    stages.kept["Aqk"] = stages.kept["Aqk"].masked_fill(above, math.nan)
    for name, ours in stages.backward(**x).items():
        if ours is not None:
            assert numerics.identical(ours, right[name]), name
    kept = stages.kept
    o = ops.chunk_gla_fwd_o_gk(x["q"], kept["v_new"], kept["G"], kept["Aqk"], kept["h"], 0.3, chunk_size=case.BT)
    assert bool(torch.isfinite(o).all())


def test_a_state_s_gate_in_either_layout(device: torch.device) -> None:
    case = Case(B=2, T=20, state=True)
    x = case.inputs(device)
    stages = Stages(case=case)
    stages.forward(**x)
    kept = stages.kept
    for G in (kept["G"], relayout(kept["G"], Layout.T_CONTIG)):
        h, v_new, ht = ops.chunk_gated_delta_rule_fwd_h(
            kept["kg"], kept["w"], x["v"], gk=G, initial_state=x["h0"], output_final_state=True, chunk_size=case.BT
        )
        dh, dh0, dv2 = ops.chunk_gated_delta_rule_bwd_dhu(
            kept["qg"], kept["kg"], kept["w"], x["do"], x["v"], gk=G, h0=x["h0"], dht=x["dht"], chunk_size=case.BT
        )
        if G is kept["G"]:
            first = (h, v_new, ht, dh, dh0, dv2)
    assert all(map(numerics.identical, first, (h, v_new, ht, dh, dh0, dv2)))


@pytest.mark.skipif(not INTERPRETED, reason="a GPU takes its own way")
@pytest.mark.parametrize("op", ["chunk_kda_bwd_wy_dqkg_fused", "chunk_kda_bwd_intra", "kda_gate_bwd"])
def test_a_gpu_s_way_is_right_and_stays_within_its_tensors(op: str, device: torch.device) -> None:
    """Its tiles, and sums as products of 16-bit parts, which the interpreter does not take by itself."""
    spec = registry.lookup(op)
    key = key_for(spec, spec.standard_forms["training"], "bfloat16", B=1, T=20, H=1, HV=2, K=40, V=72)
    chip = Chip(kind="cuda", name="sm_90", cube_programs=3, vector_programs=3)
    experiment = Experiment(spec, key, device, problem=Problem(key=key, chip=chip))
    candidate, call = experiment.default, experiment.call
    check = experiment.check(Prepared(spec, experiment.problem, candidate, call))
    assert check.right, check
    with launcher.recording() as records:
        Prepared(spec, experiment.problem, candidate, call)(call.tensors, call.scalars, None, None)
    assert [text for record in records for text in accesses.outside(record)] == []


def test_a_bound_that_is_not_safe_is_refused(device: torch.device) -> None:
    x = Case(T=4).inputs(device)
    with pytest.raises(ValueError, match=r"wanted -5.0 <= lower_bound < 0 with safe_gate, got -6"):
        ops.chunk_kda_fwd_intra(
            x["q"], x["k"], x["v"], x["g"], x["beta"], chunk_size=16, safe_gate=True, lower_bound=-6.0
        )
