"""Computes how much device memory tuning a key takes, before any of it is allocated.

Bound of a tuning, above what the process holds already: the arguments, four times the results (the default's, those
of another variant's first layout, the candidate's own and those of its next run, which are compared), what an op made
of others keeps in between, the oracle's share (`[measure] oracle_mib`, which chooses how much of the problem it sees),
and the timer's scratch buffer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from ..spec.declaration import OpSpec
from ..spec.keys import Key
from ..spec.operands import Output
from .inputs import given
from .numerics import PIECE

MIB = 1 << 20
MARGIN = 1.2
# Results that are kept or compared at a time, and what comparing a piece of them in fp32 takes.
KEPT = 4
PIECES_BYTES = 4 * 4 * PIECE
# The oracle computes in fp32, with copies by chunk: bytes for each element it reads or returns, heads repeated.
ORACLE_BYTES = 20
# What an op made of others holds between its stages, as a multiple of arguments and results.
CHAIN = 2


def sizes_of(key: Key) -> dict[str, int]:
    """A size for every symbol; packed batches have at most one chunk more for each sequence."""
    BT = key.form.integer("BT", 64)
    sequences = max(1, key.T // 256) + 1 if key.varlen else key.B
    chunks = -(-key.T // BT) + (sequences if key.varlen else 0)
    named = {name: getattr(key, name) for name in ("B", "T", "H", "HV", "K", "V")}
    return named | {"BT": BT, "NT": chunks, "N": sequences}


def elements(symbols: Sequence[str], sizes: dict[str, int]) -> int:
    """Elements of a tensor of that shape."""
    return math.prod(int(symbol) if symbol.isdigit() else max(sizes[symbol], 1) for symbol in symbols)


@functools.lru_cache(maxsize=4096)
def counts(spec: OpSpec, key: Key) -> tuple[int, int]:
    """Elements of all arguments and of all results of a key."""
    form, sizes = key.form, sizes_of(key)
    arguments = sum(elements(operand.dims.split(), sizes) for operand in spec.operands if given(operand, form))
    results = sum(elements(spec.shape_of(output), sizes) for output in returned(spec, key))
    return arguments, results


def returned(spec: OpSpec, key: Key) -> list[Output]:
    """The outputs that a call of this key returns; all of those that no operand or flag of the key leaves out."""
    form = key.form
    gradients = {f"d{operand.name}": operand for operand in spec.operands}
    asked = spec.gradient_option
    no_gradients = asked is not None and not form.flag(asked.label)
    outputs = []
    for output in spec.outputs:
        of = gradients.get(output.name)
        absent = of is not None and not given(of, form)
        if (output.needs and output.needs not in form) or absent or (of and no_gradients):
            continue
        outputs.append(output)
    return outputs


def oracle_bytes(spec: OpSpec, key: Key) -> int:
    """Memory that the oracle takes for all of a key: it repeats the heads of queries and keys."""
    return ORACLE_BYTES * sum(counts(spec, replace(key, H=key.HV) if key.H else key))


def tuning_bytes(spec: OpSpec, key: Key, *, oracle_limit: int, scratch: int) -> int:
    """Memory that tuning a key takes at most.

    Args:
        spec: The op.
        key: The key, T as it is tuned.
        oracle_limit: What the oracle may take.
        scratch: The timer's.
    """
    arguments, results = counts(spec, key)
    width = 4 if key.dtype == "float32" else 2
    held = (arguments + KEPT * results) * width
    if any(operand.given_with for operand in spec.operands):
        held += CHAIN * (arguments + results) * width
    compared = min(PIECES_BYTES, 16 * results)
    drawn = 12 * max(elements(operand.dims.split(), sizes_of(key)) for operand in spec.operands)
    return held + max(min(oracle_limit, oracle_bytes(spec, key)), drawn) + compared + scratch
