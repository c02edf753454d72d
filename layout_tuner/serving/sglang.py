"""Serves sglang's prefill of the gated delta rule: an entry point of `sglang.srt.plugins`.

sglang runs what such entry points name in each of its processes. This one does nothing unless `[routing] serving` is
set; then it hooks into `TritonGDNKernel.extend` through sglang's registry of hooks and enables routing for the process.
A call that no kernel here serves runs sglang's own method; decoding is left alone.

sglang wants, beside the output, the states ahead of every chunk, for its cache of prefixes, and final states written to
their places in its pool. So the stages of the rule are called one by one here, each with its own measured candidate.

The interface is that of sglang 0.5.23: arguments of `TritonGDNKernel.extend`, states `[slots, HV, V, K]`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import api, ops
from ..config import Config
from ..errors import UnsupportedProblemError

log = logging.getLogger(__name__)

TARGET = "sglang.srt.layers.attention.linear.kernels.gdn_triton.TritonGDNKernel.extend"
BT = 64
RCP_LN2 = 1.4426950408889634  # gates in base 2, as the stages have them


def register() -> None:
    """Hook into sglang's prefill, if the settings want it; safe to call again."""
    if not Config.load().routing.serving:
        return
    try:
        hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
        registry, around = hooks.HookRegistry, hooks.HookType.AROUND
    except (ImportError, AttributeError) as error:
        log.warning("sglang: its prefill is left alone: %s", error)
        return
    if any(hook is extend for _, hook, _ in registry._hooks.get(TARGET, ())):
        return
    registry.register(TARGET, extend, around)
    api.enable(fla=False)


_left: set[str] = set()


def extend(own: Callable[..., Any], kernel: object, *args: Any, **kwargs: Any) -> Any:
    """Around `TritonGDNKernel.extend(q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, ...)`."""
    try:
        return prefill(*args, **kwargs)
    except (UnsupportedProblemError, TypeError, ValueError) as error:
        # Nothing was written yet: states are the last thing.
        if str(error) not in _left:
            _left.add(str(error))
            log.warning("sglang: left to its own method: %s", error)
        return own(kernel, *args, **kwargs)


@torch.no_grad()
def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    inplace_update: bool = True,
    **_: Any,
) -> tuple[Tensor, None, Tensor]:
    """The rule over a packed batch, q and k normalised, from and to the states of a pool.

    Args:
        q: `[1, T, H, K]`.
        k: `[1, T, H, K]`.
        v: `[1, T, HV, V]`.
        g: `[1, T, HV]`, natural log.
        beta: `[1, T, HV]`.
        ssm_states: The pool, `[slots, HV, V, K]`.
        cache_indices: The slot of each sequence `[N]`.
        query_start_loc: Sequence starts `[N + 1]`.
        inplace_update: Whether final states go back to the pool.

    Returns:
        `(o, None, h)`: `[1, T, HV, V]`, and the states ahead of every chunk, `[1, NT, HV, V, K]`.
    """
    q, k = normalised(q), normalised(k)
    initial_state = ssm_states[cache_indices]
    packed: dict[str, Any] = {"cu_seqlens": query_start_loc}
    packed["chunk_indices"] = ops.prepare_chunk_indices(query_start_loc, BT)
    g = ops.chunk_local_cumsum(g, BT, scale=RCP_LN2, **packed)
    w, u, _A = ops.chunk_gated_delta_rule_fwd_intra(k, v, g, beta, chunk_size=BT, **packed)
    h, v_new, final_state = ops.chunk_gated_delta_rule_fwd_h(
        k, w, u, g, initial_state=initial_state, output_final_state=True, chunk_size=BT, state_v_first=True, **packed
    )
    assert v_new is not None and final_state is not None
    o = ops.chunk_fwd_o(q, k, v_new, h, g, chunk_size=BT, state_v_first=True, **packed)
    if inplace_update:
        ssm_states[cache_indices] = final_state.to(ssm_states.dtype)
    return o, None, h


def normalised(x: Tensor) -> Tensor:
    """`x / sqrt(sum(x**2) + 1e-6)`, in fp32, in the dtype of x."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
