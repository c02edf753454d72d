"""The WY representation of a chunk, from the inverse `A` of its triangular system.

    u = A (beta * v),      w = A (beta * exp2(G) * k)

One task is one chunk of one value head. The factors of row s of `v` and `k` are applied to column s of `A` instead:
the tile `[BT, BT]` is the smaller one, and `v` and `k` go to the matrix unit as they lie in memory.
"""

import triton
import triton.language as tl

from .time_axis import clear_outside_rows, load_chunk, locate_chunk


@triton.jit
def scaled_product(
    b_A,
    b_scale,
    p_x,
    p_out,
    o_t,
    m_t,
    X_ROW: tl.constexpr,
    OUT_ROW: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """out = A (scale * x) for one chunk, x and out of width D and A in fp32."""
    for i_d in range(0, D, BD):
        o_d = i_d + tl.arange(0, BD)
        m_d = m_t[:, None] & (o_d < D)[None, :]
        b_x = tl.load(p_x + o_t[:, None] * X_ROW + o_d[None, :], mask=m_d, other=0.0)
        # A new left operand for each dot: Ascend's compiler may reuse its memory once the dot has read it.
        b_out = tl.dot((b_A * b_scale[None, :]).to(b_x.dtype), b_x, input_precision=DOT_PRECISION)
        tl.store(p_out + o_t[:, None] * OUT_ROW + o_d[None, :], b_out.to(p_out.dtype.element_ty), mask=m_d)


@triton.jit(do_not_specialize=["T", "NT", "N", "TASKS"])
def recompute_w_u_fwd(
    k,
    v,
    beta,
    A,
    g,
    w,
    u,
    cu_seqlens,
    chunk_indices,
    T,
    NT,
    N,
    TASKS,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    USE_G: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
    BETA_T_CONTIG: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """k `[B, T, H, K]`, v `[B, T, HV, V]`, beta and g `[B, T, HV]` in either layout, A `[B, T, HV, BT]`; writes w, u.

    w `[B, T, HV, K]` and u `[B, T, HV, V]`; g is base 2 and cumulative in the chunk; TASKS = chunks * HV.
    """
    if IS_VARLEN:
        clear_outside_rows(w, cu_seqlens, T, N, HV * K, BK)
        clear_outside_rows(u, cu_seqlens, T, N, HV * V, BV)
    o_t = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_h = i_task % HV
        i_b, i_t, bos, length = locate_chunk(i_task // HV, cu_seqlens, chunk_indices, T, NT, N, BT, IS_VARLEN)
        m_t = i_t * BT + o_t < length
        first = tl.cast(bos + i_t * BT, tl.int64)
        b_beta = load_chunk(beta, i_b, i_t, bos, i_h, o_t, m_t, T, HV, BT, BETA_T_CONTIG)
        p_A = A + (first * HV + i_h) * BT
        b_A = tl.load(p_A + o_t[:, None] * (HV * BT) + o_t[None, :], mask=m_t[:, None], other=0.0).to(tl.float32)
        scaled_product(
            b_A, b_beta, v + (first * HV + i_h) * V, u + (first * HV + i_h) * V,
            o_t, m_t, HV * V, HV * V, V, BV, DOT_PRECISION,
        )  # fmt: skip
        if USE_G:
            b_beta *= tl.exp2(load_chunk(g, i_b, i_t, bos, i_h, o_t, m_t, T, HV, BT, G_T_CONTIG))
        scaled_product(
            b_A, b_beta, k + (first * H + i_h // (HV // H)) * K, w + (first * HV + i_h) * K,
            o_t, m_t, H * K, HV * K, K, BK, DOT_PRECISION,
        )  # fmt: skip
