"""The stream that launchers take, on an NPU without draining torch's queue at every launch."""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import triton.runtime

from layout_tuner.device import driver


@pytest.fixture
def drained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The devices whose queues were drained, by Triton's question for a raw stream."""
    found: list[int] = []
    streams = {0: (7, 0, 20), 1: (7, 1, 20)}

    def raw(index: int) -> int:
        found.append(index)
        return 1000 * streams[index][0] + index

    torch_npu = SimpleNamespace(_C=SimpleNamespace(_npu_getCurrentStream=streams.__getitem__), streams=streams)
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=raw)))
    monkeypatch.setattr(driver, "launch_target", lambda: "npu")
    return found


def ask(stream: Callable[[int], int], *devices: int) -> list[int]:
    return [stream(index) for index in devices]


def test_a_stream_is_asked_for_once_and_another_one_is_another(drained: list[int]) -> None:
    stream = driver.raw_stream()
    assert ask(stream, 0, 0, 1, 0) == [7000, 7000, 7001, 7000]
    assert drained == [0, 1]
    sys.modules["torch_npu"].streams[0] = (9, 0, 20)
    assert ask(stream, 0, 0, 1) == [9000, 9000, 7001]
    assert drained == [0, 1, 0]


def test_a_launcher_that_passes_the_queue_by_finds_it_empty(drained: list[int], monkeypatch) -> None:
    monkeypatch.setenv("TRITON_ENABLE_TASKQUEUE", "false")
    ask(driver.raw_stream(), 0, 0, 0)
    assert drained == [0, 0, 0]


@pytest.mark.parametrize("other", ["another device", "another torch_npu"])
def test_elsewhere_it_is_tritons_own(drained: list[int], monkeypatch, other: str) -> None:
    if other == "another device":
        monkeypatch.setattr(driver, "launch_target", lambda: "cuda")
    else:
        monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(_C=SimpleNamespace()))
    assert driver.raw_stream() is triton.runtime.driver.active.get_current_stream
