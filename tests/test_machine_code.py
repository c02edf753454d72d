"""Nothing that ptxas makes of a kernel reads a uniform register that nothing wrote: compiled for a GPU, without one.

`pytest -m nightly tests/test_machine_code.py` compiles every op, dtype and form at the widths of models.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import machine_code
import pytest

from layout_tuner import ops
from layout_tuner.spec import registry

assert ops, "importing the ops registers them"
PROGRAM = Path(machine_code.__file__)
WIDTHS = [(64, 64), (128, 128), (256, 256)]
CHAINS = [name for name in registry.names() if registry.lookup(name).gradient_option is not None]
# As cuobjdump prints them: an operand's address made of registers written before, then one of a register that was not.
RIGHT = """
        /*0000*/                   UMOV UR29, 0x40000040 ;
        /*0010*/                   R2UR UR28, R6 ;
        /*0020*/                   UIADD3.64 UR30, UR28, 0x40, URZ ;
        /*0030*/                   HGMMA.64x32x16.F32.BF16 R24, R104, gdesc[UR28].tnspB, RZ, !UPT ;
        /*0040*/              @P0  HGMMA.64x64x16.F32.BF16 R24, gdesc[UR28], R24, gsb0 ;
        /*0050*/                   UISETP.NE.AND UP0, UPT, UR28, URZ, UPT ;
"""
WRONG = RIGHT.replace("R2UR UR28, R6", "UIADD3 UR28, UP0, UR28, 0x40, URZ")


def surveyed(tmp_path: Path, **asked: Any) -> list[dict[str, Any]]:
    """What `machine_code` finds, in a process whose kernels are made for a device."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    asked = {"heads": [(2, 4)], "every_form": False, "every_plan": False, **asked}
    command = [sys.executable, str(PROGRAM), json.dumps(asked)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_written(found: list[dict[str, Any]]) -> None:
    assert found
    assert all(each["instructions"] > 100 for each in found)
    assert [each for each in found if each["unwritten"]] == []


def test_the_kernel_that_ptxas_got_wrong(tmp_path: Path) -> None:
    """With sums over tokens as products of three more operands in shared memory it read at any address."""
    heads = {
        "ops": ["chunk_kda_bwd_wy_dqkg_fused"],
        "dtypes": ["bfloat16"],
        "widths": [(128, 128)],
        "heads": [(16, 16)],
    }
    assert_written(surveyed(tmp_path, **heads))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("op", [name for name in registry.names() if name not in CHAINS])
def test_every_kernel(op: str, dtype: str, tmp_path: Path) -> None:
    assert_written(surveyed(tmp_path, ops=[op], dtypes=[dtype], widths=WIDTHS, every_form=True))


def test_what_was_not_written_is_seen() -> None:
    assert machine_code.unwritten(RIGHT) == []
    (found,) = machine_code.unwritten(WRONG)
    assert found.endswith("URZ: UR28")
