"""From a kernel's launch to a request to the compiler, and from its answer to facts.

A `Launch` is a launch that the host code would make: kernel, grid, types and values of arguments, constexprs.
`layout_tuner.launch.launcher` records them from the real host code, so tiles, grids and arguments are written in
one place.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from layout_tuner.kernels import time_axis

from .compile.compiler import Answer, Constexpr, Request
from .facts import KernelFacts, analyse
from .mlir.walk import Argument

_ALIGNMENT: Final = 16
_INT32: Final = range(-(1 << 31), 1 << 31)
# Tasks of a packed batch that are followed: they differ, and following all would take long.
_SAMPLES: Final = 8
# What a kernel of any other folder may import too.
_KERNELS: Final = {time_axis.__name__.rpartition(".")[0]: str(Path(inspect.getfile(time_axis)).resolve().parent)}
# The number of tasks that a persistent kernel's programs share, by the names kernels give it.
TASKS: Final = ("TASKS", "n_tasks")


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of a kernel."""

    name: str
    constexpr: bool
    specialised: bool


def parameters(kernel: Any) -> tuple[Parameter, ...]:
    """The parameters of a jitted function, or of one that Triton's interpreter stands in for."""
    if hasattr(kernel, "params"):
        return tuple(
            Parameter(name=p.name, constexpr=p.is_constexpr, specialised=not p.do_not_specialize) for p in kernel.params
        )
    fixed = kernel.kwargs.get("do_not_specialize") or ()
    return tuple(
        Parameter(
            name=name,
            constexpr="constexpr" in str(parameter.annotation),
            specialised=name not in fixed and index not in fixed,
        )
        for index, (name, parameter) in enumerate(inspect.signature(kernel.fn).parameters.items())
    )


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """A tensor argument.

    Attributes:
        dtype: Triton's name of the element type, as `bf16`.
        aligned: Whether the address is a multiple of 16 bytes.
        contents: The values, where they decide what the kernel does (sequence starts, chunk indices).
    """

    dtype: str
    aligned: bool = True
    contents: Sequence[int] | None = None


RunTimeArgument = Pointer | int | float | None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: The jitted function.
        grid: Programs.
        arguments: Run-time arguments by name.
        constexprs: Compile-time arguments by name.
        multibuffer: Whether the compiler buffers what loops load several times; None leaves it to the target.
    """

    kernel: Any
    grid: int
    arguments: Mapping[str, RunTimeArgument]
    constexprs: Mapping[str, Constexpr]
    multibuffer: bool | None = None

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.fn.__name__)

    @property
    def tasks(self) -> int:
        """Tasks that the programs share; the grid where the kernel has no such argument."""
        for name in TASKS:
            value = self.arguments.get(name)
            if isinstance(value, int):
                return value
        return self.grid

    def request(self, **settings: Any) -> Request:
        """The request to the compiler for this launch.

        Args:
            settings: Further fields of `Request`.
        """
        signature: dict[str, str | None] = {}
        divisible: list[str] = []
        ones: list[str] = []
        for parameter in parameters(self.kernel):
            if parameter.constexpr:
                continue
            value = self.arguments[parameter.name]
            signature[parameter.name] = _type_text(value)
            if not parameter.specialised:
                continue
            if isinstance(value, Pointer):
                if value.aligned:
                    divisible.append(parameter.name)
            elif isinstance(value, int) and not isinstance(value, bool):
                if value == 1:
                    ones.append(parameter.name)
                elif value % _ALIGNMENT == 0:
                    divisible.append(parameter.name)
        module = self.kernel.fn.__module__
        package = module.rpartition(".")[0]
        folder = str(Path(inspect.getfile(self.kernel.fn)).resolve().parent)
        return Request(
            module=module,
            kernel=self.kernel.fn.__qualname__,
            signature=signature,
            constexprs=dict(self.constexprs),
            multibuffer=self.multibuffer,
            divisible_by_16=divisible,
            equal_to_1=ones,
            packages=_KERNELS | ({package: folder} if package else {}),
            path=() if package else (folder,),
            **settings,
        )

    def walked_arguments(self) -> dict[str, Argument]:
        """The compiled kernel's arguments with the values that control flow depends on."""
        request = self.request()
        values: dict[str, Argument] = {}
        for name in request.arguments:
            value = self.arguments[name]
            values[name] = value.contents if isinstance(value, Pointer) else value
        return values

    def facts(self, answer: Answer, *, target: str, compiler: str, per_task: bool = True) -> KernelFacts:
        """The counts of one task, or of one program, of this launch; of packed batches the average of some programs."""
        if answer.hivm is None:
            raise ValueError(f"{self.name} did not compile: {answer.error}")
        # One task per program: what a program does is then what a task costs.
        grid = self.tasks if per_task else self.grid
        return analyse(
            answer.hivm,
            self.walked_arguments(),
            grid,
            kernel=self.name,
            target=target,
            compiler=compiler,
            notes=answer.notes,
            programs=self._sample(grid),
        )

    def _sample(self, grid: int) -> Sequence[int]:
        """The programs to average over: the first where all do the same, else some, spread over the grid."""
        steered = any(isinstance(value, Pointer) and value.contents for value in self.arguments.values())
        return range(0, grid, max(1, -(-grid // _SAMPLES))) if steered else (0,)


def _type_text(value: RunTimeArgument) -> str | None:
    if value is None:
        return None
    if isinstance(value, Pointer):
        return f"*{value.dtype}"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, float):
        return "fp32"
    return "i32" if value in _INT32 else "i64"
