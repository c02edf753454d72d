"""Serves flash-linear-attention's calls while the newest `enable` entry asks for that.

That library has a public registry of backends, which its functions ask at every call. One backend, `layout_tuner`, is
registered there once, ahead of its own: for the whole op `chunk_gated_delta_rule` and for each kernel op. The registry
cannot unregister, so the backend says it is not available while no entry with `fla=True` is the newest one.

`enable` never imports the library: that takes longer than importing torch, and it initialises the device. While the
library is installed and not imported, a hook in `sys.meta_path` that resolves no module sees each import, and the
backend is registered as soon as the library's modules are loaded.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ..dispatch.router import Router
from ..errors import ConfigError
from ..forking import ProcessLock
from .rivalry import Rivalry, rivalry
from .takeover import Takeover, aside, available, fallthroughs, serve, served, yielded

__all__ = ["HOMES", "aside", "attach", "available", "fallthroughs", "served", "takeover", "yielded"]

log = logging.getLogger(__name__)

NAME = "fla"
OLDEST = (0, 6)
PRIORITY = -10  # lower is asked first; its Ascend backend has 0

# Where each op lives, and the registry that its calls ask; None: one of its own.
HOMES: dict[str, tuple[str, str | None]] = {
    "chunk_gated_delta_rule": ("fla.ops.gated_delta_rule.chunk", "gated_delta_rule"),
    "chunk_gated_delta_rule_fwd_intra": ("fla.ops.gated_delta_rule.chunk_fwd", "gated_delta_rule"),
    "gdn_gate_chunk_cumsum": ("fla.ops.gated_delta_rule.gate", "gated_delta_rule"),
    "gdn_gate_bwd": ("fla.ops.gated_delta_rule.gate", "gated_delta_rule"),
    "recompute_w_u_fwd": ("fla.ops.gated_delta_rule.wy_fast", "gated_delta_rule"),
    "prepare_wy_repr_bwd": ("fla.ops.gated_delta_rule.wy_fast", "gated_delta_rule"),
    "chunk_scaled_dot_kkt_fwd": ("fla.ops.common.chunk_scaled_dot_kkt", "common"),
    "chunk_gated_delta_rule_fwd_h": ("fla.ops.common.chunk_delta_h", "common"),
    "chunk_gated_delta_rule_bwd_dhu": ("fla.ops.common.chunk_delta_h", "common"),
    "chunk_fwd_o": ("fla.ops.common.chunk_o", "common"),
    "chunk_bwd_dv_local": ("fla.ops.common.chunk_o", "common"),
    "chunk_bwd_dqkwg": ("fla.ops.common.chunk_o", "common"),
    "chunk_local_cumsum": ("fla.ops.utils.cumsum", None),
    "solve_tril": ("fla.ops.utils.solve_tril", None),
}

_lock = ProcessLock()


@functools.cache
def takeover(op: str) -> Takeover:
    """The takeover of an op; there is one for each op."""
    return Takeover(op, own_rivalry)


def own_rivalry(taken: Takeover) -> Rivalry | None:
    """The comparison of our op with the library's function; None while the library's module is not imported."""
    library = getattr(sys.modules.get(HOMES[taken.op][0]), taken.op, None)
    if library is None:
        return None
    release = f"{NAME}-{installed_release() or 'unknown'}"
    return rivalry(taken.spec, taken.ours, library, name=NAME, release=release, aside=aside)


_pending = set(HOMES)


class _Watch:
    """A hook in `sys.meta_path` that resolves no module and only sees when one of the library is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.startswith("fla."):
            try:
                connect()
            except Exception as error:  # the library's import must not fail for it
                log.warning("flash-linear-attention: not taken over: %s", error)


_watch = _Watch()


def attach(made: Router) -> None:
    """Serve the library's calls while the router `made` is the newest entry.

    Raises:
        ConfigError: The installed release has no registry of backends.
    """
    if not installed():
        return
    serve(made)
    connect()
    with _lock:
        if _pending and _watch not in sys.meta_path:
            sys.meta_path.insert(0, _watch)  # type: ignore[arg-type]


def connect() -> None:
    """Register the backend for every op whose module the library has loaded by now."""
    if not _pending:
        return
    backends = sys.modules.get("fla.backends")
    if backends is None or not hasattr(backends, "dispatch"):
        return
    with _lock:
        for op in sorted(_pending):
            module, operation = HOMES[op]
            if operation is None and not hasattr(sys.modules.get(module), op):
                continue
            _pending.discard(op)
            if operation is None:
                register_function(backends, getattr(sys.modules[module], op), takeover(op))
            elif not any(HOMES[other][1] == operation for other in _pending):  # the last one of its registry
                together = [takeover(other) for other in HOMES if HOMES[other][1] == operation]
                backends.register(operation)(backend_class(backends, together))
        if _pending:
            return
        if _watch in sys.meta_path:
            sys.meta_path.remove(_watch)  # type: ignore[arg-type]
    if getattr(backends, "_DISPATCH_DISABLED", False):
        log.warning("flash-linear-attention: FLA_DISABLE_BACKEND_DISPATCH=1: none of its calls is taken over")


def backend_class(backends: ModuleType, takeovers: Sequence[Takeover] = ()) -> type:
    """The backend's class, with a method and a verifier for each op, under the names that the registry looks up."""
    members: dict[str, object] = {
        "__doc__": "Calls that layout_tuner serves while it is enabled.",
        "backend_type": "layout_tuner",
        "priority": PRIORITY,
        "is_available": staticmethod(available),
        "is_enabled": staticmethod(lambda: True),
        "can_use": staticmethod(available),  # the library's own remembers its first answer
    }
    for takeover in takeovers:
        members[takeover.op] = staticmethod(takeover.run)
        members[f"{takeover.op}_verifier"] = staticmethod(takeover.verify)
    return type("LayoutTunerBackend", (backends.BaseBackend,), members)


def register_function(backends: ModuleType, function: Callable[..., Any], takeover: Takeover) -> None:
    """Register the backend for a function of the library that has a registry of its own."""
    try:
        backends.register(function, backend=backend_class(backends), verifier=takeover.verify)(takeover.run)
    except KeyError:
        log.warning("flash-linear-attention: %s takes no backends in this release", takeover.op)


def installed() -> bool:
    """Whether the library is installed in a release whose calls can be served.

    Raises:
        ConfigError: It is too old.
    """
    release = installed_release()
    if release is not None and version(release) >= OLDEST:
        return True
    package = sys.modules.get("fla") or importlib.util.find_spec("fla")
    folders = getattr(package, "__path__", None) or getattr(package, "submodule_search_locations", None) or ()
    has_registry = any((Path(folder) / "backends.py").is_file() for folder in folders)
    if release is None:  # a checkout, or another package of that name
        return has_registry
    wanted = ".".join(map(str, OLDEST))
    raise ConfigError(
        f"flash-linear-attention {release} is installed, which has no registry of backends: "
        f"wanted fla-core >= {wanted}.0; upgrade it, or call enable(fla=False)"
    )


@functools.cache
def installed_release() -> str | None:
    """The library's installed version; None where its package metadata is missing."""
    for name in ("fla-core", "flash-linear-attention"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def version(release: str) -> tuple[int, ...]:
    """The major and minor number of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", release)[:2])
