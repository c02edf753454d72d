"""The hot path: a call's signature -> a prepared launch.

A hit compares the call with the last one of its op, or looks its signature up in a dictionary, and launches: no lock,
no SQL, no environment read, no logging, no string. What a signature holds (see `guards`) settles every check, so a
call that hits needs none.

A miss makes the key, asks the decisions of this process, then the cache, then follows `on_miss`. Decisions used once
are frozen for the process. Entries stack: `enable` pushes a router, the newest wins, and without any the default
candidates run.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

import torch

from layout_tuner.cache.layers import LayeredStore, Resolution, open_layers
from layout_tuner.cache.places.server import parse_url
from layout_tuner.cache.records import MAX_REASON, DecisionRecord, MeasurementRecord

from ..config import Config
from ..device import driver, interpreter
from ..device.environment import PREDICTED, environment
from ..device.failures import classify, first_line
from ..errors import CacheError, ConfigError, LayoutTunerError, PackingError, TooLittleMemoryError, TuningError
from ..launch.guards import Scalars, Signature, signature
from ..launch.prepared import Prepared
from ..launch.tally import UNROUTED, Tally
from ..spec import forcing, watched
from ..spec.calls import number_faults
from ..spec.declaration import Candidate, OpSpec, Problem
from ..spec.forcing import Forced
from ..spec.keys import Key, bucketed
from ..spec.layouts import Layout
from ..spec.operands import Call, Outputs, Value
from ..tuning import isolation
from ..tuning.deadline import FamilyLock
from ..tuning.experiment import Experiment
from ..tuning.isolation import tune_isolated
from ..tuning.memory import MARGIN, MIB, tuning_bytes
from ..tuning.records import key_record, measurement_of, outcome_record
from ..tuning.timing import EventTimer, HostTimer, Timer, scratch_bytes
from ..tuning.tuner import Measurement, Outcome, Trial, tune
from . import counters
from .choices import Choice, saved_by, stand_in
from .counters import Tallies, count_tuning
from .known import Known, Memory
from .misses import MissLog

log = logging.getLogger(__name__)

Policy = Literal["tune", "default", "error"]

R = TypeVar("R")

MOST_SIGNATURES = 4096
BESIDE = "it is being tuned in a process of its own"

_routers: weakref.WeakSet[Router] = weakref.WeakSet()


class Router:
    """Decisions of one `enable`, or the default candidates where `tuning` is off.

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
        self.config = config
        self.tuning = tuning
        self.on_miss = on_miss
        self.timer = timer
        self.prepared = Memory()
        self.variants: dict[tuple[Key, str], str | None] = {}
        self.choices: dict[tuple[Key, str], Choice] = {}
        self._tuned: dict[tuple[Key, str], Choice] = {}  # beside the calls, and followed by none yet
        self._lock = FamilyLock()
        self._store: LayeredStore | None = None
        self.forced = dict(forced or {})
        self.tallies = Tallies()
        self.misses = MissLog()
        self._full: set[str] = set()
        self._said: set[Key] = set()
        self._passed_over: set[tuple[Key, str]] = set()
        _routers.add(self)
        weakref.finalize(self, self.tallies.retire).atexit = False

    # -- one call ----------------------------------------------------------------------------------------------

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
        """What stands in for a candidate that failed to launch, for this key and process: the default.

        Where the default asks for more on-chip memory than there is, another variant stands in for it.

        Args:
            spec: The op.
            signature: Of the call.
            call: Its arguments.
            failed: What failed.
            error: How.
            before: What failed before that.

        Raises:
            Exception: `error` itself, where nothing is left to stand in, or the call itself is at fault.
        """
        if isinstance(error, PackingError):
            raise error
        key, device = spec.key(call), present(call).device
        instead: Candidate | None = spec.default(key, driver.chip(device))
        tried = (*before, failed.candidate)
        if instead in tried:
            variants = {candidate.variant for candidate in tried}
            left = (candidate for candidate in spec.candidates(key) if candidate.variant not in variants)
            instead = next(left, None) if classify(error) == "overflow" else None
        if instead is None:
            raise error
        log.warning("%s: %s failed (%s): running %s", key, failed.candidate.id, first_line(error), instead.id)
        place = (bucketed(key, self.config.keys.bucket), environment(device).id)
        held = self.choices.get(place)
        if held is not None and held.record is not None:
            self.quarantine(held.record, error)
        choice = Choice(candidate=instead, source="default", reason="its candidate failed to launch")
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
        """What counts the calls of a choice; those without a decision are recorded as misses, later and elsewhere."""
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

    def quarantine(self, record: DecisionRecord, error: Exception) -> None:
        """Store that a decision's winner failed, so that it is not used again while that is believed."""
        failure = MeasurementRecord(
            candidate=record.candidate,
            revision=record.revision,
            state="failed",
            failure=classify(error),
            reason=first_line(error)[:MAX_REASON],
        )
        try:
            self.store.quarantine(record, failure)
        except Exception as trouble:  # a cache never fails an op
            log.warning("cache: %s", trouble)

    def prepare(self, spec: OpSpec, key: Key, device: torch.device, candidate: Candidate, call: Call) -> Prepared:
        """A candidate bound for a call; calls of packed batches that differ in their length only share one."""
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
        """What runs a call that differs from the last one of its op, prepared just now where it is new.

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
        found = signature(spec, tensors, options, cu_seqlens, chunk_indices)
        try:
            prepared = self.prepared.get(found)
        except TypeError:  # an option that cannot be hashed, which the check will name
            prepared = None
        if prepared is None:
            arguments = Call(tensors=tensors, options=options, scalars=scalars, cu_seqlens=cu_seqlens,
                             chunk_indices=chunk_indices)  # fmt: skip
            return found, self.resolve(spec, found, arguments)
        prepared.tally.calls += 1
        if prepared.proven:
            self.prepared.by_shape[spec, shape] = self.prepared.last[spec] = Known(spec, found, prepared, tensors)
        return found, prepared

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
        except (
            TypeError,
            RuntimeError,
        ):  # a shape that cannot be hashed, or a nested tensor, which the check will name
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
        found, prepared = self.lookup(spec, tensors, options, scalars, cu_seqlens, chunk_indices)
        numbers = as_floats(spec, scalars)
        if prepared.proven:
            try:
                return prepared(tensors, numbers, cu_seqlens, chunk_indices)
            except Exception as error:
                return self.rescued(
                    spec, (found, prepared), tensors, options, scalars, cu_seqlens, chunk_indices, error
                )
        failed: list[Candidate] = []
        while True:
            try:
                results = prepared(tensors, numbers, cu_seqlens, chunk_indices)
                break
            except Exception as error:  # any fault of a candidate must leave the call as if it had not been chosen
                arguments = Call(tensors=tensors, options=options, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
                failed.append(prepared.candidate)
                prepared = self.recover(spec, found, arguments, prepared, error, failed[:-1])
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
        """Run the default for a candidate that ran before and raises now, and keep it where that helped.

        What the default cannot run either is the fault of the call or of the device. What ends for want of memory
        once may have it the next time, so the candidate is kept.

        Args:
            spec: The op.
            signature: Of the call.
            call: Its arguments.
            failed: What failed.
            error: How.
            run: Runs the call.

        Raises:
            Exception: `error` itself, where the default does not run either.
        """
        key, device = spec.key(call), present(call).device
        default = spec.default(key, driver.chip(device))
        if isinstance(error, PackingError) or failed.candidate == default:
            raise error
        try:
            results = run(self.prepare(spec, key, device, default, call))
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
        """`rescue` for a call of one op."""

        def run(prepared: Prepared) -> Outputs:
            return prepared(tensors, as_floats(spec, scalars), cu_seqlens, chunk_indices)

        call = Call(tensors=tensors, options=options, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
        return self.rescue(spec, known[0], call, known[1], error, run)

    def problem(self, key: Key, device: torch.device) -> Problem:
        """A key on a device, with the variants stored for the ops it may be made of."""

        def variant_of(spec: OpSpec, stage: Key) -> str | None:
            return self.stored_variant(spec, stage, device)

        return Problem(key=key, chip=driver.chip(device), variant_of=variant_of)

    def stored_variant(self, spec: OpSpec, key: Key, device: torch.device) -> str | None:
        """The variant stored as best for a key, or for the same call with its gates as models make them.

        The answer holds until this process tunes something: an op made of others asks for each of them.
        """
        if not self.tuning:
            return None
        if spec.name in self.forced:
            return self.forced[spec.name].variant
        key = bucketed(key, self.config.keys.bucket)
        asked_for = (key, environment(device).id)
        try:
            return self.variants[asked_for]
        except KeyError:
            found = self.variants[asked_for] = self.asked_variant(spec, key, device)
            return found

    def asked_variant(self, spec: OpSpec, key: Key, device: torch.device) -> str | None:
        """What the cache says of `stored_variant`."""
        as_made = replace(key, form=key.form.arriving(Layout.STRIDE_HV))
        for asked in dict.fromkeys((key, as_made)):
            found = self.stored_decision(spec, asked, device)
            if found is not None:
                return found.candidate.partition("/")[0]
        return None

    # -- the choice for a key ----------------------------------------------------------------------------------

    def choose(self, spec: OpSpec, key: Key, device: torch.device, *, tracing: bool = False) -> Choice:
        """What runs for a key: frozen before, stored, or as the policy for misses says.

        Args:
            spec: The op.
            key: The exact key.
            device: Where it is to run.
            tracing: Whether a compiler is tracing the call, so that nothing may run now.
        """
        default = spec.default(key, driver.chip(device))
        if not self.tuning or (spec.nothing_to_choose(key) and spec.name not in self.forced):
            return Choice(candidate=default, source="default")
        key = bucketed(key, self.config.keys.bucket)
        if len(spec.candidates(key)) == 1:
            return Choice(candidate=default, source="default")
        where = environment(device)
        known = self.choices.get((key, where.id))
        if known is not None:
            return known if not known.pending else self.follow((key, where.id), known)
        with self._lock:
            known = self.choices.get((key, where.id))
            if known is not None:
                return known
            choice = self.stored(spec, key, device)
            if choice is None or choice.source != "pinned":
                choice = self.forced_choice(spec, key, default) or choice
            if choice is not None:
                log.info("%s: %s, %s", key, choice.candidate.id, choice.source)
            else:
                choice = self.missed(spec, key, device, default, tracing=tracing)
            if choice.frozen and not tracing and not watched.faking():
                self.choices[key, where.id] = choice
            return choice

    def forced_choice(self, spec: OpSpec, key: Key, default: Candidate) -> Choice | None:
        """What the environment forces for a key, if anything."""
        if spec.name not in self.forced:
            return None
        candidate = forcing.choice(self.forced, spec, key, default)
        if candidate is None:
            log.warning("%s: %s forces a candidate that this key does not have", key, forcing.NAME)
            return None
        return Choice(candidate=candidate, source="forced")

    def stored(self, spec: OpSpec, key: Key, device: torch.device) -> Choice | None:
        """The cache's choice for a key."""
        found = self.stored_decision(spec, key, device)
        if found is None:
            return None
        candidate = next(candidate for candidate in spec.candidates(key) if candidate.id == found.candidate)
        return Choice(candidate=candidate, source=found.source, record=found)

    def stored_decision(self, spec: OpSpec, key: Key, device: torch.device) -> DecisionRecord | None:
        """The cache's decision for a key, where its candidate still exists as it was measured."""
        found = self.resolution(spec, key, device)
        return None if found is None else found.record

    def resolution(self, spec: OpSpec, key: Key, device: torch.device) -> Resolution | None:
        """The same, with the layer that holds it."""
        alive = {candidate.id: candidate.revision for candidate in spec.candidates(key)}
        environments = [environment(device).id]
        if device.type == "npu":  # what the compiler's counts say serves until something is measured
            environments.append(PREDICTED + driver.chip(device).name)
        try:
            found = self.store.resolve(key_record(key), environments, known=alive)
        except Exception as error:  # a cache never fails an op
            log.warning("cache: %s", error)
            return None
        if found is None or alive[found.record.candidate] != found.record.revision:
            return None
        return found

    def missed(
        self, spec: OpSpec, key: Key, device: torch.device, default: Candidate, *, tracing: bool = False
    ) -> Choice:
        """Tune, run the default, or raise, as the policy says; a pin is used instead of all else: none is tuned."""
        policy = self.policy(device)
        pin = self.config.tuning.pin
        if pin and policy == "error":
            raise TuningError(f"{key}: not in the pin file {pin}, and on_miss is 'error'")
        if pin:
            return stand_in(default, "not in the pin")
        if policy == "error":
            raise TuningError(f"{key}: no decision in {self.store.name}, and on_miss is 'error'")
        if policy == "default":
            return stand_in(default, "on_miss is 'default'")
        place = (key, environment(device).id)
        if place in self._passed_over and in_backward():
            return stand_in(default, "the call that a checkpoint repeats took it", frozen=False)
        if tracing or watched.faking() or driver.capturing(device):
            self.say(key, "a graph is being captured or traced: running %s untuned", default.id)
            return self.pass_over(place, default, "a graph was being captured or traced")
        if self.too_many(spec):
            return stand_in(default, "[keys] max_keys")
        if self.isolated(device):
            return self.tune_beside(spec, key, device, default)
        try:
            outcome = self.tune(spec, key, device)
        except TooLittleMemoryError as error:
            self.say(key, "too little free memory to tune (%s): running %s", error, default.id)
            return self.pass_over(place, default, "too little free memory to tune")
        except LayoutTunerError as error:
            log.warning("%s: not tuned: %s", key, error)
            return stand_in(default, "it could not be tuned")
        except (RuntimeError, MemoryError) as error:  # a device's, of which torch_npu makes no class of their own
            if not driver.out_of_memory(error):
                log.warning("%s: not tuned: %s: %s", key, type(error).__name__, first_line(error))
                return stand_in(default, "it could not be tuned")
            driver.release(device)
            self.say(key, "too little free memory to tune (%s): running %s", first_line(error), default.id)
            return self.pass_over(place, default, "too little free memory to tune")
        held = self.choices.get((key, environment(device).id))
        if held is not None and held.candidate.id == outcome.winner:
            return replace(held, missed=True)
        winner = next(candidate for candidate in spec.candidates(key) if candidate.id == outcome.winner)
        return Choice(candidate=winner, source="measured", missed=True)

    def pass_over(self, place: tuple[Key, str], default: Candidate, reason: str) -> Choice:
        """The default for as long as something keeps a key from being tuned.

        A checkpointed region must find the same when it is run again: its first run makes the default the choice of
        this process. A reentrant checkpoint cannot be told from a plain call; the default it took stays for what the
        backward repeats, unless another call has had the key tuned by then.
        """
        if not in_backward():
            self._passed_over.add(place)
        return stand_in(default, reason, frozen=in_checkpoint())

    def say(self, key: Key, what: str, *about: object) -> None:
        """Warn of a key once; calls of it go on missing."""
        if key not in self._said:
            self._said.add(key)
            log.warning(f"%s: {what}", key, *about)

    def too_many(self, spec: OpSpec) -> bool:
        """Whether an op has as many keys as may be tuned; said once."""
        held = sum(1 for key, _ in self.choices if key.op == spec.name)
        if held < self.config.keys.max_keys:
            return False
        if spec.name not in self._full:
            self._full.add(spec.name)
            log.warning("%s: %d keys are held ([keys] max_keys): further ones run the default untuned", spec.name, held)
        return True

    def policy(self, device: torch.device) -> Policy:
        """What a miss leads to: tuning on an accelerator with one process, the default elsewhere; settings win."""
        if self.on_miss is not None:
            return self.on_miss
        if self.config.tuning.on_miss != "auto":
            return self.config.tuning.on_miss
        return "default" if device.type == "cpu" or driver.multi_process() else "tune"

    # -- tuning beside the calls -------------------------------------------------------------------------------

    def isolated(self, device: torch.device) -> bool:
        """Whether candidates are tried in a process of their own, which an NPU's faults would take with them."""
        wanted = self.config.tuning.isolate
        return self.timer is None and (wanted == "process" or (wanted == "auto" and device.type == "npu"))

    def tune_beside(self, spec: OpSpec, key: Key, device: torch.device, default: Candidate) -> Choice:
        """Have a key tuned while calls go on with the default; they follow the outcome once there is one."""
        place = (key, environment(device).id)
        if driver.forked(device):
            return stand_in(default, "a forked process cannot use the device")
        try:
            self.require_memory(spec, key, device)
        except TooLittleMemoryError as error:
            self.say(key, "too little free memory to tune (%s): running %s", error, default.id)
            return self.pass_over(place, default, "too little free memory to tune")
        log.info("%s: tuned in a process of its own: running %s meanwhile", key, default.id)
        choice = self.pass_over(place, default, BESIDE)
        isolation.beside(device, functools.partial(self.tuned_beside, spec, key, device))
        # A checkpointed region has to find the default again, whenever it is repeated: the next process follows.
        return choice if choice.frozen else replace(choice, frozen=True, pending=True)

    def tuned_beside(self, spec: OpSpec, key: Key, device: torch.device) -> None:
        """Tune a key, and let its calls look again."""
        place = (key, environment(device).id)
        choice = None
        try:
            _, choice = self.found(spec, key, device)
        except (LayoutTunerError, RuntimeError) as error:
            log.warning("%s: not tuned: %s", key, error)
        with self._lock:
            held = self.choices.get(place)
            if held is None or not held.pending:
                return
            if choice is None:
                choice = replace(held, pending=False, reason="it could not be tuned")
            self._tuned[place] = choice
            self.variants.clear()
            self.prepared.clear()

    def follow(self, place: tuple[Key, str], held: Choice) -> Choice:
        """The outcome of a tuning beside the calls, once there is one, but not for what a backward repeats."""
        if place not in self._tuned:
            return held
        if place in self._passed_over and in_backward():
            return replace(held, frozen=False, pending=False)
        with self._lock:
            choice = self._tuned.pop(place, None)
            if choice is not None:
                self.choices[place] = choice
            return self.choices[place]

    # -- tuning ------------------------------------------------------------------------------------------------

    def tune(self, spec: OpSpec, key: Key, device: torch.device, budget_s: float | None = None) -> Outcome:
        """Tune a key on synthetic arguments, publish the outcome at once, and freeze it for this process.

        In a process of its own where `[tuning] isolate` says so, for which this one waits.

        Args:
            spec: The op.
            key: The key, T as it is tuned.
            device: Where.
            budget_s: Seconds, where there are fewer than the settings' budget.

        Raises:
            TuningError: No candidate is right.
            TooLittleMemoryError: There is less free device memory than tuning the key takes.
            UnsupportedProblemError: Nothing runs the key on this device.
        """
        outcome, choice = self.found(spec, key, device, budget_s)
        self.choices[key, environment(device).id] = choice
        self.variants.clear()
        return outcome

    def found(
        self, spec: OpSpec, key: Key, device: torch.device, budget_s: float | None = None
    ) -> tuple[Outcome, Choice]:
        """Tune a key and publish the outcome; arguments and errors as of `tune`."""
        where = environment(device)
        self.require_memory(spec, key, device)
        alive = {candidate.id: candidate.revision for candidate in spec.candidates(key)}
        known = self.known_failures(key, where.id, alive)
        budget_s = min(budget_s or math.inf, self.config.tuning.budget_s)
        if self.isolated(device):
            outcome = tune_isolated(spec, key, device, self.config, known, budget_s)
        else:
            outcome = self.measured(spec, key, device, known, budget_s)
        winner = next(candidate for candidate in spec.candidates(key) if candidate.id == outcome.winner)
        decision, facts = outcome_record(key, where, outcome, winner)
        count_tuning(spec.name)
        try:
            self.store.publish(decision, facts)
        except Exception as error:  # a cache never fails an op
            log.warning("cache: %s: the decision is kept in memory only", error)
        log.info("%s: %s", key, describe(outcome))
        return outcome, Choice(candidate=winner, source="measured", record=decision)

    def measured(
        self,
        spec: OpSpec,
        key: Key,
        device: torch.device,
        known: Mapping[tuple[str, str], Measurement],
        budget_s: float,
        *,
        watched: Callable[[Trial], Trial] | None = None,
        compile_s: float | None = None,
    ) -> Outcome:
        """Try and time the candidates of a key in this process.

        Args:
            spec, key, device: As of `tune`.
            known: What is known of candidates, by id and revision.
            budget_s: Seconds.
            watched: Wraps each candidate.
            compile_s: As of `tuner.tune`.
        """
        experiment = Experiment(spec, key, device, problem=self.problem(key, device), oracle_limit=self.oracle_limit)
        measure = self.config.measure
        if device.type == "cpu" and self.timer is None:  # the interpreter's times mean nothing, so few do
            measure = measure.model_copy(update={"warmup_rounds": 1, "min_rounds": 5, "max_rounds": 5})
        tuning = self.config.tuning.model_copy(update={"budget_s": budget_s})
        trials = experiment.trials(known)
        if watched is not None:
            trials = [watched(trial) for trial in trials]
        # A function of ours that is timed against another library's calls through here: no call of anybody's.
        with torch.no_grad(), self._lock, driver.guard(device), self.tallies.paused():
            timer = self.timer or make_timer(device, self.config)
            return tune(trials, experiment.default.id, timer, measure, tuning, compile_s=compile_s)

    def require_memory(self, spec: OpSpec, key: Key, device: torch.device) -> None:
        """Raise `TooLittleMemoryError` where a device has too little free memory to tune a key."""
        scratch = 0 if device.type == "cpu" else scratch_bytes(device)
        require_memory(spec, key, device, oracle_limit=self.oracle_limit, scratch=scratch)

    @property
    def oracle_limit(self) -> int:
        """Bytes of device memory that the oracle may take."""
        return self.config.measure.oracle_mib << 20

    def known_failures(self, key: Key, where: str, known: Mapping[str, str]) -> dict[tuple[str, str], Measurement]:
        """What the cache knows to fail for a key, by candidate and revision, as far as that is still believed."""
        try:
            found = self.store.failures(key_record(key), where, known=known)
        except Exception as error:  # a cache never fails an op
            log.warning("cache: %s", error)
            return {}
        return {place: measurement_of(record) for place, record in found.items()}

    @property
    def store(self) -> LayeredStore:
        """Where decisions are kept; opened when first asked for."""
        with self._lock:
            if self._store is None:
                settings = self.config.cache
                self._store = open_layers(
                    settings.path or None,
                    shared=settings.shared,
                    url=settings.url or None,
                    pin=self.config.tuning.pin or None,
                )
            return self._store

    def close(self) -> None:
        """Write what is not written yet, and give back files and connections."""
        self.misses.flush()
        if self._store is not None:
            self._store.close()


