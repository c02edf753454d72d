"""Gradients of a chunk's output with respect to its scores and, through them, to its values.

    dA = scale * tril(do v^T)        dv = tril(A)^T do

A has the scale inside, dA is the gradient of the score without it. One task is one chunk of one value head.
"""

import triton
import triton.language as tl

from .channels import load_channels, store_channels
from .time_axis import clear_outside_rows, locate_chunk


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def chunk_kda_bwd_dAv(
    v,
    do,
    A,
    dA,
    dv,
    cu_seqlens,
    chunk_indices,
    scale,
    T,
    NT,
    N,
    TASKS,
    HV: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """v, do `[B, T, HV, V]`, A `[B, T, HV, BT]`; writes dA `[B, T, HV, BT]` and dv `[B, T, HV, V]`.

    TASKS = chunks * HV. What A holds above the diagonal is not used.
    """
    if IS_VARLEN:
        clear_outside_rows(dA, cu_seqlens, T, N, HV * BT, BT)
        clear_outside_rows(dv, cu_seqlens, T, N, HV * V, BV)
    o_t = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_h = i_task % HV
        _, i_t, bos, length = locate_chunk(i_task // HV, cu_seqlens, chunk_indices, T, NT, N, BT, IS_VARLEN)
        row = tl.cast(bos + i_t * BT, tl.int64) * HV + i_h
        m_t = i_t * BT + o_t < length
        b_dA = tl.zeros([BT, BT], dtype=tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            b_v = load_channels(v + row * V, o_t, o_v, m_t, V, HV * V)
            b_do = load_channels(do + row * V, o_t, o_v, m_t, V, HV * V)
            b_dA += tl.dot(b_do, tl.trans(b_v), input_precision=DOT_PRECISION)
            b_A = load_channels(A + row * BT, o_t, o_t, m_t, BT, HV * BT)
            b_A = tl.where(o_t[:, None] >= o_t[None, :], b_A, 0.0).to(b_A.dtype)
            # do again, which was a left operand: Ascend's compiler may have reused its memory. Transposed, so that the
            # computed tile is the right operand: Triton 3.4 to 3.7.0 on Hopper gets some left ones wrong.
            b_do = load_channels(do + row * V, o_t, o_v, m_t, V, HV * V)
            b_dv = tl.dot(tl.trans(b_do), b_A, input_precision=DOT_PRECISION)
            store_channels(dv + row * V, o_t, o_v, m_t, tl.trans(b_dv), V, HV * V)
        b_dA = tl.where(o_t[:, None] >= o_t[None, :], b_dA * scale, 0.0)
        store_channels(dA + row * BT, o_t, o_t, m_t, b_dA, BT, HV * BT)
