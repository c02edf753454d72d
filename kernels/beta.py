"""`beta` on its way into the stages and its gradient on the way out: activated, widened and turned in one pass.

    y     = R * sigmoid(beta)  or  beta                  R = 1, or 2 where eigenvalues may be negative
    dbeta = dy * y * (1 - y / R)  or  dy

A tile is read in plain bursts of the layout it lies in and turned on chip where the other is wanted, so that a
relayout costs no pass of its own.
"""

import triton
import triton.language as tl

from .gate import sigmoid
from .local_cumsum import load_head_block, store_head_block


@triton.jit(do_not_specialize=["T", "ROW_BLOCKS", "TASKS"])
def beta_fwd(
    beta,
    y,
    T,
    ROW_BLOCKS,
    TASKS,
    HV: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    RANGE: tl.constexpr,
    USE_SIGMOID: tl.constexpr,
    BETA_T_CONTIG: tl.constexpr,
    Y_T_CONTIG: tl.constexpr,
):
    """beta `[B, T, HV]` of any float type, writes y, alike.

    A task is BT tokens of BH heads; ROW_BLOCKS = cdiv(T, BT), TASKS = B * ROW_BLOCKS * cdiv(HV, BH).
    """
    head_blocks: tl.constexpr = (HV + BH - 1) // BH
    o_t = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_h = i_task % head_blocks * BH
        o_h = tl.arange(0, BH)
        i_b = i_task // head_blocks // ROW_BLOCKS
        bos = tl.cast(i_b, tl.int64) * T
        first = i_task // head_blocks % ROW_BLOCKS * BT
        b_y = load_head_block(beta, i_b, bos, first, T, o_t, i_h, o_h, T, HV, BETA_T_CONTIG)
        if USE_SIGMOID:
            b_y = RANGE * sigmoid(b_y)
        store_head_block(y, b_y, i_b, bos, first, T, o_t, i_h, o_h, T, HV, Y_T_CONTIG)


@triton.jit(do_not_specialize=["T", "ROW_BLOCKS", "TASKS"])
def beta_bwd(
    y,
    dy,
    dbeta,
    T,
    ROW_BLOCKS,
    TASKS,
    HV: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    RANGE: tl.constexpr,
    USE_SIGMOID: tl.constexpr,
    Y_T_CONTIG: tl.constexpr,
    DY_T_CONTIG: tl.constexpr,
    DBETA_T_CONTIG: tl.constexpr,
):
    """y, dy `[B, T, HV]`, writes dbeta, alike; tasks as in `beta_fwd`."""
    head_blocks: tl.constexpr = (HV + BH - 1) // BH
    o_t = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_h = i_task % head_blocks * BH
        o_h = tl.arange(0, BH)
        i_b = i_task // head_blocks // ROW_BLOCKS
        bos = tl.cast(i_b, tl.int64) * T
        first = i_task // head_blocks % ROW_BLOCKS * BT
        b_dbeta = load_head_block(dy, i_b, bos, first, T, o_t, i_h, o_h, T, HV, DY_T_CONTIG)
        if USE_SIGMOID:
            b_y = load_head_block(y, i_b, bos, first, T, o_t, i_h, o_h, T, HV, Y_T_CONTIG)
            # Outside every sequence dy is 0 while beta may hold anything, also NaN.
            b_dbeta = tl.where(b_dbeta == 0.0, 0.0, b_dbeta * b_y * (1.0 - b_y / RANGE))
        store_head_block(dbeta, b_dbeta, i_b, bos, first, T, o_t, i_h, o_h, T, HV, DBETA_T_CONTIG)
