"""Where tests run: on the accelerator there is, else on the CPU through Triton's interpreter."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hardware import INTERPRETED, KIND

# Kernels are made for the interpreter or for a device when their module is imported, so this comes first.
if INTERPRETED and not os.environ.get("LAYOUT_TUNER_TEST_NPU"):
    os.environ["TRITON_INTERPRET"] = "1"

collect_ignore = [] if os.environ.get("LAYOUT_TUNER_TEST_NPU") else ["npu"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device kernels are tested on."""
    return torch.device("cpu") if INTERPRETED else torch.device(KIND, 0)


@pytest.fixture(scope="session")
def npu() -> torch.device:
    """The NPU, for tests marked `npu`."""
    return torch.device("npu", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what kernels ran on: a device that was not seen would go unnoticed."""
    where = "in Triton's interpreter on the CPU" if INTERPRETED else f"on {KIND}"
    where = "on the simulated NPU" if os.environ.get("LAYOUT_TUNER_TEST_NPU") else where
    terminalreporter.write_line(f"kernels ran {where}")


@pytest.fixture(autouse=True)
def _no_stray_settings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads the developer's settings or writes the developer's cache."""
    for name in list(os.environ):
        if name.startswith("LAYOUT_TUNER_") and not name.startswith("LAYOUT_TUNER_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache-home")))


@pytest.fixture(autouse=True)
def _no_entries_left() -> Iterator[None]:
    """What a test enabled or prepared ends with it."""
    yield
    if "layout_tuner.dispatch.router" in sys.modules:
        from layout_tuner.dispatch import router

        router.clear()
        router.current().prepared.clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs hardware that is not here."""
    needs = {"gpu": ("cuda", "needs an NVIDIA GPU"), "npu": ("npu", "needs an Ascend NPU")}
    for item in items:
        for mark, (kind, reason) in needs.items():
            if kind != KIND and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))
