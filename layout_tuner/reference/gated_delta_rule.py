"""Torch oracles: one per op, each about as short as its formula, and the token recurrence they all follow from.

An oracle takes the arguments of its op and, keyword-only, a `compute_dtype`. It converts every floating input to that
dtype, computes in it and returns its results in it, in the op's order: nothing is rounded to the dtypes of the inputs,
and an `output_dtype` is accepted and ignored. Inputs may have any strides and lie on any device. The oracles are plain
differentiable torch; the tuner calls them under `no_grad`. Where TF32 is allowed for float32 products on a device,
only `torch.float64` is exact there.

Shapes: B batch, T tokens, H query/key heads, HV value heads, K and V head sizes, BT chunk size, NT chunks, N sequences.
Value head i uses query/key head `i // (HV // H)`; gradients of queries and keys are summed over the heads of a group.
Chunk-local cumulative gates (`g`, `gk`, `g_gamma` of everything but the chain) are in log2 units, the chain's own gate
is a natural logarithm. G_last is the gate of a chunk's last token, also where that chunk is not full.

Packed batches have B = 1: sequence n covers the tokens `cu_seqlens[n] .. cu_seqlens[n + 1]`. Chunk states are then
`[1, NT, HV, K, V]`, sequence after sequence (an empty one owns no chunk), and initial and final states have one row a
sequence, empty ones included. Tokens outside every sequence are zero in every result. `chunk_indices`,
`chunk_offsets` and `cu_seqlens_cpu` follow from `cu_seqlens`; they are accepted and not read.

Inside, a token tensor `[B, T, HV, D]` is `[B, HV, NT, BT, D]`, the last chunk filled up with zeros, or for a gate with
its last value, so that its last row is G_last. A row of zeros for k, q, w, u or do adds nothing to any sum.

Source: Yang, Kautz and Hatamizadeh 2024, Gated Delta Networks: Improving Mamba2 with Delta Rule.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, ParamSpec, TypeVar, cast

import torch
import torch.nn.functional as F
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
    """Gives a dense oracle its `compute_dtype` and packed batches; `axes` name what each result is indexed by."""

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
    """Root mean square of the terms that were summed, over all of them."""
    return terms.square().mean().sqrt()


def prepare_chunk_indices(cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """(sequence, chunk of the sequence) of every chunk of a packed batch: `[NT, 2]`, dtype of `cu_seqlens`."""
    counts = [-(-length // chunk_size) for length in cu_seqlens.diff().tolist()]
    pairs = [(n, c) for n, count in enumerate(counts) for c in range(count)]
    return torch.tensor(pairs, dtype=cu_seqlens.dtype, device=cu_seqlens.device).reshape(-1, 2)


def prepare_chunk_offsets(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """The number of chunks before each sequence and, last, of all: `[N + 1]`, int64."""
    counts = (cu_seqlens.diff() + chunk_size - 1).div(chunk_size, rounding_mode="floor")
    return F.pad(counts, (1, 0)).cumsum(0)


@_oracle("token")
def chunk_local_cumsum(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """out[t] = scale * (sum of g[s], s <= t in the chunk of t), or s >= t with `reverse`; t itself counts in both.

    `g` is `[B, T, H]` or, each s of S on its own, `[B, T, H, S]`. The scale multiplies the sum; None is 1.
    """
    x = _split(g, chunk_size)
    x = x.flip(3).cumsum(3).flip(3) if reverse else x.cumsum(3)
    return _join(x if scale is None else x * scale, g.shape[1])


def gdn_gate_chunk_cumsum(
    g: Tensor,
    A_log: Tensor,
    chunk_size: int,
    scale: float | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`chunk_local_cumsum` of the natural-log gate -exp(A_log) * softplus(g + dt_bias), for raw `g [B, T, HV]`."""
    gate = gdn_gate(g, A_log, dt_bias, compute_dtype=compute_dtype)
    return chunk_local_cumsum(gate, chunk_size, scale=scale, cu_seqlens=cu_seqlens, compute_dtype=compute_dtype)


def gdn_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, *, compute_dtype: torch.dtype = torch.float32
) -> Tensor:
    """The natural-log gate -exp(A_log) * softplus(g + dt_bias); `A_log` and `dt_bias` have HV elements."""
    HV = g.shape[-1]
    x = g.to(compute_dtype)
    if dt_bias is not None:
        x = x + dt_bias.to(compute_dtype).reshape(HV)
    return -A_log.to(compute_dtype).reshape(HV).exp() * F.softplus(x)


