"""The suite's own test: each mistake such kernels are known for, planted into a copy of the sources, has to be caught.

Every mistake is one that reads within the operands or the NaN behind them: an interpreted kernel that writes past its
outputs would damage the process that looks for it.
"""

import importlib
import itertools
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import layout_tuner.kernels
import pytest
import torch
from cases import experiment_for, faults
from dv_local import SPEC, key

from layout_tuner.ops import dv_local as op

SOURCES = Path(next(iter(layout_tuner.kernels.__path__)))
FORM = "BT=64,g=float32@STRIDE_HV"
SIZES = {"H": 1, "HV": 2, "K": 16, "V": 16}
CU_SEQLENS = (3, 3, 20, 20, 62, 64)
_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """What is replaced in which module of the kernels, and how often it stands there."""

    module: str = "dv_local"
    right: str
    wrong: str
    times: int = 1


T_CONTIG_BASE = "offset = tl.cast(i_b * HV + i_h, tl.int64) * T + (bos - tl.cast(i_b, tl.int64) * T)"
MISTAKES = {
    "stride-HV base on transposed storage": Mistake(
        module="time_axis", right=T_CONTIG_BASE, wrong="offset = tl.cast(bos, tl.int64) * HV + i_h"
    ),
    "local length in the head offset": Mistake(
        module="time_axis",
        right="time_axis_offset(i_b, bos, i_h, T, HV, T_CONTIG, C) + tl.cast(i_t, tl.int64)",
        wrong="time_axis_offset(i_b, bos, i_h, i_t * BT + BT, HV, T_CONTIG, C) + tl.cast(i_t, tl.int64)",
    ),
    "b*T instead of b*HV*T": Mistake(
        module="time_axis", right=T_CONTIG_BASE, wrong=T_CONTIG_BASE.replace("i_b * HV + i_h", "i_b + i_h")
    ),
    "absolute token offset in a packed batch": Mistake(
        module="time_axis",
        right="+ tl.cast(i_t, tl.int64) * BT * stride",
        wrong="+ (bos - i_b * T + i_t * BT) * stride",
    ),
    "boundary check of the whole-chunk kernel": Mistake(
        right="b_do = tl.load(p_do + o_c[:, None] * (HV * V) + o_v[None, :], mask=m_v, other=0.0)",
        wrong="b_do = tl.load(p_do + o_c[:, None] * (HV * V) + o_v[None, :], mask=(o_v < V)[None, :], other=0.0)",
    ),
    "boundary check of the sub-block kernel": Mistake(
        right="p_do + o_col[:, None] * (HV * V) + o_v[None, :], mask=m_col[:, None] & m_v[None, :], other=0.0",
        wrong="p_do + o_col[:, None] * (HV * V) + o_v[None, :], mask=m_v[None, :], other=0.0",
    ),
    "store of the last sub-block": Mistake(
        right="for i_r in tl.static_range(0, BT, BC):", wrong="for i_r in tl.static_range(0, BT - BC, BC):"
    ),
    "sign of the gate": Mistake(
        right="b_g_col[None, :] - b_g_row[:, None]", wrong="b_g_row[:, None] - b_g_col[None, :]"
    ),
    "causal mask of the whole-chunk kernel one row off": Mistake(
        right="o_c[:, None] <= o_c[None, :]", wrong="o_c[:, None] < o_c[None, :]"
    ),
    "causal mask of the sub-block kernel one row off": Mistake(
        right="o_row[:, None] <= o_col[None, :]", wrong="o_row[:, None] < o_col[None, :]"
    ),
    "H instead of HV": Mistake(
        right="p_do = do + (first * HV + i_h) * V", wrong="p_do = do + (first * H + i_h) * V", times=2
    ),
}


def planted(folder: Path, mistake: Mistake | None) -> ModuleType:
    """The kernels of the op from a copy of the sources, with a mistake or without."""
    package = f"planted_{next(_numbers)}"
    copy = folder / package
    copy.mkdir()
    for module in ("__init__", "dv_local", "time_axis"):
        shutil.copy(SOURCES / f"{module}.py", copy)
    if mistake is not None:
        source = copy / f"{mistake.module}.py"
        text = source.read_text()
        assert text.count(mistake.right) == mistake.times, "the source no longer has the text this mistake replaces"
        source.write_text(text.replace(mistake.right, mistake.wrong))
    return importlib.import_module(f"{package}.dv_local")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder to import from, for the length of a test."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("planted_")]:
        del sys.modules[name]


def found(device: torch.device) -> list[str]:
    """Faults in a dense and in a packed case, the packed one only where the dense one has none."""
    dense = faults(experiment_for(SPEC, key(FORM, B=2, T=62, **SIZES), device))
    return dense or faults(experiment_for(SPEC, key(FORM, T=66, varlen=True, **SIZES), device, CU_SEQLENS))


def test_the_unchanged_copy_is_right(folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "kernels", planted(folder, None))
    assert found(device) == []


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_caught(
    folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(op, "kernels", planted(folder, MISTAKES[name]))
    assert found(device)
