"""Decides whether a call of flash-linear-attention runs here or in the library, and counts both.

Each call is judged first. The library runs it where no kernel here serves it, which is counted and whose reason is
logged once, and where the library was measured to be faster. A verdict is remembered for an entry of `enable` and for
all calls whose arguments look the same to `trait`.
"""

from __future__ import annotations

import collections
import inspect
import logging
import numbers
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from .. import ops
from ..device import driver, interpreter
from ..dispatch import router
from ..dispatch.counters import Library, count_library
from ..dispatch.router import Router
from ..forking import ProcessLock
from ..ops.local_cumsum import output_dtype_name
from ..spec import registry
from ..spec.keys import Key, bucketed
from ..spec.operands import Call, Value
from .rivalry import OURS, Rivalry

log = logging.getLogger(__name__)

MOST_VERDICTS = 4096

# Describe a packed batch: what is in them changes no verdict, nor does how many rows they have.
PACKING = frozenset({"cu_seqlens", "cu_seqlens_cpu", "chunk_indices", "chunk_offsets"})
PLAIN = frozenset({type(None), bool, int, str, torch.dtype})
TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


# -- counts ----------------------------------------------------------------------------------------------------

_lock = ProcessLock()
_served: collections.Counter[str] = collections.Counter()
_yielded: collections.Counter[str] = collections.Counter()
_fallthroughs: collections.Counter[tuple[str, str]] = collections.Counter()


def served() -> dict[str, int]:
    """How many calls of the library ran here, by op."""
    with _lock:
        return dict(_served)


def yielded() -> dict[str, int]:
    """How many calls the library ran because it was measured to be faster, by op."""
    with _lock:
        return dict(_yielded)


def fallthroughs() -> dict[tuple[str, str], int]:
    """How many calls the library ran because no kernel here serves them, by op and reason."""
    with _lock:
        return dict(_fallthroughs)


count_library(Library(served, yielded, fallthroughs))


# -- when the backend serves -----------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """Who runs a call: this project if `taken`; else the library, because it is `faster` or because of `reason`."""

    taken: bool
    reason: str | None = None
    faster: bool = False


Verdicts = weakref.WeakKeyDictionary[Router, dict[object, Verdict]]

_verdicts: Verdicts = weakref.WeakKeyDictionary()


class _Thread(threading.local):
    aside = False


_thread = _Thread()


def serve(made: Router) -> None:
    """Serve the library's calls while the router `made` is the newest entry."""
    _verdicts[made] = {}


def available() -> bool:
    """Whether the newest entry serves the library's calls and this thread is not inside `aside`."""
    return router.current() in _verdicts and not _thread.aside


@contextmanager
def aside() -> Iterator[None]:
    """Within this context the library runs this thread's calls itself, as if this backend did not exist."""
    before = _thread.aside
    _thread.aside = True
    try:
        yield
    finally:
        _thread.aside = before


# -- one op ----------------------------------------------------------------------------------------------------


