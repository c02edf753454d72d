"""Counts of public kernels, to compare with: flash-linear-attention 0.5.2's Ascend kernels under the same compiler.

Shape B=2 T=2048 H=4 HV=8 K=V=64, chunks of 64, bf16; counts of one program or task. `c` is T-contiguous, `s`
stride-HV. The times are those published with the kernels, of the kernels alone on an Ascend NPU at that shape.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class PublishedKernel:
    """One row.

    Attributes:
        name: Kernel and layout.
        op: The op of this project that does the same work, or part of it.
        ub_bytes: Planned peak of a vector core's memory.
        strided_loads: Loads of single elements apart from each other.
        kb_in: Read from arguments, KiB.
        kb_workspace: Moved through the workspace, KiB.
        short_bursts: Bursts under 32 bytes.
        bursts: All bursts.
        deinterleaves: Picks of one element of every n.
        scalarised_elements: Elements computed one at a time.
    """

    name: str
    op: str
    ub_bytes: int
    strided_loads: int
    kb_in: float
    kb_workspace: float
    short_bursts: int
    bursts: int
    deinterleaves: int
    scalarised_elements: int = 0


def _row(name: str, op: str, *numbers: float) -> PublishedKernel:
    ub, strided, kb_in, kb_workspace, short, bursts, deinterleaves, scalarised = numbers
    return PublishedKernel(
        name=name,
        op=op,
        ub_bytes=int(ub),
        strided_loads=int(strided),
        kb_in=kb_in,
        kb_workspace=kb_workspace,
        short_bursts=int(short),
        bursts=int(bursts),
        deinterleaves=int(deinterleaves),
        scalarised_elements=int(scalarised),
    )


PUBLISHED: Final = (
    _row("dv_local c", "chunk_bwd_dv_local", 31104, 0, 24.5, 36, 0, 278, 0, 0),
    _row("dv_local s", "chunk_bwd_dv_local", 33152, 4, 24.5, 36, 128, 402, 4, 0),
    _row("dqkwg c", "chunk_bwd_dqkwg", 181504, 0, 214, 420, 0, 1491, 0, 0),
    _row("dqkwg s", "chunk_bwd_dqkwg", 184576, 14, 214, 420, 448, 1925, 14, 0),
    _row("dg c", "chunk_bwd_dqkwg", 123936, 0, 169, 144, 142, 1128, 0, 0),
    _row("dg s", "chunk_bwd_dqkwg", 123936, 4, 169, 144, 270, 1252, 4, 0),
    _row("fwd_o c", "chunk_fwd_o", 170400, 0, 32.5, 176, 0, 271, 0, 0),
    _row("wy bwd kv c", "prepare_wy_repr_bwd", 153344, 0, 48.5, 352, 0, 871, 0, 0),
    _row("wy bwd kv s", "prepare_wy_repr_bwd", 158080, 4, 48.5, 352, 256, 1119, 4, 0),
    _row("wy bwd dA mask+dot1", "prepare_wy_repr_bwd", 84800, 0, 24, 96, 0, 455, 0, 0),
    _row("wy bwd dA dot2", "prepare_wy_repr_bwd", 70400, 0, 24, 64, 0, 388, 0, 0),
    _row("wy bwd dA gate c", "prepare_wy_repr_bwd", 8032, 0, 17, 0, 0, 532, 0, 0),
    _row("wy bwd finalize k c", "prepare_wy_repr_bwd", 119600, 0, 49, 160, 0, 399, 0, 0),
    _row("wy bwd finalize a2 c", "prepare_wy_repr_bwd", 30900, 0, 8.5, 96, 0, 265, 0, 0),
    _row("wy bwd finalize dg c", "prepare_wy_repr_bwd", 8400, 0, 33.8, 0, 0, 556, 0, 0),
    _row("recompute_w_u", "recompute_w_u_fwd", 52480, 0, 32.5, 128, 0, 400, 0, 0),
    _row("chunk_scaled_dot_kkt", "chunk_scaled_dot_kkt_fwd", 121568, 0, 8.8, 32, 0, 135, 0, 4352),
    _row("bwd dhu (whole sequence)", "chunk_gated_delta_rule_bwd_dhu", 71936, 0, 1312, 4608, 0, 13060, 0, 0),
    _row("fwd_h (whole sequence)", "chunk_gated_delta_rule_fwd_h", 83000, 0, 792, 6144, 0, 10948, 0, 0),
)

# Milliseconds of the kernel alone: (stride-HV, T-contiguous).
PUBLISHED_MS: Final = {"dv_local": (6.5, 0.18), "dqkwg": (10.8, 0.91)}


def published(name: str) -> PublishedKernel:
    """The row of a name.

    Raises:
        KeyError: there is none.
    """
    return {kernel.name: kernel for kernel in PUBLISHED}[name]
