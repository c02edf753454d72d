"""The linter: each rule on a kernel that has the fault and on one that has not, and the command."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command import run_here

from layout_tuner.errors import ConfigError
from layout_tuner.lint import RULES, Finding, lint

ROOT = Path(__file__).parents[1]
HEAD = "import triton\nimport triton.language as tl\nimport torch\n\n\n"
KERNEL = (
    "@triton.jit\ndef kernel(g, o, cu, T, stride,"
    " H: tl.constexpr, HV: tl.constexpr, BT: tl.constexpr, C: tl.constexpr):\n"
)


def found(folder: Path, text: str, rule: str | None = None) -> list[Finding]:
    """Findings in a module of this text."""
    file = folder / "module.py"
    file.write_text(HEAD + text)
    return list(lint([str(file)], rules=None if rule is None else [rule]).findings)


def kernel(*lines: str) -> str:
    return KERNEL + "".join(f"    {line}\n" for line in lines)


TIME = "o_t = tl.program_id(0) * BT + tl.arange(0, BT)"
BAD = {
    "LT001 plain": ("LT001", kernel(TIME, "b = tl.load(g + o_t * HV, mask=o_t < T, other=0.0)")),
    "LT001 store": ("LT001", kernel(TIME, "tl.store(o + tl.program_id(1) + H * o_t, 1.0, mask=o_t < T)")),
    "LT001 column": ("LT001", kernel(TIME, "b = tl.load(g + o_t[:, None] * H)")),
    "LT001 in steps": ("LT001", kernel(TIME, "s = HV", "g += 3", "p = g + o_t * s", "b = tl.load(p)")),
    "LT001 run-time stride": ("LT001", kernel(TIME, "b = tl.load(g + o_t * stride)")),
    "LT001 block pointer": (
        "LT001",
        kernel("p = tl.make_block_ptr(g, (T,), (HV,), (0,), (BT,), (0,))", "b = tl.load(p, boundary_check=(0,))"),
    ),
    "LT001 helper": (
        "LT001",
        "@triton.jit\ndef pointer(base, step, n, CONTIG: tl.constexpr):\n    if CONTIG:\n        return base + n\n"
        "    return base + n * step\n\n" + kernel(TIME, "b = tl.load(pointer(g, HV, o_t, False))"),
    ),
    "LT001 one branch": (
        "LT001",
        kernel(TIME, "if C:", "    p = g + o_t", "else:", "    p = g + o_t * HV", "b = tl.load(p)"),
    ),
    "LT002": ("LT002", kernel("p = tl.make_block_ptr(g, (64, T), (1, H * 64), (0, 0), (64, BT), (0, 1))")),
    "LT003 bound again": (
        "LT003",
        "def launch(g, kernel):\n    step = g.stride(1)\n    g = g.transpose(1, 2)\n    kernel[(1,)](g, step)\n",
    ),
    "LT003 other name": (
        "LT003",
        "def launch(g, kernel):\n    gt = g.transpose(1, 2)\n    kernel[(1,)](gt, g.stride(1))\n",
    ),
    "LT004 number": ("LT004", kernel(TIME, "b = tl.load(g + o_t)", "c = b[0]")),
    "LT004 slice": ("LT004", kernel(TIME, "b = tl.load(g + o_t)", "c = b[:16]")),
    "LT004 tensor": ("LT004", kernel(TIME, "b = tl.load(g + o_t)", "c = b[tl.arange(0, 16)]")),
    "LT005 reshape": ("LT005", kernel("b = tl.zeros([64], tl.float32)", "c = tl.reshape(b, [2, 32])")),
    "LT005 join": ("LT005", kernel("b = tl.zeros([64], tl.float32)", "c = tl.join(b, b)")),
    "LT006 tile": ("LT006", kernel("i = tl.program_id(0).to(tl.int64)", "m = i * BT + tl.arange(0, BT) < T")),
    "LT006 scalar": ("LT006", kernel("n = tl.load(cu).to(tl.int64)", "m = tl.arange(0, BT) < n")),
    "LT006 cast": ("LT006", kernel("n = tl.cast(T, tl.int64)", "m = tl.arange(0, BT)[:, None] < n")),
    "LT007": ("LT007", kernel(TIME, "b = tl.load(g + o_t, mask=o_t < T)")),
    "LT008 later": (
        "LT008",
        kernel("a = tl.zeros([16, 16], tl.float32)", "b = tl.dot(a, a)", "tl.store(o, a)"),
    ),
    "LT008 next turn": (
        "LT008",
        kernel("a = tl.zeros([16, 16], tl.float32)", "for i in range(4):", "    b = tl.dot(a, tl.trans(a))"),
    ),
    "LT009 launch": ("LT009", "def launch(kernel, g):\n    kernel[(1,)](g, num_warps=4)\n"),
    "LT009 autotune": ("LT009", "configs = [triton.Config({'BT': 64}, num_stages=n) for n in (1, 2)]\n"),
    "LT010": ("LT010", "def launch(kernel, g, n, m):\n    kernel[(n, m)](g)\n"),
    "LT010 named": ("LT010", "def launch(kernel, g, n, m):\n    grid = lambda meta: (n, m)\n    kernel[grid](g)\n"),
    "LT011": ("LT011", "def op(beta):\n    return beta.contiguous()\n"),
    "LT011 transposed": ("LT011", "def op(g):\n    return g.float().transpose(1, 2).contiguous()\n"),
    "LT012": ("LT012", "def launch(kernel, g, n):\n    kernel[(n.max().item(),)](g)\n"),
}  # fmt: skip
GOOD = {
    "LT001 contiguous": (
        "LT001",
        kernel(TIME, "b = tl.load(g + tl.program_id(1) * HV * T + o_t, mask=o_t < T, other=0)"),
    ),
    "LT001 rows": ("LT001", kernel(TIME, "o_k = tl.arange(0, 64)", "b = tl.load(g + o_t[:, None] * HV * 64 + o_k)")),
    "LT001 heads": ("LT001", kernel("o_h = tl.arange(0, 8)", "b = tl.load(g + tl.program_id(0) * HV + o_h)")),
    "LT001 scalar": ("LT001", kernel("for i in range(T):", "    b = tl.load(g + i * HV)")),
    "LT001 helper": (
        "LT001",
        "@triton.jit\ndef pointer(base, step, n, CONTIG: tl.constexpr):\n    if CONTIG:\n        return base + n\n"
        "    return base + n * step\n\n" + kernel(TIME, "b = tl.load(pointer(g, HV, o_t, True))"),
    ),
    "LT002": ("LT002", kernel("p = tl.make_block_ptr(g, (T, 64), (H * 64, 1), (0, 0), (BT, 64), (1, 0))")),
    "LT003": (
        "LT003",
        "def launch(g, kernel):\n    g = g.transpose(1, 2)\n    step = g.stride(1)\n    kernel[(1,)](g, step)\n",
    ),
    "LT003 both": ("LT003", "def launch(g, kernel):\n    gt = g.mT\n    kernel[(1,)](g, gt, g.stride(1))\n"),
    "LT004 axes": ("LT004", kernel(TIME, "b = tl.load(g + o_t)", "c = b[:, None] - b[None, :]")),
    "LT004 tuple": ("LT004", kernel("pair = (H, HV)", "c = pair[0]")),
    "LT005": ("LT005", kernel("b = tl.zeros([64], tl.float32)", "c = b[:, None]")),
    "LT006 int32": ("LT006", kernel(TIME, "m = o_t < T")),
    "LT006 address": ("LT006", kernel("i = tl.program_id(0).to(tl.int64)", "p = g + i * HV", "m = i < T")),
    "LT006 back": ("LT006", kernel("i = tl.program_id(0).to(tl.int64).to(tl.int32)", "m = i + tl.arange(0, 8) < T")),
    "LT007 other": ("LT007", kernel(TIME, "b = tl.load(g + o_t, mask=o_t < T, other=0.0)", "c = tl.load(g + o_t)")),
    "LT008 once": ("LT008", kernel("a = tl.zeros([16, 16], tl.float32)", "c = a + 0.0", "b = tl.dot(c, a)", "a.dtype")),
    "LT008 loaded again": (
        "LT008",
        kernel("for i in range(4):", "    a = tl.load(g + i)", "    b = tl.dot(a, tl.trans(a))"),
    ),
    "LT008 other branch": (
        "LT008",
        kernel("a = tl.load(g)", "if C:", "    b = tl.dot(a, a)", "else:", "    b = tl.dot(a, tl.trans(a))"),
    ),
    "LT009": ("LT009", "def launch(kernel, g):\n    kernel[(1,)](g, BT=4)\n    other(num_warps=4)\n"),
    "LT010": (
        "LT010",
        "def launch(kernel, g, n):\n    kernel[(n,)](g)\n    kernel[(n, 1, 1)](g)\n    kernel[(4, 2)](g)\n",
    ),
    "LT011": ("LT011", "def op(q, g):\n    return q.contiguous(), g.transpose(1, 2)\n"),
    "LT012 no launch": ("LT012", "def prepare(n):\n    return n.max().item()\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_fault_is_found(name: str, tmp_path: Path) -> None:
    rule, text = BAD[name]
    assert [each.rule for each in found(tmp_path, text, rule)] == [rule]


@pytest.mark.parametrize("name", GOOD)
def test_what_is_right_is_left_alone(name: str, tmp_path: Path) -> None:
    rule, text = GOOD[name]
    assert found(tmp_path, text, rule) == []


@pytest.mark.parametrize("name", BAD)
def test_a_comment_suppresses_its_own_rule_only(name: str, tmp_path: Path) -> None:
    rule, text = BAD[name]
    (place,) = found(tmp_path, text, rule)
    lines = text.splitlines()
    at = place.line - 1 - HEAD.count("\n")
    for ignored, left in ((f"LT999, {rule}", 0), ("LT999", 1)):
        marked = [f"{line}  # layout-tuner: ignore[{ignored}]" if n == at else line for n, line in enumerate(lines)]
        assert len(found(tmp_path, "\n".join(marked) + "\n", rule)) == left


def test_every_rule_has_snippets_and_a_section() -> None:
    assert {rule for rule, _ in BAD.values()} == {rule for rule, _ in GOOD.values()} == set(RULES)
    text = (ROOT / "docs" / "lint.md").read_text()
    sections = dict(zip(*[iter(re.split(r"^## (LT\d+)$", text, flags=re.MULTILINE)[1:])] * 2))
    assert list(sections) == list(RULES)
    for rule, section in sections.items():
        assert "*Why.*" in section and "*What to do.*" in section and f"ignore[{rule}]" in section


def test_a_finding_says_tensor_loop_and_cost(tmp_path: Path) -> None:
    (each,) = found(tmp_path, kernel("for i in range(T):", f"    {TIME}", "    b = tl.load(g + o_t * HV)"), "LT001")
    assert (each.tensor, each.function, each.loop) == ("g", "kernel", "line 8: for i in range(T)")
    assert "BT bursts of one element and BT x 32 bytes" in each.message and "then a deinterleave" in each.message
    (each,) = found(tmp_path, BAD["LT001 run-time stride"][1], "LT001")
    assert "no constexpr" in each.message
    (each,) = found(tmp_path, BAD["LT001 one branch"][1], "LT001")
    assert "another branch" in each.message


def test_helpers_of_other_files_are_followed(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    helper = "@triton.jit\ndef pointer(base, step, n):\n    return base + n * step\n"
    (package / "shared.py").write_text(HEAD + helper)
    (package / "uses.py").write_text(
        HEAD + "from .shared import pointer\n" + kernel(TIME, "b = tl.load(pointer(g, HV, o_t))")
    )
    (package / "absolute.py").write_text(
        HEAD + "from pack.shared import pointer as p\n" + kernel(TIME, "b = tl.load(p(g, HV, o_t))")
    )
    places = {Path(each.path).name for each in lint([str(package)], rules=["LT001"]).findings}
    assert places == {"uses.py", "absolute.py"}


def test_a_helper_is_judged_by_what_it_is_called_with(tmp_path: Path) -> None:
    """Alone, the second offset could be a scalar; the kernel passes an axis of the tile."""
    helper = "@triton.jit\ndef tile(g, H, o_t, o_k):\n    return tl.load(g + o_t[:, None] * H + o_k)\n\n"
    helper += "@triton.jit\ndef rows(g, H, o_k, BT: tl.constexpr):\n    return tile(g, H, tl.arange(0, BT), o_k)\n\n"
    assert found(tmp_path, helper + kernel("b = rows(g, HV, tl.arange(0, 64)[None, :], BT)"), "LT001") == []
    assert len(found(tmp_path, helper + kernel("b = rows(g, HV, 3, BT)"), "LT001")) == 1


def test_nothing_is_imported_and_torch_is_not_needed(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "pack" / "inner.py").write_text(f"{HEAD}raise SystemExit('imported')\n{BAD['LT001 plain'][1]}")
    code = """
