"""A new op and a new chain on Ascend's compiler: their declarations are all that it needs."""

from types import ModuleType

import pytest
import toys

from layout_tuner.ascend import matrix
from layout_tuner.ascend.candidates import cases_of, compile_candidates
from layout_tuner.ascend.compile.compiler import Compiler

pytestmark = pytest.mark.ascend


@pytest.mark.parametrize("toy", toys.TOYS)
def test_every_candidate_of_a_toy_compiles_within_its_means(toy: ModuleType, compiler: Compiler) -> None:
    with toys.registered():
        key = matrix.key(toy.SPEC, 64, 64, "bfloat16", False, toy.SPEC.standard_forms["training"], T=64)
        cases = cases_of(toy.SPEC, key)
        rows = matrix.rows(cases, compile_candidates(cases, compiler))
    assert {len(row.report.kernels) for row in rows} == {1 if toy is toys.toy_scale else 4}
    assert not [f"{row.report.candidate}: {text}" for row in rows for text in row.complaints]
