"""The address helpers alone, at sizes whose tensors no machine here could hold."""

import math

import pytest
import torch
from layout_tuner.kernels import probe

from layout_tuner import device as devices

# (batch row, first token over the whole storage, head, tokens of a row): each product passes 2 ** 31.
FAR = [(64, 64 * 2**20, 31, 2**20), (70_000, 70_000 * 1024, 5, 1024), (0, 2**30, 63, 2**30 + 5)]
HV = 64


@pytest.mark.parametrize(("i_b", "bos", "i_h", "T"), FAR)
@pytest.mark.parametrize("t_contig", [False, True], ids=["stride-HV", "T-contiguous"])
def test_offsets_beyond_32_bits(i_b: int, bos: int, i_h: int, T: int, t_contig: bool, device: torch.device) -> None:
    found = torch.zeros(2, dtype=torch.int64, device=device)
    probe.offset_probe[(1,)](found, i_b, bos, i_h, T, HV=HV, T_CONTIG=t_contig)
    wanted = (i_b * HV + i_h) * T + (bos - i_b * T) if t_contig else bos * HV + i_h
    assert wanted > 2**31
    assert found.tolist() == [wanted, 1 if t_contig else HV]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes for itself")
def test_this_interpreter_computes_bfloat16_right_once_mended() -> None:
    """Fails on a Triton whose interpreter `mend_interpreter` no longer helps; bf16 is refused there."""
    assert devices.interpreting()
    assert devices.interpreter_is_right()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int32], ids=str)
def test_casts_to_bfloat16_round_to_the_nearest(dtype: torch.dtype, device: torch.device) -> None:
    """Ties to even, infinities and NaN kept; what lies between the least number and zero too."""
    devices.require_running("probe", "bfloat16", device)
    values = [
        1.0,
        1.00390625,
        1.01171875,
        -1.00390625,
        257.0,
        259.0,
        3.0e38,
        -3.39e38,
        3.4e38,
        1e-40,
        -1e-45,
        0.0,
        -0.0,
    ]
    if dtype.is_floating_point:
        x = torch.tensor([*values, math.inf, -math.inf, math.nan], dtype=torch.float64).to(dtype)
    else:
        x = torch.tensor(
            [0, 1, -1, 257, 259, -257, 65537, 65539, -(2**30), 2**30 + 2**23, 2, 3, 4, 5, 6, 7], dtype=dtype
        )
    stored = torch.zeros(16, dtype=torch.bfloat16, device=device)
    probe.cast_probe[(1,)](x.to(device), stored, N=16)
    wanted = x.to(torch.bfloat16)
    assert torch.equal(stored.cpu().isnan(), wanted.isnan())
    assert torch.equal(stored.cpu().nan_to_num(), wanted.nan_to_num())
