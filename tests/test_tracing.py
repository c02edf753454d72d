"""Calls that torch traces, transforms or watches: they become operators, or are refused by name; nothing is decided."""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import key_for
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from layout_tuner import ops
from layout_tuner.config import Config
from layout_tuner.device.interpreter import mend_interpreter
from layout_tuner.dispatch import router
from layout_tuner.dispatch.router import Router
from layout_tuner.ops import chunk_gated_delta_rule, chunk_gated_delta_rule_fwd_intra, chunk_local_cumsum
from layout_tuner.spec import packing, registry
from layout_tuner.spec.declaration import OpSpec
from layout_tuner.tuning import inputs

Tensors = list[torch.Tensor]
OPS = [registry.lookup(name) for name in registry.names() if "." not in name]
chain = functools.partial(chunk_gated_delta_rule, chunk_size=16)
cumsum = functools.partial(chunk_local_cumsum, chunk_size=16)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()
    mend_interpreter()


def leaves(device: torch.device, T: int = 20, *, grad: bool = False) -> Tensors:
    """q, k, v, g and beta."""
    generator = torch.Generator().manual_seed(T)
    q, k, v = (torch.randn(1, T, heads, 16, generator=generator) for heads in (1, 1, 2))
    g, beta = (torch.rand(1, T, 2, generator=generator) for _ in range(2))
    return [x.to(device).requires_grad_(grad) for x in (q, k, v, -g, beta)]


def step(op: Callable[..., Any], given: Tensors, **more: Any) -> Tensors:
    """Output and gradients."""
    o = op(*given, **more)[0]
    return [o.detach(), *torch.autograd.grad(o.sin().sum(), given)]


def same(one: Any, two: Any) -> bool:
    one, two = ([x] if isinstance(x, torch.Tensor) else list(x) for x in (one, two))
    pairs = zip(one, two, strict=True)
    return all((a is None and b is None) or (a.stride() == b.stride() and torch.equal(a, b)) for a, b in pairs)


def call_of(spec: OpSpec, device: torch.device, form: str, varlen: bool = False) -> tuple[Callable[..., Any], dict]:
    """A small call of an op."""
    sizes = {"B": 1, "T": 20, "H": 1, "HV": 2, "K": 16, "V": 16}
    starts = torch.tensor([0, 7, 20], device=device) if varlen else None
    call = inputs.synthesize(spec, key_for(spec, form, varlen=varlen, **sizes), device, 0, starts)
    named = spec.arguments(call)
    if "output_dtype" in named:
        named["output_dtype"] = getattr(torch, named["output_dtype"])
    names = [operand.name for operand in spec.operands if operand.given_with] + ["grad", "bounded"]
    if varlen:
        named["chunk_indices"] = packing.prepare_chunk_indices(starts, named.get("chunk_size", 64))
    return getattr(ops, spec.name), {name: x for name, x in named.items() if x is not None and name not in names}


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("spec", OPS, ids=lambda spec: spec.name)
def test_every_op_is_traced(spec: OpSpec, varlen: bool, device: torch.device) -> None:
    """The default candidate of a CPU: layouts are the chain's to choose."""
    if varlen and "T" not in spec.sizes:
        pytest.skip("has no time axis")
    function, named = call_of(spec, device, next(iter(spec.forms.values())), varlen)
    if spec.name in ("gdn_gate_bwd", "kda_gate_bwd", "kda_gate_fwd"):  # of single tokens, whatever the sequence
        named.pop("cu_seqlens", None)
        named.pop("chunk_indices", None)
    graphs = CompileCounterWithBackend("eager")
    traced = torch.compile(function, backend=graphs, fullgraph=True)
    with torch.no_grad():
        found, wanted = traced(**named), function(**named)
    assert graphs.frame_count == 1
    assert same(found, wanted)


def test_a_count_that_is_in_values_breaks_the_graph(device: torch.device) -> None:
    starts = torch.tensor([0, 7, 20], device=device)
    _, k, v, g, _ = leaves(device)

    def function(starts: torch.Tensor) -> Any:
        return ops.prepare_chunk_indices(starts, 16), ops.chunk_gated_delta_rule_fwd_h(
            k, v, v, g, chunk_size=16, cu_seqlens=starts
        )

    (indices, found), (others, wanted) = torch.compile(function, backend="eager")(starts), function(starts)
    assert torch.equal(indices, others)
    assert same(found, wanted)


