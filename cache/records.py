"""What the cache stores, as plain values: keys, environments, measurements, decisions and misses.

The bounds written in the types hold for what comes out of a file as well as for what goes into one: `check_decision`
and its siblings apply them, so a damaged or hostile row is refused as a row instead of travelling on.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, FiniteFloat, PlainSerializer

State = Literal["ok", "wrong", "failed", "skipped"]
"""How a candidate ended: timed, numerically wrong, raised, or not tried."""

Source = Literal["pinned", "measured", "imported", "predicted", "checked"]
"""Where a decision comes from. A choice forced by an environment variable is never stored.

`checked` decides nothing: its candidate was compared with the oracle and never timed.
"""

FailureClass = Literal["", "compile", "crash", "overflow", "memory", "timeout", "wrong", "device"]
"""Why a candidate failed, which says how long the failure is believed; empty for a candidate that did not fail."""

MAX_SAMPLES = 4096
MAX_MEASUREMENTS = 256
MAX_REASON = 2000
MAX_MAPPING = 256
MAX_COUNT = 2**53


def utc_now() -> datetime:
    """The current time, in UTC."""
    return datetime.now(UTC)


def time_text(moment: datetime) -> str:
    """A moment as the fixed-width ISO 8601 text that files hold; the texts sort as the moments do."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ").rjust(27, "0")


def parse_time(text: object) -> object:
    """A moment from `time_text`'s text; anything else is returned unchanged, for validation to refuse."""
    if isinstance(text, str) and len(text) == 27 and text.endswith("Z"):
        try:
            return datetime.fromisoformat(text).astimezone(UTC)
        except (ValueError, OverflowError):
            return text
    return text


def _utc(moment: object) -> object:
    """Every stored moment is in UTC, so that equal moments are equal records."""
    moment = parse_time(moment)
    return moment.replace(tzinfo=UTC) if isinstance(moment, datetime) and moment.tzinfo is None else moment


# A day short of what Python can name, so that a successor, and another time zone, still have a moment.
FIRST_MOMENT = datetime(1, 1, 2, tzinfo=UTC)
LAST_MOMENT = datetime(9999, 12, 30, tzinfo=UTC)


def _in_range(moment: datetime) -> datetime:
    if not FIRST_MOMENT <= moment <= LAST_MOMENT:
        raise ValueError("a moment between the years 1 and 9999 is wanted")
    return moment.astimezone(UTC)


Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Label = Annotated[str, Field(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
Form = Annotated[str, Field(max_length=1000, pattern=r"^[^\x00-\x1f\x7f]*$")]
Text = Annotated[str, Field(max_length=MAX_REASON)]
Size = Annotated[int, Field(ge=0, le=2**40)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Microseconds = Annotated[FiniteFloat, Field(ge=0)]
Moment = Annotated[
    datetime, BeforeValidator(_utc), AfterValidator(_in_range), PlainSerializer(time_text, when_used="json")
]
Fact = str | int | float | bool | None
Facts = Annotated[Mapping[Annotated[str, Field(max_length=200)], Fact], Field(max_length=MAX_MAPPING)]
Samples = Annotated[tuple[FiniteFloat, ...], Field(max_length=MAX_SAMPLES)]

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, revalidate_instances="always")


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRecord:
    """The key of a call. Every field is present: a size that an op does not have is 0."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    op: Name
    B: Size
    T: Size
    H: Size
    HV: Size
    K: Size
    V: Size
    varlen: bool
    dtype: Label
    form: Form


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasurementRecord:
    """The measurement of one candidate for one key: times, error, or why there are none.

    Attributes:
        candidate: Text id, such as `full/g=T_CONTIG`.
        revision: Hash of its device sources.
        state: How it ended.
        reason: Why it is not `ok`; empty when it is.
        failure: Class of the failure, which decides how long it is believed.
        end_to_end_us: Median time of the whole op, relayouts included, in microseconds.
        kernel_us: Median time of the kernels alone, in microseconds.
        relayout_us: Median time of the relayouts alone, in microseconds.
        interval_low_us: Lower end of the 95 % interval of `end_to_end_us`.
        interval_high_us: Upper end of it.
        error: Largest relative error against the oracle.
        samples: End-to-end samples, in microseconds.
        counts: The compiler's counts behind a prediction, by name; of a measurement `binary`, the digest of what the
            candidate was compiled to, where compilers give different binaries for one source.
        measured_at: When; None means with the decision that it belongs to.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    candidate: Name
    revision: Label
    state: State
    reason: Text = ""
    failure: FailureClass = ""
    end_to_end_us: Microseconds | None = None
    kernel_us: Microseconds | None = None
    relayout_us: Microseconds | None = None
    interval_low_us: FiniteFloat | None = None
    interval_high_us: FiniteFloat | None = None
    error: FiniteFloat | None = None
    samples: Samples = ()
    counts: Facts = field(default_factory=dict)
    measured_at: Moment | None = None

    def __hash__(self) -> int:
        # The generated hash would fail on `counts`; equal records still have equal hashes without it.
        return hash((self.candidate, self.revision, self.state, self.end_to_end_us, self.samples))


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionRecord:
    """The candidate chosen for a key in an environment, with the evidence for it.

    Attributes:
        key: The call.
        environment: Id of the environment it holds in.
        candidate: The winner's id.
        revision: The winner's revision.
        default_candidate: What would have run without this decision.
        source: Where it comes from.
        gain: Fraction of the default's end-to-end time that the winner saves; None where unknown.
        gain_low: Lower end of the gain's 95 % interval.
        gain_high: Upper end of it.
        measurements: Every candidate's record.
        created_at: When, in UTC.
        host: Name of the machine it was made on; left empty, the store fills in its own.
        version: Version of this product that made it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    key: KeyRecord
    environment: Name
    candidate: Name
    revision: Label
    default_candidate: Label
    source: Source
    gain: FiniteFloat | None = None
    gain_low: FiniteFloat | None = None
    gain_high: FiniteFloat | None = None
    measurements: Annotated[tuple[MeasurementRecord, ...], Field(max_length=MAX_MEASUREMENTS)] = ()
    created_at: Moment = field(default_factory=utc_now)
    host: Label = ""
    version: Label = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentRecord:
    """An environment: its text id and the facts that make it (device model, runtime, compiler and the like)."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    id: Name
    facts: Facts = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.id)


@dataclass(frozen=True, kw_only=True, slots=True)
class MissRecord:
    """Calls that found no decision.

    Attributes:
        key: The call.
        environment: Id of the environment.
        count: How many.
        first_seen: The first of them, in UTC.
        last_seen: The last of them, in UTC.
        reason: Why the last of them was not tuned at once.
        host: The machine that counted; left empty, the store fills in its own.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    key: KeyRecord
    environment: Name
    count: Count = 1
    first_seen: Moment = field(default_factory=utc_now)
    last_seen: Moment = field(default_factory=utc_now)
    reason: Text = ""
    host: Label = ""


def mapping_text(mapping: Mapping[str, Fact]) -> str:
    """A mapping as canonical JSON: sorted names, no spaces, equal texts for equal mappings."""
    return json.dumps(dict(mapping), sort_keys=True, separators=(",", ":"), allow_nan=False)
