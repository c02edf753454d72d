"""The two layouts of a time-axis tensor, a plan of them, and the copy from one to the other.

A time-axis tensor has the logical shape `[B, T, HV]`, or `[B, T, HV, C]` where each token of a head has C channels,
whatever its layout; the layout is its strides, channels innermost (C = 1 where there are none):

    STRIDE_HV  (T * HV * C, HV * C, C, 1)   as models produce it: one head's tokens are HV * C elements apart
    T_CONTIG   (HV * T * C, C, T * C, 1)    one head's tokens are neighbours
    OTHER      anything else                copied before a kernel reads it

A dimension of size 1 has no stride that matters, so with HV == 1 or T == 1 both layouts are the same memory;
`arrival` then answers STRIDE_HV.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Layout(enum.Enum):
    """Where the elements of a `[B, T, HV]` or `[B, T, HV, C]` tensor lie."""

    STRIDE_HV = "STRIDE_HV"
    T_CONTIG = "T_CONTIG"
    OTHER = "OTHER"


@dataclass(frozen=True)
class LayoutPlan:
    """One layout for each time-axis operand of an op.

    Attributes:
        layouts: Pairs of operand name and layout, in the op's order of operands.
    """

    layouts: tuple[tuple[str, Layout], ...] = ()

    @classmethod
    def of(cls, layouts: Mapping[str, Layout]) -> LayoutPlan:
        """The plan that gives each operand named in `layouts` its layout."""
        return cls(tuple(layouts.items()))

    def __getitem__(self, operand: str) -> Layout:
        for name, layout in self.layouts:
            if name == operand:
                return layout
        return Layout.STRIDE_HV

    def t_contig(self, operand: str) -> bool:
        """Whether the plan puts `operand` contiguous along time; an operand it does not name is STRIDE_HV."""
        return self[operand] is Layout.T_CONTIG

    def __str__(self) -> str:
        return ",".join(f"{name}={layout.value}" for name, layout in self.layouts)


def arrival(tensor: torch.Tensor) -> Layout:
    """The layout in which a `[B, T, HV]` or `[B, T, HV, C]` tensor lies.

    Args:
        tensor: Any tensor of three or four dimensions, whatever its device, dtype and strides.
    """
    B, T, HV, *channels = tensor.shape
    stride_b, stride_t, stride_h, *stride_c = tensor.stride()
    C = channels[0] if channels else 1
    whole_rows = (B == 1 or stride_b == T * HV * C) and (C == 1 or stride_c[0] == 1)
    if whole_rows and (T == 1 or stride_t == HV * C) and (HV == 1 or stride_h == C):
        return Layout.STRIDE_HV
    if whole_rows and (T == 1 or stride_t == C) and (HV == 1 or stride_h == T * C):
        return Layout.T_CONTIG
    return Layout.OTHER


def as_read(arrives: Layout) -> Layout:
    """The layout in which a kernel that reads both takes an operand: its own; OTHER is copied to STRIDE_HV."""
    return Layout.T_CONTIG if arrives is Layout.T_CONTIG else Layout.STRIDE_HV


def must_move(tensor: torch.Tensor, wanted: Layout) -> bool:
    """Whether a time-axis tensor has to be copied to lie in the wanted layout."""
    _, T, HV, *_ = tensor.shape
    present = arrival(tensor)
    if present is Layout.STRIDE_HV and (HV == 1 or T == 1):
        return False  # both layouts at once
    return present is not wanted


def in_layout(tensor: torch.Tensor, wanted: Layout) -> torch.Tensor:
    """The tensor in the wanted layout: itself where it lies so, else a copy."""
    return relayout(tensor, wanted) if must_move(tensor, wanted) else tensor


def relayout(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The same values in `layout`; the tensor itself where it lies so already.

    Raises:
        ValueError: `layout` is OTHER, which names no order of elements.
    """
    if layout is Layout.OTHER:
        raise ValueError("relayout: wanted STRIDE_HV or T_CONTIG, got OTHER")
    if layout is Layout.T_CONTIG:
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    return tensor.contiguous()


def empty(shape: tuple[int, ...], layout: Layout, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised time-axis tensor of logical shape `[B, T, HV]` or `[B, T, HV, C]` in `layout`."""
    import torch

    if layout is Layout.T_CONTIG:
        B, T, HV, *channels = shape
        return torch.empty((B, HV, T, *channels), dtype=dtype, device=device).transpose(1, 2)
    return torch.empty(shape, dtype=dtype, device=device)
