"""Serves the gated delta rule of Hugging Face's models, and of whatever keeps it on its layers.

Two doors. `enable(model)` puts a `Served` in the place of the function that a layer calls, and takes it away when the
entry ends: of the layer's attribute `chunk_gated_delta_rule` (transformers 4.57 to 5.14, and whatever sets that), or of
the function that transformers 5.15 and newer offer to Hugging Face's `kernels` (`_kernel_funcs`). `register_kernels`
makes the op known to `kernels`, which puts it into models for good (`use_kernels=True`). Both find layers by what they
have, not by the name of an architecture.

A call that no kernel here serves runs what was there before.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import ops
from ..dispatch import router
from ..errors import ConfigError, UnsupportedProblemError
from ..forking import ProcessLock
from .takeover import Takeover, Verdict

log = logging.getLogger(__name__)

OP = "chunk_gated_delta_rule"
LIBRARY = "the model's own function"
# What transformers' functions call the first arguments, and what the op does.
NAMES = {"query": "q", "key": "k", "value": "v"}
# As many arguments as every one of these functions takes in the same order.
FIRST = ("q", "k", "v", "g", "beta")
DEVICES = ("cpu", "cuda", "npu", "xpu")
PARAMETERS = frozenset(inspect.signature(ops.chunk_gated_delta_rule).parameters)

takeover = Takeover(OP, lambda _: None, library=LIBRARY, verdicts=weakref.WeakKeyDictionary())


def serve(before: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], lenient: bool) -> Any:
    """Run a layer's call here if a kernel serves it, else what was there before.

    Args:
        before: What the layer would call.
        args: Of the call: q, k, v, g and beta.
        kwargs: Of the call, by transformers' names or the op's.
        lenient: Whether arguments that the op does not have are for others: transformers hands all its keywords to a
            function of `kernels`, and drops those that the function does not take.

    Raises:
        UnsupportedProblemError: `head_first=True`.
    """
    if kwargs.get("head_first"):
        raise UnsupportedProblemError(
            OP, ["head_first=True: wanted q, k and v as [B, T, H, ...], g and beta as [B, T, HV], and head_first=False"]
        )
    named = dict(zip(FIRST, args)) | {NAMES.get(name, name): value for name, value in kwargs.items()}
    named.pop("head_first", None)
    if lenient:
        named = {name: value for name, value in named.items() if name in PARAMETERS or name == "seq_idx"}
    if torch.compiler.is_compiling() and named.keys() <= PARAMETERS and len(args) <= len(FIRST):
        return ops.chunk_gated_delta_rule(**named)
    if len(args) > len(FIRST):
        takeover.count(Verdict(False, f"wanted all but {', '.join(FIRST)} by name, got {len(args)} by position"))
        return before(*args, **kwargs)
    taken, _ = takeover.verify(**named)
    return takeover.run(**named) if taken else before(*args, **kwargs)


# -- enable(model) ---------------------------------------------------------------------------------------------


class Served:
    """Stands in the place of a layer's function while an entry serves the layer.

    Copied or pickled with a model it is the function that it stands for: a copy is no part of an entry.

    Args:
        before: That function.
        own: It was an attribute of the object itself, not of its class.
        lenient: See `serve`.
    """

    def __init__(self, before: Callable[..., Any], own: bool, lenient: bool) -> None:
        self.before = before
        self.own = own
        self.lenient = lenient
        self.users = 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not router.active():
            return self.before(*args, **kwargs)
        return serve(self.before, args, kwargs, self.lenient)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self.before, memo)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Callable[..., Any]]]:
        return itself, (self.before,)


def itself(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a pickled `Served` is restored to."""
    return function


class Place(NamedTuple):
    """Where a layer keeps its function: the attribute of a module; of transformers' functions for `kernels`, which are
    modules and take all keywords of a model, `forward`."""

    holder: nn.Module
    name: str
    lenient: bool


_lock = ProcessLock()


def places(models: Iterable[nn.Module]) -> list[Place]:
    """The places of all layers of models that have one, each once."""
    found = {(id(place.holder), place.name): place for model in models for place in places_of(model)}
    return list(found.values())


def places_of(model: nn.Module) -> Iterator[Place]:
    """The places of one model's layers."""
    for layer in model.modules():
        function = getattr(layer, OP, None)
        if callable(function) and not isinstance(function, nn.Module):
            yield Place(layer, OP, False)
        for function in getattr(layer, "_kernel_funcs", {}).values():
            if getattr(function, "kernel_layer_name", None) == OP:
                yield Place(function, "forward", True)


def put(where: Iterable[Place]) -> None:
    """Put a `Served` in each place, or note one more user of it."""
    with _lock:
        for holder, name, lenient in where:
            present = holder.__dict__.get(name)
            if isinstance(present, Served):
                present.users += 1
            else:
                setattr(holder, name, Served(getattr(holder, name), present is not None, lenient))


def take_away(where: Iterable[Place]) -> None:
    """Take a user of each place away, and with the last one restore what was there, unless somebody replaced ours."""
    with _lock:
        for holder, name, _ in where:
            present = holder.__dict__.get(name)
            if not isinstance(present, Served):
                continue
            present.users -= 1
            if present.users:
                continue
            if present.own:
                setattr(holder, name, present.before)
            else:
                delattr(holder, name)


def warn_of_none(models: Iterable[nn.Module]) -> None:
    """Say that models have no place, and what they need to have one."""
    names = ", ".join(type(model).__name__ for model in models)
    log.warning(
        "enable: %s: no layer has a function %s to serve. Models of transformers 5.15 and newer have one where the "
        "package kernels is installed; where flash-linear-attention is installed its calls are served without a model.",
        names,
        OP,
    )


# -- kernels ---------------------------------------------------------------------------------------------------


class ChunkGatedDeltaRule(nn.Module):
    """The op as a layer of `kernels`, which binds `forward` to the function it replaces."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As transformers' `torch_chunk_gated_delta_rule`; outside `enable` the default candidate runs."""
        named = kwargs | {
            "chunk_size": chunk_size,
            "initial_state": initial_state,
            "output_final_state": output_final_state,
            "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        }

        def before(*args: Any, **kwargs: Any) -> Any:
            return type(self).forward(self, *args, **kwargs)

        served: tuple[Tensor, Tensor | None] = serve(before, (query, key, value, g, beta), named, lenient=True)
        return served


class Repository:
    """What `kernels` loads a layer from: here, this module."""

    def load(self) -> type[nn.Module]:
        """The layer."""
        return ChunkGatedDeltaRule

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Repository)

    def __hash__(self) -> int:
        return hash(Repository)

    def __str__(self) -> str:
        return f"layout_tuner (layer `{OP}`)"


def register_kernels(devices: Iterable[str] = DEVICES) -> None:
    """Make the op known to Hugging Face's `kernels`, under the name that transformers' models ask for.

    Models kernelized from then on have it: `from_pretrained(..., use_kernels=True)`, `model.set_use_kernels(True)` or
    `kernels.kernelize`. On cuda and xpu `use_kernels` registers transformers' own mapping last, which has a function of
    that name: there call `kernels.kernelize` after this, or use `enable(model)`.

    Args:
        devices: Types of devices it is for.

    Raises:
        ConfigError: The package `kernels` is not installed.
    """
    try:
        kernels = importlib.import_module("kernels")
        register = kernels.register_kernel_mapping
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"kernels: {error}: pip install kernels, or call enable(model)") from error
    register({OP: {device: Repository() for device in devices}})
