"""Auto-tuning layout dispatcher for gated linear attention on Ascend NPUs.

    import layout_tuner
    with layout_tuner.enable():
        out = model(x)

Importing this package imports the standard library only; what the names below need is imported when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import ops as ops
    from .api import disable as disable
    from .api import enable as enable
    from .api import is_enabled as is_enabled
    from .config import Config as Config
    from .dispatch.counters import stats as stats
    from .errors import (
        CacheError as CacheError,
    )
    from .errors import (
        ConfigError as ConfigError,
    )
    from .errors import (
        DeviceLostError as DeviceLostError,
    )
    from .errors import (
        InstallationError as InstallationError,
    )
    from .errors import (
        LayoutTunerError as LayoutTunerError,
    )
    from .errors import (
        TooLittleMemoryError as TooLittleMemoryError,
    )
    from .errors import (
        TuningError as TuningError,
    )
    from .errors import (
        UnsupportedProblemError as UnsupportedProblemError,
    )
    from .explanation import explain as explain
    from .syncing import check_ranks as check_ranks
    from .syncing import tune_misses as tune_misses
    from .warming import warmup as warmup

__version__ = "0.1.0"

_HOMES = {
    "enable": "api",
    "disable": "api",
    "is_enabled": "api",
    "explain": "explanation",
    "stats": "dispatch.counters",
    "warmup": "warming",
    "tune_misses": "syncing",
    "check_ranks": "syncing",
    "Config": "config",
    "LayoutTunerError": "errors",
    "ConfigError": "errors",
    "InstallationError": "errors",
    "UnsupportedProblemError": "errors",
    "CacheError": "errors",
    "TooLittleMemoryError": "errors",
    "DeviceLostError": "errors",
    "TuningError": "errors",
}

__all__ = ["__version__", "ops", *_HOMES]


def __getattr__(name: str) -> object:
    if name != "ops" and name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f".{_HOMES.get(name, name)}", __name__)
    except (ImportError, RuntimeError) as error:  # as of torch, where torch_npu finds no CANN
        from . import errors, installation

        told = None if isinstance(error, errors.InstallationError) else installation.explained(error)
        if told is None:
            raise
        raise told from error
    return module if name == "ops" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
