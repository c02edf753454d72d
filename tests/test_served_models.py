"""`enable(model)`: functions that layers keep as an attribute, whoever set it.

`test_transformers.py` has the models of that library.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layout_tuner
from layout_tuner import ops, reference
from layout_tuner.dispatch import router
from layout_tuner.errors import UnsupportedProblemError
from layout_tuner.integrations import takeover
from layout_tuner.integrations import transformers as door

calls: list[dict[str, Any]] = []


def rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64, **kwargs: Any
) -> tuple[Tensor, None]:
    """A function as layers keep it; says that it was called."""
    calls.append(kwargs)
    return value, None


class Layer(nn.Module):
    """As in transformers, LLaMA-Factory and MindSpeed: the function is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.chunk_gated_delta_rule: Callable[..., Any] = rule

    def forward(self, *tensors: Tensor, **kwargs: Any) -> Any:
        q, k, v, g, beta = tensors
        return self.chunk_gated_delta_rule(q * self.weight, k, v, g=g, beta=beta, **kwargs)[0]


class Method(nn.Module):
    """Another, whose function is its class's."""

    def chunk_gated_delta_rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
        return rule(q, k, v, g, beta)

    def forward(self, *tensors: Tensor) -> Any:
        return self.chunk_gated_delta_rule(*tensors)[0]


@pytest.fixture(autouse=True)
def _from_zero() -> None:
    calls.clear()
    for counts in (takeover._served, takeover._fallthroughs):
        counts.clear()


@pytest.fixture
def tensors(device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.nn.functional.normalize(torch.randn(1, 20, 1, 16, generator=generator), dim=-1) for _ in range(2))
    v = torch.randn(1, 20, 2, 16, generator=generator)
    g, beta = -torch.rand(1, 20, 2, generator=generator), torch.rand(1, 20, 2, generator=generator)
    return [x.to(device) for x in (q, k, v, g, beta)]


def served(layer: Callable[..., Any], tensors: list[Tensor], **kwargs: Any) -> bool:
    """Whether a call ran here, rightly, or as the layer would have it."""
    before = len(calls)
    o = layer(*tensors, **kwargs)
    if len(calls) > before:
        return False
    kwargs.pop("head_first", None)
    torch.testing.assert_close(o, reference.chunk_gated_delta_rule(*tensors, **kwargs)[0], rtol=2e-4, atol=2e-5)
    return True


def test_a_layer_is_served_in_every_form_of_enable_and_restored(tensors: list[Tensor], device: torch.device) -> None:
    layer, other = Layer().to(device), Layer().to(device)
    model = nn.ModuleList([layer, nn.Sequential(Layer()), layer, Method()])
    with layout_tuner.enable(on_miss="default"):
        assert not served(layer, tensors), "without the model its layers are left alone"
    with layout_tuner.enable(model, on_miss="default"):
        assert served(layer, tensors)
        assert served(model[3], tensors)
        assert served(layer, tensors, chunk_size=16, head_first=False)
        assert not served(other, tensors)
    assert not served(layer, tensors)
    assert layer.chunk_gated_delta_rule is rule
    assert "chunk_gated_delta_rule" not in vars(model[3])

    layout_tuner.enable(layer, other, on_miss="default")
    assert served(layer, tensors)
    assert served(other, tensors)
    layout_tuner.disable()
    assert layer.chunk_gated_delta_rule is other.chunk_gated_delta_rule is rule

    layer.forward = layout_tuner.enable(layer, on_miss="default")(layer.forward)  # type: ignore[method-assign]
    assert layer.chunk_gated_delta_rule is rule
    assert served(layer, tensors)
    assert layer.chunk_gated_delta_rule is rule


def test_entries_end_in_any_order(tensors: list[Tensor], device: torch.device) -> None:
    layer = Layer().to(device)
    first, second = (layout_tuner.enable(layer, on_miss="default") for _ in range(2))
    first.__exit__(None, None, None)
    assert served(layer, tensors)
    second.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert layer.chunk_gated_delta_rule is rule
    with second:
        assert served(layer, tensors)
        layer.chunk_gated_delta_rule = replaced = lambda *args, **kwargs: (args[2], None)
    assert layer.chunk_gated_delta_rule is replaced, "whoever set it meanwhile wants it"


def test_gradients_and_a_backward_outside_the_scope(tensors: list[Tensor], device: torch.device) -> None:
    layer = Layer().to(device)
    with layout_tuner.enable(layer, on_miss="default"):
        o = layer(*tensors)
    o.sum().backward()
    q, *rest = tensors
    weight = torch.ones(1, device=device, requires_grad=True)
    ops.chunk_gated_delta_rule(q * weight, *rest)[0].sum().backward()
    assert torch.equal(layer.weight.grad, weight.grad)


def test_head_first_is_refused_with_the_layout_to_use(tensors: list[Tensor], device: torch.device) -> None:
    layer = Layer().to(device)
    with (
        layout_tuner.enable(layer),
        pytest.raises(UnsupportedProblemError, match=r"\[B, T, H, \.\.\.\].*head_first=False"),
    ):
        layer(*tensors, head_first=True)


def test_what_no_kernel_serves_runs_as_before(
    tensors: list[Tensor], device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    layer = Layer().to(device)
    with layout_tuner.enable(layer, on_miss="default"):
        for _ in range(2):
            assert not served(layer, tensors, chunk_size=8)
        assert not served(layer, tensors, something_else=True)
        assert not served(lambda *given: layer.chunk_gated_delta_rule(*given, 64)[0], tensors)
    reasons = layout_tuner.stats().fla_fallthroughs
    assert sum(reasons.values()) == 4
    assert any("something_else: not an argument here" in reason for _, reason in reasons)
    assert any("got 6 by position" in reason for _, reason in reasons)
    assert caplog.text.count("left to the model's own function") == 3


def test_copies_are_no_part_of_an_entry(tensors: list[Tensor], device: torch.device) -> None:
    layer = Layer().to(device)
    with layout_tuner.enable(layer, on_miss="default"):
        copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
        assert served(layer, tensors)
    for copied in copies:
        assert copied.chunk_gated_delta_rule is rule


def test_a_decorated_model_is_copied_and_pickled_with_its_entry(tensors: list[Tensor], device: torch.device) -> None:
    layer = Layer().to(device)
    layer.forward = layout_tuner.enable(layer, on_miss="default")(layer.forward)  # type: ignore[method-assign]
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert served(copied, tensors)
        assert copied.chunk_gated_delta_rule is layer.chunk_gated_delta_rule is rule


def test_under_torch_compile_it_runs_in_the_graph(tensors: list[Tensor], device: torch.device) -> None:
    layer = Layer().to(device)
    with layout_tuner.enable(layer, on_miss="default"):
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert served(compiled, tensors)


def test_an_entry_takes_models_and_settings(tensors: list[Tensor], device: torch.device) -> None:
    settings, layer = layout_tuner.Config(), Layer().to(device)
    with layout_tuner.enable(settings, layer, on_miss="default"):
        assert router.current().config is settings
        assert served(layer, tensors)
    with pytest.raises(TypeError, match="config: wanted one Config or path, got 2"):
        layout_tuner.enable(settings, layer, config=settings)
    assert not layout_tuner.is_enabled()
    assert layer.chunk_gated_delta_rule is rule


def test_a_door_that_is_not_there_says_what_to_install() -> None:
    with pytest.raises(layout_tuner.ConfigError, match=r"kernels: .*pip install kernels, or call enable"):
        door.register_kernels()
