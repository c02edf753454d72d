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

from layout_tuner.ascend.candidates import cases_of, launches
from layout_tuner.ascend.targets import target_named
from layout_tuner.config import Config
from layout_tuner.dispatch import router
from layout_tuner.dispatch.router import Router
from layout_tuner.ops import tracing
from layout_tuner.ops.chain import compiled
from layout_tuner.spec import registry

TOYS = [toy_scale, toy_chain]
SIZES = {"B": 2, "T": 20, "HV": 2, "V": 8}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    for toy in TOYS:
        registry.register(toy.SPEC)
    tracing.OPERATORS["toy_scale"] = tracing.operator_of("toy_scale")
    compiled.trace(toy_chain.SPEC)
    yield
    for operators in (registry._OPS, tracing.OPERATORS, compiled.OPERATORS, compiled.BACKWARDS):
        for toy in TOYS:
            operators.pop(toy.SPEC.name, None)
    tracing.bound.cache_clear()


def made(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, g = torch.randn(2, 20, 2, 8, generator=generator), -torch.rand(2, 20, 2, generator=generator)
    return x.to(device).requires_grad_(), g.to(device).requires_grad_()


def step(function: object, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    out = function(*given)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), given)]


@pytest.mark.parametrize("toy", TOYS)
def test_every_candidate_is_right(toy: ModuleType, device: torch.device) -> None:
    key = key_for(toy.SPEC, toy.SPEC.standard_forms["training"], **SIZES)
    assert len(toy.SPEC.candidates(key)) == 2
    assert not faults(experiment_for(toy.SPEC, key, device))


@pytest.mark.parametrize("toy", TOYS)
def test_it_is_tuned_and_routed(toy: ModuleType, device: torch.device, tmp_path: Path) -> None:
    key = key_for(toy.SPEC, toy.SPEC.standard_forms["training"], **SIZES)
    x, g = made(device)
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
    x, g = made(device)
    found = step(toy_chain.toy_chain, (x, g))
    out = found[0]
    wanted = toy_chain.oracle(x, g, 2 * out, 16, True)
    torch.testing.assert_close(found, list(wanted), rtol=1e-4, atol=1e-4)
    traced = step(torch.compile(toy_chain.toy_chain, backend="eager", fullgraph=True), (x, g))
    assert all(torch.equal(a, b) for a, b in zip(traced, found, strict=True))


@pytest.mark.parametrize("toy", TOYS)
def test_ascend_gets_every_candidate(toy: ModuleType) -> None:
    key = key_for(toy.SPEC, toy.SPEC.standard_forms["training"], "bfloat16", **SIZES)
    target = target_named("Ascend910B3")
    assert all(launches(case, target)[0] for case in cases_of(toy.SPEC, key))


@pytest.mark.parametrize("toy", [*TOYS, __import__("toy_kernels")])
def test_a_new_op_is_short(toy: ModuleType) -> None:
    assert len(Path(toy.__file__ or "").read_text().splitlines()) < 80
