"""flash-linear-attention's calls inside and outside `enable`; without that library, what needs it is skipped.

On a CPU the library's own kernels do not run, so every call that succeeds there was served here.
"""

import importlib.util
import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from timers import set_times

import layout_tuner
from layout_tuner import errors, integrations, reference
from layout_tuner.dispatch import router
from layout_tuner.integrations import fla, rivalry, takeover
from layout_tuner.ops.gated_delta_rule.spec import SPEC
from layout_tuner.spec import declaration, keys, registry
from layout_tuner.tuning import inputs
from layout_tuner.tuning.checking import as_tuple
from layout_tuner.tuning.experiment import Experiment

INSTALLED = importlib.util.find_spec("fla") is not None
needs_fla = pytest.mark.skipif(not INSTALLED, reason="flash-linear-attention is not installed: pip install -e '.[fla]'")

SIZES = dict(B=2, T=20, H=1, HV=2, K=16, V=16)
KERNEL_OPS = sorted(set(fla.HOMES) - {"chunk_gated_delta_rule"})


@pytest.fixture(scope="module")
def library() -> SimpleNamespace:
    """The library: its backends module, and its functions by name."""
    with warnings.catch_warnings():  # it warns of what it finds missing on a CPU
        warnings.simplefilter("ignore")
        from fla import backends
        from fla.ops.common import chunk_delta_h, chunk_o, chunk_scaled_dot_kkt  # noqa: F401
        from fla.ops.gated_delta_rule import chunk, chunk_fwd, gate, wy_fast  # noqa: F401
        from fla.ops.utils import cumsum, solve_tril  # noqa: F401
    functions = {op: getattr(sys.modules[module], op) for op, (module, _) in fla.HOMES.items()}
    return SimpleNamespace(backends=backends, **functions)


@pytest.fixture(autouse=True)
def _counts_from_zero() -> Iterator[None]:
    """No count of an earlier test."""
    for counter in (takeover._served, takeover._yielded, takeover._fallthroughs):
        counter.clear()
    yield
    for op in fla.HOMES:
        fla.takeover(op)._rivalry = None


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> router.Router:
    """An entry that serves the library, whether it is installed or not."""
    made = router.Router(layout_tuner.Config())
    takeover.serve(made)
    router.push(made)
    return made


def layer_arguments(device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, object]:
    """What a GatedDeltaNet layer passes: gate, sigmoid and normalisation inside, states `[V, K]`."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    B, T, H, HV, K, V = SIZES.values()
    projection = normal(B, T, 2 * H * K + HV * V)  # q, k and v are slices of it, as the layer has them
    q, k, v = projection.split([H * K, H * K, HV * V], dim=-1)
    return dict(
        q=q.view(B, T, H, K),
        k=k.view(B, T, H, K),
        v=v.view(B, T, HV, V),
        g=normal(B, T, HV),
        beta=normal(B, T, HV),
        initial_state=torch.randn(B, HV, V, K, generator=generator).to(device) / 10,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        state_v_first=True,
        use_gate_in_kernel=True,
        A_log=torch.nn.Parameter(torch.rand(HV, generator=generator).to(device)),
        dt_bias=torch.nn.Parameter(torch.rand(HV, generator=generator).to(device)),
        chunk_size=16,
    )


DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def with_leaves(given: dict[str, object]) -> dict[str, object]:
    """The same arguments, those that have a gradient as leaves."""
    leaves = {name: given[name].detach().requires_grad_() for name in DIFFERENTIABLE}  # type: ignore[attr-defined]
    return given | leaves


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal but for rounding, on a CPU in fp32."""
    torch.testing.assert_close(got.float(), wanted.float(), rtol=2e-4, atol=2e-5)


def kernel_call(
    op: str, device: torch.device, form: str = "", varlen: bool = False
) -> tuple[declaration.OpSpec, keys.Key, dict[str, object]]:
    """Small arguments of a kernel op by name, as the library's function takes them."""
    spec = registry.lookup(op)
    wanted = keys.Form.parse(form) if form else spec.standard_forms["training"].changed(BT="16")
    sizes = SIZES | dict(B=1, T=40) if varlen else SIZES
    key = spec.key_for(sizes, dtype="float32", form=wanted, varlen=varlen)
    call = inputs.synthesize(spec, key, device)
    named = spec.arguments(call)
    if "output_dtype" in named:
        named["output_dtype"] = torch.float32
    if op == "gdn_gate_bwd":
        named.pop("cu_seqlens")
    return spec, key, named


