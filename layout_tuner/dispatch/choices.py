"""The choice of a candidate for a key.

The default runs where there is nothing to choose. Else the first of these decides:

1. `pinned`: a decision of a pin.
2. `forced`: the candidate that the environment forces.
3. `measured`: a decision that was measured here.
4. `imported`: a decision that somebody else measured.
5. `predicted`: a decision that was predicted from the compiler's counts.
6. `default` or `measured`: the policy for misses runs the default, tunes the key, or raises.

Where the default comes out and is known to compute wrongly, torch's oracle takes its place: `reference`.

`Choices.decided` is 1 to 5, `Choices.missed` is 6. A choice that was used once is frozen for the process.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from layout_tuner.cache.layers import Resolution
from layout_tuner.cache.records import DecisionRecord

from ..config import Config
from ..device import driver
from ..device.environment import environment
from ..device.failures import first_line
from ..errors import LayoutTunerError, TooLittleMemoryError, TuningError, UnsupportedProblemError
from ..spec import forcing, watched
from ..spec.declaration import REFERENCE, Candidate, OpSpec
from ..spec.forcing import Forced
from ..spec.keys import Key, bucketed
from ..tuning import isolation
from ..tuning.binaries import may_vary
from ..tuning.timing import Interval, Timer
from ..tuning.tuner import Outcome
from .counters import saved_us
from .decisions import Decisions, candidate_of, candidates

log = logging.getLogger(__name__)

Policy = Literal["tune", "default", "error", "sync"]

BESIDE = "it is being tuned in a process of its own"
UNCHECKED = "its candidate is being checked as it is compiled here"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A candidate for a key, and how it came about.

    Attributes:
        candidate: The candidate to run.
        source: `pinned`, `forced`, `measured`, `imported`, `predicted`, `default`, or `reference`: torch computes it.
        frozen: Whether the process keeps it; a default taken because tuning was not possible just now is not kept.
        record: The decision it follows, if any.
        layer: Which file or server holds the decision; empty for one that was made just now.
        reason: Why the default stands in for a decision; empty where there is one, or nothing to choose.
        missed: Whether there was no decision, in memory or stored, when it was made.
        pending: Whether it serves only until the key has been tuned beside the calls.
    """

    candidate: Candidate
    source: str
    frozen: bool = True
    record: DecisionRecord | None = None
    layer: str = ""
    reason: str = ""
    missed: bool = False
    pending: bool = False


def stand_in(default: Candidate, reason: str, *, frozen: bool = True) -> Choice:
    """The choice of the default where there is no decision."""
    return Choice(candidate=default, source="default", frozen=frozen, reason=reason, missed=True)


def following(spec: OpSpec, key: Key, device: torch.device, resolution: Resolution) -> Choice:
    """The choice that follows a stored decision."""
    record = resolution.record
    candidate = candidate_of(spec, key, device, record.candidate)
    return Choice(candidate=candidate, source=record.source, record=record, layer=resolution.layer.name)


def saved_by(record: DecisionRecord | None) -> Interval | None:
    """Time that a call saves which follows a decision, against the default that was measured with it."""
    if record is None:
        return None
    default = next((each for each in record.measurements if each.candidate == record.default_candidate), None)
    known = None if default is None else default.end_to_end_us
    return saved_us(known, record.gain, record.gain_low, record.gain_high)


