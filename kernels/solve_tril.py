"""The inverse of a chunk's unit lower triangular system.

    X = (I + M)^-1        M strictly lower triangular, [BT, BT], one per chunk and value head

`M` is cut into blocks of 16. A diagonal block is inverted by itself, and the others follow row by row from

    X[i, j] = -X[i, i] * (sum of M[i, l] X[l, j], j <= l < i)

which is block forward substitution: as stable as the scalar one, where a Neumann series `(I - M)(I + M^2)(I + M^4)...`
is not (its powers grow like binomials for equal keys and cancel). All of it happens in fp32.

A diagonal block is inverted in one of two ways. On Ascend row by row on the vector unit. On a GPU by the same
recursion on halves, `X' = X - X M_off X` with `M_off` the part of `M` that links two neighbouring blocks already
inverted: two products for each doubling, and one warp can keep one head's block to itself.
"""

import triton
import triton.language as tl

from .time_axis import clear_outside_rows, locate_chunk


@triton.jit
def product(
    b_x,
    b_y,
    DOT_PRECISION: tl.constexpr,
):
    """The product of two fp32 tiles.

    "bf16x3" adds three products of bf16 halves (16 bits of mantissa survive): a third of the instructions of Triton's
    own modes, which split an operand again for each use and look for infinities. Enough where the result is rounded
    to 8 or 11 bits.
    """
    if DOT_PRECISION == "bf16x3":
        b_x_high = b_x.to(tl.bfloat16)
        b_y_high = b_y.to(tl.bfloat16)
        b_x_low = (b_x - b_x_high.to(tl.float32)).to(tl.bfloat16)
        b_y_low = (b_y - b_y_high.to(tl.float32)).to(tl.bfloat16)
        b_out = tl.dot(b_x_low, b_y_high)
        b_out = tl.dot(b_x_high, b_y_low, b_out)
        b_out = tl.dot(b_x_high, b_y_high, b_out)
    else:
        b_out = tl.dot(b_x, b_y, input_precision=DOT_PRECISION)
    return b_out


@triton.jit
def invert_by_halves(
    b_M,
    DOT_PRECISION: tl.constexpr,
):
    """(I + M)^-1 of blocks `[16, 16]` or `[heads, 16, 16]`; reads `M` below the diagonal only."""
    o_c = tl.arange(0, 16)
    b_X = tl.where(o_c[:, None] == o_c[None, :], 1.0, 0.0)
    for level in tl.static_range(4):
        # Links between neighbouring blocks of 2**level rows: one pair, not one block, and below the diagonal.
        m_pair = (o_c >> (level + 1))[:, None] == (o_c >> (level + 1))[None, :]
        m_off = m_pair & ((o_c >> level)[:, None] > (o_c >> level)[None, :])
        b_off = tl.where(m_off, b_M, 0.0)
        if level == 0:
            b_X = b_X - b_off
        else:
            b_X = b_X - product(b_X, product(b_off, b_X, DOT_PRECISION), DOT_PRECISION)
    return b_X


@triton.jit
def invert_by_rows(b_M):
    """(I + M)^-1 of a block `[16, 16]` by substitution; reads `M` below the diagonal only.

    It solves the transposed system from its last row up: Ascend's compiler gives each of its two vector cores half of
    the columns, which are rows of the result, so that each stores whole rows.
    """
    o_c = tl.arange(0, 16)
    b_M = tl.trans(tl.where(o_c[:, None] > o_c[None, :], b_M, 0.0))
    b_X = tl.where(o_c[:, None] == o_c[None, :], 1.0, 0.0)
    for i in range(1, 16):
        # A row is taken and written by products with 0 and 1: Ascend's compiler selects row by row instead.
        b_i = tl.where(o_c == 15 - i, 1.0, 0.0)
        b_row = tl.sum(b_M * b_i[:, None], axis=0)
        b_row = tl.sum(b_row[:, None] * b_X, axis=0)
        b_X -= b_i[:, None] * b_row[None, :]
    return tl.trans(b_X)


