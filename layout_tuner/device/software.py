"""What an Ascend NPU's kernels pass through beside torch: CANN, triton-ascend and its compiler, and their variables."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
import shutil
import subprocess

import torch

from .. import config

log = logging.getLogger(__name__)

# The CANN that each triton-ascend was released for, by triton-ascend's installation guide.
PAIRS = {"3.2.0": "8.5", "3.2.1": "9.0", "3.2.2": "9.1"}

# Variables under which triton-ascend does not run a kernel that it is given.
DEAF = {
    "TRITON_REGISTER_TENSOR_MSPROF": "then triton-ascend registers tensors for msprof and launches nothing",
    "TRITON_COMPILE_ONLY": "then triton-ascend compiles and launches nothing",
}
# Variables that change what a kernel is compiled to or how it is launched, with the values that change nothing.
STEERING = {
    "TRITON_ENABLE_TASKQUEUE": ("true", "1"),
    "TRITON_ALL_BLOCKS_PARALLEL": ("false", "0"),
    "TRITON_DISABLE_FFTS": ("false", "0"),
    "TRITON_ENABLE_SANITIZER": ("false", "0"),
    "ENABLE_UNPUBLISHED_FEATURE": ("false", "0"),
    "ASCEND_LAUNCH_BLOCKING": ("0",),
    "TASK_QUEUE_ENABLE": ("1",),
}
COMPILER = "bishengir-compile"
COMPILER_ANSWERS_S = 30.0


def refusals() -> list[str]:
    """Why no kernel may be launched on an NPU now: variables under which launches do nothing, each in a sentence."""
    values = config.variables(DEAF)
    return [
        f"{name}={value} is set: {DEAF[name]}, so results would be whatever memory held; unset it"
        for name, value in values.items()
        if value.lower() in ("true", "1")
    ]


def npu_facts() -> dict[str, str]:
    """torch_npu, CANN, driver, compiler, and variables that differ from their defaults; what nobody tells is left out.

    Warns where CANN and triton-ascend were not released for each other.
    """
    facts = {}
    for fact, distribution in (("torch_npu", "torch_npu"), ("ascendnpu-ir", "ascendnpu-ir")):
        found = version(distribution)
        if found:
            facts[fact] = found
    ask = getattr(getattr(getattr(torch, "npu", None), "utils", None), "get_cann_version", None)
    for fact, module in (("cann", "CANN"), ("driver", "DRIVER")):
        try:
            told = ask(module) if ask else ""
        except (RuntimeError, OSError, KeyError, ValueError):
            told = ""
        if told:
            facts[fact] = str(told)
    facts.setdefault("cann", str(getattr(torch.version, "cann", "") or "unknown"))
    compiler = compiler_version()
    if compiler:
        facts["bishengir"] = compiler
    facts |= {
        name: value for name, value in config.variables(STEERING).items() if value.lower() not in ("", *STEERING[name])
    }
    fault = pair_fault(version("triton-ascend"), facts["cann"])
    if fault:
        log.warning("%s", fault)
    return facts


def pair_fault(triton_ascend: str, cann: str) -> str:
    """What is wrong with a pair of versions, and what to do; empty where they fit, or nobody can say.

    Args:
        triton_ascend: Version of triton-ascend, as `3.2.0`.
        cann: Version of CANN, as `8.5.0` or `9.0.RC1`.
    """
    number = re.match(r"\d+\.\d+", cann)
    release = re.match(r"\d+\.\d+\.\d+", triton_ascend)
    if not number or not release:
        return ""
    wanted = PAIRS.get(release[0])
    if wanted is None or wanted == number[0]:
        return ""
    fitting = [each for each, other in PAIRS.items() if other == number[0]]
    other = f", or triton-ascend {fitting[0]}, which goes with CANN {number[0]}" if fitting else ""
    return (
        f"triton-ascend {triton_ascend} goes with CANN {wanted}, here is CANN {cann}: kernels may fail to compile, or "
        f"compile to something wrong. Install CANN {wanted}{other}; clear Triton's cache (~/.triton/cache) whenever "
        "CANN changes"
    )


def version(distribution: str) -> str:
    """Version of an installed distribution; empty where it is not there."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def compiler_version() -> str:
    """What Ascend's compiler, which triton-ascend looks for on the search path, says of itself; empty for none."""
    program = shutil.which(COMPILER)
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILER_ANSWERS_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("%s does not say its version: %s", program, error)
        return ""
    return " ".join(done.stdout.partition("\n")[0].split())[:200]