class Choices(Decisions):
    """The choices of one entry.

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
        super().__init__(config, tuning=tuning, timer=timer, forced=forced or {})
        self.on_miss = on_miss
        self.choices: dict[tuple[Key, str], Choice] = {}
        self._tuned: dict[tuple[Key, str], Choice] = {}  # beside the calls, and followed by none yet
        self._full: set[str] = set()
        self._said: set[Key] = set()
        self._passed_over: set[tuple[Key, str]] = set()
        self.vetting = True  # whether candidates that nobody checked are checked

    def choose(self, spec: OpSpec, key: Key, device: torch.device, *, tracing: bool = False) -> Choice:
        """The choice for a key: one that was frozen before, one by the list above, or one by the policy for misses.

        Args:
            spec: The op.
            key: The exact key.
            device: Where it is to run.
            tracing: Whether a compiler is tracing the call, so that nothing may run now.
        """
        default = spec.default(key, driver.chip(device))
        trivial = self.tuning and self.trivial(spec, key, device)
        if not self.tuning or (trivial and not may_vary(device)):
            return Choice(candidate=default, source="default")
        key = bucketed(key, self.config.keys.bucket)
        place = (key, environment(device).id)
        choice = self.choices.get(place)
        if choice is not None:
            return self.allowed(spec, choice if not choice.pending else self.follow(place, choice))
        with self._lock:
            choice = self.choices.get(place)
            if choice is not None:
                return self.allowed(spec, choice)
            choice = Choice(candidate=default, source="default") if trivial else None
            choice = choice or self.decided(spec, key, device, default)
            if choice is None:
                choice = self.missed(spec, key, device, default, tracing=tracing)
            elif not trivial:
                log.info("%s: %s, %s", key, choice.candidate.id, choice.source)
            choice = self.vetted(spec, key, device, default, choice, tracing=tracing)
            if choice.frozen and not tracing and not watched.faking():
                self.choices[place] = choice
            return self.allowed(spec, choice)

    # -- what computes wrongly, and what nobody checked --------------------------------------------------------

    def vetted(
        self, spec: OpSpec, key: Key, device: torch.device, default: Candidate, choice: Choice, *, tracing: bool = False
    ) -> Choice:
        """A choice as far as it may be trusted.

        A default that is known to be wrong gives way to the oracle. Where what was right may be wrong in the next
        process (see `binaries.may_vary`), a candidate that nobody found right in this environment, or that is compiled
        to another binary here, is checked beside the calls; they take the default meanwhile, or the oracle for a key
        for which compilers are known to be wrong.

        Args:
            spec: The op.
            key: The key, T as it is tuned.
            device: Where it is to run.
            default: The key's default.
            choice: The choice.
            tracing: Whether a compiler is tracing the call, so that nothing may run now.
        """
        if choice.source in ("forced", "reference"):
            return choice
        wrong = self.known_wrong(spec, key, device, choice.candidate) if choice.candidate == default else ""
        if wrong:
            return self.instead_of_wrong(key, choice, wrong)
        if not self.vetting or not may_vary(device) or self.known_right(spec, key, device, choice.candidate):
            return choice
        if choice.pending:  # it is being tuned, which checks it
            return self.proven(key, default, choice)
        place = (key, environment(device).id)
        if tracing or watched.faking() or driver.capturing(device) or driver.forked(device):
            return choice
        if place in self._passed_over and in_backward():
            return replace(choice, candidate=default, frozen=False)
        meanwhile = choice
        if choice.candidate != default:
            meanwhile = self.vetted(
                spec, key, device, default, replace(stand_in(default, UNCHECKED), missed=False), tracing=True
            )
        if not self.isolated(device):
            return self.checked(spec, key, device, default, choice)
        if not in_backward():
            self._passed_over.add(place)
        log.info("%s: %s is checked in a process of its own", key, choice.candidate.id)
        isolation.beside(device, functools.partial(self.checked_beside, spec, key, device, default, choice))
        # As where a key is tuned beside the calls: what a checkpoint repeats has to find the same again.
        meanwhile = self.proven(key, default, meanwhile)
        return meanwhile if in_checkpoint() else replace(meanwhile, frozen=True, pending=True)

    def proven(self, key: Key, default: Candidate, choice: Choice) -> Choice:
        """A choice that was not checked yet; the oracle where compilers are known to be wrong for keys such as this."""
        rows = [f"{name}={size}" for name, size in (("K", key.K), ("V", key.V)) if not whole_blocks(key, size)]
        if not rows or choice.candidate != default:
            return choice
        reason = f"{default.id} was not checked yet, and rows of {' and '.join(rows)} are no multiple of 32 bytes"
        return replace(choice, candidate=replace(default, variant=REFERENCE), source="reference", reason=reason)

    def checked(self, spec: OpSpec, key: Key, device: torch.device, default: Candidate, choice: Choice) -> Choice:
        """A choice whose candidate is checked now, and what stands in for it where it is wrong."""
        try:
            right = self.check(spec, key, device, choice.candidate)
        except (LayoutTunerError, RuntimeError, MemoryError) as error:
            log.warning("%s: %s could not be checked: %s", key, choice.candidate.id, first_line(error))
            return choice
        if right:
            return choice
        if choice.candidate == default:
            return self.instead_of_wrong(key, choice, self.known_wrong(spec, key, device, default) or "wrong results")
        log.warning("%s: %s is wrong as it is compiled here: running %s", key, choice.candidate.id, default.id)
        instead = stand_in(default, "its candidate is wrong as it is compiled here")
        if self.known_right(spec, key, device, default):
            return instead
        return self.checked(spec, key, device, default, instead)

    def checked_beside(self, spec: OpSpec, key: Key, device: torch.device, default: Candidate, choice: Choice) -> None:
        """Check a choice's candidate, and let its calls look again."""
        place = (key, environment(device).id)
        choice = self.checked(spec, key, device, default, choice)
        with self._lock:
            held = self.choices.get(place)
            if held is not None and held.pending:
                self._tuned[place] = choice
                self.look_again()

    def instead_of_wrong(self, key: Key, choice: Choice, reason: str) -> Choice:
        """The oracle in place of a default that computes wrongly."""
        wrong = choice.candidate
        self.say(key, "%s computes wrongly on this device (%s), and nothing else stands in for it", wrong.id, reason)
        served = replace(wrong, variant=REFERENCE)
        return replace(choice, candidate=served, source="reference", reason=f"{wrong.id} computes wrongly: {reason}")

    def allowed(self, spec: OpSpec, choice: Choice) -> Choice:
        """The choice, unless it is the oracle and the settings want an error in its place.

        Raises:
            UnsupportedProblemError: It is.
        """
        if choice.source == "reference" and self.config.routing.on_wrong == "error":
            raise UnsupportedProblemError(spec.name, [f"{choice.reason}; [routing] on_wrong is 'error'"])
        return choice

    def standby(self, spec: OpSpec, key: Key, device: torch.device) -> Choice:
        """What stands in for a candidate that fails: the default, or the oracle where that is known to be wrong.

        Raises:
            UnsupportedProblemError: As of `allowed`.
        """
        default = spec.default(key, driver.chip(device))
        choice = Choice(candidate=default, source="default", reason="its candidate failed to launch")
        if not self.tuning:
            return choice
        key = bucketed(key, self.config.keys.bucket)
        wrong = self.known_wrong(spec, key, device, default)
        return self.allowed(spec, self.instead_of_wrong(key, choice, wrong) if wrong else choice)

    def trivial(self, spec: OpSpec, key: Key, device: torch.device) -> bool:
        """Whether there is nothing to choose for a key: one head or token, where nothing is forced, or one candidate.

        Args:
            spec: The op.
            key: The exact key.
            device: Where it is to run.
        """
        if spec.nothing_to_choose(key) and spec.name not in self.forced:
            return True
        return len(candidates(spec, bucketed(key, self.config.keys.bucket), device)) == 1

    def decided(self, spec: OpSpec, key: Key, device: torch.device, default: Candidate) -> Choice | None:
        """The choice for a key by 1 to 5 of the list above, for which nothing runs; None is a miss.

        Args:
            spec: The op.
            key: The key, T as it is tuned.
            device: Where it is to run.
            default: The key's default, of which a forced candidate takes what is left open.
        """
        resolution = self.resolution(spec, key, device)
        if resolution is not None and resolution.record.source == "pinned":  # 1
            return following(spec, key, device, resolution)
        forced = self.forced_choice(spec, key, device, default)
        if forced is not None:  # 2
            return forced
        if resolution is not None:  # 3, 4 and 5: the cache's layers answer with the first of them that is stored
            return following(spec, key, device, resolution)
        return None

    def standing(self, spec: OpSpec, key: Key, device: torch.device) -> Choice | None:
        """The choice that was made for a key, else the one that `decided` makes; None where there is neither.

        Args:
            spec: The op.
            key: The exact key.
            device: Where it is to run.
        """
        default = spec.default(key, driver.chip(device))
        key = bucketed(key, self.config.keys.bucket)
        return self.choices.get((key, environment(device).id)) or self.decided(spec, key, device, default)

    def forced_choice(self, spec: OpSpec, key: Key, device: torch.device, default: Candidate) -> Choice | None:
        """The choice that the environment forces for a key, if it forces one."""
        if spec.name not in self.forced:
            return None
        candidate = forcing.choice(self.forced, spec, key, default, buffers=driver.chip(device).buffers)
        if candidate is None:
            log.warning("%s: %s forces a candidate that this key does not have", key, forcing.NAME)
            return None
        return Choice(candidate=candidate, source="forced")

    def missed(
        self, spec: OpSpec, key: Key, device: torch.device, default: Candidate, *, tracing: bool = False
    ) -> Choice:
        """The choice for a key without a decision: the policy says whether to tune, run the default, or raise.

        With a pin nothing is tuned.
        """
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
        if policy == "sync":
            return stand_in(default, "the ranks tune it together at a later entry")
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
        winner = candidate_of(spec, key, device, outcome.winner)
        return Choice(candidate=winner, source="measured", missed=True)

    def pass_over(self, place: tuple[Key, str], default: Candidate, reason: str) -> Choice:
        """The choice of the default for as long as something keeps a key from being tuned.

        A checkpointed region must find the same choice when it runs again, so its first run makes the default the
        choice of this process. A reentrant checkpoint looks like a plain call. The calls that the backward repeats for
        it take the default again, unless another call has had the key tuned by then.
        """
        if not in_backward():
            self._passed_over.add(place)
        return stand_in(default, reason, frozen=in_checkpoint())

    def say(self, key: Key, what: str, *about: object) -> None:
        """Warn about a key, only once: its calls go on without a decision."""
        if key not in self._said:
            self._said.add(key)
            log.warning(f"%s: {what}", key, *about)

    def too_many(self, spec: OpSpec) -> bool:
        """Whether an op has as many keys as may be tuned, which is logged once."""
        held = sum(1 for key, _ in self.choices if key.op == spec.name)
        if held < self.config.keys.max_keys:
            return False
        if spec.name not in self._full:
            self._full.add(spec.name)
            log.warning("%s: %d keys are held ([keys] max_keys): further ones run the default untuned", spec.name, held)
        return True

    def policy(self, device: torch.device) -> Policy:
        """The policy for misses: the settings', else `tune` on an accelerator with one process, `default` elsewhere.

        Without other ranks there is nobody to tune with, and `sync` is as if nothing was said.
        """
        wanted = self.on_miss or self.config.tuning.on_miss
        if wanted != "auto" and (wanted != "sync" or driver.multi_process()):
            return wanted
        return "default" if device.type == "cpu" or driver.multi_process() else "tune"

    def tune_beside(self, spec: OpSpec, key: Key, device: torch.device, default: Candidate) -> Choice:
        """Have a key tuned while its calls run the default; once it is tuned they follow the outcome."""
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
        """Tune a key, and have its calls look for their choice again."""
        place = (key, environment(device).id)
        choice = None
        try:
            _, choice = self.tuned_choice(spec, key, device)
        except (LayoutTunerError, RuntimeError) as error:
            log.warning("%s: not tuned: %s", key, error)
        with self._lock:
            held = self.choices.get(place)
            if held is None or not held.pending:
                return
            if choice is None:
                default = spec.default(key, driver.chip(device))
                untuned = replace(held, pending=False, reason="it could not be tuned")
                choice = self.vetted(spec, key, device, default, untuned, tracing=True)
            self._tuned[place] = choice
            self.look_again()

    def look_again(self) -> None:
        """Have every call look for its choice again."""
        self.variants.clear()

    def follow(self, place: tuple[Key, str], held: Choice) -> Choice:
        """The choice once a tuning beside the calls is done; a call that a backward repeats keeps the default."""
        if place not in self._tuned:
            return held
        if place in self._passed_over and in_backward():
            return replace(held, frozen=False, pending=False)
        with self._lock:
            choice = self._tuned.pop(place, None)
            if choice is not None:
                self.choices[place] = choice
            return self.choices[place]

    def tune(self, spec: OpSpec, key: Key, device: torch.device, budget_s: float | None = None) -> Outcome:
        """Tune a key on synthetic arguments, publish the outcome at once, and freeze it for this process.

        Arguments and errors are those of `make`.
        """
        outcome, choice = self.tuned_choice(spec, key, device, budget_s)
        self.choices[key, environment(device).id] = choice
        self.variants.clear()
        return outcome

    def tuned_choice(
        self, spec: OpSpec, key: Key, device: torch.device, budget_s: float | None = None
    ) -> tuple[Outcome, Choice]:
        """Tune a key and publish the outcome. No call follows it yet. Arguments and errors are those of `make`."""
        outcome, decision = self.make(spec, key, device, budget_s)
        winner = candidate_of(spec, key, device, outcome.winner)
        return outcome, Choice(candidate=winner, source="measured", record=decision)

    # -- what several ranks decided together -------------------------------------------------------------------

    def adopt(self, spec: OpSpec, key: Key, device: torch.device, record: DecisionRecord) -> None:
        """Follow a decision that ranks share, from the next call on. What is forced stays.

        Args:
            spec: The op.
            key: The key, T as it is tuned.
            device: Where.
            record: The decision; nothing changes where its candidate does not exist here in that revision.
        """
        alive = {(each.id, each.revision) for each in candidates(spec, key, device)}
        if (record.candidate, record.revision) not in alive:
            log.warning("%s: %s is not here as another rank has it", key, record.candidate)
            return
        candidate = candidate_of(spec, key, device, record.candidate)
        self._settle(spec, key, device, Choice(candidate=candidate, source=record.source, record=record))

    def abide(self, spec: OpSpec, key: Key, device: torch.device, reason: str) -> None:
        """Run the default for a key that ranks came to no decision for.

        Args:
            spec: The op.
            key: The key, T as it is tuned.
            device: Where.
            reason: Why there is none.
        """
        self._settle(spec, key, device, stand_in(spec.default(key, driver.chip(device)), reason))

    def _settle(self, spec: OpSpec, key: Key, device: torch.device, choice: Choice) -> None:
        if not self.tuning:
            return
        place = (key, environment(device).id)
        default = spec.default(key, driver.chip(device))
        with self._lock:
            held = self.choices.get(place)
            if held is not None and held.source == "forced":
                return
            forced = self.forced_choice(spec, key, device, default)
            self.choices[place] = forced or self.vetted(spec, key, device, default, choice)
            self._tuned.pop(place, None)
            self.look_again()


def whole_blocks(key: Key, size: int) -> bool:
    """Whether a row of so many elements is a multiple of the 32 bytes that an NPU moves at a time.

    Where it is not, triton-ascend was seen to read the beginning of the next row (its issue 2261).
    """
    return size * (4 if key.dtype == "float32" else 2) % 32 == 0


def in_backward() -> bool:
    """Whether autograd's engine runs this thread's code, as it does where it repeats a checkpointed region."""
    return torch._C._current_graph_task_id() != -1


def in_checkpoint() -> bool:
    """Whether saved tensors go through hooks, as they do while a checkpointed region runs for the first time."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
