"""Addresses: where a chunk lies, and where its time-axis operands lie in either layout.

A layout changes addresses, never shapes and never arithmetic. A time-axis tensor (`g`, `beta`, `dg`, `dbeta`) has the
logical shape `[B, T, HV]`, and `[B, T, HV, C]` where every head has a gate for each of C channels. Element
`(b, t, h, c)` of it lies at

    stride-HV     ((b * T + t) * HV + h) * C + c        stored as [B, T, HV, C]: a token's heads side by side
    T-contiguous  ((b * HV + h) * T + t) * C + c        stored as [B, HV, T, C]: a head's tokens side by side

C is 1 where there is no channel axis. A kernel reads one chunk of one head in two steps: `chunk_pointer` says where
that chunk begins, and `load_tokens` or `channels.load_channels` reads it from there, `time_axis_stride` elements from
token to token.

Packed batches have B = 1; sequence n covers the tokens `cu_seqlens[n] .. cu_seqlens[n + 1]`. Every kernel keeps three
numbers apart: `T`, the total the host passes (a stride), `length`, the tokens of one sequence (a bound), and `bos`, the
sequence's first token counted over the whole storage (a base). Token offsets inside a kernel (`i_t * BT + ...`) are
relative to `bos`. They fit 32 bits; once multiplied by a stride they may not, so an offset is cast to int64 first.

Lists that describe a packed batch may have changed since the host saw them: through memory shared with numpy, by a
custom kernel, in a graph's replay. Whatever they hold, each number read from one is brought into its bounds here, so
that no kernel reads or writes beside its tensors.
"""

import triton
import triton.language as tl


@triton.jit
def load_bounded(p_x, first, last):
    """A number of a list, int32, no less than `first` and then no more than `last`."""
    return tl.minimum(tl.maximum(tl.load(p_x).to(tl.int32), first), last)


@triton.jit
def locate_tokens(i_n, cu_seqlens, T):
    """First token and number of tokens of sequence `i_n` of a packed batch, both int32; the first is always there."""
    bos = load_bounded(cu_seqlens + i_n, 0, T)
    eos = load_bounded(cu_seqlens + i_n + 1, bos, T)
    return tl.minimum(bos, T - 1), eos - bos


