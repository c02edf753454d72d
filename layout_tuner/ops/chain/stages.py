"""A stage of a chain, described by the tensors that it reads and writes, and bound to its launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...launch.prepared import bind_candidate
from ...spec import registry
from ...spec.declaration import Candidate, Launch, OpSpec, Problem
from ...spec.keys import Form
from ...spec.layouts import Layout, LayoutPlan
from ...spec.operands import SIZES, Value


class Facts(NamedTuple):
    """What a stage is told of a tensor.

    Attributes:
        dtype: By torch's name, or as the chain's form has it.
        layout: Of a time-axis tensor.
    """

    dtype: str
    layout: Layout = Layout.STRIDE_HV


Reads = Mapping[str, Facts]


class Stage(NamedTuple):
    """A call of another op.

    Attributes:
        op: Its name.
        reads: Facts of the operands that are optional, on the time axis, or of another dtype than the first.
        writes: Layouts of the time-axis outputs; empty: all are in the chain's.
        options: Those not at their default, and what only a chain asks of the op.
    """

    op: str
    reads: Reads
    writes: Mapping[str, Layout]
    options: Mapping[str, Value]

    def form(self, spec: OpSpec, BT: int) -> Form:
        """Its form, as a call's own key has it."""
        entries = {option: str(int(x)) if isinstance(x, bool) else str(x) for option, x in self.options.items() if x}
        for operand in spec.operands:
            if operand.name in self.reads:
                dtype, layout = self.reads[operand.name]
                entries[operand.name] = f"{dtype}@{layout.value}" if operand.time_axis else dtype
        by_chunks = any("BT" in operand.dims.split() for operand in spec.operands)
        if by_chunks or any(option.label == "BT" for option in spec.options):
            entries["BT"] = str(BT)
        return Form(entries)

    def bind(self, problem: Problem, layout: Layout) -> Launch:
        """Its launch in the variant that is stored for it, else its default.

        Args:
            problem: The chain's.
            layout: Of the time-axis tensors whose layout nothing else says.
        """
        spec, key = registry.lookup(self.op), problem.key
        main = self.reads.get(spec.operands[0].name)
        stage = spec.key_for(
            {name: getattr(key, name) for name in SIZES},
            dtype=key.dtype if main is None else main.dtype,
            form=self.form(spec, problem.BT),
            varlen=key.varlen,
        )
        variant = problem.variant_of(spec, stage) or spec.default(stage, problem.chip).variant
        plan = {} if self.writes else dict.fromkeys(spec.time_operands, layout)
        plan |= {name: facts.layout for name, facts in self.reads.items() if name in spec.time_operands}
        plan |= self.writes
        candidate = Candidate(variant=variant, plan=LayoutPlan.of(plan), revision=spec.revision)
        return bind_candidate(spec, Problem(key=stage, chip=problem.chip), candidate)
