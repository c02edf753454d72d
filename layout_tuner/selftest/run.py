"""Runs the self-test: what can be said without a device, then everything else in processes of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from ..config import Config
from ..errors import ConfigError
from .children import Children, Lost
from .findings import MORE_TIME, REPORT, Finding, Machine, Report, Request
from .machines import RESET, at_hand

# More than one chunk, no multiple of it, several rows and heads, and rows of 32 bytes, which an NPU moves at once.
SHAPE: Mapping[str, int | str] = {"B": 2, "T": 67, "H": 1, "HV": 2, "K": 32, "V": 32, "dtype": "bfloat16"}
BUDGET_S = 600.0
# Shares of the budget that one part, and compiling everything ahead, may take.
PART, COMPILING = 0.2, 0.5

# What the last look at the device may take, whatever is left of the budget.
AFTERWARDS_S = 60.0

Heard = Callable[[Finding], None]


def selftest(
    *,
    device: str | None = None,
    ops: Sequence[str] | None = None,
    shape: Mapping[str, int | str] | None = None,
    budget_s: float = BUDGET_S,
    config: Config | None = None,
    heard: Heard | None = None,
) -> Report:
    """Look whether this machine does what this product needs.

    Args:
        device: `npu`, `cuda:1`, `cpu`, ...; None takes the accelerator there is, else the CPU (Triton's interpreter).
        ops: Names of the ops to try; None for all, an empty list for none.
        shape: Sizes and dtype that differ from `SHAPE`, by name.
        budget_s: Seconds for all of it.
        config: Settings; None finds them as `Config.load` does.
        heard: Is told every finding as it comes.

    Raises:
        ConfigError: A device, an op or a shape that cannot be used.
    """
    settings = config or Config.load()
    sizes = checked({**SHAPE, **(shape or {})})
    start, now = time.monotonic(), datetime.now(UTC)
    findings: list[Finding] = []

    def keep(finding: Finding) -> None:
        findings.append(finding)
        if heard is not None:
            heard(finding)

    children = Children(start + budget_s, PART * budget_s, keep)
    machine: Machine | None = None
    interrupted = False
    try:
        for finding in at_hand(settings):
            keep(finding)
        machine = children.work(Request(kind="machine", device=device), blame("machine", "start"))
        if machine is not None:
            try_everything(children, machine, named(ops, machine.ops), sizes, budget_s)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        children.close()
    return Report(
        findings=tuple(findings),
        device=machine.device if machine else "",
        interpreted=machine is not None and machine.interpreted,
        seconds=time.monotonic() - start,
        started=now.isoformat(timespec="seconds"),
        interrupted=interrupted,
    )


def try_everything(
    children: Children, machine: Machine, ops: Sequence[str], sizes: Mapping[str, int | str], budget_s: float
) -> None:
    """The device's part: questions to it, every op, and whether it is as it was."""
    where = machine.device
    steps = [(Request(kind="device", device=where), blame("device", "questions"))]
    if ops and not machine.interpreted:
        request = Request(kind="compile", device=where, ops=tuple(ops), shape=sizes, seconds=COMPILING * budget_s)
        steps.append((request, blame("device", "compile")))
    steps += [(Request(kind="op", device=where, ops=(op,), shape=sizes), blame("ops", op)) for op in ops]
    for request, what in steps:
        if children.left_s > 0:
            children.work(request, what)
        else:
            children.heard(what(Lost(part="", state="left", seen="no time was left", seconds=0.0)))
    request = Request(kind="afterwards", device=where, free_bytes=machine.free_bytes)
    children.deadline = max(children.deadline, time.monotonic() + AFTERWARDS_S)
    children.work(request, blame("device", "afterwards"), more=False)


def blame(group: str, name: str) -> Callable[[Lost], Finding]:
    """What to say of a part whose process ended."""

    def of(lost: Lost) -> Finding:
        if lost.state == "left":
            cure = MORE_TIME
        elif group == "machine":
            cure = "nothing else can be tried: see the rows above, and what python -c 'import torch, triton' says"
        elif name == "afterwards":
            cure = RESET
        else:
            cure = f"{MORE_TIME}; if it hangs again, {REPORT}" if lost.state == "timeout" else REPORT
        named_part = group == "device" and lost.part
        return Finding(
            group=group,
            name=lost.part if named_part else name,
            part="" if named_part else lost.part,
            state=lost.state,
            seen=lost.seen,
            cure=cure,
            seconds=lost.seconds,
        )

    return of


def named(ops: Sequence[str] | None, known: Sequence[str]) -> Sequence[str]:
    """The ops to try.

    Raises:
        ConfigError: One that is not known.
    """
    unknown = [op for op in ops or () if op not in known]
    if unknown:
        raise ConfigError(f"no op {', '.join(map(repr, unknown))} (there are {', '.join(known)})")
    return known if ops is None else list(dict.fromkeys(ops))


DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def checked(shape: Mapping[str, int | str]) -> Mapping[str, int | str]:
    """A shape that can be used.

    Raises:
        ConfigError: Names that are no sizes, sizes that are no numbers, a dtype that is none; all in one message.
    """
    faults = [f"{name}: no such size (there are {', '.join(SHAPE)})" for name in shape if name not in SHAPE]
    sizes = {name: shape[name] for name in SHAPE if name != "dtype"}
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            faults.append(f"{name}: wanted a number from 1, got {value!r}")
    H, HV = sizes["H"], sizes["HV"]
    if not faults and int(HV) % int(H):
        faults.append(f"HV: wanted a multiple of H={H}, got {HV}")
    dtype = DTYPES.get(str(shape["dtype"]), str(shape["dtype"]))
    if dtype not in DTYPES.values():
        faults.append(f"dtype: no such dtype (one of {', '.join([*DTYPES, *DTYPES.values()])})")
    if faults:
        raise ConfigError("--shape: " + "; ".join(faults))
    return {**sizes, "dtype": dtype}
