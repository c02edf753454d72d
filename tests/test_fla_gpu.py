"""flash-linear-attention's layers and models on a GPU: inside `enable`, outside it, and with the oracle in its place.

The oracle computes `chunk_gated_delta_rule` in float64, through a backend of its own in the library's registry. The
library tunes each of its kernels at first use, a minute or more for one layer; here each keeps its first configuration.
Its gated backward is refused on Hopper with Triton 3.4 to 3.7.0, where its kernel is miscompiled: that guard is lifted
for its own runs, and where it was needed, only its values are held to the oracle, not its gradients.

Every test prints what it compared: `pytest -m gpu -rP tests/test_fla_gpu.py`. Most of their time is compilation, which
several processes share: `-n 6`. Without the library's layers, in flash-linear-attention, they are skipped.
"""

import importlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import layout_tuner
from layout_tuner import Config, reference
from layout_tuner.dispatch import router
from layout_tuner.integrations import fla, takeover

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # of the library, transformers and inductor
    pytest.mark.filterwarnings(r"error:::layout_tuner"),
]

WIDTH, H, HV, HEAD = 128, 2, 4, 64
T = 200  # not a multiple of a chunk, and longer than what the library decodes token by token
VALUES, GRADIENTS = 1e-2, 2e-2  # relative; everything around the op is bfloat16
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
ELSEWHERE = ("output_final_state", "cu_seqlens_cpu", "chunk_indices", "cp_context")


class OracleFunction(torch.autograd.Function):
    """`chunk_gated_delta_rule` in float64, its gradients written out."""

    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], *tensors: torch.Tensor | None) -> Any:
        ctx.save_for_backward(*tensors)
        ctx.options = options
        ctx.set_materialize_grads(False)
        named = dict(zip(NAMES, tensors)) | options
        o, state = reference.chunk_gated_delta_rule(**named, compute_dtype=torch.float64)
        return o.to(tensors[0].dtype), None if state is None else state.float()

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor, dht: torch.Tensor | None) -> Any:
        given = ctx.saved_tensors
        named = dict(zip(NAMES, given)) | {name: x for name, x in ctx.options.items() if name not in ELSEWHERE}
        found = reference.chunk_gated_delta_rule_bwd(**named, do=do, dht=dht, compute_dtype=torch.float64)
        gradients = (found.dq, found.dk, found.dv, found.dg, found.dbeta, found.dA_log, found.ddt_bias, found.dh0)
        return None, *[
            None if x is None or gradient is None else gradient.reshape(x.shape).to(x.dtype)
            for x, gradient in zip(given, gradients)
        ]


@pytest.fixture(scope="module")
def library() -> Iterator[SimpleNamespace]:
    """The library's layers and models, every kernel with its first configuration, and the oracle as a backend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layers = pytest.importorskip("fla.layers", reason="flash-linear-attention is not installed")
        models = importlib.import_module("fla.models")
        chunk_o = importlib.import_module("fla.ops.common.chunk_o")
        from fla import backends
        from triton.runtime.autotuner import Autotuner

    class Oracle(backends.BaseBackend):
        backend_type = "oracle"
        priority = fla.PRIORITY - 1
        serving = False

        @classmethod
        def is_available(cls) -> bool:
            return cls.serving

        def chunk_gated_delta_rule(self, **named: Any) -> Any:
            tensors = [named.pop(name, None) for name in NAMES]
            named["output_final_state"] = bool(named.get("output_final_state"))
            with torch.autocast("cuda", enabled=False):
                return OracleFunction.apply(named, *tensors)

    backends.register("gated_delta_rule")(Oracle)
    for name, module in list(sys.modules.items()):
        if name == "fla" or name.startswith("fla."):
            for value in vars(module).values():
                while value is not None and not isinstance(value, Autotuner):
                    value = getattr(value, "fn", None)
                if isinstance(value, Autotuner):
                    value.configs = value.configs[:1]
    refuses = chunk_o.IS_NVIDIA_HOPPER and chunk_o.TRITON_ABOVE_3_4_0 and not chunk_o.TRITON_ABOVE_3_7_1
    yield SimpleNamespace(layers=layers, models=models, chunk_o=chunk_o, oracle=Oracle, refuses=refuses)
    Oracle.serving = False


@pytest.fixture(autouse=True)
def _counts_from_zero() -> None:
    for counter in (takeover._served, takeover._yielded, takeover._fallthroughs):
        counter.clear()


@contextmanager
def running(library: SimpleNamespace, which: str) -> Iterator[None]:
    """Within it, the op is `ours`, the `oracle`'s, or the `library`'s own with its guard lifted."""
    guard = library.chunk_o.IS_NVIDIA_HOPPER
    try:
        if which == "ours":
            with layout_tuner.enable(on_miss="default"):
                yield
        else:
            library.oracle.serving = which == "oracle"
            library.chunk_o.IS_NVIDIA_HOPPER = False
            yield
    finally:
        library.oracle.serving = False
        library.chunk_o.IS_NVIDIA_HOPPER = guard


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative to the norm of what is wanted."""
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm().clamp_min(1e-30))


