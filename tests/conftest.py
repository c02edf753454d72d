"""Where tests run: on the accelerator there is, else on the CPU through Triton's interpreter."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch

# Kernels are made for the interpreter or for a device when their module is imported, so this comes first.
if not torch.cuda.is_available() and not os.environ.get("LAYOUT_TUNER_TEST_NPU"):
    os.environ["TRITON_INTERPRET"] = "1"

collect_ignore = [] if os.environ.get("LAYOUT_TUNER_TEST_NPU") else ["npu"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device kernels are tested on."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


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
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
