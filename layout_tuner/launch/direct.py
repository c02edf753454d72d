"""Launching a compiled kernel without Triton's argument binder, for each Triton whose launcher was read and verified.

Triton compiles a kernel for facts of its arguments: which are None, the dtype of each pointer and whether it is a
multiple of 16, the width of each integer and, unless `do_not_specialize` names it, whether that is 1 or a multiple of
16. A direct launch belongs to one set of such facts and checks every one of them at every call; a call that differs
is refused and goes through Triton, so a compiled kernel never sees arguments it was not compiled for.

The check and the launch are one generated function per set of facts: unrolled, it costs a fraction of a loop.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal

import torch

from ..device import driver

log = logging.getLogger(__name__)

Constant = bool | int | float | str
Kind = Literal["none", "pointer", "float", "int"]
Facts = tuple[int, tuple[object, ...]]
DirectLaunch = Callable[..., bool]

ALIGNMENT = 16
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Style:
    """How one verified Triton launches what it compiled.

    Attributes:
        distribution: Name of the package.
        version: The release that was verified. Another one, a development build too, may hand its launcher other
            arguments, which would write anywhere in memory.
        target: Name of the backend.
        quiet: Expression that says that nothing of Triton's watches launches; while a profiler or a hook does, they go
            through Triton, which serves it.
        call: The launcher's arguments before the kernel's; here as in `quiet`, what differs from launch to launch
            stands in braces: `grid`, `stream`, `kernel` and what `names` gives.
        addresses: Whether pointers are handed over as addresses; a tensor costs the launcher a method call and a
            question to the driver.
        constants: Whether the launcher takes the compile-time constants too.
        most_programs: The largest grid that Triton lets pass unseen.
        names: The launcher, `start`, and what `quiet` and `call` name, from the compiled kernel; None where it is to
            be launched by Triton.
    """

    distribution: str
    version: str
    target: str
    quiet: str
    call: str
    addresses: bool
    constants: bool
    most_programs: int
    names: Callable[[Any], Mapping[str, Any] | None]

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} on {self.target}"


def cuda_names(compiled: Any) -> Mapping[str, Any] | None:
    """The launcher of a kernel compiled by Triton 3.6, and what it takes."""
    from triton import knobs

    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size:  # Triton allocates these at every launch
        return None
    return {
        "start": run.launch,
        "function": compiled.function,
        "cooperative": run.launch_cooperative_grid,
        "dependent": run.launch_pdl,
        "metadata": compiled.packed_metadata,
        "runtime": knobs.runtime,
        "compilation": knobs.compilation,
        "debug": knobs.runtime.debug,
    }


def npu_names(compiled: Any) -> Mapping[str, Any]:
    """The launcher of a kernel compiled by triton-ascend 3.2, and what it takes."""
    return {
        "start": compiled.run,
        "function": compiled.function,
        "metadata": compiled.packed_metadata,
        "hooks": type(compiled),
    }


STYLES = (
    Style(
        distribution="triton",
        version="3.6.0",
        target="cuda",
        quiet=(
            "not ({runtime}.launch_enter_hook.calls or {runtime}.launch_exit_hook.calls or {kernel}.pre_run_hooks"
            " or {compilation}.instrumentation_mode) and {runtime}.debug == {debug}"
        ),
        call=(
            "{grid}, 1, 1, {stream}, {function}, {cooperative}, {dependent}, None, None, {metadata}, None, None, None"
        ),
        addresses=True,
        constants=True,
        most_programs=INT32_MAX,
        names=cuda_names,
    ),
    # The Ascend launcher asks tensors for their shapes while msprof records, so it is given tensors.
    Style(
        distribution="triton-ascend",
        version="3.2.0",
        target="npu",
        quiet=("{hooks}.launch_enter_hook is None and {hooks}.launch_exit_hook is None and not {kernel}.pre_run_hooks"),
        call="{grid}, 1, 1, {stream}, {function}, {metadata}, None, None, None",
        addresses=False,
        constants=False,
        most_programs=65535,
        names=npu_names,
    ),
)


@functools.cache
def style() -> Style | None:
    """How this process launches directly; None where its Triton is not verified, which is said once."""
    distribution, version = driver.triton_distribution()
    target = driver.launch_target()
    for known in STYLES:
        if (known.distribution, known.version, known.target) == (distribution, version, target):
            return known
    verified = ", ".join(map(str, STYLES))
    log.info("%s %s launches kernels by its own path (direct launches: %s)", distribution, version, verified)
    return None


@functools.cache
def say_interpreted() -> None:
    """Say, once, that the interpreter runs the kernels."""
    log.info("the interpreter of %s %s runs the kernels", *driver.triton_distribution())


# -- facts of arguments ----------------------------------------------------------------------------------------


def run_time_parameters(kernel: Any, constants: Mapping[str, Constant]) -> list[Any] | None:
    """The parameters a launch passes one by one; None where constants do not follow them all.

    Args:
        kernel: The jitted function.
        constants: The compile-time constants it is bound to.
    """
    cut = len(kernel.params) - len(constants)
    fits = [parameter.name for parameter in kernel.params[cut:]] == list(reordered(kernel, constants))
    whole = all(parameter.is_constexpr == (parameter.num >= cut) for parameter in kernel.params)
    annotated = any(parameter.annotation for parameter in kernel.params[:cut])
    return kernel.params[:cut] if fits and whole and not annotated else None


def reordered(kernel: Any, constants: Mapping[str, Constant]) -> dict[str, Constant]:
    """The constants in the kernel's order."""
    return {parameter.name: constants[parameter.name] for parameter in kernel.params if parameter.name in constants}


