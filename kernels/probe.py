"""Small questions to this Triton: whether it adds, multiplies and rounds, and where the address helpers point."""

import triton
import triton.language as tl

from .channels import load_channels, store_channels
from .time_axis import chunk_pointer, clear_outside_time_axis, locate_chunk, time_axis_offset, time_axis_stride


@triton.jit(do_not_specialize=["n"])
def add_probe(
    x,
    y,
    total,
    n,
    BLOCK: tl.constexpr,
):
    """total = x + y for vectors of `n` elements, `BLOCK` of them in each program."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    tl.store(total + o, tl.load(x + o, mask=m) + tl.load(y + o, mask=m), mask=m)


@triton.jit
def dot_probe(
    a,
    b,
    product,
    stored,
    N: tl.constexpr,
):
    """product = a @ b for row-major `[N, N]` tiles, stored a second time in the dtype of `stored`."""
    o = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    b_product = tl.dot(tl.load(a + o), tl.load(b + o), input_precision="ieee")
    tl.store(product + o, b_product)
    tl.store(stored + o, b_product.to(stored.dtype.element_ty))


@triton.jit
def cast_probe(
    x,
    stored,
    N: tl.constexpr,
):
    """stored = x, cast to the dtype of `stored`."""
    o = tl.arange(0, N)
    tl.store(stored + o, tl.load(x + o).to(stored.dtype.element_ty))


@triton.jit
def offset_probe(
    found,
    i_b,
    bos,
    i_h,
    T,
    HV: tl.constexpr,
    T_CONTIG: tl.constexpr,
    C: tl.constexpr,
):
    """Where a head of a sequence starts in a time-axis tensor, and the elements between two of its tokens."""
    tl.store(found, time_axis_offset(i_b, bos, i_h, T, HV, T_CONTIG, C))
    tl.store(found + 1, time_axis_stride(HV, T_CONTIG, C))


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def channel_probe(
    x,
    out,
    cu_seqlens,
    chunk_indices,
    T,
    NT,
    N,
    TASKS,
    HV: tl.constexpr,
    C: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    X_T_CONTIG: tl.constexpr,
    OUT_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """out = x for `[B, T, HV, C]` tensors, each in either layout, chunk by chunk; 0 outside the sequences."""
    if IS_VARLEN:
        clear_outside_time_axis(out, cu_seqlens, T, N, HV, OUT_T_CONTIG, BT, C)
    x_stride: tl.constexpr = C if X_T_CONTIG else HV * C
    out_stride: tl.constexpr = C if OUT_T_CONTIG else HV * C
    o_t = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_h = i_task % HV
        i_b, i_t, bos, length = locate_chunk(i_task // HV, cu_seqlens, chunk_indices, T, NT, N, BT, IS_VARLEN)
        m_t = i_t * BT + o_t < length
        p_x = chunk_pointer(x, i_b, i_t, bos, i_h, T, HV, BT, X_T_CONTIG, C)
        p_out = chunk_pointer(out, i_b, i_t, bos, i_h, T, HV, BT, OUT_T_CONTIG, C)
        for i_c in range(0, C, BC):
            o_c = i_c + tl.arange(0, BC)
            b_x = load_channels(p_x, o_t, o_c, m_t, C, x_stride)
            store_channels(p_out, o_t, o_c, m_t, b_x, C, out_stride)
