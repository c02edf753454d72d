"""An op's candidate run on this machine as Ascend's front end compiled it, in place of a device."""

from pathlib import Path

from ...launch import launcher
from ...launch.prepared import Prepared
from ...spec.declaration import Problem
from ...spec.operands import Call, Outputs
from ...tuning.experiment import PoisonedAllocations
from ..candidates import Case, chip_of, launch_of, named_arguments
from ..compile.compiler import Compiler, Request
from ..compile.toolchain import NativeTools
from .build import NativeBuildError, NativeKernel, build


class NativeRunner:
    """Runs launches natively; builds each kernel once.

    Args:
        compiler: Whose front end lowers the kernels.
        tools: Upstream MLIR and clang.
        cache: Folder of the built kernels.
    """

    def __init__(self, compiler: Compiler, tools: NativeTools, cache: Path) -> None:
        self._compiler = compiler
        self._tools = tools
        self._cache = cache
        self._kernels: dict[str, NativeKernel] = {}

    def launch(self, record: launcher.LaunchRecord) -> None:
        """Run one launch on its CPU tensors.

        Raises:
            NativeBuildError: the front end or upstream MLIR refuses the kernel.
        """
        launch = launch_of(record)
        self._kernel(launch.request(stage="linalg")).run(named_arguments(record), record.grid)

    def _kernel(self, request: Request) -> NativeKernel:
        known = repr(request)
        if known not in self._kernels:
            answer = self._compiler.lower(request)
            if answer.linalg is None:
                raise NativeBuildError(f"{request.kernel}: {answer.error} ({answer.error_source})")
            self._kernels[known] = build(answer.linalg, request, self._tools, self._cache)
        return self._kernels[known]

    def run(self, case: Case, call: Call) -> Outputs:
        """The results of a candidate on CPU tensors; memory that nobody wrote is NaN.

        Args:
            case: Op, key and candidate.
            call: Its arguments.
        """
        problem = Problem(key=case.key, chip=chip_of(self._compiler.target))
        prepared = Prepared(case.spec, problem, case.candidate, call)
        with PoisonedAllocations(), launcher.intercepting(self.launch):
            return prepared(call.tensors, call.scalars, call.cu_seqlens, call.chunk_indices)
