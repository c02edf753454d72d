"""Routes calls that other libraries make."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..dispatch.router import Router


def take_over(router: Router) -> None:
    """Serve flash-linear-attention's calls while `router` is the newest entry; does nothing where it is not installed.

    Raises:
        ConfigError: A release that is too old.
    """
    if "fla" in sys.modules or importlib.util.find_spec("fla") is not None:
        from . import fla

        fla.attach(router)
