"""The matrix: every op x candidate x form x width x dtype, dense and packed, on Ascend's compiler and natively.

The whole matrix takes longer than a check may: half of it, chosen so that every two properties meet, runs always (a
quarter of a chain, whose kernels are the other ops'), the rest is marked nightly and is part of `make ascend-matrix`.
"""

from collections.abc import Callable

import pytest
import torch

from layout_tuner import ops
from layout_tuner.ascend import matrix
from layout_tuner.ascend.candidates import Case, cases_of, chip_of, compile_candidates
from layout_tuner.ascend.compile.compiler import Compiler
from layout_tuner.ascend.native.execution import NativeRunner
from layout_tuner.ascend.targets import target_named
from layout_tuner.spec import registry
from layout_tuner.spec.keys import Form, Key
from layout_tuner.spec.operands import dtype_name
from layout_tuner.tuning import numerics
from layout_tuner.tuning.experiment import Experiment

pytestmark = pytest.mark.ascend

assert ops, "importing the ops registers them"
OPS = registry.names()
PAIRS = (("K", "dtype"), ("K", "packed"), ("dtype", "packed"))


# What the compiler refuses so far. A row goes when its kernel compiles.
UNSOLVED = {
    (op, "Ascend950PR_9589"): [pytest.mark.xfail(reason="these stages of KDA do not compile for A5 yet")]
    for op in ("chunk_kda_bwd_intra", "chunk_kda_bwd_wy_dqkg_fused", "chunk_kda_fwd_intra")
}


def parts(*targets: str) -> list[object]:
    """The matrix in parts, those that are not sampled for the nightly run only."""
    return [
        pytest.param(
            part,
            id=str(part),
            marks=[*UNSOLVED.get((part.op, target), ()), *([] if part.sampled else [pytest.mark.nightly])],
        )
        for target in targets
        for op in OPS
        for part in matrix.parts(registry.lookup(op), target)
    ]


@pytest.mark.parametrize("part", parts(matrix.TARGET, *matrix.OTHER_TARGETS))
def test_every_candidate_compiles_within_its_means(part: matrix.Part, compiler_for: Callable[[str], Compiler]) -> None:
    cases = matrix.cases(registry.lookup(part.op), part)
    rows = matrix.rows(cases, compile_candidates(cases, compiler_for(part.target)))
    wrong = [f"{row.report.candidate} {row.case.key.form}: {text}" for row in rows for text in row.complaints]
    assert not wrong, "\n".join([f"{len(wrong)} complaints:", *wrong])


def only_in_a_chain(op: str) -> list[Form]:
    """Forms that no call of a stage has, but a chain gives it."""
    stages = ("chunk_local_cumsum", "gdn_gate_chunk_cumsum", "gdn_gate_bwd")
    return [registry.lookup(op).standard_forms["training"].changed(resets="1")] if op in stages else []


OTHER_FORMS = [
    pytest.param(op, form, id=f"{op}-{form}")
    for op in OPS
    if not registry.lookup(op).is_chain
    for form in (*registry.lookup(op).every_form, *only_in_a_chain(op))
    if form not in registry.lookup(op).standard_forms.values()
]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["default", "every"])
@pytest.mark.parametrize(("op", "form"), OTHER_FORMS)
def test_other_forms_compile_too(op: str, form: Form, every: bool, compiler: Compiler) -> None:
    """Without a gate, with another chunk size, with states: the default candidate of what is no standard form."""
    spec, chip = registry.lookup(op), chip_of(target_named(matrix.TARGET))
    keys = [matrix.key(spec, 64, 64, "bfloat16", packed, form) for packed in ((False, True) if every else (False,))]
    cases = [
        case
        for key in keys
        if not matrix.refused(spec, key)
        for case in cases_of(spec, key)
        if every or case.candidate == spec.default(key, chip)
    ]
    assert cases
    rows = matrix.rows(cases, compile_candidates(cases, compiler))
    wrong = [f"{row.report.candidate} {row.case.key}: {text}" for row in rows for text in row.complaints]
    assert not wrong, "\n".join([f"{len(wrong)} complaints:", *wrong])


