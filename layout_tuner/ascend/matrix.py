"""The matrix: what every candidate of every op has to meet on Ascend's compiler.

`cases` lists the matrix, `complaints` says what is wrong with one compiled candidate. The tests run it; the generated
table shows it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ..spec import calls, registry
from ..spec.declaration import SINGLE_BUFFER, OpSpec
from ..spec.keys import Form, Key
from ..spec.layouts import Layout
from .candidates import CandidateReport, Case, cases_of
from .targets import target_named

TARGET: Final = "Ascend910B3"
OTHER_TARGETS: Final = ("Ascend910_9391", "Ascend950PR_9589")
WIDTHS: Final = ((64, 64), (128, 128), (192, 128), (256, 256))
DTYPES: Final = ("bfloat16", "float32")
# Up to this K and V no optimisation may be given up.
WIDEST_WITHOUT_NOTES: Final = 128


def key(spec: OpSpec, K: int, V: int, dtype: str, packed: bool, form: Form, T: int = 2048) -> Key:
    """A key of the matrix: the published kernels' shape, with other widths."""
    sizes = {"B": 1 if packed else 2, "T": T, "H": 4, "HV": 8, "K": K, "V": V}
    return Key(
        op=spec.name,
        **{name: size if name in spec.sizes else 0 for name, size in sizes.items()},
        varlen=packed,
        dtype=dtype,
        form=form,
    )


def keys(spec: OpSpec, widths: Sequence[tuple[int, int]] = WIDTHS, T: int = 2048) -> Iterator[Key]:
    """The keys of an op: every standard form, dense and packed, in every width and dtype."""
    seen = set()
    for form in spec.standard_forms.values():
        for packed in (False, True):
            for K, V in widths:
                for dtype in DTYPES:
                    made = key(spec, K, V, dtype, packed, form, T)
                    # An op without K and V has one width.
                    if made not in seen and not refused(spec, made):
                        seen.add(made)
                        yield made


def refused(spec: OpSpec, wanted: Key) -> bool:
    """Whether the op says that no kernel serves the key."""
    return bool([*calls.common_reasons(spec, wanted), *spec.unsupported(wanted)])


@dataclass(frozen=True, kw_only=True)
class Part:
    """Part of the matrix: one op on one target, in one width, dtype and kind of batch.

    Attributes:
        op: Name of the op.
        target: Name of the target.
        K: Head size of q and k; 0 for an op without.
        V: Head size of v; 0 for an op without.
        dtype: Of the operands.
        packed: Whether batches are packed.
    """

    op: str
    target: str
    K: int
    V: int
    dtype: str
    packed: bool

    def __str__(self) -> str:
        return f"{self.target}-{self.op}-{self.K}-{self.V}-{self.dtype}-{'packed' if self.packed else 'dense'}"

    @property
    def sampled(self) -> bool:
        """Whether `make ascend-test` tests the part; the whole matrix would take too long there.

        Of the first target half of the parts: with every candidate, every two of width, dtype and kind of batch meet.
        Of the others one part an op. What has no widths is cheap. Of a chain, whose kernels are the other ops', a
        quarter: every width, and every dtype with every kind of batch; on the other targets nothing.
        """
        chain = registry.lookup(self.op).is_chain
        if self.target != TARGET:
            return not chain and (self.dtype, self.packed) == (DTYPES[0], False)
        if self.K == 0:
            return True
        width, dtype = [K for K, _ in WIDTHS].index(self.K), DTYPES.index(self.dtype)
        return self.packed == bool((width + dtype) % 2) and (not chain or dtype == width // 2)


def parts(spec: OpSpec, target: str = TARGET) -> list[Part]:
    """The parts in which an op is checked on a target: all widths on the first, the narrowest on the others."""
    listed = [
        Part(op=spec.name, target=target, K=each.K, V=each.V, dtype=each.dtype, packed=each.varlen)
        for each in keys(spec, WIDTHS if target == TARGET else WIDTHS[:1])
    ]
    return list(dict.fromkeys(listed))


def cases(spec: OpSpec, part: Part) -> list[Case]:
    """Every candidate of a part; those without multi-buffering in the narrowest width only, where most is buffered."""
    return [
        case
        for wanted in keys(spec, [(part.K, part.V)])
        if (wanted.dtype, wanted.varlen) == (part.dtype, part.packed)
        for case in cases_of(spec, wanted, target_named(part.target))
        if part.K in (0, WIDTHS[0][0]) or not single_buffered(case)
    ]


def single_buffered(case: Case) -> bool:
    """The candidate is compiled without multi-buffering."""
    return case.candidate.variant.endswith(f"+{SINGLE_BUFFER}")


def contiguous(case: Case) -> bool:
    """Whether the candidate has every time-axis operand contiguous along time."""
    layouts = [layout for _, layout in case.candidate.plan.layouts]
    return bool(layouts) and all(layout is Layout.T_CONTIG for layout in layouts)


def complaints(case: Case, report: CandidateReport) -> list[str]:
    """What a compiled candidate does not meet, each in a line; empty if it meets everything."""
    if report.error:
        return [report.error]
    target = target_named(report.target)
    faults = []
    for kernel in report.kernels:
        if kernel.facts is None:
            where = f" [{kernel.source}]" if kernel.source else ""
            faults.append(f"{kernel.kernel}: does not compile: {kernel.error}{where}")
            continue
        facts = kernel.facts
        faults += [f"{kernel.kernel}: {over}" for over in facts.over(target)]
        faults += [f"{kernel.kernel}: control flow unknown at {count.source}" for count in facts.unknown]
        if max(case.key.K, case.key.V) <= WIDEST_WITHOUT_NOTES:
            faults += [f"{kernel.kernel}: {note}" for note in facts.notes]
        if not contiguous(case):
            continue
        for transfer in facts.transfers:
            if transfer.pattern == "strided":
                faults.append(f"{kernel.kernel}: {transfer.route} {transfer.argument} is strided at {transfer.source}")
            elif transfer.short_bursts and transfer.pattern != "contiguous" and not case.key.varlen:
                # A contiguous burst, or a row of a packed batch, is short only where a sequence ends: nothing could
                # make it longer. Rows of dense batches are whole chunks here.
                faults.append(
                    f"{kernel.kernel}: {transfer.route} {transfer.argument}: {transfer.short_bursts:g} bursts under "
                    f"32 bytes at {transfer.source}"
                )
        for name in ("deinterleaves", "scalarised"):
            faults += [
                f"{kernel.kernel}: {count.count:g} {name} at {count.source} ({count.name})"
                for count in getattr(facts, name)
            ]
    return faults


@dataclass(frozen=True, kw_only=True)
class Row:
    """A candidate and what is wrong with it."""

    case: Case
    report: CandidateReport
    complaints: tuple[str, ...]


def rows(compiled: Sequence[Case], reports: Sequence[CandidateReport]) -> list[Row]:
    """Cases with their reports, judged."""
    return [
        Row(case=case, report=report, complaints=tuple(complaints(case, report)))
        for case, report in zip(compiled, reports, strict=True)
    ]


__all__ = ["Part", "Row", "cases", "complaints", "contiguous", "key", "keys", "parts", "refused", "rows"]
