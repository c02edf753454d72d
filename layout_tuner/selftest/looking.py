"""One look at something, whose exception is a finding too."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from ..device import driver
from ..device.failures import classify, fatal, first_line
from .findings import REPORT, Finding


def tried(look: Callable[[], Finding], device: torch.device, blank: Finding) -> Finding:
    """What a look comes to, an exception among it; then the device has to answer still.

    Args:
        look: The look.
        device: Where.
        blank: The finding without what is found.
    """
    start = time.monotonic()
    try:
        found = look()
        if device.type != "cpu" and not driver.answers(device):
            found = replace(blank, state="dead", seen="after it the device answers no more")
    except Exception as error:
        kind, seen = classify(error), f"{type(error).__name__}: {first_line(error)}"
        if fatal(error):
            found = replace(blank, state="dead", seen=seen)
        else:
            found = replace(blank, state="failed", seen=seen if kind == "device" else f"{kind}: {seen}")
    cure = found.cure or ("" if found.good else REPORT)
    return replace(found, seconds=time.monotonic() - start, cure=cure)
