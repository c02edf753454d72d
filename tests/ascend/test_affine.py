"""Affine maps."""

import pytest

from layout_tuner.ascend.mlir.affine import parse_affine_map


@pytest.mark.parametrize(
    ("text", "values", "wanted"),
    [
        ("(d0) -> (d0)", (3,), (3,)),
        ("(d0)[s0, s1] -> ((-d0 + s1) ceildiv s0, 4)", (5, 4, 14), (3, 4)),
        ("()[s0, s1] -> (s0 + s1 * 256)", (1, 2), (513,)),
        ("()[s0, s1, s2, s3, s4] -> ((s0 + ((s2 - s3) floordiv s4) * s1) mod 2)", (1, 4, 7, 1, 3), (1,)),
        ("(d0, d1) -> (d0 - d1 - 1, -(d0 + 2))", (9, 4), (4, -11)),
        ("() -> ()", (), ()),
        ("()[s0] -> (s0 floordiv -4, s0 mod 4)", (-3,), (0, 1)),
    ],
)
def test_values(text: str, values: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    assert parse_affine_map(text)(*values) == wanted


@pytest.mark.parametrize("text", ["(d0) -> (d1)", "(d0) -> d0", "(d0) -> (d0", "(d0) -> (d0 & 1)", ""])
def test_what_is_no_map(text: str) -> None:
    with pytest.raises(ValueError, match="affine map"):
        parse_affine_map(text)


def test_number_of_values() -> None:
    with pytest.raises(ValueError, match="takes 1 values, got 2"):
        parse_affine_map("(d0) -> (d0)")(1, 2)
