"""`torch.compile`, graph capture and checkpointing: the same numbers, and a decision that holds where it was made."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from dv_local import BT, CANDIDATES, arguments
from layout_tuner.cache.layers import open_layers
from timers import SetTimer, set_times
from torch.utils.checkpoint import checkpoint

from layout_tuner.config import Config
from layout_tuner.device import driver
from layout_tuner.device.interpreter import mend_interpreter
from layout_tuner.dispatch import router
from layout_tuner.dispatch.choices import Choice
from layout_tuner.dispatch.router import Router
from layout_tuner.ops import chunk_bwd_dv_local, chunk_gated_delta_rule
from layout_tuner.ops.chain import compiled
from layout_tuner.spec import registry
from layout_tuner.spec.layouts import Layout, relayout

CHAIN = registry.lookup("chunk_gated_delta_rule")
LAYER = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_gate_in_kernel": True}


class Chosen(Router):
    """Always chooses one candidate of the chain; counts how often it is asked."""

    def __init__(self, config: Config, layout: Layout) -> None:
        super().__init__(config, on_miss="default")
        self.layout = layout
        self.asked = 0

    def choose(self, spec, key, device, *, tracing: bool = False) -> Choice:
        choice = super().choose(spec, key, device, tracing=tracing)
        if spec is not CHAIN:
            return choice
        self.asked += 1
        wanted = [c for c in spec.candidates(key) if c.plan["beta"] is self.layout]
        return Choice(candidate=(wanted or [choice.candidate])[0], source="forced")


@pytest.fixture(params=[Layout.STRIDE_HV, Layout.T_CONTIG], ids=lambda layout: layout.value)
def chosen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Chosen]:
    made = Chosen(Config(cache={"path": str(tmp_path / "decisions.sqlite")}), request.param)
    ticket = router.push(made)
    yield made
    router.remove(ticket)
    made.close()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()
    compiled.bound.cache_clear()
    mend_interpreter()


def inputs(device: torch.device, T: int = 20, *, layer: bool = False, dtype: torch.dtype = torch.float32) -> list[Any]:
    """q, k, v, g and beta; with `layer` as a model hands them over."""
    generator = torch.Generator().manual_seed(T)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(1, T, *shape, generator=generator)

    q, k, v = drawn(1, 16), drawn(1, 16), drawn(2, 16)
    g, beta = drawn(2), drawn(2)
    if not layer:
        q, k = torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1)
        g, beta = g.abs().neg(), beta.sigmoid()
    return [x.to(device, dtype).requires_grad_() for x in (q, k, v)] + [
        x.to(device).requires_grad_() for x in (g, beta)
    ]


def step(op: Callable[..., Any], leaves: list[torch.Tensor], **more: Any) -> list[torch.Tensor]:
    """Outputs and gradients of a call."""
    o, state = op(*leaves, chunk_size=16, **more)
    weight = torch.linspace(-1, 1, o.numel(), device=o.device, dtype=o.dtype).view(o.shape)
    loss = (o * weight).sum() + (0 if state is None else state.square().sum())
    parameters = [x for x in more.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    gradients = torch.autograd.grad(loss, [*leaves, *parameters])
    return [o.detach(), *gradients, *(() if state is None else (state.detach(),))]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def forms(device: torch.device) -> dict[str, dict[str, Any]]:
    """Arguments beside the tensors."""
    state = torch.randn(1, 2, 16, 16, device=device).requires_grad_()
    rates = torch.zeros(2, device=device).requires_grad_(), torch.ones(2, device=device).requires_grad_()
    return {
        "training": {},
        "states": {"initial_state": state, "output_final_state": True},
        "packed": {"cu_seqlens": torch.tensor([0, 7, 20], device=device)},
        "layer": LAYER | {"A_log": rates[0], "dt_bias": rates[1]},
    }


# -- torch.compile -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("form", ["training", "states", "packed", "layer"])
def test_a_compiled_chain_is_the_chain(chosen: Chosen, device: torch.device, form: str) -> None:
    more = forms(device)[form]
    leaves = inputs(device, layer=form == "layer")
    wanted = step(chunk_gated_delta_rule, leaves, **more)
    traced = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    assert same(step(traced, leaves, **more), wanted)


@pytest.mark.slow
def test_gates_in_any_layout(chosen: Chosen, device: torch.device) -> None:
    *rest, g, beta = inputs(device)
    traced = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    odd = torch.zeros(*g.shape, 2, device=device)[..., 0]
    for turn in (lambda x: relayout(x, Layout.T_CONTIG), lambda x: odd.clone().copy_(x)):
        leaves = [*rest, *[turn(x.detach()).requires_grad_() for x in (g, beta)]]
        assert same(step(traced, leaves), step(chunk_gated_delta_rule, leaves))


def test_without_gradients_and_at_several_lengths(chosen: Chosen, device: torch.device) -> None:
    traced = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for T in (20, 21, 40, 20):
            leaves = inputs(device, T)
            o, state = traced(*leaves, chunk_size=16)
            assert state is None
            assert torch.equal(o, chunk_gated_delta_rule(*leaves, chunk_size=16)[0])


def test_the_decision_is_made_while_tracing(chosen: Chosen, device: torch.device) -> None:
    traced = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    leaves = inputs(device)
    with torch.no_grad():
        wanted, _ = traced(*leaves, chunk_size=16)
        asked = chosen.asked
        assert asked >= 1
        chosen.layout = Layout.T_CONTIG if chosen.layout is Layout.STRIDE_HV else Layout.STRIDE_HV
        found, _ = traced(*leaves, chunk_size=16)
    assert torch.equal(found, wanted)
    assert chosen.asked == asked
    (said,) = [what for what in [compiled.bound.cache_info()] if what.misses]
    assert said.misses == 1


def test_tracing_a_cold_key_tunes_nothing_and_freezes_nothing(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = Router(Config(cache={"path": str(tmp_path / "decisions.sqlite")}), on_miss="tune")
    monkeypatch.setattr(made, "tune", lambda *_: pytest.fail("tuned while tracing"))
    ticket = router.push(made)
    try:
        traced = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            traced(*inputs(device), chunk_size=16)
    finally:
        router.remove(ticket)
        made.close()
    assert made.choices == {}
    assert "traced" in caplog.text


def test_mistakes_are_named_while_tracing(device: torch.device) -> None:
    traced = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    q, k, v, _, beta = inputs(device)
    with pytest.raises(Exception, match=r"wanted HV=2|wanted HV=3"):
        traced(q, k, v, torch.zeros(1, 20, 3, device=device), beta)


def test_compiled_dv_local(device: torch.device) -> None:
    traced = torch.compile(chunk_bwd_dv_local, fullgraph=True, backend="aot_eager")
    q, k, do, g, _ = (x.detach() for x in inputs(device))
    more = {"chunk_size": 16}
    turned = relayout(g, Layout.T_CONTIG)
    for gate, packed in ((g, None), (None, None), (turned, None), (g, torch.tensor([0, 7, 20], device=device))):
        wanted = chunk_bwd_dv_local(q, k, do, gate, cu_seqlens=packed, **more)
        assert torch.equal(traced(q, k, do, gate, cu_seqlens=packed, **more), wanted)


# -- checkpointing -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_checkpointing_takes_the_same_whatever_is_decided_in_between(chosen: Chosen, device: torch.device) -> None:
    """The recomputed forward may find another decision; the backward runs what the first forward chose."""
    leaves = inputs(device)
    wanted = step(chunk_gated_delta_rule, leaves)
    chosen.prepared.clear()
    o = checkpoint(lambda *x: chunk_gated_delta_rule(*x, chunk_size=16)[0], *leaves, use_reentrant=False)
    chosen.prepared.clear()
    chosen.layout = Layout.T_CONTIG if chosen.layout is Layout.STRIDE_HV else Layout.STRIDE_HV
    weight = torch.linspace(-1, 1, o.numel(), device=o.device, dtype=o.dtype).view(o.shape)
    gradients = torch.autograd.grad((o * weight).sum(), leaves)
    assert same([o.detach(), *gradients], wanted)


@pytest.mark.slow
def test_checkpointing_with_an_empty_cache(tmp_path: Path, device: torch.device) -> None:
    made = Router(Config(cache={"path": str(tmp_path / "decisions.sqlite")}), on_miss="default")
    ticket = router.push(made)
    try:
        leaves = inputs(device)
        wanted = step(chunk_gated_delta_rule, leaves)
        made.prepared.clear()
        made.choices.clear()
        again = step(
            lambda *x, chunk_size: checkpoint(
                lambda *y: chunk_gated_delta_rule(*y, chunk_size=chunk_size), *x, use_reentrant=False
            ),
            leaves,
        )
        assert same(again, wanted)
    finally:
        router.remove(ticket)
        made.close()


class Asked(Router):
    """Notes every choice."""

    def __init__(self, config: Config, timer: SetTimer) -> None:
        super().__init__(config, on_miss="tune", timer=timer)
        self.chose: list[str] = []

    def choose(self, spec, key, device, *, tracing: bool = False) -> Choice:
        choice = super().choose(spec, key, device, tracing=tracing)
        self.chose.append(choice.candidate.id)
        return choice


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_repeats_a_default_taken_for_want_of_memory(
    use_reentrant: bool, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is free by the time of the backward lets nothing be tuned within the repeated region."""
    free = [0]
    monkeypatch.setattr(driver, "free_bytes", lambda _: free[0])
    winner = "sub/g=STRIDE_HV"
    times = {name: 2.0 if name == winner else 10.0 for name in CANDIDATES}
    made = Asked(Config(cache={"path": str(tmp_path / "decisions.sqlite")}), set_times(times))
    given = arguments(device)

    def region(x: torch.Tensor) -> torch.Tensor:
        made.prepared.clear()
        return x * x * chunk_bwd_dv_local(**given, chunk_size=BT).sum()

    ticket = router.push(made)
    try:
        x = torch.ones(3, device=device, requires_grad=True)
        o = checkpoint(region, x, use_reentrant=use_reentrant)
        free[0] = 1 << 50
        o.sum().backward()
        default = CANDIDATES[0]
        assert made.chose == [default, default]
        region(x)
        # A reentrant checkpoint cannot be told from a plain call, which is tuned as soon as it can be.
        assert made.chose[2:] == [winner if use_reentrant else default]
    finally:
        router.remove(ticket)
        made.close()


