"""`chunk_gated_delta_rule` as autograd and its callers see it, against the token recurrence in float64."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import experiment_for, faults, key_for

import layout_tuner
from layout_tuner import ops, reference
from layout_tuner.device.environment import environment
from layout_tuner.dispatch import choices, router
from layout_tuner.errors import UnsupportedProblemError
from layout_tuner.spec import layouts, packing
from layout_tuner.spec.declaration import OpSpec
from layout_tuner.spec.layouts import Layout
from layout_tuner.spec.registry import lookup
from layout_tuner.tuning import numerics

Tensors = dict[str, torch.Tensor]
INPUTS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
TOLERANCE = {torch.float32: numerics.FP32_TOLERANCE, torch.float16: 0.008, torch.bfloat16: 0.008}


def ops_spec() -> OpSpec:
    """The chain's declaration."""
    return lookup("chunk_gated_delta_rule")


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    layout_tuner.disable()
    router.current().prepared.clear()
    yield
    layout_tuner.disable()
    router.current().prepared.clear()


@pytest.fixture(params=ops_spec().variants)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way to run the chain, the default while a test runs."""
    monkeypatch.setitem(vars(ops_spec()), "default_variant", lambda key, chip: request.param)
    return str(request.param)


def make(
    device: torch.device,
    *,
    B: int = 2,
    T: int = 67,
    H: int = 1,
    HV: int = 2,
    K: int = 24,
    V: int = 40,
    N: int | None = None,
    dtype: torch.dtype = torch.float32,
    v_first: bool = False,
) -> Tensors:
    """Leaves of a call."""
    generator = torch.Generator().manual_seed(T * 7 + HV)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    q, k = (torch.nn.functional.normalize(normal(B, T, H, K), dim=-1).to(dtype) for _ in range(2))
    state = (V, K) if v_first else (K, V)
    made = {
        "q": q,
        "k": k,
        "v": normal(B, T, HV, V).to(dtype),
        "g": torch.nn.functional.logsigmoid(normal(B, T, HV)),
        "beta": normal(B, T, HV).sigmoid(),
        "initial_state": normal(N or B, HV, *state) * 0.1,
    }
    return {name: tensor.to(device).requires_grad_() for name, tensor in made.items()}


def gradients(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor | None]], given: Tensors, **options: object
) -> Tensors:
    """Outputs and the gradients of every leaf, by name, for fixed gradients of the outputs."""
    o, final_state = function(**given, **options)
    generator = torch.Generator().manual_seed(11)
    do = torch.randn(o.shape, generator=generator).to(o)
    loss = (o * do).sum()
    if final_state is not None:
        loss = loss + (final_state * torch.randn(final_state.shape, generator=generator).to(final_state)).sum()
    found = torch.autograd.grad(loss, list(given.values()))
    results = {f"d{name}": gradient for name, gradient in zip(given, found)}
    return results | {"o": o.detach()} | ({} if final_state is None else {"final_state": final_state.detach()})


def double(given: Tensors) -> Tensors:
    return {name: tensor.detach().double().requires_grad_() for name, tensor in given.items()}


def assert_matches_recurrence(given: Tensors, limit: float | None = None, **options: object) -> Tensors:
    """Outputs and gradients, which are within `limit`, or their tolerance, of the token recurrence."""
    got = gradients(ops.chunk_gated_delta_rule, given, **options)

    def recurrence(**named: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        return reference.gated_delta_rule_recurrence(**named, compute_dtype=torch.float64)  # type: ignore[arg-type]

    wanted = gradients(recurrence, double(given), **options)
    limit = limit or TOLERANCE[given["q"].dtype]
    far = {name: error for name in wanted if (error := numerics.error(got[name], wanted[name])) > limit}
    assert not far
    return got


@pytest.mark.parametrize("T", [1, 15, 63, 64, 65, 127])
def test_lengths(T: int, device: torch.device, variant: str) -> None:
    assert_matches_recurrence(make(device, B=1, T=T, K=16, V=16), output_final_state=True)


@pytest.mark.nightly
@pytest.mark.parametrize("T", [500, 2048])
def test_long(T: int, device: torch.device) -> None:
    assert_matches_recurrence(make(device, B=1, T=T, K=16, V=16), output_final_state=True)


def test_as_many_heads_as_tokens(device: torch.device, variant: str) -> None:
    assert_matches_recurrence(make(device, B=1, T=8, H=2, HV=8, K=16, V=16), output_final_state=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype, device: torch.device) -> None:
    assert_matches_recurrence(make(device, dtype=dtype), output_final_state=True)


def test_states_with_values_first(device: torch.device, variant: str) -> None:
    assert_matches_recurrence(make(device, v_first=True), output_final_state=True, state_v_first=True)


def test_what_a_layer_asks_for(device: torch.device, variant: str) -> None:
    given = make(device)
    given["A_log"] = torch.tensor([0.3, -0.4], device=device, requires_grad=True)
    given["dt_bias"] = torch.tensor([0.1, -0.2], device=device, requires_grad=True)
    assert_matches_recurrence(
        given,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        use_gate_in_kernel=True,
    )


def test_scale_and_no_gate(device: torch.device, variant: str) -> None:
    given = make(device)
    del given["g"]

    def without_gate(**named: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        return ops.chunk_gated_delta_rule(g=None, scale=0.3, **named)  # type: ignore[arg-type]

    got = gradients(without_gate, given)
    wanted = gradients(
        lambda **named: reference.gated_delta_rule_recurrence(g=None, scale=0.3, compute_dtype=torch.float64, **named),
        double(given),
    )
    assert max(numerics.error(got[name], wanted[name]) for name in wanted) < numerics.FP32_TOLERANCE


@pytest.mark.parametrize(
    "lengths",
    [(0, 1, 63, 64, 65), pytest.param((1,) * 127, marks=pytest.mark.nightly)],
    ids=["around a chunk", "127 short ones"],
)
def test_packed(lengths: tuple[int, ...], device: torch.device, variant: str) -> None:
    starts = torch.tensor([0, *lengths]).cumsum(0).to(device)
    given = make(device, B=1, T=sum(lengths), K=16, V=16, N=len(lengths))
    assert_matches_recurrence(given, output_final_state=True, cu_seqlens=starts)


def test_tokens_outside_every_sequence(device: torch.device, variant: str) -> None:
    """They get zeros, forward and backward, whatever their inputs hold."""
    starts = torch.tensor([5, 20, 20, 40], device=device)
    given = make(device, B=1, T=48, K=16, V=16, N=3)
    with torch.no_grad():
        for name in ("q", "k", "v", "g", "beta"):
            given[name][:, :5] = float("nan")
            given[name][:, 40:] = float("nan")
    got = gradients(
        ops.chunk_gated_delta_rule, given, output_final_state=True, cu_seqlens=starts, use_qk_l2norm_in_kernel=True
    )
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert bool(torch.isfinite(got[name]).all()), name
        assert not got[name][:, :5].any(), name
        assert not got[name][:, 40:].any(), name
    # The empty sequence hands its state through.
    assert torch.equal(got["final_state"][1], given["initial_state"].detach()[1].float())


def test_gates_that_would_overflow_outside_the_triangle(device: torch.device, variant: str) -> None:
    """Decays of -50 a token: what the causal mask hides would be 2 ** (50 * 64 / ln 2)."""
    given = make(device, B=1, T=65, K=16, V=16)
    with torch.no_grad():
        given["g"].fill_(-50.0)
    got = gradients(ops.chunk_gated_delta_rule, given, output_final_state=True)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in got.values())
    assert_matches_recurrence({name: x.detach().requires_grad_() for name, x in given.items()})


STRONG = [-103.0, -105.0, -1e5, -1e6, -1e8, -3e38, -math.inf]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("strong", STRONG)
def test_one_strong_gate_among_ordinary_ones(strong: float, packed: bool, device: torch.device) -> None:
    """It resets the state, and the later tokens of its chunk keep their digits."""
    starts = torch.tensor([0, 8, 40], device=device) if packed else None
    given = make(device, B=1, T=40, K=16, V=16, N=2 if packed else 1)
    with torch.no_grad():
        given["g"][:, 20] = strong
    assert_matches_recurrence(given, output_final_state=True, cu_seqlens=starts)


@pytest.mark.parametrize("which", [slice(None, None, 2), slice(None), slice(0, 1), slice(-1, None)], ids=str)
def test_many_strong_gates(which: slice, device: torch.device, in_layout: Callable[[Layout], None]) -> None:
    """Every second token, every token, the first, the last; the same bits from both layouts."""
    given = make(device, B=1, T=65, K=16, V=16)
    with torch.no_grad():
        given["g"][:, which] = torch.tensor(STRONG, device=device).repeat(10)[:65][which][None, :, None]
    results = []
    for layout in (Layout.STRIDE_HV, Layout.T_CONTIG):
        router.current().prepared.clear()
        in_layout(layout)
        results.append(assert_matches_recurrence(given, 1e-3, output_final_state=True))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_strong_gates_from_their_parameters(packed: bool, device: torch.device) -> None:
    """What flows back through a reset is nothing, whatever the gate's size would make of rounding."""
    starts = torch.tensor([0, 8, 40], device=device) if packed else None
    given = make(device, B=1, T=40, K=16, V=16, N=2 if packed else 1)
    given["A_log"] = torch.tensor([0.3, -0.4], device=device, requires_grad=True)
    given["dt_bias"] = torch.tensor([0.1, -0.2], device=device, requires_grad=True)
    with torch.no_grad():
        given["g"][:, [5, 20, 30, 31]] = torch.tensor([1e3, 1e8, 1e5, 1e38], device=device)[:, None]
    assert_matches_recurrence(given, output_final_state=True, cu_seqlens=starts, use_gate_in_kernel=True)