def facts(parameters: Sequence[Any], arguments: Sequence[Any]) -> Facts | None:
    """The device of the arguments and all that Triton specialises a kernel on; None for what only Triton serves.

    Args:
        parameters: The kernel's run-time parameters.
        arguments: Their values.
    """
    if len(parameters) != len(arguments):
        return None
    device = None
    found: list[object] = []
    for parameter, argument in zip(parameters, arguments):
        if argument is None:
            found.append(None)
        elif isinstance(argument, torch.Tensor):
            if device is None:
                device = argument.get_device()
            elif argument.get_device() != device:
                return None
            align = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
            found.append((argument.dtype, argument.data_ptr() % ALIGNMENT == 0 if align else None))
        elif type(argument) is float:
            found.append(float)
        elif type(argument) is int and parameter.do_not_specialize and 0 <= argument <= INT32_MAX:
            found.append(int)
        else:
            return None
    return None if device is None else (device, tuple(found))


# -- the generated launch --------------------------------------------------------------------------------------


def direct_launch(
    how: Style, kernel: Any, constants: Mapping[str, Constant], known: Facts, names: Mapping[str, Any]
) -> DirectLaunch:
    """A function that launches a compiled kernel for arguments of these facts, and answers False for any other.

    Args:
        how: The style of this Triton.
        kernel: The jitted function.
        constants: Its compile-time constants.
        known: The facts that the kernel was compiled for.
        names: What the style takes from what Triton compiled for them.

    Returns:
        `launch(grid, *arguments) -> bool`.
    """
    device, each = known
    scope: dict[str, Any] = {**names, "kernel": kernel, "stream": driver.raw_stream(), "device": device}
    scope |= {f"t{i}": fact[0] for i, fact in enumerate(each) if isinstance(fact, tuple)}
    values = list(reordered(kernel, constants).values()) if how.constants else []
    scope |= {f"c{i}": value for i, value in enumerate(values)}
    exec(code(source(how, each, len(values))), scope)
    made: DirectLaunch = scope["launch"]
    return made


@functools.cache
def code(text: str) -> CodeType:
    """A source, compiled once: kernels of one form share it."""
    return compile(text, "<direct launch>", "exec")


class AsNamed(dict[str, str]):
    """What stands for the names in a style's texts: themselves, where nothing else is given."""

    def __missing__(self, name: str) -> str:
        return name


def source(how: Style, each: Sequence[object], constants: int) -> str:
    """The text of a direct launch.

    Args:
        how: The style of this Triton.
        each: Facts of each argument.
        constants: How many compile-time constants the launcher takes.
    """
    arguments = [f"a{i}" for i in range(len(each))]
    tensors = [i for i, fact in enumerate(each) if isinstance(fact, tuple)]
    numbers = [f"a{i}" for i, fact in enumerate(each) if fact is int]
    conditions = [f"a{tensors[0]}.get_device() == device"]
    conditions += [f"a{i}.dtype is t{i}" for i in tensors]
    conditions += [f"a{i} is None" for i, fact in enumerate(each) if fact is None]
    conditions += [f"type(a{i}) is float" for i, fact in enumerate(each) if fact is float]
    conditions += [f"0 <= {' | '.join(numbers)} <= {INT32_MAX}"] if numbers else []
    conditions += [f"0 < grid <= {how.most_programs}", how.quiet.format_map(AsNamed())]
    aligned = [f"p{i}" for i in tensors if each[i][1] is True]  # type: ignore[index]
    shifted = [f"p{i}" for i in tensors if each[i][1] is False]  # type: ignore[index]
    alignment = [f"not ({' | '.join(aligned)}) % {ALIGNMENT}"] if aligned else []
    alignment += [f"{pointer} % {ALIGNMENT}" for pointer in shifted]
    handed = [f"p{i}" if i in tensors and how.addresses else f"a{i}" for i in range(len(each))]
    handed += [f"c{i}" for i in range(constants)]
    return "\n".join(
        itertools.chain(
            [f"def launch(grid, {', '.join(arguments)}):"],
            ["    try:"],
            [f"        if not ({' and '.join(conditions)}):"],
            ["            return False"],
            [f"        p{i} = a{i}.data_ptr()" for i in tensors],
            ["    except (AttributeError, TypeError):"],  # another kind of argument than these facts say
            ["        return False"],
            [f"    if not ({' and '.join(alignment) or 'True'}):"],
            ["        return False"],
            [f"    start({how.call.format_map(AsNamed(stream='stream(device)'))}, {', '.join(handed)})"],
            ["    return True"],
        )
    )
