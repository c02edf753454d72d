"""What a hit does not do: files, environment, locks, logs; what never compiles, is looked up or keyed again."""

import importlib
import logging
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import layout_tuner.kernels
import pytest
import torch
import triton
from dv_local import BT, SPEC, arguments, dv_local, key
from launches import Triton, compilable, stubbed
from layout_tuner.cache.places.opening import Store
from layout_tuner.kernels import dv_local as kernels

import layout_tuner.ops
from layout_tuner.config import Config
from layout_tuner.device import interpreter
from layout_tuner.dispatch import router
from layout_tuner.dispatch.router import Router
from layout_tuner.launch import guards
from layout_tuner.launch.prepared import Prepared
from layout_tuner.ops import dv_local as op
from layout_tuner.spec import layouts, registry
from layout_tuner.spec.keys import bucket
from layout_tuner.spec.layouts import Layout

FILES = re.compile(r"^(?:\d+ +)?(open|openat|stat|lstat|newfstatat|statx|access|faccessat2?|readlink|unlink|rename)\(")
HITS = """
import os, sys
import torch, layout_tuner
sys.path.insert(0, {support!r})
from dv_local import arguments, dv_local
from layout_tuner.kernels import dv_local as kernels

class Nothing:
    def __getitem__(self, grid):
        return lambda *arguments, **constants: None

kernels.chunk_bwd_dv_local_full = kernels.chunk_bwd_dv_local_sub = Nothing()
given = arguments(torch.device("cpu"))
packed = given | {{"cu_seqlens": torch.tensor([0, 7, 20])}}
with layout_tuner.enable(cache={cache!r}):
    for each in (given, packed, given, packed):
        dv_local(each)
    os.write(1, b"BEGIN")
    for _ in range(1000):
        dv_local(given)
        dv_local(packed)
    os.write(1, b"END")
"""


