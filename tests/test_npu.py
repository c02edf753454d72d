"""What only an NPU can show; the simulated one runs these too, see `tests/npu/test_on_a_device.py`."""

import pytest
import torch
from dv_local import arguments, assert_right, dv_local

from layout_tuner.config import Config
from layout_tuner.device import driver, environment
from layout_tuner.selftest.run import selftest

pytestmark = pytest.mark.npu


def test_the_device_is_the_one_that_is_picked_and_says_what_it_is(npu: torch.device, device: torch.device) -> None:
    assert device == npu
    chip = driver.chip(npu)
    assert chip.kind == "npu" and chip.name.startswith("Ascend") and chip.cube_programs > 0 < chip.vector_programs
    assert environment.environment(npu).facts["cann"] != "unknown"


def test_a_call_runs_there_and_is_right(npu: torch.device) -> None:
    given = arguments(npu)
    assert_right(dv_local(given).cpu(), {name: x.cpu() for name, x in given.items()})


def test_the_self_test_has_no_complaint_about_the_device() -> None:
    report = selftest(device="npu:0", ops=[], config=Config())
    assert [f"{row.name}: {row.seen}" for row in report.rows if not row.good] == []