# -- the library's functions -----------------------------------------------------------------------------------


@needs_fla
def test_the_whole_op_is_served_with_what_a_layer_passes(library: SimpleNamespace, device: torch.device) -> None:
    given = with_leaves(layer_arguments(device))
    with layout_tuner.enable(on_miss="default"):
        o, state = library.chunk_gated_delta_rule(**given)
    assert fla.served() == {"chunk_gated_delta_rule": 1}

    do, dht = torch.randn_like(o), torch.randn_like(state)
    torch.autograd.backward([o, state], [do, dht])  # outside the scope

    detached = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    wanted_o, wanted_state = reference.chunk_gated_delta_rule(**detached)
    close(o, wanted_o)
    close(state, wanted_state)
    detached.pop("output_final_state")
    wanted = reference.chunk_gated_delta_rule_bwd(**detached, do=do, dht=dht)
    for name, gradient in zip(DIFFERENTIABLE, ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0")):
        close(given[name].grad, getattr(wanted, gradient))
    assert fla.served() == {"chunk_gated_delta_rule": 1}, "the backward is the chain's, not the library's"
    assert not fla.fallthroughs()


@needs_fla
def test_a_call_may_leave_flags_open_and_pass_arguments_by_position(
    library: SimpleNamespace, device: torch.device
) -> None:
    q, k = torch.nn.functional.normalize(torch.randn(2, 2, 20, 1, 16, device=device), dim=-1)
    v, beta = torch.randn(2, 20, 2, 16, device=device), torch.rand(2, 20, 2, device=device)
    g = -torch.rand(2, 20, 2, device=device)
    with layout_tuner.enable(on_miss="default"), torch.no_grad():
        o, state = library.chunk_gated_delta_rule(q, k, v, g, beta, None, None, None, chunk_size=16)
    assert state is None
    close(o, reference.chunk_gated_delta_rule(q, k, v, g, beta, chunk_size=16)[0])


@needs_fla
def test_packed_batches_are_served(library: SimpleNamespace, device: torch.device) -> None:
    q, k = torch.nn.functional.normalize(torch.randn(2, 1, 25, 1, 16, device=device), dim=-1)
    v, beta = torch.randn(1, 25, 2, 16, device=device), torch.rand(1, 25, 2, device=device)
    g = -torch.rand(1, 25, 2, device=device)
    for ends in ([0, 7, 7, 25], [0, 20, 25]):
        cu_seqlens = torch.tensor(ends, device=device)
        with layout_tuner.enable(on_miss="default"), torch.no_grad():
            o, state = library.chunk_gated_delta_rule(
                q, k, v, g, beta, cu_seqlens=cu_seqlens, output_final_state=True, chunk_size=16
            )
        wanted = reference.chunk_gated_delta_rule(
            q, k, v, g, beta, cu_seqlens=cu_seqlens, output_final_state=True, chunk_size=16
        )
        close(o, wanted[0])
        close(state, wanted[1])


@needs_fla
@pytest.mark.parametrize("op", KERNEL_OPS)
def test_kernel_entry_points_are_served(op: str, library: SimpleNamespace, device: torch.device) -> None:
    spec, key, named = kernel_call(op, device)
    with layout_tuner.enable(on_miss="default"):
        got = getattr(library, op)(**named)
    assert fla.served() == {op: 1}
    check = Experiment(spec, key, device).compare(as_tuple(got))
    assert check.right, check


# The op, a form, whether packed, and what else these layers pass.
AS_OTHERS_CALL = {
    "KDA's states": (
        "chunk_gated_delta_rule_fwd_h",
        "BT=16,gk=float32@STRIDE_HV,initial_state=float32,output_final_state=1,state_v_first=1",
        True,
    ),
    "KDA's gradients of states": (
        "chunk_gated_delta_rule_bwd_dhu",
        "BT=16,dht=float32,gk=float32@STRIDE_HV,h0=float32,state_v_first=1",
        True,
    ),
    "DeltaNet's states": ("chunk_gated_delta_rule_fwd_h", "BT=16,output_final_state=1", False),
    "DeltaNet's output": ("chunk_fwd_o", "BT=16", False),
    "DeltaNet's gradients": ("chunk_bwd_dqkwg", "BT=16,dv=1,w=1", False),
    "RetNet's output": ("chunk_fwd_o", "BT=16,g_gamma=float32", False),
    "Mamba-2's gradients": ("chunk_bwd_dqkwg", "BT=16,g=float32@STRIDE_HV", True),
}


@needs_fla
@pytest.mark.parametrize("case", AS_OTHERS_CALL)
def test_calls_as_other_layers_make_them_are_served(case: str, library: SimpleNamespace, device: torch.device) -> None:
    op, form, varlen = AS_OTHERS_CALL[case]
    spec, key, named = kernel_call(op, device, form, varlen)
    if varlen and op != "chunk_bwd_dqkwg":
        named["chunk_indices"] = reference.prepare_chunk_indices(named["cu_seqlens"], 16)
        named["chunk_offsets"] = reference.prepare_chunk_offsets(named["cu_seqlens"], 16)
    if op == "chunk_gated_delta_rule_fwd_h" and varlen:
        named["cu_seqlens_cpu"] = named["cu_seqlens"].cpu()  # type: ignore[attr-defined]
    if op == "chunk_gated_delta_rule_bwd_dhu":
        named["use_graph"] = False
    with layout_tuner.enable(on_miss="default"):
        got = getattr(library, op)(**named)
    assert fla.served() == {op: 1}
    check = Experiment(spec, key, device).compare(as_tuple(got))
    assert check.right, check


@needs_fla
@pytest.mark.parametrize("reverse", [False, True])
def test_a_gate_for_each_channel_is_summed_here(reverse: bool, library: SimpleNamespace, device: torch.device) -> None:
    g = -torch.rand(2, 20, 2, 24, device=device)  # as GLA and KDA have it
    with layout_tuner.enable(on_miss="default"):
        got = library.chunk_local_cumsum(g, 16, reverse, 1.25, use_graph=False)
    assert fla.served() == {"chunk_local_cumsum": 1}
    close(got, reference.chunk_local_cumsum(g, 16, reverse, 1.25))


@needs_fla
def test_autocast_does_not_change_the_dtype_the_library_would_compute_in(
    library: SimpleNamespace, device: torch.device
) -> None:
    given = layer_arguments(device)
    with layout_tuner.enable(on_miss="default"), torch.no_grad():
        with torch.autocast(device.type, dtype=torch.bfloat16):
            o, _ = library.chunk_gated_delta_rule(**given)
        plain, _ = library.chunk_gated_delta_rule(**given)
    assert o.dtype == torch.float32
    assert torch.equal(o, plain)


@needs_fla
def test_registered_once_and_asked_first(library: SimpleNamespace, device: torch.device) -> None:
    asked: list[str] = []

    class Ascend(library.backends.TritonAscendBackend):
        backend_type = "recording"

        @classmethod
        def is_available(cls) -> bool:
            asked.append("recording")
            return False

    library.backends.register("common")(Ascend)
    for _ in range(3):
        with layout_tuner.enable(on_miss="default"):
            library.chunk_bwd_dv_local(**kernel_call("chunk_bwd_dv_local", device)[2])
    assert fla.served() == {"chunk_bwd_dv_local": 3}
    assert not asked
    assert fla._watch not in sys.meta_path


# -- scopes ----------------------------------------------------------------------------------------------------


def served_by(library: SimpleNamespace, device: torch.device) -> bool:
    """Whether a call of the library is served now."""
    before = fla.served().get("solve_tril", 0)
    A = torch.zeros(1, 16, 1, 16, device=device)
    try:
        library.solve_tril(A)
    except RuntimeError:
        if device.type != "cpu":
            raise
    return fla.served().get("solve_tril", 0) > before


@needs_fla
def test_only_inside_scopes(library: SimpleNamespace, device: torch.device) -> None:
    assert not served_by(library, device)
    first = layout_tuner.enable(on_miss="default")
    second = layout_tuner.enable(on_miss="default")
    with layout_tuner.enable(on_miss="default", fla=False):
        assert not served_by(library, device), "the newest entry leaves the library alone"
    assert served_by(library, device)
    first.__exit__(None, None, None)
    assert served_by(library, device)
    second.__exit__(None, None, None)
    assert not served_by(library, device)

    layout_tuner.enable(on_miss="default")
    layout_tuner.enable(on_miss="default")
    layout_tuner.disable()
    assert not served_by(library, device)

    decorated = layout_tuner.enable(on_miss="default")(served_by)
    assert not served_by(library, device)
    assert decorated(library, device)
    assert not served_by(library, device)


@needs_fla
def test_every_thread_is_served(library: SimpleNamespace, device: torch.device) -> None:
    found: list[bool] = []
    one_at_a_time = threading.Lock()  # Triton's interpreter is no place for two threads

    def work() -> None:
        with one_at_a_time:
            found.append(served_by(library, device))

    with layout_tuner.enable(on_miss="default"):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [True] * 4
    assert fla.served() == {"solve_tril": 4}


def test_scopes_of_many_threads_leave_nothing_behind() -> None:
    if INSTALLED:
        fla.connect()
    inside: list[bool] = []
    faults: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(10):
                first = layout_tuner.enable(on_miss="default")
                second = layout_tuner.enable(on_miss="default")
                inside.append(fla.available())
                for scope in (first, second) if (number + turn) % 2 else (second, first):
                    scope.__exit__(None, None, None)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert len(inside) == 60
    assert all(inside) is INSTALLED
    assert not fla.available()
    assert not layout_tuner.is_enabled()


def test_standing_aside_is_for_one_thread(entry: router.Router) -> None:
    seen: list[bool] = []
    with fla.aside():
        thread = threading.Thread(target=lambda: seen.append(fla.available()))
        thread.start()
        thread.join()
        with fla.aside():
            pass
        seen.append(fla.available())
    seen.append(fla.available())
    assert seen == [True, False, True]


@needs_fla
@pytest.mark.slow
def test_the_librarys_own_switch_wins() -> None:
    code = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import logging, torch
logging.basicConfig()
import layout_tuner
from layout_tuner.integrations import fla
from fla.ops.utils import solve_tril
with layout_tuner.enable(on_miss="default"):
    try:
        solve_tril(torch.zeros(1, 16, 1, 16))
    except Exception:
        pass  # its own kernel, which may not run on a CPU
assert not fla.served()
"""
    switched = {**os.environ, "FLA_DISABLE_BACKEND_DISPATCH": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300, env=switched
    )
    assert done.returncode == 0, done.stderr
    assert "FLA_DISABLE_BACKEND_DISPATCH=1: none of its calls is taken over" in done.stderr


@needs_fla
@pytest.mark.slow
def test_enabled_before_the_library_is_imported() -> None:
    code = """
import os, sys
import torch
from layout_tuner.device import driver
device = driver.resolve()
if device.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
import layout_tuner
with layout_tuner.enable(on_miss="default"):
    assert "fla" not in sys.modules, "enabling imports nothing"
    from fla.ops.utils import solve_tril
    X = solve_tril(torch.zeros(1, 16, 1, 16, device=device))
from layout_tuner.integrations import fla
assert fla.served() == {"solve_tril": 1}
assert not fla._pending and fla._watch not in sys.meta_path
assert torch.equal(X[0, :, 0].cpu(), torch.eye(16))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300)