@pytest.mark.parametrize("strong", [-1e6, -math.inf])
def test_the_oracle_of_strong_gates(strong: float) -> None:
    """In fp32 as well: the tuner and other tests believe it."""
    given = {name: x.detach() for name, x in make(torch.device("cpu"), B=1, T=40, K=16, V=16).items()}
    given["g"][:, 20] = strong
    given["g"][:, 25::3] = strong
    wanted, _ = reference.gated_delta_rule_recurrence(**given, compute_dtype=torch.float64)
    o, _ = reference.chunk_gated_delta_rule(**given)
    assert numerics.error(o, wanted) < 1e-3
    found = reference.chunk_gated_delta_rule_bwd(**given, do=torch.ones_like(given["v"]))
    assert all(bool(torch.isfinite(x).all()) for x in found if x is not None)


def test_nan_is_no_reset(device: torch.device) -> None:
    given = make(device, B=1, T=20, K=16, V=16)
    with torch.no_grad():
        given["g"][:, 10] = math.nan
        o, _ = ops.chunk_gated_delta_rule(**given)
    assert bool(o[:, 10:].isnan().all())


def test_what_is_outside_reaches_no_parameter(device: torch.device) -> None:
    """NaN beside the sequences leaves the gradients of the gate's parameters alone."""
    starts = torch.tensor([3, 20, 25], device=device)
    given = make(device, B=1, T=30, K=16, V=16, N=2)
    given["A_log"] = torch.zeros(2, device=device, requires_grad=True)
    given["dt_bias"] = torch.zeros(2, device=device, requires_grad=True)
    options = {"cu_seqlens": starts, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    wanted = gradients(ops.chunk_gated_delta_rule, given, **options)
    with torch.no_grad():
        for name in ("q", "k", "v", "g", "beta"):
            given[name][:, :3] = float("nan")
            given[name][:, 25:] = float("nan")
    got = gradients(ops.chunk_gated_delta_rule, given, **options)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("starts", "said"),
    [([0, 40], "at most T=20, got 40"), ([-3, 10], "never fall"), ([0, 10, 5], "never fall")],
    ids=["past the end", "before the start", "falling"],
)
def test_starts_that_would_write_beside_the_results(starts: list[int], said: str, device: torch.device) -> None:
    given = make(device, B=1, T=20, K=16, V=16)
    del given["initial_state"]
    with pytest.raises(ValueError, match=said):
        ops.chunk_gated_delta_rule(**given, cu_seqlens=torch.tensor(starts, device=device))
    with pytest.raises(ValueError, match=said):
        ops.chunk_local_cumsum(given["g"], 64, cu_seqlens=torch.tensor(starts, device=device))


