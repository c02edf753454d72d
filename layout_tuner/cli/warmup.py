"""`tuner warmup`: tune the shapes of a file."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import LayoutTunerError
from .common import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    console,
    failed_at_work,
    print_json,
    use_interpreter_on_cpu,
)

if TYPE_CHECKING:
    from ..ranks.exchange import Ranks
    from ..spec.keys import Key
    from ..warming import Report

INTERPRETER_NOTE = (
    "Measured in Triton's interpreter on a CPU: these times say nothing about an NPU or a GPU, and no accelerator "
    "reads them."
)


def warmup(
    shapes: Annotated[Path | None, typer.Option(help="Shapes to tune, see examples/shapes.json.")] = None,
    from_misses: Annotated[
        bool, typer.Option("--from-misses", help="Tune what calls here asked for in vain, the most frequent first.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Finish keys that ran out of their budget; pass over those that failed.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="npu, cuda, cuda:1, cpu; default: the accelerator there is, else the CPU.")
    ] = None,
    ops: Annotated[str | None, typer.Option(help="Only these ops, separated by commas.")] = None,
    cache: Annotated[Path | None, typer.Option(help="File of decisions; default: the user's cache folder.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings; default: tuner.toml here, if any.")] = None,
    budget: Annotated[float | None, typer.Option(help="Seconds for all of it.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Predict for this Ascend model, such as Ascend910B3, without an NPU.")
    ] = None,
    distributed: Annotated[
        bool | None,
        typer.Option(
            "--distributed/--alone",
            help="Share the keys with the other ranks that torchrun started; default: where it started several.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Tune every key that shapes or misses ask for and that has no decision yet, and store each result at once."""
    if target is not None:
        from .predict import predict_shapes

        _require_place(cache, config)
        needless = {"--from-misses": from_misses, "--resume": resume, "--device": device, "--budget": budget}
        needless["--distributed"] = distributed
        refused = [name for name, value in needless.items() if value not in (None, False)]
        faults = ["--target wants --shapes"] if shapes is None else []
        if refused:
            faults.append(f"--target compiles and measures nothing: it takes no {', '.join(refused)}")
        if faults:
            raise typer.BadParameter("; ".join(faults))
        assert shapes is not None
        predict_shapes(shapes, target, ops=chosen_ops(ops), cache=cache, config=config, json=json)
        return
    use_interpreter_on_cpu(device)
    ranks, device = _ranks(distributed, device)

    def work() -> int:
        from ..warming import excuse
        from ..warming import warmup as run

        try:
            _require_place(cache, config)
        except LayoutTunerError as error:
            if ranks is not None:
                excuse(ranks, "warmup", str(error))
            raise
        report = run_with_progress(
            run,
            shapes,
            from_misses=from_misses,
            resume=resume,
            config=config,
            cache=cache,
            device=device,
            ops=[name.strip() for name in ops.split(",")] if ops else None,
            budget_s=budget,
            group=ranks,
        )
        if ranks is None or ranks.rank == 0:
            if json:
                print_json(report_json(report))
            else:
                print_report(report)
        if report.interrupted:
            return INTERRUPTED
        differ = report.agreement is not None and not report.agreement.agreed
        failed = any(report.count(status) for status in ("failed", "unsupported", "left"))
        return int(failed or differ or not report.kept)

    status = work() if ranks is None else worst_of(ranks, work)
    if status:
        raise typer.Exit(status)


PATIENCE_S = 600.0
"""Seconds without a word after which ranks give another one up."""


def _ranks(distributed: bool | None, device: str | None) -> tuple[Ranks | None, str | None]:
    """The ranks that torchrun started, where keys are shared with them, and this rank's own device."""
    from ..config import torchrun

    started = torchrun()
    if distributed and not started:
        raise typer.BadParameter(
            "--distributed wants what torchrun sets (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT): start it as "
            "`torchrun --nproc-per-node N -m layout_tuner.cli warmup --distributed ...`"
        )
    if not started or not (distributed or (distributed is None and int(started["WORLD_SIZE"]) > 1)):
        return None, device
    from ..device import driver
    from ..ranks.exchange import Ranks

    kind = driver.resolve(device).type
    if device in (None, kind) and kind != "cpu":
        device = f"{kind}:{started.get('LOCAL_RANK', started['RANK'])}"
    return Ranks.started(PATIENCE_S), device