@triton.jit
def invert_block(
    b_M,
    BY_ROWS: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """(I + M)^-1 of diagonal blocks."""
    if BY_ROWS:
        b_X = invert_by_rows(b_M)
    else:
        b_X = invert_by_halves(b_M, DOT_PRECISION)
    return b_X


@triton.jit
def block_addresses(
    p_A,
    i: tl.constexpr,
    j: tl.constexpr,
    i_h,
    length,
    HV: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    """Pointers and mask of block (i, j) of head block `i_h`: `[BH, 16, 16]`, or `[16, 16]` where BH is 1.

    Rows from `length` on and heads from HV on are masked.
    """
    o_r = i * 16 + tl.arange(0, 16)
    o_c = j * 16 + tl.arange(0, 16)
    p_A = p_A + o_r[:, None] * (HV * BT) + o_c[None, :]
    m_A = (o_r < length)[:, None] & (o_c < BT)[None, :]
    if BH == 1:
        p_A = p_A + i_h * BT
    else:
        o_h = i_h * BH + tl.arange(0, BH)
        p_A = p_A[None, :, :] + o_h[:, None, None] * BT
        m_A = m_A[None, :, :] & (o_h < HV)[:, None, None]
    return p_A, m_A


@triton.jit
def load_block(
    p_A,
    i: tl.constexpr,
    j: tl.constexpr,
    i_h,
    length,
    HV: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    """Block (i, j) in fp32, 0 where masked."""
    p_A, m_A = block_addresses(p_A, i, j, i_h, length, HV, BT, BH)
    return tl.load(p_A, mask=m_A, other=0.0).to(tl.float32)


@triton.jit
def store_block(
    p_X,
    b_X,
    i: tl.constexpr,
    j: tl.constexpr,
    i_h,
    length,
    HV: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    """Writes what `load_block` reads."""
    dtype: tl.constexpr = p_X.dtype.element_ty
    p_X, m_X = block_addresses(p_X, i, j, i_h, length, HV, BT, BH)
    tl.store(p_X, b_X.to(dtype), mask=m_X)


@triton.jit
def solve_blocks(
    p_X,
    b_00,
    b_10,
    b_11,
    b_20,
    b_21,
    b_22,
    b_30,
    b_31,
    b_32,
    b_33,
    i_h,
    length,
    HV: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    BY_ROWS: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """Writes X for the blocks of M of head block `i_h`; those past BT are not read."""
    for i in tl.static_range(BT // 16):
        for j in tl.static_range(i + 1, BT // 16):
            store_block(p_X, tl.zeros_like(b_00), i, j, i_h, length, HV, BT, BH)
    b_00 = invert_block(b_00, BY_ROWS, DOT_PRECISION)
    store_block(p_X, b_00, 0, 0, i_h, length, HV, BT, BH)
    if BT > 16:
        b_11 = invert_block(b_11, BY_ROWS, DOT_PRECISION)
        b_10 = -product(b_11, product(b_10, b_00, DOT_PRECISION), DOT_PRECISION)
        store_block(p_X, b_11, 1, 1, i_h, length, HV, BT, BH)
        store_block(p_X, b_10, 1, 0, i_h, length, HV, BT, BH)
    if BT > 32:
        b_22 = invert_block(b_22, BY_ROWS, DOT_PRECISION)
        b_20 = product(b_20, b_00, DOT_PRECISION) + product(b_21, b_10, DOT_PRECISION)
        b_20 = -product(b_22, b_20, DOT_PRECISION)
        b_21 = -product(b_22, product(b_21, b_11, DOT_PRECISION), DOT_PRECISION)
        store_block(p_X, b_22, 2, 2, i_h, length, HV, BT, BH)
        store_block(p_X, b_20, 2, 0, i_h, length, HV, BT, BH)
        store_block(p_X, b_21, 2, 1, i_h, length, HV, BT, BH)

        b_33 = invert_block(b_33, BY_ROWS, DOT_PRECISION)
        b_30 = product(b_30, b_00, DOT_PRECISION) + product(b_31, b_10, DOT_PRECISION)
        b_30 += product(b_32, b_20, DOT_PRECISION)
        b_31 = product(b_31, b_11, DOT_PRECISION) + product(b_32, b_21, DOT_PRECISION)
        b_32 = product(b_32, b_22, DOT_PRECISION)
        store_block(p_X, b_33, 3, 3, i_h, length, HV, BT, BH)
        store_block(p_X, -product(b_33, b_30, DOT_PRECISION), 3, 0, i_h, length, HV, BT, BH)
        store_block(p_X, -product(b_33, b_31, DOT_PRECISION), 3, 1, i_h, length, HV, BT, BH)
        store_block(p_X, -product(b_33, b_32, DOT_PRECISION), 3, 2, i_h, length, HV, BT, BH)


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def solve_tril(
    A,
    X,
    cu_seqlens,
    chunk_indices,
    T,
    NT,
    N,
    TASKS,
    HV: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    BY_ROWS: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """A `[B, T, HV, BT]`, strictly lower in each chunk; writes X `[B, T, HV, BT]`, 0 above its diagonal.

    BT is 16, 32 or 64. TASKS = chunks * cdiv(HV, BH); BY_ROWS needs BH == 1. With BH == 1 the products are plain
    ones, which Ascend needs: ascendnpu-ir 1.2.0 drops the first of two batched products that are added.
    """
    if IS_VARLEN:
        clear_outside_rows(X, cu_seqlens, T, N, HV * BT, BT)
    head_blocks: tl.constexpr = (HV + BH - 1) // BH
    # Blocks past BT name one that is there: they are not read.
    i_1: tl.constexpr = 1 if BT > 16 else 0
    i_2: tl.constexpr = 2 if BT > 32 else 0
    i_3: tl.constexpr = 3 if BT > 32 else 0
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        _, i_t, bos, length = locate_chunk(i_task // head_blocks, cu_seqlens, chunk_indices, T, NT, N, BT, IS_VARLEN)
        length = length - i_t * BT
        i_h = i_task % head_blocks
        offset = tl.cast(bos + i_t * BT, tl.int64) * (HV * BT)
        p_A = A + offset
        solve_blocks(
            X + offset,
            load_block(p_A, 0, 0, i_h, length, HV, BT, BH),
            load_block(p_A, i_1, 0, i_h, length, HV, BT, BH),
            load_block(p_A, i_1, i_1, i_h, length, HV, BT, BH),
            load_block(p_A, i_2, 0, i_h, length, HV, BT, BH),
            load_block(p_A, i_2, i_1, i_h, length, HV, BT, BH),
            load_block(p_A, i_2, i_2, i_h, length, HV, BT, BH),
            load_block(p_A, i_3, 0, i_h, length, HV, BT, BH),
            load_block(p_A, i_3, i_1, i_h, length, HV, BT, BH),
            load_block(p_A, i_3, i_2, i_h, length, HV, BT, BH),
            load_block(p_A, i_3, i_3, i_h, length, HV, BT, BH),
            i_h,
            length,
            HV,
            BT,
            BH,
            BY_ROWS,
            DOT_PRECISION,
        )
