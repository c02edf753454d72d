"""The doors of serving engines: what they register where, and that what they serve is right.

Neither engine is installed here; what stands in for them has the few names of theirs that are used, as vLLM 0.33.0 and
sglang 0.5.23 have them.
"""

import enum
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from layout_tuner import is_enabled, reference, stats
from layout_tuner.serving import sglang, vllm

OWN = "its own"


def packed(device: torch.device) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A call as an engine makes it, and sequence starts."""
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, 25, 1, 16, generator=generator) for _ in range(2))
    v = torch.randn(1, 25, 2, 16, generator=generator)
    g, beta = -torch.rand(1, 25, 2, generator=generator), torch.rand(1, 25, 2, generator=generator)
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return {name: x.to(device) for name, x in named.items()}, torch.tensor([0, 7, 25], dtype=torch.int32, device=device)


def states(count: int, device: torch.device) -> torch.Tensor:
    return torch.randn(count, 2, 16, 16, generator=torch.Generator().manual_seed(4)).to(device)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-5)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """vLLM as far as its classes are registered and made."""
    custom_op, home = ModuleType("vllm.model_executor.custom_op"), ModuleType(vllm.HOMES[0])
    custom_op.op_registry_oot = {}  # type: ignore[attr-defined]

    class CustomOp:
        def __new__(cls) -> Any:
            return super().__new__(custom_op.op_registry_oot.get(cls.__name__, cls))

        @classmethod
        def register_oot(cls, name: str) -> Any:
            assert name not in custom_op.op_registry_oot
            return lambda made: custom_op.op_registry_oot.setdefault(name, made)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self._forward_method(*args, **kwargs)

    class ChunkGatedDeltaRule(CustomOp):
        def __init__(self) -> None:
            self._forward_method = self.forward_native

        def forward_native(self, **kwargs: Any) -> Any:
            return OWN

    custom_op.CustomOp, home.ChunkGatedDeltaRule = CustomOp, ChunkGatedDeltaRule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, custom_op.__name__, custom_op)
    monkeypatch.setitem(sys.modules, home.__name__, home)
    return ChunkGatedDeltaRule


def test_vllm_is_served_only_where_a_setting_asks(
    engine: type[Any], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    named, starts = packed(device)
    call: dict[str, Any] = dict(
        **named, initial_state=states(2, device), output_final_state=True, cu_seqlens=starts, chunk_offsets=None,
        aiter_prefill_metadata=None,
    )  # fmt: skip
    vllm.register()
    assert engine().forward(**call) == OWN
    assert not is_enabled()
    monkeypatch.setenv("LAYOUT_TUNER_ROUTING_SERVING", "true")
    vllm.register()
    vllm.register()
    assert is_enabled()
    layer, place = engine(), torch.full((30, 2, 16), float("nan"), device=device)
    with torch.inference_mode():
        o, final_state = layer.forward(**call, core_attn_out=place)
    wanted, wanted_state = reference.chunk_gated_delta_rule(
        **named, initial_state=call["initial_state"], output_final_state=True, cu_seqlens=starts, state_v_first=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    close(o, wanted)
    close(final_state, wanted_state)
    assert torch.equal(place[:25], o[0])
    assert place[25:].isnan().all()
    assert layer.forward(**call | {"q": named["q"].double()}) == OWN
    assert sum(stats().fla_fallthroughs.values()) >= 1


def test_sglang_is_served_with_states_of_chunks_and_its_pool(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    hooks = ModuleType("sglang.srt.plugins.hook_registry")
    registered: dict[str, list[Any]] = {}

    class HookRegistry:
        _hooks = registered

        @classmethod
        def register(cls, target: str, hook: Any, kind: Any) -> None:
            registered.setdefault(target, []).append((kind, hook, None))

    hooks.HookRegistry, hooks.HookType = HookRegistry, enum.Enum("HookType", "AROUND")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, hooks.__name__, hooks)
    sglang.register()
    assert not registered
    assert not is_enabled()
    monkeypatch.setenv("LAYOUT_TUNER_ROUTING_SERVING", "true")
    sglang.register()
    sglang.register()
    ((_, hook, _),) = registered[sglang.TARGET]

    named, starts = packed(device)
    pool, slots = states(4, device), torch.tensor([3, 1], device=device)
    before = pool.clone()
    wanted, wanted_state = reference.chunk_gated_delta_rule(
        **named, initial_state=before[slots], output_final_state=True, cu_seqlens=starts, state_v_first=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    given: dict[str, Any] = dict(**named, ssm_states=pool, cache_indices=slots, query_start_loc=starts)
    o, _, h = hook(lambda *args, **kwargs: OWN, object(), **given)
    close(o, wanted)
    close(pool[slots], wanted_state)
    assert torch.equal(pool[[0, 2]], before[[0, 2]])
    close(h[0, [0, 1]], before[slots])  # both sequences have one chunk, ahead of which is what they began with
    assert hook(lambda *args, **kwargs: OWN, object(), **given | {"q": named["q"].double()}) == OWN
