"""The decisions of one entry: looked up in its caches, or made by tuning."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from layout_tuner.cache.layers import LayeredStore, Resolution, open_layers
from layout_tuner.cache.places.server import parse_url
from layout_tuner.cache.records import MAX_REASON, DecisionRecord, MeasurementRecord

from ..config import Config
from ..device import driver
from ..device.environment import PREDICTED, environment
from ..device.failures import classify, first_line
from ..errors import CacheError, ConfigError, NoRightCandidateError, TooLittleMemoryError, TuningError
from ..spec.declaration import Candidate, OpSpec, Problem
from ..spec.forcing import Forced
from ..spec.keys import Key, bucketed
from ..spec.layouts import Layout
from ..tuning.binaries import binary_of
from ..tuning.deadline import FamilyLock
from ..tuning.experiment import Experiment
from ..tuning.isolation import tune_isolated
from ..tuning.memory import MARGIN, MIB, tuning_bytes
from ..tuning.records import check_record, key_record, measurement_of, outcome_record
from ..tuning.timing import EventTimer, HostTimer, Timer, scratch_bytes
from ..tuning.tuner import Measurement, Outcome, Trial, tune
from .counters import Tallies, count_tuning

log = logging.getLogger(__name__)


class Decisions:
    """Looks decisions up for keys, and tunes keys.

    Args:
        config: Settings.
        tuning: Whether decisions are looked up and made at all.
        timer: Takes the samples; None makes one for the device.
        forced: Candidates that run whatever was measured, by op.
    """

    def __init__(self, config: Config, *, tuning: bool, timer: Timer | None, forced: Mapping[str, Forced]) -> None:
        self.config = config
        self.tuning = tuning
        self.timer = timer
        self.forced = dict(forced)
        self.tallies = Tallies()
        self.publishes = True  # whether what is found is stored; among several ranks one of them stores it
        self.variants: dict[tuple[Key, str], str | None] = {}
        self._lock = FamilyLock()
        self._store: LayeredStore | None = None

    def problem(self, key: Key, device: torch.device) -> Problem:
        """A key on a device. The variants stored for other ops can be asked of it, for an op that is made of others."""

        def variant_of(spec: OpSpec, stage: Key) -> str | None:
            return self.stored_variant(spec, stage, device)

        return Problem(key=key, chip=driver.chip(device), variant_of=variant_of)

    def stored_variant(self, spec: OpSpec, key: Key, device: torch.device) -> str | None:
        """The variant forced or stored as best for a key, or for the same call with its gates as models make them.

        The answer holds until this process tunes something: an op made of others asks for each of them.
        """
        if not self.tuning:
            return None
        key = bucketed(key, self.config.keys.bucket)
        asked_for = (key, environment(device).id)
        try:
            return self.variants[asked_for]
        except KeyError:
            variant = self.variants[asked_for] = self.asked_variant(spec, key, device)
            return variant

    def asked_variant(self, spec: OpSpec, key: Key, device: torch.device) -> str | None:
        """What the cache says of `stored_variant`; a forced variant gives way to a pinned decision alone."""
        forced = self.forced.get(spec.name)
        as_made = replace(key, form=key.form.arriving(Layout.STRIDE_HV))
        for asked in dict.fromkeys((key, as_made)):
            decision = self.stored_decision(spec, asked, device)
            if decision is not None and (forced is None or decision.source == "pinned"):
                return decision.candidate.partition("/")[0]
        return None if forced is None else forced.variant

    def stored_decision(self, spec: OpSpec, key: Key, device: torch.device) -> DecisionRecord | None:
        """The cache's decision for a key, if its candidate still exists in the revision that was measured."""
        resolution = self.resolution(spec, key, device)
        return None if resolution is None else resolution.record

    def resolution(self, spec: OpSpec, key: Key, device: torch.device) -> Resolution | None:
        """As `stored_decision`, with the layer of the cache that holds the decision."""
        alive = {candidate.id: candidate.revision for candidate in candidates(spec, key, device)}
        environments = [environment(device).id]
        if device.type == "npu":  # what the compiler's counts say serves until something is measured
            environments.append(PREDICTED + driver.chip(device).name)
        try:
            resolution = self.store.resolve(key_record(key), environments, known=alive)
        except Exception as error:  # a cache never fails an op
            log.warning("cache: %s", error)
            return None
        if resolution is None or alive[resolution.record.candidate] != resolution.record.revision:
            return None
        return resolution

    def quarantine(self, record: DecisionRecord, error: Exception) -> None:
        """Store that a decision's winner failed, so that nobody uses it for as long as the failure is believed."""
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

    def make(
        self, spec: OpSpec, key: Key, device: torch.device, budget_s: float | None = None
    ) -> tuple[Outcome, DecisionRecord]:
        """Tune a key and publish the decision.

        Where `[tuning] isolate` says so, the key is tuned in a process of its own, for which this one waits.

        Args:
            spec: The op.
            key: The key, T as it is tuned.
            device: The device to tune on.
            budget_s: Seconds that it may take, if fewer than the settings' budget.

        Raises:
            TuningError: No candidate computes the right results.
            TooLittleMemoryError: The device has less free memory than tuning the key takes.
            UnsupportedProblemError: No candidate runs the key on this device.
        """
        where = environment(device)
        self.require_memory(spec, key, device)
        alive = {candidate.id: candidate.revision for candidate in candidates(spec, key, device)}
        known = self.known_failures(key, where.id, alive)
        budget_s = min(budget_s or math.inf, self.config.tuning.budget_s)
        try:
            if self.isolated(device):
                outcome = tune_isolated(spec, key, device, self.config, known, budget_s)
            else:
                outcome = self.measured(spec, key, device, known, budget_s)
        except NoRightCandidateError as error:
            default = spec.default(key, driver.chip(device))
            self.publish_check(spec, key, device, error.measurements, default)
            raise
        winner = candidate_of(spec, key, device, outcome.winner)
        decision, facts = outcome_record(key, where, outcome, winner)
        count_tuning(spec.name)
        if self.publishes:
            try:
                self.store.publish(decision, facts)
            except Exception as error:  # a cache never fails an op
                log.warning("cache: %s: the decision is kept in memory only", error)
        log.info("%s: %s", key, describe(outcome))
        return outcome, decision

    def check(self, spec: OpSpec, key: Key, device: torch.device, candidate: Candidate) -> bool:
        """Compare a candidate with the oracle, without timing it, and store the outcome; answers whether it is right.

        In a process of its own where `[tuning] isolate` says so, for which this one waits.

        Args:
            spec: The op.
            key: The key, T as it is tuned.
            device: Where.
            candidate: The candidate.

        Raises:
            TuningError: It could not be checked.
            UnsupportedProblemError: Nothing runs the key on this device.
        """
        self.require_memory(spec, key, device)
        budget_s = self.config.tuning.budget_s
        try:
            if self.isolated(device):
                outcome = tune_isolated(spec, key, device, self.config, {}, budget_s, candidate.id)
            else:
                outcome = self.measured(spec, key, device, {}, budget_s, only=candidate.id)
            found: tuple[Measurement, ...] = outcome.measurements
        except NoRightCandidateError as error:
            found = error.measurements
        self.publish_check(spec, key, device, found, candidate)
        (own,) = [each for each in found if each.id == candidate.id]
        if own.state not in ("ok", "wrong"):
            raise TuningError(f"{candidate.id}: {own.state}: {own.reason}")
        return own.state == "ok"

    def publish_check(
        self, spec: OpSpec, key: Key, device: torch.device, found: Sequence[Measurement], candidate: Candidate
    ) -> None:
        """Store what was found of candidates of which nothing was timed."""
        if not self.publishes:
            return
        where = environment(device)
        try:
            self.store.publish(*check_record(key, where, found, candidate, spec.default(key, driver.chip(device))))
        except Exception as error:  # a cache never fails an op
            log.warning("cache: %s: what was checked is kept in memory only", error)

    def known_wrong(self, spec: OpSpec, key: Key, device: torch.device, candidate: Candidate) -> str:
        """Why a candidate is known to compute wrongly; empty where it is not."""
        alive = {each.id: each.revision for each in candidates(spec, key, device)}
        found = self.known_failures(key, environment(device).id, alive).get((candidate.id, candidate.revision))
        return found.reason or "wrong results" if found is not None and found.state == "wrong" else ""

    def known_right(self, spec: OpSpec, key: Key, device: torch.device, candidate: Candidate) -> bool:
        """Whether a candidate was found right in this environment, compiled to what this process compiles it to."""
        try:
            found = self.store.rights(key_record(key), environment(device).id)
        except Exception as error:  # a cache never fails an op
            log.warning("cache: %s", error)
            return True
        binaries = {
            binary for name, revision, binary in found if (name, revision) == (candidate.id, candidate.revision)
        }
        if not binaries or "" in binaries:
            return bool(binaries)
        here = binary_of(spec, self.problem(key, device), candidate, device)
        return here in binaries or not here

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
        only: str = "",
    ) -> Outcome:
        """Try and time the candidates of a key in this process.

        Args:
            spec, key, device: As of `make`.
            known: Failures of candidates that are still believed, by id and revision.
            budget_s: Seconds that it may take.
            watched: Wraps the trial of each candidate.
            compile_s: As of `tuner.tune`.
            only: Id of the one candidate to check, without timing anything; empty for all.
        """
        experiment = Experiment(spec, key, device, problem=self.problem(key, device), oracle_limit=self.oracle_limit)
        measure = self.config.measure
        if device.type == "cpu" and self.timer is None:  # the interpreter's times mean nothing, so few do
            measure = measure.model_copy(update={"warmup_rounds": 1, "min_rounds": 5, "max_rounds": 5})
        tuning = self.config.tuning.model_copy(update={"budget_s": budget_s})
        trials = [trial for trial in experiment.trials(known) if only in ("", trial.id)]
        if watched is not None:
            trials = [watched(trial) for trial in trials]
        # A function of ours that is timed against another library's calls through here: no call of anybody's.
        with torch.no_grad(), self._lock, driver.guard(device), self.tallies.paused():
            timer = self.timer or make_timer(device, self.config)
            default = only or experiment.default.id
            return tune(trials, default, timer, measure, tuning, compile_s=compile_s, timing=not only)

    def isolated(self, device: torch.device) -> bool:
        """Whether candidates are tried in a process of their own, which an NPU's faults would take with them."""
        wanted = self.config.tuning.isolate
        return self.timer is None and (wanted == "process" or (wanted == "auto" and device.type == "npu"))

    def require_memory(self, spec: OpSpec, key: Key, device: torch.device) -> None:
        """Raise `TooLittleMemoryError` where a device has too little free memory to tune a key."""
        scratch = 0 if device.type == "cpu" else scratch_bytes(device)
        require_memory(spec, key, device, oracle_limit=self.oracle_limit, scratch=scratch)

    @property
    def oracle_limit(self) -> int:
        """Bytes of device memory that the oracle may take."""
        return self.config.measure.oracle_mib << 20

    def known_failures(self, key: Key, where: str, known: Mapping[str, str]) -> dict[tuple[str, str], Measurement]:
        """Failures stored for a key that are still believed, by candidate and revision."""
        try:
            failures = self.store.failures(key_record(key), where, known=known)
        except Exception as error:  # a cache never fails an op
            log.warning("cache: %s", error)
            return {}
        return {place: measurement_of(record) for place, record in failures.items()}

    @property
    def store(self) -> LayeredStore:
        """The caches that decisions are kept in; they open when they are first asked for."""
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


def candidates(spec: OpSpec, key: Key, device: torch.device) -> tuple[Candidate, ...]:
    """Every candidate of a key on a device."""
    return spec.candidates(key, buffers=driver.chip(device).buffers)


def candidate_of(spec: OpSpec, key: Key, device: torch.device, name: str) -> Candidate:
    """The candidate of that id, which is known to exist."""
    return next(candidate for candidate in candidates(spec, key, device) if candidate.id == name)


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


def describe(outcome: Outcome) -> str:
    """One line for people: the winner and by how much."""
    if outcome.gain is None:
        return f"{outcome.winner} stays: nothing is faster beyond the noise"
    low, high = 100 * outcome.gain.low, 100 * outcome.gain.high
    return f"{outcome.winner} saves {100 * outcome.gain.median:.1f} % [{low:.1f}, {high:.1f}] of {outcome.default}"
