"""A caller's default device and dtype decide about the caller's tensors, never about this library's own."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cases import experiment_for, faults, key_for

from layout_tuner import ops
from layout_tuner.device import interpreter
from layout_tuner.launch import guards
from layout_tuner.spec import registry
from layout_tuner.spec.keys import Key
from layout_tuner.tuning import inputs

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "layout_tuner").rglob("*.py"), *(ROOT / "bench").glob("*.py")])
# What a default device places; of the first ones a default dtype is the dtype, unless they say another.
FLOATING = {"empty", "empty_strided", "zeros", "ones", "full", "eye", "rand", "randn", "linspace", "logspace", "normal"}
PLACED = FLOATING | {"arange", "tensor", "as_tensor", "scalar_tensor", "randint", "randperm", "tril_indices"}


@pytest.fixture(params=["meta", "cpu"])
def other_defaults(request: pytest.FixtureRequest) -> Iterator[None]:
    """Another device, or another dtype: nothing that is made on `meta` has a value."""
    device, dtype = torch.get_default_device(), torch.get_default_dtype()
    if request.param == "meta":
        torch.set_default_device("meta")
    else:
        torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_device(None if device.type == "cpu" else device)
    torch.set_default_dtype(dtype)


def factories(source: str) -> Iterator[tuple[str, ast.Call]]:
    """Every call of a torch function that makes a tensor from no other."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr in PLACED:
                yield node.func.attr, node


def unsaid(source: str) -> list[str]:
    """Calls that leave their device, or the dtype of floating-point values, to a default."""
    found = []
    for name, call in factories(source):
        said = {keyword.arg for keyword in call.keywords}
        missing = [word for word in ("device", *(["dtype"] if name in FLOATING else [])) if word not in said]
        if missing:
            found.append(f"line {call.lineno}: torch.{name} without {' and '.join(missing)}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_tensor_that_is_made_names_its_device_and_dtype(path: Path) -> None:
    assert not unsaid(path.read_text())


def test_what_leaves_them_to_a_default_is_found() -> None:
    assert len(unsaid("torch.arange(3)\ntorch.empty(3, device=d)\ntorch.empty(3, device=d, dtype=t)")) == 2
    assert sum(1 for path in SOURCES for _ in factories(path.read_text())) > 20


def packed_step(device: torch.device) -> list[torch.Tensor]:
    """Outputs and gradients of a packed chain with all that a layer asks for."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=device).requires_grad_()

    tensors = {name: drawn(1, 40, heads, 16) for name, heads in (("q", 1), ("k", 1), ("v", 2))}
    tensors |= {name: drawn(1, 40, 2) for name in ("g", "beta")} | {name: drawn(2) for name in ("A_log", "dt_bias")}
    o, state = ops.chunk_gated_delta_rule(
        **tensors,
        cu_seqlens=torch.tensor([0, 17, 40], device=device),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        use_gate_in_kernel=True,
    )
    assert state is not None
    (o.sum() + state.sum()).backward()
    return [o, state, *[x.grad for x in tensors.values() if x.grad is not None]]


@pytest.fixture(scope="module")
def wanted(device: torch.device) -> list[torch.Tensor]:
    return packed_step(device)


def test_a_packed_step_is_the_same(wanted: list[torch.Tensor], other_defaults: None, device: torch.device) -> None:
    found = packed_step(device)
    assert len(found) == len(wanted) == 9
    assert all(torch.equal(one, other) and one.dtype is other.dtype for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("op", ["chunk_local_cumsum", "solve_tril", "chunk_bwd_dv_local"])
def test_candidates_are_checked_alike(op: str, other_defaults: None, device: torch.device) -> None:
    spec = registry.lookup(op)
    key: Key = key_for(spec, next(iter(spec.forms.values())), varlen=True, B=1, T=40, K=16, V=16)
    call = inputs.synthesize(spec, key, device)
    assert call.cu_seqlens is not None and call.cu_seqlens.device.type == device.type
    assert not faults(experiment_for(spec, key, device, (0, 17, 40)))


def test_what_a_process_asks_itself_once_is_answered_alike(other_defaults: None) -> None:
    assert guards.guards_work.__wrapped__() == guards.guards_work()
    if interpreter.interpreting():
        assert interpreter.interpreter_is_right.__wrapped__()