@triton.jit
def locate_chunk(
    i_c,
    cu_seqlens,
    chunk_indices,
    T,
    NT,
    N,
    BT: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """The chunk with running number `i_c`: its batch row, its number in the sequence, where that lies.

    Dense batches number their chunks `i_b * NT + i_t`; packed ones list them in `chunk_indices [NT, 2]` as
    (sequence, chunk of the sequence). A chunk that its sequence does not have begins where that ends: it has no token.

    Returns:
        `(i_b, i_t, bos, length)`: batch row (0 when packed), chunk of the sequence, first token of the sequence in the
        storage (`i_b * T`, int64, when dense), tokens of the sequence; the rest int32.
    """
    if IS_VARLEN:
        i_n = load_bounded(chunk_indices + i_c * 2, 0, N - 1)
        bos, length = locate_tokens(i_n, cu_seqlens, T)
        i_t = load_bounded(chunk_indices + i_c * 2 + 1, 0, tl.cdiv(length, BT))
        i_b = 0
    else:
        i_b = i_c // NT
        i_t = i_c % NT
        bos = tl.cast(i_b, tl.int64) * T
        length = T
    return i_b, i_t, bos, length


@triton.jit
def time_axis_offset(
    i_b,
    bos,
    i_h,
    T,
    HV: tl.constexpr,
    T_CONTIG: tl.constexpr,
    C: tl.constexpr = 1,
):
    """Elements (int64) from the start of a time-axis tensor to the first token of a sequence at head `i_h`.

    `bos` counts tokens over the whole storage, so that `bos - i_b * T` is the sequence's start within its
    batch row: 0 when dense, `cu_seqlens[n]` when packed.
    """
    if T_CONTIG:
        offset = tl.cast(i_b * HV + i_h, tl.int64) * T + (bos - tl.cast(i_b, tl.int64) * T)
    else:
        offset = tl.cast(bos, tl.int64) * HV + i_h
    return offset * C


@triton.jit
def time_axis_stride(HV: tl.constexpr, T_CONTIG: tl.constexpr, C: tl.constexpr = 1):
    """Elements from one token of a head to the next: a compile-time constant, or Ascend loads element by element."""
    if T_CONTIG:
        stride: tl.constexpr = C
    else:
        stride: tl.constexpr = HV * C
    return stride


@triton.jit
def token_pointer(
    p_x,
    i_b,
    t,
    bos,
    i_h,
    T,
    HV: tl.constexpr,
    T_CONTIG: tl.constexpr,
    C: tl.constexpr = 1,
):
    """Where token `t` of a sequence lies at head `i_h` of the time-axis tensor `p_x`."""
    stride: tl.constexpr = time_axis_stride(HV, T_CONTIG, C)
    return p_x + time_axis_offset(i_b, bos, i_h, T, HV, T_CONTIG, C) + tl.cast(t, tl.int64) * stride


@triton.jit
def chunk_pointer(
    p_x,
    i_b,
    i_t,
    bos,
    i_h,
    T,
    HV: tl.constexpr,
    BT: tl.constexpr,
    T_CONTIG: tl.constexpr,
    C: tl.constexpr = 1,
):
    """Where chunk `i_t` of a sequence begins at head `i_h` of the time-axis tensor `p_x`."""
    stride: tl.constexpr = time_axis_stride(HV, T_CONTIG, C)
    return p_x + time_axis_offset(i_b, bos, i_h, T, HV, T_CONTIG, C) + tl.cast(i_t, tl.int64) * BT * stride


@triton.jit
def clear_rows(
    p_out,
    first,
    last,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Zero the tokens `first .. last` of a row-major tensor of `ROW` elements a token, spread over all programs.

    The tokens outside every sequence of a packed batch lie before `cu_seqlens[0]` and after `cu_seqlens[N]`,
    nowhere else: sequences follow one another. No chunk covers them, so nothing else would write them.
    """
    for t in range(first + tl.program_id(0), last, tl.num_programs(0)):
        for i_e in range(0, ROW, BLOCK):
            o_e = i_e + tl.arange(0, BLOCK)
            zero = tl.zeros([BLOCK], dtype=p_out.dtype.element_ty)
            tl.store(p_out + tl.cast(t, tl.int64) * ROW + o_e, zero, mask=o_e < ROW)


@triton.jit
def clear_outside_rows(
    p_out,
    cu_seqlens,
    T,
    N,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Zero every token of a packed row-major output `[1, T, ROW]` that no sequence covers."""
    clear_rows(p_out, 0, load_bounded(cu_seqlens, 0, T), ROW, BLOCK)
    clear_rows(p_out, load_bounded(cu_seqlens + N, 0, T), T, ROW, BLOCK)


@triton.jit
def clear_time_axis(
    p_out,
    first,
    last,
    T,
    HV: tl.constexpr,
    T_CONTIG: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr = 1,
):
    """Zero the tokens `first .. last` of a packed time-axis tensor, in bursts along its contiguous axis."""
    if not T_CONTIG:
        clear_rows(p_out, first, last, HV * C, BLOCK)
    elif C > 1:
        for i_h in range(HV):
            clear_rows(p_out + tl.cast(i_h, tl.int64) * T * C, first, last, C, BLOCK)
    else:
        for i_h in range(tl.program_id(0), HV, tl.num_programs(0)):
            p_head = p_out + tl.cast(i_h, tl.int64) * T
            for i_t in range(first, last, BLOCK):
                o_t = i_t + tl.arange(0, BLOCK)
                zero = tl.zeros([BLOCK], dtype=p_out.dtype.element_ty)
                tl.store(p_head + o_t, zero, mask=o_t < last)


@triton.jit
def clear_outside_time_axis(
    p_out,
    cu_seqlens,
    T,
    N,
    HV: tl.constexpr,
    T_CONTIG: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr = 1,
):
    """Zero every token of a packed time-axis output `[1, T, HV]` that no sequence covers, in either layout."""
    clear_time_axis(p_out, 0, load_bounded(cu_seqlens, 0, T), T, HV, T_CONTIG, BLOCK, C)
    clear_time_axis(p_out, load_bounded(cu_seqlens + N, 0, T), T, T, HV, T_CONTIG, BLOCK, C)


@triton.jit
def load_tokens(
    p_x,
    o_t,
    m_t,
    HV: tl.constexpr,
    T_CONTIG: tl.constexpr,
):
    """Tokens `o_t` of one head, counted from `p_x`, fp32; 0 where `m_t` does not hold."""
    stride: tl.constexpr = time_axis_stride(HV, T_CONTIG)
    return tl.load(p_x + o_t * stride, mask=m_t, other=0.0).to(tl.float32)


@triton.jit
def load_token(
    p_x,
    t,
    HV: tl.constexpr,
    T_CONTIG: tl.constexpr,
):
    """Token `t` of one head, counted from `p_x`, a scalar in fp32; it has to be there."""
    stride: tl.constexpr = time_axis_stride(HV, T_CONTIG)
    return tl.load(p_x + t * stride).to(tl.float32)


@triton.jit
def store_tokens(
    p_x,
    o_t,
    b_x,
    m_t,
    HV: tl.constexpr,
    T_CONTIG: tl.constexpr,
):
    """Store tokens `o_t` of one head, counted from `p_x`, where `m_t` holds."""
    stride: tl.constexpr = time_axis_stride(HV, T_CONTIG)
    tl.store(p_x + o_t * stride, b_x.to(p_x.dtype.element_ty), mask=m_t)


@triton.jit
def load_time_axis(
    p_x,
    o_t,
    m_t,
    HV: tl.constexpr,
    T_CONTIG: tl.constexpr,
):
    """What `load_tokens` reads, in the dtype of `p_x`, for kernels that have no memory to spare on Ascend."""
    if T_CONTIG:
        b_x = tl.load(p_x + o_t, mask=m_t, other=0.0)
    else:
        # bishengir 1.2.0 gives each element of a strided load 32 bytes of on-chip memory, and then each element of
        # what is computed from it. The sum over rows of 32 bytes, of which the first column is read, stops that.
        o_x = tl.arange(0, 8)
        b_x = tl.load(p_x + o_t[:, None] * HV + o_x[None, :], mask=m_t[:, None] & (o_x == 0)[None, :], other=0.0)
        b_x = tl.sum(b_x, axis=1)
    return b_x


@triton.jit
def store_time_axis(
    p_x,
    o_t,
    b_x,
    m_t,
    HV: tl.constexpr,
    T_CONTIG: tl.constexpr,
):
    """What `store_tokens` does, for kernels that have no memory to spare on Ascend."""
    b_x = b_x.to(p_x.dtype.element_ty)
    if T_CONTIG:
        tl.store(p_x + o_t, b_x, mask=m_t)
    else:
        # As above, and then each element of the tile that it was summed from: only the first column is stored.
        o_x = tl.arange(0, 8)
        b_x = tl.broadcast_to(b_x[:, None], [b_x.shape[0], 8])
        tl.store(p_x + o_t[:, None] * HV + o_x[None, :], b_x, mask=m_t[:, None] & (o_x == 0)[None, :])


@triton.jit
def load_chunk(
    p_x,
    i_b,
    i_t,
    bos,
    i_h,
    o_c,
    m_t,
    T,
    HV: tl.constexpr,
    BT: tl.constexpr,
    T_CONTIG: tl.constexpr,
):
    """Tokens `o_c` of chunk `i_t` at head `i_h` of a time-axis tensor, fp32; 0 where `m_t` does not hold."""
    return load_tokens(chunk_pointer(p_x, i_b, i_t, bos, i_h, T, HV, BT, T_CONTIG), o_c, m_t, HV, T_CONTIG)


@triton.jit
def store_chunk(
    p_x,
    b_x,
    i_b,
    i_t,
    bos,
    i_h,
    o_c,
    m_t,
    T,
    HV: tl.constexpr,
    BT: tl.constexpr,
    T_CONTIG: tl.constexpr,
    IN_COLUMNS: tl.constexpr,
):
    """Store tokens `o_c` of chunk `i_t` at head `i_h`: with IN_COLUMNS as `store_time_axis`, else as `store_tokens`."""
    p_chunk = chunk_pointer(p_x, i_b, i_t, bos, i_h, T, HV, BT, T_CONTIG)
    if IN_COLUMNS:
        store_time_axis(p_chunk, o_c, b_x, m_t, HV, T_CONTIG)
    else:
        store_tokens(p_chunk, o_c, b_x, m_t, HV, T_CONTIG)


@triton.jit
def load_columns(
    p_x,
    o_r,
    o_e,
    m_r,
    STRIDE: tl.constexpr,
    E: tl.constexpr,
    BE: tl.constexpr,
    WIDEST: tl.constexpr,
):
    """Columns `o_e` of the rows `o_r`, `STRIDE` elements apart, counted from `p_x`; 0 outside `m_r` and from `E` on.

    `o_e` are `BE` columns of a loop over `WIDEST` columns: `E`, or more where one loop serves rows of two widths. Where
    that loop never leaves the row, no mask is formed over columns.
    """
    if E % BE == 0 and WIDEST <= E:
        m_x = m_r[:, None]
    else:
        m_x = m_r[:, None] & (o_e < E)[None, :]
    return tl.load(p_x + o_r[:, None] * STRIDE + o_e[None, :], mask=m_x, other=0.0)
