"""What a candidate's kernels are compiled to: Ascend's compiler gives different binaries for one source at times."""

from __future__ import annotations

import hashlib
import logging

import torch

from ..device import driver
from ..device.failures import first_line
from ..launch import launcher
from ..launch.prepared import Prepared
from ..spec.declaration import Candidate, OpSpec, Problem
from .ahead import unit_of
from .inputs import synthesize

log = logging.getLogger(__name__)


def may_vary(device: torch.device) -> bool:
    """Whether a kernel that was right may be wrong in the next process, or in the next run, with the same sources.

    On an NPU: of 60 kernels 26 were compiled to two or more different modules in six runs of bishengir 1.2.0, and
    bad binaries among them are known.
    """
    return device.type == "npu"


def binary_of(spec: OpSpec, problem: Problem, candidate: Candidate, device: torch.device) -> str:
    """Digest of the binaries that a candidate launches, as this process compiles them; empty where nobody can say.

    They are compiled for arguments as the tuner makes them, and come from Triton's cache once they were.

    Args:
        spec: The op.
        problem: Key, T as it is tuned, and chip.
        candidate: The candidate.
        device: Where it runs.
    """
    if not may_vary(device) or "." in spec.name:  # what another library launches is not known before
        return ""
    call = synthesize(spec, problem.key, "meta")
    digest = hashlib.sha256()
    try:
        with torch.no_grad(), launcher.recording() as records:
            Prepared(spec, problem, candidate, call)(call.tensors, call.scalars, call.cu_seqlens, call.chunk_indices)
        with driver.guard(device):
            for record in records:
                unit = unit_of(record)
                compiled = record.kernel.warmup(*unit.arguments, grid=(1,), **dict(unit.constants))
                binary = getattr(compiled, "kernel", None)
                if not isinstance(binary, bytes):
                    return ""
                digest.update(binary)
    except Exception as error:  # it will be this candidate's when it runs
        log.info("%s: no digest of its binary: %s", candidate.id, first_line(error))
        return ""
    return digest.hexdigest()[:16]
