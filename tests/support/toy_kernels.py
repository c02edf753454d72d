"""out[t] = x[t] * 2**g[t], one gate a head: the smallest kernel with a gate."""

import triton
import triton.language as tl
from layout_tuner.kernels.time_axis import time_axis_offset, time_axis_stride


@triton.jit(do_not_specialize=["T", "TASKS"])
def toy_scale(
    x,
    g,
    out,
    T,
    TASKS,
    HV: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    G_T_CONTIG: tl.constexpr,
):
    """A task is BT tokens of a head; TASKS = B * HV * cdiv(T, BT)."""
    NT = tl.cdiv(T, BT)
    for i_task in range(tl.program_id(0), TASKS, tl.num_programs(0)):
        i_h = i_task % HV
        i_b = i_task // HV // NT
        o_t = i_task // HV % NT * BT + tl.arange(0, BT)
        o_v = tl.arange(0, BV)
        bos = tl.cast(i_b, tl.int64) * T
        p_g = g + time_axis_offset(i_b, bos, i_h, T, HV, G_T_CONTIG)
        b_g = tl.load(p_g + o_t * time_axis_stride(HV, G_T_CONTIG), mask=o_t < T, other=0.0).to(tl.float32)
        m_x = (o_t < T)[:, None] & (o_v < V)[None, :]
        o_x = (bos * HV + i_h) * V + o_t[:, None] * (HV * V) + o_v[None, :]
        b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)
        tl.store(out + o_x, (b_x * tl.exp2(b_g)[:, None]).to(out.dtype.element_ty), mask=m_x)