# -- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["training", "states", "packed", "layer"])
def test_gpu_inductor(chosen: Chosen, form: str) -> None:
    device = torch.device("cuda", 0)
    more = forms(device)[form]
    leaves = inputs(device, 200, layer=form == "layer", dtype=torch.bfloat16)
    if form == "packed":
        more = {"cu_seqlens": torch.tensor([0, 70, 200], device=device)}

    def model(*x: torch.Tensor, **named: Any) -> Any:
        o, state = chunk_gated_delta_rule(*x, **named)
        return o * 1.0, state

    if form == "states":
        more["initial_state"] = more["initial_state"].detach().requires_grad_()
    wanted = step(model, leaves, **more)
    found = step(torch.compile(model, fullgraph=True), leaves, **more)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_gpu_capture_of_a_warmed_call_replays_right(chosen: Chosen) -> None:
    device = torch.device("cuda", 0)
    given = [x.detach() for x in inputs(device, 200)]
    for x in given:
        x.requires_grad_()
    do = torch.randn(1, 200, 2, 16, device=device)

    def run() -> list[torch.Tensor]:
        o, _ = chunk_gated_delta_rule(*given, chunk_size=16)
        return [o, *torch.autograd.grad(o, given, do)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    with torch.no_grad():
        for x, y in zip(given, inputs(device, 200), strict=True):
            x.copy_(y.detach() * 0.5)
        do.mul_(2.0)
    for x in results:
        x.detach().fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    found = [x.detach().clone() for x in results]
    assert same(found, [x.detach() for x in run()])


@pytest.mark.gpu
def test_gpu_capture_of_a_cold_key_runs_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    q, k, do, g, _ = (x.detach() for x in inputs(device, 200))
    wanted = chunk_bwd_dv_local(q, k, do, g, chunk_size=16)  # compiles the kernels, outside the router below
    made = Router(Config(cache={"path": str(tmp_path / "decisions.sqlite")}), on_miss="tune")
    monkeypatch.setattr(made, "tune", lambda *_: pytest.fail("tuned during capture"))
    ticket = router.push(made)
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.cuda.set_sync_debug_mode("error")  # and the driver itself refuses to wait while it captures
            try:
                dv = chunk_bwd_dv_local(q, k, do, g, chunk_size=16)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(dv, wanted)
        assert made.choices == {}
        assert not made.prepared
    finally:
        router.remove(ticket)
        made.close()
    with contextlib.closing(open_layers(str(tmp_path / "decisions.sqlite"))) as store:
        assert [miss.key.op for miss in store.misses()] == ["chunk_bwd_dv_local"]


def on_gpu(index: int, stream: torch.cuda.Stream | None = None) -> list[torch.Tensor]:
    """Output and gradients of the chain on a device, on a stream of it that first has something else to do."""
    device = torch.device("cuda", index)
    leaves = inputs(device, 200)
    if stream is None:
        return [x.cpu() for x in step(chunk_gated_delta_rule, leaves)]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        late = [torch.full_like(x, float("nan")) for x in leaves]
        torch.cuda._sleep(100_000_000)
        for x, leaf in zip(late, leaves, strict=True):
            x.copy_(leaf.detach())
            x.requires_grad_()
        found = step(chunk_gated_delta_rule, late)
        busy = not stream.query()
        found = [x.cpu() for x in found]
    assert busy, "the step waited for the device"
    return found


@pytest.mark.gpu
def test_gpu_chain_runs_on_the_current_stream(chosen: Chosen) -> None:
    wanted = on_gpu(0)
    assert same(on_gpu(0, torch.cuda.Stream(0)), wanted)


@pytest.mark.gpu
def test_gpu_chain_in_threads(chosen: Chosen) -> None:
    wanted = on_gpu(0)
    streams = [torch.cuda.Stream(0) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda stream: on_gpu(0, stream), streams * 2):
            assert same(found, wanted)


@pytest.mark.gpu
def test_gpu_chain_on_several_devices(chosen: Chosen) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    wanted = on_gpu(0)
    for index in (1, 0, 1):
        assert same(on_gpu(index), wanted)
        assert torch.cuda.current_device() == 0
        assert same(on_gpu(index, torch.cuda.Stream(index)), wanted)