@pytest.mark.parametrize(
    ("starts", "made_for", "chunk_size"),
    [([0, 40], [0, 40], 16), ([0, 20], [0, 20], 32), ([0, 20], [0, 4, 20], 16)],
    ids=["past the end", "another chunk size", "other sequences"],
)
def test_chunks_that_would_write_beside_the_results(
    starts: list[int], made_for: list[int], chunk_size: int, device: torch.device
) -> None:
    """What a caller hands over with the starts is compared with them, wherever nothing has to wait for that."""
    given = make(device, B=1, T=20, K=16, V=16)
    del given["initial_state"]
    on_host = torch.tensor(starts)
    packed = {
        "cu_seqlens": on_host.to(device),
        "chunk_indices": ops.prepare_chunk_indices(torch.tensor(made_for, device=device), chunk_size),
    }
    if device.type != "cpu" and starts != made_for:
        pytest.skip("as many chunks as there should be; to see that they are others would wait for the device")
    for more in ({}, {"cu_seqlens_cpu": on_host}) if device.type == "cpu" else ({"cu_seqlens_cpu": on_host},):
        with pytest.raises(ValueError, match=r"at most T=20, got 40|chunk_indices: wanted prepare_chunk_indices\("):
            ops.chunk_gated_delta_rule(**given, **packed, **more, chunk_size=16)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"at most T=20, got 40|chunk_indices: wanted prepare_chunk_indices\("):
            ops.chunk_local_cumsum(given["g"], 16, **packed)


