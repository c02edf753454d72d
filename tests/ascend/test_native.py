"""Native execution of small kernels, compared with torch and with Triton's interpreter."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from layout_tuner.ascend.compile.compiler import Compiler
from layout_tuner.ascend.compile.toolchain import NativeTools
from layout_tuner.ascend.lowering import Launch, Pointer
from layout_tuner.ascend.native.build import NativeBuildError, NativeKernel, build

pytestmark = pytest.mark.ascend

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
INTERPRET = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import sample_kernels
a, b, c, n = torch.load(sys.argv[2])
sample_kernels.masked_product[(1,)](a, b, c, n, N=a.shape[0], DOT_PRECISION="ieee")
torch.save(c, sys.argv[2])
"""


@pytest.fixture
def native(compiler: Compiler, native_tools: NativeTools, tmp_path: Path):  # type: ignore[no-untyped-def]
    def make(launch: Launch) -> NativeKernel:
        request = launch.request(stage="linalg")
        answer = compiler.lower(request)
        assert answer.linalg is not None, answer.error
        return build(answer.linalg, request, native_tools, tmp_path)

    return make


def product(sample: ModuleType, dtype: torch.dtype, n: int) -> Launch:
    pointer = Pointer(dtype=NAMES[dtype])
    return Launch(
        kernel=sample.masked_product,
        grid=1,
        arguments={"a": pointer, "b": pointer, "c": pointer, "n": n},
        constexprs={"N": 32, "DOT_PRECISION": "ieee"},
    )


@pytest.mark.parametrize("dtype", list(NAMES), ids=str)
def test_a_matrix_product(native, sample: ModuleType, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(32, 32, generator=generator).to(dtype) for _ in range(2))
    a[20:] = float("nan")  # masked rows must not be read
    c = torch.full((32, 32), float("nan"), dtype=dtype)
    native(product(sample, dtype, 20)).run({"a": a, "b": b, "c": c, "n": 20}, 1)
    wanted = (a[:20].double() @ b.double()).to(dtype)
    torch.testing.assert_close(c[:20], wanted, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-4)
    assert c[20:].isnan().all()


def test_the_interpreter_agrees(native, sample: ModuleType, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(32, 32, generator=generator) for _ in range(2))
    c = torch.zeros(32, 32)
    torch.save((a, b, torch.zeros(32, 32), 32), tmp_path / "data.pt")
    # In a process of its own: Triton decides at import whether it interprets.
    subprocess.run(
        [sys.executable, "-c", INTERPRET, str(Path(__file__).parent), str(tmp_path / "data.pt")],
        check=True,
        env={"TRITON_INTERPRET": "1", "PATH": "", "OMP_NUM_THREADS": "1"},
    )
    native(product(sample, torch.float32, 32)).run({"a": a, "b": b, "c": c, "n": 32}, 1)
    torch.testing.assert_close(c, torch.load(tmp_path / "data.pt"), rtol=1e-5, atol=1e-5)


def test_every_program_runs(native, sample: ModuleType) -> None:  # type: ignore[no-untyped-def]
    rows = 7
    x, y = torch.randn(rows, 64, 8), torch.full((rows, 64), float("nan"))
    launch = Launch(
        kernel=sample.scale_rows,
        grid=3,
        arguments={"x": Pointer(dtype="fp32"), "y": Pointer(dtype="fp32"), "factor": 0.5, "TASKS": rows},
        constexprs={"N": 64, "STRIDE": 8},
    )
    native(launch).run({"x": x, "y": y, "factor": 0.5, "TASKS": rows}, 3)
    assert torch.equal(y, x[:, :, 0] * 0.5)


def test_contents_and_empty_sequences(native, sample: ModuleType) -> None:  # type: ignore[no-untyped-def]
    x, y = torch.randn(200), torch.zeros(200)
    offsets = torch.tensor([10, 10, 90, 150], dtype=torch.int64)
    pointer = Pointer(dtype="fp32")
    launch = Launch(
        kernel=sample.starts,
        grid=3,
        arguments={"x": pointer, "y": pointer, "offsets": Pointer(dtype="i64")},
        constexprs={"N": 32},
    )
    native(launch).run({"x": x, "y": y, "offsets": offsets}, 3)
    assert torch.equal(y[10:150], x[10:150])
    assert not y[:10].any()
    assert not y[150:].any()


def test_wrong_arguments(native, sample: ModuleType) -> None:  # type: ignore[no-untyped-def]
    kernel = native(product(sample, torch.float32, 32))
    tensor = torch.zeros(32, 32)
    with pytest.raises(TypeError, match=r"b: wanted a fp32 tensor on the CPU, got torch.bfloat16 on cpu"):
        kernel.run({"a": tensor, "b": tensor.bfloat16(), "c": tensor, "n": 32}, 1)
    with pytest.raises(TypeError, match="a: wanted a fp32 tensor on the CPU, got NoneType"):
        kernel.run({"a": None, "b": tensor, "c": tensor, "n": 32}, 1)


def test_what_upstream_refuses(
    compiler: Compiler, native_tools: NativeTools, sample: ModuleType, tmp_path: Path
) -> None:
    request = product(sample, torch.float32, 32).request(stage="linalg")
    with pytest.raises(NativeBuildError, match=r"mlir-opt-19: .*error"):
        build("module { nonsense }", request, native_tools, tmp_path)
    assert not list(tmp_path.glob("*.so"))
