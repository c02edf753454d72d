"""Runs all rules over files, folders and packages."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import ConfigError
from . import host, products, strides, tiles
from .findings import RULES, Finding
from .kernels import Noted, notes
from .sources import Library, Source, UnreadableError, files_of, read

KERNEL_RULES: Final[tuple[Callable[[Noted], Iterator[Finding]], ...]] = (
    strides.along_time,
    strides.innermost,
    tiles.indexed,
    tiles.taken_apart,
    tiles.wide_comparison,
    tiles.masked,
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was looked at and found.

    Attributes:
        files: Number of files read.
        unread: Files of folders that are not Python, with the reason.
        findings: By file and line.
    """

    files: int
    unread: dict[str, str]
    findings: tuple[Finding, ...]


def lint(paths: Iterable[str], *, rules: Collection[str] | None = None) -> Report:
    """Look at the Triton kernels of files, folders and installed packages. Nothing of them is imported.

    Args:
        paths: Files, folders, or dotted names of what is installed here.
        rules: Ids of the rules to apply; None: all.

    Raises:
        ConfigError: A path leads nowhere, a file that was named is not Python, or a rule is unknown; names all.
    """
    wrong = (
        []
        if rules is None
        else [f"{rule}: no such rule; there are {', '.join(RULES)}" for rule in rules if rule not in RULES]
    )
    paths = list(paths)
    files, lost = files_of(paths)
    wrong += lost
    with _without_collector():
        return _report(files, paths, wrong, rules)


def _report(files: list[Path], paths: list[str], wrong: list[str], rules: Collection[str] | None) -> Report:
    sources: list[Source] = []
    unread = {}
    for file in files:
        try:
            source = read(file, named=str(file) in paths)
        except UnreadableError as error:
            if str(file) in paths:
                wrong.append(f"{file}: {error}")
            unread[str(file)] = str(error)
            continue
        if source is not None:
            sources.append(source)
    if wrong:
        raise ConfigError("\n".join(wrong))
    library = Library(sources)
    ignored = {str(source.path): source.ignored for source in sources}
    kept: dict[tuple[str, str, int, int], Finding] = {}
    for finding in _findings(sources, library):
        if rules is not None and finding.rule not in rules:
            continue
        lines = range(finding.line, finding.end_line + 1)
        if not any(finding.rule in ignored[finding.path].get(line, ()) for line in lines):
            _keep(kept, finding)
    order = sorted(kept.values(), key=lambda each: (each.path, each.line, each.column, each.rule))
    return Report(files=len(files) - len(unread), unread=unread, findings=tuple(order))


def _keep(kept: dict[tuple[str, str, int, int], Finding], finding: Finding) -> None:
    """One finding for a place, however many kernels call the helper it lies in."""
    kept.setdefault((finding.path, finding.rule, finding.line, finding.column), finding)


@contextmanager
def _without_collector() -> Iterator[None]:
    """The trees of a library are millions of objects that all live to the end: looking for dead ones takes a third."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _findings(sources: list[Source], library: Library) -> Iterator[Finding]:
    every = [
        (function, source, notes(function, source, library))
        for source in sources
        for function in source.functions.values()
    ]
    for function, source, noted in every:
        if function not in library.called:
            for each in noted:
                for rule in KERNEL_RULES:
                    yield from rule(each)
        if any(each.what == "dot" for each in noted):
            yield from products.used_again(function, source)
    for source in sources:
        yield from host.check(source)
