"""Torch oracles: one for each op, about as short as its formula, and the token recurrence that all follow from.

An oracle takes the arguments of its op and, keyword-only, a `compute_dtype`. It converts every floating input to that
dtype, computes in it and returns its results in it, in the op's order: nothing is rounded to the dtypes of the inputs,
and an `output_dtype` is accepted and ignored. Inputs may have any strides and lie on any device. The oracles are plain
differentiable torch; the tuner calls them under `no_grad`. Where TF32 is allowed for float32 products on a device,
only `torch.float64` is exact there.

Shapes: B batch, T tokens, H query/key heads, HV value heads, K and V head sizes, BT chunk size, NT chunks, N sequences.
Value head i uses query/key head `i // (HV // H)`; gradients of queries and keys are summed over the heads of a group.
Chunk-local cumulative gates (`g`, `gk`, `g_gamma` of everything but the chain) are in log2 units, the chain's own gate
is a natural logarithm. G_last is the gate of a chunk's last token, also where that chunk is not full.

Packed batches have B = 1: sequence n covers the tokens `cu_seqlens[n] .. cu_seqlens[n + 1]`. Chunk states are then
`[1, NT, HV, K, V]`, sequence after sequence (an empty one owns no chunk), and initial and final states have one row a
sequence, empty ones included. Tokens outside every sequence are zero in every result. `chunk_indices`,
`chunk_offsets` and `cu_seqlens_cpu` follow from `cu_seqlens`; they are accepted and not read.

Inside, a token tensor `[B, T, HV, D]` is `[B, HV, NT, BT, D]`, the last chunk filled up with zeros, or for a gate with
its last value, so that its last row is G_last. A row of zeros for k, q, w, u or do adds nothing to any sum.

Source: Yang, Kautz and Hatamizadeh 2024, Gated Delta Networks: Improving Mamba2 with Delta Rule.
"""

from .bwd_dhu import chunk_gated_delta_rule_bwd_dhu
from .dqkwg import chunk_bwd_dqkwg, chunk_bwd_dqkwg_term_rms
from .dv_local import chunk_bwd_dv_local
from .fwd_h import chunk_gated_delta_rule_fwd_h
from .fwd_o import chunk_fwd_o
from .gate import gate_parameter_term_rms, gdn_gate, gdn_gate_bwd, gdn_gate_chunk_cumsum
from .gated_delta_rule import (
    ChainGradients,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    gated_delta_rule_recurrence,
)
from .intra import chunk_gated_delta_rule_fwd_intra
from .kda import KdaGradients, chunk_kda, chunk_kda_bwd, kda_recurrence
from .kda_backward import (
    chunk_kda_bwd_dAv,
    chunk_kda_bwd_intra,
    chunk_kda_bwd_wy_dqkg_fused,
    chunk_kda_bwd_wy_dqkg_fused_term_rms,
)
from .kda_forward import chunk_gla_fwd_o_gk, chunk_kda_fwd_intra, recompute_w_u_fwd_kda
from .kda_gate import kda_gate_bwd, kda_gate_bwd_term_rms, kda_gate_chunk_cumsum, kda_gate_fwd
from .kkt import chunk_scaled_dot_kkt_fwd
from .local_cumsum import chunk_local_cumsum
from .packing import prepare_chunk_indices, prepare_chunk_offsets
from .recompute_w_u import recompute_w_u_fwd
from .solve_tril import solve_tril
from .wy_bwd import prepare_wy_repr_bwd, prepare_wy_repr_bwd_term_rms

__all__ = [
    "ChainGradients",
    "KdaGradients",
    "chunk_bwd_dqkwg",
    "chunk_bwd_dqkwg_term_rms",
    "chunk_bwd_dv_local",
    "chunk_fwd_o",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_bwd_dhu",
    "chunk_gated_delta_rule_fwd_h",
    "chunk_gated_delta_rule_fwd_intra",
    "chunk_gla_fwd_o_gk",
    "chunk_kda",
    "chunk_kda_bwd",
    "chunk_kda_bwd_dAv",
    "chunk_kda_bwd_intra",
    "chunk_kda_bwd_wy_dqkg_fused",
    "chunk_kda_bwd_wy_dqkg_fused_term_rms",
    "chunk_kda_fwd_intra",
    "chunk_local_cumsum",
    "chunk_scaled_dot_kkt_fwd",
    "gate_parameter_term_rms",
    "gated_delta_rule_recurrence",
    "gdn_gate",
    "gdn_gate_bwd",
    "gdn_gate_chunk_cumsum",
    "kda_gate_bwd",
    "kda_gate_bwd_term_rms",
    "kda_gate_chunk_cumsum",
    "kda_gate_fwd",
    "kda_recurrence",
    "prepare_chunk_indices",
    "prepare_chunk_offsets",
    "prepare_wy_repr_bwd",
    "prepare_wy_repr_bwd_term_rms",
    "recompute_w_u_fwd",
    "recompute_w_u_fwd_kda",
    "solve_tril",
]
