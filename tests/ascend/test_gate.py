"""The gate: every op x candidate x form x width x dtype, dense and packed, on Ascend's compiler and natively."""

from collections.abc import Callable

import pytest
import torch

from layout_tuner import numerics, ops, registry
from layout_tuner.ascend import gate
from layout_tuner.ascend.candidates import Case, cases_of, compile_candidates
from layout_tuner.ascend.compiler import Compiler
from layout_tuner.ascend.execution import NativeRunner
from layout_tuner.experiment import Experiment
from layout_tuner.keys import Key

pytestmark = [pytest.mark.ascend, pytest.mark.nightly]

assert ops, "importing the ops registers them"
OPS = registry.names()


def check(cases: list[Case], compiler: Compiler) -> None:
    rows = gate.rows(cases, compile_candidates(cases, compiler))
    wrong = [f"{row.report.candidate} {row.case.key}: {text}" for row in rows for text in row.complaints]
    assert not wrong, "\n".join([f"{len(wrong)} complaints:", *wrong])


def batches(target: str) -> list[object]:
    """Op, width and kind of batch: the parts that the matrix is checked in."""
    return [
        pytest.param(op, width, packed, id=f"{op}-{width[0]}-{width[1]}-{'packed' if packed else 'dense'}")
        for op in OPS
        for width in gate.widths(registry.lookup(op), target)
        for packed in (False, True)
        if gate.cases(registry.lookup(op), target, width, packed)
    ]


@pytest.mark.parametrize(("op", "width", "packed"), batches(gate.TARGET))
def test_every_candidate_compiles_within_its_means(
    op: str, width: tuple[int, int], packed: bool, compiler: Compiler
) -> None:
    check(gate.cases(registry.lookup(op), gate.TARGET, width, packed), compiler)


@pytest.mark.parametrize("target", gate.OTHER_TARGETS)
@pytest.mark.parametrize(("op", "width", "packed"), batches(gate.OTHER_TARGETS[0]))
def test_other_targets(
    op: str, width: tuple[int, int], packed: bool, target: str, compiler_for: Callable[[str], Compiler]
) -> None:
    check(gate.cases(registry.lookup(op), target, width, packed), compiler_for(target))


def execution_cases(op: str) -> list[tuple[Key, list[Case]]]:
    """Keys with the candidates to run: the standard form in every direction, the other forms T-contiguous only.

    A kernel is not specialised on T, so the long sequences cost a run and no build.
    """
    spec = registry.lookup(op)
    first, *others = dict.fromkeys((*spec.forms.values(), *spec.more_forms))
    found = [
        gate.key(spec, 64, 64, dtype, packed, first, T)
        for packed in (False, True)
        for dtype, T in (("bfloat16", 200), ("float32", 200), ("bfloat16", 2048))
    ]
    found += [gate.key(spec, 192, 128, "bfloat16", True, first, T=150)]
    found += [gate.key(spec, 256, 256, "float32", False, first, T=128)]
    cases = {key: cases_of(spec, key) for key in found}
    for form in others:
        key = gate.key(spec, 48, 80, "float32", False, form, T=100)
        cases[key] = list({case.candidate.variant: case for case in cases_of(spec, key)}.values())
    return [(key, listed) for key, listed in cases.items() if not gate.refused(spec, key)]


@pytest.mark.parametrize(
    ("key", "cases"),
    [pytest.param(*pair, id=str(pair[0]).replace(" ", "-")) for op in OPS for pair in execution_cases(op)],
)
def test_every_candidate_computes_what_the_oracle_does(key: Key, cases: list[Case], runner: NativeRunner) -> None:
    spec = registry.lookup(key.op)
    experiment = Experiment(spec, key, torch.device("cpu"))
    by_variant: dict[str, tuple[torch.Tensor | None, ...]] = {}
    for case in cases:
        got = runner.run(case, experiment.call)
        for output, ours, theirs in zip(spec.outputs, got, experiment.wanted, strict=True):
            assert (ours is None) == (theirs is None), output.name
            if ours is None or theirs is None:
                continue
            error = numerics.error(ours, theirs, experiment.term_rms.get(output.name, 0.0))
            limit = numerics.tolerance(key.dtype, interpreted=False, own=spec.tolerances.get(output.name))
            assert error <= limit, f"{case.candidate.id} {output.name}: {error:.2e} > {limit:.2e}"
        # A layout changes addresses, never arithmetic.
        same = by_variant.setdefault(case.candidate.variant, got)
        for output, ours, theirs in zip(spec.outputs, got, same, strict=True):
            if ours is not None and theirs is not None:
                assert torch.equal(ours, theirs), f"{case.candidate.id} {output.name} differs between layouts"
