"""Tile sizes from shapes: pure integers, one function for each op.

`chip` is `cuda` or `ascend`. A GPU runs four warps a program (Triton's default, never changed here), so an accumulator
of 64 x 128 fp32 already takes half of the registers. An Ascend core has 192 KiB of unified buffer for vector work,
512 KiB of L1 and 128 KiB of accumulators for its matrix unit.
"""


def power_of_two(size: int, least: int, most: int) -> int:
    """The smallest power of two that covers `size`, within `least` and `most`."""
    tile = least
    while tile < size and tile < most:
        tile *= 2
    return tile


def chunk_bwd_dv_local_tiles(
    variant: str, K: int, V: int, BT: int, element_bytes: int, chip: str
) -> tuple[int, int, int]:
    """`(BC, BK, BV)` of `chunk_bwd_dv_local`: sub-block rows, columns of q and k, columns of do and dv at a time.

    On an H200 at (B, T, H, HV, K, V) = (8, 4096, 16, 32, 128, 128), bf16, the full variant takes 200 us with 64-wide
    tiles and 240 to 470 us with 128-wide ones, whose accumulators leave no room to have loads in flight; the sub
    variant takes 330 us with 128-wide tiles and 515 us with 64-wide ones, for which it forms each product twice.
    """
    if chip == "cuda":
        widest = 64 if variant == "full" or element_bytes == 4 else 128
    else:
        widest = 128 if element_bytes == 2 else 64
    return min(BT, 32), power_of_two(K, 16, widest), power_of_two(V, 16, widest)


def prefetch_fits(stage_bytes: int, scratch_bytes: int, chip: str) -> bool:
    """Whether a GPU program has room for the three copies that Triton makes of what a loop loads for its products.

    Triton refuses to launch a kernel above 227 KiB of shared memory. Elsewhere there is nothing to decide.
    """
    return chip != "cuda" or 3 * stage_bytes + scratch_bytes + 2048 <= 227 * 1024


