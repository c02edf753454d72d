"""Every registered op, candidate and case against its oracle; generated from the registry."""

from dataclasses import replace

import pytest
import torch
from cases import MORE_HEADS, PUT_TOGETHER, SIZES, experiment_for, faults, gate_dtypes, key_for, matrix
from layout_tuner.kernels import tiling

import layout_tuner.ops  # noqa: F401  registers every op
from layout_tuner.spec import registry
from layout_tuner.spec.declaration import OpSpec
from layout_tuner.spec.keys import Form
from layout_tuner.tuning.experiment import Experiment

SPECS = [registry.lookup(name) for name in registry.names()]
CASES = [
    pytest.param(spec, *case, id=f"{spec.name}-{case[0]}-{case[1]}-{'packed' if case[2] else 'dense'}")
    for spec in SPECS
    for case in matrix(spec)
]
STANDARD = [
    pytest.param(spec, form, id=f"{spec.name}-{form}") for spec in SPECS for form in spec.standard_forms.values()
]
GATE_DTYPES = [
    pytest.param(spec, form, varlen, id=f"{spec.name}-{form}-{'packed' if varlen else 'dense'}")
    for spec in SPECS
    for form, varlen in gate_dtypes(spec)
]


@pytest.mark.parametrize(("spec", "form", "dtype", "varlen"), CASES)
def test_every_candidate_is_right_and_layouts_agree_bit_for_bit(
    spec: OpSpec, form: Form, dtype: str, varlen: bool, device: torch.device
) -> None:
    heads = MORE_HEADS if dtype == "float32" and form in spec.standard_forms.values() else {}
    key = key_for(spec, form, dtype, varlen, **heads)
    assert not faults(experiment_for(spec, key, device))


@pytest.mark.parametrize(("spec", "form", "varlen"), GATE_DTYPES)
def test_layouts_agree_in_every_combination_of_dtypes(
    spec: OpSpec, form: str, varlen: bool, device: torch.device
) -> None:
    key = key_for(spec, form, "bfloat16", varlen, B=1, T=12, H=1, HV=2, K=16, V=16)
    # What the chain does to its gates it does ahead of every variant.
    variants = spec.variants if spec.gradient_option is None else spec.variants[:1]
    assert not faults(experiment_for(spec, key, device, (1, 6, 6, 11)), variants)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("spec", "form", "dtype", "varlen"), [case for case in CASES if {*PUT_TOGETHER} & {*case.values[0].variants}]
)
def test_variants_put_together_from_others(
    spec: OpSpec, form: Form, dtype: str, varlen: bool, device: torch.device
) -> None:
    assert not faults(experiment_for(spec, key_for(spec, form, dtype, varlen), device), PUT_TOGETHER)


@pytest.mark.parametrize(("spec", "form"), STANDARD)
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"T": SIZES["HV"]}, id="T=HV"),
        pytest.param({"T": 1}, id="T=1"),
        pytest.param({"H": 1, "HV": 1}, id="HV=1"),
        pytest.param({"B": 1, "T": 64, "K": 16, "V": 16}, id="T=64"),
        pytest.param({"B": 1, "T": 65, "H": 1, "HV": 2, "K": 130, "V": 200}, id="wide"),
        pytest.param({"B": 1, "T": 20, "H": 1, "HV": 2, "K": 256, "V": 256}, id="widest"),
        pytest.param({"K": 5, "V": 3}, id="narrow"),
        pytest.param({"B": 1, "T": 20, "H": 1, "HV": 2, "K": 72, "V": 64}, id="one-step-more-of-K"),
        pytest.param({"B": 1, "T": 20, "H": 1, "HV": 2, "K": 64, "V": 72}, id="one-step-more-of-V"),
    ],
)
def test_sizes_at_the_edges(spec: OpSpec, form: Form, sizes: dict[str, int], device: torch.device) -> None:
    assert not faults(experiment_for(spec, key_for(spec, form, **sizes), device))


@pytest.mark.parametrize(("spec", "form"), STANDARD)
def test_gates_that_overflow_wherever_they_are_not_masked(spec: OpSpec, form: Form, device: torch.device) -> None:
    """A decay of 2 ** -40 a token, in a chunk that ends early: what no mask hides is 2 ** 2000 and more."""
    experiment = experiment_for(spec, key_for(spec, form, B=1, T=40, H=1, HV=2, K=16, V=16), device)
    decaying = [operand.fill in ("cumulative_decay", "decay") for operand in spec.operands]
    if not any(decaying):
        pytest.skip("has no gate")
    tensors = tuple(
        tensor * 200 if strong and tensor is not None else tensor
        for strong, tensor in zip(decaying, experiment.call.tensors)
    )
    strong = Experiment(spec, experiment.key, device, replace(experiment.call, tensors=tensors))
    assert not faults(strong)


@pytest.mark.parametrize(("spec", "form"), STANDARD)
@pytest.mark.parametrize("cu_seqlens", [(0, 80), (0, 1, 2, 80), (0, 64, 80), (80, 80), (0, 0, 0)], ids=str)
def test_packed_lengths(spec: OpSpec, form: Form, cu_seqlens: tuple[int, ...], device: torch.device) -> None:
    if "T" not in spec.sizes:
        pytest.skip("has no time axis")
    assert not faults(experiment_for(spec, key_for(spec, form, varlen=True), device, cu_seqlens))


@pytest.mark.parametrize("heads", [1, 2, 3], ids="{} heads a group".format)
def test_dg_from_rows_is_right_too(heads: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's way to dg, which the interpreter's tiles do not take."""
    monkeypatch.setattr(tiling, "chunk_bwd_dqkwg_tiles", lambda *_: (32, 16, 32, False))
    spec = registry.lookup("chunk_bwd_dqkwg")
    key = key_for(spec, spec.standard_forms["training"], "float32", B=1, T=35, H=1, HV=heads)
    assert faults(experiment_for(spec, key, device), ["full"]) == []
