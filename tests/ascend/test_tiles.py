"""Memory that tiles take: predicted against planned, and refused before launch where there is none."""

import dataclasses
import importlib.util
import itertools
from pathlib import Path

import pytest
import torch
from layout_tuner.kernels import tiling

from layout_tuner import ops
from layout_tuner.ascend import matrix
from layout_tuner.ascend.candidates import Case, cases_of, chip_of, compile_candidates, launches
from layout_tuner.ascend.compile.compiler import Compiler
from layout_tuner.ascend.targets import target_named
from layout_tuner.errors import UnsupportedProblemError
from layout_tuner.launch.prepared import Prepared
from layout_tuner.spec import registry
from layout_tuner.spec.declaration import Problem
from layout_tuner.spec.layouts import Layout
from layout_tuner.tuning.inputs import synthesize

pytestmark = pytest.mark.ascend

PROGRAM = Path(__file__).parents[2] / "bench" / "ascend_tiles.py"
_spec = importlib.util.spec_from_file_location("ascend_tiles", PROGRAM)
assert _spec is not None and _spec.loader is not None
tiles = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiles)

assert ops, "importing the ops registers them"
B3 = target_named("Ascend910B3")
PREDICTED = (
    "chunk_bwd_dv_local",
    "chunk_fwd_o",
    "chunk_gated_delta_rule_bwd_dhu",
    "chunk_gated_delta_rule_fwd_h",
    "recompute_w_u_fwd",
)


def predictable(op: str, K: int, V: int, dtype: str) -> list[Case]:
    spec = registry.lookup(op)
    key = matrix.key(spec, K, V, dtype, False, spec.every_form[0])
    return [case for case in cases_of(spec, key) if matrix.contiguous(case)]


@pytest.mark.parametrize(("K", "V", "dtype"), [(64, 64, "bfloat16"), (256, 256, "float32")])
@pytest.mark.parametrize("op", PREDICTED)
def test_predictions_hold_against_the_compilers_plans(op: str, K: int, V: int, dtype: str, compiler: Compiler) -> None:
    # What is predicted is the plan with multi-buffering: without it a kernel takes less, and fits where that does.
    cases = [case for case in predictable(op, K, V, dtype) if not matrix.single_buffered(case)]
    element_bytes = 2 if dtype == "bfloat16" else 4
    seen = 0
    for report in compile_candidates(cases, compiler):
        for kernel in report.kernels:
            sizes = {name: kernel.constexprs[name] for name in ("BT", "BK", "BV")}
            found = tiling.on_chip_bytes(kernel.kernel, element_bytes, **sizes)
            if found is None:
                continue
            seen += 1
            assert kernel.facts is not None, kernel.error
            planned = (kernel.facts.ub_bytes, kernel.facts.l1_bytes, kernel.facts.l0c_bytes)
            limits = (B3.ub_bytes, B3.l1_bytes, B3.l0c_bytes)
            # At most as many copies as predicted; of L1 and L0C exactly as many where they fit.
            assert all(plan <= most for plan, most in zip(planned, found, strict=True)), (kernel.kernel, found, planned)
            for plan, most, limit in list(zip(planned, found, limits, strict=True))[1:]:
                assert plan == min(most, limit), (kernel.kernel, found, planned)
    assert seen


SIZES = (16, 32, 64, 128, 256)


def reachable(op: str) -> list[Case]:
    """A case for every combination of tiles that any K and V get, at the largest chunk, in the costliest layout."""
    spec = registry.lookup(op)
    found: dict[tuple[object, ...], Case] = {}
    for dtype, K, V in itertools.product(matrix.DTYPES, SIZES, SIZES):
        key = matrix.key(spec, K, V, dtype, False, spec.every_form[0])
        for case in cases_of(spec, key):
            if any(layout is Layout.T_CONTIG for _, layout in case.candidate.plan.layouts):
                continue
            for launch in launches(case, B3)[0]:
                chosen = tuple(tiles.tiles_of(launch).items())
                found.setdefault((launch.name, dtype, chosen), case)
    return list({id(case): case for case in found.values()}.values())


