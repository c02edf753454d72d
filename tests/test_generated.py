"""Generated functions: one place executes them, their lines are shown, and no name in them stands for two things."""

import ast
import inspect
import linecache
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from launches import CONSTANTS, Launcher, Triton, compilable, stubbed
from layout_tuner.kernels import dv_local

from layout_tuner.launch import direct, generated, guards, launcher, replay
from layout_tuner.ops.solve_tril import SPEC

ROOT = Path(__file__).parents[1]


def executed(text: str) -> Iterator[str]:
    """Uses of what executes a text, under the names that Python gives it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = ast.unparse(node)
            if name.removeprefix("builtins.") in ("exec", "eval", "compile", "__builtins__"):
                yield name
        elif isinstance(node, ast.ImportFrom) and node.module == "builtins":
            yield from (alias.name for alias in node.names)


def test_one_place_executes_text() -> None:
    source = "run = exec\nbuiltins.eval('1')\nmodel.eval()\nre.compile('')\nfrom builtins import compile as c"
    assert sorted(executed(source)) == ["builtins.eval", "compile", "exec"]
    files = [file for folder in ("layout_tuner", "cache", "kernels") for file in (ROOT / folder).rglob("*.py")]
    found = {file.relative_to(ROOT).as_posix(): list(executed(file.read_text())) for file in files}
    assert {file: names for file, names in found.items() if names} == {
        "layout_tuner/launch/generated.py": ["exec", "compile"]
    }


def broken(*_: object) -> Any:
    raise RuntimeError("broken")


def hit() -> Callable[[], object]:
    """A call that fits, whose launch fails."""
    A = torch.zeros(1, 64, 2, 16)
    known = guards.signature(SPEC, (A,), ("float32",), None, None)
    run = guards.running(SPEC, known, guards.guard((A,)), broken, spread=True)
    return lambda: run((A,), ("float32",), (), None, None)


def launch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """A direct launch whose launcher fails."""
    tensors = [torch.zeros(1, 20, heads, 16) for heads in (2, 2, 4)]
    given = [*tensors, torch.zeros(1, 20, 4), None, None, torch.zeros(1, 20, 4, 16), None, None, 0.5, 20, 2, 0, 8]
    bound = launcher.bind(compilable(dv_local.chunk_bwd_dv_local_full), **CONSTANTS)
    bound(3, *given)
    monkeypatch.setattr(Launcher, "launch", broken)
    bound.direct = bound.first
    bound.keep(*bound.variants.popitem()[:1], bound.kernel.device_caches[-1][0].popitem()[1])
    return lambda: bound(3, *given)


def prepared() -> Callable[[], object]:
    """A prepared list in which torch fails."""
    x = torch.ones(3)
    made = replay.prepare(lambda tensors: (torch.empty_like(tensors[0]).copy_(tensors[0]),), (x,), ())
    assert made is not None
    assert made.fits((x,))
    return lambda: made.run((None,))  # type: ignore[arg-type]


@pytest.fixture
def stub() -> Iterator[Triton]:
    if triton.__version__.rpartition(".")[0] != "3.6" or torch.cuda.is_available():
        pytest.skip("stands on Triton 3.6 and on no GPU")
    with stubbed() as made:
        yield made


@pytest.mark.parametrize("kind", ["hit", "launch", "prepared"])
def test_a_traceback_shows_the_generated_line(kind: str, stub: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    failing, line = {
        "hit": lambda: (hit(), "return launch(A, cu_seqlens, chunk_indices)"),
        "launch": lambda: (launch(monkeypatch), "start(grid, 1, 1, stream(device), function,"),
        "prepared": lambda: (prepared(), "copy_(made, given)"),
    }[kind]()
    linecache.checkcache()
    with pytest.raises((RuntimeError, AttributeError, TypeError)) as raised:
        failing()
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert any(each.filename.startswith("<layout_tuner: ") and line in (each.line or "") for each in frames), frames


def test_the_docstrings_example_is_what_is_generated() -> None:
    A = torch.zeros(1, 64, 2, 16)
    known = guards.signature(SPEC, (A,), ("float32",), None, None)
    run = guards.running(SPEC, known, None, broken, spread=True)
    file = inspect.unwrap(run).__code__.co_filename
    assert "hit of solve_tril" in file
    text = "".join(linecache.getlines(file))
    assert textwrap.indent(text.rstrip(), "    ") in (generated.__doc__ or "")


# -- names -------------------------------------------------------------------------------------------------------


def test_a_name_stands_for_one_thing() -> None:
    wanted = ["g", "g_shape", "class", "3d", "g", "a-b", "launch"]
    found = generated.distinct(wanted, ["launch"], ["_shape"])
    assert found == ["g", "g_shape_2", "class_2", "_3d", "g_2", "a_b", "launch_2"]
    assert generated.distinct(["g_shape", "g"], (), ["_shape"]) == ["g_shape", "g_2"]


@pytest.mark.parametrize("guarded", [True, False])
def test_operands_named_like_what_the_text_itself_names(guarded: bool) -> None:
    """Each operand and option of such an op is still compared with its own facts."""
    names = guards.Names("odd", ("g", "g_shape", "fitting", "check", "plain"), ("launch", "g_dtype"), ("tally", "type"))
    tensors = [torch.zeros(size + 1, 2) for size in range(len(names.operands))]
    known = ("", (3, "x"), (), None, None, *guards.facts(tensors))
    handed: list[object] = []
    run = guards.made_for(
        names, known, guards.guard(tensors) if guarded else None, "spread", lambda *given: handed.append(given) or ()
    )
    assert run(tensors, (3, "x"), (0.5, None), None, None) == ()
    assert handed == [(*tensors, 0.5, None, None, None)]
    for place in range(len(tensors)):
        other = [torch.zeros(9, 2) if i == place else x for i, x in enumerate(tensors)]
        assert run(other, (3, "x"), (0.5, None), None, None) is None
    assert run(tensors, (3, "y"), (0.5, None), None, None) is None
    assert run(tensors, (4, "x"), (0.5, None), None, None) is None
    assert run(tensors, (3, "x"), (0.5, 1), None, None) is None
    assert len(handed) == 1


def test_a_kernels_parameters_named_like_what_the_text_itself_names(stub: Triton) -> None:
    """The launcher gets each argument in its place."""

    class Parameter:
        do_not_specialize = do_not_specialize_on_alignment = False

        def __init__(self, name: str) -> None:
            self.name = name

    class Kernel:
        params = tuple(Parameter(name) for name in ("q", "q_at", "start", "grid", "T", "metadata", "BT"))
        pre_run_hooks: tuple[()] = ()

    started: list[tuple[object, ...]] = []
    how = direct.style()
    assert how is not None
    tensors = [torch.zeros(4) for _ in range(2)]
    given = [*tensors, None, 0.5, 7, None]
    facts = tuple((x.dtype, True) if isinstance(x, torch.Tensor) else None if x is None else type(x) for x in given)
    quiet = dict.fromkeys(("function", "cooperative", "dependent", "metadata"), "ours")
    calls = type("Hooks", (), {"calls": ()})
    knobs = type("Knobs", (), {
        "launch_enter_hook": calls, "launch_exit_hook": calls, "instrumentation_mode": "", "debug": False,
    })  # fmt: skip
    names = {**quiet, "start": lambda *handed: started.append(handed)}
    names |= {"runtime": knobs, "compilation": knobs, "debug": False}
    made = direct.direct_launch(how, Kernel, {"BT": 64}, (-1, facts), names)
    assert made(1, *given)
    assert started[0][0] == 1
    assert started[0][-7:] == (*[x.data_ptr() for x in tensors], None, 0.5, 7, None, 64)
    assert not made(1, *given[:4], "7", None)
