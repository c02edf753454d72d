"""Every candidate of an op, on a small problem, against the oracle."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from .. import ops as _ops  # noqa: F401  registers every op
from ..device import driver
from ..errors import UnsupportedProblemError
from ..spec import registry
from ..spec.declaration import Candidate, OpSpec, Problem
from ..spec.keys import Key
from ..tuning.ahead import Unit, compile_ahead, processes, units
from ..tuning.experiment import Experiment
from .findings import ORACLE, Begun, Done, Finding, Message, Plan, Request, State
from .looking import tried

Tell = Callable[[Message], None]


def key_of(spec: OpSpec, request: Request) -> Key:
    """The key of an op's first standard form at the sizes that are asked for."""
    sizes = {name: int(value) for name, value in request.shape.items() if name != "dtype"}
    form = next(iter(spec.standard_forms.values()))
    return spec.key_for(sizes, dtype=str(request.shape["dtype"]), form=form)


def unserved(spec: OpSpec, key: Key) -> str:
    """Why no kernel serves a key; empty where one does."""
    try:
        spec.require(key)
    except UnsupportedProblemError as error:
        return str(error)
    return ""


def compile_all(request: Request, device: torch.device, tell: Tell) -> None:
    """Compile what all ops will launch, in parallel; what goes wrong goes wrong again where it is tried."""
    start = time.monotonic()
    wanted: dict[str, Unit] = {}
    chip = driver.chip(device)
    for name in request.ops:
        spec = registry.lookup(name)
        problem = Problem(key=key_of(spec, request), chip=chip)
        if unserved(spec, problem.key):
            continue
        for unit in units(spec, problem, spec.candidates(problem.key, buffers=chip.buffers)):
            wanted.setdefault(repr(unit), unit)
    ready = compile_ahead(list(wanted.values()), device, request.seconds, lambda seconds: None)
    seconds = time.monotonic() - start
    seen = f"{ready} of {len(wanted)} kernels ahead in {seconds:.0f} s, {processes()} at a time"
    tell(Finding(group="device", name="compile", state="fact", seen=seen, seconds=seconds))
    tell(Done())


def try_all(request: Request, device: torch.device, tell: Tell) -> None:
    """Check every candidate of an op, the default first: with its bits the others' are compared."""
    spec = registry.lookup(request.ops[0])
    key = key_of(spec, request)
    if reason := unserved(spec, key):
        tell(replace(blank(request, ""), state="skipped", seen=reason))
        tell(Done())
        return
    chip = driver.chip(device)
    default = spec.default(key, chip)
    candidates = sorted(spec.candidates(key, buffers=chip.buffers), key=lambda candidate: candidate.id != default.id)
    tell(Plan(parts=(ORACLE, *[candidate.id for candidate in candidates])))
    experiment = Experiment(spec, key, device)
    if ORACLE not in request.done or ORACLE in request.right:
        tell(Begun(part=ORACLE))
        finding = tried(functools.partial(oracle, experiment), device, blank(request, ORACLE))
        if ORACLE not in request.done:
            tell(finding)
        if not finding.good:
            if finding.state != "dead":
                tell(Done())
            return
    for candidate in candidates:
        if candidate.id in request.done and not (candidate == default and candidate.id in request.right):
            continue
        tell(Begun(part=candidate.id))
        finding = tried(functools.partial(check, experiment, candidate), device, blank(request, candidate.id))
        if candidate.id not in request.done:
            tell(finding)
        if finding.state == "dead":
            return
    tell(Done())


def blank(request: Request, part: str) -> Finding:
    """A finding of an op before anything was found."""
    return Finding(group="ops", name=request.ops[0], part=part, state="failed", seen="")


def oracle(experiment: Experiment) -> Finding:
    """Arguments and the oracle's results: torch's own work, which has to be done before a kernel can be judged."""
    finite = all(bool(torch.isfinite(each).all()) for each in experiment.wanted if each is not None)
    seen = "torch's results are finite" if finite else "torch's own results are not finite"
    return Finding(group="ops", name=experiment.spec.name, part=ORACLE, state="right" if finite else "wrong", seen=seen)


def check(experiment: Experiment, candidate: Candidate) -> Finding:
    """A candidate's results, in memory that was NaN, against the oracle's and against other layouts' bits."""
    found = experiment.prepare(candidate).check()
    seen = found.differs or f"{found.output or 'nothing'}: error {found.error:.1e} of {found.limit:.1e} allowed"
    state: State = "right" if found.right else "wrong"
    return Finding(group="ops", name=experiment.spec.name, part=candidate.id, state=state, seen=seen)
