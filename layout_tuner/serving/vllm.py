"""Serves vLLM's prefill of the gated delta rule: an entry point of `vllm.general_plugins`.

vLLM runs what such entry points name in each of its processes. This one does nothing unless `[routing] serving` is set;
then it registers a class in the place of vLLM's `ChunkGatedDeltaRule` (`CustomOp.register_oot`, which that library has
for this) and enables routing for the process. A call that no kernel here serves runs vLLM's own method. Decoding is
left alone.

The interface is that of vLLM 0.33: arguments of `ChunkGatedDeltaRule.forward`, states `[N, HV, V, K]`, `core_attn_out`
as the place for the output.
"""

from __future__ import annotations

import importlib
import logging
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import api
from ..config import Config
from ..integrations.takeover import Takeover

log = logging.getLogger(__name__)

OP = "chunk_gated_delta_rule"
CLASS = "ChunkGatedDeltaRule"
# Newest first; older releases have the class with the model.
HOMES = ("vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn", "vllm.model_executor.models.qwen3_next")

takeover = Takeover(OP, lambda _: None, library="vLLM", verdicts=weakref.WeakKeyDictionary())


def register() -> None:
    """Have vLLM make our class where its own is asked for, if the settings want it; safe to call again."""
    if not Config.load().routing.serving:
        return
    try:
        custom_op = importlib.import_module("vllm.model_executor.custom_op")
        own = own_class()
    except (ImportError, AttributeError) as error:
        log.warning("vLLM: its prefill is left alone: %s", error)
        return
    if CLASS in custom_op.op_registry_oot:
        log.warning("vLLM: its prefill is left alone: %s is registered", custom_op.op_registry_oot[CLASS].__qualname__)
        return
    custom_op.CustomOp.register_oot(name=CLASS)(class_in_place_of(own))
    api.enable(fla=False)


def own_class() -> type[Any]:
    """vLLM's class.

    Raises:
        ImportError: No release whose interface is known.
    """
    for home in HOMES:
        try:
            own: type[Any] = getattr(importlib.import_module(home), CLASS)
        except (ModuleNotFoundError, AttributeError):
            continue
        return own
    raise ImportError(f"no {CLASS} in {' or '.join(HOMES)}: wanted a release like 0.33")


def class_in_place_of(own: type[Any]) -> type[Any]:
    """A class that is vLLM's but for what it calls."""

    def init(self: Any) -> None:
        """Whatever backend vLLM chose, a call that is served here runs here."""
        own.__init__(self)
        self._forward_method = Prefill(self._forward_method)

    return type("LayoutTunerChunkGatedDeltaRule", (own,), {"__init__": init})


class Prefill:
    """What a layer's class calls.

    Args:
        own: vLLM's method, for calls that are not served.
    """

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        output_final_state: bool,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        chunk_offsets: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = True,
        core_attn_out: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As `ChunkGatedDeltaRule.forward`."""
        named: dict[str, Any] = {
            "q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state,
            "output_final_state": output_final_state, "cu_seqlens": cu_seqlens, "chunk_indices": chunk_indices,
            "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        }  # fmt: skip
        taken, _ = takeover.verify(**named, state_v_first=True)
        if not taken:
            result: tuple[Tensor, Tensor | None] = self.own(
                **named, chunk_offsets=chunk_offsets, core_attn_out=core_attn_out, **more
            )
            return result
        o, final_state = takeover.run(**named, state_v_first=True)
        if core_attn_out is not None:
            core_attn_out.reshape(-1)[: o.numel()].copy_(o.reshape(-1))
        return o, final_state
