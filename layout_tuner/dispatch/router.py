"""The hot path: from a call's signature to its prepared launch.

A hit compares the call with the last one of its op, or looks its signature up in a dictionary, and launches: no lock,
no SQL, no environment read, no logging, no string. Every check of a call depends on its signature alone (see
`guards`), so a call that hits needs none.

A call that misses makes its key and asks `choices` for a candidate. Entries stack: `enable` pushes a router, the newest
wins, and without any the default candidates run.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from ..config import Config
from ..device import interpreter
from ..device.environment import environment
from ..device.failures import classify, first_line
from ..errors import PackingError
from ..forking import ProcessLock
from ..launch.guards import Scalars, Signature
from ..launch.guards import signature as signature_of
from ..launch.prepared import Prepared
from ..launch.tally import UNROUTED, Tally
from ..spec import watched
from ..spec.calls import number_faults
from ..spec.declaration import REFERENCE, Candidate, OpSpec
from ..spec.forcing import Forced
from ..spec.keys import Key, bucketed
from ..spec.operands import Call, Outputs, Value
from ..tuning.timing import Timer
from .choices import Choice, Choices, Policy, saved_by
from .decisions import candidates
from .known import Known, Memory
from .misses import MissLog

log = logging.getLogger(__name__)

R = TypeVar("R")

MOST_SIGNATURES = 4096

_routers: weakref.WeakSet[Router] = weakref.WeakSet()
_numbers = itertools.count()


class Router(Choices):
    """Runs calls by the decisions of one `enable`, or by the default candidates where `tuning` is off.

    Args:
        config: Settings.
        tuning: Whether decisions are looked up and made at all.
        on_miss: Overrides the settings' policy.
        timer: Takes the samples; None makes one for the device.
        forced: Candidates that run whatever was measured, by op.
    """

    def __init__(
        self,
        config: Config,
        *,
        tuning: bool = True,
        on_miss: Policy | None = None,
        timer: Timer | None = None,
        forced: Mapping[str, Forced] | None = None,
    ) -> None:
        super().__init__(config, tuning=tuning, on_miss=on_miss, timer=timer, forced=forced)
        self.prepared = Memory()
        self.misses = MissLog()
        self.number = next(_numbers)
        _routers.add(self)
        weakref.finalize(self, self.tallies.retire).atexit = False

    def resolve(self, spec: OpSpec, signature: Signature, call: Call) -> Prepared:
        """Check a call that missed, choose for its key, prepare the choice, and remember it where it may be.

        Raises:
            TypeError, ValueError, UnsupportedProblemError: The call itself is wrong.
        """
        key = spec.key(call)
        device = present(call).device
        interpreter.require_running(spec.name, key.dtype, device)
        choice = self.choose(spec, key, device)
        prepared = self.prepare(spec, key, device, choice.candidate, call)
        prepared.tally = self.tally(spec, key, device, choice)
        prepared.tally.calls += 1
        if choice.pending:
            with self._lock:
                if (bucketed(key, self.config.keys.bucket), environment(device).id) not in self._tuned:
                    self.remember(signature, prepared)
        elif choice.frozen:
            self.remember(signature, prepared)
        return prepared

    def recover(
        self,
        spec: OpSpec,
        signature: Signature,
        call: Call,
        failed: Prepared,
        error: Exception,
        before: Sequence[Candidate] = (),
    ) -> Prepared:
        """The prepared default, which stands in for a candidate that failed to launch, for this key in this process.

        Where the default asks for more on-chip memory than there is, another variant stands in for it.

        Args:
            spec: The op.
            signature: Of the call.
            call: Its arguments.
            failed: The launch that failed.
            error: Its error.
            before: Candidates that failed before it.

        Raises:
            Exception: `error` itself, where nothing is left to stand in, or the call itself is at fault.
        """
        if isinstance(error, PackingError):
            raise error
        key, device = spec.key(call), present(call).device
        if failed.candidate.variant == REFERENCE:
            raise error
        choice = self.standby(spec, key, device)
        instead: Candidate | None = choice.candidate
        tried = (*before, failed.candidate)
        if instead in tried:
            variants = {candidate.variant for candidate in tried}
            left = (candidate for candidate in candidates(spec, key, device) if candidate.variant not in variants)
            instead = next(left, None) if classify(error) == "overflow" else None
        if instead is None:
            raise error
        log.warning("%s: %s failed (%s): running %s", key, failed.candidate.id, first_line(error), instead.id)
        place = (bucketed(key, self.config.keys.bucket), environment(device).id)
        held = self.choices.get(place)
        if held is not None and held.record is not None:
            self.quarantine(held.record, error)
        choice = replace(choice, candidate=instead)
        self.choices[place] = choice
        prepared = self.prepare(spec, key, device, instead, call)
        prepared.tally = self.tally(spec, key, device, choice)
        prepared.tally.calls += 1
        failed.tally.calls -= 1
        self.prepared.last.pop(spec, None)
        self.prepared.by_shape.clear()
        self.remember(signature, prepared)
        return prepared

    def tally(self, spec: OpSpec, key: Key, device: torch.device, choice: Choice) -> Tally:
        """The tally of a choice. Calls without a decision are recorded as misses, later and by another thread."""
        if not self.tuning:
            return UNROUTED
        fresh = Tally(
            bucketed(key, self.config.keys.bucket),
            environment(device).id,
            candidate=choice.candidate.id,
            source=choice.source,
            reason=choice.reason,
            saved_us=saved_by(choice.record),
        )
        tally = self.tallies.of(fresh)
        if choice.missed and (tally is fresh or not choice.frozen):
            tally.missed += 1
            if choice.reason:  # else it was tuned at once
                self.misses.watch(tally, self.store)
        return tally

    def prepare(self, spec: OpSpec, key: Key, device: torch.device, candidate: Candidate, call: Call) -> Prepared:
        """A candidate prepared for a call. Packed batches that differ only in their length share one."""
        if not key.varlen:
            return Prepared(spec, self.problem(key, device), candidate, call)
        rounded = bucketed(key, self.config.keys.bucket)
        whole = tuple(tensor is None or tensor.is_contiguous() for tensor in call.tensors)
        same = (rounded, candidate, device, whole)
        prepared = self.prepared.bound.get(same)
        if prepared is None:
            prepared = self.prepared.bound[same] = Prepared(spec, self.problem(rounded, device), candidate, call)
        return prepared

    def remember(self, signature: Signature, prepared: Prepared) -> None:
        """Make a signature a hit from now on."""
        if len(self.prepared) >= MOST_SIGNATURES:
            self.prepared.clear()
        self.prepared[signature] = prepared

    def lookup(
        self,
        spec: OpSpec,
        tensors: tuple[torch.Tensor | None, ...],
        options: tuple[Value, ...],
        scalars: Scalars,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> tuple[Signature, Prepared]:
        """The prepared launch of a call that differs from the last one of its op, made now where the call is new.

        Raises:
            TypeError, ValueError, UnsupportedProblemError: The call itself is wrong.
        """
        shape = getattr(tensors[0], "shape", None)
        try:
            known = self.prepared.by_shape[spec, shape]
        except (KeyError, TypeError):  # TypeError: a shape that cannot be hashed
            pass
        else:
            if known.fits(tensors, options, cu_seqlens, chunk_indices):
                self.prepared.last[spec] = known
                known.prepared.tally.calls += 1
                return known.signature, known.prepared
        signature = signature_of(spec, tensors, options, cu_seqlens, chunk_indices)
        try:
            prepared = self.prepared.get(signature)
        except TypeError:  # an option that cannot be hashed, which the check will name
            prepared = None
        if prepared is None:
            arguments = Call(tensors=tensors, options=options, scalars=scalars, cu_seqlens=cu_seqlens,
                             chunk_indices=chunk_indices)  # fmt: skip
            return signature, self.resolve(spec, signature, arguments)
        prepared.tally.calls += 1
        if prepared.proven:
            known = Known(spec, signature, prepared, tensors)
            self.prepared.by_shape[spec, shape] = self.prepared.last[spec] = known
        return signature, prepared

    def run(
        self,
        spec: OpSpec,
        tensors: tuple[torch.Tensor | None, ...],
        options: tuple[Value, ...],
        scalars: Scalars,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
    ) -> Outputs:
        """Run a call that differs from the last one of its op, or has numbers that are no floats."""
        try:
            known = self.prepared.by_shape.get((spec, getattr(tensors[0], "shape", None)))
        except (TypeError, RuntimeError):  # a shape that cannot be hashed, or a nested tensor: the check will name it
            known = None
        if known is not None:
            try:
                results = known.run(tensors, options, scalars, cu_seqlens, chunk_indices)
            except Exception as error:
                place = known.signature, known.prepared
                return self.rescued(spec, place, tensors, options, scalars, cu_seqlens, chunk_indices, error)
            if results is not None:
                self.prepared.last[spec] = known
                return results
        if elsewhere is not None and not watched.in_memory(*tensors, cu_seqlens, chunk_indices):
            return elsewhere(spec, tensors, options, scalars, cu_seqlens, chunk_indices)
        signature, prepared = self.lookup(spec, tensors, options, scalars, cu_seqlens, chunk_indices)
        numbers = as_floats(spec, scalars)
        if prepared.proven:
            try:
                return prepared(tensors, numbers, cu_seqlens, chunk_indices)
            except Exception as error:
                place = signature, prepared
                return self.rescued(spec, place, tensors, options, scalars, cu_seqlens, chunk_indices, error)
        arguments = Call(tensors=tensors, options=options, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
        return self.prove(spec, signature, arguments, prepared, running(arguments, numbers))

    def prove(
        self, spec: OpSpec, signature: Signature, call: Call, prepared: Prepared, run: Callable[[Prepared], R]
    ) -> R:
        """Run a prepared launch for the first time, and the launches that stand in for it where it fails.

        Args:
            spec: The op.
            signature: Of the call.
            call: Its arguments.
            prepared: The launch, which has not run yet: kernels compile, and fail, at their first launch.
            run: Runs the call.

        Raises:
            Exception: That of the last candidate, where nothing is left to stand in, or the call itself is at fault.
        """
        failed: list[Candidate] = []
        while True:
            try:
                results = run(prepared)
                break
            except Exception as error:  # any fault of a candidate must leave the call as if it had not been chosen
                failed.append(prepared.candidate)
                prepared = self.recover(spec, signature, call, prepared, error, failed[:-1])
        prepared.proven = True
        return results

    def rescue(
        self,
        spec: OpSpec,
        signature: Signature,
        call: Call,
        failed: Prepared,
        error: Exception,
        run: Callable[[Prepared], R],
    ) -> R:
        """Run the default for a candidate that ran before and raises now, and keep the default where it runs.

        Where the default fails too, the fault lies with the call or the device. A candidate that ran out of memory is
        kept: it may have enough the next time.

        Args:
            spec: The op.
            signature: Of the call.
            call: Its arguments.
            failed: The launch that failed.
            error: Its error.
            run: Runs the call.

        Raises:
            Exception: `error` itself, where the default does not run either.
            TypeError: Tensors of a kind without memory, which a hit does not tell from others.
        """
        require_plain(spec, call.tensors)
        key, device = spec.key(call), present(call).device
        if isinstance(error, PackingError) or failed.candidate.variant == REFERENCE:
            raise error
        instead = self.standby(spec, key, device).candidate
        if failed.candidate == instead:
            raise error
        try:
            results = run(self.prepare(spec, key, device, instead, call))
        except Exception:
            raise error from None
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            self.recover(spec, signature, call, failed, error)
        return results

    def rescued(
        self,
        spec: OpSpec,
        known: tuple[Signature, Prepared],
        tensors: tuple[torch.Tensor | None, ...],
        options: tuple[Value, ...],
        scalars: Scalars,
        cu_seqlens: torch.Tensor | None,
        chunk_indices: torch.Tensor | None,
        error: Exception,
    ) -> Outputs:
        """As `rescue`, for a call that consists of one launch."""

        def run(prepared: Prepared) -> Outputs:
            return prepared(tensors, as_floats(spec, scalars), cu_seqlens, chunk_indices)

        call = Call(tensors=tensors, options=options, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
        return self.rescue(spec, known[0], call, known[1], error, run)

    def look_again(self) -> None:
        """Have every call look for its choice again."""
        super().look_again()
        self.prepared.clear()

    def close(self) -> None:
        """Write what is not written yet, and give back files and connections."""
        self.misses.flush()
        if self._store is not None:
            self._store.close()


def running(call: Call, numbers: Scalars) -> Callable[[Prepared], Outputs]:
    """A function that runs a call by a prepared launch; written inside `Router.run` it would slow down hits."""

    def run(prepared: Prepared) -> Outputs:
        return prepared(call.tensors, numbers, call.cu_seqlens, call.chunk_indices)

    return run


def present(call: Call) -> torch.Tensor:
    """The call's main tensor."""
    main = call.tensors[0]
    if not isinstance(main, torch.Tensor):
        raise TypeError(f"wanted a tensor as first argument, got {type(main).__name__}")
    return main


