"""Another library's function as the rival of an op of ours: checked against the oracle, timed, and stored.

A rivalry is an op with two candidates: our public function and the library's. It is tuned as any op is, so that a call
of the library runs whichever is faster. Calls of `layout_tuner.ops` do not look at it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..spec.declaration import Candidate, Launch, OpSpec, Problem
from ..spec.keys import Key
from ..spec.operands import Outputs
from ..tuning.checking import as_tuple
from ..tuning.inputs import option_value

OURS = "layout_tuner"


@dataclass(frozen=True, kw_only=True, eq=False)
class Rivalry(OpSpec):
    """An op of ours against a library's function of the same arguments.

    Attributes:
        ours: The revision of our op.
        release: The library's name and version; with ours it makes the revision, so that a new release is measured
            anew.
    """

    ours: str
    release: str

    @functools.cached_property
    def revision(self) -> str:
        """The revision: a hash of our op's revision and the library's release."""
        return f"{self.ours}+{self.release}"

    @property
    def unbuffered(self) -> tuple[str, ...]:
        """None: how either is compiled is decided behind its door."""
        return ()

    def nothing_to_choose(self, key: Key) -> bool:
        """Always False: with one head, too, either function may be faster."""
        return False


def rivalry(
    spec: OpSpec,
    ours: Callable[..., Any],
    library: Callable[..., Any],
    *,
    name: str,
    release: str,
    aside: Callable[[], AbstractContextManager[None]],
) -> Rivalry:
    """Two functions of the same arguments as one op with the candidates `layout_tuner`, the default, and `name`.

    Args:
        spec: Our op: operands, oracle and tolerances.
        ours: Its public function.
        library: The library's function.
        name: The library's name; the rivalry is stored as `name.op`.
        release: Its name and version.
        aside: Makes a context in which the library runs its own function.
    """

    def bind(problem: Problem, candidate: Candidate) -> Launch:
        if candidate.variant == OURS:
            return bind_function(spec, problem, ours, nullcontext)
        return bind_function(spec, problem, library, aside)

    taken = {field.name: getattr(spec, field.name) for field in fields(OpSpec)}
    changed: dict[str, Any] = dict(
        name=f"{name}.{spec.name}",
        layout_groups=(),
        variants=(OURS, name),
        default_variant=None,
        moves_inputs=False,
        bind=bind,
    )
    return Rivalry(**(taken | changed), ours=spec.revision, release=release)


def bind_function(
    spec: OpSpec, problem: Problem, function: Callable[..., Any], where: Callable[[], AbstractContextManager[None]]
) -> Launch:
    """A public function as a launch: operands, scalars, `cu_seqlens` and `chunk_indices` in, every output out.

    An op with gradients (an option that `differentiates`) runs forward and backward through autograd.
    """
    key, form = problem.key, problem.form
    inputs = tuple(operand.name for operand in spec.operands if not operand.given_with)
    gradients = tuple(operand.name for operand in spec.operands if operand.given_with)
    asked = spec.gradient_option
    grad = asked is not None and form.flag(asked.label)
    options: dict[str, Any] = {}
    for option in spec.options:
        if not option.differentiates:
            value = option_value(option.default, form, option.label)
            options[option.name] = getattr(torch, str(value)) if option.names_dtype else value
    # Some functions of the library have no default of their own where ours takes K ** -0.5.
    scale = key.K**-0.5 if key.K else None

    def launch(*arguments: Any) -> Outputs:
        *rest, cu_seqlens, chunk_indices = arguments
        tensors = dict(zip((*inputs, *gradients), rest))
        named: dict[str, Any] = {name: tensors[name] for name in inputs} | options
        named |= dict.fromkeys(spec.scalars, scale)
        if cu_seqlens is not None:
            named |= {"cu_seqlens": cu_seqlens, "chunk_indices": chunk_indices}
        with where():
            if grad:
                return forward_backward(function, named, inputs, [tensors[name] for name in gradients])
            results = as_tuple(function(**named))
        return (*results, *[None] * (len(spec.outputs) - len(results)))

    return launch


def forward_backward(
    function: Callable[..., Any],
    named: dict[str, Any],
    inputs: tuple[str, ...],
    upstream: list[torch.Tensor | None],
) -> Outputs:
    """Results of a function, then the gradients of every input, None where it is absent.

    Args:
        function: Differentiable.
        named: Its arguments.
        inputs: Names of those to differentiate by, in order.
        upstream: Gradients of its results, None where a result is not asked for.
    """
    # Backward stays in this thread: another one would not know that the library is to run alone.
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        leaves = {name: named[name].detach().requires_grad_() for name in inputs if named[name] is not None}
        results = as_tuple(function(**(named | leaves)))
        asked = [
            (result, given) for result, given in zip(results, upstream) if result is not None and given is not None
        ]
        ends, starts = [result for result, _ in asked], [given for _, given in asked]
        computed = torch.autograd.grad(ends, list(leaves.values()), starts, allow_unused=True)
    gradients = dict(zip(leaves, computed))
    detached = [None if result is None else result.detach() for result in results]
    return (*detached, *[gradients.get(name) for name in inputs])
