"""An op's candidates on Ascend's compiler: the launches that the real host code makes, lowered and counted.

`OpSpec.bind` chooses tiles, grid and arguments for a chip with the target's cores, as for a real device; the launcher
records the launches instead of making them, and these are lowered.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch

from ..device.driver import Chip
from ..errors import LayoutTunerError
from ..launch import launcher
from ..launch.prepared import Prepared
from ..spec.declaration import Candidate, OpSpec, Problem
from ..spec.keys import Key
from ..spec.operands import Call
from ..tuning.inputs import synthesize
from .compile.compiler import Answer, Compiler, Failure
from .facts import BLOCK_BYTES, KernelFacts
from .lowering import Launch, Pointer, parameters
from .targets import Target

_DTYPES: Final = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """What the compiler made of one launch of a candidate.

    Attributes:
        kernel: Name.
        grid: Programs.
        tasks: Tasks that the programs share.
        constexprs: The compile-time arguments, tiles among them.
        facts: Counts of one task; None where it did not compile.
        error: Why it did not compile; empty where it did.
        failure: Class of the failure.
        source: The Python line of the error.
        overflow: `(memory, bytes wanted, bytes available)` where a memory was too small.
        cached: Whether the compiler's answer came from the disk.
        seconds: Time that lowering and compiling took.
    """

    kernel: str
    grid: int
    tasks: int
    constexprs: dict[str, Any]
    facts: KernelFacts | None
    error: str = ""
    failure: Failure = ""
    source: str = ""
    overflow: tuple[str, int, int] | None = None
    cached: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CandidateReport:
    """What the compiler made of one candidate of a key.

    Attributes:
        op: Name of the op.
        key: The key.
        candidate: Text id of the candidate.
        revision: Its revision.
        target: Name of the target.
        compiler: Versions of the compiler.
        kernels: Its launches, in order.
        relayout_bytes: Bytes read and written by the copies of time-axis tensors around the launches.
        error: Why there are no launches: the host code refused, or could not make the operands.
        refusal: Class of that failure.
    """

    op: str
    key: Key
    candidate: str
    revision: str
    target: str
    compiler: str
    kernels: tuple[KernelReport, ...] = ()
    relayout_bytes: int = 0
    error: str = ""
    refusal: Failure = ""

    @property
    def ok(self) -> bool:
        """Whether every launch compiled."""
        return not self.error and all(kernel.facts is not None for kernel in self.kernels)

    @property
    def failure(self) -> Failure:
        """Class of the failure that is reported, the first one; empty where every launch compiled."""
        return self.refusal or next((kernel.failure for kernel in self.kernels if kernel.facts is None), "")

    def totals(self) -> dict[str, float]:
        """Counts of the whole op: the sum of each launch's, a task's times its tasks; of memory the largest."""
        totals: dict[str, float] = {}
        for kernel in self.kernels:
            if kernel.facts is None:
                continue
            for name, value in kernel.facts.summary().items():
                if name in ("ub_bytes", "l1_bytes", "l0c_bytes"):
                    totals[name] = max(totals.get(name, 0), value)
                else:
                    totals[name] = totals.get(name, 0) + value * kernel.tasks
        return totals

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            **asdict(self),
            "ok": self.ok,
            "totals": self.totals(),
            "kernels": [
                {**asdict(kernel), "facts": kernel.facts and kernel.facts.to_json()} for kernel in self.kernels
            ],
        }


@dataclass(frozen=True, kw_only=True)
class Case:
    """One candidate of an op at a key."""

    spec: OpSpec
    key: Key
    candidate: Candidate


def chip_of(target: Target) -> Chip:
    """The chip that stands for a target in host code."""
    return Chip(
        kind="npu",
        name=target.name,
        cube_programs=target.cube_cores,
        vector_programs=target.vector_cores,
        buffers=target.generation != "A5",
    )


def cases_of(spec: OpSpec, key: Key, target: Target | None = None) -> list[Case]:
    """Every candidate of a key, on a target of which they are not all the same; None is one whose compiler buffers."""
    buffers = target is None or chip_of(target).buffers
    return [Case(spec=spec, key=key, candidate=candidate) for candidate in spec.candidates(key, buffers=buffers)]


def launch_of(record: launcher.LaunchRecord) -> Launch:
    """A recorded launch in the form that is lowered."""
    return Launch(
        kernel=record.kernel,
        grid=record.grid,
        arguments={name: _argument(value) for name, value in named_arguments(record).items()},
        constexprs=dict(record.constants),
        multibuffer=record.options.get("multibuffer"),
    )


def named_arguments(record: launcher.LaunchRecord) -> dict[str, Any]:
    """A recorded launch's run-time arguments by name."""
    names = [parameter.name for parameter in parameters(record.kernel) if not parameter.constexpr]
    return dict(zip(names, record.arguments, strict=True))


