"""The gate of Kimi Delta Attention, one for each key channel, with its cumulative sum in each chunk, and its gradients.

    softplus    gate = -exp(A_log) * softplus(x + dt_bias)
    bounded     gate = lower_bound * sigmoid(exp(A_log) * (x + dt_bias))        lower_bound < 0
    plain       gate = x

    out[t] = scale * (sum of gate[s], s <= t, or s >= t when reversed; s and t in one chunk)      or gate[t] itself

    softplus    dx = -exp(A_log) * sigmoid(x + dt_bias) * dgate                      dA_log = sum of dgate * gate
    bounded     dx = dgate * lower_bound * s (1 - s) * exp(A_log), s the sigmoid     dA_log = sum of dx * (x + dt_bias)
    both        ddt_bias = sum of dx over all tokens

Gates are natural logarithms; A_log has one element a value head, dt_bias one a channel. 1 - s is the sigmoid of the
negative: near a bound the difference would have no digits left. The sums over tokens are written once per program,
without atomics; whoever launches adds those rows.
"""

import triton
import triton.language as tl

from .channels import load_channels, store_channels
from .gate import sigmoid, softplus
from .local_cumsum import RESET, bounded
from .time_axis import chunk_pointer, clear_outside_time_axis, locate_chunk


@triton.jit
def bf16_parts(b_x):
    """A tile in fp32 as a sum of three in bf16, 8 bits each: a matrix unit then adds up all 24 bits of a number.

    Three products of tf32 would leave out two of them.
    """
    b_high = b_x.to(tl.bfloat16)
    b_rest = b_x - b_high.to(tl.float32)
    b_middle = b_rest.to(tl.bfloat16)
    return b_high, b_middle, (b_rest - b_middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def column_sums(
    b_weights,
    b_x,
    SPLIT: tl.constexpr,
):
    """The product of a matrix of zeros and ones with a tile in fp32, in `bf16_parts` of it with SPLIT."""
    if SPLIT:
        b_ones = b_weights.to(tl.bfloat16)
        b_high, b_middle, b_low = bf16_parts(b_x)
        b_out = tl.dot(b_ones, b_low)
        b_out = tl.dot(b_ones, b_middle, b_out)
        b_out = tl.dot(b_ones, b_high, b_out)
    else:
        b_out = tl.dot(b_weights, b_x, input_precision="ieee")
    return b_out


@triton.jit
def row_sums_of_parts(b_x):
    """The sum of each row of a tile in fp32, as products of `bf16_parts`; in one order whatever the layouts are."""
    b_ones = tl.full([b_x.shape[1], 16], 1.0, dtype=tl.float32).to(tl.bfloat16)
    b_high, b_middle, b_low = bf16_parts(b_x)
    b_out = tl.dot(b_low, b_ones)
    b_out = tl.dot(b_middle, b_ones, b_out)
    b_out = tl.dot(b_high, b_ones, b_out)
    return tl.sum(tl.where((tl.arange(0, 16) == 0)[None, :], b_out, 0.0), axis=1)


@triton.jit
def _rate(
    A_log,
    i_h,
    m_k,
    USE_A_LOG: tl.constexpr,
):
    """exp(A_log) of a head, in every channel; 1 without A_log."""
    b_rate = m_k.to(tl.float32)
    if USE_A_LOG:
        # A vector: Ascend sends a scalar's exp through global memory.
        b_rate = tl.exp(tl.load(A_log + i_h).to(tl.float32) * b_rate)
    return b_rate


@triton.jit
def _biased(
    b_x,
    dt_bias,
    i_h,
    o_k,
    K: tl.constexpr,
    USE_DT_BIAS: tl.constexpr,
):
    """The raw gate in fp32 with its bias."""
    b_x = b_x.to(tl.float32)
    if USE_DT_BIAS:
        b_x += tl.load(dt_bias + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
    return b_x


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def kda_gate_chunk_cumsum(
    g,
    A_log,
    dt_bias,
    out,
    cu_seqlens,
    chunk_indices,
    scale,
    lower_bound,
    T,
    NT,
    N,
    TASKS,
    HV: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    USE_A_LOG: tl.constexpr,
    USE_DT_BIAS: tl.constexpr,
    CUMULATIVE: tl.constexpr,
    REVERSE: tl.constexpr,
    RESETS: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    OUT_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """g `[B, T, HV, K]`, A_log `[HV]`, dt_bias `[HV, K]`; writes out `[B, T, HV, K]`, each gate in either layout.

    GATE is "plain", "softplus" or "bounded". One task is one chunk of one head and BK channels: TASKS = chunks * HV *
    cdiv(K, BK). With RESETS a gate is `bounded`, so that later tokens keep their digits. Without CUMULATIVE out is the
    gate of each token.
    """
    if IS_VARLEN:
        clear_outside_time_axis(out, cu_seqlens, T, N, HV, OUT_T_CONTIG, BK, K)
    NK: tl.constexpr = (K + BK - 1) // BK
    g_stride: tl.constexpr = K if G_T_CONTIG else HV * K
    out_stride: tl.constexpr = K if OUT_T_CONTIG else HV * K
    o_t = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_ch = i_task // NK
        i_h = i_ch % HV
        i_b, i_t, bos, length = locate_chunk(i_ch // HV, cu_seqlens, chunk_indices, T, NT, N, BT, IS_VARLEN)
        m_t = i_t * BT + o_t < length
        o_k = i_task % NK * BK + tl.arange(0, BK)
        p_g = chunk_pointer(g, i_b, i_t, bos, i_h, T, HV, BT, G_T_CONTIG, K)
        b_x = _biased(load_channels(p_g, o_t, o_k, m_t, K, g_stride), dt_bias, i_h, o_k, K, USE_DT_BIAS)
        if GATE != "plain":
            b_rate = _rate(A_log, i_h, o_k < K, USE_A_LOG)[None, :]
            if GATE == "softplus":
                b_x = -b_rate * softplus(b_x)
            else:
                b_x = lower_bound * sigmoid(b_rate * b_x)
        if RESETS:
            b_x = bounded(b_x)
        if CUMULATIVE:
            # Rows past the end come after all that are there, but before them when reversed.
            b_x = tl.where(m_t[:, None], b_x, 0.0)
            if REVERSE:
                m_sum = o_t[:, None] <= o_t[None, :]
            else:
                m_sum = o_t[:, None] >= o_t[None, :]
            b_x = column_sums(tl.where(m_sum, 1.0, 0.0), b_x, SPLIT)
        p_out = chunk_pointer(out, i_b, i_t, bos, i_h, T, HV, BT, OUT_T_CONTIG, K)
        store_channels(p_out, o_t, o_k, m_t, b_x * scale, K, out_stride)


@triton.jit(do_not_specialize=["T", "ROW_BLOCKS", "BLOCKS", "SEGMENT", "TASKS"])
def kda_gate_bwd(
    g,
    A_log,
    dt_bias,
    dgate,
    dg,
    sums,
    lower_bound,
    T,
    ROW_BLOCKS,
    BLOCKS,
    SEGMENT,
    TASKS,
    HV: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    USE_A_LOG: tl.constexpr,
    USE_DT_BIAS: tl.constexpr,
    RESETS: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    DGATE_T_CONTIG: tl.constexpr,
    DG_T_CONTIG: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """g and dgate `[B, T, HV, K]`; writes dg `[B, T, HV, K]` and sums `[segments, 2, HV, K]` in fp32.

    Row 0 of `sums` belongs to dA_log, channel by channel, row 1 to ddt_bias. One task is SEGMENT blocks of BT tokens
    of one head and BK channels; ROW_BLOCKS = cdiv(T, BT) blocks a batch row, BLOCKS of all, TASKS = segments * HV *
    cdiv(K, BK). With RESETS nothing flows through a gate below RESET.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    g_stride: tl.constexpr = K if G_T_CONTIG else HV * K
    dgate_stride: tl.constexpr = K if DGATE_T_CONTIG else HV * K
    dg_stride: tl.constexpr = K if DG_T_CONTIG else HV * K
    o_t = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_h = i_task // NK % HV
        i_s = i_task // NK // HV
        o_k = i_task % NK * BK + tl.arange(0, BK)
        b_rate = _rate(A_log, i_h, o_k < K, USE_A_LOG)[None, :]
        b_dA = tl.zeros([BT, BK], dtype=tl.float32)
        b_dbias = tl.zeros([BT, BK], dtype=tl.float32)
        for i_block in range(i_s * SEGMENT, tl.minimum(i_s * SEGMENT + SEGMENT, BLOCKS)):
            i_b = i_block // ROW_BLOCKS
            i_t = i_block % ROW_BLOCKS
            bos = tl.cast(i_b, tl.int64) * T
            m_t = i_t * BT + o_t < T
            p_g = chunk_pointer(g, i_b, i_t, bos, i_h, T, HV, BT, G_T_CONTIG, K)
            b_x = _biased(load_channels(p_g, o_t, o_k, m_t, K, g_stride), dt_bias, i_h, o_k, K, USE_DT_BIAS)
            p_dgate = chunk_pointer(dgate, i_b, i_t, bos, i_h, T, HV, BT, DGATE_T_CONTIG, K)
            b_dgate = load_channels(p_dgate, o_t, o_k, m_t, K, dgate_stride).to(tl.float32)
            if GATE == "softplus":
                if RESETS:
                    # Rounding is all that sums of later tokens leave there, and the gate's size would magnify it.
                    b_dgate = tl.where(-b_rate * softplus(b_x) < RESET, 0.0, b_dgate)
                # Outside every sequence dgate is 0 while the input may hold anything, also NaN.
                b_x = tl.where(b_dgate == 0.0, 0.0, b_x)
                b_dx = -b_dgate * b_rate * sigmoid(b_x)
                b_dA -= b_dgate * b_rate * softplus(b_x)
            else:
                b_x = tl.where(b_dgate == 0.0, 0.0, b_x)
                b_dx = b_dgate * lower_bound * sigmoid(b_rate * b_x) * sigmoid(-b_rate * b_x) * b_rate
                b_dA += b_dx * b_x
            p_dg = chunk_pointer(dg, i_b, i_t, bos, i_h, T, HV, BT, DG_T_CONTIG, K)
            store_channels(p_dg, o_t, o_k, m_t, b_dx, K, dg_stride)
            b_dbias += b_dx
        # A product with ones adds in one order whatever the layouts are; tl.sum would follow the tile's.
        b_ones = tl.full([16, BT], 1.0, dtype=tl.float32)
        o_r = tl.arange(0, 16)
        p_sums = sums + (tl.cast(i_s, tl.int64) * (2 * HV) + i_h) * K
        store_channels(p_sums, o_r, o_k, o_r == 0, column_sums(b_ones, b_dA, SPLIT), K, K)
        store_channels(p_sums + HV * K, o_r, o_k, o_r == 0, column_sums(b_ones, b_dbias, SPLIT), K, K)
