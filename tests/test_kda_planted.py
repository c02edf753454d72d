"""Mistakes that kernels with a gate for each key channel are known for, planted into a copy, have to be caught.

Each reads within the operands or the NaN behind them: an interpreted kernel that writes past its outputs would damage
the process that looks for it.
"""

import importlib
import itertools
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import layout_tuner.kernels
import pytest
import torch
from cases import experiment_for, faults, key_for

from layout_tuner.ops import kda_bwd_intra, kda_fwd_o, kda_intra
from layout_tuner.spec import registry
from layout_tuner.tuning.experiment import Experiment

SOURCES = Path(next(iter(layout_tuner.kernels.__path__)))
SIZES = {"B": 1, "T": 30, "H": 1, "HV": 2, "K": 16, "V": 16}
_numbers = itertools.count()

# What is replaced in which module, for which op; the op's module and the name under which it has its kernels.
MISTAKES = {
    "wrong reference row of the strip's past": (
        "kda_scores", "load_row(p_g, i_s * 16, tokens", "load_row(p_g, i_s * 0, tokens",
        "chunk_kda_fwd_intra", kda_intra, "kda_scores",
    ),
    "wrong reference row of a half": (
        "kda_decay", "<< (level + 1)) + (1 << level), tokens - 1)", "<< (level + 1)), tokens - 1)",
        "chunk_kda_fwd_intra", kda_intra, "kda_scores",
    ),
    "a reference row of the strip after": (
        "kda_bwd_intra", "tl.minimum(begin + 15, tokens - 1)", "tl.minimum(begin, tokens - 1)",
        "chunk_kda_bwd_intra", kda_bwd_intra, "kernels",
    ),
    "missing tail mask": (
        "kda_fwd_o", "b_v = load_channels(v + row * V, o_t, o_v, m_t,",
        "b_v = load_channels(v + row * V, o_t, o_v, o_t < BT,",
        "chunk_gla_fwd_o_gk", kda_fwd_o, "kernels",
    ),
    "local length as the base of a head": (
        "kda_fwd_o", "chunk_pointer(g, i_b, i_t, bos, i_h, T, HV", "chunk_pointer(g, i_b, i_t, bos, i_h, length, HV",
        "chunk_gla_fwd_o_gk", kda_fwd_o, "kernels",
    ),
    "scale twice": (
        "kda_fwd_o", "store_channels(o + row * V, o_t, o_v, m_t, tl.trans(b_o)",
        "store_channels(o + row * V, o_t, o_v, m_t, tl.trans(b_o) * scale", "chunk_gla_fwd_o_gk", kda_fwd_o, "kernels",
    ),
    "the last row's gate instead of the chunk's last": (
        "kda_w_u", "load_row(p_g, tokens - 1, tokens", "load_row(p_g, BT - 1, tokens",
        "chunk_kda_fwd_intra", kda_intra, "kda_w_u",
    ),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder to import from, for the length of a test."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("planted_kda_")]:
        del sys.modules[name]


def planted(folder: Path, module: str, right: str, wrong: str, kernels: str) -> ModuleType:
    """The kernels of an op from a copy of the sources with a mistake."""
    package = f"planted_kda_{next(_numbers)}"
    shutil.copytree(SOURCES, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    source = folder / package / f"{module}.py"
    text = source.read_text()
    assert text.count(right) == 1, "the source no longer has the text this mistake replaces"
    source.write_text(text.replace(right, wrong))
    return importlib.import_module(f"{package}.{kernels}")


def stronger(experiment: Experiment, factor: float) -> Experiment:
    """The same with cumulative gates that many times as strong."""
    tensors = tuple(
        tensor * factor if operand.fill == "cumulative_decay" else tensor
        for operand, tensor in zip(experiment.spec.operands, experiment.call.tensors)
    )
    call = replace(experiment.call, tensors=tensors)
    return Experiment(experiment.spec, experiment.key, experiment.device, call)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_caught(
    folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module, right, wrong, op, ops_module, attribute = MISTAKES[name]
    spec = registry.lookup(op)
    form = next(iter(spec.standard_forms.values())).changed(BT="32")
    kernels = attribute if attribute != "kernels" else ops_module.kernels.__name__.rpartition(".")[2]
    monkeypatch.setattr(ops_module, attribute, planted(folder, module, right, wrong, kernels))
    dense = experiment_for(spec, key_for(spec, form, **SIZES), device)
    packed = experiment_for(spec, key_for(spec, form, varlen=True, **SIZES), device, (1, 1, 8, 29))
    # Another row as the reference is the same number in exact arithmetic: strong gates show it.
    assert faults(dense) or faults(packed) or faults(stronger(dense, 200.0))
