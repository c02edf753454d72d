"""The kernels as functions of torch tensors, under flash-linear-attention's names and argument names.

Inside `layout_tuner.enable()` each routes to the candidate that was measured to be best for its key; outside, the
default candidate runs. Every public result is row-major.
"""

from ..packing import prepare_chunk_indices, prepare_chunk_offsets
from .bwd_dhu import chunk_gated_delta_rule_bwd_dhu
from .dv_local import chunk_bwd_dv_local
from .fwd_h import chunk_gated_delta_rule_fwd_h
from .fwd_o import chunk_fwd_o

__all__ = [
    "chunk_bwd_dv_local",
    "chunk_fwd_o",
    "chunk_gated_delta_rule_bwd_dhu",
    "chunk_gated_delta_rule_fwd_h",
    "prepare_chunk_indices",
    "prepare_chunk_offsets",
]
