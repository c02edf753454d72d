"""The gate of Gated DeltaNet, fused with its cumulative sum, and its gradients.

    gate[t] = -exp(A_log) * softplus(g[t] + dt_bias)                      natural log, per value head
    out[t]  = scale * (sum of gate[s], s <= t in the chunk)

    dg[t]   = -exp(A_log) * sigmoid(g[t] + dt_bias) * dgate[t]
    dA_log  = sum of dgate[t] * gate[t],    ddt_bias = sum of dg[t]       over all tokens

The sums over tokens are written once per program, without atomics; whoever launches adds those rows.
"""

import triton
import triton.language as tl

from .local_cumsum import RESET, bounded, load_head_block, store_head_block, triangular_sum
from .time_axis import clear_outside_time_axis, locate_chunk


@triton.jit
def sigmoid(b_x):
    """1 / (1 + exp(-x)), without overflow where x is far below 0."""
    b_e = tl.exp(-tl.abs(b_x))
    return tl.where(b_x >= 0.0, 1.0, b_e) / (1.0 + b_e)


@triton.jit
def softplus(b_x):
    """log(1 + exp(x)), accurate relative to itself also where exp(x) vanishes beside 1."""
    # Not a minimum, which may swallow NaN.
    b_e = tl.exp(tl.where(b_x > 20.0, 20.0, b_x))
    b_s = tl.where(b_e < 0.0625, b_e, 0.0)  # its powers overflow elsewhere
    b_series = b_s * (1.0 - b_s * (0.5 - b_s * (1.0 / 3 - b_s * (0.25 - b_s * (0.2 - b_s * (1.0 / 6))))))
    b_y = tl.where(b_e < 0.0625, b_series, tl.log(1.0 + b_e))
    return tl.where(b_x > 20.0, b_x, b_y)


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def gdn_gate_chunk_cumsum(
    g,
    A_log,
    dt_bias,
    out,
    cu_seqlens,
    chunk_indices,
    scale,
    T,
    NT,
    N,
    TASKS,
    HV: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    USE_DT_BIAS: tl.constexpr,
    RESETS: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    OUT_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """g `[B, T, HV]` raw, A_log and dt_bias `[HV]`, writes out `[B, T, HV]`; TASKS = chunks * cdiv(HV, BH).

    With RESETS the gate is `bounded`.
    """
    if IS_VARLEN:
        clear_outside_time_axis(out, cu_seqlens, T, N, HV, OUT_T_CONTIG, BH)
    head_blocks: tl.constexpr = (HV + BH - 1) // BH
    o_t = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_h = i_task % head_blocks * BH
        o_h = tl.arange(0, BH)
        i_b, i_t, bos, length = locate_chunk(i_task // head_blocks, cu_seqlens, chunk_indices, T, NT, N, BT, IS_VARLEN)
        b_x = load_head_block(g, i_b, bos, i_t * BT, length, o_t, i_h, o_h, T, HV, G_T_CONTIG)
        if USE_DT_BIAS:
            b_x += tl.load(dt_bias + i_h + o_h, mask=i_h + o_h < HV, other=0.0).to(tl.float32)[:, None]
        b_rate = -tl.exp(tl.load(A_log + i_h + o_h, mask=i_h + o_h < HV, other=0.0).to(tl.float32))
        b_gate = b_rate[:, None] * softplus(b_x)
        if RESETS:
            b_gate = bounded(b_gate)
        b_out = triangular_sum(b_gate, o_t, False, DOT_PRECISION)
        store_head_block(out, b_out * scale, i_b, bos, i_t * BT, length, o_t, i_h, o_h, T, HV, OUT_T_CONTIG)


@triton.jit(do_not_specialize=["T", "ROW_BLOCKS", "TASKS"])
def gdn_gate_bwd(
    g,
    A_log,
    dt_bias,
    dgate,
    dg,
    sums,
    T,
    ROW_BLOCKS,
    TASKS,
    HV: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    USE_DT_BIAS: tl.constexpr,
    RESETS: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    DGATE_T_CONTIG: tl.constexpr,
    DG_T_CONTIG: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """g, dgate `[B, T, HV]`, A_log and dt_bias `[HV]`; writes dg `[B, T, HV]` and sums `[programs, 2, HV]` in fp32.

    Row 0 of `sums` belongs to dA_log, row 1 to ddt_bias. A task is BT tokens; ROW_BLOCKS = cdiv(T, BT) and
    TASKS = B * ROW_BLOCKS. With RESETS nothing flows through a gate below RESET.
    """
    o_t = tl.arange(0, BT)
    for i_h in range(0, HV, BH):
        o_h = tl.arange(0, BH)
        m_h = i_h + o_h < HV
        b_rate = -tl.exp(tl.load(A_log + i_h + o_h, mask=m_h, other=0.0).to(tl.float32))
        b_dA = tl.zeros([BH, BT], dtype=tl.float32)
        b_dbias = tl.zeros([BH, BT], dtype=tl.float32)
        for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
            i_b = i_task // ROW_BLOCKS
            bos = tl.cast(i_b, tl.int64) * T
            first = i_task % ROW_BLOCKS * BT
            b_x = load_head_block(g, i_b, bos, first, T, o_t, i_h, o_h, T, HV, G_T_CONTIG)
            if USE_DT_BIAS:
                b_x += tl.load(dt_bias + i_h + o_h, mask=m_h, other=0.0).to(tl.float32)[:, None]
            b_dgate = load_head_block(dgate, i_b, bos, first, T, o_t, i_h, o_h, T, HV, DGATE_T_CONTIG)
            if RESETS:
                # Rounding is all that sums of later tokens leave there, and the gate's size would magnify it.
                b_dgate = tl.where(b_rate[:, None] * softplus(b_x) < RESET, 0.0, b_dgate)
            # Outside every sequence dgate is 0 while the input may hold anything, also NaN.
            b_x = tl.where(b_dgate == 0.0, 0.0, b_x)
            b_dg = b_dgate * b_rate[:, None] * sigmoid(b_x)
            store_head_block(dg, b_dg, i_b, bos, first, T, o_t, i_h, o_h, T, HV, DG_T_CONTIG)
            b_dA += b_dgate * b_rate[:, None] * softplus(b_x)
            b_dbias += b_dg
        # A product with ones adds in one order whatever the layouts are; tl.sum would follow the tile's.
        b_ones = tl.full([BT, 16], 1.0, dtype=tl.float32)
        p_sums = sums + tl.program_id(0) * (2 * HV) + i_h + o_h[:, None] + tl.arange(0, 16)[None, :]
        m_first = m_h[:, None] & (tl.arange(0, 16) == 0)[None, :]
        tl.store(p_sums, tl.dot(b_dA, b_ones, input_precision=DOT_PRECISION), mask=m_first)
        tl.store(p_sums + HV, tl.dot(b_dbias, b_ones, input_precision=DOT_PRECISION), mask=m_first)
