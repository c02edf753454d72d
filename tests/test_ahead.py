"""Compiling ahead: what processes of their own compile is what the first launches look for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from hardware import INTERPRETED

SUPPORT = Path(__file__).parent / "support"

# Kernels are made for a device here, not for the interpreter, over Triton down to where it would compile.
SAME = """
import sys
import torch
from launches import stubbed
from layout_tuner.tuning import ahead
from layout_tuner.device import driver
from layout_tuner import ops
from layout_tuner.spec import registry
from layout_tuner.tuning.inputs import synthesize
from layout_tuner.launch.prepared import Prepared
from layout_tuner.spec.declaration import Problem

cpu = torch.device("cpu")
for name, form, varlen in (
    ("chunk_bwd_dv_local", "BT=16,g=float32@STRIDE_HV", False),
    ("chunk_bwd_dv_local", "BT=16,g=float32@STRIDE_HV", True),
    ("chunk_gated_delta_rule", "training", False),
):
    spec = registry.lookup(name)
    sizes = {"B": 1, "T": 20, "H": 1, "HV": 2, "K": 16, "V": 16}
    key = spec.key_for(sizes, dtype="bfloat16", form=spec.form_named(form), varlen=varlen)
    problem = Problem(key=key, chip=driver.chip(cpu))
    candidates = spec.candidates(key)
    with stubbed() as triton:
        wanted = ahead.units(spec, problem, candidates)
        for unit in wanted:
            ahead.compile_unit(unit, "cpu")
        assert not triton.launches
        compiled = len(triton.compiles)
        assert compiled == len(set(triton.compiles)) == len(wanted)
        call = synthesize(spec, key, cpu)
        for candidate in candidates:
            Prepared(spec, problem, candidate, call)(call.tensors, call.scalars, call.cu_seqlens, call.chunk_indices)
        assert triton.launches
        assert len(triton.compiles) == compiled, triton.compiles[compiled:]
    print(name, compiled)
"""

# No driver is active there, so that each compiler fails.
FAILING = """
import logging, sys
import torch
from layout_tuner.tuning import ahead
from layout_tuner.kernels import dv_local
if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    unit = ahead.Unit(module=dv_local.__name__, name="chunk_bwd_dv_local_full", arguments=(), constants=(("H", 1),))
    other = ahead.Unit(module=dv_local.__name__, name="chunk_bwd_dv_local_sub", arguments=(), constants=(("H", 1),))
    said = []
    ahead.compile_ahead([unit], torch.device("cpu"), 50.0, said.append)
    assert said == []
    ahead.compile_ahead([unit, other], torch.device("cpu"), 50.0, said.append)
    assert said == [50.0]
"""


def run(code: str, folder: Path) -> str:
    """The output of a program of its own, in which Triton does not interpret."""
    file = folder / "program.py"
    file.write_text(code)
    variables = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(SUPPORT), "TRITON_CACHE_DIR": str(folder)}
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(
    triton.__version__.rpartition(".")[0] != "3.6" or not INTERPRETED, reason="stands on Triton 3.6, no device"
)
def test_what_is_compiled_ahead_is_what_the_first_launch_takes(tmp_path: Path) -> None:
    counts = dict(line.split() for line in run(SAME, tmp_path).splitlines())
    assert int(counts["chunk_gated_delta_rule"]) > 10


@pytest.mark.skipif(not INTERPRETED, reason="its compilers are to fail")
def test_compilers_that_fail_leave_the_first_launch_to_say_so(tmp_path: Path) -> None:
    assert "0 kernels compiled ahead, 2 not" in run(FAILING, tmp_path)