def gdn_gate_bwd(
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    dyg: Tensor,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the fused gate; `dyg [B, T, HV]` is the gradient of the natural-log gate of each token.

    dg = -dyg * exp(A_log) * sigmoid(g + dt_bias), dA_log = sum(dyg * gate), ddt_bias = sum(dg): sums over B and T, no
    chunks, so that rows outside every sequence must be zero in `dyg`. dA_log has A_log's shape, ddt_bias dt_bias's.
    """
    dyg = dyg.to(compute_dtype)
    x = g.to(compute_dtype)
    if dt_bias is not None:
        x = x + dt_bias.to(compute_dtype).reshape(-1)
    dg = -dyg * A_log.to(compute_dtype).reshape(-1).exp() * x.sigmoid()
    gate = gdn_gate(g, A_log, dt_bias, compute_dtype=compute_dtype)
    dA_log = (dyg * gate).flatten(0, -2).sum(0).reshape(A_log.shape)
    return dg, dA_log, None if dt_bias is None else dg.flatten(0, -2).sum(0).reshape(dt_bias.shape)


def gate_parameter_term_rms(
    dg: Tensor,
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> dict[str, Tensor]:
    """Scales for errors of a chain's dA_log and ddt_bias, sums over all tokens whose terms cancel.

    The terms of ddt_bias are dg, the gradient of the raw gate `g`, and those of dA_log dg * softplus(x) / sigmoid(x),
    x = g + dt_bias. A chain rounds what a chunk's gradients are made from, and the gradient of a token's gate is a sum
    over the later tokens of its chunk: errors of one chunk have one sign and add up, those of different chunks are
    independent. So the scale is the root of the sum over chunks of the squared sum of the terms' magnitudes, and of
    that the root mean square over heads.
    """
    x = g.to(dg.dtype)
    if dt_bias is not None:
        x = x + dt_bias.to(dg.dtype).reshape(-1)
    x = torch.where(dg == 0, 0.0, x).clamp(min=-30.0)  # softplus(x) / sigmoid(x) is 1 below
    terms = {"dA_log": dg * F.softplus(x) / x.sigmoid()}
    if dt_bias is not None:
        terms["ddt_bias"] = dg
    found = {}
    for name, term in terms.items():
        size = term.abs()
        up_to, from_there = (
            chunk_local_cumsum(size, chunk_size, reverse, None, cu_seqlens, compute_dtype=dg.dtype)
            for reverse in (False, True)
        )
        # Every token of a chunk finds the chunk's whole sum; times its own size, it is the square when all are added.
        found[name] = (size * (up_to + from_there - size)).flatten(0, -2).sum(0).mean().sqrt()
    return found


@_oracle("token")
def chunk_scaled_dot_kkt_fwd(
    k: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    output_dtype: torch.dtype = torch.float32,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """M[t, s] = beta_t <k_t, k_s> exp2(G_t - G_s) for s < t in one chunk, else 0: `[B, T, HV, BT]`, s a position."""
    if beta is None:
        raise ValueError("chunk_scaled_dot_kkt_fwd: beta is required")
    b_k = _heads(k, beta.shape[2], chunk_size)
    M = (b_k @ b_k.mT) * _decay(_gate(beta, chunk_size, g)) * _split(beta, chunk_size)[..., None]
    return _join(M.tril(-1), k.shape[1])


@_oracle("token")
def solve_tril(
    A: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(I + A)^-1 of each chunk for strictly lower triangular `A [B, T, HV, BT]`; unit lower triangular."""
    BT = A.shape[-1]
    eye = torch.eye(BT, dtype=A.dtype, device=A.device)
    M = _split(A, BT).tril(-1) + eye
    inverse = torch.linalg.solve_triangular(M, eye.expand_as(M), upper=False, unitriangular=True)
    return _join(inverse, A.shape[1])


@_oracle("token", "token")
def recompute_w_u_fwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    g: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """w = A (beta * exp2(G) * k) `[B, T, HV, K]` and u = A (beta * v) `[B, T, HV, V]`; A is used as it is."""
    (T, HV), BT = v.shape[1:3], A.shape[-1]
    b_A, b_beta = _split(A, BT), _split(beta, BT)[..., None]
    decay = _gate(v, BT, g).exp2()[..., None]
    return _join(b_A @ (b_beta * decay * _heads(k, HV, BT)), T), _join(b_A @ (b_beta * _split(v, BT)), T)


def chunk_gated_delta_rule_fwd_intra(
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """(w, u, A): kkt, its inverse A, then w and u."""
    if beta is None:
        raise ValueError("chunk_gated_delta_rule_fwd_intra: beta is required")
    M = chunk_scaled_dot_kkt_fwd(k, g, beta, cu_seqlens, chunk_size, compute_dtype=compute_dtype)
    A = solve_tril(M, cu_seqlens, compute_dtype=compute_dtype)
    w, u = recompute_w_u_fwd(k, v, beta, A, g, cu_seqlens, compute_dtype=compute_dtype)
    return w, u, A


@_oracle("chunk", "token", "sequence")
def chunk_gated_delta_rule_fwd_h(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    save_new_value: bool = True,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(h, v_new, final_state): h[c] = S at the START of chunk c, v_new = u - w S (before any decay), then

    S <- exp2(G_last) S + k^T (exp2(G_last - G) * v_new). `gk [B, T, HV, K]` (cumulative, log2) also decays S, by
    diag(exp2(gk_last)), and nothing else: the k and w given with it are gated already.
    """
    (T, HV, V), K = u.shape[1:], k.shape[-1]
    b_k, b_w, b_u = _heads(k, HV, chunk_size), _split(w, chunk_size), _split(u, chunk_size)
    keep, to_end = _state_decays(u, chunk_size, g, gk)
    S = u.new_zeros(u.shape[0], HV, K, V)
    if initial_state is not None:
        S = initial_state.mT if state_v_first else initial_state
    states, new_values = [], []
    for c in range(b_k.shape[2]):
        states.append(S)
        v_new = b_u[:, :, c] - b_w[:, :, c] @ S
        new_values.append(v_new)
        S = keep[:, :, c] * S + b_k[:, :, c].mT @ (to_end[:, :, c] * v_new)
    h = torch.stack(states, 1) if states else u.new_zeros(u.shape[0], 0, HV, K, V)
    v_new = _join(torch.stack(new_values, 2), T) if new_values else u
    if state_v_first:
        h, S = h.mT, S.mT
    return h, v_new if save_new_value else None, S if output_final_state else None


def _state_decays(like: Tensor, BT: int, g: Tensor | None, gk: Tensor | None) -> tuple[Tensor, Tensor]:
    """What a chunk leaves of the state, `[B, HV, NT, 1 or K, 1]`, and a token's exp2(G_last - G), `[.., BT, 1]`."""
    G = _gate(like, BT, g)
    keep = G[..., -1:, None].exp2()
    if gk is not None:
        keep = keep * _split(gk, BT, fill_last=True)[..., -1, :, None].exp2()
    return keep, (G[..., -1:] - G).exp2()[..., None]


@_oracle("token")
def chunk_fwd_o(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    h: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """o = scale * ((exp2(G) * q) h + tril(q k^T * exp2(G_t - G_s)) v); `v` is fwd_h's v_new, the triangle keeps s = t.

    `g_gamma [HV]` (log2) stands for G_t = g_gamma * (position in the chunk + 1); not together with `g`.
    """
    T, HV = v.shape[1:3]
    b_q, b_k = _heads(q, HV, chunk_size), _heads(k, HV, chunk_size)
    G = _gate(v, chunk_size, g, g_gamma)
    b_h = (h.mT if state_v_first else h).movedim(1, 2)
    o = (G.exp2()[..., None] * b_q) @ b_h + (b_q @ b_k.mT * _decay(G)) @ _split(v, chunk_size)
    return _join(_scale(scale, q.shape[-1]) * o, T)


@_oracle("token")
def chunk_bwd_dv_local(
    q: Tensor,
    k: Tensor,
    do: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    A: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """dv[s] = sum over t >= s in the chunk of scale * <k_s, q_t> * exp2(G_t - G_s) * do[t].

    A given `A [B, T, HV, BT]` (row: query token, column: position of the key) replaces the factor before do[t]: it
    holds scale and gate already, only the causal mask is applied to it, and q, k, g, g_gamma, scale are not read.
    """
    T, HV = do.shape[1:3]
    if A is not None:
        weights = _split(A, chunk_size).tril()
    else:
        product = _heads(q, HV, chunk_size) @ _heads(k, HV, chunk_size).mT
        weights = _scale(scale, q.shape[-1]) * product * _decay(_gate(do, chunk_size, g, g_gamma))
    return _join(weights.mT @ _split(do, chunk_size), T)


@_oracle("chunk", "sequence", "token")
def chunk_gated_delta_rule_bwd_dhu(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    do: Tensor,
    dv: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    h0: Tensor | None = None,
    dht: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(dh, dh0, dv2): dh[c] = gradient of S at the END of chunk c, dv2 = dv + exp2(G_last - G) * (k dh), and backwards

    dh <- exp2(G_last) dh + (scale * exp2(G) * q)^T do - w^T dv2, from dht or 0. `dv` is dv_local's result, dv2 the
    gradient of u. dh0 is None without h0 (whose values are not read). `gk` only decays dh, by diag(exp2(gk_last)).
    """
    (T, HV, V), K = do.shape[1:], q.shape[-1]
    b_q, b_k = _heads(q, HV, chunk_size), _heads(k, HV, chunk_size)
    b_w, b_do, b_dv = _split(w, chunk_size), _split(do, chunk_size), _split(dv, chunk_size)
    b_q = _scale(scale, K) * _gate(do, chunk_size, g).exp2()[..., None] * b_q
    keep, to_end = _state_decays(do, chunk_size, g, gk)
    dS = do.new_zeros(do.shape[0], HV, K, V)
    if dht is not None:
        dS = dht.mT if state_v_first else dht
    states, corrected = [], []
    for c in reversed(range(b_k.shape[2])):
        states.append(dS)
        dv2 = b_dv[:, :, c] + to_end[:, :, c] * (b_k[:, :, c] @ dS)
        corrected.append(dv2)
        dS = keep[:, :, c] * dS + b_q[:, :, c].mT @ b_do[:, :, c] - b_w[:, :, c].mT @ dv2
    dh = torch.stack(states[::-1], 1) if states else do.new_zeros(do.shape[0], 0, HV, K, V)
    dv2 = _join(torch.stack(corrected[::-1], 2), T) if corrected else dv
    if state_v_first:
        dh, dS = dh.mT, dS.mT
    return dh, None if h0 is None else dS, dv2


@_oracle("token", "token", "token", "token")
def _dqkwg(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    w: Tensor | None = None,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    dv: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """dq, dk, dw, and the terms of dg `[B, T, HV, 6]`."""
    (T, HV), H, BT = v.shape[1:3], q.shape[2], chunk_size
    if w is not None and dv is None:
        raise ValueError("chunk_bwd_dqkwg: w asks for dw, which needs dv")
    b_q, b_k, b_v, b_do = _heads(q, HV, BT), _heads(k, HV, BT), _split(v, BT), _split(do, BT)
    b_h, b_dh = (x.mT.movedim(1, 2) if state_v_first else x.movedim(1, 2) for x in (h, dh))
    G = _gate(v, BT, g, g_gamma)
    scale = _scale(scale, q.shape[-1])
    ds = scale * (b_do @ b_v.mT) * _decay(G)
    dq_inter = scale * G.exp2()[..., None] * (b_do @ b_h.mT)
    dk_inter = (G[..., -1:] - G).exp2()[..., None] * (b_v @ b_dh.mT)
    dq = _group_sum(dq_inter + ds @ b_k, T, H)
    dk = _group_sum(dk_inter + ds.mT @ b_q, T, H)
    dw = None if w is None or dv is None else _join(-(_split(dv, BT) @ b_h.mT), T)
    if g is None:
        return dq, dk, dw, None
    # sum_K(dq * q) and sum_K(dk * k) share the diagonal of ds * q k^T, which cancels: it is left out of both.
    E = (ds * (b_q @ b_k.mT)).tril(-1)
    k_dk_inter = (dk_inter * b_k).sum(-1)
    last = torch.zeros_like(G)
    valid = torch.arange(G.shape[2], 0, -1, device=G.device) > 1
    last_token = torch.where(valid, BT - 1, (T - 1) % BT)[None, None, :, None].expand(*G.shape[:3], 1)
    state_term = last.scatter(3, last_token, G[..., -1:].exp2() * (b_h * b_dh).sum((-2, -1))[..., None])
    value_term = last.scatter(3, last_token, k_dk_inter.sum(-1, keepdim=True))
    terms = [(dq_inter * b_q).sum(-1), E.sum(-1), -k_dk_inter, -E.sum(-2), state_term, value_term]
    return dq, dk, dw, _join(torch.stack(terms, -1), T)


def chunk_bwd_dqkwg(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    w: Tensor | None = None,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    dv: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(dq, dk, dw, dg): what the outputs and the states' gradient give; `v` is v_new, `dv` is dhu's dv2.

    ds = scale * tril(do v^T * exp2(G_t - G_s)), dq_inter = scale * exp2(G) * (do h^T),
    dk_inter = exp2(G_last - G) * (v dh^T), dq = dq_inter + ds k, dk = dk_inter + ds^T q, dw = -dv h^T,
    dG = sum_K(dq * q) - sum_K(dk * k), and dG[last] += exp2(G_last) * sum(h * dh) + sum(dk_inter * k).

    dq and dk are `[B, T, H, K]`. dw `[B, T, HV, K]` is None without w (whose values are not read). dg `[B, T, HV]` is
    None without g, also with g_gamma; it is the gradient of the cumulative gate in natural-log units.
    """
    dq, dk, dw, terms = _dqkwg(
        q, k, v, do, h, dh, w, g, g_gamma, dv, scale, state_v_first, cu_seqlens, chunk_size, compute_dtype=compute_dtype
    )
    return dq, dk, dw, None if terms is None else terms.sum(-1)


def chunk_bwd_dqkwg_term_rms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    w: Tensor | None = None,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    dv: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """`{"dg": rms}` of the terms whose sum is dg, a scale for errors where they cancel; empty without g."""
    *_, terms = _dqkwg(
        q, k, v, do, h, dh, None, g, g_gamma, dv, scale, state_v_first, cu_seqlens, chunk_size,
        compute_dtype=compute_dtype,
    )  # fmt: skip
    return {} if terms is None else {"dg": _rms(terms)}


@_oracle("token", "token", "token", "token")
def _wy_repr_bwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    dw: Tensor,
    du: Tensor,
    g: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dk, dv, and the terms of dbeta and of dg, `[B, T, HV, 3]` each."""
    (T, HV), BT = v.shape[1:3], A.shape[-1]
    b_k, b_v, b_A, b_dw, b_du = _heads(k, HV, BT), _split(v, BT), _split(A, BT), _split(dw, BT), _split(du, BT)
    b_beta, G = _split(beta, BT)[..., None], _gate(v, BT, g)
    k_gated = G.exp2()[..., None] * b_k
    dA = b_du @ (b_beta * b_v).mT + b_dw @ (b_beta * k_gated).mT
    dM = -(b_A.mT @ dA @ b_A.mT).tril(-1)
    product = b_k @ b_k.mT * _decay(G)
    weights = dM * b_beta * _decay(G)
    t_w, t_u = b_A.mT @ b_dw, b_A.mT @ b_du
    dk = b_beta * G.exp2()[..., None] * t_w + weights @ b_k + weights.mT @ b_k
    dbeta = [(t_u * b_v).sum(-1), (t_w * k_gated).sum(-1), (dM * product).sum(-1)]
    dg = [(b_beta * t_w * k_gated).sum(-1), (dM * b_beta * product).sum(-1), -(dM * b_beta * product).sum(-2)]
    dbeta_terms, dg_terms = (_join(torch.stack(terms, -1), T) for terms in (dbeta, dg))
    return _group_sum(dk, T, k.shape[2]), _join(b_beta * t_u, T), dbeta_terms, None if g is None else dg_terms


def prepare_wy_repr_bwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    dw: Tensor,
    du: Tensor,
    g: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dk, dv, dbeta, dg) through w, u and the inverse; `dw` is dqkwg's, sign as it comes, `du` is dhu's dv2.

    dA = du (beta * v)^T + dw (beta * exp2(G) * k)^T, dM = -strict_tril(A^T dA A^T), P = k k^T * exp2(G_t - G_s),
    t_w = A^T dw, t_u = A^T du, W = dM * beta_t * exp2(G_t - G_s); then dv = beta * t_u,
    dk = beta * exp2(G) * t_w + W k + W^T k, dbeta = sum_V(t_u * v) + sum_K(t_w * exp2(G) * k) + rowsum(dM * P),
    dG = sum_K(t_w * beta * exp2(G) * k) + rowsum(dM * beta_t * P) - colsum(dM * beta_t * P).

    dk is `[B, T, H, K]`; dg is None without g. Masking dA to its strictly lower part first gives the same dM.
    """
    dk, dv, dbeta, dg = _wy_repr_bwd(k, v, beta, A, dw, du, g, cu_seqlens, compute_dtype=compute_dtype)
    return dk, dv, dbeta.sum(-1), None if dg is None else dg.sum(-1)


def prepare_wy_repr_bwd_term_rms(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    dw: Tensor,
    du: Tensor,
    g: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """`{"dbeta": rms, "dg": rms}` of the terms whose sums they are, scales for errors where these cancel."""
    _, _, dbeta, dg = _wy_repr_bwd(k, v, beta, A, dw, du, g, cu_seqlens, compute_dtype=compute_dtype)
    return {name: _rms(terms) for name, terms in (("dbeta", dbeta), ("dg", dg)) if terms is not None}


class _Activated(NamedTuple):
    """The chain's inputs after the activations that the op may fuse."""

    q: Tensor
    k: Tensor
    beta: Tensor
    g: Tensor | None
    q_rstd: Tensor
    k_rstd: Tensor


def _activate(
    q: Tensor,
    k: Tensor,
    g: Tensor | None,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    use_gate_in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    dtype: torch.dtype,
) -> _Activated:
    """q and k normalised, beta in (0, 1) or (0, 2), g the natural-log gate: each where asked for."""
    q, k, beta = q.to(dtype), k.to(dtype), beta.to(dtype)
    q_rstd, k_rstd = ((x.square().sum(-1, keepdim=True) + L2NORM_EPS).rsqrt() for x in (q, k))
    if use_qk_l2norm_in_kernel:
        q, k = q * q_rstd, k * k_rstd
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval needs use_beta_sigmoid_in_kernel")
    if use_beta_sigmoid_in_kernel:
        beta = (2.0 if allow_neg_eigval else 1.0) * beta.sigmoid()
    if use_gate_in_kernel:
        if g is None or A_log is None:
            raise ValueError("use_gate_in_kernel needs g and A_log")
        g = gdn_gate(g, A_log, dt_bias, compute_dtype=dtype)
    return _Activated(q, k, beta, None if g is None else g.to(dtype), q_rstd, k_rstd)


def _cumulative_gate(g: Tensor | None, BT: int, cu_seqlens: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The chain's natural-log gate per token -> the stages' log2 cumulative gate, which no reset may fill."""
    if g is None:
        return None
    return chunk_local_cumsum(g.clamp(min=RESET), BT, False, RCP_LN2, cu_seqlens, compute_dtype=dtype)


def gated_delta_rule_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:
    """(o, final_state) token by token, the definition of the op; a `chunk_size` changes nothing.

    S <- exp(g_t) S, S <- S + k_t (beta_t (v_t - k_t^T S))^T, o_t = scale * q_t^T S, with g a natural logarithm.

    `use_gate_in_kernel`: g is -exp(A_log) * softplus(g + dt_bias); `use_beta_sigmoid_in_kernel`: beta is sigmoid(beta),
    twice that with `allow_neg_eigval`; `use_qk_l2norm_in_kernel`: q and k are x / sqrt(sum(x^2) + 1e-6).
    """
    x = _activate(
        q, k, g, beta, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        use_gate_in_kernel, A_log, dt_bias, compute_dtype,
    )  # fmt: skip
    o, final_state = _recurrence(
        x.q, x.k, v, x.g, x.beta, scale, initial_state, state_v_first, cu_seqlens, compute_dtype=compute_dtype
    )
    return o, final_state if output_final_state else None


@_oracle("token", "sequence")
def _recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    *,
    compute_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    B, T, HV, V = v.shape
    q, k = (x.repeat_interleave(HV // x.shape[2], 2) for x in (q, k))
    decay = v.new_ones(B, T, HV) if g is None else g.exp()
    S = v.new_zeros(B, HV, k.shape[-1], V)
    if initial_state is not None:
        S = initial_state.mT if state_v_first else initial_state
    outputs = []
    for t in range(T):
        S = decay[:, t, :, None, None] * S
        v_new = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, None, :] @ S).squeeze(-2))
        S = S + k[:, t, :, :, None] * v_new[:, :, None, :]
        outputs.append((q[:, t, :, None, :] @ S).squeeze(-2))
    o = _scale(scale, q.shape[-1]) * torch.stack(outputs, 1) if outputs else torch.zeros_like(v)
    return o, S.mT if state_v_first else S


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:
    """(o, final_state) of `gated_delta_rule_recurrence`, computed chunk by chunk from the oracles above."""
    x = _activate(
        q, k, g, beta, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        use_gate_in_kernel, A_log, dt_bias, compute_dtype,
    )  # fmt: skip
    G = _cumulative_gate(x.g, chunk_size, cu_seqlens, compute_dtype)
    w, u, _ = chunk_gated_delta_rule_fwd_intra(x.k, v, G, x.beta, cu_seqlens, chunk_size, compute_dtype=compute_dtype)
    h, v_new, final_state = chunk_gated_delta_rule_fwd_h(
        x.k, w, u, G, None, initial_state, output_final_state, chunk_size, True, state_v_first, cu_seqlens,
        compute_dtype=compute_dtype,
    )  # fmt: skip
    assert v_new is not None
    o = chunk_fwd_o(
        x.q, x.k, v_new, h, G, None, scale, state_v_first, cu_seqlens, chunk_size, compute_dtype=compute_dtype
    )
    return o, final_state


class ChainGradients(NamedTuple):
    """Gradients of `chunk_gated_delta_rule`, each in the shape of its input; None where that input is absent."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor | None
    dbeta: Tensor
    dh0: Tensor | None
    dA_log: Tensor | None
    ddt_bias: Tensor | None


def chunk_gated_delta_rule_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    do: Tensor,
    dht: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    compute_dtype: torch.dtype = torch.float32,
) -> ChainGradients:
    """Gradients of the chain for `do [B, T, HV, V]` and the final state's `dht`, from the oracles of its stages."""
    cu, BT, dtype = cu_seqlens, chunk_size, compute_dtype
    x = _activate(
        q, k, g, beta, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        use_gate_in_kernel, A_log, dt_bias, dtype,
    )  # fmt: skip
    G = _cumulative_gate(x.g, BT, cu, dtype)
    w, u, A = chunk_gated_delta_rule_fwd_intra(x.k, v, G, x.beta, cu, BT, compute_dtype=dtype)
    h, v_new, _ = chunk_gated_delta_rule_fwd_h(
        x.k, w, u, G, None, initial_state, False, BT, True, state_v_first, cu, compute_dtype=dtype
    )
    assert v_new is not None
    dv_local = chunk_bwd_dv_local(x.q, x.k, do, G, None, None, scale, cu, BT, compute_dtype=dtype)
    dh, dh0, du = chunk_gated_delta_rule_bwd_dhu(
        x.q, x.k, w, do, dv_local, G, None, initial_state, dht, scale, state_v_first, cu, BT, compute_dtype=dtype
    )
    dq, dk, dw, dG = chunk_bwd_dqkwg(
        x.q, x.k, v_new, do, h, dh, w, G, None, du, scale, state_v_first, cu, BT, compute_dtype=dtype
    )
    assert dw is not None
    dk2, dv, dbeta, dG2 = prepare_wy_repr_bwd(x.k, v, x.beta, A, dw, du, G, cu, compute_dtype=dtype)
    dk = dk + dk2
    dg, dA_log, ddt_bias = None, None, None
    if dG is not None and dG2 is not None:
        dg = chunk_local_cumsum(dG + dG2, BT, True, None, cu, compute_dtype=dtype)
    if use_gate_in_kernel and g is not None and A_log is not None and dg is not None:
        dgate = dg.where(gdn_gate(g, A_log, dt_bias, compute_dtype=dtype) >= RESET, 0.0)
        dg, dA_log, ddt_bias = gdn_gate_bwd(g, A_log, dt_bias, dgate, compute_dtype=dtype)
    if use_beta_sigmoid_in_kernel:
        dbeta = dbeta * x.beta * (1 - beta.to(dtype).sigmoid())
    if use_qk_l2norm_in_kernel:
        dq = x.q_rstd * (dq - x.q * (x.q * dq).sum(-1, keepdim=True))
        dk = x.k_rstd * (dk - x.k * (x.k * dk).sum(-1, keepdim=True))
    return ChainGradients(dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias)
