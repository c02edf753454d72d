"""`tuner explain`: which decision a call follows, or its candidates side by side as Ascend's compiler sees them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import console, plain, print_json, use_interpreter_on_cpu

if TYPE_CHECKING:
    from rich.table import Table

    from ..ascend.candidates import CandidateReport
    from ..ascend.compile.compiler import Compiler
    from ..ascend.targets import Target
    from ..explanation import Explanation
    from ..spec.declaration import OpSpec
    from ..spec.keys import Key

# Differences shown in the table.
MOST_LINES = 24
# Digits of a number in `--shape`: more than any size has, few enough to show; Python itself reads 4300.
MOST_DIGITS = 40
# How totals are shown: name, divisor, unit.
ROWS: tuple[tuple[str, str, int], ...] = (
    ("read from arguments, KiB", "bytes_in", 1024),
    ("written to arguments, KiB", "bytes_out", 1024),
    ("through the workspace, KiB", "workspace_bytes", 1024),
    ("bursts", "bursts", 1),
    ("bursts under 32 bytes", "short_bursts", 1),
    ("strided loads", "strided_loads", 1),
    ("strided stores", "strided_stores", 1),
    ("deinterleaves", "deinterleaves", 1),
    ("transposes", "transposes", 1),
    ("scalarised elements", "scalarised_elements", 1),
    ("scalar loads", "scalar_loads", 1),
    ("flags and barriers", "syncs", 1),
    ("vector calls", "vector_calls", 1),
    ("cube calls", "cube_calls", 1),
)


def explain(
    shape: Annotated[str, typer.Option(help="As in a shapes file: B=2,T=2048,H=4,HV=8,K=64,V=64,dtype=bf16.")],
    target: Annotated[
        str | None, typer.Option(help="SoC to compile for, such as Ascend910B3; default: explain what is stored.")
    ] = None,
    op: Annotated[str | None, typer.Option(help="Only this op.")] = None,
    form: Annotated[str | None, typer.Option(help="A standard form's name, or a form; default: each of them.")] = None,
    cache: Annotated[Path | None, typer.Option(help="File of decisions; default: the user's cache folder.")] = None,
    device: Annotated[
        str | None, typer.Option(help="npu, cuda, cuda:1, cpu; default: the accelerator there is, else the CPU.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Settings; default: tuner.toml here, if any.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Say which stored decision a call follows and why; with --target, why a kernel is slow.

    It then prints what each candidate moves and computes, where they differ, and on which source line.
    """
    if target is None:
        explain_stored(shape, op=op, form=form, cache=cache, device=device, config=config, json=json)
        return
    if cache is not None or device is not None:
        raise typer.BadParameter("--target compiles, and takes neither --cache nor --device")
    from .. import ops as _ops  # noqa: F401  registers every op
    from ..ascend.candidates import cases_of, compile_candidates
    from ..ascend.targets import target_named
    from ..errors import UnsupportedProblemError

    soc = target_named(target)
    wanted, refused = wanted_keys(shape, op, form, config)
    if refused and not wanted:
        raise UnsupportedProblemError("explain", refused)
    cases = [case for spec, key in wanted for case in cases_of(spec, key, soc)]
    with compiling(soc, config) as (compiler, progress, timeout_s):
        reports = compile_candidates(cases, compiler, progress, timeout_s)
    groups = [(key, [report for report in reports if report.key == key]) for _, key in wanted]
    if json:
        print_json({"target": target, "keys": [key_json(key, of_key) for key, of_key in groups], "refused": refused})
    else:
        for key, of_key in groups:
            print_key(key, of_key, soc)
        for reason in refused:
            console().print(f"unsupported: {reason}", markup=False)
    if refused or not all(report.ok for report in reports):
        raise typer.Exit(1)


def explain_stored(
    shape: str,
    *,
    op: str | None,
    form: str | None,
    cache: Path | None,
    device: str | None,
    config: Path | None,
    json: bool,
) -> None:
    """Print which decision each key follows, with its evidence, or which stored key is nearest."""
    if cache is not None:
        from layout_tuner.cache.places.opening import require_existing

        require_existing(cache.expanduser())
    use_interpreter_on_cpu(device)
    from ..explanation import explain_keys

    wanted, refused = wanted_keys(shape, op, form, config)
    explanations = explain_keys(wanted, config=config, cache=cache, device=device)
    if json:
        print_json({"keys": [stored_json(each) for each in explanations], "refused": refused})
    else:
        print_stored(explanations, refused)
    if refused:
        raise typer.Exit(1)


