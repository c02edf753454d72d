"""Models of Hugging Face's transformers, tiny and random, inside `enable`: `make transformers-test` installs releases.

Warm-up of what `tuner shapes` reads from a model's configuration has to be what the model calls.
"""

import copy
import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from timers import set_times

import layout_tuner
from layout_tuner.config import Config
from layout_tuner.dispatch import counters
from layout_tuner.dispatch.router import Router
from layout_tuner.integrations import takeover
from layout_tuner.integrations import transformers as door
from layout_tuner.integrations.architectures import load_model, shapes_of
from layout_tuner.warming import warmup

transformers = pytest.importorskip("transformers", reason="make transformers-test installs it")
if importlib.util.find_spec("fla") is not None:
    pytest.skip("models take flash-linear-attention where it is installed", allow_module_level=True)

# Its own modules: a function without a second use, notices that packages are missing.
pytestmark = pytest.mark.filterwarnings("default")

B, T = 1, 20
COMMON = dict(
    hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, vocab_size=64,
    num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
    linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16, pad_token_id=0, dtype="bfloat16",
)  # fmt: skip
EXPERTS = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16)
# The classes of a configuration and a model, and what the architecture needs beside. One has fewer heads of queries and
# keys than of values.
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", dict(head_dim=16, **EXPERTS, linear_num_key_heads=1)),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", dict(head_dim=16)),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", dict(eos_token_id=1, bos_token_id=1)),
}
KNOWN = [name for name, (_, model, _) in ARCHITECTURES.items() if hasattr(transformers, model)]
KERNELS = transformers.utils.is_kernels_available()


def made(name: str) -> torch.nn.Module:
    """A tiny random model."""
    config, model, more = ARCHITECTURES[name]
    torch.manual_seed(3)
    settings = getattr(transformers, config)(**COMMON | more)
    built: torch.nn.Module = getattr(transformers, model)(settings).to(torch.bfloat16)
    return built.train()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(1, 64, (B, T), generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def _counts_from_zero() -> None:
    counters.reset()
    for counts in (takeover._served, takeover._fallthroughs):
        counts.clear()


def step(model: torch.nn.Module, tokens: torch.Tensor) -> None:
    """Forward and backward of a training step."""
    model(input_ids=tokens, labels=tokens).loss.backward()


def gradients(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """All gradients of a training step, in one vector."""
    model.zero_grad()
    step(model, tokens)
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The relative error."""
    return float((got - wanted).norm() / wanted.norm())


def functions(model: torch.nn.Module) -> list[object]:
    """What the places of a model's layers hold, None where their class's own is there."""
    return [place.holder.__dict__.get(place.name) for place in door.places([model])]


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_warmed_up_is_what_a_model_calls(name: str, tokens: torch.Tensor, tmp_path: Path) -> None:
    """Training with and without a cache, evaluation and prefill: all are found.

    Gradients are as near to those of fp32 as the model's own path in torch has them.
    """
    model = made(name)
    before = functions(model)
    assert before
    exact = gradients(copy.deepcopy(model).float(), tokens)
    own = gradients(model, tokens)
    model.config.save_pretrained(tmp_path)
    settings = Config(cache={"path": str(tmp_path / "decisions.sqlite")})
    timed = Router(settings, on_miss="tune", timer=set_times({}))
    report = warmup(shapes=shapes_of(load_model(tmp_path), batch=B, lengths=[T]), config=settings, router=timed)
    timed.close()
    assert {row.status for row in report.rows} == {"tuned"}

    counters.reset()
    with layout_tuner.enable(model, config=settings, on_miss="error"):
        here = gradients(model, tokens)
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
        with torch.no_grad():
            model.eval()(input_ids=tokens, use_cache=False)
            model.generate(tokens, max_new_tokens=2, do_sample=False)
    counts = layout_tuner.stats()
    assert (counts.hits, counts.misses) == (4, 0)
    assert counts.fla_served == {door.OP: 4}
    assert not counts.fla_fallthroughs
    assert distance(here, exact) < 1.25 * distance(own, exact)
    assert functions(model) == before


@pytest.mark.skipif(not KERNELS, reason="this release of transformers offers no function to kernels")
def test_a_kernelized_model_is_served_until_its_function_is_taken_back(tokens: torch.Tensor) -> None:
    model = made("qwen3_5")
    exact, own = gradients(copy.deepcopy(model).float(), tokens), gradients(model, tokens)
    ((function, _, _),) = door.places([model])
    door.register_kernels(["cpu"])
    try:
        model.set_use_kernels(True)
        assert distance(gradients(model, tokens), exact) < 1.25 * distance(own, exact)
        with layout_tuner.enable(on_miss="default"):
            step(model, tokens)
        assert layout_tuner.stats().fla_served == {door.OP: 2}
        packed = torch.tensor([0, 12, T], dtype=torch.int32)
        with torch.no_grad():
            logits = model(input_ids=tokens, cu_seq_lens_q=packed, cu_seq_lens_k=packed, use_cache=False).logits
        assert logits.isfinite().all()
        assert layout_tuner.stats().fla_served == {door.OP: 3}, "what the function's own torch path refuses"
    finally:
        vars(function).pop("forward", None)


def test_a_model_without_such_layers_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), layout_tuner.enable(torch.nn.Linear(2, 2)):
        pass
    assert "Linear: no layer has a function chunk_gated_delta_rule" in caplog.text