def state_columns(variant: str, K: int, V: int, element_bytes: int, chip: str) -> int:
    """Columns of the state that a task of `chunk_gated_delta_rule_fwd_h` or `chunk_gated_delta_rule_bwd_dhu` holds.

    Wide tiles read q, k and w less often; narrow ones make more tasks. Four warps hold 128 x 64 fp32 of state, and
    unified buffer 256 x 64.
    """
    if chip == "ascend":
        return power_of_two(V, 16, 64 if variant == "wide" else 32)
    if element_bytes == 4 or K > 128:
        return 16
    if variant == "wide":
        return power_of_two(V, 16, 64)
    return power_of_two(V // 4, 16, 32)


def chunk_gated_delta_rule_fwd_h_tiles(
    variant: str, K: int, V: int, BT: int, element_bytes: int, chip: str
) -> tuple[int, int, bool]:
    """`(BK, BV, PREFETCH)` of `chunk_gated_delta_rule_fwd_h`: all rows of the state, its columns, loads run ahead."""
    BK, BV = power_of_two(K, 16, 256), state_columns(variant, K, V, element_bytes, chip)
    prefetch = prefetch_fits(BT * (2 * BK + BV) * element_bytes, BK * BV * element_bytes, chip)
    return BK, BV, prefetch


def chunk_gated_delta_rule_bwd_dhu_tiles(
    variant: str, K: int, V: int, BT: int, element_bytes: int, chip: str
) -> tuple[int, int, bool]:
    """`(BK, BV, PREFETCH)` of `chunk_gated_delta_rule_bwd_dhu`: all rows of the state, its columns, loads run ahead."""
    BK, BV = power_of_two(K, 16, 256), state_columns(variant, K, V, element_bytes, chip)
    prefetch = prefetch_fits(BT * (3 * BK + 2 * BV) * element_bytes, BK * BV * element_bytes, chip)
    return BK, BV, prefetch


def fused_columns(K: int, V: int, element_bytes: int, chip: str) -> int:
    """Most columns of the state that a task of the fused chain's walks holds: four warps hold 128 x 64 fp32 of it."""
    if chip == "ascend":
        return power_of_two(V, 16, 32)
    return power_of_two(V, 16, 16 if element_bytes == 4 or K > 128 else 64)


def chunk_scores_tile(K: int, element_bytes: int, chip: str) -> int:
    """Columns of q and k that `chunk_scores` takes at a time."""
    if chip == "ascend":
        return power_of_two(K, 16, 256)
    return power_of_two(K, 16, 64 if element_bytes == 2 else 16)


def chunk_bwd_inverse_tiles(K: int, V: int, element_bytes: int, chip: str) -> tuple[int, int]:
    """`(BK, BV)` of `chunk_bwd_inverse`: columns of k, y and dk, of the values at a time.

    On an H200 at (8, 4096, 16, 32, 128, 128), bf16, 128 and 64 take 766 us, 64 and 64 863, 128 and 128 882.
    """
    if chip == "cuda":
        widest_k, widest_v = (128, 64) if element_bytes == 2 else (16, 16)
        return power_of_two(K, 16, widest_k), power_of_two(V, 16, widest_v)
    return power_of_two(K, 16, 64), power_of_two(V, 16, 64)


def chunk_fwd_o_tiles(variant: str, K: int, V: int, BT: int, element_bytes: int, chip: str) -> tuple[int, int]:
    """`(BK, BV)` of `chunk_fwd_o`: columns of q and k at a time, columns of v and o of one task."""
    if chip == "ascend":
        widest = 128 if variant == "full" else 64
        return power_of_two(K, 16, widest), power_of_two(V, 16, widest)
    if element_bytes == 4:
        return power_of_two(K, 16, 32), power_of_two(V, 16, 32)
    return power_of_two(K, 16, 64), power_of_two(V, 16, 128 if variant == "full" else 64)


def l2norm_tiles(K: int, chip: str) -> tuple[int, int]:
    """`(BR, BK)` of `l2norm_fwd` and `l2norm_bwd`: rows at a time, and all columns."""
    BK = power_of_two(K, 16, 256)
    return (4096 if chip == "cuda" else 8192) // BK, BK


def chunk_bwd_dqkwg_tiles(
    variant: str, K: int, V: int, BT: int, element_bytes: int, chip: str
) -> tuple[int, int, int, bool]:
    """`(BC, BK, BV, DG_FROM_VALUES)` of `chunk_bwd_dqkwg`: sub-block rows, columns at a time, how dg is formed.

    Two accumulators of 64 x 64 and what they are added to fill the registers of four warps; wider tiles spill, and
    narrower ones take up to half as long again. On Ascend dg is formed from the values: no row per head stays alive
    across the loop over K.

    On a GPU the loops over V take two steps at least. A loop of one step is folded, and where a task has no loop left,
    Triton keeps three copies of all that the task loads: 313 KiB at 64 x 64, of 227 KiB that there are.
    """
    widest_k = 32 if element_bytes == 4 else 64
    widest_v = 32 if element_bytes == 4 and chip == "cuda" else 64
    BV = power_of_two(V, 16, widest_v)
    if chip == "cuda" and BV >= V:
        BV = max(16, BV // 2)
    return min(BT, 32), power_of_two(K, 16, widest_k), BV, chip == "ascend"


def prepare_wy_repr_bwd_tiles(K: int, V: int, BT: int, element_bytes: int, chip: str) -> tuple[int, int]:
    """`(BE, BD)` of `prepare_wy_repr_bwd`: columns of k, dw, v and du, and of dk at a time.

    On a GPU the loop over the columns holds three accumulators of 64 x 64 in four warps. 32 columns of two bytes hardly
    spill, 64 do; exact products of four bytes spill at any width, least at 16. dk is one accumulator: 128 columns.
    """
    if chip == "cuda":
        widest, widest_dk = (32, 128) if element_bytes == 2 else (16, 16)
    else:
        widest, widest_dk = 64, 64
    return power_of_two(max(K, V), 16, widest), power_of_two(K, 16, widest_dk)


def head_block(HV: int, chip: str) -> int:
    """Heads a task of `chunk_local_cumsum`, `gdn_gate_chunk_cumsum` and `gdn_gate_bwd` takes at once."""
    return power_of_two(HV, 16, 16 if chip == "cuda" else 32)


def chunk_scaled_dot_kkt_fwd_tiles(variant: str, K: int, V: int, BT: int, element_bytes: int, chip: str) -> tuple[int]:
    """`(BK,)` of `chunk_scaled_dot_kkt_fwd`: columns of k at a time."""
    if chip == "ascend":
        return (power_of_two(K, 16, 256),)
    return (power_of_two(K, 16, 128 if element_bytes == 2 else 16),)


def solve_tril_tiles(variant: str, K: int, V: int, BT: int, element_bytes: int, chip: str) -> tuple[int, bool]:
    """`(BH, BY_ROWS)` of `solve_tril`: heads of a task, diagonal blocks row by row. `element_bytes` are the output's.

    On a GPU a warp works on one head where the products are short ones, else two warps share a head.
    """
    if chip == "ascend":
        return 1, True
    return (4 if element_bytes == 2 else 2), False


def recompute_w_u_fwd_tiles(variant: str, K: int, V: int, BT: int, element_bytes: int, chip: str) -> tuple[int, int]:
    """`(BK, BV)` of `recompute_w_u_fwd`: columns of k and w, of v and u at a time."""
    if chip == "ascend":  # all of them: A is then the left operand of one product each
        return power_of_two(K, 16, 256), power_of_two(V, 16, 256)
    widest = 64 if element_bytes == 2 else 16
    return power_of_two(K, 16, widest), power_of_two(V, 16, widest)


def chunk_gated_delta_rule_fwd_intra_tiles(
    variant: str, K: int, V: int, BT: int, element_bytes: int, chip: str
) -> tuple[bool, int, int]:
    """`(FUSED, BH, BK)` of `chunk_gated_delta_rule_fwd_intra`: kkt and solve in one kernel, its heads, columns of k.

    Ascend's matrix unit cannot read what its vector unit wrote without a way through memory, which leaves nothing to
    gain from one kernel; and it would need batched products. Of two of those that are added up, the second alone was
    seen in the module that ascendnpu-ir 1.2.0 makes, where of two plain ones there are both.
    """
    if chip == "ascend":
        return False, 0, 0
    if element_bytes == 4:
        return True, 2, 16
    return True, 4, power_of_two(K, 16, 64)


# Bytes of a vector core's unified buffer, and of a matrix core's L1 and accumulators: Ascend A2 and A3, A5 has more.
ASCEND_BYTES = {"unified buffer": 192 * 1024, "L1": 512 * 1024, "L0C": 128 * 1024}


def on_chip_bytes(kernel: str, element_bytes: int, **tiles: int) -> tuple[int, int, int] | None:
    """Unified buffer, L1 and L0C that bishengir 1.2.0 plans for a kernel where there is room; None for the others.

    The others are those whose copies the compiler adds until the unified buffer is full, and those whose tiles do not
    grow with K and V. `pytest -m nightly tests/ascend/test_tiles.py` compiles every combination of tiles that any K and
    V get, of every kernel.

    Calibrated against its plans: `python bench/ascend_tiles.py OP` prints both. Operands of products lie in L1
    twice, their results in L0C once, both exactly as written here. The unified buffer is an upper bound, for it
    depends on how many tasks are kept in flight. Short of room the compiler keeps fewer copies; half always is needed.

    Args:
        kernel: Name of the kernel.
        element_bytes: Size of an element of the operands.
        tiles: BT, BK and BV, as the kernel takes them.
    """
    BT, BK, BV = tiles["BT"], tiles["BK"], tiles["BV"]
    twice = 2 * element_bytes
    state = 8 if element_bytes == 2 else 7
    if kernel == "chunk_bwd_dv_local_full":
        return 2432 * BT, twice * BT * (2 * BK + BT + BV), 4 * BT * (BT + BV)
    if kernel == "chunk_fwd_o":
        return 1584 * BT + 14 * BT * BV, twice * (BT * (2 * BK + BT + BV) + BK * BV), 4 * BT * (BT + 2 * BV)
    if kernel == "recompute_w_u_fwd":
        return 400 * BT, twice * BT * (2 * BT + BK + BV), 4 * BT * (BK + BV)
    if kernel == "chunk_gated_delta_rule_fwd_h":
        return BV * (state * BK + 6 * BT) + 3072, twice * (BT * (2 * BK + BV) + BK * BV), 4 * BV * (BT + BK)
    if kernel == "chunk_gated_delta_rule_bwd_dhu":
        return BV * (state * BK + 9 * BT) + 3072, twice * (BT * (3 * BK + 2 * BV) + BK * BV), 4 * BV * (BT + BK)
    return None


def kda_gate_columns(K: int, chip: str) -> int:
    """Channels that a task of `kda_gate_chunk_cumsum` and `kda_gate_bwd` takes, of 64 tokens."""
    return power_of_two(K, 16, 64)


def chunk_kda_diagonal(variant: str, kind: str) -> str:
    """`DIAGONAL` of `chunk_kda_scores` and `chunk_kda_bwd_intra` on a device of this kind, see `kda_decay`.

    Halves need rows by computed index, which Ascend's compiler loads element by element.
    """
    if variant == "bounded":
        return "product"
    return "columns" if kind == "npu" else "halves"


def chunk_kda_fwd_intra_tiles(variant: str, K: int, element_bytes: int, chip: str) -> int:
    """BK of `chunk_kda_scores`: channels at a time, of 64 earlier tokens and of 16 own."""
    if chip == "cuda":
        return power_of_two(K, 16, 64 if element_bytes == 2 else 32)
    return power_of_two(K, 16, 64)


def recompute_w_u_fwd_kda_tiles(variant: str, K: int, V: int, element_bytes: int, chip: str) -> tuple[int, int]:
    """`(BK, BV)` of `recompute_w_u_fwd_kda`: columns of q and k, of v at a time."""
    widest = 64 if element_bytes == 2 or chip == "ascend" else 16
    return power_of_two(K, 16, widest), power_of_two(V, 16, widest)


def chunk_gla_fwd_o_gk_tiles(variant: str, K: int, V: int, element_bytes: int, chip: str) -> tuple[int, int]:
    """`(BK, BV)` of `chunk_gla_fwd_o_gk`: columns of q at a time, columns of o of one task."""
    if chip == "cuda" and element_bytes == 4:
        return power_of_two(K, 16, 32), power_of_two(V, 16, 32)
    return power_of_two(K, 16, 64), power_of_two(V, 16, 128 if chip == "cuda" else 64)


def chunk_kda_bwd_dAv_tiles(variant: str, V: int, element_bytes: int, chip: str) -> int:
    """BV of `chunk_kda_bwd_dAv`: columns of v and do at a time."""
    return power_of_two(V, 16, 32 if chip == "cuda" and element_bytes == 4 else 64)


def chunk_kda_bwd_wy_dqkg_fused_tiles(
    variant: str, K: int, V: int, element_bytes: int, chip: str, v_first: bool
) -> tuple[int, int]:
    """`(BK, BV)` of `chunk_kda_bwd_wy_dqkg_fused`: channels and values at a time; three accumulators of 64 x BK.

    Where Ascend turns the states of a tile on chip, or has no loop over values to take them in turn, it has room for
    half as many.
    """
    if chip == "cuda":
        return (power_of_two(K, 16, 32), power_of_two(V, 16, 64)) if element_bytes == 2 else (16, 16)
    return power_of_two(K, 16, 32), power_of_two(V, 16, 32 if v_first or V <= 64 else 64)


def chunk_kda_bwd_intra_tiles(variant: str, K: int, element_bytes: int, chip: str) -> int:
    """BK of `chunk_kda_bwd_intra`: channels at a time, of 64 tokens and of 16 own."""
    if chip == "cuda":
        return power_of_two(K, 16, 64 if element_bytes == 2 else 16)
    return power_of_two(K, 16, 32)