def test_the_sample_pairs_everything() -> None:
    for op in OPS:
        every = [part for part in matrix.parts(registry.lookup(op)) if part.K]
        sampled = [part for part in every if part.sampled]
        pairs = (("dtype", "packed"), ("K",)) if registry.lookup(op).is_chain else PAIRS
        for pair in pairs:
            meetings = [{tuple(getattr(part, name) for name in pair) for part in listed} for listed in (every, sampled)]
            assert meetings[0] == meetings[1], (op, pair)
    for target in matrix.OTHER_TARGETS:
        sampled_ops = {part.op for op in OPS for part in matrix.parts(registry.lookup(op), target) if part.sampled}
        assert sampled_ops == {op for op in OPS if not registry.lookup(op).is_chain}


def execution_cases(op: str) -> list[object]:
    """Keys with the candidates to run: the standard form in every direction, the other forms one candidate a variant.

    A kernel is not specialised on T, so the long sequences cost a run and no build.
    """
    spec = registry.lookup(op)
    first, *others = spec.every_form
    sampled = [
        matrix.key(spec, 64, 64, "bfloat16", False, first, T=2048),
        matrix.key(spec, 64, 64, "bfloat16", False, first, T=200),
        matrix.key(spec, 64, 64, "float32", True, first, T=200),
    ]
    more = [
        matrix.key(spec, 64, 64, "bfloat16", True, first, T=2048),
        matrix.key(spec, 64, 64, "float32", False, first, T=2048),
        matrix.key(spec, 192, 128, "bfloat16", True, first, T=150),
        matrix.key(spec, 256, 256, "float32", False, first, T=128),
    ]
    cases = {key: computing(cases_of(spec, key)) for key in (*sampled, *more)}
    for form in others:
        key = matrix.key(spec, 48, 80, "float32", False, form, T=100)
        cases[key] = list({case.candidate.variant: case for case in computing(cases_of(spec, key))}.values())
    return [
        pytest.param(
            key,
            listed,
            id=str(key).replace(" ", "-"),
            marks=() if key in sampled else pytest.mark.nightly,
        )
        for key, listed in cases.items()
        if not matrix.refused(spec, key)
    ]


ROWS = [op for op in OPS if not registry.lookup(op).is_chain and "K" in registry.lookup(op).sizes]


@pytest.mark.parametrize("op", ROWS)
def test_rows_that_are_no_multiple_of_32_bytes(op: str, runner: NativeRunner) -> None:
    """What the front end makes of K = 60 and V = 100 reads nothing of the next row."""
    spec = registry.lookup(op)
    key = matrix.key(spec, 60, 100, "bfloat16", False, spec.every_form[0], T=70)
    experiment = Experiment(spec, key, torch.device("cpu"))
    case = next(case for case in cases_of(spec, key) if matrix.contiguous(case) or not case.candidate.plan.layouts)
    got = runner.run(case, experiment.call)
    check = experiment.compare(got)
    assert check.right, f"{check.output}: {check.error:.2e} > {check.limit:.2e}"


def computing(cases: list[Case]) -> list[Case]:
    """Those that differ in what they compute: what runs natively is the front end's output, which buffers nothing."""
    return [case for case in cases if not matrix.single_buffered(case)]


@pytest.mark.parametrize(("key", "cases"), [each for op in OPS for each in execution_cases(op)])
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
            # A gradient has its input's dtype, and is no closer than that.
            dtype = dtype_name(ours) if ours.element_size() == 2 else key.dtype
            limit = numerics.tolerance(dtype, spec.tolerances.get(output.name))
            assert error <= limit, f"{case.candidate.id} {output.name}: {error:.2e} > {limit:.2e}"
        # A layout changes addresses, never arithmetic.
        same = by_variant.setdefault(case.candidate.variant, got)
        for output, ours, theirs in zip(spec.outputs, got, same, strict=True):
            if ours is not None and theirs is not None:
                assert torch.equal(ours, theirs), f"{case.candidate.id} {output.name} differs between layouts"