def require_server(settings: Config) -> None:
    """Raises `ConfigError` where a server is named that cannot be one, rather than at the first op."""
    if settings.cache.url:
        try:
            parse_url(settings.cache.url)
        except CacheError as error:
            raise ConfigError(str(error)) from None


def make_timer(device: torch.device, config: Config) -> Timer:
    """Device events on an accelerator, the host's clock under the interpreter on a CPU."""
    if device.type == "cpu":
        return HostTimer()
    return EventTimer(device, config.measure.l2, patience_s=config.tuning.budget_s)


def require_memory(spec: OpSpec, key: Key, device: torch.device, *, oracle_limit: int, scratch: int) -> None:
    """Raise `TooLittleMemoryError` where a device has less free memory than tuning a key takes, and a fifth."""
    free = driver.free_bytes(device)
    if free is None:
        return
    needed = int(MARGIN * tuning_bytes(spec, key, oracle_limit=oracle_limit, scratch=scratch))
    if free < needed:
        raise TooLittleMemoryError(f"{key}: tuning it takes {needed / MIB:,.0f} MiB, {free / MIB:,.0f} MiB are free")


def in_backward() -> bool:
    """Whether autograd's engine runs this thread's code: what a checkpoint repeats, it repeats there."""
    return torch._C._current_graph_task_id() != -1


