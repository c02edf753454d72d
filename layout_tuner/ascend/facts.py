"""Counts of what one program of a compiled kernel does.

Everything is counted in the compiler's final module, after it has split cube from vector work, tiled, planned memory
and placed synchronisation, by following its control flow with the launch's arguments (`walk.py`). Counts and bytes,
never time: cycles are not in the module.
"""

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, Final, Literal

from .mlir.parser import Location, MemRef, Operation, parse_module
from .mlir.walk import Argument, View, Walk, core_of, entries
from .targets import Target

# The engine that moves data works in blocks of this many bytes; a shorter burst costs a whole one.
BLOCK_BYTES: Final = 32
_SPACES: Final[Mapping[str, str]] = {"gm": "GM", "ub": "UB", "cbuf": "L1", "cc": "L0C", "ca": "L0A", "cb": "L0B"}
WORKSPACE: Final = "workspace"

Pattern = Literal["contiguous", "rows", "strided", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Data moved between global and on-chip memory by one line of source, summed over its executions.

    Attributes:
        route: Source and destination memory, as `GM->UB`.
        argument: The kernel's argument, or `workspace`.
        pattern: `contiguous`: one run of bytes; `rows`: several; `strided`: single elements apart from each other.
        source: File and line.
        calls: Transfers.
        bytes: Bytes wanted.
        bursts: Runs of bytes.
        short_bursts: Bursts under 32 bytes.
        short_burst_bytes: Bytes wanted of the short bursts.
    """

    route: str
    argument: str
    pattern: Pattern
    source: str
    calls: float
    bytes: float
    bursts: float
    short_bursts: float
    short_burst_bytes: float

    @property
    def load(self) -> bool:
        """Whether the transfer goes into on-chip memory."""
        return self.route.startswith("GM->")


@dataclass(frozen=True, kw_only=True)
class Count:
    """How often something happens at a line of source."""

    name: str
    source: str
    count: float


@dataclass(frozen=True, kw_only=True)
class KernelFacts:
    """Counts of what one program (or one of its tasks) does; made by `analyse`.

    Attributes:
        kernel: Name.
        target: Name of the target.
        compiler: Versions of the compiler.
        ub_bytes: Planned peak of a vector core's memory; `l1_bytes`, `l0c_bytes` are those of a cube core.
        workspace_plan_bytes: Global memory the compiler wants for each program.
        split: Whether both vector cores of a program share its vector work; None where there is only one kind of core.
        transfers: By route, argument, pattern and line.
        vector_calls: Vector operations by template.
        cube_calls: Matrix products by template.
        flops: Floating-point operations of the matrix products.
        deinterleaves: Operations that pick one element of every n, as strided loads need.
        transposes: Transpositions on chip.
        scalarised: Elements computed one at a time.
        scalar_loads: Single elements read from global memory.
        syncs: Flags and barriers.
        notes: Optimisations that the compiler gave up in order to succeed.
        unknown: Branches and loops whose outcome depends on data; where there are any, counts are a lower bound.
    """

    kernel: str
    target: str
    compiler: str
    ub_bytes: int
    l1_bytes: int
    l0c_bytes: int
    workspace_plan_bytes: int
    split: bool | None
    transfers: tuple[Transfer, ...]
    vector_calls: tuple[Count, ...]
    cube_calls: tuple[Count, ...]
    flops: float
    deinterleaves: tuple[Count, ...]
    transposes: tuple[Count, ...]
    scalarised: tuple[Count, ...]
    scalar_loads: tuple[Count, ...]
    syncs: tuple[Count, ...]
    notes: tuple[str, ...]
    unknown: tuple[Count, ...]

    def over(self, target: Target) -> list[str]:
        """Memories planned beyond the target's capacity, in words."""
        planned = (
            (self.ub_bytes, target.ub_bytes),
            (self.l1_bytes, target.l1_bytes),
            (self.l0c_bytes, target.l0c_bytes),
        )
        return [
            f"{name} {used} of {limit} bytes"
            for name, (used, limit) in zip(("UB", "L1", "L0C"), planned, strict=True)
            if used > limit
        ]

    def summary(self) -> dict[str, float]:
        """The totals by which kernels are compared."""
        loads = [transfer for transfer in self.transfers if transfer.load and transfer.argument != WORKSPACE]
        stores = [transfer for transfer in self.transfers if not transfer.load and transfer.argument != WORKSPACE]
        return {
            "ub_bytes": self.ub_bytes,
            "l1_bytes": self.l1_bytes,
            "l0c_bytes": self.l0c_bytes,
            "bytes_in": sum(transfer.bytes for transfer in loads),
            "bytes_out": sum(transfer.bytes for transfer in stores),
            "workspace_bytes": sum(t.bytes for t in self.transfers if t.argument == WORKSPACE),
            "bursts": sum(transfer.bursts for transfer in self.transfers),
            "short_bursts": sum(transfer.short_bursts for transfer in self.transfers),
            "short_burst_bytes": sum(transfer.short_burst_bytes for transfer in self.transfers),
            "strided_loads": sum(transfer.calls for transfer in loads if transfer.pattern == "strided"),
            "strided_stores": sum(transfer.calls for transfer in stores if transfer.pattern == "strided"),
            "deinterleaves": _total(self.deinterleaves),
            "transposes": _total(self.transposes),
            "scalarised_elements": _total(self.scalarised),
            "scalar_loads": _total(self.scalar_loads),
            "syncs": _total(self.syncs),
            "vector_calls": _total(self.vector_calls),
            "cube_calls": _total(self.cube_calls),
            "flops": self.flops,
        }

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the totals under `summary`."""
        return {**asdict(self), "summary": self.summary()}


def _total(counts: Iterable[Count]) -> float:
    return sum(count.count for count in counts)


def analyse(
    hivm: str,
    arguments: Mapping[str, Argument],
    grid: int,
    *,
    kernel: str = "",
    target: str = "",
    compiler: str = "",
    notes: Sequence[str] = (),
    programs: Sequence[int] = (0,),
    tasks: float | None = None,
) -> KernelFacts:
    """The facts of a compiled kernel.

    Args:
        hivm: The compiler's final module in generic form.
        arguments: The kernel's arguments by name, in order: numbers, contents of integer arrays, None for pointers.
        grid: Programs of the launch.
        kernel: Name, target, compiler: for the record.
        target: Name of the target.
        compiler: Versions.
        notes: The compiler's notes.
        programs: Programs to follow.
        tasks: What counts are divided by; None: the number of programs followed.
    """
    module = parse_module(hivm)
    functions = entries(module)
    counter = _Counter()
    split = None
    for function in functions:
        walk = Walk(function, arguments, grid, counter)
        shared = any(operation.name == "hivm.hir.get_sub_block_idx" for operation in function.walk())
        if core_of(function) == "AIV" and len(functions) > 1:
            split = shared
        for program in programs:
            for sub_block in (0, 1) if shared else (0,):
                walk.run(program, sub_block)
    peaks = _memory_plan(functions)
    share = 1.0 / (len(programs) if tasks is None else tasks)
    return KernelFacts(
        kernel=kernel,
        target=target,
        compiler=compiler,
        ub_bytes=peaks["ub"],
        l1_bytes=peaks["cbuf"],
        l0c_bytes=peaks["cc"],
        workspace_plan_bytes=_workspace_plan(module),
        split=split,
        transfers=counter.transfers(share),
        vector_calls=counter.counts("vector", share),
        cube_calls=counter.counts("cube", share),
        flops=counter.flops * share,
        deinterleaves=counter.counts("deinterleave", share),
        transposes=counter.counts("transpose", share),
        scalarised=counter.counts("scalarised", share),
        scalar_loads=counter.counts("scalar load", share),
        syncs=counter.counts("sync", share),
        notes=tuple(notes),
        unknown=counter.counts("unknown", share),
    )


def source_of(location: Location | None) -> str:
    """`file.py:line` in the kernel; of an inlined helper, the kernel's line and then the helper's."""
    if location is None:
        return ""
    text = f"{PurePath(location.file).name}:{location.line}"
    outer = location.caller
    while outer is not None and outer.caller is not None:
        outer = outer.caller
    return text if outer is None else f"{PurePath(outer.file).name}:{outer.line} (in {text})"


def bursts_of(sizes: Sequence[int], strides: Sequence[int], bits: int) -> tuple[int, int, Pattern]:
    """`(runs, bytes of one, pattern)` of a region of global memory."""
    elements = math.prod(sizes)
    if elements == 0:
        return 0, 0, "contiguous"
    run = 1
    wide = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    strided = bool(wide) and wide[-1][1] != 1
    while wide and wide[-1][1] == run:
        run *= wide.pop()[0]
    number = elements // run
    return number, max(1, run * bits // 8), "strided" if strided else "contiguous" if number == 1 else "rows"


@dataclass
class _Totals:
    calls: int = 0
    bytes: int = 0
    bursts: int = 0
    short_bursts: int = 0
    short_burst_bytes: int = 0


class _Counter:
    """A visitor that counts."""

    def __init__(self) -> None:
        self.flops = 0
        self._transfers: dict[tuple[str, str, Pattern, str], _Totals] = collections.defaultdict(_Totals)
        self._counts: dict[str, collections.Counter[tuple[str, str]]] = collections.defaultdict(collections.Counter)

    def transfers(self, share: float) -> tuple[Transfer, ...]:
        return tuple(
            Transfer(
                route=route,
                argument=argument,
                pattern=pattern,
                source=source,
                calls=total.calls * share,
                bytes=total.bytes * share,
                bursts=total.bursts * share,
                short_bursts=total.short_bursts * share,
                short_burst_bytes=total.short_burst_bytes * share,
            )
            for (route, argument, pattern, source), total in sorted(self._transfers.items())
        )

    def counts(self, kind: str, share: float) -> tuple[Count, ...]:
        return tuple(
            Count(name=name, source=source, count=count * share)
            for (name, source), count in sorted(self._counts[kind].items())
        )

    def _add(self, kind: str, name: str, operation: Operation, count: int = 1) -> None:
        self._counts[kind][name, source_of(operation.location)] += count

    def call(self, operation: Operation, callee: str, operands: list[Any]) -> None:
        views = [operand for operand in operands if isinstance(operand, View)]
        if len(views) >= 2 and (views[0].space == "gm") != (views[1].space == "gm"):
            self._transfer(operation, views[0], views[1])
        elif callee.startswith("mma_"):
            self._add("cube", callee, operation)
            # Two operands, whether to start from zero, then the sizes m, k, n.
            sizes = operands[3:6]
            if all(isinstance(size, int) for size in sizes):
                self.flops += 2 * math.prod(sizes)
        else:
            for word, kind in (("deinterleave", "deinterleave"), ("transpose", "transpose")):
                if word in callee:
                    self._add(kind, callee, operation)
            # Filling a cube core's memory is no vector operation.
            self._add("fill" if callee.startswith("set_l1") else "vector", callee, operation)

    def _transfer(self, operation: Operation, source: View, destination: View) -> None:
        route = f"{_SPACES.get(source.space, source.space)}->{_SPACES.get(destination.space, destination.space)}"
        view = source if source.space == "gm" else destination
        line = source_of(operation.location)
        if None in view.sizes or None in view.strides:
            self._transfers[route, view.base, "unknown", line].calls += 1
            return
        sizes = [size for size in view.sizes if size is not None]
        number, size, pattern = bursts_of(sizes, [stride for stride in view.strides if stride is not None], view.bits)
        if number == 0:
            return
        total = self._transfers[route, view.base, pattern, line]
        total.calls += 1
        total.bytes += math.prod(sizes) * view.bits // 8
        total.bursts += number
        if size < BLOCK_BYTES:
            total.short_bursts += number
            total.short_burst_bytes += number * size

    def access(self, operation: Operation, view: View, store: bool) -> None:
        if view.space == "gm":
            self._add("scalar store" if store else "scalar load", view.base, operation)

    def element_loop(self, operation: Operation, elements: int) -> None:
        body = operation.regions[0][0]
        kinds = sorted({o.name for o in body.operations if o.name.startswith("arith.")} - {"arith.index_cast"})
        inner = next((o for o in body.operations if o.name == "memref.store"), operation)
        self._add("scalarised", ", ".join(kind.removeprefix("arith.") for kind in kinds), inner, elements)

    def synchronise(self, operation: Operation, kind: str) -> None:
        self._add("sync", kind, operation)

    def unknown(self, operation: Operation) -> None:
        self._add("unknown", operation.name, operation)


def _memory_plan(functions: Iterable[Operation]) -> collections.Counter[str]:
    """Peak bytes of each on-chip memory: the end of the last buffer placed in it."""
    peaks: collections.Counter[str] = collections.Counter()
    for operation in (operation for function in functions for operation in function.walk()):
        if operation.name != "hivm.hir.pointer_cast":
            continue
        memref = MemRef.parse(operation.results[0].type)
        if memref is None or None in memref.shape:
            continue
        size = (math.prod(size or 0 for size in memref.shape) * memref.bits + 7) // 8
        for operand in operation.operands:
            if isinstance(operand.owner, Operation) and isinstance(operand.owner.attributes.get("value"), int):
                peaks[memref.space] = max(peaks[memref.space], operand.owner.attributes["value"] + size)
    return peaks


def _workspace_plan(module: Operation) -> int:
    """Bytes of global memory per program that the module's own host function asks for."""
    for function in module.regions[0][0].operations:
        if "infer_workspace_shape" in str(function.attributes.get("sym_name")):
            constants = [o.attributes["value"] for o in function.walk() if o.name.endswith("constant")]
            return max((value for value in constants if isinstance(value, int)), default=0)
    return 0
