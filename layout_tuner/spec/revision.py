"""The revision of a candidate: a hash of the device sources that it runs."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect


@functools.cache
def source_revision(modules: tuple[str, ...]) -> str:
    """Twelve hex digits over the text of kernel modules and the shared address helpers."""
    digest = hashlib.sha256()
    for name in (*modules, "time_axis"):
        module = importlib.import_module(f"layout_tuner.kernels.{name}")
        digest.update(inspect.getsource(module).encode())
    return digest.hexdigest()[:12]
