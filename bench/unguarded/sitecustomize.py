"""Lifts the guard of flash-linear-attention's gated backward in every process that has this folder on PYTHONPATH.

The library refuses it on Hopper with Triton 3.4 to 3.7.0, whose results are wrong there. A benchmark wants something to
compare with, also in the processes that tune for it, where it cannot set the flag itself.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

GUARDED = "fla.ops.common.chunk_o"


class Lifting(importlib.abc.MetaPathFinder):
    """Clears the flag of the guarded module once that is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != GUARDED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        loader: Any = spec and spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                module.IS_NVIDIA_HOPPER = False  # type: ignore[attr-defined]

            loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Lifting())