def test_more_chunks_than_a_batch_can_have(device: torch.device) -> None:
    """Where the host knows nothing of the starts, their number still bounds the chunks."""
    starts = torch.tensor([0, 20], device="meta")
    with pytest.raises(ValueError, match="of at most 3 chunks"):
        packing.chunks_of(starts, torch.zeros(4, 2), 16, 20)
    assert packing.chunks_of(starts, torch.zeros(3, 2), 16, 20).shape == (3, 2)
    with pytest.raises(ValueError, match=r"cu_seqlens: wanted starts \[N \+ 1\], got \[0\]"):
        ops.prepare_chunk_indices(torch.tensor([], dtype=torch.int32), 16)


# -- relayouts: the chain is one decision ----------------------------------------------------------------------


class Copies:
    """Counts the copies of time-axis tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[torch.Tensor] = []
        relayout = layouts.relayout

        def counting(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
            moved = relayout(tensor, layout)
            if moved.data_ptr() != tensor.data_ptr():
                self.made.append(tensor)
            return moved

        monkeypatch.setattr(layouts, "relayout", counting)


def choose(layout: Layout) -> None:
    """Let the whole process run the chain in one layout, as a decision would."""
    forced = router.current()

    def choice(spec: object, key: object, device: object) -> choices.Choice:
        candidate = next(c for c in spec.candidates(key) if c.plan["g"] is layout)  # type: ignore[attr-defined]
        return choices.Choice(candidate=candidate, source="forced")

    forced.choose = choice  # type: ignore[method-assign, assignment]


@pytest.fixture
def in_layout() -> Iterator[Callable[[Layout], None]]:
    yield choose
    vars(router.current()).pop("choose", None)


@pytest.mark.parametrize("layout", [Layout.STRIDE_HV, Layout.T_CONTIG])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "as a layer"])
def test_a_step_copies_no_gate(
    layout: Layout,
    fused: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    in_layout: Callable[[Layout], None],
) -> None:
    in_layout(layout)
    given = make(device, B=1, K=16, V=16)
    options = {}
    if fused:
        given["A_log"] = torch.zeros(2, device=device, requires_grad=True)
        options = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    copies = Copies(monkeypatch)
    gradients(ops.chunk_gated_delta_rule, given, **options)
    assert not copies.made


def test_parameter_gradients_that_cancel(device: torch.device) -> None:
    """ddt_bias that is a fiftieth of its terms: rounding is no fault there, a chunk left out is one."""
    spec = lookup("chunk_gated_delta_rule")
    key = key_for(spec, spec.forms["layer"], "bfloat16", B=1, T=128, H=1, HV=2, K=32, V=32)
    names = [output.name for output in spec.outputs]
    for seed in range(100):  # each kind of device draws other numbers
        experiment = experiment_for(spec, key, device, seed=seed)
        wanted = dict(zip(names, experiment.wanted, strict=True))
        dg, ddt_bias = wanted["dg"], wanted["ddt_bias"]
        assert dg is not None and ddt_bias is not None
        if numerics.rms(ddt_bias) < experiment.term_rms["ddt_bias"] / 25:
            break
    else:
        pytest.fail("no arguments whose ddt_bias cancels")
    assert faults(experiment) == []
    short = dict(wanted, ddt_bias=dg[:, :64].sum((0, 1)))
    check = experiment.compare(tuple(short[name] for name in names))
    assert not check.right and check.output == "ddt_bias"


def test_layouts_give_the_same_bits(device: torch.device, in_layout: Callable[[Layout], None]) -> None:
    given = make(device, B=1, K=16, V=16)
    results = []
    for layout in (Layout.STRIDE_HV, Layout.T_CONTIG):
        router.current().prepared.clear()
        in_layout(layout)
        results.append(gradients(ops.chunk_gated_delta_rule, given, output_final_state=True))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_gate_that_comes_back_in_another_layout(device: torch.device, in_layout: Callable[[Layout], None]) -> None:
    """Saved-tensor hooks may hand anything back that has the same values."""
    in_layout(Layout.T_CONTIG)
    given = make(device, B=1, K=16, V=16)
    wanted = gradients(ops.chunk_gated_delta_rule, given)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.contiguous().clone(), lambda x: x):
        got = gradients(ops.chunk_gated_delta_rule, given)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


# -- autograd --------------------------------------------------------------------------------------------------


def test_only_what_is_wanted_runs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that need no gradient cost no kernel."""
    ran: list[str] = []
    bind = layout_tuner.launch.launcher.bind  # type: ignore[attr-defined]

    class Recording:
        """A bound kernel that says when it runs."""

        def __init__(self, kernel: object, **constants: object) -> None:
            self.bound = bind(kernel, **constants)
            self.name = kernel.fn.__name__  # type: ignore[attr-defined]

        def __call__(self, *arguments: object) -> None:
            ran.append(self.name)
            self.bound(*arguments)

        def __getattr__(self, attribute: str) -> object:
            return getattr(self.bound, attribute)

    monkeypatch.setattr(layout_tuner.launch.launcher, "bind", Recording)  # type: ignore[attr-defined]
    given = make(device, B=1, T=20, K=16, V=16)
    plain = {name: tensor.detach() for name, tensor in given.items()}
    o, _ = ops.chunk_gated_delta_rule(**plain)
    assert not o.requires_grad
    assert not [name for name in ran if "bwd" in name]
    o, _ = ops.chunk_gated_delta_rule(**(plain | {"initial_state": given["initial_state"]}))
    ran.clear()
    o.sum().backward()
    assert "chunk_gated_delta_rule_bwd_dhu" in ran
    assert not [name for name in ran if "dqkwg" in name or "wy" in name]
    o, _ = ops.chunk_gated_delta_rule(**(plain | {"q": given["q"]}))
    ran.clear()
    o.sum().backward()
    assert not [name for name in ran if "wy" in name or "cumsum" in name]


