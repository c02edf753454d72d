"""The files to look at: where a path leads, their trees, their suppressing comments."""

from __future__ import annotations

import ast
import importlib.util
import io
import os
import re
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SUPPRESSION = re.compile(r"#\s*layout-tuner:\s*ignore\[([^\]]*)\]")


class UnreadableError(Exception):
    """A file that is not Python's text."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file that mentions Triton.

    Attributes:
        path: The file, as it is named in findings.
        ignored: Rules that comments suppress, by line.
        functions: Its jit functions by name, those inside other functions and classes too.
        imported: What a name was imported as: module, level of a relative import, name there.
        scopes: Calls and assignments of host code by the function they stand in, in the order of the text.
        constants: Numbers, truth values and None that names of the module are bound to.
    """

    path: Path
    ignored: dict[int, frozenset[str]]
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    imported: dict[str, tuple[str, int, str]] = field(default_factory=dict)
    scopes: list[tuple[str, list[ast.Call | ast.Assign]]] = field(default_factory=list)
    constants: dict[str, object] = field(default_factory=dict)

    def scope(self, function: str) -> list[ast.Call | ast.Assign]:
        """A new list of `scopes`."""
        self.scopes.append((function, []))
        return self.scopes[-1][1]


def is_jit(node: ast.AST) -> bool:
    """Whether a function is device code: some decorator of it is called jit."""
    if not isinstance(node, ast.FunctionDef):
        return False
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name == "jit":
            return True
    return False


def files_of(paths: Iterable[str]) -> tuple[list[Path], list[str]]:
    """The Python files that paths name, and what is wrong with the paths that name none.

    A path is a file, a folder, or an installed package or module by its dotted name.
    """
    files: dict[Path, None] = {}
    wrong = []
    for path in paths:
        found = _files(path)
        if isinstance(found, str):
            wrong.append(f"{path}: {found}")
        else:
            files.update(dict.fromkeys(found))
    return list(files), wrong


def _files(path: str) -> list[Path] | str:
    """Files of one path, or what is wrong with it."""
    place = Path(path)
    if not place.exists():
        installed = _installed(path)
        if installed is None:
            return "neither a file, a folder nor an installed package"
        place = installed
    if place.is_file():
        return [place] if place.suffix == ".py" else "not a Python file"
    files = []
    for folder, names, here in os.walk(place):
        names[:] = sorted(name for name in names if not name.startswith(".") and name != "__pycache__")
        files += [Path(folder, name) for name in sorted(here) if name.endswith(".py")]
    return files or "no Python file in it"


def _installed(name: str) -> Path | None:
    """Where a package or module lies that is installed here. Its parents are not imported."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    try:
        spec = importlib.util.find_spec(parts[0])
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    for place in spec.submodule_search_locations or ():
        folder = Path(place, *parts[1:])
        for found in (folder, folder.with_suffix(".py")):
            if found.exists():
                return found
    return Path(spec.origin) if len(parts) == 1 and spec.has_location and spec.origin else None


def read(path: Path, *, named: bool = True) -> Source | None:
    """The source of a file, None where it does not mention Triton, or is Gluon.

    Args:
        path: The file.
        named: Whether the file itself was asked for, so that it has to be Python even without a word of Triton.

    Raises:
        UnreadableError: It cannot be read, or is no Python.
    """
    try:
        content = path.read_bytes()
        mentioned = b"triton" in content
        if not mentioned and not named:
            return None
        with warnings.catch_warnings():
            # What Python would warn of in it is not ours to say.
            warnings.simplefilter("ignore")
            tree = ast.parse(content)
        if not mentioned:
            return None
        ignored = _ignored(content) if b"layout-tuner:" in content else {}
    except OSError as error:
        raise UnreadableError(error.strerror or str(error)) from error
    except (SyntaxError, ValueError, RecursionError, tokenize.TokenError) as error:
        raise UnreadableError(f"not Python: {error}") from error
    source = Source(path=path, ignored=ignored)
    _index(tree, source, source.scope(""))
    for statement in tree.body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                inner = value.args[0] if isinstance(value, ast.Call) and len(value.args) == 1 else value
                if isinstance(inner, ast.Constant):
                    source.constants[name] = inner.value
    if any(module.startswith("triton.experimental") for module, _, _ in source.imported.values()):
        return None  # Gluon: for NVIDIA's and AMD's devices only
    return source


def children(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes right below one, in the order of the text; much quicker than `ast.iter_child_nodes`."""
    for value in vars(node).values():
        if isinstance(value, list):
            for each in value:
                if isinstance(each, ast.AST):
                    yield each
        elif isinstance(value, ast.AST):
            yield value


def _index(node: ast.AST, source: Source, scope: list[ast.Call | ast.Assign]) -> None:
    """Sorts what is below a node by the function it stands in; device code but for its decorators is left out."""
    for child in children(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in child.decorator_list:
                if isinstance(decorator, ast.Call):
                    scope.append(decorator)
                _index(decorator, source, scope)
            if is_jit(child):
                assert isinstance(child, ast.FunctionDef)
                source.functions[child.name] = child
            else:
                inner = source.scope(child.name)
                for statement in child.body:
                    _index(ast.Module(body=[statement], type_ignores=[]), source, inner)
            continue
        if isinstance(child, ast.ImportFrom):
            for alias in child.names:
                source.imported[alias.asname or alias.name] = (child.module or "", child.level, alias.name)
        elif isinstance(child, ast.Call | ast.Assign):
            scope.append(child)
        _index(child, source, scope)


def _ignored(content: bytes) -> dict[int, frozenset[str]]:
    ignored = {}
    for token in tokenize.tokenize(io.BytesIO(content).readline):
        if token.type == tokenize.COMMENT and (found := SUPPRESSION.search(token.string)):
            ignored[token.start[0]] = frozenset(name.strip() for name in found[1].split(","))
    return ignored


class Library:
    """All sources of a run, to find helpers that one imports from another.

    Attributes:
        called: The jit functions that other ones were seen to call. Alone, nothing is known of their arguments.
    """

    def __init__(self, sources: Iterable[Source]) -> None:
        self.called: set[ast.FunctionDef] = set()
        self._by_stem: dict[str, list[tuple[tuple[str, ...], Source]]] = {}
        for source in sources:
            path = source.path.resolve()
            way = path.parent.parts if path.name == "__init__.py" else path.with_suffix("").parts
            self._by_stem.setdefault(way[-1], []).append((way, source))

    def helper(self, source: Source, name: str, depth: int = 4) -> tuple[Source, ast.FunctionDef] | None:
        """The jit function that a name stands for in a source, and the source that it lies in."""
        if name in source.functions:
            return source, source.functions[name]
        if name not in source.imported or not depth:
            return None
        module, level, original = source.imported[name]
        parts = module.split(".") if module else []
        if level:
            folder = source.path.resolve().parents[level - 1]
            parts = [*folder.parts, *parts]
        if not parts:
            return None
        for way, other in self._by_stem.get(parts[-1], ()):
            if other is not source and way[-len(parts) :] == tuple(parts):
                return self.helper(other, original, depth - 1)
        return None
