"""The `tuner` command: one module a command, each parsing, one library call, and a table or JSON.

Results go to stdout, progress and logs to stderr. Exit status: 0 done, 1 something failed, 2 bad usage or input,
130 interrupted. Importing this package imports neither torch nor any command's own needs, so that `--help` is quick.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from types import FrameType


def _stop(number: int, frame: FrameType | None) -> None:
    """Ends the process at once; before and after a command there is nothing to clean up."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def _on_interrupt(handler: signal._HANDLER, instead_of: signal._HANDLER) -> None:
    """Set the handler of Ctrl-C, unless another one was set."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is instead_of:
        signal.signal(signal.SIGINT, handler)


# A traceback of an import that was interrupted would tell nobody anything.
_on_interrupt(_stop, signal.default_int_handler)

import typer  # noqa: E402

from . import cache, doctor, explain, lint, selftest, shapes, show, warmup  # noqa: E402
from .common import exit_on_bad_input, version_option  # noqa: E402

app = typer.Typer(
    name="tuner",
    help="Measure, once and on your device, which memory layout each kernel of gated linear attention should use.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.callback()(version_option)
app.command("warmup")(warmup.warmup)
app.command("shapes")(shapes.shapes)
app.command("show")(show.show)
app.command("explain")(explain.explain)
app.command("doctor")(doctor.doctor)
app.command("lint")(lint.lint)
app.command("selftest")(selftest.selftest)
app.add_typer(cache.app)


def main() -> None:
    """Entry point of the `tuner` command."""
    with exit_on_bad_input():
        atexit.register(_on_interrupt, _stop, signal.default_int_handler)
        status = app(standalone_mode=False)
    sys.exit(status if isinstance(status, int) else 0)


_on_interrupt(signal.default_int_handler, _stop)
