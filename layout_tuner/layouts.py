"""The two layouts of a time-axis tensor, a plan of them, and the copy from one to the other.

A time-axis tensor has the logical shape `[B, T, HV]` whatever its layout; the layout is its strides:

    STRIDE_HV  (T * HV, HV, 1)   as models produce it: one head's tokens are HV elements apart
    T_CONTIG   (HV * T, 1, T)    one head's tokens are neighbours
    OTHER      anything else     copied before a kernel reads it

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
    """Where the elements of a `[B, T, HV]` tensor lie."""

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
    """The layout in which a `[B, T, HV]` tensor lies.

    Args:
        tensor: Any tensor of three dimensions, whatever its device, dtype and strides.
    """
    B, T, HV = tensor.shape
    stride_b, stride_t, stride_h = tensor.stride()
    whole_rows = B == 1 or stride_b == T * HV
    if whole_rows and (T == 1 or stride_t == HV) and (HV == 1 or stride_h == 1):
        return Layout.STRIDE_HV
    if whole_rows and (T == 1 or stride_t == 1) and (HV == 1 or stride_h == T):
        return Layout.T_CONTIG
    return Layout.OTHER


def as_read(found: Layout) -> Layout:
    """The layout in which a kernel that reads either takes an operand: as it is, rows where it is neither."""
    return Layout.T_CONTIG if found is Layout.T_CONTIG else Layout.STRIDE_HV


def must_move(tensor: torch.Tensor, wanted: Layout) -> bool:
    """Whether a time-axis tensor has to be copied to lie in the wanted layout."""
    _, T, HV = tensor.shape
    found = arrival(tensor)
    if found is Layout.STRIDE_HV and (HV == 1 or T == 1):
        return False  # both layouts at once
    return found is not wanted


def in_layout(tensor: torch.Tensor, wanted: Layout) -> torch.Tensor:
    """The tensor in the wanted layout: itself where it lies so, else a copy."""
    return relayout(tensor, wanted) if must_move(tensor, wanted) else tensor


def relayout(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The same `[B, T, HV]` values in `layout`; the tensor itself where it lies so already.

    Raises:
        ValueError: `layout` is OTHER, which names no order of elements.
    """
    if layout is Layout.OTHER:
        raise ValueError("relayout: wanted STRIDE_HV or T_CONTIG, got OTHER")
    if layout is Layout.T_CONTIG:
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    return tensor.contiguous()


def empty(shape: tuple[int, int, int], layout: Layout, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised time-axis tensor of logical shape `[B, T, HV]` in `layout`."""
    import torch

    B, T, HV = shape
    if layout is Layout.T_CONTIG:
        return torch.empty((B, HV, T), dtype=dtype, device=device).transpose(1, 2)
    return torch.empty((B, T, HV), dtype=dtype, device=device)