def in_checkpoint() -> bool:
    """Whether saved tensors go through hooks, as they do while a checkpointed region runs for the first time."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def describe(outcome: Outcome) -> str:
    """One line for people: the winner and by how much."""
    if outcome.gain is None:
        return f"{outcome.winner} stays: nothing is faster beyond the noise"
    low, high = 100 * outcome.gain.low, 100 * outcome.gain.high
    return f"{outcome.winner} saves {100 * outcome.gain.median:.1f} % [{low:.1f}, {high:.1f}] of {outcome.default}"


def present(call: Call) -> torch.Tensor:
    """The call's main tensor."""
    main = call.tensors[0]
    if not isinstance(main, torch.Tensor):
        raise TypeError(f"wanted a tensor as first argument, got {type(main).__name__}")
    return main


# -- the stack of `enable` entries -----------------------------------------------------------------------------

_DEFAULT = Router(Config(), tuning=False)
# Runs calls on tensors that are not in memory, or that torch transforms or watches; what makes operators sets it.
elsewhere: Callable[..., Outputs] | None = None
_current: Router = _DEFAULT
_last = _DEFAULT.prepared.last  # the current router's; one look-up less at every call
_entries: dict[int, Router] = {}
_tickets = itertools.count()
_stack_lock = threading.Lock()


