"""Direct launches: a compiled kernel is launched for the arguments it was compiled for and for no others."""

import importlib
import itertools
import logging
import pkgutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import layout_tuner.kernels
import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import CONSTANTS, STREAM, Triton, compilable, shifted, stubbed, wanted
from layout_tuner.kernels import dv_local as kernels
from triton.runtime import jit

from layout_tuner.device import driver
from layout_tuner.launch import direct, launcher

NUMBERS = {"T", "NT", "N", "rows", "BLOCKS", "ROW_BLOCKS", "SEGMENT", "TASKS"}


@pytest.fixture
def stub() -> Iterator[Triton]:
    if triton.__version__.rpartition(".")[0] != "3.6":
        pytest.skip("stands on Triton 3.6")
    with stubbed() as made:
        yield made


@pytest.fixture
def kernel() -> jit.JITFunction:
    return compilable(kernels.chunk_bwd_dv_local_full)


def arguments(
    T: int = 20,
    *,
    dtype: torch.dtype = torch.float32,
    g: torch.dtype | None = torch.float32,
    cu_seqlens: torch.dtype | None = None,
    off: tuple[str, ...] = (),
    scale: float = 0.5,
) -> list[Any]:
    """Run-time arguments of `chunk_bwd_dv_local_full`; those named in `off` are not aligned."""
    tensors: dict[str, torch.Tensor | None] = {
        "q": torch.zeros(1, T, 2, 16, dtype=dtype),
        "k": torch.zeros(1, T, 2, 16, dtype=dtype),
        "do": torch.zeros(1, T, 4, 16, dtype=dtype),
        "g": None if g is None else torch.zeros(1, T, 4, dtype=g),
        "g_gamma": None,
        "A": None,
        "dv": torch.zeros(1, T, 4, 16, dtype=dtype),
        "cu_seqlens": None if cu_seqlens is None else torch.tensor([0, T], dtype=cu_seqlens),
        "chunk_indices": None if cu_seqlens is None else torch.zeros(-(-T // 16), 2, dtype=cu_seqlens),
    }
    placed = [shifted(x) if name in off and x is not None else x for name, x in tensors.items()]
    NT = -(-T // 16)
    return [*placed, scale, T, NT, 0 if cu_seqlens is None else 1, NT * 4]


def assert_right_kernel(stub: Triton, kernel: jit.JITFunction, given: list[Any], constants: Any = CONSTANTS) -> None:
    """The newest launch is of the kernel that Triton would choose, with these arguments."""
    launch = stub.launches[-1]
    assert launch.compiled.key == wanted(kernel, tuple(given), constants, launch.compiled.device)
    assert launch.stream == STREAM + launch.compiled.device
    handed = launch.arguments[: len(given)]
    if launch.triton:
        assert all(a is b for a, b in zip(handed, given, strict=True))
    else:
        addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in given]
        assert list(handed) == addresses
        assert list(launch.arguments[len(given) :]) == list(constants.values())


# -- the second launch is direct ---------------------------------------------------------------------------------


def test_from_the_second_launch_on_it_is_direct(stub: Triton, kernel: jit.JITFunction) -> None:
    bound = launcher.bind(kernel, **CONSTANTS)
    for grid in (3, 4, 5):
        given = arguments()
        bound(grid, *given)
        assert_right_kernel(stub, kernel, given)
    assert [launch.triton for launch in stub.launches] == [True, False, False]
    assert [launch.grid for launch in stub.launches] == [3, 4, 5]
    assert len(stub.compiles) == 1


def test_an_empty_grid_launches_nothing(stub: Triton, kernel: jit.JITFunction) -> None:
    bound = launcher.bind(kernel, **CONSTANTS)
    bound(0, *arguments())
    bound(1, *arguments())
    bound(0, *arguments())
    assert len(stub.launches) == 1


def test_binding_the_same_constants_shares_what_was_compiled(stub: Triton, kernel: jit.JITFunction) -> None:
    launcher.bind(kernel, **CONSTANTS)(1, *arguments())
    launcher.bind(kernel, **CONSTANTS)(1, *arguments())
    assert [launch.triton for launch in stub.launches] == [True, False]
    for other in (CONSTANTS | {"USE_G": 1}, CONSTANTS | {"BV": 32}):  # 1 equals True, and is another constant
        assert launcher.bind(kernel, **other) is not launcher.bind(kernel, **CONSTANTS)


# -- never the wrong specialisation ------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [1, 16, 17, 64, 1000])
def test_no_length_compiles_again(stub: Triton, kernel: jit.JITFunction, first: int) -> None:
    bound = launcher.bind(kernel, **CONSTANTS)
    for T in (first, 1, 16, 17, 64, 1000):
        given = arguments(T)
        bound(1, *given)
        assert_right_kernel(stub, kernel, given)
    assert len(stub.compiles) == 1
    assert [launch.triton for launch in stub.launches] == [True] + [False] * 5


VARIANTS = {
    "aligned": {},
    "q off": {"off": ("q",)},
    "g off": {"off": ("g",)},
    "all off": {"off": ("q", "k", "do", "g", "dv", "cu_seqlens", "chunk_indices")},
    "half": {"dtype": torch.float16},
    "bfloat16 gate": {"g": torch.bfloat16},
    "no gate": {"g": None},
    "int32": {"cu_seqlens": torch.int32},
    "int64": {"cu_seqlens": torch.int64},
    "int64 off": {"cu_seqlens": torch.int64, "off": ("chunk_indices",)},
    "scale 1": {"scale": 1},
    "scale 16": {"scale": 16},
    "scale True": {"scale": True},
}


@pytest.mark.parametrize(("one", "two"), list(itertools.permutations(VARIANTS, 2)))
def test_after_binding_at_another(stub: Triton, kernel: jit.JITFunction, one: str, two: str) -> None:
    bound = launcher.bind(kernel, **CONSTANTS)
    for name in (one, two, one, two, two):
        given = arguments(**VARIANTS[name])
        bound(2, *given)
        assert_right_kernel(stub, kernel, given)
    assert len(stub.compiles) == 2


@pytest.mark.parametrize("name", ["T", "NT", "N", "TASKS"])
def test_a_number_beyond_32_bits_is_another_kernel(stub: Triton, kernel: jit.JITFunction, name: str) -> None:
    bound = launcher.bind(kernel, **CONSTANTS)
    place = kernel.arg_names.index(name)
    for number in (20, 2**31, 2**31 - 1, 2**40, -1, 20):
        given = arguments()
        given[place] = number
        bound(1, *given)
        assert_right_kernel(stub, kernel, given)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "T": st.integers(1, 70),
                "dtype": st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
                "g": st.sampled_from([None, torch.float32, torch.bfloat16]),
                "cu_seqlens": st.sampled_from([None, torch.int32, torch.int64]),
                "off": st.sets(st.sampled_from(["q", "k", "do", "g", "dv", "cu_seqlens"])).map(tuple),
                "scale": st.sampled_from([0.5, 1.0, 16.0, 1, 16]),
            }
        ),
        min_size=2,
        max_size=8,
    )
)
def test_any_sequence_of_launches(calls: list[dict[str, Any]]) -> None:
    if triton.__version__.rpartition(".")[0] != "3.6":
        pytest.skip("stands on Triton 3.6")
    with stubbed() as stub:
        kernel = compilable(kernels.chunk_bwd_dv_local_full)
        bound = launcher.bind(kernel, **CONSTANTS)
        for call in calls:
            given = arguments(**call)
            bound(1, *given)
            assert_right_kernel(stub, kernel, given)
        assert len(stub.launches) == len(calls)
        assert len(stub.compiles) == len(set(stub.compiles))


