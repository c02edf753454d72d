"""What the tests of this process run kernels on."""

import os

import torch


def found() -> str:
    """The accelerator that there is, else the CPU. A simulated one only where `LAYOUT_TUNER_TEST_DEVICE` names it."""
    if stated := os.environ.get("LAYOUT_TUNER_TEST_DEVICE"):
        return stated
    for kind in ("npu", "cuda"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available() and not getattr(module, "is_simulated", False):
            return kind
    return "cpu"


# npu, cuda or cpu.
KIND = found()
INTERPRETED = KIND == "cpu"
