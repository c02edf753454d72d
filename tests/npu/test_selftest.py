"""The self-test on the simulated NPU: what kernels do to their processes is a row, and the next one is tried."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from command import run_here
from dv_local import CANDIDATES, SPEC

from layout_tuner import processes
from layout_tuner.config import Config
from layout_tuner.selftest.children import Children
from layout_tuner.selftest.findings import Finding, Report, Request
from layout_tuner.selftest.run import blame, selftest

CHILD = Path(__file__).parents[1] / "npu_child"
OP = SPEC.name
DEFAULT, OTHER, FIRST_SUB, LAST = CANDIDATES[1], CANDIDATES[0], CANDIDATES[2], CANDIDATES[3]
QUESTIONS = ["vector add", "product", "events", "equality", "out of memory", "host cost"]


@pytest.fixture(autouse=True)
def _simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", str(CHILD))
    monkeypatch.setenv("LAYOUT_TUNER_TEST_NPU_CLOCK", "wall")
    befall(monkeypatch)
    yield
    assert not processes.running, "a process was left behind"


def befall(monkeypatch: pytest.MonkeyPatch, *events: tuple[str, dict[str, object], str]) -> None:
    """Says what happens to launches in children."""
    monkeypatch.setenv("LAYOUT_TUNER_TEST_NPU_CHILD", json.dumps(events))


def of_candidate(candidate: str, event: str) -> tuple[str, dict[str, object], str]:
    """What happens to a candidate."""
    variant, _, plan = candidate.partition("/g=")
    return f"chunk_bwd_dv_local_{variant}", {"G_T_CONTIG": plan == "T_CONTIG"}, event


def run(*ops: str) -> Report:
    return selftest(device="npu:0", ops=ops, config=Config())


def rows(report: Report, group: str) -> dict[str, Finding]:
    return {row.part or row.name: row for row in report.rows if row.group == group}


def test_a_device_that_does_what_it_should(sim: ModuleType, monkeypatch, capsys, tmp_path):
    file = tmp_path / "selftest.json"
    done = run_here(["selftest", "--device", "npu", "--ops", OP, "--output", file], monkeypatch, capsys)
    assert done.status == 0, done.out
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 100
    text = " ".join(done.out.split())
    for seen in ("npu:0 Ascend910B3, 20 cube and 40 vector cores", "cann 8.3.RC1", "memory: RuntimeError: NPU out of"):
        assert seen in text, seen
    assert "the device answers a new process" in text and text.endswith("everything is right")
    found = json.loads(file.read_text())
    assert found["right"] and found["device"] == "npu:0"
    assert [each["name"] for each in found["findings"] if each["group"] == "device"] == [*QUESTIONS, "afterwards"]
    parts = {each["part"]: each["state"] for each in found["findings"] if each["group"] == "ops"}
    assert parts == dict.fromkeys(["oracle", *CANDIDATES], "right")
    assert sim.launches() == [] and "npu" not in done.err, "this process does not use the device"


def test_what_candidates_do_is_each_a_row_and_the_others_are_tried(monkeypatch, capsys):
    befall(monkeypatch, of_candidate(OTHER, "wrong"), of_candidate(FIRST_SUB, "stop"), of_candidate(LAST, "die"))
    report = run(OP)
    assert not report.right
    found = rows(report, "ops")
    assert {name: row.state for name, row in found.items()} == {
        OP: "wrong", OTHER: "wrong", FIRST_SUB: "dead", LAST: "dead"
    }  # fmt: skip
    assert found[OP].seen == "1 of 4 candidates are right"
    assert "error inf" in found[OTHER].seen and "507015" in found[FIRST_SUB].seen and "SIGSEGV" in found[LAST].seen
    assert "calls are safe" in found[OP].cure
    assert all(row.cure for row in report.rows if not row.good)
    assert rows(report, "device")["afterwards"].state == "right"


def test_a_question_that_stops_the_queue_ends_no_other(monkeypatch):
    befall(monkeypatch, ("add_probe", {}, "stop"), ("dot_probe", {}, "wrong"))
    monkeypatch.setenv("LAYOUT_TUNER_TEST_NPU_CLOCK", "set")  # on which events are apart by nothing
    found = rows(run(), "device")
    assert list(found) == [*QUESTIONS, "afterwards"]
    states = {name: row.state for name, row in found.items()}
    assert states == dict.fromkeys(QUESTIONS, "right") | {
        "vector add": "dead", "product": "wrong", "events": "wrong", "host cost": "dead", "afterwards": "right"
    }  # fmt: skip
    assert "507015" in found["vector add"].seen and "0 ms between two events" in found["events"].seen
    assert all(found[name].cure for name, state in states.items() if state != "right")


def test_a_kernel_that_does_not_end_is_ended(monkeypatch):
    befall(monkeypatch, of_candidate(DEFAULT, "hang 600"))
    heard: list[Finding] = []
    children = Children(time.monotonic() + 300.0, 10.0, heard.append)
    shape = {"B": 1, "T": 20, "H": 1, "HV": 2, "K": 16, "V": 16, "dtype": "float32"}
    children.work(Request(kind="op", device="npu:0", ops=(OP,), shape=shape), blame("ops", OP), more=False)
    states = {finding.part: finding.state for finding in heard}
    assert states == {"oracle": "right", DEFAULT: "timeout"} | dict.fromkeys([OTHER, FIRST_SUB, LAST], "right")
    assert "no end after 10 s" in next(finding.seen for finding in heard if finding.part == DEFAULT)