def _argument(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    steers = not value.is_floating_point() and value.device.type == "cpu"
    return Pointer(dtype=_DTYPES[value.dtype], contents=value.flatten().tolist() if steers else None)


def launches(case: Case, target: Target, call: Call | None = None) -> tuple[list[Launch], int]:
    """The launches of a candidate, and the bytes its relayouts move.

    Args:
        case: The candidate.
        target: The SoC to compile for.
        call: Arguments; None makes them from the key, without values: shapes and dtypes decide what is launched, and
            a key may be larger than this machine's memory.
    """
    arguments = synthesize(case.spec, case.key, "meta") if call is None else call
    prepared = Prepared(case.spec, Problem(key=case.key, chip=chip_of(target)), case.candidate, arguments)
    with launcher.recording() as records:
        results = prepared(arguments.tensors, arguments.scalars, arguments.cu_seqlens, arguments.chunk_indices)
    moved = [arguments.tensors[place] for place, _ in prepared.moves] + [results[place] for place in prepared.restore]
    # Each copy reads and writes every element.
    relayout_bytes = sum(2 * tensor.numel() * tensor.element_size() for tensor in moved if tensor is not None)
    return [launch_of(record) for record in records], relayout_bytes


def compile_candidates(
    cases: Iterable[Case],
    compiler: Compiler,
    progress: Callable[[int, int], None] | None = None,
    timeout_s: float = 120.0,
) -> list[CandidateReport]:
    """Lower and count candidates; one that fails is a report that says why.

    Args:
        cases: The candidates.
        compiler: Compiles them, for its target.
        progress: Called with the number of kernels done and of all.
        timeout_s: Limit of one run of the compiler.
    """
    listed = list(cases)
    by_case: list[list[Launch]] = []
    reports: list[CandidateReport] = []
    call: tuple[str, Key, Call] | None = None
    for case in listed:
        report = CandidateReport(
            op=case.spec.name,
            key=case.key,
            candidate=case.candidate.id,
            revision=case.candidate.revision,
            target=compiler.target.name,
            compiler=compiler.version,
        )
        try:
            if call is None or call[:2] != (case.spec.name, case.key):
                call = case.spec.name, case.key, synthesize(case.spec, case.key, "meta")
            made, relayout_bytes = launches(case, compiler.target, call[2])
        except (LayoutTunerError, ValueError, TypeError, RuntimeError, MemoryError) as error:
            made, relayout_bytes = [], 0
            # torch says so too where this machine's memory is too small: nothing that stays so.
            passing = isinstance(error, (RuntimeError, MemoryError))
            report = replace(
                report, error=f"{type(error).__name__}: {error}", refusal="device" if passing else "compile"
            )
        by_case.append(made)
        reports.append(replace(report, relayout_bytes=relayout_bytes))
    flat = [launch for made in by_case for launch in made]
    kernels = iter(_compiled(flat, compiler, progress, timeout_s))
    return [
        replace(report, kernels=tuple(next(kernels) for _ in made))
        for report, made in zip(reports, by_case, strict=True)
    ]


def _compiled(
    launches: Sequence[Launch], compiler: Compiler, progress: Callable[[int, int], None] | None, timeout_s: float
) -> list[KernelReport]:
    """Lower and count launches; equal ones once, each while the next is being lowered."""
    done: dict[int, KernelReport] = {}
    for places, answer in compiler.answers([launch.request(timeout_s=timeout_s) for launch in launches]):
        alike: dict[str, KernelReport] = {}
        for place in places:
            launch = launches[place]
            # The request holds no run-time values, and control flow may depend on them.
            values = repr((launch.grid, launch.walked_arguments()))
            if values not in alike:
                alike[values] = _report(launch, answer, compiler)
            done[place] = alike[values]
        if progress is not None:
            progress(len(done), len(launches))
    return [done[place] for place in range(len(launches))]


def _report(launch: Launch, answer: Answer, compiler: Compiler) -> KernelReport:
    facts, error, failure, source = None, answer.error, answer.failure, answer.error_source
    if answer.ok:
        try:
            facts = launch.facts(answer, target=compiler.target.name, compiler=compiler.version)
        except (ValueError, TypeError, AttributeError, KeyError, IndexError) as unread:
            # The compiler's output is its own affair and may hold what nobody has met: one row, not the end of all.
            error, failure = f"its module cannot be read: {type(unread).__name__}: {unread}", "compile"
    return KernelReport(
        kernel=launch.name,
        grid=launch.grid,
        tasks=launch.tasks,
        constexprs=dict(launch.constexprs),
        facts=facts,
        error=error,
        failure=failure,
        source=source,
        overflow=answer.overflow,
        cached=answer.cached,
        seconds=answer.seconds,
    )


def differing_lines(reports: Sequence[CandidateReport]) -> list[tuple[str, str, list[float]]]:
    """The counts in which candidates differ: `(what, source line, its count in each)`, largest difference first.

    Bytes are counted in blocks of 32, so that they compare with bursts and calls.
    """
    tables: list[dict[tuple[str, str], float]] = []
    for report in reports:
        table: dict[tuple[str, str], float] = {}
        for kernel in report.kernels:
            if kernel.facts is None:
                continue
            for what, source, count in _lines(kernel.facts):
                table[what, source] = table.get((what, source), 0) + count * kernel.tasks
        tables.append(table)
    rows = []
    for what, source in sorted(set().union(*tables)):
        counts = [table.get((what, source), 0) for table in tables]
        if len(set(counts)) > 1:
            rows.append((what, source, counts))
    return sorted(rows, key=lambda row: min(row[2]) - max(row[2]))


def _lines(facts: KernelFacts) -> Iterable[tuple[str, str, float]]:
    for transfer in facts.transfers:
        what = f"{transfer.route} {transfer.argument}"
        yield f"{what}: bursts", transfer.source, transfer.bursts
        yield f"{what}: bursts under 32 bytes", transfer.source, transfer.short_bursts
        yield f"{what}: blocks", transfer.source, transfer.bytes / BLOCK_BYTES
    by_line: dict[str, float] = {}
    for count in facts.vector_calls:
        by_line[count.source] = by_line.get(count.source, 0) + count.count
    for source, calls in by_line.items():
        yield "vector calls", source, calls
    for name in ("deinterleaves", "transposes", "scalarised", "scalar_loads"):
        for count in getattr(facts, name):
            yield name.replace("_", " "), count.source, count.count
