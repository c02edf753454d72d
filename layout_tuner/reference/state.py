"""Helper of the oracles of the states, forward and backward."""

from torch import Tensor

from .common import _gate, _split


def _state_decays(like: Tensor, BT: int, g: Tensor | None, gk: Tensor | None) -> tuple[Tensor, Tensor]:
    """A chunk's factor of the state, `[B, HV, NT, 1 or K, 1]`, and each token's exp2(G_last - G), `[.., BT, 1]`."""
    G = _gate(like, BT, g)
    keep = G[..., -1:, None].exp2()
    if gk is not None:
        keep = keep * _split(gk, BT, fill_last=True)[..., -1, :, None].exp2()
    return keep, (G[..., -1:] - G).exp2()[..., None]
