"""The ops there are, by name."""

from __future__ import annotations

from ..errors import ConfigError
from .declaration import OpSpec
from .operands import SYMBOLS, Operand, Output

_OPS: dict[str, OpSpec] = {}


def register(spec: OpSpec) -> OpSpec:
    """Make an op known; a name is taken once.

    Raises:
        ValueError: An op of that name is registered already, or its declaration cannot be used; one message says all of
            that.
    """
    if spec.name in _OPS:
        raise ValueError(f"an op {spec.name!r} is registered already")
    faults = declaration_faults(spec)
    if faults:
        raise ValueError(f"{spec.name}: " + "; ".join(faults))
    _OPS[spec.name] = spec
    return spec


def declaration_faults(spec: OpSpec) -> list[str]:
    """Complaints about a declaration from which no key, no arguments or no addresses could be made."""
    shapes = {operand.name: operand.dims for operand in spec.operands}
    tensors: list[Operand | Output] = [*spec.operands, *spec.outputs]
    faults = []
    for tensor in tensors:
        dims = tensor.dims or shapes.get(tensor.name.removeprefix("d"), "")
        symbols = dims.split()
        unknown = [symbol for symbol in symbols if symbol not in SYMBOLS and not symbol.isdigit()]
        if not symbols:
            faults.append(f"{tensor.name}: wanted dims, or to be named d and an operand")
        if unknown:
            faults.append(f"{tensor.name}: dims {dims!r}: no such size {', '.join(unknown)} (of {' '.join(SYMBOLS)})")
        if tensor.time_axis and (symbols[:3] != ["B", "T", "HV"] or len(symbols) > 4):
            faults.append(f"{tensor.name}: a time axis is 'B T HV' and at most one size of channels, got {dims!r}")
    named = [name for group in spec.layout_groups for name in group]
    time_axes = [tensor.name for tensor in tensors if tensor.time_axis]
    faults += [f"{name}: in layout_groups, but no time-axis tensor" for name in named if name not in time_axes]
    faults += [f"{name}: a time-axis tensor in no layout group" for name in time_axes if name not in named]
    if spec.is_chain and spec.by_reference is None:
        faults.append("by_reference: wanted one where gradients are an option, such as ChainByReference")
    return faults


def lookup(name: str) -> OpSpec:
    """The op of that name.

    Raises:
        ConfigError: No such op; the message lists those there are.
    """
    try:
        return _OPS[name]
    except KeyError:
        raise ConfigError(f"no op {name!r} (there are {', '.join(sorted(_OPS))})") from None


def names() -> tuple[str, ...]:
    """The registered ops, sorted."""
    return tuple(sorted(_OPS))
