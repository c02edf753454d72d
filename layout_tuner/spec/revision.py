"""The revision of a candidate: a hash of the sources that decide what it runs and how it is launched.

A stored decision or failure of another revision says nothing of today's kernels, so the key is tuned again.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

# Where kernels, their tiles and their launches are written; what else a module imports does not make it another.
ROOT = __name__.partition(".")[0]
PACKAGES = (f"{ROOT}.kernels.", f"{ROOT}.ops.")


@functools.cache
def source_revision(module: str) -> str:
    """Twelve hex digits over the text of a module and of every kernel, tile and op module that it imports.

    Args:
        module: Full name of the module that builds the launches, usually an op's. What it imports counts with what
            that imports in turn, so that another tile or another helper is another revision.
    """
    digest = hashlib.sha256()
    for name, file in sorted(sources(module).items()):
        text = file.read_bytes()
        # Name and length tell where a source ends; otherwise text that moves to the next module would change nothing.
        digest.update(f"{name} {len(text)}\n".encode())
        digest.update(text)
    return digest.hexdigest()[:12]


def sources(module: str) -> dict[str, Path]:
    """The modules that make a revision, by name, with their files."""
    files: dict[str, Path] = {}
    left = [module]
    while left:
        name = left.pop()
        file = _file(name)
        if name not in files and file is not None:
            files[name] = file
            left += [each for each in _imported(file, name) if each.startswith(PACKAGES)]
    return files


def _file(name: str) -> Path | None:
    """The file of a module; None for a package, and for what is no module."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a name inside a module, or a module that is run and not imported
        return None
    plain = spec is not None and spec.origin is not None and spec.submodule_search_locations is None
    return Path(spec.origin) if plain and spec is not None and spec.origin is not None else None


def _imported(file: Path, name: str) -> Iterator[str]:
    """Full names of all that a module's text imports."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = name.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
