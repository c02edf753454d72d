"""The arguments of `chunk_gated_delta_rule`, checked and as its operands are, for eager and for traced calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import UnsupportedProblemError
from ...spec import calls
from ...spec.operands import Call
from .spec import SPEC


def of_type(things: Sequence[object], kind: type) -> bool:
    """Whether all are of a type or None."""
    return False not in [thing is None or isinstance(thing, kind) for thing in things]


def operands(tensors: tuple[Tensor | None, ...], options: tuple[bool | int, ...]) -> tuple[Tensor | None, ...]:
    """The tensors of a call that was checked, as `SPEC` lists them: cast by autocast, and the gate's parameters `[HV]`.

    Args:
        tensors: As `SPEC` lists them.
        options: As `SPEC` lists them, without `grad`.
    """
    q, k, v, g, beta, *parameters, initial_state = tensors
    assert q is not None and k is not None and v is not None
    use_gate_in_kernel = options[5]  # without it nothing reads them
    parameters = [x.reshape(-1) if x is not None and use_gate_in_kernel else None for x in parameters]
    kind = q.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    return (q, k, v, g, beta, *parameters, initial_state)


def check(
    tensors: tuple[Tensor | None, ...],
    options: tuple[bool | int, ...],
    scale: float | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
    cp_context: object | None,
) -> None:
    """Refuse what no signature tells: arguments of a wrong type and options that contradict each other.

    Args:
        tensors: As `SPEC` lists them.
        options: As `SPEC` lists them, without `grad`.
    """
    g, A_log = tensors[3], tensors[5]
    *flags, chunk_size = options
    _, _, use_beta_sigmoid_in_kernel, allow_neg_eigval, _, use_gate_in_kernel = flags
    faults = []
    if allow_neg_eigval is True and use_beta_sigmoid_in_kernel is False:
        faults.append("allow_neg_eigval: wanted use_beta_sigmoid_in_kernel with it")
    if use_gate_in_kernel is True:
        faults += [f"{name}: wanted with use_gate_in_kernel, got None" for name, x in (("g", g), ("A_log", A_log))
                   if x is None]  # fmt: skip
    if cu_seqlens_cpu is not None and cu_seqlens is None:
        faults.append("cu_seqlens_cpu: wanted cu_seqlens with it")
    if cu_seqlens_cpu is not None and not isinstance(cu_seqlens_cpu, Tensor):
        faults.append(f"cu_seqlens_cpu: wanted a tensor, got {type(cu_seqlens_cpu).__name__}")
    q, k, v = tensors[:3]
    whole = (
        q is not None and k is not None and v is not None and type(chunk_size) is int and {*map(type, flags)} == {bool}
    )
    whole = whole and of_type((*tensors, cu_seqlens, chunk_indices), Tensor) and of_type((scale,), float)
    if faults or not whole:
        flat = [x.reshape(-1) if i in (5, 6) and isinstance(x, Tensor) else x for i, x in enumerate(tensors)]
        try:
            calls.check_call(
                SPEC,
                Call(
                    tensors=(*flat, None, None),
                    options=(*options, False),
                    scalars=(scale,),
                    cu_seqlens=cu_seqlens,
                    chunk_indices=chunk_indices,
                ),
            )
        except (TypeError, ValueError) as error:
            more = str(error).removeprefix(f"{SPEC.name}: ")
            raise type(error)(f"{SPEC.name}: " + "; ".join([*faults, more])) from None
    if faults:
        raise ValueError(f"{SPEC.name}: " + "; ".join(faults))
    if cp_context is not None:
        raise UnsupportedProblemError(SPEC.name, ["cp_context: context parallelism is not served"])
