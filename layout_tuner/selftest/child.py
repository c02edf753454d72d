"""A process of the self-test: see `children`, which starts it. It tells what it does before it does it."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from .. import config
from ..errors import ConfigError
from ..processes import die_with_parent
from .findings import Begun, Done, Finding, Machine, Message, Plan, Refused, Request

if TYPE_CHECKING:
    import torch

Tell = Callable[[Message], None]
Probe = Callable[["torch.device"], Finding]


def main(channel: int, parent: int) -> None:
    """Answer one request, then end without waiting for anything: the device may never come back."""
    die_with_parent(parent)
    connection = Connection(channel)
    broken: Exception | None = None
    try:
        importlib.import_module("torch")  # ahead of the request; a second attempt would say something else
    except Exception as error:
        broken = error
    try:
        request = connection.recv()
    except EOFError:  # it was not needed
        os._exit(0)
    assert isinstance(request, Request)
    try:
        if broken is not None:
            raise broken
        answer(request, connection.send)
    except Exception as error:
        traceback.print_exc()
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
        first = (str(error).splitlines() or [""])[0]
        sys.stderr.write(f"{type(error).__name__}: {first}\n")
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def answer(request: Request, tell: Tell) -> None:
    """Do what is asked."""
    from ..device import driver

    try:
        device = driver.resolve(request.device) if request.kind == "machine" else driver.named(request.device or "cpu")
    except ConfigError as error:
        tell(Refused(text=str(error)))
        return
    if device.type == "cpu":
        config.enable_interpreter()
    with driver.guard(device):
        if request.kind == "machine":
            look_around(device, request.device is None, tell)
        elif request.kind == "device":
            from .probes import PROBES

            ask(request, device, PROBES, tell)
        elif request.kind == "compile":
            from .candidates import compile_all

            compile_all(request, device, tell)
        elif request.kind == "op":
            from .candidates import try_all

            try_all(request, device, tell)
        else:
            from .machines import afterwards

            tell(afterwards(device, request.free_bytes))
            tell(Done())


def look_around(device: torch.device, picked: bool, tell: Tell) -> None:
    """What the device is, and what can be tried on it; `picked` where nobody named it."""
    from .. import ops as _ops  # noqa: F401  registers every op
    from ..device import interpreter
    from ..spec import registry
    from . import machines

    free, _ = machines.memory(device)
    interpreted = interpreter.interpreting()
    tell(Machine(device=str(device), interpreted=interpreted, ops=registry.names(), free_bytes=free))
    for finding in machines.facts(device, picked):
        tell(finding)
    tell(Done())


def ask(request: Request, device: torch.device, probes: Mapping[str, Probe], tell: Tell) -> None:
    """Put small questions to a device."""
    from .looking import tried

    tell(Plan(parts=tuple(probes)))
    for name, probe in probes.items():
        if name in request.done:
            continue
        tell(Begun(part=name))
        blank = Finding(group="device", name=name, state="failed", seen="")
        finding = tried(functools.partial(probe, device), device, blank)
        tell(finding)
        if finding.state == "dead":
            return
    tell(Done())
