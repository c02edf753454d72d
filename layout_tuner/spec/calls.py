"""Checks a call against an op's declaration: mistakes in its arguments, and reasons why no kernel serves its key."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .keys import Key
from .operands import CHUNK_SIZES, SIZES, WIDEST, Call, dtype_name

if TYPE_CHECKING:
    import torch

    from .declaration import OpSpec


def check_call(spec: OpSpec, call: Call) -> dict[str, int]:
    """Check every operand of a call against the op's declaration.

    Returns:
        The sizes by symbol.

    Raises:
        TypeError: An operand that is no tensor, an option or a scalar of another type.
        ValueError: Every other mistake. Either message names all that can be told, each with op, argument, wanted and
            got.
    """
    import torch

    faults: list[str] = []
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    v_first = False
    for option, value in zip(spec.options, call.options):
        if option.size and isinstance(value, int):
            sizes[option.size] = value
            origin[option.size] = option.name
        v_first |= option.turns_states and value is True
    main, others = call.tensors[0], [*call.tensors[1:], call.cu_seqlens, call.chunk_indices]
    wrong_types = type_faults(spec, call)
    if main is None or any(tensor is not None and not isinstance(tensor, torch.Tensor) for tensor in (main, *others)):
        missing = [
            f"{operand.name}: wanted [{operand.dims.replace(' ', ', ')}], got None"
            for operand, tensor in zip(spec.operands, call.tensors)
            if tensor is None and (not operand.optional or operand is spec.operands[0])
        ]
        kind = TypeError if wrong_types else ValueError
        raise kind(f"{spec.name}: " + "; ".join([*wrong_types, *missing]))
    for operand, tensor in zip(spec.operands, call.tensors):
        if tensor is None:
            if not operand.optional:
                faults.append(f"{operand.name}: wanted [{operand.dims.replace(' ', ', ')}], got None")
            continue
        dims = operand.shape_symbols(v_first)
        if len(dims) != tensor.dim():
            faults.append(f"{operand.name}: wanted [{', '.join(dims)}], got {list(tensor.shape)}")
            continue
        for symbol, size in zip(dims, tensor.shape):
            if symbol.isdigit():
                if int(symbol) != size:
                    faults.append(f"{operand.name}: wanted {symbol} in [{', '.join(dims)}], got {list(tensor.shape)}")
            elif sizes.setdefault(symbol, size) != size:
                faults.append(
                    f"{operand.name}: wanted {symbol}={sizes[symbol]} as in {origin[symbol]}, "
                    f"got {list(tensor.shape)} for [{', '.join(dims)}]"
                )
            origin.setdefault(symbol, operand.name)
        if tensor.device != main.device:
            faults.append(
                f"{operand.name}: wanted device {main.device} as {spec.operands[0].name}, got {tensor.device}"
            )
        if operand.must_match and not operand.time_axis and tensor.dtype != main.dtype:
            faults.append(
                f"{operand.name}: wanted {dtype_name(main)} as {spec.operands[0].name}, got {dtype_name(tensor)}"
            )
        elif dtype_name(tensor) not in operand.dtypes:
            faults.append(f"{operand.name}: wanted one of {', '.join(operand.dtypes)}, got {dtype_name(tensor)}")
    if "HV" in sizes and sizes.get("H") and sizes["HV"] % sizes["H"]:
        faults.append(f"HV: wanted a multiple of H={sizes['H']}, got {sizes['HV']}")
    faults += [f"{name}: wanted at least 1, got 0" for name in SIZES if sizes.get(name, 1) == 0]
    faults += check_counts(call, sizes, origin)
    faults += check_packing(call, sizes, main)
    if wrong_types or faults:
        kind = TypeError if wrong_types else ValueError
        raise kind(f"{spec.name}: " + "; ".join([*wrong_types, *faults]))
    return sizes


def type_faults(spec: OpSpec, call: Call) -> list[str]:
    """One complaint for each argument of a wrong type."""
    import torch

    tensors = [(operand.name, tensor) for operand, tensor in zip(spec.operands, call.tensors)]
    tensors += [("cu_seqlens", call.cu_seqlens), ("chunk_indices", call.chunk_indices)]
    faults = [
        f"{name}: wanted a tensor, got {type(tensor).__name__}"
        for name, tensor in tensors
        if tensor is not None and not isinstance(tensor, torch.Tensor)
    ]
    for option, value in zip(spec.options, call.options):
        kind = type(option.default)
        if type(value) is not kind:  # True is an int, and an int of numpy's is none
            faults.append(f"{option.name}: wanted {kind.__name__}, got {type(value).__name__}")
    return faults + number_faults(spec, call.scalars)


def number_faults(spec: OpSpec, scalars: Sequence[object]) -> list[str]:
    """One complaint for each scalar that is no number; a tensor is refused because reading it waits for the device."""
    return [
        f"{name}: wanted a number or None, got {type(number).__name__}"
        for name, number in zip(spec.scalars, scalars)
        if number is not None and (isinstance(number, bool) or not isinstance(number, numbers.Real))
    ]


def check_counts(call: Call, sizes: Mapping[str, int], origin: Mapping[str, str]) -> list[str]:
    """Check that states come one for each sequence, or one for each chunk.

    The chunks of a packed batch are counted by whoever launches: their number is in the values of `cu_seqlens`.
    """
    wanted: dict[str, int] = {}
    if call.cu_seqlens is not None:
        if call.cu_seqlens.dim() != 1:
            return []  # said with its shape
        wanted["N"] = call.cu_seqlens.shape[0] - 1
    elif "B" in sizes:
        wanted["N"] = sizes["B"]
        if sizes.get("BT"):
            wanted["NT"] = -(-sizes["T"] // sizes["BT"])
    return [
        f"{origin[symbol]}: wanted {symbol}={count}, got {sizes[symbol]}"
        for symbol, count in wanted.items()
        if sizes.get(symbol, count) != count
    ]


def check_packing(call: Call, sizes: Mapping[str, int], main: torch.Tensor) -> list[str]:
    """Complaints about `cu_seqlens` and `chunk_indices`; their values are not read, as that would stop the device."""
    faults = []
    for name, tensor, dims in (("cu_seqlens", call.cu_seqlens, 1), ("chunk_indices", call.chunk_indices, 2)):
        if tensor is None:
            continue
        if dtype_name(tensor) not in ("int32", "int64"):
            faults.append(f"{name}: wanted int32 or int64, got {dtype_name(tensor)}")
        if tensor.dim() != dims or (dims == 1 and tensor.shape[0] < 2) or (dims == 2 and tensor.shape[1] != 2):
            faults.append(f"{name}: wanted {'[N + 1]' if dims == 1 else '[NT, 2]'}, got {list(tensor.shape)}")
        if tensor.device != main.device:
            faults.append(f"{name}: wanted device {main.device}, got {tensor.device}")
        if not tensor.is_contiguous():
            faults.append(f"{name}: wanted a contiguous tensor, got strides {tensor.stride()}")
    if call.chunk_indices is not None and call.cu_seqlens is None:
        faults.append("chunk_indices: wanted cu_seqlens with it")
    if call.cu_seqlens is not None and sizes.get("B", 1) != 1:
        faults.append(f"cu_seqlens: wanted B=1 for a packed batch, got B={sizes['B']}")
    return faults


def common_reasons(spec: OpSpec, key: Key) -> list[str]:
    """The reasons, common to all ops, why no kernel serves a key."""
    form = key.form
    reasons = [
        f"{name}={getattr(key, name)}, but the kernels take at most {WIDEST}"
        for name in ("K", "V")
        if getattr(key, name) > WIDEST
    ]
    if "BT" in form and form.integer("BT") not in CHUNK_SIZES:
        reasons.append(f"chunk_size={form.integer('BT')}, but the kernels take {', '.join(map(str, CHUNK_SIZES))}")
    return reasons