class Nothing:
    """A kernel that does nothing."""

    def __getitem__(self, grid: object):
        return lambda *arguments, **constants: None


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches that do nothing."""
    monkeypatch.setattr(kernels, "chunk_bwd_dv_local_full", Nothing())
    monkeypatch.setattr(kernels, "chunk_bwd_dv_local_sub", Nothing())


@pytest.fixture
def enabled(tmp_path: Path) -> Iterator[Router]:
    made = Router(Config(cache={"path": str(tmp_path / "decisions.sqlite")}), on_miss="default")
    ticket = router.push(made)
    yield made
    router.remove(ticket)
    made.close()


# -- files, environment, locks, logs -----------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_thousand_hits_touch_no_file(tmp_path: Path) -> None:
    code = HITS.format(support=str(Path(__file__).parent / "support"), cache=str(tmp_path / "decisions.sqlite"))
    log = tmp_path / "calls"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["strace", "-f", "-o", str(log), "-e", "trace=file,desc", sys.executable, "-c", code],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    if "ptrace" in done.stderr and "BEGIN" not in done.stdout:
        pytest.skip("strace may not trace here")
    assert done.returncode == 0, done.stderr
    lines = log.read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if 'write(1, "BEGIN"' in line)
    end = next(i for i, line in enumerate(lines) if 'write(1, "END"' in line)
    assert any(FILES.match(line) for line in lines[:begin])
    # An allocator that grows maps memory of no file.
    assert [line for line in lines[begin + 1 : end] if "MAP_ANONYMOUS" not in line] == []


class Counting(dict[str, str]):
    """An environment that counts what is asked of it."""

    asked = 0

    def __getitem__(self, name: str) -> str:
        self.asked += 1
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.asked += 1
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.asked += 1
        return super().__contains__(name)


def test_a_thousand_hits_read_no_environment_and_take_no_lock(
    enabled: Router, silent: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    given = arguments(torch.device("cpu"))
    packed = given | {"cu_seqlens": torch.tensor([0, 7, 20])}
    for each in (given, packed, given, packed):
        dv_local(each)
    caplog.clear()
    environment = Counting(os.environ)
    with monkeypatch.context() as patched:
        patched.setattr(os, "environ", environment)
        patched.setattr(enabled, "_lock", None)
        patched.setattr(enabled, "_store", None)
        patched.setattr(router, "_stack_lock", None)
        for _ in range(1000):
            dv_local(given)
            dv_local(packed)
        assert environment.asked == 0
        assert os.environ["PATH"]
        assert environment.asked == 1
        assert enabled._store is None
    assert caplog.records == []


# -- what has to fit ---------------------------------------------------------------------------------------------


def change_shape(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*x.shape[:-1], x.shape[-1] * 2)


def change_memory(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


CHANGES = {
    "shape": change_shape,
    "dims": lambda x: x[0],
    "dtype": lambda x: x.double(),
    "device": lambda x: x.to("meta"),
    "memory": change_memory,
    "strides": lambda x: torch.zeros(*x.shape[:-1], x.shape[-1] * 2)[..., ::2],
    "none": lambda x: None,
    "list": lambda x: x.tolist(),
    "number": lambda x: 1.0,
    "array": lambda x: x.numpy(),
}


def calls() -> dict[str, tuple[torch.Tensor | None, ...]]:
    """Operands and packing of a dense and of a packed call."""
    given = tuple(arguments(torch.device("cpu"), T=20, H=2, HV=4).values())
    return {
        "dense": (*given, None, None),
        "packed": (*given, torch.tensor([0, 7, 20]), torch.tensor([[0, 0], [1, 0]])),
    }


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("form", ["dense", "packed"])
@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("change", CHANGES)
def test_a_call_that_differs_does_not_fit(form: str, place: int, change: str, guarded: bool) -> None:
    *operands, cu_seqlens, chunk_indices = calls()[form]
    whole = [*operands, cu_seqlens, chunk_indices]
    if whole[place] is None:
        pytest.skip("not given")
    if change in ("memory", "strides", "shape") and place >= 4:
        pytest.skip("any number of sequences and chunks is a packing")
    changed = list(whole)
    changed[place] = CHANGES[change](whole[place])
    options = (BT,)

    def split(these: list[Any]) -> tuple[Any, ...]:
        return (*these[:4], None, None), options, *these[4:]

    known = guards.signature(SPEC, *split(whole))
    fits = guards.fitting(SPEC, known, guards.guard(whole[:4]) if guarded else None)
    assert fits(*split(whole))
    assert fits(*split([None if x is None else x.clone() for x in whole]))
    assert not fits(*split(changed))
    assert guards.signature(SPEC, *split(changed)) != known
    assert not fits((*whole[:4], None, torch.zeros(1)), options, *whole[4:])
    assert not fits((*whole[:4], None, None), (BT * 2,), *whole[4:])


@pytest.mark.parametrize("value", [16.0, True, "16", None, [16], torch.tensor(16)], ids=str)
def test_an_option_of_another_type_does_not_fit(value: object) -> None:
    operands = (*calls()["dense"][:4], None, None)
    known = guards.signature(SPEC, operands, (16,), None, None)
    fits = guards.fitting(SPEC, known)
    assert fits(operands, (int("16"),), None, None)
    assert not fits(operands, (value,), None, None)
    assert guards.signature(SPEC, operands, (value,), None, None) != known


@pytest.mark.parametrize("value", [1, True, "1", torch.tensor(1.0), [1.0]], ids=str)
def test_a_number_that_is_no_float_is_not_launched_at_once(value: object) -> None:
    operands = (*calls()["dense"][:4], None, None)
    known = guards.signature(SPEC, operands, (16,), None, None)
    launched = []
    run = guards.running(SPEC, known, None, lambda *given: launched.append(given) or (), spread=True)
    assert run(operands, (16,), (value,), None, None) is None
    assert not launched
    for scale in (None, 0.5):
        assert run(operands, (16,), (scale,), None, None) == ()
        assert launched.pop() == (*operands, scale, None, None)


def test_torchs_guards_refuse_no_call_that_fits() -> None:
    """What they refuse beyond what has to be refused is compared in Python."""
    assert guards.guards_work()
    operands = (*calls()["dense"][:4], None, None)
    check = guards.guard(operands)
    assert check is not None
    q, k, do, g = operands[:4]
    fits = guards.fitting(SPEC, guards.signature(SPEC, operands, (16,), None, None), check)
    odd = g.as_strided(g.shape, (999, 4, 1))  # B == 1
    for other in ((q, q, do, g), (q.clone().requires_grad_(), k, do, g), (q, k, do, odd)):
        assert not check(*other)
        assert fits((*other, None, None), (16,), None, None)
    with torch.inference_mode():
        assert fits(operands, (16,), None, None)
    assert guards.guard((q, q, do, g)) is None
    with torch.no_grad():
        assert check(*operands[:4])


def test_without_torchs_guards_python_compares(enabled: Router, silent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "guards_work", lambda: False)
    given = arguments(torch.device("cpu"))
    for _ in range(3):
        dv_local(given)
    assert enabled.prepared.last[SPEC].fits((*given.values(), None, None), (BT,), None, None)
    with pytest.raises(ValueError, match="k"):
        dv_local(given | {"k": given["k"].double()})


def test_layouts_of_size_one_dimensions_fit_whatever_their_strides() -> None:
    q, k, do, g, *_ = calls()["dense"]
    fits = guards.fitting(SPEC, guards.signature(SPEC, (q, k, do, g, None, None), (BT,), None, None))
    odd = g.as_strided(g.shape, (999, 4, 1))  # B == 1
    assert layouts.arrival(odd) is Layout.STRIDE_HV
    assert fits((q, k, do, odd, None, None), (BT,), None, None)


def test_operands_that_do_not_fit_never_launch(enabled: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[object] = []

    class Recording:
        def __getitem__(self, grid: object):
            return lambda *arguments, **constants: launched.append(arguments)

    monkeypatch.setattr(kernels, "chunk_bwd_dv_local_full", Recording())
    monkeypatch.setattr(kernels, "chunk_bwd_dv_local_sub", Recording())
    given = arguments(torch.device("cpu"))
    for _ in range(3):
        dv_local(given)
    launched.clear()
    for name in given:
        for change in ("dims", "device", "list", "number", "array", *(() if name == "do" else ("shape",))):
            with pytest.raises((TypeError, ValueError)):
                dv_local(given | {name: CHANGES[change](given[name])})
        with pytest.raises(ValueError, match=name):
            dv_local(given | {name: given[name].double()})
    assert launched == []
    dv_local(given)
    assert len(launched) == 1


def test_shapes_in_turn_are_prepared_once_each(enabled: Router, silent: None) -> None:
    lengths = [arguments(torch.device("cpu"), T=T) for T in (20, 30, 40)]
    for given in lengths * 4:
        dv_local(given)
    assert len(enabled.prepared) == 3
    assert len(enabled.prepared.by_shape) == 3
    enabled.prepared.clear()
    assert not enabled.prepared.last
    assert not enabled.prepared.by_shape


# -- counts ------------------------------------------------------------------------------------------------------


def packed(T: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A packed batch of T tokens, cut anywhere."""
    given = arguments(torch.device("cpu"), T=T)
    cuts = torch.randint(0, T + 1, (int(torch.randint(1, 6, (), generator=generator)),), generator=generator)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), cuts.sort().values, torch.tensor([T])])
    return given | {"cu_seqlens": starts}


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[Triton]:
    """CPU tensors on a stubbed Triton 3.6 for CUDA."""
    if triton.__version__.rpartition(".")[0] != "3.6" or torch.cuda.is_available():
        pytest.skip("stands on Triton 3.6 and on no GPU")
    monkeypatch.setattr(interpreter, "require_running", lambda *_: None)
    for info in pkgutil.iter_modules(layout_tuner.kernels.__path__):
        module = importlib.import_module(f"layout_tuner.kernels.{info.name}")
        for name, kernel in list(vars(module).items()):
            if interpreter.interpreted(kernel):
                monkeypatch.setattr(module, name, compilable(kernel))
    with stubbed() as made:
        yield made


