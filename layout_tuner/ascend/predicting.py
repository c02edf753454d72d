"""Predictions as the cache stores them: counts and the compiler's version as evidence, and no time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layout_tuner.cache.records import DecisionRecord, MeasurementRecord

    from ..spec.declaration import OpSpec
    from ..spec.keys import Key
    from .candidates import CandidateReport
    from .prediction import Prediction


def environment_record(target: str, compiler: str) -> Any:
    """The environment that predictions for a target are stored under."""
    from layout_tuner.cache.records import EnvironmentRecord

    from ..device.environment import PREDICTED

    return EnvironmentRecord(id=f"{PREDICTED}{target}", facts={"model": target, "compiler": compiler})


def decision_record(
    spec: OpSpec, key: Key, reports: Sequence[CandidateReport], prediction: Prediction, target: str
) -> DecisionRecord:
    """A prediction as the cache stores it: counts and the compiler's version as evidence, and no time."""
    from layout_tuner.cache.records import DecisionRecord

    from .. import __version__
    from ..device.environment import PREDICTED
    from ..tuning.records import key_record
    from .candidates import chip_of
    from .targets import target_named

    return DecisionRecord(
        key=key_record(key),
        environment=f"{PREDICTED}{target}",
        candidate=prediction.candidate,
        revision=spec.revision,
        default_candidate=spec.default(key, chip_of(target_named(target))).id,
        source="predicted",
        measurements=tuple(measurement_record(report, prediction) for report in reports),
        version=__version__,
    )


def measurement_record(report: CandidateReport, prediction: Prediction) -> MeasurementRecord:
    """A candidate's counts as the cache stores them."""
    from layout_tuner.cache.records import MeasurementRecord

    if not report.ok:
        return MeasurementRecord(
            candidate=report.candidate,
            revision=report.revision,
            state="failed",
            reason=prediction.rejected[report.candidate][:2000],
            failure=report.failure,
        )
    facts: dict[str, str | int | float | bool | None] = {
        "compiler": report.compiler,
        "work units": prediction.units[report.candidate],
        "relayout bytes": report.relayout_bytes,
        **{name.replace("_", " "): value for name, value in report.totals().items()},
    }
    return MeasurementRecord(candidate=report.candidate, revision=report.revision, state="ok", counts=facts)