# -- lengths -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_two_graphs_serve_every_length(packed: bool, device: torch.device) -> None:
    graphs = CompileCounterWithBackend("aot_eager")
    traced = torch.compile(chain, backend=graphs, fullgraph=True)
    for T in (20, 30, 17, 40):
        given = leaves(device, T, grad=True)
        starts = torch.tensor([0, 7, T] if T % 20 else [0, 7, 9, T], device=device) if packed else None
        assert same(step(traced, given, cu_seqlens=starts), step(chain, given, cu_seqlens=starts))
    assert graphs.frame_count <= 2


def test_a_length_may_be_marked_dynamic(device: torch.device) -> None:
    graphs = CompileCounterWithBackend("aot_eager")
    traced = torch.compile(lambda *x: (chain(*x)[0], *chunk_gated_delta_rule_fwd_intra(*x[1:], chunk_size=16)),
                           backend=graphs, fullgraph=True)  # fmt: skip
    for T in (20, 33):
        given = leaves(device, T)
        for x in given:
            torch._dynamo.mark_dynamic(x, 1)
        wanted = chain(*given)[0], *chunk_gated_delta_rule_fwd_intra(*given[1:], chunk_size=16)
        assert same(traced(*given), wanted)
    assert graphs.frame_count == 1


def test_other_heads_are_another_graph(device: torch.device) -> None:
    """A kernel is compiled for its heads, so that a graph may not serve another number of them."""
    traced = torch.compile(cumsum, backend="eager", fullgraph=True)
    for HV in (2, 3, 4, 5):
        g = torch.rand(1, 20, HV, device=device)
        assert torch.equal(traced(g), cumsum(g))


# -- what torch watches ------------------------------------------------------------------------------------------


def test_fakes_decide_nothing(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = Router(Config(cache={"path": str(tmp_path / "decisions.sqlite")}), on_miss="tune")
    monkeypatch.setattr(made, "tune", lambda *_: pytest.fail("tuned without values"))
    given = leaves(device)
    ticket = router.push(made)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            fakes = [mode.from_tensor(x) for x in given]
            for tensors in (fakes, given):
                assert chain(*tensors)[0].shape == (1, 20, 2, 16)
                assert cumsum(tensors[3]).shape == (1, 20, 2)
        assert chain(*fakes)[0].shape == (1, 20, 2, 16)  # outside of their mode
        assert cumsum(fakes[3]).shape == (1, 20, 2)
        assert not made.choices
        assert not made.prepared
        made.on_miss = "default"
        wanted = cumsum(given[3])
        assert cumsum(fakes[3]).shape == (1, 20, 2)  # after a real call of the same facts
        assert torch.equal(cumsum(given[3]), wanted)
    finally:
        router.remove(ticket)
        made.close()


def test_starts_that_were_looked_at_under_a_mode_are_looked_at_again(device: torch.device) -> None:
    starts = torch.tensor([0, 7, 20], device=device)
    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.suppress(RuntimeError):
        packing.prepare_chunk_indices(starts, 16)  # some versions of torch know the values of small tensors
    assert packing.prepare_chunk_indices(starts, 16).tolist() == [[0, 0], [1, 0]]


def test_without_memory(device: torch.device) -> None:
    given = [x.to("meta").requires_grad_() for x in leaves(device)]
    o, state = chain(*given, output_final_state=True)
    assert [x.shape for x in torch.autograd.grad(o.sum() + state.sum(), given)] == [x.shape for x in given]
    assert cumsum(given[3]).is_meta
    starts = torch.tensor([0, 20], device="meta")
    with pytest.raises(ValueError, match=r"_fwd_h: cu_seqlens on the meta device .* give chunk_i"):
        ops.chunk_gated_delta_rule_fwd_h(*[x.detach() for x in (given[1], given[2], given[2])], cu_seqlens=starts)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode: str, device: torch.device) -> None:
    given = leaves(device)
    graph = make_fx(lambda *x: (chain(*x)[0], cumsum(x[3])), tracing_mode=mode)(*given)
    text = graph.code
    assert "layout_tuner.chunk_gated_delta_rule" in text
    assert "layout_tuner.chunk_local_cumsum" in text
    other = leaves(device, 33 if mode == "symbolic" else 20)
    assert same(graph(*other), (chain(*other)[0], cumsum(other[3])))