def test_a_leaf_used_twice(device: torch.device) -> None:
    given = make(device, B=1, T=20, K=16, V=16)
    o1, _ = ops.chunk_gated_delta_rule(**given)
    (once,) = torch.autograd.grad(o1.sum(), given["k"])
    o1, _ = ops.chunk_gated_delta_rule(**given)
    o2, _ = ops.chunk_gated_delta_rule(**given)
    (twice,) = torch.autograd.grad((o1 + o2).sum(), given["k"])
    assert torch.allclose(twice, 2 * once)
    same = {**given, "q": given["k"]}
    o, _ = ops.chunk_gated_delta_rule(**same)
    (both,) = torch.autograd.grad(o.sum(), given["k"])
    assert both.shape == given["k"].shape
    assert bool(torch.isfinite(both).all())


def test_checkpointing_recomputes_the_same(device: torch.device) -> None:
    from torch.utils.checkpoint import checkpoint

    given = make(device, B=1, T=20, K=16, V=16)
    o, _ = ops.chunk_gated_delta_rule(**given)
    wanted = torch.autograd.grad(o.square().sum(), list(given.values()))
    names = list(given)

    def region(*tensors: torch.Tensor) -> torch.Tensor:
        return ops.chunk_gated_delta_rule(**dict(zip(names, tensors)))[0]

    o = checkpoint(region, *given.values(), use_reentrant=False)
    got = torch.autograd.grad(o.square().sum(), list(given.values()))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted))