# -- the stack of `enable` entries -----------------------------------------------------------------------------

_DEFAULT = Router(Config(), tuning=False)
# Runs calls on tensors without memory, and calls that torch transforms or watches; set where operators are made of ops.
elsewhere: Callable[..., Outputs] | None = None
_current: Router = _DEFAULT
_last = _DEFAULT.prepared.last  # the current router's; one look-up less at every call
_entries: dict[int, Router] = {}
_leaving: dict[int, Callable[[], None]] = {}  # what ends with an entry
_tickets = itertools.count()
_stack_lock = ProcessLock()


def activate(router: Router) -> None:
    """Route calls through an entry."""
    global _current, _last
    _current, _last = router, router.prepared.last


def push(router: Router, leave: Callable[[], None] | None = None) -> int:
    """Make a router the newest entry; returns the ticket with which `remove` takes it out again, then calls `leave`."""
    with _stack_lock:
        ticket = next(_tickets)
        _entries[ticket] = router
        if leave is not None:
            _leaving[ticket] = leave
        activate(router)
    return ticket


def rest() -> None:
    """Close the stores of all entries but the newest: they open again where they are used again."""
    with _stack_lock:
        older = [router for router in _entries.values() if router is not _current]
    for router in older:
        router.close()


def holds(ticket: int | None) -> bool:
    """Whether an entry is still in the stack."""
    return ticket in _entries


