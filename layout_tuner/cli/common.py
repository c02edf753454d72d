"""What commands share: exit statuses, the environment they need, and how numbers are printed."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from layout_tuner import __version__

if TYPE_CHECKING:
    from rich.console import Console

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tuner {__version__}")
        raise typer.Exit


def version_option(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log decisions as they are made.")] = False,
) -> None:
    """Options of the command itself."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr
    )


@contextmanager
def exit_on_bad_input() -> Iterator[None]:
    """Turn the project's own errors into one message on stderr and an exit status, and Ctrl-C into 130.

    What cannot be used as it was given is bad input; what failed while it was worked on is a failure.
    """
    from layout_tuner.errors import LayoutTunerError

    try:
        try:
            yield
        finally:
            # Here rather than at the interpreter's end, which would print a traceback.
            sys.stdout.flush()
    except OSError as error:
        if not _output_lost():
            raise
        if error.errno != errno.EPIPE:
            typer.echo(f"error: the output cannot be written: {error.strerror}", err=True)
        sys.exit(FAILED)
    except LayoutTunerError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(FAILED if failed_at_work(error) else BAD_INPUT)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)


def _output_lost() -> bool:
    """Whether stdout takes nothing any more; what waits to be written is then given up."""
    try:
        # What failed may not have been kept, so a flush alone would not show it.
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return True
    return False


def failed_at_work(error: Exception) -> bool:
    """Whether what was given could be used, and something failed all the same: a key, a disk, another writer."""
    from layout_tuner.errors import TuningError

    fault = getattr(error, "fault", None)
    return isinstance(error, TuningError) or getattr(fault, "value", "") in ("busy", "read only")


def use_interpreter_on_cpu(device: str | None) -> None:
    """Turn Triton's interpreter on, before Triton is imported, where the CPU is what there is or is asked for."""
    from layout_tuner import config

    if device is None:
        from layout_tuner import device as devices

        device = devices.resolve().type
    if device == "cpu":
        config.enable_interpreter()


def console(stderr: bool = False) -> Console:
    """Where tables (stdout) or progress (stderr) go; plain and wide where that is no terminal."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 200
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def print_json(content: object) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(content, indent=2))


def microseconds(value: float | None) -> str:
    """A time in microseconds with three significant digits or more."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def percent(value: float | None) -> str:
    """A fraction as percent."""
    return "-" if value is None else f"{100 * value:.1f} %"


def scientific(value: float | None) -> str:
    """An error with two significant digits."""
    return "-" if value is None else f"{value:.1e}"