def print_stored(explanations: Sequence[Explanation], refused: Sequence[str]) -> None:
    """Print the candidate that runs for each key, and why, one paragraph a key."""
    from .decisions import decision_table

    out = console()
    for each in explanations:
        out.print(f"{each.key}\nruns {plain(each.candidate)}: {plain(each.reason)}", markup=False, soft_wrap=True)
        if each.decision is not None:
            out.print(decision_table([(each.decision, each.source)]))
    for reason in refused:
        out.print(f"unsupported: {reason}", markup=False)
    for place in dict.fromkeys(each.environment for each in explanations):
        out.print(f"environment {place}", markup=False)


def stored_json(explanation: Explanation) -> dict[str, Any]:
    """An explanation as one JSON object."""

    from .decisions import decision_json

    return {
        "key": explanation.key.plain(),
        "environment": explanation.environment,
        "candidate": explanation.candidate,
        "source": explanation.source,
        "reason": explanation.reason,
        "layer": explanation.layer,
        "decision": explanation.decision and decision_json(explanation.decision),
        "nearest": explanation.nearest and decision_json(explanation.nearest),
        "differing": {name: list(both) for name, both in explanation.differing.items()},
    }


def wanted_keys(
    shape: str, op: str | None, form: str | None, config: Path | None
) -> tuple[list[tuple[OpSpec, Key]], list[str]]:
    """The keys that `--shape`, `--op` and `--form` name, and why some are left out.

    Raises:
        ConfigError: The shape cannot be used.
    """
    from ..config import Config
    from ..spec import registry
    from ..spec.shapes import keys, parse_shapes

    row: dict[str, Any] = parse_fields(shape)
    if op is not None:
        registry.lookup(op)
        row["op"] = op
    if form is not None:
        row["forms"] = [form]
    return keys(parse_shapes([row], "--shape"), Config.load(config).keys.bucket)


def parse_fields(text: str) -> dict[str, Any]:
    """`name=value,...` as a row of a shapes file; numbers and true or false are read as such.

    Raises:
        ConfigError: Parts that are no `name=value`, names that stand twice, numbers no size can be; all in one message.
    """
    from ..errors import ConfigError

    row: dict[str, Any] = {}
    faults: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        # Digits that are no ASCII, which `int` may refuse, stay text: the row's check says that they are no number.
        number = re.fullmatch(r"-?[0-9]+", value) is not None
        if not equals or not name or not value:
            faults.append(f"{part!r} is not name=value")
        elif name in row:
            faults.append(f"{name} stands twice")
        elif number and len(value) > MOST_DIGITS:
            faults.append(f"{name}={value[:9]}...: a number of {len(value.lstrip('-'))} digits")
        else:
            row[name] = int(value) if number else {"true": True, "false": False}.get(value, value)
    if faults:
        raise ConfigError(f"--shape: {'; '.join(faults)}")
    return row


@contextmanager
def compiling(target: Target, config: Path | None) -> Iterator[tuple[Compiler, Any, float]]:
    """The settings' compiler for a target, a progress callback that draws a bar on stderr, and the time limit."""
    import platformdirs
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ..ascend.compile.compiler import Compiler
    from ..ascend.compile.toolchain import find_toolchain
    from ..config import Config

    settings = Config.load(config).ascend
    toolchain = find_toolchain(settings.python or None)
    cache = platformdirs.user_cache_path("layout_tuner") / "ascend"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    out = console(stderr=True)
    with (
        Compiler(toolchain, target, cache=cache, processes=settings.processes) as compiler,
        Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar,
    ):
        task = bar.add_task(f"compiling for {target.name}", total=None)
        yield compiler, lambda done, total: bar.update(task, completed=done, total=total), settings.timeout_s


