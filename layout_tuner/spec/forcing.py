"""`LAYOUT_TUNER_FORCE`: an environment variable that names candidates to run whatever was measured, for debugging.

    LAYOUT_TUNER_FORCE="chunk_bwd_dqkwg=full/g=T_CONTIG;chunk_fwd_o=full"

For each op it names a variant and the layouts of any time-axis operands. The other operands keep the layouts of the
default. A layout is ignored in calls that do not have its operand. A forced candidate ranks below pinned decisions and
above measured ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from . import registry
from .declaration import Candidate, OpSpec
from .keys import Key
from .layouts import Layout

NAME = "LAYOUT_TUNER_FORCE"


@dataclass(frozen=True, kw_only=True)
class Forced:
    """The candidate that an op is to run.

    Attributes:
        variant: Its kernel variant.
        layouts: Layouts by operand, of the operands that are named.
    """

    variant: str
    layouts: Mapping[str, Layout]

    def of(self, candidates: Sequence[Candidate], default: Candidate) -> Candidate | None:
        """The candidate that is forced: of those that match, the one that differs from the default in fewest layouts.

        Args:
            candidates: The candidates of a key.
            default: Its default.

        Returns:
            None where no candidate has the variant and the layouts.
        """
        fitting = [
            candidate
            for candidate in candidates
            if candidate.variant == self.variant
            and all(candidate.plan[name] is layout for name, layout in self.layouts.items() if name in plan(candidate))
        ]
        near = plan(default)
        return min(
            fitting,
            key=lambda each: sum(near.get(name) is not layout for name, layout in plan(each).items()),
            default=None,
        )


def plan(candidate: Candidate) -> dict[str, Layout]:
    """A candidate's layouts by operand."""
    return dict(candidate.plan.layouts)


def parse(text: str) -> dict[str, Forced]:
    """The candidates that a value of the variable forces, by op.

    Raises:
        ConfigError: A part of it is wrong. One message names every such part, and the ops or candidates there are.
    """
    forced: dict[str, Forced] = {}
    faults = []
    parts = [part.strip() for part in text.split(";") if part.strip()]
    if text.strip() and not parts:
        faults.append(f"{text!r}: forces nothing, wanted op=candidate;...")
    for part in parts:
        op, equals, candidate = part.partition("=")
        op, candidate = op.strip(), candidate.strip()
        if not equals or not candidate:
            faults.append(f"{part!r}: wanted op=candidate")
        elif op not in registry.names():
            faults.append(f"{part!r}: no op {op!r} (there are {', '.join(registry.names())})")
        elif op in forced:
            faults.append(f"{part!r}: {op} stands twice")
        elif twice := repeated(candidate):
            faults.append(f"{part!r}: {', '.join(twice)} stands twice")
        else:
            known = candidates_of(registry.lookup(op))
            wanted = parse_candidate(candidate)
            if wanted is None or not any(wanted.of([each], each) is each and named(wanted, each) for each in known):
                ids = ", ".join(dict.fromkeys(each.id for each in known))
                faults.append(f"{part!r}: {op} has no candidate {candidate!r} (it has {ids})")
            else:
                forced[op] = wanted
    if faults:
        raise ConfigError(f"{NAME}: " + "; ".join(faults))
    return forced


def repeated(candidate: str) -> list[str]:
    """The operands that a candidate's text names more than once."""
    named = [part.partition("=")[0] for part in candidate.partition("/")[2].split(",") if part]
    return [name for name in dict.fromkeys(named) if named.count(name) > 1]


def parse_candidate(text: str) -> Forced | None:
    """A candidate from `variant` or `variant/operand=LAYOUT,...`; None for a text of another form."""
    variant, _, rest = text.partition("/")
    layouts = {}
    for part in filter(None, rest.split(",")):
        operand, equals, layout = part.partition("=")
        if not equals or layout not in Layout.__members__:
            return None
        layouts[operand] = Layout(layout)
    return Forced(variant=variant, layouts=layouts)


def named(forced: Forced, candidate: Candidate) -> bool:
    """Whether a candidate has a layout for every operand that is named."""
    return forced.layouts.keys() <= plan(candidate).keys()


def candidates_of(spec: OpSpec) -> list[Candidate]:
    """Every candidate that an op has for some form."""
    sizes = {"B": 1, "T": 2, "H": 1, "HV": 2, "K": 16, "V": 16}
    keys = [spec.key_for(sizes, dtype="bfloat16", form=form) for form in spec.every_form]
    return list(dict.fromkeys(candidate for key in keys for candidate in spec.candidates(key, buffers=True)))


def choice(
    forced: Mapping[str, Forced], spec: OpSpec, key: Key, default: Candidate, *, buffers: bool = False
) -> Candidate | None:
    """The candidate forced for a key; None where none is forced for its op, or where the key has no such candidate.

    `buffers` is `Chip.buffers` of the device that it is for.
    """
    wanted = forced.get(spec.name)
    return None if wanted is None else wanted.of(spec.candidates(key, buffers=buffers), default)