def test_autocast_casts_what_the_matrix_unit_reads(device: torch.device) -> None:
    given = make(device, B=1, T=20, K=16, V=16)
    with torch.autocast(device.type, dtype=torch.float16 if device.type == "cuda" else torch.bfloat16):
        o, _ = ops.chunk_gated_delta_rule(**given)
    assert o.dtype in (torch.float16, torch.bfloat16)
    found = torch.autograd.grad(o.float().sum(), list(given.values()))
    assert [gradient.dtype for gradient in found] == [tensor.dtype for tensor in given.values()]


def test_backward_outside_the_scope_runs_what_the_forward_chose(device: torch.device, tmp_path: object) -> None:
    given = make(device, B=1, T=20, K=16, V=16)
    with layout_tuner.enable(cache=tmp_path / "cache.sqlite", on_miss="default"):  # type: ignore[operator]
        entry = router.current()
        o, _ = ops.chunk_gated_delta_rule(**given)
    looked = len(router.current().prepared)
    torch.autograd.grad(o.sum(), list(given.values()))
    assert len(router.current().prepared) == looked  # the backward looked nothing up
    assert len(entry.prepared) == 1


@pytest.mark.parametrize("step", ["forward", "backward"])
def test_a_chain_that_has_run_and_then_fails_gives_way_to_the_default(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: str
) -> None:
    given = make(device, B=1, T=20, K=16, V=16)

    def run() -> list[torch.Tensor]:
        return list(gradients(ops.chunk_gated_delta_rule, given).values())

    with layout_tuner.enable(cache=tmp_path / "cache.sqlite", on_miss="default", fla=False):
        entry, wanted = router.current(), run()
        (prepared,) = entry.prepared.values()
        chain = prepared.launch
        (other,) = [
            each
            for each in lookup("chunk_gated_delta_rule").candidates(chain.problem.key)
            if each.variant == prepared.candidate.variant and each != prepared.candidate
        ]
        place = (chain.problem.key, environment(device).id)
        entry.prepared.clear()
        entry.choices[place] = replace(entry.choices[place], candidate=other)
        assert all(torch.equal(a, b) for a, b in zip(run(), wanted, strict=True))
        (prepared,) = entry.prepared.values()
        assert prepared.candidate == other
        failing = prepared.launch
        calls: list[str] = []

        def fail(*_: object) -> None:
            calls.append(step)
            raise RuntimeError("illegal instruction")

        monkeypatch.setattr(failing, step, fail)
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(run(), wanted, strict=True))
        assert calls == [step]


