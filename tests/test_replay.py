"""Prepared lists: the bits that the stages give, from the same launches, with less around them and no more memory."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import launches
import pytest
import torch
import toy_chain
import toys
import triton
from hardware import INTERPRETED
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import Triton, compilable, shifted, stubbed
from torch.utils._python_dispatch import TorchDispatchMode

from layout_tuner import ops
from layout_tuner.device import interpreter
from layout_tuner.dispatch import router
from layout_tuner.launch import launcher, replay
from layout_tuner.launch.record import Memory
from layout_tuner.launch.workspaces import workspaces
from layout_tuner.spec.layouts import Layout, relayout

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "i32": torch.int32, "i64": torch.int64}
LAYER = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_gate_in_kernel": True}


def at(address: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that begins at an address."""
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)


@dataclass
class Interpreted:
    """Triton 3.6 for CUDA down to its launcher, behind which the interpreter runs what is launched at the addresses
    that the launcher was handed.
    """

    kernels: dict[int, Any] = field(default_factory=dict)
    bound: int = 0

    def jitted(self, kernel: Any) -> Any:
        """The kernel as it is made for a device."""
        made = kernel if hasattr(kernel, "interpreted") else self.kernels.get(id(kernel))
        if made is None:
            made = self.kernels[id(kernel)] = compilable(kernel)
            made.interpreted = kernel
        return made

    def run(self, compiled: Any, grid: int, arguments: tuple[Any, ...]) -> None:
        """What a device does."""
        types = list(compiled.signature.values())
        placed = [
            at(x, TYPES[kind[1:]]) if kind.startswith("*") and isinstance(x, int) else x
            for x, kind in zip(arguments, types, strict=True)
        ]
        with interpreter.interpreter_lock:
            compiled.kernel.interpreted[(grid,)](*placed)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interpreted]:
    if triton.__version__.rpartition(".")[0] != "3.6" or not INTERPRETED:
        pytest.skip("stands on Triton 3.6 and on no device")
    made = Interpreted()
    bind, launch, compiled, call = (
        launcher.bind,
        launches.Launcher.launch,
        Triton.compile,
        launcher.BoundKernel.__call__,
    )

    def compile_for(self: Triton, kernel: Any, *rest: Any) -> Any:
        done = compiled(self, kernel, *rest)
        done.kernel = kernel
        return done

    def launch_for(self: launches.Launcher, *arguments: Any) -> None:
        launch(self, *arguments)
        names = self.compiled.kernel.arg_names
        assert len(arguments[13:]) == len(names)
        made.run(self.compiled, arguments[0], arguments[13:])

    def counted(self: launcher.BoundKernel, *arguments: Any) -> None:
        made.bound += not launcher.intercepted()
        call(self, *arguments)

    monkeypatch.setattr(launcher, "bind", lambda kernel, **constants: bind(made.jitted(kernel), **constants))
    monkeypatch.setattr(launches.Launcher, "launch", launch_for)
    monkeypatch.setattr(Triton, "compile", compile_for)
    monkeypatch.setattr(launcher.BoundKernel, "__call__", counted)
    monkeypatch.setattr(interpreter, "require_running", lambda *_: None)
    monkeypatch.setattr(interpreter, "interpreting", lambda: False)
    torch.use_deterministic_algorithms(True)  # new tensors hold NaN
    with stubbed():
        yield made
    torch.use_deterministic_algorithms(False)


