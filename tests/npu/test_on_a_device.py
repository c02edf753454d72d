"""On a machine with an NPU the tests run kernels there: shown with the simulated one, in a pytest of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CASE = "test_layouts_agree_in_every_combination_of_dtypes"


def pytest_on_an_npu(*arguments: str, events: object = ()) -> subprocess.CompletedProcess[str]:
    """Run tests where an NPU is found, with what happens to its launches."""
    variables = {name: value for name, value in os.environ.items() if name != "LAYOUT_TUNER_TEST_NPU"}
    variables |= {
        "PYTHONPATH": str(TESTS / "npu_child"),
        "LAYOUT_TUNER_TEST_NPU_CHILD": json.dumps(events),
        "LAYOUT_TUNER_TEST_NPU_CLOCK": "wall",
        "LAYOUT_TUNER_TEST_DEVICE": "npu",
        "TRITON_INTERPRET": "1",  # which runs the simulated device's kernels
    }
    command = [Path(sys.executable).with_name("pytest"), "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=TESTS.parent, env=variables, capture_output=True, text=True, check=False)


def test_what_is_marked_npu_runs_and_what_is_marked_gpu_does_not() -> None:
    done = pytest_on_an_npu("tests/test_npu.py", "tests/test_launcher_gpu.py")
    assert done.returncode == 0, done.stdout
    assert "kernels ran on npu" in done.stdout
    assert "3 passed" in done.stdout and "needs an NVIDIA GPU" in done.stdout and "needs an Ascend" not in done.stdout


@pytest.mark.parametrize("event", ["right", "wrong"])
def test_the_generated_tests_of_the_kernels_launch_on_it(event: str) -> None:
    """A launch that the device drops fails a test, which it would not if the test ran elsewhere."""
    events = [] if event == "right" else [("solve_tril*", {}, "wrong")]
    done = pytest_on_an_npu("tests/test_ops.py", "-k", "solve_tril and float32 and dense", "-x", events=events)
    assert done.returncode == (0 if event == "right" else 1), done.stdout
    assert ("error=inf" in done.stdout) == (event == "wrong"), done.stdout
