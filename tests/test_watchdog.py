"""Calls with a time limit: what comes back, what is left behind, and who may hold a lock."""

import threading
import time

import pytest

from layout_tuner.tuning import deadline as watchdog
from layout_tuner.tuning.deadline import FamilyLock, run_within


def test_results_and_errors_come_back() -> None:
    assert run_within(10.0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        run_within(10.0, lambda: 1 // 0)
    with pytest.raises(KeyboardInterrupt):
        run_within(10.0, lambda: (_ for _ in ()).throw(KeyboardInterrupt()))


def test_what_does_not_end_is_left_and_stops_as_soon_as_it_can() -> None:
    gate = threading.Event()
    went_on = []

    def stuck() -> None:
        gate.wait(30.0)  # as a compiler that does not return to Python
        went_on.append(True)

    start = time.monotonic()
    with pytest.raises(TimeoutError):
        run_within(0.05, stuck)
    assert time.monotonic() - start < 10.0
    assert watchdog.left_behind() == 1
    gate.set()
    deadline = time.monotonic() + 10.0
    while watchdog.left_behind() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert watchdog.left_behind() == 0
    assert went_on == [], "what came back from the compiler was used"


def test_a_loop_in_python_is_ended() -> None:
    def spin() -> None:
        while True:
            try:
                time.sleep(0)
            except Exception:  # as a candidate that swallows errors would
                continue

    with pytest.raises(TimeoutError):
        run_within(5.0, spin)
    assert watchdog.left_behind() == 0


def test_a_lock_is_shared_with_those_who_work_for_its_holder_and_nobody_else() -> None:
    lock = FamilyLock()
    order = []

    def helper() -> None:
        with lock, lock:
            order.append("helper")

    with lock:
        run_within(10.0, helper)
        stranger = threading.Thread(target=lambda: lock.__enter__() or order.append("stranger") or lock.__exit__())
        stranger.start()
        time.sleep(0.1)
        order.append("holder")
    stranger.join(10.0)
    assert order == ["helper", "holder", "stranger"]