def leaves(seed: int, *, turned: bool = False, layer: bool = False) -> list[torch.Tensor]:
    """q, k, v, g and beta."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, 16), (1, 16), (2, 16), (2,), (2,))
    q, k, v, g, beta = (torch.randn(1, 20, *shape, generator=generator) for shape in shapes)
    if not layer:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        g, beta = g.abs().neg(), beta.sigmoid()
    if turned:
        g, beta = (relayout(x, Layout.T_CONTIG) for x in (g, beta))
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


def step(given: list[torch.Tensor], **more: Any) -> list[torch.Tensor | None]:
    """Outputs and gradients, in memory of their own."""
    o, state = ops.chunk_gated_delta_rule(*given, chunk_size=16, **more)
    results = [o] if state is None else [o, state]
    weights = [torch.linspace(-1, 1, x.numel()).view(x.shape) for x in results]
    wanted = [x for x in (*given, *more.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    found = torch.autograd.grad(results, wanted, weights, allow_unused=True)
    return [None if x is None else x.detach().clone() for x in (*results, *found)]


def same(one: list[torch.Tensor | None], two: list[torch.Tensor | None]) -> bool:
    return len(one) == len(two) and all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one, two, strict=True)
    )


def forms() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """How leaves are made, and the arguments beside them."""
    state = torch.randn(1, 2, 16, 16).requires_grad_()
    rates = {"A_log": torch.zeros(2).requires_grad_(), "dt_bias": torch.ones(2).requires_grad_()}
    return {
        "training": ({}, {}),
        "states": ({"turned": True}, {"scale": 0.7, "initial_state": state, "output_final_state": True}),
        "layer": ({"layer": True}, LAYER | rates),
    }


@pytest.mark.parametrize(
    "form", ["training", pytest.param("states", marks=pytest.mark.slow), pytest.param("layer", marks=pytest.mark.slow)]
)
def test_a_list_gives_the_bits_that_the_stages_give(
    interpreted: Interpreted, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, more = forms()[form]
    with monkeypatch.context() as patched:
        patched.setattr(replay, "prepare", lambda *_: None)
        wanted = step(leaves(2, **made), **more)
    router.current().prepared.clear()
    for _ in range(2):
        step(leaves(1, **made), **more)
    interpreted.bound = 0
    assert same(step(leaves(2, **made), **more), wanted)
    assert interpreted.bound == 0, "launched stage by stage"
    assert not any(torch.isnan(x).any() for x in wanted if x is not None)


def test_only_some_gradients(interpreted: Interpreted) -> None:
    """What is wanted is part of the pattern."""

    def some(*names: str) -> list[torch.Tensor | None]:
        found = [x if name in names else x.detach() for name, x in zip("qkvgb", leaves(3), strict=True)]
        return step(found)

    wanted = {names: some(*names) for names in ("q", "gb", "v")}
    interpreted.bound = 0
    for names, results in wanted.items():
        assert same(some(*names), results)
    assert interpreted.bound == 0


def test_a_list_of_any_chain(interpreted: Interpreted) -> None:
    with toys.registered():
        given = toys.leaves(torch.device("cpu"))
        wanted = toys.step(toy_chain.toy_chain, given)
        assert interpreted.bound == 4
        toys.step(toy_chain.toy_chain, given)
        interpreted.bound = 0
        assert same(toys.step(toy_chain.toy_chain, given), wanted)
        assert interpreted.bound == 0, "launched stage by stage"


# -- when no list runs -------------------------------------------------------------------------------------------


def test_what_is_not_aligned_is_launched_stage_by_stage(interpreted: Interpreted) -> None:
    given = leaves(1)
    wanted = step(given)
    step(given)
    for i in (0, 3):
        off = [shifted(x.detach()).requires_grad_() if i == j else x for j, x in enumerate(given)]
        interpreted.bound = 0
        assert same(step(off), wanted)
        assert interpreted.bound
    interpreted.bound = 0
    assert same(step(given), wanted)
    assert interpreted.bound == 0


def test_a_gradient_of_another_form_fits_no_list(interpreted: Interpreted) -> None:
    """Strides of the incoming gradient do not matter, and saved-tensor hooks may hand back another layout."""
    given = leaves(1, turned=True)
    wanted = step(given)
    step(given)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.contiguous().clone(), lambda x: x):
        interpreted.bound = 0
        assert same(step(given), wanted)
        assert interpreted.bound
    o, _ = ops.chunk_gated_delta_rule(*given, chunk_size=16)
    of_sum = torch.autograd.grad(o.sum(), given)
    o, _ = ops.chunk_gated_delta_rule(*given, chunk_size=16)
    assert same(list(of_sum), list(torch.autograd.grad(o, given, torch.ones_like(o))))


def test_what_is_handed_back_may_begin_anywhere(interpreted: Interpreted) -> None:
    """As an offloading buffer does it: all that is saved comes back as a view of one storage, in another layout."""
    given = leaves(1, turned=True)
    wanted = step(given)
    for _ in range(3):
        buffer, used = torch.empty(1 << 18), 64

        def pack(x: torch.Tensor, buffer: torch.Tensor = buffer) -> torch.Tensor:
            nonlocal used
            place = buffer[used : used + x.numel()].view(x.shape)
            used += -(-x.numel() // 16) * 16
            return place.copy_(x)

        interpreted.bound = 0
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            assert same(step(given), wanted)
    assert interpreted.bound == 0  # from lists, at last


def test_profilers_hooks_see_every_launch(interpreted: Interpreted) -> None:
    from triton import knobs

    given = leaves(1)
    for _ in range(2):
        wanted = step(given)
    seen: list[str] = []

    def hook(metadata: Any) -> None:
        seen.append("launch")

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        interpreted.bound = 0
        assert same(step(given), wanted)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert interpreted.bound == 12
    interpreted.bound = 0
    assert same(step(given), wanted)
    assert interpreted.bound == 0


def test_recorded_launches_and_watched_operators_are_the_stages(interpreted: Interpreted) -> None:
    given = leaves(1)
    for _ in range(2):
        step(given)
    with launcher.recording() as records:
        ops.chunk_gated_delta_rule(*given, chunk_size=16)
    assert len(records) == 5

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    interpreted.bound = 0
    with Watching():
        step(given)
    assert interpreted.bound == 12


def test_packed_batches_run_no_list(interpreted: Interpreted) -> None:
    given = leaves(1)
    starts = torch.tensor([0, 7, 20])
    for _ in range(3):
        interpreted.bound = 0
        step(given, cu_seqlens=starts)
        assert interpreted.bound == 12


def test_a_function_that_no_list_does_runs_as_it_is(interpreted: Interpreted) -> None:
    def function(tensors: replay.Tensors, name: str) -> replay.Tensors:
        (x,) = tensors
        assert x is not None
        if name == "zeros":
            return (torch.zeros(x.shape, device=x.device),)
        total = torch.empty_like(x).copy_(x)
        total.add_(x, alpha=2)
        return total.sum(0), x, None, total[1:]

    made = replay.Replayed(function)
    x = torch.randn(4, 4)
    for _ in range(5):
        assert made((x,), "zeros")[0] is not None
        summed, given_back, nothing, part = made((x,), "works")
        assert given_back is x
        assert nothing is None
        assert torch.equal(part, (x + x * 2)[1:])
        assert torch.equal(summed, (x + x * 2).sum(0))
    assert list(made.newest) == [("works",)]


# -- what lists cost ---------------------------------------------------------------------------------------------


def test_a_list_is_made_at_the_second_call_and_only_for_so_many_patterns(
    interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[object] = []
    prepare = replay.prepare
    monkeypatch.setattr(replay, "prepare", lambda *asked: prepared.append(asked) or prepare(*asked))
    made = replay.Replayed(lambda tensors: (torch.empty_like(tensors[0]).copy_(tensors[0]),))
    for calls in range(5):
        made((torch.ones(3),))
        assert len(prepared) == min(calls, 1)
    for size in range(replay.MOST_PATTERNS * 2):
        for _ in range(2):
            made((torch.ones(size + 1),))
    assert len(made.seen) == replay.MOST_PATTERNS
    assert len(prepared) == replay.MOST_PATTERNS


def test_launches_and_allocations_of_a_step(interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward: gate, A, output, two workspaces. Backward: five gradients, three tensors that torch adds, workspaces."""
    allocated: list[object] = []
    allocate = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *a, **named: allocated.append(a) or allocate(*a, **named))
    ran: list[int] = []
    run = interpreted.run
    monkeypatch.setattr(
        interpreted, "run", lambda compiled, grid, arguments: ran.append(grid) or run(compiled, grid, arguments)
    )
    given = leaves(1)
    for _ in range(2):
        step(given)
    allocated.clear()
    ran.clear()
    o, _ = ops.chunk_gated_delta_rule(*given, chunk_size=16)
    assert (len(ran), len(allocated)) == (5, 5)
    torch.autograd.grad(o, given, torch.ones_like(o))
    assert len(ran) == 12
    assert len(allocated) <= 16


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(0, 3), st.booleans()), min_size=1, max_size=9)
)
def test_workspaces_hold_apart_what_is_in_use_and_raise_no_peak(drawn: list[tuple[int, int, int, bool]]) -> None:
    whole: Any = None
    found = [
        Memory(size * 512, whole, first=first, last=first + length, name=f"m{i}")
        for i, (size, first, length, _) in enumerate(drawn)
    ]
    owned = [memory for memory, (*_, own) in zip(found, drawn, strict=True) if own]
    addressed = [memory for memory in found if memory not in owned]
    spaces = workspaces(addressed, owned, 10)
    assert sorted(m.name for space in spaces for m in space.offsets) == sorted(m.name for m in addressed)
    for space in spaces:
        for one, start in space.offsets.items():
            assert 0 <= start <= space.bytes - one.bytes
            for other, at_other in space.offsets.items():
                together = one is not other and one.first <= other.last and other.first <= one.last
                assert not together or start + one.bytes <= at_other or at_other + other.bytes <= start

    def most(held: list[Any]) -> int:
        return max(sum(x.bytes for x in held if x.first <= step <= x.last) for step in range(10))

    assert most([*spaces, *owned]) <= most(found)