import sys
from layout_tuner.lint import lint
sys.path.insert(0, sys.argv[1])
for name in ("pack", "pack.inner"):
    assert len(lint([name], rules=["LT001"]).findings) == 1
assert not {"torch", "triton", "numpy", "pack"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=tmp_path)


def test_gluon_and_other_code_is_passed_over(tmp_path: Path) -> None:
    head = "from triton.experimental import gluon\n"
    assert found(tmp_path, head + BAD["LT010"][1]) == []
    (tmp_path / "module.py").write_text("def op(beta):\n    return beta.contiguous()\n")
    assert lint([str(tmp_path)]).findings == ()


def test_all_that_is_wrong_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import triton\ndef f(:\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("")
    wanted = [str(tmp_path / name) for name in ("broken.py", "empty", "notes.txt", "nowhere")]
    with pytest.raises(ConfigError) as caught:
        lint(wanted, rules=["LT000"])
    assert all(text in str(caught.value) for text in ("LT000", "broken.py", "empty", "notes.txt", "nowhere"))
    with pytest.raises(ConfigError) as caught:
        lint(["no_such_package", "nor.this"])
    assert "no_such_package" in str(caught.value) and "nor.this" in str(caught.value)
    report = lint([str(tmp_path)])
    assert list(report.unread) == [str(tmp_path / "broken.py")] and report.files == 0


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "module.py"
    file.write_text(HEAD + BAD["LT001 plain"][1])
    done = run_here(["lint", file], monkeypatch, capsys)
    assert done.status == 1
    assert f"{file}:9:9: LT001 g is read along time" in done.out
    done = run_here(["lint", file, "--json"], monkeypatch, capsys)
    (finding,) = json.loads(done.out)["findings"]
    assert done.status == 1 and (finding["rule"], finding["line"], finding["tensor"]) == ("LT001", 9, "g")
    done = run_here(["lint", file, "--rules", "LT006, LT007"], monkeypatch, capsys)
    assert (done.status, done.out) == (0, "")
    done = run_here(["lint", tmp_path / "a", tmp_path / "b"], monkeypatch, capsys)
    assert done.status == 2 and str(tmp_path / "a") in done.err and str(tmp_path / "b") in done.err


def test_kernels_here_have_no_gate_by_a_run_time_stride() -> None:
    """Our own strided paths are candidates; none of their strides is a run-time value."""
    findings = lint([str(ROOT / "kernels")], rules=["LT001"]).findings
    assert not [each for each in findings if "no constexpr" in each.message]
