"""What imports what: one way, in no circle, and nothing heavy before it is needed."""

import ast
import graphlib
import itertools
import re
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

# A room imports from its own row and from those above it; a file that lies in no folder is a room.
ROWS = (
    ("kernels",),
    ("errors", "files", "forking", "processes"),
    ("config", "cache", "device", "installation", "importable"),
    ("spec", "reference"),
    ("launch", "lint"),
    ("tuning",),
    ("dispatch",),
    ("ops",),
    ("integrations", "ranks"),
    ("ascend", "warming"),
    ("syncing",),
    ("api", "explanation", "child", "selftest"),
    ("serving",),
    ("cli",),
)
# The cache's own, likewise.
CACHE_ROWS = (
    ("records", "atomic", "faults", "filesystem", "hosts", "names", "misses", "validation", "evidence", "hindsight",
     "interface",
     "merge", "memory"),
    ("sqlite",),
    ("places",),
    ("sharing",),
    ("layers", "listing"),
)  # fmt: skip
USES_CACHE = {"tuning", "dispatch", "explanation", "ascend", "warming", "cli", "selftest", "ranks", "syncing"}
# The device layer asks whether kernels are interpreted, and whether the interpreter multiplies right, of two kernels;
# a revision is a hash of kernels' text. Ascend's compiler is told where they lie, for kernels of other folders.
USES_KERNELS = {
    "ops": None,
    "device": {"time_axis", "probe"},
    "spec": {""},
    "selftest": {"probe"},
    "ascend": {"time_axis"},
}
FOLDERS = {"layout_tuner": PACKAGE, "layout_tuner.cache": ROOT / "cache", "layout_tuner.kernels": ROOT / "kernels"}


def files() -> Iterator[tuple[str, Path]]:
    """Name and file of every module, the package's own `__init__` aside: it imports only what it is asked for."""
    for home, folder in FOLDERS.items():
        for file in sorted(folder.rglob("*.py")):
            parts = [home, *file.relative_to(folder).with_suffix("").parts]
            name = ".".join(parts).removesuffix(".__init__")
            if name != "layout_tuner":
                yield name, file


MODULES = dict(files())
PACKAGES = {name for name, file in MODULES.items() if file.name == "__init__.py"}


