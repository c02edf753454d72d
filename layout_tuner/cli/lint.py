"""`tuner lint`: what is known to be slow or wrong on an Ascend NPU in other people's Triton kernels."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from .common import FAILED, plain, print_json


def lint(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Files, folders, or installed packages.")],
    rules: Annotated[str | None, typer.Option(help="Only these rules, separated by commas: LT001,LT006.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Read Triton kernels and say what is slow or wrong on an Ascend NPU. Imports nothing; needs no accelerator.

    docs/lint.md has a section for each rule. Exit status 0: nothing found, 1: something, 2: bad input.

    Example: tuner lint fla.ops my_kernels/ --rules LT001
    """
    from ..lint import lint as run

    report = run(paths, rules=None if rules is None else [name.strip() for name in rules.split(",")])
    for path, reason in report.unread.items():
        typer.echo(f"warning: {plain(path)} was not read: {plain(reason)}", err=True)
    if json:
        print_json(
            {
                "files": report.files,
                "unread": report.unread,
                "findings": [asdict(finding) for finding in report.findings],
            }
        )
    else:
        for each in report.findings:
            loop = f" (loop in {each.loop})" if each.loop else ""
            text = f"{each.path}:{each.line}:{each.column}: {each.rule} {each.message} [{each.function}]{loop}"
            typer.echo(plain(text))
        typer.echo(f"{len(report.findings)} findings in {report.files} files", err=True)
    if report.findings:
        raise typer.Exit(FAILED)
