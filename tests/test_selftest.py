"""The self-test in the interpreter, and what it says of what it finds."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command import run_here
from dv_local import SPEC
from layout_tuner.cache.filesystem import FileSystem

from layout_tuner.cli.selftest import COLUMNS, report_lines
from layout_tuner.selftest import candidates, machines
from layout_tuner.selftest.children import Children, Lost
from layout_tuner.selftest.findings import Begun, Finding, Message, Plan, Report, Request
from layout_tuner.selftest.run import SHAPE, blame, checked

OP = "chunk_local_cumsum"


def test_the_interpreter_is_right_and_the_text_can_be_pasted(tmp_path: Path, monkeypatch, capsys) -> None:
    file = tmp_path / "found.json"
    shape = "B=1,T=20,HV=2,dtype=fp32"
    arguments = ["selftest", "--device", "cpu", "--ops", OP, "--shape", shape, "--output", file]
    done = run_here(arguments, monkeypatch, capsys)
    assert done.status == 0, done.out + done.err
    assert max(map(len, done.out.splitlines())) <= COLUMNS and done.out.isascii()
    text = " ".join(done.out.split())
    assert "in Triton's interpreter" in text and "whose times say nothing" in text
    assert "torch 2." in text and "Python 3." in text and text.endswith("everything is right")
    found = json.loads(file.read_text())
    assert found["interpreted"] and found["right"]
    parts = [each for each in found["findings"] if each["name"] == OP]
    assert len(parts) > 1 and {each["state"] for each in parts} == {"right"}
    assert not list(Path.home().glob("*.sqlite")), "it stores nothing"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "T=0,HV=3,H=2,dtype=int8,X=1"], ("T: wanted a number from 1", "no such dtype", "X: no such size")),
        (["--shape", "H=2,HV=3"], ("HV: wanted a multiple of H=2",)),
        (["--ops", "no_such_op"], ("no op 'no_such_op'", OP)),
        (["--device", "xpu:9"], ("xpu",)),
        (["--output", "/no/such/folder/x"], ("/no/such/folder/x",)),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_is_tried(arguments, said, monkeypatch, capsys) -> None:
    done = run_here(["selftest", *arguments], monkeypatch, capsys)
    assert done.status == 2 and done.out.strip() == ""
    assert all(part in done.err for part in said), done.err


# -- what a part's end says --------------------------------------------------------------------------------------


class Scripted(Children):
    """Children that say what a test wrote, one after the other."""

    def __init__(self, *scripts: list[Message | Lost], left_s: float = 100.0) -> None:
        self.found: list[Finding] = []
        self.asked: list[Request] = []
        self.scripts = list(scripts)
        super().__init__(time.monotonic() + left_s, 10.0, self.found.append)

    def take(self, more: bool) -> "Scripted":  # type: ignore[override]
        return self

    def messages(self, request: Request, part_s: float, deadline: float) -> Iterator[Message | Lost]:
        self.asked.append(request)
        yield from self.scripts.pop(0)


def part(name: str, state: str = "right", seen: str = "x") -> Finding:
    return Finding(group="ops", name=OP, part=name, state=state, seen=seen, cure="" if state == "right" else "do")


def lost(name: str, state: str) -> Lost:
    return Lost(part=name, state=state, seen="its process was ended by SIGSEGV", seconds=1.0)


PLAN = Plan(parts=("oracle", "a", "b", "c"))


def test_the_parts_after_one_that_died_are_tried_in_another_child() -> None:
    first = [PLAN, Begun(part="oracle"), part("oracle"), Begun(part="a"), part("a"), Begun(part="b"), lost("b", "dead")]
    children = Scripted(first, [PLAN, Begun(part="c"), part("c"), lost("", "dead")])
    children.work(Request(kind="op", device="cpu", ops=(OP,)), blame("ops", OP))
    assert [(each.part, each.state) for each in children.found] == [
        ("oracle", "right"), ("a", "right"), ("b", "dead"), ("c", "right"), ("", "dead")
    ]  # fmt: skip
    again = children.asked[1]
    assert set(again.done) == {"oracle", "a", "b"} and set(again.right) == {"oracle", "a"}


def test_what_the_budget_leaves_is_said_of_each_part() -> None:
    children = Scripted(
        [PLAN, Begun(part="oracle"), part("oracle"), Begun(part="a"), lost("a", "timeout")], left_s=-1.0
    )
    children.work(Request(kind="op", device="cpu", ops=(OP,)), blame("ops", OP))
    assert [(each.part, each.state) for each in children.found[2:]] == [("b", "left"), ("c", "left")]
    assert all("--budget" in each.cure for each in children.found[1:])


def test_a_child_that_never_began_is_one_row() -> None:
    children = Scripted([lost("", "failed")])
    assert children.work(Request(kind="machine", device=None), blame("machine", "start")) is None
    (found,) = children.found
    assert (found.name, found.state) == ("start", "failed") and "import torch" in found.cure


# -- what the table says -----------------------------------------------------------------------------------------


def report(*findings: Finding) -> Report:
    return Report(
        findings=findings, device="npu:0", interpreted=False, seconds=1.0, started="2026-01-01T00:00:00+00:00"
    )


def test_an_op_that_is_right_is_one_row() -> None:
    (row,) = report(part("oracle"), part("a", seen="o: error 1e-3 of 6e-3 allowed"), part("b")).rows
    assert row.state == "right" and row.seen.startswith("2 candidates in 0.0 s; o: error 1e-3")


@pytest.mark.parametrize(
    ("parts", "state", "cure"),
    [
        ([part("oracle"), part("a", "wrong"), part("b")], "wrong", f'LAYOUT_TUNER_FORCE="{OP}=b" runs a candidate'),
        (
            [part("oracle"), part("a"), part("b", "dead")],
            "dead",
            "calls are safe: what fails its check",
        ),
        ([part("oracle"), part("a", "dead"), part("b", "wrong")], "dead", f"on_wrong says what calls of {OP} do then"),
        ([part("oracle", "failed")], "failed", "no kernel can be judged where torch's own operators fail"),
        ([part("oracle"), part("a", "timeout"), part("b", "left")], "timeout", "give it more time (--budget"),
    ],
    ids=["the default is wrong", "another one dies", "none is right", "torch fails", "no time"],
)
def test_an_op_that_is_not_right_says_what_to_do(parts: list[Finding], state: str, cure: str) -> None:
    made = report(*parts)
    first, *others = made.rows
    assert not made.right
    assert first.state == state and cure in first.cure
    assert [row.part for row in others] == [each.part for each in parts if not each.good]


def test_every_line_fits_whatever_is_said() -> None:
    long = Finding(group="device", name="a name that is longer than any other name that there is here", state="wrong",
                   seen="word " * 60, cure="do " * 60)  # fmt: skip
    lines = report_lines(report(long, part("x" * 60 + "/g=T_CONTIG", "wrong", "tab\tand\x1b[31m colour")))
    assert max(map(len, lines)) <= COLUMNS
    assert all(line.isprintable() for line in lines)


# -- what a machine says -----------------------------------------------------------------------------------------


def test_variables_are_shown_and_doubted_and_keep_no_password(monkeypatch) -> None:
    monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("LAYOUT_TUNER_CACHE_URL", "postgresql+psycopg://me:secret@host/name")
    shown, doubt = list(machines.variables())
    assert "ASCEND_LAUNCH_BLOCKING=1" in shown.seen and "secret" not in shown.seen and "@host/name" in shown.seen
    assert doubt.state == "doubt" and doubt.good and "unset ASCEND_LAUNCH_BLOCKING" in doubt.cure


def test_a_cache_on_a_network_says_where_to_put_it(monkeypatch) -> None:
    monkeypatch.setattr(machines, "file_system", lambda place: FileSystem(name="nfs", local=False))
    found = machines.folder("Triton's cache", Path.home() / ".triton" / "cache", "", "TRITON_CACHE_DIR on a local disk")
    assert found.state == "doubt" and "~/.triton/cache (nfs)" in found.seen and "TRITON_CACHE_DIR" in found.cure


def test_a_shape_that_an_op_does_not_serve_is_skipped_with_its_reason() -> None:
    request = Request(kind="op", device="cpu", ops=(SPEC.name,), shape=checked({**SHAPE, "K": 300}))
    heard: list[Message] = []
    candidates.try_all(request, torch.device("cpu"), heard.append)
    assert [type(each).__name__ for each in heard] == ["Finding", "Done"]
    (found,) = [each for each in heard if isinstance(each, Finding)]
    assert found.state == "skipped" and "K=300" in found.seen


def test_short_dtypes_and_defaults_make_a_shape() -> None:
    assert checked({"B": 1, "T": 9, "H": 1, "HV": 2, "K": 16, "V": 16, "dtype": "fp16"})["dtype"] == "float16"
