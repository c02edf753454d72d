"""Gives a process that the product starts the simulated NPU, as a real one would have found its own.

On `PYTHONPATH`, with what befalls launches there as JSON in `LAYOUT_TUNER_TEST_NPU_CHILD`: lists of `[kernel,
constants, what]`, where `what` is a time in ms, `stop` (the queue stops), `die` (a signal ends the process), the
seconds of a hang as `hang 8`, or `wrong` (the results are not written). What kernels are compiled to there is the
number in `LAYOUT_TUNER_TEST_NPU_COMPILATION`; `LAYOUT_TUNER_TEST_NPU_CLOCK=wall` lets time pass by itself.
"""

import importlib
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path


def simulate(events: list[tuple[str, dict[str, object], object]]) -> None:
    folder = Path(__file__).parents[1] / "npu_sim"
    spec = importlib.util.spec_from_file_location("npu_sim", folder / "__init__.py")
    sys.modules["npu_sim"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sim = importlib.import_module("npu_sim.sim")
    sim.install(devices=2)
    sim.attach_triton()
    sim.set_properties(L2_cache_size=1 << 10)
    sim.use_wall_clock(os.environ.get("LAYOUT_TUNER_TEST_NPU_CLOCK") == "wall")
    sim.compile_to(int(os.environ.get("LAYOUT_TUNER_TEST_NPU_COMPILATION", "0")))
    for kernel, constants, what in events:
        if what == "stop":
            sim.launch_fault(kernel, **constants)
        elif what == "die":
            fault = (kernel, constants, lambda launch: os.kill(os.getpid(), signal.SIGSEGV))
            sim.triton_bridge.faults.insert(0, fault)
        elif what == "wrong":
            sim.triton_bridge.faults.insert(0, (kernel, constants, lambda launch: None))
        elif isinstance(what, str):
            sim.launch_hang(kernel, float(what.removeprefix("hang ")), **constants)
        else:
            sim.launch_cost(kernel, what, **constants)
    measure = importlib.import_module("layout_tuner.tuning.timing")
    taken = measure.EventTimer.round_us

    def round_us(self, runs):
        with sim.without_execution():
            return taken(self, runs)

    measure.EventTimer.round_us = round_us


if os.environ.get("LAYOUT_TUNER_TEST_NPU_CHILD"):
    simulate(json.loads(os.environ["LAYOUT_TUNER_TEST_NPU_CHILD"]))