def remove(ticket: int | None) -> None:
    """Remove an entry, wherever in the stack it is; without effect once it is gone."""
    with _stack_lock:
        leave = None
        if ticket is not None:
            _entries.pop(ticket, None)
            leave = _leaving.pop(ticket, None)
        activate(next(reversed(_entries.values()), _DEFAULT))
    if leave is not None:
        leave()


def clear() -> None:
    """Remove every entry."""
    with _stack_lock:
        leaving = list(_leaving.values())
        _entries.clear()
        _leaving.clear()
        activate(_DEFAULT)
    for leave in leaving:
        leave()


def active() -> bool:
    """Whether there is any entry."""
    return len(_entries) > 0  # as a compiler of torch 2.11 can trace it


def entries() -> list[Router]:
    """The routers of all entries, the oldest first, each once."""
    with _stack_lock:
        return list(dict.fromkeys(_entries.values()))


def live() -> list[Router]:
    """Every router that looks decisions up and is still there, the oldest first, each once."""
    return sorted((each for each in list(_routers) if each.tuning), key=lambda each: each.number)


def current() -> Router:
    """The newest entry, else the router of default candidates."""
    return _current


def _at_exit() -> None:
    """Write and close what is open, while everything that this needs is still there."""
    for router in list(_routers):
        router.close()