@pytest.mark.parametrize("penalized", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("linear", [False, True], ids=["square", "sum"])
def test_backward_of_backward_is_refused(device: torch.device, penalized: str, linear: bool) -> None:
    """Also where nothing that the backward is handed requires a gradient: of a sum that is a constant."""
    given = make(device, B=1, T=20, K=16, V=16)
    o, _ = ops.chunk_gated_delta_rule(**given)
    with pytest.raises(UnsupportedProblemError, match="chunk_gated_delta_rule: its gradients cannot be differentiated"):
        torch.autograd.grad((o if linear else o.square()).sum(), given[penalized], create_graph=True)


@pytest.mark.parametrize("alone", ["v", "initial_state"])
def test_gradients_that_are_constants_may_be_differentiated_again(device: torch.device, alone: str) -> None:
    """o is linear in the values and the initial state: where nothing else varies, their gradients are constants."""
    given = {name: x.detach() for name, x in make(device, B=1, T=20, K=16, V=16).items()}
    given["initial_state"] = torch.zeros(1, given["v"].shape[2], 16, 16, device=device)
    given[alone].requires_grad_()
    o, _ = ops.chunk_gated_delta_rule(**given)
    (first,) = torch.autograd.grad(o.sum(), given[alone], create_graph=True)
    assert not first.requires_grad
    o, _ = ops.chunk_gated_delta_rule(**given)
    with pytest.raises(UnsupportedProblemError, match="create_graph"):
        torch.autograd.grad(o.square().sum(), given[alone], create_graph=True)


def test_gradient_of_a_sum_has_no_strides(device: torch.device) -> None:
    """`sum()` hands the backward a gradient whose strides are all 0."""
    given = make(device, B=1, T=20, K=16, V=16)
    o, _ = ops.chunk_gated_delta_rule(**given)
    of_sum = torch.autograd.grad(o.sum(), list(given.values()))
    o, _ = ops.chunk_gated_delta_rule(**given)
    of_ones = torch.autograd.grad(o, list(given.values()), torch.ones_like(o))
    assert all(torch.equal(a, b) for a, b in zip(of_sum, of_ones))


def test_starts_that_are_written_to_before_the_backward(device: torch.device) -> None:
    q, k, v = (torch.randn(1, 20, *shape, device=device) for shape in ((1, 16), (1, 16), (2, 16)))
    beta = torch.rand(1, 20, 2, device=device).requires_grad_()
    starts = torch.tensor([0, 7, 20], device=device)
    o, _ = ops.chunk_gated_delta_rule(q, k, v, None, beta, cu_seqlens=starts, chunk_size=16)
    starts[1] = 9
    with pytest.raises(RuntimeError, match="cu_seqlens or chunk_indices were written to between forward and backward"):
        o.sum().backward()


def test_arguments_that_cannot_be_used_are_named_together(device: torch.device) -> None:
    q, k, v = (torch.randn(1, 20, *shape, device=device) for shape in ((1, 16), (1, 16), (2, 16)))
    with pytest.raises(
        TypeError,
        match=r"cu_seqlens_cpu: wanted cu_seqlens with it; k: wanted a tensor, got list; "
        r"chunk_size: wanted int, got str; scale: wanted a number or None, got Tensor; "
        r"beta: wanted \[B, T, HV\], got None",
    ):
        ops.chunk_gated_delta_rule(
            q, [k], v, None, None, torch.tensor(1.0), chunk_size="16", cu_seqlens_cpu=torch.tensor([0, 20])
        )
    with pytest.raises(ValueError, match="cu_seqlens_cpu: wanted cu_seqlens with it"):
        ops.chunk_gated_delta_rule(q, k, v, None, q[..., 0], cu_seqlens_cpu=torch.tensor([0, 20]))


def test_contradicting_options_are_refused_together(device: torch.device) -> None:
    given = make(device, B=1, T=20, K=16, V=16)
    with pytest.raises(ValueError, match=r"allow_neg_eigval.*A_log"):
        ops.chunk_gated_delta_rule(**given, allow_neg_eigval=True, use_gate_in_kernel=True)
    with pytest.raises(layout_tuner.UnsupportedProblemError, match="cp_context"):
        ops.chunk_gated_delta_rule(**given, cp_context=object())


def test_the_chain_runs_each_stage_in_its_stored_variant(device: torch.device) -> None:
    """A stage's own decision names its variant; what is not stored runs its default."""
    spec = lookup("chunk_gated_delta_rule")

    experiment = experiment_for(spec, key_for(spec, spec.every_form[0], B=1, T=20, K=16, V=16), device)
    asked = {}

    def variant_of(stage: object, key: object) -> str | None:
        asked[stage.name] = key  # type: ignore[attr-defined]
        return "sub" if stage.name == "chunk_bwd_dv_local" else None  # type: ignore[attr-defined]

    from layout_tuner.spec.declaration import Problem

    problem = Problem(key=experiment.key, chip=experiment.problem.chip, variant_of=variant_of)
    chain = spec.bind(problem, spec.candidates(experiment.key)[0])
    assert asked["chunk_bwd_dv_local"].form.text == "BT=64,g=float32@STRIDE_HV"
    results = chain(*experiment.call.tensors, None, None, None)
    assert experiment.compare(results).right
