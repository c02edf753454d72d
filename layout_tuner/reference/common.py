"""Helpers that the oracles share: packed batches, chunks, heads of a group, gates."""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Literal, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

RCP_LN2 = 1.0 / math.log(2.0)
L2NORM_EPS = 1e-6
RESET = -104.0  # a token's natural-log gate whose decay is 0 in fp32

P = ParamSpec("P")
R = TypeVar("R")
Axis = Literal["token", "chunk", "sequence"]

_PER_CHUNK = {"h", "dh"}
_PER_SEQUENCE = {"initial_state", "h0", "dht"}
_PER_HEAD = {"g_gamma", "A_log", "dt_bias"}


def _oracle(*axes: Axis) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Wraps an oracle of dense batches so that it takes `compute_dtype` and packed batches.

    `axes` says by what each result is indexed: by token, by chunk or by sequence.
    """

    def decorate(dense: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(dense)

        @functools.wraps(dense)
        def oracle(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = bound.arguments
            dtype = arguments["compute_dtype"]
            cu_seqlens = arguments["cu_seqlens"]
            for name, value in arguments.items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    arguments[name] = value.to(dtype)
            if cu_seqlens is None:
                return dense(*bound.args, **bound.kwargs)
            arguments["cu_seqlens"] = None
            first = next(iter(arguments.values()))
            if first.shape[0] != 1:
                raise ValueError(f"{dense.__name__}: cu_seqlens needs B == 1, got {first.shape[0]}")
            parts = [dense(**piece) for piece in _sequences(arguments, cu_seqlens)]  # type: ignore[call-arg, arg-type]
            if len(axes) == 1:
                return cast(R, _concatenate(cast(list[Tensor | None], parts), axes[0], cu_seqlens, first.shape[1]))
            columns = zip(*cast(list[tuple[Tensor | None, ...]], parts), strict=True)
            results = [_concatenate(list(c), a, cu_seqlens, first.shape[1]) for c, a in zip(columns, axes, strict=True)]
            return cast(R, tuple(results))

        return oracle

    return decorate


def _sequences(arguments: dict[str, object], cu_seqlens: Tensor) -> Iterator[dict[str, object]]:
    """The arguments of a packed call, cut to one sequence at a time."""
    bounds = cu_seqlens.tolist()
    chunk = 0
    for n, (bos, eos) in enumerate(itertools.pairwise(bounds)):
        A = arguments.get("A")
        BT = A.shape[-1] if isinstance(A, Tensor) else cast(int, arguments.get("chunk_size", 64))
        chunks = -(-(eos - bos) // BT)
        piece = dict(arguments)
        for name, value in arguments.items():
            if not isinstance(value, Tensor) or not value.is_floating_point() or name in _PER_HEAD:
                continue
            if name in _PER_CHUNK:
                piece[name] = value[:, chunk : chunk + chunks]
            elif name in _PER_SEQUENCE:
                piece[name] = value[n : n + 1]
            else:
                piece[name] = value[:, bos:eos]
        chunk += chunks
        yield piece


def _concatenate(parts: list[Tensor | None], axis: Axis, cu_seqlens: Tensor, T: int) -> Tensor | None:
    """One result of a packed call from those of its sequences; zeros before the first and after the last token."""
    tensors = [part for part in parts if part is not None]
    if not tensors:
        return None
    if axis == "sequence":
        return torch.cat(tensors)
    if axis == "chunk":
        return torch.cat(tensors, 1)
    shape = tensors[0].shape[2:]
    head = tensors[0].new_zeros(1, int(cu_seqlens[0]), *shape)
    tail = tensors[0].new_zeros(1, T - int(cu_seqlens[-1]), *shape)
    return torch.cat([head, *tensors, tail], 1)


def _split(x: Tensor, BT: int, fill_last: bool = False) -> Tensor:
    """`[B, T, H, ...]` -> `[B, H, NT, BT, ...]`; a short last chunk is filled with zeros, or with the last token."""
    T = x.shape[1]
    missing = -T % BT
    if missing:
        last = x[:, -1:] if fill_last else torch.zeros_like(x[:, -1:])
        x = torch.cat([x, last.expand(-1, missing, *x.shape[2:])], 1)
    x = x.movedim(1, 2)
    return x.reshape(*x.shape[:2], -(-T // BT), BT, *x.shape[3:])


def _join(x: Tensor, T: int) -> Tensor:
    """`[B, H, NT, BT, ...]` -> `[B, T, H, ...]`."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:]).movedim(2, 1)[:, :T]


def _heads(x: Tensor, HV: int, BT: int) -> Tensor:
    """Queries or keys `[B, T, H, K]` -> `[B, HV, NT, BT, K]`, each repeated for the value heads of its group."""
    return _split(x.repeat_interleave(HV // x.shape[2], 2), BT)


def _group_sum(x: Tensor, T: int, H: int) -> Tensor:
    """A gradient `[B, HV, NT, BT, K]` of queries or keys -> `[B, T, H, K]`."""
    x = _join(x, T)
    return x.reshape(x.shape[0], T, H, x.shape[2] // H, x.shape[3]).sum(3)


def _gate(like: Tensor, BT: int, g: Tensor | None, g_gamma: Tensor | None = None) -> Tensor:
    """The gate `[B, HV, NT, BT]` for values `like [B, T, HV, V]`: `g`, or what `g_gamma [HV]` stands for, or zero."""
    B, T, HV = like.shape[:3]
    if g is not None and g_gamma is not None:
        raise ValueError("g and g_gamma exclude each other")
    if g_gamma is not None:
        position = torch.arange(T, device=like.device, dtype=like.dtype) % BT + 1
        g = (position[:, None] * g_gamma.reshape(HV)).expand(B, T, HV)
    if g is None:
        g = like.new_zeros(B, T, HV)
    return _split(g, BT, fill_last=True)


def _decay(G: Tensor) -> Tensor:
    """`exp2(G_t - G_s)` for s <= t, else 0: `[..., BT]` -> `[..., BT, BT]`; masked first, since exp2 could overflow."""
    BT = G.shape[-1]
    causal = torch.ones(BT, BT, dtype=torch.bool, device=G.device).tril()
    return (G[..., :, None] - G[..., None, :]).masked_fill(~causal, -math.inf).exp2()


def _scale(scale: float | None, K: int) -> float:
    return K**-0.5 if scale is None else scale


def _rms(terms: Tensor) -> Tensor:
    """Root mean square of all terms that were summed."""
    return terms.square().mean().sqrt()