def test_every_kernel_launches_one_way_and_its_numbers_never_compile() -> None:
    """Constants come last, and every number passed at run time is exempt from specialisation."""
    found = 0
    for module in pkgutil.iter_modules(layout_tuner.kernels.__path__):
        for each in vars(importlib.import_module(f"layout_tuner.kernels.{module.name}")).values():
            if type(each).__name__ not in ("InterpretedFunction", "JITFunction"):
                continue
            kernel = compilable(each)
            names = {parameter.name for parameter in kernel.params if not parameter.is_constexpr}
            if "TASKS" in names:
                found += 1
                assert direct.run_time_parameters(kernel, {kernel.arg_names[i]: 1 for i in kernel.constexprs})
                assert names & NUMBERS == set(kernel.do_not_specialize), kernel
    assert found >= 15


# -- where Triton launches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["launch_enter_hook", "launch_exit_hook"])
def test_profilers_see_every_launch(stub: Triton, kernel: jit.JITFunction, place: str) -> None:
    bound = launcher.bind(kernel, **CONSTANTS)
    bound(1, *arguments())
    bound(1, *arguments())
    chain = getattr(triton.knobs.runtime, place)
    hook = print
    chain.add(hook)
    try:
        bound(1, *arguments())
        assert stub.launches[-1].triton
        assert chain in stub.launches[-1].hooks
    finally:
        chain.remove(hook)
    bound(1, *arguments())
    assert not stub.launches[-1].triton