def key_json(key: Key, reports: Sequence[CandidateReport]) -> dict[str, Any]:
    """A key's candidates as one JSON object."""
    import dataclasses

    from ..ascend.candidates import differing_lines
    from ..ascend.prediction import predict

    prediction = predict(reports)
    return {
        "key": key.plain(),
        "compiler": reports[0].compiler if reports else "",
        "candidates": [report.to_json() for report in reports],
        "differences": [
            {"what": what, "source": source, "counts": dict(zip([r.candidate for r in reports], counts))}
            for what, source, counts in differing_lines(reports)
        ],
        "prediction": prediction and dataclasses.asdict(prediction),
    }


def print_key(key: Key, reports: Sequence[CandidateReport], target: Target) -> None:
    """A key's candidates side by side, what differs, what the compiler said, and what is predicted."""
    from ..ascend.prediction import predict

    out = console()
    out.print(f"{key}\non {target.name}, by {reports[0].compiler}", markup=False)
    out.print(totals_table(reports, target))
    differences = differences_table(reports)
    if differences.row_count:
        out.print(differences)
    for report in reports:
        for line in said(report):
            # Not wrapped: a row for each, whatever reads it.
            out.print(f"{report.candidate}: {line}", markup=False, soft_wrap=True)
    prediction = predict(reports)
    if prediction is not None:
        out.print(f"predicted: {prediction.candidate}, the fewest work units (counts, not time)\n", markup=False)


def totals_table(reports: Sequence[CandidateReport], target: Target) -> Table:
    """Counts of the whole call, a column for each candidate."""
    from rich.table import Table

    from ..ascend.prediction import units

    table = Table(pad_edge=False)
    table.add_column("the whole call", overflow="fold")
    for report in reports:
        table.add_column(report.candidate, justify="right", overflow="fold")
    totals = [report.totals() if report.ok else None for report in reports]

    def row(label: str, cells: Sequence[str]) -> None:
        table.add_row(label, *cells)

    row("kernels x programs x tasks", [launches_text(report) for report in reports])
    for label, name, limit in (
        ("UB bytes", "ub_bytes", target.ub_bytes),
        ("L1 bytes", "l1_bytes", target.l1_bytes),
        ("L0C bytes", "l0c_bytes", target.l0c_bytes),
    ):
        row(f"{label} of {limit:,}", ["-" if total is None else f"{total[name]:,.0f}" for total in totals])
    for label, name, divisor in ROWS:
        row(label, ["-" if total is None else f"{total[name] / divisor:,.0f}" for total in totals])
    row("moved by relayouts, KiB", [f"{report.relayout_bytes / 1024:,.0f}" for report in reports])
    row("vector work on both cores", [split_text(report) for report in reports])
    row("work units", [f"{units(report):,.0f}" if report.ok else "-" for report in reports])
    return table


def launches_text(report: CandidateReport) -> str:
    """Each launch's programs and tasks."""
    return ", ".join(f"{kernel.grid} x {kernel.tasks}" for kernel in report.kernels) or "-"


def split_text(report: CandidateReport) -> str:
    """Whether both vector cores of a program share its vector work."""
    words = {True: "yes", False: "no", None: "-"}
    return ", ".join(words[kernel.facts.split] for kernel in report.kernels if kernel.facts is not None) or "-"


def differences_table(reports: Sequence[CandidateReport]) -> Table:
    """The counts in which candidates differ, with the line of Python."""
    from rich.table import Table

    from ..ascend.candidates import differing_lines

    compiled = [report for report in reports if report.ok]
    table = Table(pad_edge=False)
    table.add_column("what differs", overflow="fold")
    table.add_column("source", overflow="fold")
    for report in compiled:
        table.add_column(report.candidate, justify="right", overflow="fold")
    differing = differing_lines(compiled)
    for what, source, counts in differing[:MOST_LINES]:
        table.add_row(what, source, *[f"{count:,.0f}" for count in counts])
    if len(differing) > MOST_LINES:
        table.add_row(f"{len(differing) - MOST_LINES} smaller ones: see --json")
    return table


def said(report: CandidateReport) -> list[str]:
    """The errors of the compiler, and the optimisations it gave up."""
    lines = [report.error] if report.error else []
    for kernel in report.kernels:
        if kernel.facts is None:
            where = f" [{kernel.source}]" if kernel.source else ""
            lines.append(f"{kernel.kernel} does not compile: {kernel.error}{where}")
        else:
            lines += [f"{kernel.kernel}: {note}" for note in kernel.facts.notes]
    return lines
