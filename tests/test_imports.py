"""What imports what: one way, and nothing heavy before it is needed."""

import ast
import graphlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import layout_tuner

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "layout_tuner"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# A module imports from its own row and from those above it. A folder counts as one.
ROWS = (
    ("errors", "files"),
    ("config", "layouts", "keys", "watchdog", "watched"),
    ("registry", "device", "numerics", "packing"),
    ("environment", "failures", "measure", "reference", "launcher", "direct", "inputs", "shapes", "forcing"),
    ("counters", "footprint"),
    ("prepare", "tuner"),
    ("checking", "decisions", "fitting"),
    ("experiment", "isolation", "misses"),
    ("ahead",),
    ("router",),
    ("ops",),
    ("api", "explanation", "warming", "ascend"),
    ("child",),
    ("integrations",),
    ("cli",),
)
ROW = {name: number for number, names in enumerate(ROWS) for name in names}
USES_CACHE = {"tuner", "decisions", "explanation", "misses", "router", "warming", "cli"}
# The device layer asks whether kernels are interpreted, and whether the interpreter computes right, of two kernels.
USES_KERNELS = {"ops": None, "ascend": {"tiling"}, "device": {"time_axis", "probe"}}


def imports(file: Path, package: str) -> Iterator[str]:
    """Full names of what a file imports when it runs, wherever the statement stands; not what is for type checkers."""

    def visit(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                yield from visit(child)
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    yield from visit(ast.parse(file.read_text()))


def sources(folder: Path, package: str) -> Iterator[tuple[str, str]]:
    """Module of a package (first part of its name) and full name of a thing it imports."""
    for file in sorted(folder.rglob("*.py")):
        inner = file.relative_to(folder)
        module = inner.parts[0].removesuffix(".py")
        home = ".".join([package, *inner.parts[:-1]])
        for imported in imports(file, home):
            yield module, imported


OWN = [(module, imported) for module, imported in sources(PACKAGE, "layout_tuner") if module != "__init__"]
EDGES = {
    (module, imported.split(".")[1])
    for module, imported in OWN
    if imported.startswith("layout_tuner.") and imported.split(".")[1] not in (module, "__version__")
}


def test_importing_the_package_imports_the_standard_library_only() -> None:
    code = """
import sys
before = set(sys.modules)
import layout_tuner
assert layout_tuner.__version__
dir(layout_tuner)
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - sys.stdlib_module_names - {"layout_tuner"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_public_names_stay_what_they_are() -> None:
    for name in layout_tuner.__all__:
        assert getattr(layout_tuner, name) is getattr(layout_tuner, name)
    for name in ("enable", "disable", "is_enabled", "warmup", "Config"):
        assert callable(getattr(layout_tuner, name))
    assert set(layout_tuner.__all__) <= set(dir(layout_tuner))
    with pytest.raises(AttributeError, match="no attribute 'tune'"):
        _ = layout_tuner.tune


def test_no_public_name_is_also_a_module() -> None:
    """Importing such a module would put it in the name's place."""
    modules = {path.stem for path in PACKAGE.iterdir()}
    assert set(layout_tuner.__all__) & modules <= {"ops"}


def test_every_module_has_its_row() -> None:
    found = {module for module, _ in OWN}
    assert found <= ROW.keys(), f"say in ROWS where {sorted(found - ROW.keys())} belong"


def test_imports_point_one_way() -> None:
    upward = [
        f"{module} imports {imported}"
        for module, imported in sorted(EDGES)
        if imported in ROW and module in ROW and ROW[imported] > ROW[module]
    ]
    assert not upward


def test_no_module_imports_itself_through_others() -> None:
    graph: dict[str, set[str]] = {}
    for module, imported in EDGES:
        graph.setdefault(module, set()).add(imported)
    graphlib.TopologicalSorter(graph).prepare()


def test_the_cache_is_imported_by_few_and_imports_errors_and_files_only() -> None:
    assert {module for module, imported in EDGES if imported == "cache"} <= USES_CACHE
    own = {imported for _, imported in sources(ROOT / "cache", "layout_tuner.cache")}
    others = {name for name in own if name.startswith("layout_tuner.") and not name.startswith("layout_tuner.cache")}
    assert {name.split(".")[1] for name in others} == {"errors", "files"}
    assert not {name.partition(".")[0] for name in own} & {"torch", "triton", "numpy"}


def test_kernels_are_imported_by_ops_and_import_triton_only() -> None:
    for module, imported in OWN:
        if imported.startswith("layout_tuner.kernels"):
            assert module in USES_KERNELS, f"{module} imports {imported}"
            allowed = USES_KERNELS[module]
            assert allowed is None or set(imported.split(".")[2:]) & allowed, f"{module} imports {imported}"
    for module, imported in sources(ROOT / "kernels", "layout_tuner.kernels"):
        assert imported.partition(".")[0] == "triton" or imported.startswith("layout_tuner.kernels."), (
            f"kernels/{module} imports {imported}"
        )
    tiling = list(imports(ROOT / "kernels" / "tiling.py", "layout_tuner.kernels"))
    assert tiling == []


def attributes(folder: Path) -> Iterator[tuple[str, str]]:
    """File and dotted text of every attribute that a source reads."""
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                yield str(file.relative_to(PACKAGE)), ast.unparse(node)


def test_one_module_asks_the_device_and_one_reads_the_environment() -> None:
    questions = ("torch.npu", "torch.cuda", "torch.get_device_module")
    asks = {name for name, text in attributes(PACKAGE) if text in questions}
    assert asks <= {"device.py"}
    reads = {name for name, text in attributes(PACKAGE) if text in ("os.environ", "os.getenv", "os.putenv")}
    assert reads == {"config.py", "ascend/worker.py"}  # the worker is a program of its own


def test_only_the_command_prints() -> None:
    printing = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert {name for name in printing if not name.startswith("cli/")} == set()


def test_packages_are_the_folders() -> None:
    folders = {
        ".".join(["layout_tuner", *file.parent.relative_to(PACKAGE).parts]) for file in PACKAGE.rglob("__init__.py")
    }
    mapped = PROJECT["tool"]["setuptools"]["package-dir"]
    assert mapped == {"layout_tuner": "layout_tuner", "layout_tuner.kernels": "kernels", "layout_tuner.cache": "cache"}
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == folders | {"layout_tuner.kernels", "layout_tuner.cache"}
    for room in ("kernels", "cache"):
        assert {file.parent for file in (ROOT / room).rglob("*.py") if "__pycache__" not in file.parts} == {ROOT / room}


def test_tests_are_imported_by_path() -> None:
    assert "--import-mode=importlib" in PROJECT["tool"]["pytest"]["ini_options"]["addopts"]
    assert not (ROOT / "tests" / "__init__.py").exists()
    assert str(ROOT) not in sys.path


@pytest.mark.parametrize("line", ["import kernels", "from kernels import x", "import cache", "from cache import x"])
def test_ruff_bans_the_bare_names(line: str) -> None:
    ruff = Path(sys.executable).with_name("ruff")
    done = subprocess.run(
        [ruff, "check", "--output-format", "concise", "--stdin-filename", "layout_tuner/made_up.py", "-"],
        input=f'"""Doc."""\n\n{line}\n',
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert "TID251" in done.stdout
