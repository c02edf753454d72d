"""`enable`, `disable`, `is_enabled`: which calls are routed.

`enable` pushes one process-wide entry at the call itself; a thread-local would miss the threads in which autograd runs
backward. Leaving the scope removes that entry, whatever order scopes end in. The newest entry wins.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import importlib
import inspect
import logging
import os
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

from torch import nn

from .config import Config, disabled, forced, with_cache
from .dispatch import router
from .dispatch.choices import Policy
from .dispatch.decisions import require_server
from .dispatch.router import Router
from .errors import ConfigError, Faults
from .spec.forcing import Forced, parse

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class Enabled:
    """An entry that `enable` pushed: a scope, or a decorator; without a router it routes nothing.

    Args:
        made: The router.
        models: Those whose layers it serves.
        pushed: Whether to push the entry now.
    """

    def __init__(self, made: Router | None, models: Sequence[nn.Module] = (), pushed: bool = True) -> None:
        self._router = made
        self._models = models
        # The last of the models, and what `places` found in all of them.
        self._found: tuple[weakref.ref[nn.Module], list[Any]] | None = None
        # Numbers of the entries of open scopes, and of the one that the call of `enable` pushed. Lists, because
        # their append and pop are atomic: threads may share an entry.
        self._open: list[int] = []
        self._unscoped = [] if made is None or not pushed else [self.push(made)]
        self._syncs = made is not None and "sync" in (made.on_miss, made.config.tuning.on_miss)

    def places(self, model: object = None) -> list[Any]:
        """Where the layers keep what is served: those of the entry's models, and of a copy of one of them."""
        models = [*self._models]
        if isinstance(model, nn.Module) and not any(model is each for each in models):
            models.append(model)
        found = self._found
        if found is None or found[0]() is not models[-1]:
            found = self._found = weakref.ref(models[-1]), transformers().places(models)
        return found[1]

    def push(self, made: Router, model: object = None) -> int:
        """Push the entry, with which layers of models are served.

        Args:
            made: The entry's router.
            model: The object whose method is called, where it may be a copy of a model.
        """
        if not self._models:
            return router.push(made)
        places = self.places(model)
        transformers().put(places)
        return router.push(made, functools.partial(transformers().take_away, places))

    def __enter__(self) -> Enabled:
        if self._router is not None:
            if self._syncs:
                self.sync()
            entry = taken(self._unscoped)
            # Open already, left before, or a decorator: entering it again routes again.
            self._open.append(entry if entry is not None and router.holds(entry) else self.push(self._router))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._router is None:
            return
        entry = taken(self._open)
        router.remove(taken(self._unscoped) if entry is None else entry)
        if not self._open:
            self._router.close()  # it opens again where it is still used, as in a backward outside the scope

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Route only inside calls of `function`: the entry of `enable` is removed and one pushed around each call.

        Raises:
            TypeError: Nothing that can be called, a class, or a function whose calls return before its body runs:
                coroutines and generators, asynchronous ones too.
        """
        self.withdraw()
        if isinstance(function, types.MethodType):  # so stays a method, which libraries take apart and bind again
            return types.MethodType(self(function.__func__), function.__self__)
        name = getattr(function, "__name__", None) or repr(function)
        if not callable(function):
            raise TypeError(f"enable: cannot decorate {name}: wanted a function")
        if isinstance(function, type):
            raise TypeError(f"enable: cannot decorate the class {name}: decorate its methods")
        late = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        if any(kind(called) for kind in late for called in (function, type(function).__call__)):
            raise TypeError(f"enable: cannot decorate {name}: use the scope inside its body")

        return Routed(self, function)

    def sync(self) -> None:
        """Have what the ranks missed tuned together, if it is time."""
        if self._router is not None:
            importlib.import_module(".syncing", __package__).entering(self._router)

    def withdraw(self) -> None:
        """Remove the entry that the call of `enable` pushed, unless a scope is open with it."""
        router.remove(taken(self._unscoped))

    def __reduce__(self) -> tuple[Callable[..., Enabled], tuple[Config | None, Policy | None], dict[str, object]]:
        """A copy in another process is an entry with the same settings and models, which routes nothing yet."""
        made = self._router
        settings = (None, None) if made is None else (made.config, made.on_miss)
        return resumed, settings, {"_models": self._models}


OF_FUNCTIONS = ("__closure__", "__code__", "__defaults__", "__globals__", "__kwdefaults__")


class Routed(Generic[P, R]):
    """A function inside whose calls an entry routes; it is copied and pickled with the object whose method it is.

    It has a function's attributes, so that what looks into functions finds the one it stands for.

    Args:
        entry: The entry.
        function: What to call.
    """

    def __init__(self, entry: Enabled, function: Callable[P, R]) -> None:
        functools.update_wrapper(self, function)
        self._entry = entry
        self._function = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        made = self._entry._router
        if made is None:
            return self._function(*args, **kwargs)
        if self._entry._syncs:
            self._entry.sync()
        entry = self._entry.push(made, args[0] if args else None)
        try:
            return self._function(*args, **kwargs)
        finally:
            router.remove(entry)

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., R]:
        """Bind as a function does."""
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name in OF_FUNCTIONS:
            return getattr(self._function, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __eq__(self, other: object) -> bool:
        """Equal to methods made of it: Accelerate unwraps a forward until it finds one that equals the method it met
        first, and binds that again; without this it would go on to the function that routes nothing.
        """
        return self is other or getattr(other, "__func__", None) is self

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: dict[int, object]) -> Routed[P, R]:
        return Routed(self._entry, copy.deepcopy(self._function, memo))

    def __reduce__(self) -> str | tuple[type[Routed[P, R]], tuple[Enabled, Callable[P, R]]]:
        name: str = getattr(self, "__qualname__", "")
        named: object = sys.modules.get(getattr(self, "__module__", ""))
        for part in name.split("."):
            named = getattr(named, part, None)
        return name if named is self else (Routed, (self._entry, self._function))


def bound(function: Routed[..., Any], instance: object) -> types.MethodType:
    """The function as a method of an object; a function of its own, because `MethodType` itself cannot be pickled."""
    return types.MethodType(function, instance)


def reduced(method: types.MethodType) -> str | tuple[Any, ...]:
    """How a routed method is pickled: by its parts, where its name would find the method that is not routed."""
    function = method.__func__
    return (bound, (function, method.__self__)) if isinstance(function, Routed) else method.__reduce__()


copyreg.pickle(types.MethodType, reduced)
ForkingPickler.register(types.MethodType, reduced)  # of multiprocessing, which has a table of its own


def resumed(config: Config | None, on_miss: Policy | None) -> Enabled:
    """The entry that a pickled one is restored to."""
    return Enabled(None if config is None else router_of(config, on_miss, forced_candidates()), pushed=False)


def taken(entries: list[int]) -> int | None:
    """The number of the newest entry, taken out of the list; None where the list is empty."""
    try:
        return entries.pop()
    except IndexError:
        return None


def enable(
    *given: Config | str | os.PathLike[str] | nn.Module | None,
    config: Config | str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    on_miss: Policy | None = None,
    fla: bool = True,
) -> Enabled:
    """Route the ops of this project to the candidate measured best for each key.

        with layout_tuner.enable():                            # a scope
        layout_tuner.enable()                                  # the whole process, until disable()
        model.forward = layout_tuner.enable()(model.forward)   # a decorator: only inside the call
        layout_tuner.enable(model)                             # any of these, with what the model's layers call

    Args:
        given: Models whose layers call the gated delta rule through an attribute `chunk_gated_delta_rule`, as those of
            transformers do, or through Hugging Face's `kernels`: the function there is served while the entry lasts,
            and restored after. Without a model only flash-linear-attention's calls and this project's own are routed.
            Also the settings, in place of `config`.
        config: Settings, or the path of a `tuner.toml`; None finds them as `Config.load` does.
        cache: File of decisions; None takes the settings' one, else the user's cache folder.
        on_miss: `tune`, `default`, `error` or `sync`; None follows the settings, which by default tune on an
            accelerator in a single process and run the default candidate elsewhere. `sync` is the choice for training
            in several ranks: calls run the default, and every `[routing] sync_every` entries of a scope, or calls of a
            decorated function, the first among them, the ranks tune together what any of them missed.
        fla: Also take over calls of flash-linear-attention, where it is installed and `[routing] fla` is set; imported
            before or after.

    `LAYOUT_TUNER_FORCE="op=candidate;..."` forces candidates and `LAYOUT_TUNER_DISABLE=1` makes this do nothing, both
    for debugging; they are read here, once for each entry.

    Returns:
        The entry: a context manager and a decorator.

    Raises:
        CacheError: A pin file (`[tuning] pin`) that cannot be used.
        ConfigError: An `on_miss`, settings and variables that cannot be used, all in one message, or a
            flash-linear-attention that is too old.
        TypeError: `config` is no settings and no path, or given twice.
    """
    models = [each for each in given if isinstance(each, nn.Module)]
    settled = [each for each in (*given, config) if each is not None and not isinstance(each, nn.Module)]
    if len(settled) > 1:
        raise TypeError(f"enable: config: wanted one Config or path, got {len(settled)}")
    config = settled[0] if settled else None
    faults = Faults()
    if on_miss not in (None, "tune", "default", "error", "sync"):
        faults.texts.append(f"enable: on_miss: wanted 'tune', 'default', 'error', 'sync' or None, got {on_miss!r}")
    settings, wanted, off = Config(), {}, False
    with faults.gathered():
        settings = config if isinstance(config, Config) else Config.load(config)
    with faults.gathered():
        settings = with_cache(settings, cache)
    with faults.gathered():
        require_server(settings)
    with faults.gathered():
        wanted = forced_candidates()
    with faults.gathered():
        off = disabled()
    faults.complain()
    if off:
        log.warning("LAYOUT_TUNER_DISABLE=1: nothing is routed, the default candidates run")
        return Enabled(None)
    made = router_of(settings, on_miss, wanted)
    if fla and settings.routing.fla:
        take_over(made)
    entry = Enabled(made, models)
    if models and not entry.places():
        transformers().warn_of_none(models)
    router.rest()  # in a notebook a cell that enables runs again and again, and each entry has files open
    return entry


def router_of(settings: Config, on_miss: Policy | None, wanted: dict[str, Forced]) -> Router:
    """A router of these settings; a pin file is read now, so that `enable`, not an op, raises if it is unusable."""
    made = Router(settings, on_miss=on_miss, forced=wanted)
    if settings.tuning.pin:
        _ = made.store
    return made


def forced_candidates() -> dict[str, Forced]:
    """The candidates that `LAYOUT_TUNER_FORCE` names; the ops are imported only if it is set."""
    text = forced()
    if not text:
        return {}
    importlib.import_module(".ops", __package__)
    candidates = parse(text)
    log.warning("LAYOUT_TUNER_FORCE: %s, whatever was measured", text)
    return candidates


def transformers() -> types.ModuleType:
    """The module that serves models; the ops are imported only if there are any."""
    return importlib.import_module(".integrations.transformers", __package__)


def take_over(made: Router) -> None:
    """Let the entry serve other libraries' calls; where one of them fails to attach, ours are still routed."""
    try:
        importlib.import_module(".integrations", __package__).take_over(made)
    except ConfigError:
        raise
    except Exception as error:
        log.warning("flash-linear-attention: not taken over: %s", error)


def disable() -> None:
    """Remove every entry: the default candidates run."""
    router.clear()


def is_enabled() -> bool:
    """Whether calls are routed."""
    return router.active()