class Takeover:
    """An op of the library, and the decision for each of its calls who runs it.

    Args:
        op: The op's name, which is the same in the library and here.
        make_rivalry: Makes the comparison with the library's function; returns None while the library is not imported.
        library: What runs a call that is not taken, for people.
        verdicts: Remembers the verdicts of calls that every entry serves; None: only those that `serve` names do.
    """

    def __init__(
        self,
        op: str,
        make_rivalry: Callable[[Takeover], Rivalry | None],
        library: str = "flash-linear-attention",
        verdicts: Verdicts | None = None,
    ) -> None:
        self.op = op
        self.library = library
        self.verdicts = verdicts
        self.make_rivalry = make_rivalry
        self.spec = registry.lookup(op)
        self.ours: Callable[..., Any] = getattr(ops, op)
        self.names = tuple(inspect.signature(self.ours).parameters)
        flags = [option.name for option in self.spec.options if isinstance(option.default, bool)]
        self.flags = [name for name in flags if name in self.names]
        self._rivalry: Rivalry | None = None

    def verify(self, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        """Answer the library's registry: whether this call is served here, and if not, why."""
        made = router.current()
        known = _verdicts.get(made) if self.verdicts is None else self.verdicts.setdefault(made, {})
        if known is None:
            return False, "no entry takes calls of this library"
        traits = (self.op, len(args), torch.is_grad_enabled(), *map(trait, self.names, args))
        if kwargs:
            traits += (*kwargs, *map(trait, kwargs, kwargs.values()))
        verdict = known.get(traits)
        if verdict is None:
            verdict, lasting = self.judge(made, args, kwargs)
            if lasting:
                if len(known) >= MOST_VERDICTS:
                    known.clear()
                known[traits] = verdict
        if not verdict.taken:
            self.count(verdict)
        return verdict.taken, verdict.reason

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call that `verify` took."""
        with _lock:
            _served[self.op] += 1
        named = self.known(self.named(args, kwargs))
        if self.op == "chunk_gated_delta_rule" and torch.is_autocast_enabled(named["q"].device.type):
            # Ours follows autocast; the library computes in the dtype it is given.
            with torch.autocast(named["q"].device.type, enabled=False):
                return self.ours(**named)
        return self.ours(**named)

    def named(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """A call's arguments by name; a flag that is None counts as False."""
        named = dict(zip(self.names, args)) | kwargs
        for flag in self.flags:
            if flag in named:
                named[flag] = bool(named[flag])
        return named

    def known(self, named: dict[str, Any]) -> dict[str, Any]:
        """The arguments that our op has; `refusals` has seen that the others ask for nothing."""
        return {name: value for name, value in named.items() if name in self.names}

    def count(self, verdict: Verdict) -> None:
        """Count a call that the library runs, and log each reason once."""
        reason = verdict.reason or ""
        with _lock:
            if verdict.faster:
                _yielded[self.op] += 1
                return
            _fallthroughs[self.op, reason] += 1
            first = _fallthroughs[self.op, reason] == 1
        if first:
            log.warning("%s: left to %s: %s", self.op, self.library, reason)

    # -- the verdict -------------------------------------------------------------------------------------------

    def judge(self, made: Router, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Verdict, bool]:
        """The verdict on a call, and whether it may be remembered for later calls that look the same to `trait`."""
        try:
            named = self.named(args, kwargs)
            reasons = self.refusals(args, named)
            if reasons:
                return Verdict(False, "; ".join(reasons)), True
            call = self.call(named)
            key = self.spec.key(call)
            main = named[self.spec.operands[0].name]
            interpreter.require_running(self.op, key.dtype, main.device)
        except Exception as error:  # whatever is odd about a call, the library is to answer for it
            return Verdict(False, str(error) or type(error).__name__), True
        try:
            return self.contest(made, key, main.device)
        except Exception as error:  # no comparison is no reason not to serve a call
            log.warning("%s: not compared with flash-linear-attention's: %s", key, error)
            return Verdict(True), True

    def refusals(self, args: Sequence[Any], named: dict[str, Any]) -> list[str]:
        """Reasons why no op here can run a call; its operands are not looked at, the op's declaration checks them."""
        reasons = [
            f"{name}: not an argument here"
            for name, value in named.items()
            if name not in self.names and value is not None and value is not False
        ]
        if len(args) > len(self.names):
            reasons.append(f"wanted at most {len(self.names)} positional arguments, got {len(args)}")
        reasons += [
            f"{name}: wanted a plain tensor, got a {type(value).__name__}"
            for name, value in named.items()
            if isinstance(value, torch.Tensor) and type(value) not in TENSORS
        ]
        if not isinstance(named.get("scale"), (numbers.Real, type(None))):
            reasons.append(f"scale: wanted a number, got a {type(named['scale']).__name__}")
        if named.get("cp_context") is not None:
            reasons.append("cp_context: context parallelism is not served")
        if named.get("g") is not None and named.get("g_gamma") is not None:
            reasons.append("g, g_gamma: wanted at most one of them, got both")
        return reasons

    def call(self, named: dict[str, Any]) -> Call:
        """The call in the form of our op's declaration, without the arguments that no key depends on."""
        tensors = []
        for operand in self.spec.operands:
            value = named.get(operand.name)
            if isinstance(value, torch.Tensor):
                if operand.dims == "HV":  # any shape of HV elements
                    value = value.reshape(-1)
                elif operand.dims == "B T HV" and value.dim() == 4 and self.op == "chunk_local_cumsum":
                    value = value.flatten(2)
            tensors.append(value)
        options: list[Value] = []
        for option in self.spec.options:
            if option.differentiates:
                options.append(torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors))
            elif option.names_dtype:
                dtype = named.get(option.name, getattr(torch, str(option.default)))
                options.append(output_dtype_name(self.op, dtype, named[self.spec.operands[0].name]))
            else:
                options.append(named.get(option.name, option.default))
        return Call(
            tensors=tuple(tensors),
            options=tuple(options),
            cu_seqlens=named.get("cu_seqlens"),
            chunk_indices=named.get("chunk_indices"),
        )

    def contest(self, made: Router, key: Key, device: torch.device) -> tuple[Verdict, bool]:
        """The verdict by the measured times of both, and whether it lasts; measures them where misses are tuned.

        A call for which no kernel here is right is the library's, where the settings do not want an error.
        """
        rounded = bucketed(key, made.config.keys.bucket)
        default = self.spec.default(key, driver.chip(device))
        wrong = made.known_wrong(self.spec, rounded, device, default)
        undecided = wrong and made.decided(self.spec, rounded, device, default) is None
        if undecided and made.config.routing.on_wrong == "reference":
            return Verdict(False, f"the kernels here compute it wrongly on this device: {wrong}"), True
        rival = self.rivalry()
        if rival is None:
            return Verdict(True), True
        against = replace(key, op=rival.name)
        if made.policy(device) == "tune":
            made.choose(self.spec, key, device)  # ours first and by itself: its own candidates, then the best of them
            choice = made.choose(rival, against, device)
        else:
            standing = made.standing(rival, against, device)
            if standing is None:
                return Verdict(True), True
            choice = standing
        if choice.candidate.variant == OURS:
            return Verdict(True), choice.frozen and not choice.pending
        return Verdict(False, "its own implementation was measured to be faster", faster=True), choice.frozen

    def rivalry(self) -> Rivalry | None:
        """The comparison of our op with the library's function; None while the library is not imported."""
        if self._rivalry is None:
            self._rivalry = self.make_rivalry(self)
        return self._rivalry


def trait(name: str, value: Any) -> object:
    """The properties of an argument that a verdict depends on, as a hashable value."""
    kind = type(value)
    if kind in TENSORS:
        if name in PACKING:
            return value.dtype, value.device, value.dim()
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    return value if kind in PLAIN and name != "scale" else kind
