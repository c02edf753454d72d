"""`tuner selftest`: whether this machine does what the tuner needs, in a text to paste."""

from __future__ import annotations

import json as js
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import __version__
from .common import FAILED, INTERRUPTED, plain, print_json, progress_bar

if TYPE_CHECKING:
    from ..selftest.findings import Finding, Report

# Of a text that is pasted into an issue.
COLUMNS = 100
STATE, NAME = 8, 33
TITLES = {"machine": "machine", "device": "device", "ops": "ops"}


def selftest(
    device: Annotated[
        str | None, typer.Option(help="npu, cuda, cuda:1, cpu; default: the accelerator there is, else the CPU.")
    ] = None,
    ops: Annotated[str | None, typer.Option(help="Only these ops, separated by commas; none: no op.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="Sizes that differ from the small ones: K=128,V=128,HV=8,dtype=fp16.")
    ] = None,
    budget: Annotated[float, typer.Option(help="Seconds for all of it.", min=10.0)] = 600.0,
    config: Annotated[Path | None, typer.Option(help="Settings; default: tuner.toml here, if any.")] = None,
    output: Annotated[Path | None, typer.Option(help="Also write all of it to this file, as JSON.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Try this machine: versions, variables, the device, and every kernel against its oracle.

    What might end a process, or its use of the device, runs in one of its own. Exit status 0: all is right.
    """
    from ..config import Config
    from ..selftest.run import selftest as run
    from .explain import parse_fields

    settings = Config.load(config)
    chosen = None if ops is None else [name.strip() for name in ops.split(",") if name.strip() not in ("", "none")]
    sizes = None if shape is None else parse_fields(shape)
    if output is not None:
        output.touch()  # rather than find out after ten minutes
    with progress_bar() as progress:
        done = 0

        def heard(finding: Finding) -> None:
            nonlocal done
            done += 1
            progress(f"{finding.name} {finding.part}".strip(), done, None)

        report = run(device=device, ops=chosen, shape=sizes, budget_s=budget, config=settings, heard=heard)
    content = report_json(report)
    if output is not None:
        output.write_text(js.dumps(content, indent=2) + "\n")
    if json:
        print_json(content)
    else:
        typer.echo("\n".join(report_lines(report)))
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not report.right:
        raise typer.Exit(FAILED)


def report_json(report: Report) -> dict[str, Any]:
    """The report as one JSON object."""
    return {
        "layout_tuner": __version__,
        "right": report.right,
        "device": report.device,
        "interpreted": report.interpreted,
        "started": report.started,
        "seconds": round(report.seconds, 1),
        "interrupted": report.interrupted,
        "findings": [asdict(finding) for finding in report.findings],
    }


def report_lines(report: Report) -> list[str]:
    """The report as a text of at most `COLUMNS` columns."""
    counts = ", ".join(f"{number} {state}" for state, number in report.counts.items()) or "nothing tried"
    where = report.device or "no device"
    where += ", in Triton's interpreter" if report.interpreted else ""
    lines = textwrap.wrap(
        f"layout_tuner {__version__} self-test on {where}, {report.started}, {report.seconds:.0f} s: {counts}", COLUMNS
    )
    group = ""
    for row in report.rows:
        if row.group != group:
            group = row.group
            lines += ["", TITLES[group]]
        lines += row_lines(row)
    lines += ["", "everything is right" if report.right else "not everything is right: each row says what to do"]
    lines += ["interrupted: what was left is not here"] if report.interrupted else []
    return lines


def row_lines(row: Finding) -> list[str]:
    """A row: state, name, what was seen, and below it what to do."""
    state = "" if row.state == "fact" else row.state
    name = f"  {row.part}" if row.part else row.name
    margin = " " * (STATE + NAME + 2)
    texts = textwrap.wrap(plain(row.seen), COLUMNS - len(margin)) or [""]
    texts += textwrap.wrap(f"-> {plain(row.cure)}", COLUMNS - len(margin)) if row.cure else []
    head = f"{state:{STATE}} {plain(name):{NAME}} "
    if len(head) <= len(margin):
        head += texts.pop(0)
    return [*textwrap.wrap(head, COLUMNS, drop_whitespace=False), *[margin + text for text in texts]]
