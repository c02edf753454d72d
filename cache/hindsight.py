"""Judges failures anew that earlier versions stored: they took faults of devices and file systems for compile errors.

Those versions searched an error's text for "compil" and "overflow", which torch_npu's texts hold (they name a source
file `compiler_depend.ts`), and so do paths of compilers' caches. Rows are judged again where they are read, so that
files nobody may write, exports and servers are right as well, and older versions can go on using them.
"""

import re

from .records import FailureClass

_FORGOTTEN = frozenset({"compile", "overflow"})

_DEVICE = re.compile(
    r"compiler_depend\.ts|function error|\bERR\d{5}\b|The Inner error is reported|error code(?: is|:)? ?\d{6}\b"
    r"|CUDA error: |Triton Error \[(?!\w+\]: out of resource)"
)
# OSError's text, behind the name of its class where that was stored.
_FILES = re.compile(r"(\w+: )?\[Errno -?\d+\]")
# Of what triton-ascend's compilers said only this first line was stored.
_MARKER = re.compile(r"///-+\[ERROR\]\[Triton\]\[BEG\]")
_CRASH = re.compile(r"\bcrashed \(exit status|died with <Signals\.|raised SIG[A-Z]+")
# Python's OverflowError, whose name was not stored everywhere.
_NUMBER = re.compile(
    r"OverflowError: |.*(int too (large|big) to convert|cannot convert float infinity|math range error"
    r"|Numerical result out of range)"
)


def failure_of(failure: FailureClass, reason: str) -> FailureClass:
    """The class of a stored failure by today's rules.

    A compile error of which nothing but the marker line is known may have been a crash, and is believed as long as one.

    Args:
        failure: The class as it is stored.
        reason: The stored reason.
    """
    if failure not in _FORGOTTEN:
        return failure
    if _DEVICE.search(reason) or _FILES.match(reason) or _NUMBER.match(reason):
        return "device"
    return "crash" if failure == "compile" and (_MARKER.search(reason) or _CRASH.search(reason)) else failure