def type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def running(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those that are for type checkers only."""
    for child in ast.iter_child_nodes(tree):
        if type_checking(child):
            for other in child.orelse:
                yield other
                yield from running(other)
            continue
        yield child
        yield from running(child)


def imports(text: str, package: str) -> Iterator[str]:
    """Full names of what a source imports when it runs, wherever the statement stands.

    The name of a module in a string counts too: of `importlib.import_module`, of `sys.modules`, of whatever else.
    """
    documentation = set()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            documentation.add(id(node.body[0].value))  # type: ignore[attr-defined]
    for node in running(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            if re.fullmatch(r"layout_tuner(\.\w+)+\.?", node.value):
                yield node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            match node.args:
                case [ast.Constant(value=str(name)), ast.Name(id="__package__")]:
                    yield package + name if name.startswith(".") else name


def module_of(imported: str) -> str | None:
    """The module that an imported name is, or is a part of; None for what is not ours."""
    parts = imported.rstrip(".").split(".")
    for count in range(len(parts), 1, -1):
        if (name := ".".join(parts[:count])) in MODULES:
            return name
    return None


def room(name: str) -> str:
    return name.split(".")[1]


IMPORTS = {
    name: sorted(set(imports(file.read_text(), name if name in PACKAGES else name.rpartition(".")[0])))
    for name, file in MODULES.items()
}
EDGES = sorted(
    {
        (name, target)
        for name, found in IMPORTS.items()
        for imported in found
        if (target := module_of(imported)) is not None and target != name
    }
)


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


def test_an_import_is_seen_however_it_is_written() -> None:
    source = '''
"""layout_tuner.in_a_docstring"""
import layout_tuner.a
from . import b
from ..c import d
if TYPE_CHECKING:
    from .for_types import T
else:
    from .otherwise import T
def later():
    """layout_tuner.in_a_docstring"""
    from .e import f
    importlib.import_module(".g", __package__)
    sys.modules.get("layout_tuner.h.i")
    importlib.import_module(f"layout_tuner.j.{name}")
'''
    assert {each for each in imports(source, "layout_tuner.room") if each.startswith("layout_tuner")} == {
        "layout_tuner.a",
        "layout_tuner.room.b",
        "layout_tuner.c.d",
        "layout_tuner.room.otherwise.T",
        "layout_tuner.room.e.f",
        "layout_tuner.room.g",
        "layout_tuner.h.i",
        "layout_tuner.j.",
    }


def test_every_room_has_its_row() -> None:
    rows, cache_rows = set(itertools.chain(*ROWS)), set(itertools.chain(*CACHE_ROWS))
    assert {room(name) for name in MODULES} <= rows
    inside = {name.split(".")[2] for name in MODULES if name.startswith("layout_tuner.cache.")}
    assert inside <= cache_rows


def test_imports_point_one_way() -> None:
    row = {name: number for number, names in enumerate(ROWS) for name in names}
    upward = [f"{name} imports {target}" for name, target in EDGES if row[room(target)] > row[room(name)]]
    row = {name: number for number, names in enumerate(CACHE_ROWS) for name in names}
    upward += [
        f"{name} imports {target}"
        for name, target in EDGES
        if room(name) == room(target) == "cache" and "layout_tuner.cache" not in (name, target)
        if row[target.split(".")[2]] > row[name.split(".")[2]]
    ]
    assert not upward


def test_imports_loggers_and_dataclasses_are_written_one_way() -> None:
    """A module of the same folder is named by its way from here; `layout_tuner.cache` and `.kernels` in full."""
    odd = []
    for name, file in MODULES.items():
        text = file.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                base = node.module if node.module != "layout_tuner" else f"layout_tuner.{node.names[0].name}"
                home = room(name) if room(name) in ("cache", "kernels") else ""
                if base.startswith("layout_tuner.") and home == (
                    room(base) if room(base) in ("cache", "kernels") else ""
                ):
                    odd.append(f"{name}: from {node.module} import")
        odd += [f"{name}: {line}" for line in text.splitlines() if re.match(r"import dataclasses|logger = ", line)]
    assert not odd


def test_no_file_imports_itself_through_others() -> None:
    graph: dict[str, set[str]] = {}
    for name, target in EDGES:
        graph.setdefault(name, set()).add(target)
    graphlib.TopologicalSorter(graph).prepare()


def test_the_cache_is_imported_by_few_and_imports_little() -> None:
    assert {room(name) for name, target in EDGES if room(target) == "cache" != room(name)} <= USES_CACHE
    assert {room(target) for name, target in EDGES if room(name) == "cache" != room(target)} <= set(ROWS[1])
    own = {imported for name, found in IMPORTS.items() if room(name) == "cache" for imported in found}
    assert not {name.partition(".")[0] for name in own} & {"torch", "triton", "numpy"}


def test_kernels_are_imported_by_ops_and_import_triton_only() -> None:
    for name, found in IMPORTS.items():
        for imported in found:
            if room(name) != "kernels" and imported.startswith("layout_tuner.kernels"):
                assert room(name) in USES_KERNELS, f"{name} imports {imported}"
                allowed = USES_KERNELS[room(name)]
                assert allowed is None or set(imported.split(".")[2:]) & allowed, f"{name} imports {imported}"
            if room(name) == "kernels":
                assert imported.partition(".")[0] == "triton" or imported.startswith("layout_tuner.kernels."), (
                    f"{name} imports {imported}"
                )
    assert IMPORTS["layout_tuner.kernels.tiling"] == []


def attributes(folder: Path) -> Iterator[tuple[str, str]]:
    """File and dotted text of every attribute that a source reads."""
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                yield str(file.relative_to(PACKAGE)), ast.unparse(node)


def test_one_module_asks_the_device_and_one_reads_the_environment() -> None:
    questions = ("torch.npu", "torch.cuda", "torch.get_device_module")
    asks = {name for name, text in attributes(PACKAGE) if text in questions}
    assert asks <= {"device/driver.py"}
    reads = {name for name, text in attributes(PACKAGE) if text in ("os.environ", "os.getenv", "os.putenv")}
    assert reads == {"config.py", "ascend/compile/worker.py"}  # the worker is a program of its own


def test_only_the_command_prints() -> None:
    printing = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert {name for name in printing if not name.startswith("cli/")} == set()


def test_packages_are_the_folders() -> None:
    mapped = PROJECT["tool"]["setuptools"]["package-dir"]
    assert mapped == {"layout_tuner": "layout_tuner", "layout_tuner.kernels": "kernels", "layout_tuner.cache": "cache"}
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == PACKAGES | {"layout_tuner"}
    for folder in FOLDERS.values():
        holding = {file.parent for file in folder.rglob("*.py") if "__pycache__" not in file.parts}
        assert holding == {file.parent for file in folder.rglob("__init__.py")}


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
