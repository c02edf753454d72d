"""Tells whether torch runs a call as it is, or traces, transforms or watches it: then its tensors may have no memory.

Kernels are handed addresses. Under `FakeTensorMode`, `make_fx`, `vmap`, `jit.trace`, selective checkpointing and the
like, and for tensors on the `meta` device, torch has to see an operator instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_jit = torch._C._is_tracing

# Subclasses that stand for plain tensors while something is traced; operators see through them.
STAND_INS = frozenset({"FakeTensor", "FunctionalTensor"})


class _Kinds(dict[type, bool]):
    """By type, whether it is plain: a tensor, a subclass without operators of its own, or no tensor at all."""

    def __missing__(self, kind: type) -> bool:
        tensor = issubclass(kind, torch.Tensor)
        self[kind] = not tensor or dispatch_of(kind) is dispatch_of(torch.Tensor)
        return self[kind]


def dispatch_of(kind: type) -> object:
    """The function that runs the operators of a tensor type."""
    return getattr(kind, "__torch_dispatch__", None)


_plain = _Kinds()


class _Odd(dict[type, Callable[[Any], bool]]):
    """How it is asked of something of a type whether kernels may not be handed its address.

    Of tensors that are plain ones, those are negative views, whose memory holds numbers of the other sign.
    """

    def __missing__(self, kind: type) -> Callable[[Any], bool]:
        tensor = issubclass(kind, torch.Tensor)
        self[kind] = torch.Tensor.is_neg if tensor and _plain[kind] else _never if _plain[kind] else _always
        return self[kind]


def _never(_: object) -> bool:
    return False


def _always(_: object) -> bool:
    return True


_odd = _Odd({type(None): bool})


def plain(*tensors: object) -> bool:
    """Whether every tensor among them is of a plain type and no negative view, and torch runs operators as called."""
    if _modes() or _jit() or _transforms() is not None:
        return False
    return True not in [_odd[type(tensor)](tensor) for tensor in tensors]


def any_nested(*tensors: object) -> bool:
    """Whether a tensor among them is nested: torch's guards end the process where they meet one of strided layout."""
    return True in [getattr(tensor, "is_nested", False) for tensor in tensors]


def settled(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor, or a copy that has in memory what a negative view or torch's zero tensor only stands for."""
    if tensor is not None and (tensor.is_neg() or tensor._is_zerotensor()):
        return tensor.clone()
    return tensor


def in_memory(*tensors: object) -> bool:
    """Whether the tensors are `plain`, and none is nested, sparse, on the `meta` device or otherwise without memory."""
    ordinary = [
        not isinstance(x, torch.Tensor)
        or (x.layout is torch.strided and not x.is_nested and not x.is_meta and not x._is_zerotensor())
        for x in tensors
    ]
    return plain(*tensors) and all(ordinary)


def is_meta(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the `meta` device, and is not a tracer's stand-in for a tensor on another device."""
    return tensor.is_meta and type(tensor).__name__ not in STAND_INS


def faking() -> bool:
    """Whether a mode is on under which operators compute nothing, so that nothing may be measured or remembered."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None or bool(_jit())


@contextmanager
def apart() -> Iterator[None]:
    """Within this context torch runs operators as if no mode and no trace were on."""
    state = torch._C._get_tracing_state() if _jit() else None
    if state is not None:
        torch._C._set_tracing_state(None)  # type: ignore[arg-type,attr-defined]
    try:
        with _disable_current_modes():
            yield
    finally:
        if state is not None:
            torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def faults(named: dict[str, Any]) -> list[str]:
    """Complaints about the named tensors that are neither plain nor stand-ins for plain ones."""
    if _transforms() is not None:
        return ["vmap, grad and the other transforms of torch.func are not served: make B larger, use torch.autograd"]
    complaints = []
    for name, x in named.items():
        if not isinstance(x, torch.Tensor):
            continue
        if x.is_nested:
            complaints.append(f"{name}: wanted a plain tensor, got a nested one: pass its values with cu_seqlens")
        elif x.layout is not torch.strided:
            complaints.append(f"{name}: wanted a dense tensor, got layout {x.layout}: call to_dense()")
        elif not _plain[type(x)] and type(x).__name__ not in STAND_INS:
            hint = ": call to_local()" if hasattr(x, "to_local") else ""
            complaints.append(f"{name}: wanted a plain tensor, got a {type(x).__name__}{hint}")
        elif x._is_zerotensor():
            complaints.append(f"{name}: wanted a tensor with memory, got torch's zero tensor: call clone()")
    return complaints
