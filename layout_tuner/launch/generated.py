"""Functions that are written as text while the program runs; no other module executes a text.

A loop over the operands at every call costs twice as much as the same steps written one after the other. Three modules
therefore write the steps out: `guards` writes the test whether a call is like one that was seen before, `direct` writes
the launch of a compiled kernel, and `replay` writes all launches of a function. A text calls operands, options and
arguments what the op or the kernel calls them. It is kept where `linecache` looks, so that tracebacks and debuggers
show its lines.

This is the text that `guards` writes for calls of `solve_tril` without `cu_seqlens`, where torch has no guards of its
own. The arguments of `make` are what a call is compared with, and `launch`, which runs a call that fits:

    def make(output_dtype_wanted, check, launch, tally, A_shape, A_dtype, A_device, A_memory):
        def run(operands, options, scalars, cu_seqlens, chunk_indices):
            A, = operands
            output_dtype, = options
            try:
                fitting = (
                    cu_seqlens is None
                    and chunk_indices is None
                    and (
                        output_dtype is output_dtype_wanted
                        or type(output_dtype) is type(output_dtype_wanted)
                        and output_dtype == output_dtype_wanted
                    )
                    and A.shape == A_shape
                    and A.dtype is A_dtype
                    and A.is_cpu
                    and A.is_contiguous()
                    and plain(A)
                )
            except (AttributeError, RuntimeError):  # of what is no tensor, and of nested and sparse ones
                fitting = False
            if not fitting:
                return None
            tally.calls += 1
            return launch(A, cu_seqlens, chunk_indices)
        return run
"""

from __future__ import annotations

import functools
import itertools
import keyword
import linecache
import re
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any

_numbers = itertools.count(1)


def define(name: str, text: str, about: str, scope: Mapping[str, object]) -> Callable[..., Any]:
    """Executes a text and returns the function that it defines.

    Args:
        name: Name of the function.
        text: Its source.
        about: What it does, in a few words; tracebacks show them in place of a file's name.
        scope: What the text's names stand for.
    """
    space: dict[str, Any] = dict(scope)
    exec(code(text, about), space)
    made: Callable[..., Any] = space[name]
    return made


@functools.cache
def code(text: str, about: str) -> CodeType:
    """A text, compiled once: functions that differ only in what their names stand for share it."""
    file = f"<layout_tuner: {about}, {next(_numbers)}>"
    # Without a time of change, `linecache` does not look for a file of that name.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return compile(text, file, "exec")


def distinct(wanted: Iterable[str], taken: Iterable[str], endings: Iterable[str] = ()) -> list[str]:
    """Names for a text, as they are wanted, but with a number where that is no name or would stand for two things.

    Args:
        wanted: Names of operands, of options, of a kernel's parameters: whatever their author chose.
        taken: Names that stand for something else in the text.
        endings: What the text adds to these names to make further ones, such as `_shape`.
    """
    used = {*taken, *keyword.kwlist}
    suffixes = ("", *endings)
    called = []
    for name in wanted:
        plain = re.sub(r"\W|^(?=\d)", "_", name)
        tries = itertools.chain([plain], (f"{plain}_{number}" for number in itertools.count(2)))
        free = next(each for each in tries if used.isdisjoint(each + suffix for suffix in suffixes))
        used.update(free + suffix for suffix in suffixes)
        called.append(free)
    return called