def worst_of(ranks: Ranks, work: Callable[[], int]) -> int:
    """The worst exit status of all ranks, which every one of them ends with; one that died counts as failed."""
    status = FAILED
    patience_s = PATIENCE_S
    try:
        status = work()
        patience_s = 30.0  # the others are done too
    except LayoutTunerError as error:
        status = FAILED if failed_at_work(error) else BAD_INPUT
        raise
    finally:
        status = ranks.worst(status, patience_s)
    return status


def _require_place(cache: Path | None, config: Path | None) -> None:
    """Raises `CacheError` where the file that is named can keep no decisions, before anything is tuned."""
    from layout_tuner.cache.places.opening import require_place

    from ..config import Config
    from ..errors import ConfigError

    if cache is None:
        # Settings that cannot be read are complained of with all else that is wrong.
        with suppress(ConfigError):
            stated = Config.load(config).cache.path
            cache = Path(stated) if stated else None
    if cache is not None:
        require_place(cache.expanduser())


def chosen_ops(names: str | None) -> list[str] | None:
    """The ops that a comma-separated list names; None for every op."""
    if not names:
        return None
    import layout_tuner.ops  # noqa: F401  registers every op

    from ..spec import registry

    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        registry.lookup(name)
    return chosen


def run_with_progress(run: Any, shapes: Path | None, **named: Any) -> Report:
    """The library's warm-up with a bar on stderr."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    out = console(stderr=True)
    ranks = named.get("group")
    quiet = not out.is_terminal or (ranks is not None and ranks.rank != 0)
    with Progress(*columns, console=out, transient=True, disable=quiet) as bar:
        task = bar.add_task("warm-up", total=None)

        def progress(number: int, total: int, key: Key) -> None:
            bar.update(task, completed=number, total=total, description=f"{key.op} {key.sizes}")

        report: Report = run(shapes, progress=progress, **named)
    return report


def print_report(report: Report) -> None:
    """The table, then one line on what was done and where it was stored."""
    from .decisions import decision_table

    out = console()
    words = {"tuned": "tuned now", "stored": "stored before"}
    decided = [(row.decision, words[row.status]) for row in report.rows if row.decision and row.status in words]
    if decided:
        out.print(decision_table(decided))
    for row in report.rows:
        if row.status in ("failed", "unsupported", "left"):
            out.print(f"{row.status}: {row.key or ''} {row.reason}".replace("  ", " "), markup=False)
    for note in report.notes:
        out.print(note, markup=False)
    if report.agreement is not None:
        out.print(str(report.agreement), markup=False)
    if report.environment.interpreted:
        out.print(INTERPRETER_NOTE)
    tuned, stored = report.count("tuned"), report.count("stored")
    parts = [f"{tuned} tuned" if tuned else "nothing to tune", f"{stored} stored before"]
    parts += [
        f"{count} {status}"
        for status in ("trivial", "failed", "unsupported", "left")
        if (count := report.count(status))
    ]  # type: ignore[arg-type]
    out.print(f"{', '.join(parts)}; environment {report.environment.id}; decisions in {report.store}", markup=False)


def report_json(report: Report) -> dict[str, Any]:
    """The report as one JSON object."""
    from .decisions import decision_json

    return {
        "environment": {"id": report.environment.id, **report.environment.facts},
        "interpreted": report.environment.interpreted,
        "store": report.store,
        "interrupted": report.interrupted,
        "notes": list(report.notes),
        "agreed": None if report.agreement is None else report.agreement.agreed,
        "keys": [
            {
                "key": str(row.key) if row.key else None,
                "status": row.status,
                "reason": row.reason,
                "seconds": row.seconds,
                "rank": row.rank,
                "decision": decision_json(row.decision) if row.decision else None,
            }
            for row in report.rows
        ],
    }
