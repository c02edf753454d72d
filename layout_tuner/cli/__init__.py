"""The `tuner` command: one module a command, each parsing, one library call, and a table or JSON.

Results go to stdout, progress and logs to stderr. Exit status: 0 done, 1 something failed, 2 bad usage or input,
130 interrupted. Importing this package imports neither torch nor any command's own needs, so that `--help` is quick.
"""

from __future__ import annotations

import sys

import typer

from . import cache, doctor, explain, show, warmup
from .common import exit_on_bad_input, version_option

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
app.command("show")(show.show)
app.command("explain")(explain.explain)
app.command("doctor")(doctor.doctor)
app.add_typer(cache.app)


def main() -> None:
    """Entry point of the `tuner` command."""
    with exit_on_bad_input():
        app()
    sys.exit(0)
