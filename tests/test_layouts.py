"""Where time-axis tensors lie, and the copy from one layout to the other."""

import pytest
import torch

from layout_tuner.spec import layouts
from layout_tuner.spec.layouts import Layout, LayoutPlan, arrival, in_layout, must_move, relayout

B, T, HV = 2, 5, 3


@pytest.fixture
def g() -> torch.Tensor:
    return torch.arange(B * T * HV, dtype=torch.float32).reshape(B, T, HV)


def t_contig(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def test_arrival_of_the_two_layouts(g: torch.Tensor) -> None:
    assert arrival(g) is Layout.STRIDE_HV
    assert arrival(t_contig(g)) is Layout.T_CONTIG


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(lambda: torch.zeros(B, T, 2 * HV)[..., ::2], id="every second head"),
        pytest.param(lambda: torch.zeros(B, T, 2 * HV)[..., :HV], id="slice of a projection"),
        pytest.param(lambda: torch.zeros(B, T + 1, HV)[:, :T], id="slice of rows"),
        pytest.param(lambda: torch.zeros(B, HV, T + 1)[..., :T].transpose(1, 2), id="slice of T-contiguous rows"),
        pytest.param(lambda: torch.zeros(1, 1, 1).expand(B, T, HV), id="stride 0"),
        pytest.param(lambda: torch.zeros(T, B, HV).transpose(0, 1), id="time first"),
        pytest.param(lambda: torch.zeros(1, T, HV).expand(B, T, HV), id="one row for all"),
        pytest.param(lambda: torch.zeros(1, 5, 5)[:, :4, :4], id="square slice"),
    ],
)
def test_arrival_of_anything_else_is_other(odd) -> None:
    assert arrival(odd()) is Layout.OTHER


def test_square_tensors_are_told_apart_by_stride() -> None:
    square = torch.zeros(2, 4, 4)
    assert arrival(square) is Layout.STRIDE_HV
    assert arrival(t_contig(square)) is Layout.T_CONTIG


@pytest.mark.parametrize("shape", [(2, 5, 1), (2, 1, 5), (1, 1, 1)])
def test_one_head_or_one_token_lies_in_both_layouts(shape: tuple[int, int, int]) -> None:
    tensor = torch.zeros(shape)
    for same in (tensor, t_contig(tensor)):
        assert arrival(same) is Layout.STRIDE_HV
        assert not must_move(same, Layout.STRIDE_HV)
        assert not must_move(same, Layout.T_CONTIG)


def test_stride_of_a_dimension_of_size_one_does_not_matter() -> None:
    assert arrival(torch.zeros(4 * T * HV).as_strided((1, T, HV), (999, HV, 1))) is Layout.STRIDE_HV
    assert arrival(torch.zeros(4 * T * HV).as_strided((1, T, HV), (999, 1, T))) is Layout.T_CONTIG
    assert arrival(torch.zeros(9).as_strided((1, T, 1), (1, 1, 7))) is Layout.STRIDE_HV


def test_one_head_with_gaps_between_tokens_is_other() -> None:
    sliced = torch.zeros(2, T, 4)[..., :1]
    assert arrival(sliced) is Layout.OTHER
    assert must_move(sliced, Layout.STRIDE_HV)


@pytest.mark.parametrize("layout", [Layout.STRIDE_HV, Layout.T_CONTIG])
def test_relayout_changes_addresses_only(g: torch.Tensor, layout: Layout) -> None:
    for tensor in (g, t_contig(g), torch.stack([g, -g], dim=-1).flatten(2)[..., ::2]):
        moved = relayout(tensor, layout)
        assert arrival(moved) is layout
        assert moved.shape == g.shape
        assert torch.equal(moved, g)


def test_relayout_leaves_what_lies_right(g: torch.Tensor) -> None:
    assert relayout(g, Layout.STRIDE_HV).data_ptr() == g.data_ptr()
    there = t_contig(g)
    assert relayout(there, Layout.T_CONTIG).data_ptr() == there.data_ptr()


def test_in_layout_copies_only_what_has_to_move(g: torch.Tensor) -> None:
    assert in_layout(g, Layout.STRIDE_HV) is g
    assert arrival(in_layout(g, Layout.T_CONTIG)) is Layout.T_CONTIG
    one_head = g[..., :1].contiguous()
    assert in_layout(one_head, Layout.T_CONTIG) is one_head


def test_relayout_to_other_is_refused(g: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="wanted STRIDE_HV or T_CONTIG, got OTHER"):
        relayout(g, Layout.OTHER)


@pytest.mark.parametrize("layout", [Layout.STRIDE_HV, Layout.T_CONTIG])
def test_empty_is_in_its_layout(layout: Layout) -> None:
    made = layouts.empty((B, T, HV), layout, torch.float16, torch.device("cpu"))
    assert made.shape == (B, T, HV)
    assert made.dtype == torch.float16
    assert arrival(made) is layout


def test_plan_names_its_operands_and_takes_stride_hv_for_others() -> None:
    plan = LayoutPlan.of({"g": Layout.T_CONTIG, "beta": Layout.STRIDE_HV})
    assert str(plan) == "g=T_CONTIG,beta=STRIDE_HV"
    assert plan.t_contig("g")
    assert not plan.t_contig("beta")
    assert plan["dg"] is Layout.STRIDE_HV
    assert {plan: 1}[LayoutPlan((("g", Layout.T_CONTIG), ("beta", Layout.STRIDE_HV)))] == 1


C = 4


@pytest.fixture
def gates() -> torch.Tensor:
    """One gate for each channel."""
    return torch.arange(B * T * HV * C, dtype=torch.float32).reshape(B, T, HV, C)


@pytest.mark.parametrize("layout", [Layout.STRIDE_HV, Layout.T_CONTIG])
def test_channels_stay_innermost(gates: torch.Tensor, layout: Layout) -> None:
    made = layouts.empty((B, T, HV, C), layout, torch.float32, torch.device("cpu"))
    assert arrival(made) is layout
    for tensor in (gates, t_contig(gates), gates.repeat(1, 1, 2, 1)[:, :, :HV]):
        moved = relayout(tensor, layout)
        assert arrival(moved) is layout
        assert moved.stride() == made.stride()
        assert torch.equal(moved, gates)


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(lambda: torch.zeros(B, T, HV, 2 * C)[..., :C], id="slice of channels"),
        pytest.param(lambda: torch.zeros(B, T, HV, 2 * C)[..., ::2], id="every second channel"),
        pytest.param(lambda: torch.zeros(B, T, C, HV).transpose(2, 3), id="channels before heads"),
        pytest.param(lambda: torch.zeros(B, HV, C, T).permute(0, 3, 1, 2), id="time innermost"),
        pytest.param(lambda: torch.zeros(B, T, HV, 1).expand(B, T, HV, C), id="one gate for all channels"),
    ],
)
def test_channels_that_do_not_lie_together_are_other(odd) -> None:
    assert arrival(odd()) is Layout.OTHER
    assert must_move(odd(), Layout.STRIDE_HV)


def test_one_channel_is_none() -> None:
    one = torch.zeros(B, HV, T, 1).transpose(1, 2)
    assert arrival(one) is arrival(one[..., 0]) is Layout.T_CONTIG


@pytest.mark.parametrize("shape", [(2, 5, 1, C), (2, 1, 5, C)])
def test_channels_of_one_head_or_one_token_lie_in_both_layouts(shape: tuple[int, ...]) -> None:
    assert not must_move(torch.zeros(shape), Layout.T_CONTIG)
    assert not must_move(t_contig(torch.zeros(shape)), Layout.STRIDE_HV)