def compare(library: SimpleNamespace, runs: dict[str, dict[str, torch.Tensor]], gated: bool = True) -> None:
    """Hold ours to the oracle's, and to the library's where those are right; print the errors.

    Args:
        library: The library.
        runs: Results by who computed them, then by name; gradients are those whose name begins with `d`.
        gated: Whether the library's gradients pass through the kernel that some machines miscompile.
    """
    trusted = "oracle" if "oracle" in runs else "library"
    wrong = []
    for who, results in runs.items():
        if who == trusted:
            continue
        errors = {name: error(x, runs[trusted][name]) for name, x in results.items()}
        worst = sorted(errors, key=lambda name: -errors[name])[:4]
        print(f"{who} against {trusted}: " + ", ".join(f"{name} {errors[name]:.1e}" for name in worst))
        for name, found in errors.items():
            excused = who == "library" and name.startswith("d ") and gated and library.refuses
            if not excused and not found <= (GRADIENTS if name.startswith("d ") else VALUES):
                wrong.append(f"{who}: {name} {found:.2e}")
    assert not wrong, wrong


def layer_of(library: SimpleNamespace, kind: str = "GatedDeltaNet", **more: Any) -> torch.nn.Module:
    """A small layer in bfloat16."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(hidden_size=WIDTH, num_heads=H, layer_idx=0)
    if kind in ("GatedDeltaNet", "KimiDeltaAttention"):
        sizes |= dict(head_dim=HEAD, num_v_heads=HV, expand_v=1.0)
    # Not every layer is exported.
    home = library.layers if hasattr(library.layers, kind) else importlib.import_module("fla.layers.simple_gla")
    made: torch.nn.Module = getattr(home, kind)(**sizes | more).to("cuda", torch.bfloat16)
    return made


def stepped(layer: Callable[..., Any], parameters: torch.nn.Module, x: torch.Tensor, **more: Any) -> dict[str, Any]:
    """Output and gradients of a step by name, gradients taken with `backward` in whatever scope there is."""
    x = x.detach().requires_grad_()
    o = layer(x, **more)[0]
    return {"o": o, **gradients(o, x, parameters)}


def gradients(o: torch.Tensor, x: torch.Tensor, layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Those of the input and of every parameter that takes part."""
    do = torch.randn(o.shape, device=o.device, generator=torch.Generator(o.device).manual_seed(7)).to(o.dtype)
    named = {"d x": x, **{f"d {name}": parameter for name, parameter in layer.named_parameters()}}
    found = torch.autograd.grad(o, list(named.values()), do, allow_unused=True)
    return {name: gradient for name, gradient in zip(named, found) if gradient is not None}


def inputs(B: int = 2, tokens: int = T) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randn(B, tokens, WIDTH, device="cuda", generator=generator).to(torch.bfloat16)


def model_of(library: SimpleNamespace) -> torch.nn.Module:
    """A language model of two layers, from its config."""
    torch.manual_seed(0)
    config = library.models.GatedDeltaNetConfig(
        hidden_size=WIDTH,
        head_dim=HEAD,
        num_heads=H,
        num_v_heads=HV,
        expand_v=1.0,
        num_hidden_layers=2,
        vocab_size=512,
    )
    made: torch.nn.Module = library.models.GatedDeltaNetForCausalLM(config).to("cuda")
    return made


def tokens(B: int, length: int) -> torch.Tensor:
    return torch.randint(3, 512, (B, length), device="cuda", generator=torch.Generator("cuda").manual_seed(5))


# -- a layer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("negative", [False, True], ids=["", "negative-eigenvalues"])
def test_a_layer_agrees(library: SimpleNamespace, negative: bool) -> None:
    layer = layer_of(library, allow_neg_eigval=negative)
    x = inputs()
    runs = {}
    for which in ("oracle", "library"):
        with running(library, which):
            runs[which] = stepped(layer, layer, x)
    leaf = x.detach().requires_grad_()
    with running(library, "ours"):
        o = layer(leaf)[0]
    runs["ours"] = {"o": o, **gradients(o, leaf, layer)}  # outside the scope
    assert fla.served() == {"chunk_gated_delta_rule": 1}, "as our chain, backward too"
    assert not fla.fallthroughs()
    compare(library, runs)


