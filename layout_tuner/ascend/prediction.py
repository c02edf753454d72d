"""Which candidate to start from, predicted from the compiled kernels' counts.

No time is estimated: cycles are not in the compiler's output. `RULE` counts what the SoC has to start, each thing
once, without weights, and the candidate with the fewest is predicted. Any measurement replaces a prediction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from .candidates import CandidateReport
from .facts import BLOCK_BYTES
from .published import PublishedKernel

RULE: Final = (
    "Work units of a candidate, over all tasks of all its launches: one for each 32-byte block moved between global "
    "and on-chip memory (a shorter burst moves a whole block; workspace traffic counts), one for each burst, one for "
    "each vector or matrix template call, one for each element computed or read alone; plus the 32-byte blocks that "
    "its relayouts read and write. The candidate with the fewest units is predicted; a tie keeps the one declared "
    "first."
)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The candidate predicted for a key, and why.

    Attributes:
        candidate: Text id.
        units: Work units of each candidate that compiled, by id.
        rejected: Why the others did not compile, by id.
        evidence: Counts of each candidate and the compiler's versions, as plain data.
    """

    candidate: str
    units: dict[str, float]
    rejected: dict[str, str]
    evidence: dict[str, Any]


def units(report: CandidateReport) -> float:
    """Work units of a candidate by `RULE`."""
    totals = report.totals()
    moved = totals["bytes_in"] + totals["bytes_out"] + totals["workspace_bytes"]
    return (
        _blocks(moved, totals["short_bursts"], totals["short_burst_bytes"])
        + totals["bursts"]
        + totals["vector_calls"]
        + totals["cube_calls"]
        + totals["scalarised_elements"]
        + totals["scalar_loads"]
        + report.relayout_bytes / BLOCK_BYTES
    )


def published_units(kernel: PublishedKernel, tasks: int, relayout_bytes: int) -> float:
    """Work units of a published kernel by the part of `RULE` that its published counts cover."""
    per_task = (
        _blocks(kernel.kb_in * 1024 + kernel.kb_workspace * 1024, kernel.short_bursts, kernel.short_bursts * 4)
        + kernel.bursts
        + kernel.deinterleaves
        + kernel.scalarised_elements
    )
    return per_task * tasks + relayout_bytes / BLOCK_BYTES


def _blocks(moved: float, short_bursts: float, short_burst_bytes: float) -> float:
    return (moved - short_burst_bytes) / BLOCK_BYTES + short_bursts


def predict(reports: Sequence[CandidateReport]) -> Prediction | None:
    """The candidate of a key with the fewest work units; None where none compiled."""
    compiled = {report.candidate: units(report) for report in reports if report.ok}
    if not compiled:
        return None
    rejected = {report.candidate: reason_of(report) for report in reports if not report.ok}
    evidence = {
        "rule": RULE,
        "compiler": reports[0].compiler,
        "target": reports[0].target,
        "candidates": {
            report.candidate: {
                "units": compiled[report.candidate],
                "relayout_bytes": report.relayout_bytes,
                "totals": report.totals(),
                "notes": sorted({note for k in report.kernels if k.facts is not None for note in k.facts.notes}),
            }
            for report in reports
            if report.ok
        },
        "rejected": rejected,
    }
    best = min(compiled, key=lambda name: compiled[name])
    return Prediction(candidate=best, units=compiled, rejected=rejected, evidence=evidence)


def reason_of(report: CandidateReport) -> str:
    """Why a candidate did not compile, in a line."""
    if report.error:
        return report.error
    failed = next(kernel for kernel in report.kernels if kernel.facts is None)
    return f"{failed.kernel}: {failed.error}" + (f" [{failed.source}]" if failed.source else "")