@pytest.mark.nightly
@pytest.mark.parametrize("op", [name for name in registry.names() if not registry.lookup(name).is_chain])
def test_no_width_overflows(op: str, compiler: Compiler) -> None:
    """Of a kernel's memory, K and V decide nothing but the tiles; so these are all that there can be."""
    cases = reachable(op)
    rows = matrix.rows(cases, compile_candidates(cases, compiler))
    wrong = [f"{row.report.candidate} {row.case.key}: {text}" for row in rows for text in row.complaints]
    assert not wrong, "\n".join([f"{len(wrong)} complaints of {len(cases)} cases:", *wrong])


# Their plans fill UB whatever their tiles are, with multi-buffering and without.
FULL = {"chunk_bwd_dqkwg", "chunk_kda_bwd_wy_dqkg_fused", "prepare_wy_repr_bwd"}


def test_every_other_op_has_a_candidate_that_leaves_a_fifth_of_ub(compiler: Compiler) -> None:
    """So that the plan of another release still fits."""
    used: dict[str, float] = {}
    ops_with_plans = [name for name in registry.names() if not registry.lookup(name).is_chain and name not in FULL]
    for op in ops_with_plans:
        spec = registry.lookup(op)
        key = matrix.key(spec, 64, 64, "bfloat16", False, spec.every_form[0])
        cases = [case for case in cases_of(spec, key) if matrix.contiguous(case) or not case.candidate.plan.layouts]
        reports = compile_candidates(cases, compiler)
        used[op] = min((each.totals()["ub_bytes"] / B3.ub_bytes for each in reports if each.ok), default=2.0)
    assert {op: share for op, share in used.items() if share > 0.8} == {}


def test_without_multi_buffering_a_kernel_takes_less(compiler: Compiler) -> None:
    cases = [case for case in predictable("chunk_bwd_dv_local", 64, 64, "bfloat16") if "full" in case.candidate.variant]
    buffered, single = compile_candidates(cases, compiler)
    assert (buffered.candidate, single.candidate) == ("full/g=T_CONTIG", "full+single_buffer/g=T_CONTIG")
    assert single.totals()["ub_bytes"] < 0.5 * buffered.totals()["ub_bytes"]


def test_the_limits_are_the_targets() -> None:
    assert tuple(tiling.ASCEND_BYTES.values()) == (B3.ub_bytes, B3.l1_bytes, B3.l0c_bytes)


def test_tiles_without_room_are_refused_before_launch(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> None:
    monkeypatch.setattr(tiling, "chunk_fwd_o_tiles", lambda *sizes: (64, 1024))
    case = predictable("chunk_fwd_o", 64, 64, "bfloat16")[0]
    message = r"chunk_fwd_o: full/g=T_CONTIG: tiles BT=64, BK=64, BV=1024 need 270,336 bytes of L0C, an Ascend core has"
    call = synthesize(case.spec, case.key, "cpu")
    with pytest.raises(UnsupportedProblemError, match=f".*{message[13:]} 131,072"):
        Prepared(case.spec, Problem(key=case.key, chip=chip_of(B3)), case.candidate, call)
    # The compiler has no room either.
    monkeypatch.undo()
    (launch,), _ = launches(case, B3)
    answer = compiler.lower(tiles.with_tiles(launch, {"BK": 64, "BV": 1024}).request())
    assert not answer.ok
    assert answer.overflow is not None


def test_elsewhere_there_is_nothing_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "chunk_fwd_o_tiles", lambda *sizes: (64, 1024))
    case = predictable("chunk_fwd_o", 64, 64, "bfloat16")[0]
    chip = dataclasses.replace(chip_of(B3), kind="cpu")
    call = synthesize(case.spec, case.key, torch.device("cpu"))
    assert Prepared(case.spec, Problem(key=case.key, chip=chip), case.candidate, call)


def test_neighbours_of_the_chosen_tiles() -> None:
    (launch,), _ = launches(predictable("chunk_fwd_o", 64, 64, "bfloat16")[0], B3)
    found = list(tiles.combinations(launch))
    assert {"BK": 64, "BV": 64} in found
    assert {tuple(each.values()) for each in found} == {(k, v) for k in (32, 64, 128) for v in (32, 64, 128)}