def test_a_machine_that_the_library_refuses_trains(library: SimpleNamespace) -> None:
    if not library.refuses:
        pytest.skip("the library's own backward is right here")
    layer = layer_of(library)
    with pytest.raises(RuntimeError, match="Hopper"):
        stepped(layer, layer, inputs())
    with running(library, "ours"):
        stepped(layer, layer, inputs())


def test_packed_sequences_and_padded_ones_agree(library: SimpleNamespace) -> None:
    layer = layer_of(library)
    padded = torch.ones(2, T, device="cuda", dtype=torch.int64)
    padded[0, :63] = 0
    cases = {
        "packed": (inputs(1, 2 * T), dict(cu_seqlens=torch.tensor([0, 70, 71, 135, 2 * T], device="cuda"))),
        "padded": (inputs(), dict(attention_mask=padded)),
    }
    for case, (x, more) in cases.items():
        runs = {}
        for which in ("oracle", "library", "ours"):
            with running(library, which):
                runs[which] = stepped(layer, layer, x, **more)
        print(case, end=": ")
        compare(library, runs)
    assert fla.served() == {"chunk_gated_delta_rule": 2}


def test_a_compiled_layer_agrees(library: SimpleNamespace) -> None:
    layer = layer_of(library)
    x = inputs()
    runs = {}
    with running(library, "oracle"):
        runs["oracle"] = stepped(layer, layer, x)
    with running(library, "ours"):
        compiled = torch.compile(layer)
        for _ in range(2):  # the second one is all compiled
            runs["ours"] = stepped(compiled, layer, x)
    assert fla.served() == {"chunk_gated_delta_rule": 2}
    compare(library, runs)


def test_threads_at_once_get_what_one_gets(library: SimpleNamespace) -> None:
    layer = layer_of(library)
    x = inputs()
    with running(library, "ours"):
        alone = stepped(layer, layer, x)
        found: list[dict[str, torch.Tensor]] = []

        def work() -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(3):
                    found.append(stepped(layer, layer, x))
                torch.cuda.current_stream().synchronize()

        torch.cuda.synchronize()
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 12
    assert fla.served() == {"chunk_gated_delta_rule": 13}
    for results in found:
        compare(library, {"oracle": alone, "ours": results})


