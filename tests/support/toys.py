"""The toy op and the toy chain, registered as any op is, for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import toy_chain
import toy_scale

from layout_tuner.ops import tickets, tracing
from layout_tuner.ops.chain import compiled
from layout_tuner.spec import registry

TOYS = [toy_scale, toy_chain]


@contextmanager
def registered() -> Iterator[None]:
    """Within this context the toys are ops."""
    for toy in TOYS:
        registry.register(toy.SPEC)
    tracing.OPERATORS["toy_scale"] = tracing.operator_of("toy_scale")
    compiled.trace(toy_chain.SPEC)
    try:
        yield
    finally:
        for operators in (registry._OPS, tracing.OPERATORS, compiled.OPERATORS, compiled.BACKWARDS):
            for toy in TOYS:
                operators.pop(toy.SPEC.name, None)
        tickets.bound.cache_clear()


def leaves(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """x and g."""
    generator = torch.Generator().manual_seed(0)
    x, g = torch.randn(2, 20, 2, 8, generator=generator), -torch.rand(2, 20, 2, generator=generator)
    return x.to(device).requires_grad_(), g.to(device).requires_grad_()


def step(function: Callable[..., torch.Tensor], given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The result and the gradients of the sum of its squares."""
    out = function(*given)
    return [x.clone() for x in (out.detach(), *torch.autograd.grad(out.square().sum(), given))]
