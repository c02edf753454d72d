"""The examples run as README says, on whatever device there is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hardware import INTERPRETED

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_training_a_tiny_model_lowers_its_loss(tmp_path: Path) -> None:
    steps = 4 if INTERPRETED else 50
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "train_gdn.py"), "--steps", str(steps)],
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"loss (\S+) -> (\S+)\n", done.stdout)
    assert found, done.stdout
    assert float(found[2]) < 0.9 * float(found[1])
    assert "training on" in done.stderr, "a progress bar"