def activate(router: Router) -> None:
    """Route calls through an entry."""
    global _current, _last
    _current, _last = router, router.prepared.last


def push(router: Router) -> int:
    """Make a router the newest entry; the answer removes it again."""
    with _stack_lock:
        ticket = next(_tickets)
        _entries[ticket] = router
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
        if ticket is not None:
            _entries.pop(ticket, None)
        activate(next(reversed(_entries.values()), _DEFAULT))


def clear() -> None:
    """Remove every entry."""
    with _stack_lock:
        _entries.clear()
        activate(_DEFAULT)


def active() -> bool:
    """Whether there is any entry."""
    return bool(_entries)


def current() -> Router:
    """The newest entry, else the router of default candidates."""
    return _current


def _after_fork() -> None:
    """Give a child locks of its own: a thread that is not there any more may have held one."""
    global _stack_lock
    _stack_lock = threading.Lock()
    counters.after_fork()
    for router in _routers:
        router._lock = FamilyLock()


def _at_exit() -> None:
    """Write and close what is open, while everything that takes is still there."""
    for router in list(_routers):
        router.close()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def find(
    spec: OpSpec,
    tensors: tuple[torch.Tensor | None, ...],
    options: tuple[Value, ...],
    scalars: Scalars,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
) -> tuple[Router, Signature, Prepared]:
    """What runs a call: the newest entry's prepared launch for the call's signature."""
    router = _current
    known = router.prepared.last.get(spec)
    if known is not None and known.fits(tensors, options, cu_seqlens, chunk_indices):
        known.prepared.tally.calls += 1
        return router, known.signature, known.prepared
    faults = watched.faults(dict(zip([operand.name for operand in spec.operands], tensors)))
    if faults:
        raise TypeError(f"{spec.name}: " + "; ".join(faults))
    return router, *router.lookup(spec, tensors, options, scalars, cu_seqlens, chunk_indices)


def as_floats(spec: OpSpec, scalars: Scalars) -> Scalars:
    """Numbers as kernels take them.

    Raises:
        TypeError: One that is no number; a tensor would have to be waited for.
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
    except KeyError:  # left before anything runs: an error of the call is no consequence of this one
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