def test_hooks_that_replace_tritons_chain_and_pre_run_hooks(
    stub: Triton, kernel: jit.JITFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = launcher.bind(kernel, **CONSTANTS)
    bound(1, *arguments())
    with monkeypatch.context() as patched:
        patched.setattr(triton.knobs.runtime, "launch_enter_hook", print)
        bound(1, *arguments())
        assert stub.launches[-1].hooks[0] is print
    seen = []
    kernel.add_pre_run_hook(lambda *given, **named: seen.append(named["H"]))
    bound(1, *arguments())
    assert seen == [2]


def test_a_kernel_with_scratch_memory_is_launched_by_triton(
    stub: Triton, kernel: jit.JITFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launches.Launcher.global_scratch_size", 128)
    bound = launcher.bind(kernel, **CONSTANTS)
    for _ in range(3):
        bound(1, *arguments())
    assert [launch.triton for launch in stub.launches] == [True] * 3


def test_recording_runs_nothing_after_direct_launches(stub: Triton, kernel: jit.JITFunction) -> None:
    bound = launcher.bind(kernel, **CONSTANTS)
    bound(1, *arguments())
    bound(1, *arguments())
    with launcher.recording() as records, ThreadPoolExecutor(1) as pool:
        bound(1, *arguments())
        pool.submit(bound, 1, *arguments()).result()
    assert (len(records), len(stub.launches)) == (1, 3)


@pytest.mark.parametrize(
    ("distribution", "target"),
    [(("triton", "3.7.1"), "cuda"), (("triton", "3.60.0"), "cuda"), (("triton", "3.6.0"), "hip"),
     (("triton-ascend", "3.2.0"), "cuda"), (("triton-ascend", "3.3.0"), "npu")],
)  # fmt: skip
def test_another_triton_launches_by_its_own_path_and_says_so_once(
    stub: Triton,
    kernel: jit.JITFunction,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    distribution: tuple[str, str],
    target: str,
) -> None:
    monkeypatch.setattr(driver, "triton_distribution", lambda: distribution)
    monkeypatch.setattr(driver, "launch_target", lambda: target)
    caplog.set_level(logging.INFO, logger="layout_tuner.launch.direct")
    for constants in (CONSTANTS, CONSTANTS | {"BV": 32}):
        for _ in range(3):
            launcher.bind(kernel, **constants)(1, *arguments())
    assert all(launch.triton for launch in stub.launches)
    assert len(stub.launches) == 6
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert " ".join(distribution) in caplog.text


def test_the_interpreter_is_said_once(caplog: pytest.LogCaptureFixture, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("kernels are compiled")
    direct.say_interpreted.cache_clear()
    caplog.set_level(logging.INFO, logger="layout_tuner.launch.direct")
    for _ in range(2):
        launcher.bind(kernels.chunk_bwd_dv_local_full, **CONSTANTS)(1, *arguments())
    assert len(caplog.records) == 1
    assert "interpreter" in caplog.text


# -- devices and threads -----------------------------------------------------------------------------------------


class Placed(torch.Tensor):
    """A tensor that says it is on an accelerator."""

    index = 0

    def get_device(self) -> int:
        return self.index


def placed(index: int) -> list[Any]:
    """Arguments on a device."""
    made = [x.as_subclass(Placed) if isinstance(x, torch.Tensor) else x for x in arguments()]
    for x in made:
        if isinstance(x, Placed):
            x.index = index
    return made


def test_each_device_has_its_own_kernel_and_stream(stub: Triton, kernel: jit.JITFunction) -> None:
    bound = launcher.bind(kernel, **CONSTANTS)
    for index in (0, 1, 0, 1, 1):
        stub.index = index
        bound(1, *placed(index))
        assert stub.launches[-1].compiled.device == index
        assert stub.launches[-1].stream == STREAM + index
    assert len(stub.compiles) == 2
    assert [launch.triton for launch in stub.launches] == [True, True, False, False, False]


def test_arguments_of_two_devices_are_tritons_to_refuse(stub: Triton, kernel: jit.JITFunction) -> None:
    stub.index = 0
    bound = launcher.bind(kernel, **CONSTANTS)
    bound(1, *placed(0))
    mixed = placed(1)
    mixed[1] = placed(0)[1]
    bound(1, *mixed)
    assert stub.launches[-1].triton


def test_threads_share_a_kernel(stub: Triton, kernel: jit.JITFunction) -> None:
    bound = launcher.bind(kernel, **CONSTANTS)
    start = Barrier(4)

    def work(number: int) -> None:
        start.wait()
        for i in range(50):
            bound(1, *arguments(**list(VARIANTS.values())[(number + i) % 4]))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(stub.launches) == 200
    for launch in stub.launches:
        if not launch.triton:
            pointers = [x for x in launch.arguments[:9] if x is not None]
            off = [f"('*fp32', '{'D' if x % 16 == 0 else ''}')" for x in pointers]
            assert all(each in launch.compiled.key for each in off)


# -- triton-ascend -----------------------------------------------------------------------------------------------


class AscendKernel:
    """Kernels of triton-ascend 3.2: their launcher takes no constants, and tensors as they are."""

    def __init__(self, kernel: jit.JITFunction) -> None:
        self.params = kernel.params
        self.pre_run_hooks: list[Any] = []
        self.launches: list[tuple[Any, ...]] = []
        self.compiled: dict[object, Any] = {}
        self.named: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        def run(*given: Any, **constants: Any) -> Any:
            key = tuple(None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in given[:9])
            made = self.compiled.setdefault(key, CompiledKernel(self))
            self.named.append(constants)
            made.launched_by_triton = True
            made.run(*grid, 1, 1, STREAM, made.function, made.packed_metadata, None, None, None, *given)
            made.launched_by_triton = False
            return made

        return run


AscendKernel.__name__ = "JITFunction"


class CompiledKernel:
    """What triton-ascend 3.2 compiled."""

    launch_enter_hook = None
    launch_exit_hook = None

    def __init__(self, kernel: AscendKernel) -> None:
        self.kernel = kernel
        self.function = 1000 + len(kernel.compiled)
        self.packed_metadata = {"kernel_name": "chunk_bwd_dv_local_full", "hash": self.function}
        self.launched_by_triton = False

    def run(self, *given: Any) -> None:
        """`gridX, gridY, gridZ, stream, function, metadata, launch metadata, hooks, the kernel's arguments`."""
        x, y, z, stream, function, metadata, launch_metadata, enter, leave, *rest = given
        assert (y, z, stream, function, metadata) == (1, 1, STREAM, self.function, self.packed_metadata)
        assert (launch_metadata, enter, leave) == (None, None, None)
        self.kernel.launches.append((x, self, self.launched_by_triton, *rest))


@pytest.fixture
def ascend(kernel: jit.JITFunction, monkeypatch: pytest.MonkeyPatch) -> Iterator[AscendKernel]:
    monkeypatch.setattr(driver, "triton_distribution", lambda: ("triton-ascend", "3.2.0"))
    monkeypatch.setattr(driver, "launch_target", lambda: "npu")
    monkeypatch.setattr(driver, "launch_index", lambda: -1)
    monkeypatch.setattr(driver, "raw_stream", lambda: lambda index: STREAM)
    direct.style.cache_clear()
    yield AscendKernel(kernel)
    direct.style.cache_clear()


def test_options_that_a_variant_carries_reach_the_compiler(ascend: AscendKernel) -> None:
    with launcher.compiling({"multibuffer": False}), launcher.compiling({}):
        bound = launcher.bind(ascend, **CONSTANTS)
    plain = launcher.bind(ascend, **CONSTANTS)
    assert plain is not bound, "it is another binary"
    bound(1, *arguments())
    bound(1, *arguments())
    plain(1, *arguments())
    assert ascend.named == [{**CONSTANTS, "multibuffer": False}, CONSTANTS]
    with launcher.recording() as records:
        bound(1, *arguments())
        plain(1, *arguments())
    assert [record.options for record in records] == [{"multibuffer": False}, {}]


@pytest.mark.parametrize("version", ["3.2.1", "3.2.0.dev20260101", "3.2.0+local", "3.2"])
def test_a_release_that_was_not_verified_is_launched_by_triton(
    ascend: AscendKernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    """Its launcher may take other arguments, or the same in another order."""
    monkeypatch.setattr(driver, "triton_distribution", lambda: ("triton-ascend", version))
    with caplog.at_level(logging.INFO):
        assert direct.style() is None
    assert "direct launches: triton 3.6.0 on cuda, triton-ascend 3.2.0 on npu" in caplog.text
    bound = launcher.bind(ascend, **CONSTANTS)
    for _ in range(3):
        bound(7, *arguments())
    assert [launch[2] for launch in ascend.launches] == [True] * 3


def test_on_ascend_the_launcher_gets_tensors_and_no_constants(ascend: AscendKernel) -> None:
    bound = launcher.bind(ascend, **CONSTANTS)
    for name in ("aligned", "aligned", "q off", "q off", "aligned", "int32", "int32", "int64"):
        given = arguments(**VARIANTS[name])
        bound(7, *given)
        grid, compiled, _, *handed = ascend.launches[-1]
        assert grid == 7
        assert all(a is b for a, b in zip(handed, given, strict=True))
        key = tuple(None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in given[:9])
        assert compiled is ascend.compiled[key]
    by_triton = [launch[2] for launch in ascend.launches]
    assert by_triton == [True, False, True, False, False, True, False, True]


def test_on_ascend_hooks_and_large_grids_are_tritons(ascend: AscendKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = launcher.bind(ascend, **CONSTANTS)
    bound(1, *arguments())
    bound(65536, *arguments())
    assert ascend.launches[-1][2]
    monkeypatch.setattr(CompiledKernel, "launch_enter_hook", print)
    bound(1, *arguments())
    assert ascend.launches[-1][2]
    monkeypatch.undo()