# -- what is left to the library -------------------------------------------------------------------------------


class Mine(torch.Tensor):
    """A tensor that is more than its values."""


REFUSED = {
    "K above 256": (dict(K=272), {}, "K=272"),
    "a chunk size no kernel has": ({}, dict(chunk_size=128), "chunk_size=128"),
    "context parallelism": ({}, dict(cp_context=object()), "cp_context"),
    "an argument ours does not have": ({}, dict(use_graph=True), "use_graph: not an argument here"),
    "a scale on the device": ({}, dict(scale=torch.tensor(0.5)), "scale: wanted a number"),
    "mixed dtypes": ({}, dict(k=torch.zeros(2, 20, 1, 16, dtype=torch.float16)), "k: wanted float32 as q, got float16"),
    "fp64": ({}, dict(g=torch.zeros(2, 20, 2, dtype=torch.float64)), "got float64"),
    "something that is no tensor": ({}, dict(v=[1.0]), "v: wanted a tensor, got list"),
    "a kind of tensor of its own": ({}, dict(v=Mine(torch.zeros(2, 20, 2, 16))), "got a Mine"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_that_no_kernel_serves_is_left_with_its_reason(
    case: str, entry: router.Router, caplog: pytest.LogCaptureFixture
) -> None:
    sizes, changed, reason = REFUSED[case]
    B, T, H, HV, K, V = (SIZES | sizes).values()
    q, k = torch.randn(2, B, T, H, K).unbind()
    given = dict(q=q, k=k, v=torch.zeros(B, T, HV, V), g=torch.zeros(B, T, HV), beta=torch.zeros(B, T, HV)) | changed
    taken_over = fla.takeover("chunk_gated_delta_rule")
    with caplog.at_level(logging.WARNING):
        answers = [taken_over.verify(**given) for _ in range(3)]
    assert all(not accepted and reason in said for accepted, said in answers), answers
    ((op, counted), number), *others = fla.fallthroughs().items()
    assert (op, number, others) == ("chunk_gated_delta_rule", 3, [])
    assert reason in counted
    assert sum(reason in record.getMessage() for record in caplog.records) == 1, "logged once"
    assert not fla.served()


def test_any_real_number_is_a_scale(entry: router.Router, device: torch.device) -> None:
    named = kernel_call("chunk_fwd_o", device)[2]
    for scale in (1, 0.25, numpy.float32(0.25), Fraction(1, 4), None):
        accepted, reason = fla.takeover("chunk_fwd_o").verify(**named | {"scale": scale})
        assert accepted, (scale, reason)


def test_two_gates_at_once_are_left_to_the_library(entry: router.Router, device: torch.device) -> None:
    named = kernel_call("chunk_fwd_o", device)[2] | {"g_gamma": torch.zeros(2, device=device)}
    accepted, reason = fla.takeover("chunk_fwd_o").verify(**named)
    assert not accepted
    assert "at most one" in reason


@needs_fla
def test_the_next_backend_gets_what_falls_through(
    library: SimpleNamespace, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[int] = []

    class Other(library.backends.BaseBackend):
        backend_type = "other"
        serving = True

        @classmethod
        def is_available(cls) -> bool:
            return cls.serving

        def chunk_fwd_o(self, q: torch.Tensor, *rest: object, chunk_size: int = 64, **more: object) -> torch.Tensor:
            got.append(chunk_size)
            return q

    library.backends.register("common")(Other)
    try:
        named = kernel_call("chunk_fwd_o", device)[2]
        with layout_tuner.enable(on_miss="default"):
            library.chunk_fwd_o(**named | {"chunk_size": 128})
            library.chunk_fwd_o(**named)
    finally:
        Other.serving = False
    assert got == [128]
    assert fla.served() == {"chunk_fwd_o": 1}
    assert sum(fla.fallthroughs().values()) == 1


# -- the library as a rival ------------------------------------------------------------------------------------


def rival_of_dv_local(monkeypatch: pytest.MonkeyPatch, wrong: bool = False) -> rivalry.Rivalry:
    """The oracle in the library's place."""

    def library(**named: object) -> torch.Tensor:
        named.pop("chunk_indices", None)
        dv = reference.chunk_bwd_dv_local(**named)
        return dv * 2 if wrong else dv

    taken_over = fla.takeover("chunk_bwd_dv_local")
    made = rivalry.rivalry(taken_over.spec, taken_over.ours, library, name="fla", release="fla-9.9", aside=fla.aside)
    taken_over._rivalry = made
    return made


@pytest.mark.parametrize(
    ("times", "wrong", "taken"),
    [
        ({"layout_tuner": 20.0, "fla": 10.0}, False, False),
        ({"layout_tuner": 10.0, "fla": 20.0}, False, True),
        ({"layout_tuner": 10.0, "fla": 9.95}, False, True),
        ({"layout_tuner": 20.0, "fla": 10.0}, True, True),
    ],
    ids=["faster", "slower", "within the margin", "faster and wrong"],
)
def test_the_library_runs_what_it_is_faster_at_and_right(
    times: dict[str, float], wrong: bool, taken: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival = rival_of_dv_local(monkeypatch, wrong)
    made = router.Router(layout_tuner.Config(), on_miss="tune", timer=set_times(times))
    takeover.serve(made)
    router.push(made)
    named = kernel_call("chunk_bwd_dv_local", device)[2]
    taken_over = fla.takeover("chunk_bwd_dv_local")
    for _ in range(2):
        accepted, _ = taken_over.verify(**named)
        assert accepted is taken
    assert fla.yielded() == ({} if taken else {"chunk_bwd_dv_local": 2})
    assert not fla.fallthroughs()

    # Another process finds the decision and measures nothing; another release is measured anew.
    later = router.Router(layout_tuner.Config(), on_miss="default")
    takeover.serve(later)
    router.push(later)
    assert taken_over.verify(**named)[0] is taken
    (stored,) = [found for found in made.store.decisions() if found.key.op == "fla.chunk_bwd_dv_local"]
    assert stored.revision == rival.revision
    assert {found.candidate for found in stored.measurements} == {"layout_tuner", "fla"}


def test_calls_of_our_own_ops_do_not_meet_the_rival(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    rival_of_dv_local(monkeypatch)
    spec, key, _ = kernel_call("chunk_bwd_dv_local", device)
    assert "fla" not in {candidate.variant for candidate in spec.candidates(key)}
    assert not [name for name in registry.names() if name.startswith("fla")]


@needs_fla
def test_a_library_that_cannot_run_a_key_leaves_it_to_us(
    library: SimpleNamespace, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    if device.type != "cpu":
        pytest.skip("its kernels run here")
    with layout_tuner.enable(on_miss="tune"):
        router.current().timer = set_times({})
        named = kernel_call("chunk_local_cumsum", device)[2]
        got = library.chunk_local_cumsum(**named)
        (stored,) = [x for x in router.current().store.decisions() if x.key.op == "fla.chunk_local_cumsum"]
    close(got, reference.chunk_local_cumsum(**named))
    assert stored.candidate == "layout_tuner"
    assert "candidate fla failed" in caplog.text


def test_a_rivalry_runs_forward_and_backward_through_the_public_functions(device: torch.device) -> None:
    spec = SPEC
    rival = rivalry.rivalry(
        spec,
        layout_tuner.ops.chunk_gated_delta_rule,
        layout_tuner.ops.chunk_gated_delta_rule,
        name="fla",
        release="fla-9.9",
        aside=fla.aside,
    )
    form = (
        "A_log=1,BT=16,beta=float32@STRIDE_HV,dt_bias=1,g=float32@STRIDE_HV,grad=1,initial_state=1,"
        "output_final_state=1,state_v_first=1,use_beta_sigmoid_in_kernel=1,use_gate_in_kernel=1,use_qk_l2norm_in_kernel=1"
    )
    key = rival.key_for(SIZES, dtype="float32", form=keys.Form.parse(form))
    experiment = Experiment(rival, key, device)
    for candidate in rival.candidates(key):
        check = experiment.prepare(candidate).check()
        assert check.right, (candidate.id, check)


# -- releases --------------------------------------------------------------------------------------------------


def test_an_old_release_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace(__path__=[]))
    monkeypatch.setattr(fla, "installed_release", lambda: "0.5.2")
    with pytest.raises(errors.ConfigError, match=r"flash-linear-attention 0\.5\.2 .* wanted fla-core >= 0\.6\.0"):
        layout_tuner.enable()
    assert not layout_tuner.is_enabled()
    with layout_tuner.enable(fla=False):
        assert layout_tuner.is_enabled()


def test_another_package_of_that_name_is_none_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace(__path__=[str(tmp_path)]))
    monkeypatch.setattr(fla, "installed_release", lambda: None)
    with layout_tuner.enable():
        assert not fla.available()


def test_nothing_to_do_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fla", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with layout_tuner.enable():
        assert not fla.available()


def test_a_fault_of_the_integration_does_not_break_enable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(made: router.Router) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(integrations, "take_over", broken)
    with layout_tuner.enable():
        assert layout_tuner.is_enabled()
    assert "no such luck" in caplog.text