@pytest.mark.filterwarnings("ignore")
def test_jit_trace(device: torch.device) -> None:
    given = leaves(device)
    graph = torch.jit.trace(lambda *x: (chain(*x)[0], cumsum(x[3])), tuple(given), check_trace=False)
    other = [x * 0.5 for x in given]
    assert same(graph(*other), (chain(*other)[0], cumsum(other[3])))


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpointing(policy: CheckpointPolicy, device: torch.device) -> None:
    given = leaves(device, grad=True)
    wanted = step(chain, given)
    contexts = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: policy)

    def kept(*x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = checkpoint(
            lambda *y: (chain(*y)[0], cumsum(y[3])), *x, use_reentrant=False, context_fn=contexts
        )
        return found

    assert same(step(kept, given), wanted)


# -- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hit", [False, True])
@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda x: x.to_sparse(), "g: wanted a dense tensor, got layout torch.sparse_coo: call to_dense"),
        (lambda x: torch.nested.nested_tensor([x[0], x[0]], layout=torch.jagged), "g: wanted a plain tensor, got a ne"),
        (lambda x: torch.nested.nested_tensor([x[0], x[0]]), "g: wanted .* got a nested one: pass its val"),
        (lambda x: x.to_mkldnn(), "g: wanted a dense tensor, got layout torch._mkldnn: call to_dense"),
        (lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype), "g: wanted a tensor with memory, got"),
        (lambda x: x.as_subclass(type("Odd", (torch.Tensor,), {"__torch_dispatch__": classmethod(lambda *_: None)})),
         "g: wanted a plain tensor, got a Odd"),
    ],
    ids=["sparse", "jagged", "nested", "mkldnn", "zero", "subclass"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_tensors_of_another_kind_are_named(
    made: Callable[[torch.Tensor], torch.Tensor], said: str, hit: bool, device: torch.device
) -> None:
    q, k, v, g, beta = leaves(device)
    if hit:
        for _ in range(2):
            cumsum(g)
            chain(q, k, v, g, beta)
    calls = [lambda x: chain(q, k, v, x, beta), lambda x: cumsum(x)]
    # torch's guards end the process where they meet a nested tensor of this kind; only the chain asks before them.
    for call in calls[: 1 if hit and "one: pass" in said else 2]:
        with pytest.raises(TypeError, match=said):
            call(made(g))


class _Negative(torch.autograd.Function):
    """The same numbers, as a view that holds them with the other sign; so are their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch._neg_view(-x)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> torch.Tensor:
        return torch._neg_view(-dx)


@pytest.mark.parametrize("hit", [False, True])
def test_negative_views_are_read_with_their_sign(hit: bool, device: torch.device) -> None:
    """Of an operand, of the state, and of what arrives at the backward, by kernels called first or again."""
    given, state = leaves(device, grad=True), torch.ones(1, 2, 16, 16, device=device)
    wanted = step(chain, given, initial_state=state)
    plain = cumsum(given[3].detach())
    if not hit:
        router.current().prepared.clear()
        router.current().prepared.last.clear()
    assert torch.equal(cumsum(_Negative.apply(given[3].detach())), plain)
    assert same(step(chain, given, initial_state=_Negative.apply(state)), wanted)
    for place in range(5):
        varied = [_Negative.apply(x) if number == place else x for number, x in enumerate(given)]
        o = chain(*varied, initial_state=state)[0]
        assert same([o.detach(), *torch.autograd.grad(o.sin().sum(), given)], wanted)
    with pytest.raises(TypeError, match=r"cu_seqlens: .* got a negative view"):
        chain(*given, cu_seqlens=torch._neg_view(torch.tensor([0, -7, -20], device=device)))
    o = _Negative.apply(chain(*given, initial_state=state)[0])
    assert same(torch.autograd.grad(o.sin().sum(), given), wanted[1:])


@pytest.mark.filterwarnings("ignore")
def test_a_distributed_tensor_is_named(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    try:
        mesh = init_device_mesh(device.type, (1,))
        given = [distribute_tensor(x, mesh, [Replicate()]) for x in leaves(device)]
        with pytest.raises(TypeError, match=r"chunk_gated_delta_rule: q: .*got a DTensor: call to_local\(\); k: "):
            chain(*given)
        with pytest.raises(TypeError, match="chunk_local_cumsum: g: wanted a plain tensor, got a DTensor"):
            cumsum(given[3])
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_transforms_are_named(device: torch.device) -> None:
    given = leaves(device)
    for transformed in (
        lambda: torch.vmap(chain)(*[x[None] for x in given]),
        lambda: torch.vmap(cumsum)(given[3][None]),
        lambda: torch.func.grad(lambda v: chain(*given[:2], v, *given[3:])[0].sum())(given[2]),
    ):
        with pytest.raises(TypeError, match=r"transforms of torch\.func are not served"):
            transformed()
