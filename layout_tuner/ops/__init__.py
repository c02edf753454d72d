"""The kernels as functions of torch tensors, under flash-linear-attention's names and argument names.

Inside `layout_tuner.enable()` each routes to the candidate that was measured to be best for its key; outside, the
default candidate runs. Every public result is row-major.
"""

from .. import importable as importable
from ..spec.packing import prepare_chunk_indices, prepare_chunk_offsets
from . import tracing
from .bwd_dhu import chunk_gated_delta_rule_bwd_dhu
from .dqkwg import chunk_bwd_dqkwg
from .dv_local import chunk_bwd_dv_local
from .fwd_h import chunk_gated_delta_rule_fwd_h
from .fwd_o import chunk_fwd_o
from .gate import gdn_gate_bwd, gdn_gate_chunk_cumsum
from .gated_delta_rule import compiled  # noqa: F401  registers the chain's operators
from .gated_delta_rule.op import chunk_gated_delta_rule
from .intra import chunk_gated_delta_rule_fwd_intra
from .kda_bwd import chunk_kda_bwd_dAv, chunk_kda_bwd_wy_dqkg_fused
from .kda_bwd_intra import chunk_kda_bwd_intra
from .kda_fwd_o import chunk_gla_fwd_o_gk
from .kda_gate import (
    chunk_local_cumsum_channels,
    fused_kda_gate,
    kda_gate_bwd,
    kda_gate_chunk_cumsum,
    kda_gate_fwd,
)
from .kda_intra import chunk_kda_fwd_intra, recompute_w_u_fwd_kda
from .kkt import chunk_scaled_dot_kkt_fwd
from .local_cumsum import chunk_local_cumsum
from .recompute_w_u import recompute_w_u_fwd
from .solve_tril import solve_tril
from .wy_bwd import prepare_wy_repr_bwd

tracing.trace_all()

__all__ = [
    "chunk_bwd_dqkwg",
    "chunk_bwd_dv_local",
    "chunk_fwd_o",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd_dhu",
    "chunk_gated_delta_rule_fwd_h",
    "chunk_gated_delta_rule_fwd_intra",
    "chunk_gla_fwd_o_gk",
    "chunk_kda_bwd_dAv",
    "chunk_kda_bwd_intra",
    "chunk_kda_bwd_wy_dqkg_fused",
    "chunk_kda_fwd_intra",
    "chunk_local_cumsum",
    "chunk_local_cumsum_channels",
    "chunk_scaled_dot_kkt_fwd",
    "fused_kda_gate",
    "gdn_gate_bwd",
    "gdn_gate_chunk_cumsum",
    "kda_gate_bwd",
    "kda_gate_chunk_cumsum",
    "kda_gate_fwd",
    "prepare_chunk_indices",
    "prepare_chunk_offsets",
    "prepare_wy_repr_bwd",
    "recompute_w_u_fwd",
    "recompute_w_u_fwd_kda",
    "solve_tril",
]