# What each layer is known to call of the ops here; a release may call more of them.
OTHERS = {
    "DeltaNet": {
        "chunk_gated_delta_rule_fwd_h",
        "chunk_fwd_o",
        "chunk_bwd_dv_local",
        "chunk_gated_delta_rule_bwd_dhu",
        "chunk_bwd_dqkwg",
    },
    "KimiDeltaAttention": {"chunk_gated_delta_rule_fwd_h", "chunk_gated_delta_rule_bwd_dhu", "chunk_local_cumsum"},
    "GatedLinearAttention": {"chunk_local_cumsum"},
    "SimpleGatedLinearAttention": {"chunk_local_cumsum", "chunk_fwd_o"},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_layers_get_the_kernels_they_share(library: SimpleNamespace, kind: str) -> None:
    layer = layer_of(library, kind)
    x = inputs()
    # The states of this layer's backward are fp32, which no kernel here takes beside bfloat16 values: the library's own
    # runs, and refuses where it is miscompiled.
    refused = library.refuses and kind == "SimpleGatedLinearAttention"
    runs = {}
    for which in ("library", "ours"):
        with running(library, which):
            runs[which] = {"o": layer(x)[0]} if refused else stepped(layer, layer, x)
    print(kind, "served", fla.served(), "left to the library", fla.fallthroughs())
    assert fla.served().keys() >= OTHERS[kind]
    compare(library, runs)


# -- a language model ------------------------------------------------------------------------------------------


def trained(library: SimpleNamespace, which: str, steps: int, checkpointing: bool = False) -> Any:
    """Losses of some steps of AdamW under autocast, and the gradients of the last one."""
    model = model_of(library)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = tokens(4, T)
    losses: list[float] = []
    with running(library, which):
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, {f"d {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


def apart(losses: list[float], others: list[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True))


def test_twenty_steps_of_a_language_model_agree(library: SimpleNamespace) -> None:
    curves = {which: trained(library, which, 20)[0] for which in ("oracle", "library", "ours")}
    for which, losses in curves.items():
        print(f"{which:8}", " ".join(f"{loss:.4f}" for loss in losses))
    ours, own = apart(curves["ours"], curves["oracle"]), apart(curves["library"], curves["oracle"])
    print(f"largest difference from the oracle's: ours {ours:.1e}, the library's {own:.1e}")
    assert fla.served() == {"chunk_gated_delta_rule": 40}
    assert curves["ours"][-1] < 0.9 * curves["ours"][0]
    assert ours < 5e-3
    if not library.refuses:
        assert apart(curves["ours"], curves["library"]) < 5e-3


def test_gradient_checkpointing_changes_nothing(library: SimpleNamespace) -> None:
    plain, wanted = trained(library, "ours", 2)
    assert fla.served() == {"chunk_gated_delta_rule": 4}
    losses, got = trained(library, "ours", 2, checkpointing=True)
    assert fla.served() == {"chunk_gated_delta_rule": 12}, "each layer's forward twice a step"
    print(f"losses {plain} {losses}")
    assert apart(losses, plain) < 1e-3
    compare(library, {"oracle": wanted, "ours": got})


def test_cached_states_carry_over(library: SimpleNamespace) -> None:
    model = model_of(library).eval().to(torch.bfloat16)
    batch = tokens(2, 260)
    runs = {}
    for which in ("oracle", "library", "ours"):
        with running(library, which), torch.no_grad():
            logits, cache = [], None
            for begin, end in [(0, 150), (150, 256), *[(t, t + 1) for t in range(256, 260)]]:
                out = model(batch[:, begin:end], past_key_values=cache, use_cache=True)
                logits.append(out.logits)
                cache = out.past_key_values
            runs[which] = {"logits": torch.cat(logits, 1), "last": logits[-1]}
    assert fla.served() == {"chunk_gated_delta_rule": 4}, "two layers, two long parts; single tokens are the library's"
    assert not fla.fallthroughs()
    compare(library, runs)
    with torch.no_grad(), running(library, "ours"):
        whole = model(batch, use_cache=False).logits
    compare(library, {"oracle": {"logits": whole}, "ours": {"logits": runs["ours"]["logits"]}})


def test_generation(library: SimpleNamespace) -> None:
    model = model_of(library).eval().to(torch.bfloat16)
    prompt = tokens(1, 150)
    asked: dict[str, Any] = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0, use_cache=True)
    made = {}
    for which in ("library", "ours"):
        with running(library, which), torch.no_grad():
            made[which] = model.generate(prompt, **asked)
    assert made["ours"].shape == (1, 158)
    assert fla.served() == {"chunk_gated_delta_rule": 2}, "the prompt, in two layers"
    print("the same tokens as the library's:", torch.equal(made["ours"], made["library"]))
    # Greedy choices may turn on a rounding error, so each is held to the logits that the library gives before it.
    with torch.no_grad(), running(library, "library"):
        logits = model(made["ours"]).logits[0, 149:-1]
    chosen = logits.gather(-1, made["ours"][0, 150:, None])[:, 0]
    assert bool((logits.amax(-1) - chosen <= 1e-2 * logits.abs().amax(-1)).all())


# -- the library as a candidate --------------------------------------------------------------------------------


def test_the_librarys_own_is_measured_checked_and_never_trusted_blindly(
    library: SimpleNamespace, tmp_path: Path
) -> None:
    layer = layer_of(library)
    x = inputs()
    with running(library, "oracle"):
        wanted = stepped(layer, layer, x)
    settings = Config.model_validate({"measure": {"min_rounds": 10, "max_rounds": 10}})
    guard = library.chunk_o.IS_NVIDIA_HOPPER
    library.chunk_o.IS_NVIDIA_HOPPER = False
    try:
        with layout_tuner.enable(settings, cache=tmp_path / "decisions.sqlite", on_miss="tune"):
            got = stepped(layer, layer, x)
            decisions = router.current().store.decisions()
    finally:
        library.chunk_o.IS_NVIDIA_HOPPER = guard
    (stored,) = [found for found in decisions if found.key.op == "fla.chunk_gated_delta_rule"]
    for found in stored.measurements:
        print(stored.candidate, found.candidate, found.state, found.reason, found.end_to_end_us, found.error)
    assert {found.candidate for found in stored.measurements} == {"layout_tuner", "fla"}
    served, yielded = fla.served().get("chunk_gated_delta_rule", 0), fla.yielded().get("chunk_gated_delta_rule", 0)
    assert (served, yielded) == ((1, 0) if stored.candidate == "layout_tuner" else (0, 1))
    compare(library, {"oracle": wanted, "ours": got})