def test_a_thousand_lengths_make_a_key_a_bucket_and_compile_nothing_new(
    enabled: Router, on_triton: Triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups: list[object] = []
    bindings: list[Prepared] = []
    stored = Store.lookup
    monkeypatch.setattr(Store, "lookup", lambda *asked: lookups.append(asked[1]) or stored(*asked))
    real = op.SPEC.bind
    monkeypatch.setitem(SPEC.__dict__, "bind", lambda *given: bindings.append(given) or real(*given))
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randperm(4000, generator=generator)[:1000].add(1).tolist()
    for T in lengths:
        dv_local(packed(T, generator))
    buckets = {bucket(T, enabled.config.keys.bucket) for T in lengths if T > 1}
    assert len(on_triton.launches) == 1000
    assert len(enabled.choices) <= len(buckets)
    assert len(lookups) <= len(buckets)
    assert len(bindings) <= len(buckets) + 1
    assert len(on_triton.compiles) == 1
    assert sum(launch.triton for launch in on_triton.launches) == 1
    for T in lengths[:50]:  # cut in another way, a hit
        before = len(enabled.prepared)
        dv_local(packed(T, generator))
        assert len(enabled.prepared) == before


def chain(T: int, starts: torch.Tensor | None = None) -> list[torch.Tensor]:
    """A step of the chain; its gradients."""
    leaves = [torch.zeros(1, T, *shape, requires_grad=True) for shape in ((1, 16), (1, 16), (2, 16), (2,), (2,))]
    o, _ = layout_tuner.ops.chunk_gated_delta_rule(*leaves, cu_seqlens=starts, chunk_size=16)
    return list(torch.autograd.grad(o, leaves, torch.zeros(o.shape)))


def test_a_step_of_the_chain_is_looked_up_once(
    enabled: Router, on_triton: Triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        chain(40)
    looked_up: list[str] = []
    for name in ("call_by", "call"):
        entry = getattr(router, name)
        monkeypatch.setattr(
            router, name, lambda spec, *given, entry=entry: looked_up.append(spec.name) or entry(spec, *given)
        )
    for name in ("lookup", "run", "resolve", "choose", "stored_variant"):
        monkeypatch.setattr(enabled, name, lambda *_: pytest.fail("missed"))
    compiles = len(on_triton.compiles)
    on_triton.launches.clear()
    chain(40)
    assert looked_up == ["chunk_gated_delta_rule"]
    assert len(on_triton.compiles) == compiles
    assert not any(launch.triton for launch in on_triton.launches)
    assert len(on_triton.launches) <= 13


def test_a_thousand_lengths_of_the_chain(enabled: Router, on_triton: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    lookups: list[object] = []
    stored = Store.lookup
    monkeypatch.setattr(Store, "lookup", lambda *asked: lookups.append(asked[1]) or stored(*asked))
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randperm(2000, generator=generator)[:1000].add(2).tolist()
    compiles = {}
    for T in lengths:
        chain(T, packed(T, generator)["cu_seqlens"])
        compiles.setdefault(bucket(T, enabled.config.keys.bucket), len(on_triton.compiles))
    assert sorted(compiles, key=compiles.get)[0] == bucket(lengths[0], enabled.config.keys.bucket)
    assert len(on_triton.compiles) == len(set(on_triton.compiles)) == next(iter(compiles.values()))
    assert {key.op for key, _ in enabled.choices} == {"chunk_gated_delta_rule"}
    assert len(enabled.choices) <= len(compiles)
    assert len(lookups) == len(set(lookups))


def test_an_op_made_of_others_asks_once_a_bucket(enabled: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    lookups: list[object] = []
    stored = Store.lookup
    monkeypatch.setattr(Store, "lookup", lambda *asked: lookups.append(asked[1]) or stored(*asked))
    monkeypatch.setattr(enabled, "tuning", True)
    device = torch.device("cpu")
    for T in range(1025, 1200):
        assert enabled.stored_variant(SPEC, key(T=T, varlen=True), device) is None
    assert len(lookups) == len(set(lookups)) <= 2


@pytest.mark.parametrize("forked", [False, True])
def test_a_fork_while_a_thread_tunes(enabled: Router, silent: None, forked: bool) -> None:
    """A child whose parent held a lock in another thread still decides."""
    holding, release = threading.Event(), threading.Event()

    def hold() -> None:
        with enabled._lock:
            holding.set()
            release.wait(20)

    thread = threading.Thread(target=hold)
    if forked:
        thread.start()
        assert holding.wait(5)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            threading.Timer(10, os._exit, (2,)).start()
            dv_local(arguments(torch.device("cpu"), T=33))
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    release.set()
    if forked:
        thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


def test_every_op_has_one_row_counts_declared() -> None:
    """An op with a state for each sequence is checked for the number of sequences at every call."""
    found = {name for name in registry.names() if guards.counts_matter(registry.lookup(name))}
    assert "chunk_bwd_dv_local" not in found
    assert {"chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd_h", "chunk_fwd_o"} <= found
