"""The rule that orders candidates by their counts."""

import dataclasses

import pytest

from layout_tuner.ascend.candidates import CandidateReport, KernelReport
from layout_tuner.ascend.facts import KernelFacts, Transfer
from layout_tuner.ascend.prediction import predict, published_units, units
from layout_tuner.ascend.published import PUBLISHED, PUBLISHED_MS, published
from layout_tuner.spec.keys import Form, Key

KEY = Key(op="op", B=2, T=2048, H=4, HV=8, K=64, V=64, varlen=False, dtype="bfloat16", form=Form.parse("BT=64"))
TASKS = 2 * 32 * 8
GATE_BYTES = 2 * 2048 * 8 * 4


@pytest.mark.parametrize(("kernel", "copies"), [("dv_local", 1), ("dqkwg", 2)])
def test_the_published_kernels_are_ordered_as_measured(kernel: str, copies: int) -> None:
    # dqkwg copies g in and dg out; each copy reads and writes every element.
    strided = published_units(published(f"{kernel} s"), TASKS, 0)
    contiguous = published_units(published(f"{kernel} c"), TASKS, copies * 2 * GATE_BYTES)
    strided_ms, contiguous_ms = PUBLISHED_MS[kernel]
    assert (strided > contiguous) == (strided_ms > contiguous_ms)


def test_published_rows_are_named_once() -> None:
    assert len({row.name for row in PUBLISHED}) == len(PUBLISHED)
    with pytest.raises(KeyError):
        published("dv_local")


def report(name: str, bursts: int, short: int = 0, relayout: int = 0, error: str = "") -> CandidateReport:
    transfer = Transfer(
        route="GM->UB",
        argument="g",
        pattern="rows",
        source="k.py:1",
        calls=1,
        bytes=6400,
        bursts=bursts,
        short_bursts=short,
        short_burst_bytes=4 * short,
    )
    facts = KernelFacts(
        kernel="k",
        target="Ascend910B3",
        compiler="c 1",
        ub_bytes=1,
        l1_bytes=0,
        l0c_bytes=0,
        workspace_plan_bytes=0,
        split=None,
        transfers=(transfer,),
        vector_calls=(),
        cube_calls=(),
        flops=0.0,
        deinterleaves=(),
        transposes=(),
        scalarised=(),
        scalar_loads=(),
        syncs=(),
        notes=(),
        unknown=(),
    )
    kernel = KernelReport(kernel="k", grid=2, tasks=10, constexprs={}, facts=None if error else facts, error=error)
    return CandidateReport(
        op="op",
        key=KEY,
        candidate=name,
        revision="r",
        target="Ascend910B3",
        compiler="c 1",
        kernels=(kernel,),
        relayout_bytes=relayout,
    )


def test_units() -> None:
    assert units(report("a", bursts=10)) == 10 * (200 + 10)
    # 25 bursts of 4 bytes move 25 blocks instead of 100 / 32.
    assert units(report("a", bursts=25, short=25)) == 10 * ((6400 - 100) / 32 + 25 + 25)
    assert units(report("a", bursts=10, relayout=64)) == 2100 + 2


def test_the_fewest_units_are_predicted() -> None:
    found = predict([report("a", bursts=20), report("b", bursts=10, relayout=320), report("c", 1, error="no")])
    assert found is not None
    assert found.candidate == "b"
    assert found.units == {"a": 2200, "b": 2110}
    assert found.rejected == {"c": "k: no"}
    assert found.evidence["compiler"] == "c 1"
    assert found.evidence["candidates"]["b"]["relayout_bytes"] == 320
    assert not any("_ms" in name or name[-2:] == "_s" for name in found.evidence["candidates"]["b"]["totals"])


def test_a_tie_keeps_the_first() -> None:
    found = predict([report("a", bursts=10), report("b", bursts=10)])
    assert found is not None
    assert found.candidate == "a"


def test_nothing_compiled() -> None:
    refused = dataclasses.replace(report("a", 1), kernels=(), error="UnsupportedProblemError: K")
    assert predict([refused, report("b", 1, error="no")]) is None