atexit.register(_at_exit)


def call_by(
    spec: OpSpec,
    run: Callable[[Prepared], R],
    tensors: tuple[torch.Tensor | None, ...],
    options: tuple[Value, ...],
    scalars: Scalars,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
) -> R:
    """As `call`, for an op that needs more of its prepared launch than the results: it is handed to `run`.

    Where a candidate fails, `run` is called again, with the prepared launch that stands in for it.
    """
    router = _current
    known = router.prepared.last.get(spec)
    if known is not None and known.fits(tensors, options, cu_seqlens, chunk_indices):
        known.prepared.tally.calls += 1
        signature, prepared = known.signature, known.prepared
    else:
        require_plain(spec, tensors)
        signature, prepared = router.lookup(spec, tensors, options, scalars, cu_seqlens, chunk_indices)
    if prepared.proven:
        try:
            return run(prepared)
        except Exception as error:
            arguments = Call(tensors=tensors, options=options, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
            return router.rescue(spec, signature, arguments, prepared, error, run)
    arguments = Call(tensors=tensors, options=options, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
    return router.prove(spec, signature, arguments, prepared, run)


def require_plain(spec: OpSpec, tensors: Sequence[torch.Tensor | None]) -> None:
    """Raises `TypeError` that names every operand of a kind that kernels cannot read."""
    faults = watched.faults(dict(zip([operand.name for operand in spec.operands], tensors)))
    if faults:
        raise TypeError(f"{spec.name}: " + "; ".join(faults))


def as_floats(spec: OpSpec, scalars: Scalars) -> Scalars:
    """Numbers as kernels take them.

    Raises:
        TypeError: A value is no number; for the number in a tensor the host would have to wait.
    """
    faults = number_faults(spec, scalars)
    if faults:
        raise TypeError(f"{spec.name}: " + "; ".join(faults))
    return tuple([None if number is None else float(number) for number in scalars])


def call(
    spec: OpSpec,
    tensors: tuple[torch.Tensor | None, ...],
    options: tuple[Value, ...],
    scalars: Scalars,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
) -> Outputs:
    """Run an op. A chosen candidate that fails to launch is put aside and the default runs in its place."""
    try:
        known = _last[spec]
    except KeyError:  # nothing runs inside this block: its errors would name the KeyError as their cause
        results = None
    else:
        try:
            results = known.run(tensors, options, scalars, cu_seqlens, chunk_indices)
        except Exception as error:
            place = known.signature, known.prepared
            return _current.rescued(spec, place, tensors, options, scalars, cu_seqlens, chunk_indices, error)
    if results is None:
        return _current.run(spec, tensors, options, scalars, cu_seqlens, chunk_indices)
    return results
