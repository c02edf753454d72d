"""What commands share: exit statuses, the environment they need, and how numbers are printed."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from .. import __version__

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
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])
    # A log that cannot be written any more is no reason for a traceback.
    logging.raiseExceptions = False


class _OneLine(logging.Formatter):
    """Formats a log record as one line, whatever its texts hold."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = plain(record.message)
        return super().formatMessage(record)


def plain(text: object) -> str:
    """A text from a file or a machine as one harmless line: what would steer a terminal, or hide, is spelled out.

    Those are control characters, line breaks, marks that turn the direction of writing, and bytes that are no text.
    """
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(
        each if each.isprintable() or unicodedata.category(each) in _HARMLESS else _spelled(each) for each in shown
    )


# Blanks of other scripts, and code points that are not taken yet.
_HARMLESS = ("Zs", "Cn", "Co")


def _spelled(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def plain_lines(text: object) -> str:
    """As `plain`, for a message of ours that may have several lines."""
    return "\n".join(plain(line) for line in str(text).split("\n"))


@contextmanager
def exit_on_bad_input() -> Iterator[None]:
    """Turn what may go wrong into one message on stderr and an exit status, and Ctrl-C into 130.

    Input that cannot be used gives status 2, a failure at work 1. With `--json` the message goes to stdout too, as an
    object, unless something was printed there already.
    """
    from ..errors import LayoutTunerError

    _prepare_streams()
    try:
        try:
            yield
        finally:
            # Here rather than at the interpreter's end, which would print a traceback.
            sys.stdout.flush()
    except typer.TyperException as error:
        # Usage: what was typed in cannot be understood.
        error.show()  # type: ignore[attr-defined]
        _fail(error.format_message(), BAD_INPUT, said=True)  # type: ignore[attr-defined]
    except LayoutTunerError as error:
        _fail(str(error), FAILED if failed_at_work(error) else BAD_INPUT)
    except (ImportError, RuntimeError) as error:
        from ..installation import explained

        told = explained(error)
        if told is None:
            raise
        _fail(str(told), FAILED)
    except OSError as error:
        if _output_lost():
            if error.errno != errno.EPIPE:
                typer.echo(f"error: the output cannot be written: {error.strerror}", err=True)
            sys.exit(FAILED)
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        _fail(f"{where}{error.strerror or error}", BAD_INPUT if isinstance(error, _GIVEN_WRONGLY) else FAILED)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)


_GIVEN_WRONGLY = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
_printed = False


def _fail(message: str, status: int, *, said: bool = False) -> NoReturn:
    """Ends the command with a message, and with `--json` with one that a machine reads."""
    if not said:
        typer.echo(f"error: {plain_lines(message)}", err=True)
    if "--json" in sys.argv[1:] and not _printed:
        with suppress(OSError):
            print_json({"error": {"message": message, "status": status}})
            sys.stdout.flush()
    sys.exit(status)


def _prepare_streams() -> None:
    """Let stdout and stderr print every text: characters that the encoding lacks are escaped."""
    global _printed
    _printed = False
    if sys.stderr is None:
        sys.stderr = io.StringIO()
    if sys.stdout is None:
        typer.echo("error: the output cannot be written: stdout is closed", err=True)
        sys.exit(FAILED)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _output_lost() -> bool:
    """Whether stdout can no longer be written to; text that waits to be written is then dropped."""
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
    from ..errors import InstallationError, TuningError

    fault = getattr(error, "fault", None)
    return isinstance(error, (TuningError, InstallationError)) or getattr(fault, "value", "") in ("busy", "read only")


def use_interpreter_on_cpu(device: str | None) -> None:
    """Turn Triton's interpreter on, before Triton is imported, where the command runs on the CPU."""
    from .. import config

    if device is None:
        from ..device import driver

        device = driver.resolve().type
    if device == "cpu":
        config.enable_interpreter()


def console(stderr: bool = False) -> Console:
    """The console of stdout (tables) or stderr (progress); plain and wide where the stream is no terminal."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 200
    # Brackets and colons in what is stored are text, no markup.
    return Console(file=stream, width=width, highlight=False, soft_wrap=False, markup=False, emoji=False)


def print_json(content: object) -> None:
    """One JSON document on stdout."""
    global _printed
    _printed = True
    typer.echo(json.dumps(content, indent=2))


def print_json_list(name: str, rows: Iterable[object], more: Mapping[str, object] | None = None) -> None:
    """Print one JSON object that holds a list, row by row, after its other members."""
    global _printed
    first = True
    for row in rows:
        _printed = True
        if first:
            head = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in (more or {}).items())
            sys.stdout.write(f'{{\n{head}  "{name}": [')
        text = json.dumps(row, indent=2).replace("\n", "\n    ")
        sys.stdout.write(f"{'' if first else ','}\n    {text}")
        first = False
    if first:
        print_json({**(more or {}), name: []})
    else:
        sys.stdout.write("\n  ]\n}\n")


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar on stderr, if that is a terminal; gives a function that takes a text, the count done and the total."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    out = console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def tell(what: str, done: int, total: int | None) -> None:
            bar.update(task, description=plain(what), completed=done, total=total)

        yield tell


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
