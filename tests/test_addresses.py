"""The address helpers alone, at sizes whose tensors no machine here could hold."""

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU multiplies for itself")
def test_this_interpreter_multiplies_bfloat16_right_once_widened() -> None:
    """Fails on a Triton whose interpreter `widen_interpreter_dot` no longer helps; bf16 is refused there."""
    assert devices.interpreting()
    assert devices.interpreter_dot_is_right()
