"""The environment in which a timing is valid: a fingerprint of device, driver, runtime and compiler.

Decisions of other environments are kept in the cache; a lookup ignores them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from . import driver as devices
from . import interpreter, software

PREDICTED = "predicted:"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The device, driver, runtime and compiler that timings hold for.

    Attributes:
        id: Readable name and a hash over the facts: `NVIDIA H200 #3fa9c1d2`.
        facts: Device model and cores, runtime and driver, torch, torch_npu, Triton's distribution and version.
    """

    id: str
    facts: Mapping[str, str]

    @property
    def interpreted(self) -> bool:
        """Whether kernels run in Triton's interpreter, whose times say nothing about any device."""
        return self.facts.get("interpreter") == "1"


@functools.cache
def environment(device: torch.device) -> Environment:
    """The environment of a device in this process; read once."""
    name, version = devices.triton_distribution()
    facts = {"device": device.type, "torch": torch.__version__, name: version}
    if interpreter.interpreting():
        # Kernels of an interpreted process never reach the device, whatever tensors they are given.
        facts |= {"interpreter": "1", "machine": platform.machine()}
    if device.type == "cpu":
        facts["model"] = "Triton interpreter" if interpreter.interpreting() else "cpu"
    else:
        chip = devices.chip(device)
        facts |= {"model": chip.name, "cube programs": str(chip.cube_programs)}
        facts |= {"vector programs": str(chip.vector_programs)}
        facts |= software.npu_facts() if device.type == "npu" else cuda_facts()
        if devices.simulated(device.type):
            facts["simulated"] = "1"
    return Environment(id=f"{facts['model']} #{digest(facts)}", facts=facts)


def digest(facts: Mapping[str, str]) -> str:
    """Eight hex digits over the facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]


def cuda_facts() -> dict[str, str]:
    """Runtime and driver of an NVIDIA GPU."""
    facts = {"cuda": str(torch.version.cuda)}
    driver = getattr(torch._C, "_cuda_getDriverVersion", None)
    if driver is not None:
        facts["driver"] = str(driver())
    return facts
