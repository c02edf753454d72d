"""The exceptions of this project.

    LayoutTunerError
    ├── InstallationError        Triton, torch_npu or CANN cannot be used as they are installed; an ImportError too
    ├── ConfigError              a setting, a shapes file or a command line that cannot be used
    ├── UnsupportedProblemError  a well-formed call that no kernel here serves; names every reason
    ├── CacheError               a decision file that cannot be opened or read; never raised by an op
    └── TuningError              no candidate could be used for a key
        ├── NoRightCandidateError    each of them failed or is wrong
        ├── TooLittleMemoryError     or there is too little device memory to find out
        └── DeviceLostError          or the device does nothing more for this process

Wrong shapes, dtypes and devices of a call are `ValueError` and `TypeError`, as in torch. `PackingError` is the
`ValueError` for values that only a running candidate looks at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

REFUSED = ("num_warps", "num_stages")
REFUSAL = "num_warps and num_stages cannot be set anywhere: no kernel here takes them, an Ascend NPU has no such thing"


class LayoutTunerError(Exception):
    """Anything this project raises of its own accord."""


class InstallationError(LayoutTunerError, ImportError):
    """Triton, torch_npu or CANN cannot be used as they are installed; the message says what to do."""


class ConfigError(LayoutTunerError):
    """Settings, shapes files or command lines that cannot be used; the message names everything wrong at once."""


class UnsupportedProblemError(LayoutTunerError):
    """A well-formed call that no kernel here serves.

    Attributes:
        op: Name of the op.
        reasons: Every reason, each a sentence that names what is wanted.
    """

    def __init__(self, op: str, reasons: list[str] | tuple[str, ...]) -> None:
        self.op = op
        self.reasons = tuple(reasons)
        super().__init__(f"{op}: " + "; ".join(self.reasons))


class PackingError(ValueError):
    """Sequence starts or chunks whose values cannot be used: the call's own fault, whatever candidate runs it."""


class CacheError(LayoutTunerError):
    """A decision file that cannot be opened, read or written."""


class TuningError(LayoutTunerError):
    """No candidate of a key compiled, ran and was right."""


class TooLittleMemoryError(TuningError):
    """A key is not tuned because the device has less free memory than that takes."""


class NoRightCandidateError(TuningError):
    """Every candidate that was tried failed or is wrong.

    Attributes:
        measurements: What was found of each.
    """

    def __init__(self, message: str, measurements: tuple[Any, ...] = ()) -> None:
        self.measurements = measurements
        super().__init__(message)


class DeviceLostError(TuningError):
    """The device stopped answering this process; nothing that was measured on it is kept.

    Attributes:
        candidate: Id of the candidate that ran last; empty where none did.
        failure: Class of its failure: `crash`, or `timeout` where it did not end.
    """

    def __init__(self, message: str, candidate: str = "", failure: Literal["crash", "timeout"] = "crash") -> None:
        self.candidate = candidate
        self.failure: Literal["crash", "timeout"] = failure
        super().__init__(message)


class Faults:
    """Collects complaints about arguments and settings, to raise them all at once."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within this context, a `ConfigError` is kept instead of raised."""
        try:
            yield
        except ConfigError as error:
            self.texts.append(str(error))

    def complain(self) -> None:
        """Raise one `ConfigError` with all complaints that were kept."""
        if self.texts:
            raise ConfigError("\n".join(self.texts))
