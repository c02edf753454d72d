"""Small problems of `chunk_bwd_dv_local`, the op that tests of the host side use."""

import torch

import layout_tuner.ops
from layout_tuner import reference
from layout_tuner.spec import registry
from layout_tuner.spec.keys import Form, Key

SPEC = registry.lookup("chunk_bwd_dv_local")
FORM = "BT=16,g=float32@STRIDE_HV"
CANDIDATES = ("full/g=STRIDE_HV", "full/g=T_CONTIG", "sub/g=STRIDE_HV", "sub/g=T_CONTIG")
BT = 16


def key(form: Form | str = FORM, *, varlen: bool = False, dtype: str = "float32", **sizes: int) -> Key:
    """A key of the op."""
    wanted = {"B": 1, "T": 20, "H": 1, "HV": 2, "K": 16, "V": 16} | sizes
    return Key(
        op=SPEC.name, **wanted, varlen=varlen, dtype=dtype, form=form if isinstance(form, Form) else Form.parse(form)
    )


def arguments(
    device: torch.device,
    *,
    B: int = 1,
    T: int = 20,
    H: int = 1,
    HV: int = 2,
    K: int = 16,
    V: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
) -> dict[str, torch.Tensor]:
    """q, k, do and g, the same values on every device."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(B, T, H, K, generator=generator).to(dtype).to(device) for _ in range(2))
    do = torch.randn(B, T, HV, V, generator=generator).to(dtype).to(device)
    g = -torch.rand(B, T, HV, generator=generator).cumsum(1).to(device)
    return {"q": q, "k": k, "do": do, "g": g}


def dv_local(given: dict[str, torch.Tensor], **more: object) -> torch.Tensor:
    """The public op on chunks of 16."""
    return layout_tuner.ops.chunk_bwd_dv_local(**given, chunk_size=BT, **more)


def assert_right(dv: torch.Tensor, given: dict[str, torch.Tensor], **more: object) -> None:
    """The result is the oracle's, and it is row-major."""
    wanted = reference.chunk_bwd_dv_local(**given, chunk_size=BT, **more)
    torch.testing.assert_close(dv, wanted, rtol=1e-4, atol=1e-4)
    assert dv.is_contiguous()
