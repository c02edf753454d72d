"""Decays between the tokens of 16 rows, one for each channel, as factors of products.

    exp2(G[t] - G[s]),  s < t,  is  exp2(G[t] - R) * exp2(R - G[s])     for any row R of the gate

The rows t and s of a product have to share R, and neither factor may overflow where only their product is small. Three
ways, `DIAGONAL`:

    halves    Rows are halved, halved again, and so on. The later half of a pair of neighbours is t, the earlier one s,
              and R is the first row of the later one: `G[t] <= R <= G[s]`, so that both factors are at most 1 and an
              underflow loses nothing that counts. Four levels cover every pair of 16 rows. Right for any gate <= 0.
    columns   No factors: the decay to one row s at a time, its exponent masked first. Right for any gate <= 0, and
              without products: what a vector unit does well.
    product   R is the first row of all 16, and a fixed shift shares the exponent between the factors: 15 steps of
              -5 / ln 2 are 108 binary digits, 54 each. One product, and only where the gate is bounded.

R is never a row after t: a token's result does not change in a bit with the tokens behind it.
"""

import triton
import triton.language as tl

from .channels import load_row

# Binary digits that a factor of a bounded gate's product takes of the other's.
SHIFT = tl.constexpr(54.0)


@triton.jit
def load_references(
    p_g,
    i_s,
    o_c,
    tokens,
    level: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    DIAGONAL: tl.constexpr,
):
    """The gate's rows R for the 16 rows of strip `i_s`, `[16, channels]`, of a chunk of `tokens` tokens."""
    if DIAGONAL == "halves":
        o_r = tl.arange(0, 16)
        # Where the later half has no token there is no t.
        o_ref = tl.minimum(i_s * 16 + ((o_r >> (level + 1)) << (level + 1)) + (1 << level), tokens - 1)
        m_ref = (o_ref >= i_s * 16)[:, None] & (o_c < K)[None, :]
        b_R = tl.load(p_g + o_ref[:, None] * STRIDE + o_c[None, :], mask=m_ref, other=0.0).to(tl.float32)
    else:
        b_R = load_row(p_g, i_s * 16, tokens, o_c, K, STRIDE)
        b_R = tl.broadcast_to(b_R[None, :], [16, o_c.shape[0]])
    return b_R


@triton.jit
def later_factor(
    b_G,
    b_R,
    m_r,
    level: tl.constexpr,
    DIAGONAL: tl.constexpr,
):
    """exp2(G - R) of the rows that are t, finite everywhere."""
    o_r = tl.arange(0, 16)
    if DIAGONAL == "halves":
        m_t = (m_r & (((o_r >> level) & 1) == 1))[:, None]
        b_x = tl.exp2(tl.where(m_t, b_G - b_R, 0.0))
    else:
        b_x = tl.exp2(tl.where(m_r[:, None], b_G - b_R + SHIFT, 0.0))
    return b_x


@triton.jit
def earlier_factor(
    b_G,
    b_R,
    m_r,
    level: tl.constexpr,
    DIAGONAL: tl.constexpr,
):
    """exp2(R - G) of the rows that are s, finite everywhere."""
    o_r = tl.arange(0, 16)
    if DIAGONAL == "halves":
        m_s = (m_r & (((o_r >> level) & 1) == 0))[:, None]
        b_x = tl.exp2(tl.where(m_s, b_R - b_G, 0.0))
    else:
        b_x = tl.exp2(tl.where(m_r[:, None], b_R - b_G - SHIFT, 0.0))
    return b_x


@triton.jit
def pairs(
    level: tl.constexpr,
    DIAGONAL: tl.constexpr,
):
    """Which elements (t, s) of 16 x 16 a level covers."""
    o_r = tl.arange(0, 16)
    m_pair = o_r[:, None] > o_r[None, :]
    if DIAGONAL == "halves":
        m_pair = m_pair & ((o_r >> (level + 1))[:, None] == (o_r >> (level + 1))[None, :])
        m_pair = m_pair & ((o_r >> level)[:, None] > (o_r >> level)[None, :])
    return m_pair


@triton.jit
def as_factor(
    b_x,
    dtype: tl.constexpr,
    DIAGONAL: tl.constexpr,
):
    """A tile in fp32 as an operand of a product of `dtype` tensors; fp16 cannot hold a shifted exponent."""
    if DIAGONAL == "product" and dtype == tl.float16:
        b_y = b_x
    else:
        b_y = b_x.to(dtype)
    return b_y
