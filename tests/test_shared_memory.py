"""No kernel asks for more shared memory than a block of a Hopper GPU has: compiled for one, without one.

`pytest -m nightly tests/test_shared_memory.py` compiles every op, variant, layout, form, dtype and width; here are the
standard forms at the widths where a loop over columns has a single step, and at the widest. On a GPU,
`pytest -m gpu tests/test_shared_memory.py` runs such widths and compares the results with the oracle.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import experiment_for, faults, key_for
from shared_memory import LIMIT

from layout_tuner.spec import registry

PROGRAM = Path(__file__).parent / "support" / "shared_memory.py"
WIDTHS = [(16, 16), (24, 40), (32, 32), (64, 64), (128, 128), (192, 128), (256, 256)]
HEADS = [(1, 1), (2, 4), (1, 4)]
FORMS = ["BT=64,beta=float32@STRIDE_HV,g=float32@STRIDE_HV,grad=1", "BT=64,beta=float32@STRIDE_HV,grad=1"]
STATES = ["chunk_gated_delta_rule_fwd_h", "chunk_gated_delta_rule_bwd_dhu"]


def compiled(asked: Any, tmp_path: Path) -> list[dict[str, Any]]:
    """What the compiler says, in a process whose kernels are made for a device."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, str(PROGRAM), json.dumps(asked)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_fits(found: list[dict[str, Any]]) -> None:
    assert found
    worst = max(found, key=lambda each: each["shared"])
    print(f"{len(found)} kernels; the most is {worst['shared']} of {LIMIT} bytes, {worst['kernel']}, {worst['key']}")
    assert [each for each in found if each["shared"] > LIMIT] == []


@pytest.mark.parametrize(
    ("ops", "dtype", "width"),
    [
        ([], "bfloat16", (64, 64)),
        (["chunk_bwd_dqkwg", "prepare_wy_repr_bwd"], "float32", (32, 32)),
        (STATES, "bfloat16", (256, 256)),
        (STATES, "float32", (256, 256)),
    ],
    ids=["one-step", "one-step-fp32", "widest", "widest-fp32"],
)
def test_standard_forms_fit(ops: list[str], dtype: str, width: tuple[int, int], tmp_path: Path) -> None:
    ops = ops or [name for name in registry.names() if name != "chunk_gated_delta_rule"]  # made of the others
    asked = {"ops": ops, "dtypes": [dtype], "widths": [width], "heads": [(1, 1)]}
    assert_fits(compiled(asked | {"every_form": False, "every_plan": False}, tmp_path))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("op", registry.names())
def test_everything_fits(op: str, dtype: str, tmp_path: Path) -> None:
    asked = {"ops": [op], "dtypes": [dtype], "widths": WIDTHS, "heads": HEADS}
    assert_fits(compiled(asked | {"every_form": True, "every_plan": True}, tmp_path))


def test_what_does_not_fit_is_seen(tmp_path: Path) -> None:
    (found,) = compiled("planted", tmp_path)
    assert found["here"] == found["triton"] > LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize("form", registry.lookup("chunk_bwd_dqkwg").every_form)
def test_loops_of_one_step_are_right(form: str, device: torch.device) -> None:
    """Where tasks had no loop left, and more shared memory was asked for than there is."""
    spec = registry.lookup("chunk_bwd_dqkwg")
    key = key_for(spec, form, "bfloat16", H=2, HV=2, K=64, V=64)
    assert faults(experiment_for(spec, key, device)) == []


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [64, 256])
def test_the_chain_is_right_where_each_head_has_queries_of_its_own(form: str, width: int, device: torch.device) -> None:
    spec = registry.lookup("chunk_gated_delta_rule")
    key = key_for(spec, form, "bfloat16", H=2, HV=2, K=width, V=width)
    assert faults(experiment_for(spec, key, device)) == []
