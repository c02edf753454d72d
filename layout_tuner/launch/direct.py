"""Launching a compiled kernel without Triton's argument binder, for each Triton whose launcher was read and verified.

Triton compiles a kernel for facts of its arguments: which are None, the dtype of each pointer and whether it is a
multiple of 16, the width of each integer and, unless `do_not_specialize` names it, whether that is 1 or a multiple of
16. A direct launch belongs to one set of such facts and checks every one of them at every call; a call that differs
is refused and goes through Triton, so a compiled kernel never sees arguments it was not compiled for.

The check and the launch are one generated function per set of facts: unrolled, it costs a fraction of a loop.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..device import driver
from .generated import define, distinct

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
        quiet: A Python expression that is true while no profiler and no hook of Triton's watches launches. While one
            does, launches go through Triton, which calls it.
        call: The arguments that the launcher takes ahead of the kernel's own, as Python text. A name in braces, here
            and in `quiet`, is replaced by what the generated text calls `grid`, `stream`, `kernel` or one of `names`.
        addresses: Whether the launcher is handed addresses in place of tensors. It would ask each tensor for its
            address by a method call, and the driver whether that address is its own.
        constants: Whether the launcher takes the compile-time constants too.
        most_programs: The largest grid that Triton launches without a check or a warning of its own.
        names: Gives, for a compiled kernel, its launcher as `start` and everything else that `quiet` and `call` name;
            None where only Triton can launch the kernel.
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
    """The launcher of a kernel that Triton 3.6 compiled, and what it is called with."""
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
    """The launcher of a kernel that triton-ascend 3.2 compiled, and what it is called with."""
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
    """The style of this process's Triton; None where that Triton was not verified, which is logged once."""
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
    """Log, once, that the interpreter runs the kernels."""
    log.info("the interpreter of %s %s runs the kernels", *driver.triton_distribution())


# -- facts of arguments ----------------------------------------------------------------------------------------


def run_time_parameters(kernel: Any, constants: Mapping[str, Constant]) -> list[Any] | None:
    """The parameters whose values every launch passes, in order.

    Args:
        kernel: The jitted function.
        constants: The compile-time constants it is bound to.

    Returns:
        None where the constants are not exactly the kernel's last parameters, or where a parameter is annotated: then
        only Triton can put the arguments in order.
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
    """The device of the arguments, and of each one everything that Triton compiles a kernel for.

    Args:
        parameters: The kernel's run-time parameters.
        arguments: Their values.

    Returns:
        None where only Triton can launch such arguments: of two devices, without any tensor, or of a kind that this
        module does not know.
    """
    if len(parameters) != len(arguments):
        return None
    device = None
    each: list[object] = []
    for parameter, argument in zip(parameters, arguments):
        if argument is None:
            each.append(None)
        elif isinstance(argument, torch.Tensor):
            if device is None:
                device = argument.get_device()
            elif argument.get_device() != device:
                return None
            align = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
            each.append((argument.dtype, argument.data_ptr() % ALIGNMENT == 0 if align else None))
        elif type(argument) is float:
            each.append(float)
        elif type(argument) is int and parameter.do_not_specialize and 0 <= argument <= INT32_MAX:
            each.append(int)
        else:
            return None
    return None if device is None else (device, tuple(each))


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
    values = list(reordered(kernel, constants).items()) if how.constants else []
    own = (
        "launch",
        "grid",
        "start",
        "stream",
        "device",
        "kernel",
        *names,
        "type",
        "float",
        "AttributeError",
        "TypeError",
    )
    wanted = [*[parameter.name for parameter in kernel.params[: len(each)]], *[name for name, _ in values]]
    called = distinct(wanted, own, (AT, DTYPE))
    arguments, passed = called[: len(each)], called[len(each) :]
    scope: dict[str, Any] = {**names, "kernel": kernel, "stream": driver.raw_stream(), "device": device}
    scope |= {f"{x}{DTYPE}": fact[0] for x, fact in zip(arguments, each) if isinstance(fact, tuple)}
    scope |= {name: value for name, (_, value) in zip(passed, values, strict=True)}
    text = source(how, dict(zip(arguments, each, strict=True)), passed)
    made: DirectLaunch = define("launch", text, f"a launch of {name_of(kernel)}", scope)
    return made


def name_of(kernel: Any) -> str:
    """A kernel's name."""
    return str(getattr(kernel, "__name__", "a kernel"))


class AsNamed(dict[str, str]):
    """For `str.format_map`: a name in braces stays that name where nothing else is given for it."""

    def __missing__(self, name: str) -> str:
        return name


# A launch calls the address of `q` `q_at`, and the dtype that the kernel was compiled for `q_dtype`.
AT, DTYPE = "_at", "_dtype"


def source(how: Style, each: Mapping[str, object], constants: Sequence[str]) -> str:
    """The text of a direct launch.

    Args:
        how: The style of this Triton.
        each: Facts of each argument, by its name.
        constants: Names of the compile-time constants that the launcher takes.
    """
    tensors = {x: fact[1] for x, fact in each.items() if isinstance(fact, tuple)}
    numbers = [x for x, fact in each.items() if fact is int]
    conditions = [f"{next(iter(tensors))}.get_device() == device"]
    conditions += [f"{x}.dtype is {x}{DTYPE}" for x in tensors]
    conditions += [f"{x} is None" for x, fact in each.items() if fact is None]
    conditions += [f"type({x}) is float" for x, fact in each.items() if fact is float]
    conditions += [f"0 <= {' | '.join(numbers)} <= {INT32_MAX}"] if numbers else []
    conditions += [f"0 < grid <= {how.most_programs}", how.quiet.format_map(AsNamed())]
    aligned = [f"{x}{AT}" for x, at in tensors.items() if at is True]
    shifted = [f"{x}{AT}" for x, at in tensors.items() if at is False]
    misaligned = [f"({' | '.join(aligned)}) % {ALIGNMENT}"] if aligned else []
    misaligned += [f"not {address} % {ALIGNMENT}" for address in shifted]
    handed = [f"{x}{AT}" if x in tensors and how.addresses else x for x in each]
    return "\n".join(
        [
            f"def launch(grid, {', '.join(each)}):",
            "    try:",
            "        if not (",
            f"            {conditions[0]}",
            *[f"            and {condition}" for condition in conditions[1:]],
            "        ):",
            "            return False",
            *[f"        {x}{AT} = {x}.data_ptr()" for x in tensors],
            "    except (AttributeError, TypeError):  # another kind of argument than was compiled for",
            "        return False",
            *([f"    if {' or '.join(misaligned)}:", "        return False"] if misaligned else []),
            f"    start({how.call.format_map(AsNamed(stream='stream(device)'))}, {', '.join([*handed, *constants])})",
            "    return True",
            "",
        ]
    )
