"""What CONTRIBUTING says of a new op and a new chain, followed for two toys: nothing else knows them."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import toy_chain
import toy_scale
from cases import experiment_for, faults, key_for
from timers import set_times
from toys import TOYS, leaves, registered, step

from layout_tuner.ascend.candidates import cases_of, launches
from layout_tuner.ascend.targets import target_named
from layout_tuner.config import Config
from layout_tuner.device import driver
from layout_tuner.dispatch import router
from layout_tuner.dispatch.router import Router
from layout_tuner.launch.prepared import Prepared
from layout_tuner.spec.declaration import REFERENCE, Candidate, Problem
from layout_tuner.spec.layouts import LayoutPlan
from layout_tuner.spec.operands import Call

SIZES = {"B": 2, "T": 20, "HV": 2, "V": 8}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with registered():
        yield


@pytest.mark.parametrize("toy", TOYS)
def test_every_candidate_is_right(toy: ModuleType, device: torch.device) -> None:
    key = key_for(toy.SPEC, toy.SPEC.standard_forms["training"], **SIZES)
    assert len(toy.SPEC.candidates(key)) == 2
    assert not faults(experiment_for(toy.SPEC, key, device))


@pytest.mark.parametrize("toy", TOYS)
def test_it_is_tuned_and_routed(toy: ModuleType, device: torch.device, tmp_path: Path) -> None:
    key = key_for(toy.SPEC, toy.SPEC.standard_forms["training"], **SIZES)
    x, g = leaves(device)
    function = getattr(toy, toy.SPEC.name)
    entered = Router(Config(cache={"path": str(tmp_path / "cache.sqlite")}), on_miss="tune", timer=set_times({}))
    ticket = router.push(entered)
    try:
        function(x.detach() if toy is toy_scale else x, g.detach() if toy is toy_scale else g)
        assert key.op in {decided.op for decided, _ in entered.choices}
    finally:
        router.remove(ticket)
        entered.close()


def test_gradients_and_graphs_are_the_oracles(device: torch.device) -> None:
    x, g = leaves(device)
    found = step(toy_chain.toy_chain, (x, g))
    out = found[0]
    wanted = toy_chain.oracle(x, g, 2 * out, 16, True)
    torch.testing.assert_close(found, list(wanted), rtol=1e-4, atol=1e-4)
    traced = step(torch.compile(toy_chain.toy_chain, backend="eager", fullgraph=True), (x, g))
    assert all(torch.equal(a, b) for a, b in zip(traced, found, strict=True))


def test_the_oracle_serves_with_gradients_where_no_kernel_is_right(device: torch.device) -> None:
    key = key_for(toy_chain.SPEC, toy_chain.SPEC.standard_forms["training"], **SIZES)
    given = leaves(device)
    operands = (*[x.detach() for x in given], torch.empty_like(given[0]))
    call = Call(tensors=operands, options=(16, True))
    problem = Problem(key=key, chip=driver.chip(device))
    chosen = Candidate(variant=REFERENCE, plan=LayoutPlan(), revision="")
    oracle = Prepared(toy_chain.SPEC, problem, chosen, call).launch
    outputs, saved = oracle.forward(call.tensors[:2], (), (None, None))
    weights = 2 * outputs[0]
    gradients = oracle.backward_or_default(saved, (weights,), (True, False), (), (None, None))
    out, dx, _ = toy_chain.oracle(*operands[:2], weights, 16, True)
    assert torch.equal(outputs[0], out) and torch.equal(gradients[0], dx) and gradients[1] is None


@pytest.mark.parametrize("toy", TOYS)
def test_ascend_gets_every_candidate(toy: ModuleType) -> None:
    key = key_for(toy.SPEC, toy.SPEC.standard_forms["training"], "bfloat16", **SIZES)
    target = target_named("Ascend910B3")
    assert all(launches(case, target)[0] for case in cases_of(toy.SPEC, key))


@pytest.mark.parametrize("toy", [*TOYS, __import__("toy_kernels")])
def test_a_new_op_is_short(toy: ModuleType) -> None:
    assert len(Path(toy.__file__ or "").read_text().splitlines()) < 80
