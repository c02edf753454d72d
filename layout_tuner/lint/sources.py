"""The files to look at: where a path leads, their trees, their suppressing comments."""

from __future__ import annotations

import ast
import importlib.util
import io
import os
import re
import tokenize
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError

SUPPRESSION = re.compile(r"#\s*layout-tuner:\s*ignore\[([^\]]*)\]")


class UnreadableError(Exception):
    """A file that is not Python's text."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file that mentions Triton.

    Attributes:
        path: The file, as it is named in findings.
        tree: Its syntax tree.
        ignored: Rules that comments suppress, by line.
        functions: Its jit functions by name, those inside other functions and classes too.
        imported: What a name was imported as: module, level of a relative import, name there.
        constants: Numbers, truth values and None that names of the module are bound to.
    """

    path: Path
    tree: ast.Module
    ignored: dict[int, frozenset[str]]
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    imported: dict[str, tuple[str, int, str]] = field(default_factory=dict)
    constants: dict[str, object] = field(default_factory=dict)


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


def files_of(paths: Iterable[str]) -> list[Path]:
    """The Python files that paths name: a file, a folder, or an installed package or module by its dotted name.

    Raises:
        ConfigError: A path leads nowhere; names all of them.
    """
    files: dict[Path, None] = {}
    wrong = []
    for path in paths:
        found = _files(path)
        if isinstance(found, str):
            wrong.append(f"{path}: {found}")
        else:
            files.update(dict.fromkeys(found))
    if wrong:
        raise ConfigError("\n".join(["these paths cannot be read:", *wrong] if len(wrong) > 1 else wrong))
    return list(files)


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


def read(path: Path) -> Source | None:
    """The source of a file, None where it does not mention Triton.

    Raises:
        UnreadableError: It cannot be read, or is no Python.
    """
    try:
        content = path.read_bytes()
        if b"triton" not in content:
            # Still a file that has to be Python: a typing error must not look like a clean file.
            compile_only(content)
            return None
        tree = compile_only(content)
        ignored = _ignored(content) if b"layout-tuner:" in content else {}
    except OSError as error:
        raise UnreadableError(error.strerror or str(error)) from error
    except (SyntaxError, ValueError, RecursionError, tokenize.TokenError) as error:
        raise UnreadableError(f"not Python: {error}") from error
    source = Source(path=path, tree=tree, ignored=ignored)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            if is_jit(node):
                source.functions[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                source.imported[alias.asname or alias.name] = (node.module or "", node.level, alias.name)
    for statement in tree.body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                inner = value.args[0] if isinstance(value, ast.Call) and len(value.args) == 1 else value
                if isinstance(inner, ast.Constant):
                    source.constants[name] = inner.value
    return source


def compile_only(content: bytes) -> ast.Module:
    """The tree of a text; what Python would warn of is not ours to say."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(content)


def _ignored(content: bytes) -> dict[int, frozenset[str]]:
    ignored = {}
    for token in tokenize.tokenize(io.BytesIO(content).readline):
        if token.type == tokenize.COMMENT and (found := SUPPRESSION.search(token.string)):
            ignored[token.start[0]] = frozenset(name.strip() for name in found[1].split(","))
    return ignored


class Library:
    """All sources of a run, to find helpers that one imports from another."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._by_stem: dict[str, list[Source]] = {}
        for source in sources:
            path = source.path.resolve()
            stem = path.parent.name if path.name == "__init__.py" else path.stem
            self._by_stem.setdefault(stem, []).append(source)

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
        for other in self._by_stem.get(parts[-1], ()):
            path = other.path.resolve()
            way = path.parent.parts if path.name == "__init__.py" else path.with_suffix("").parts
            if other is not source and way[-len(parts) :] == tuple(parts):
                return self.helper(other, original, depth - 1)
        return None
