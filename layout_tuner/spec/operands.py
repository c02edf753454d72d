"""What an op takes and returns: tensors, options, and the arguments of one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


Value = bool | int | str
Outputs = tuple["torch.Tensor | None", ...]

SIZES = ("B", "T", "H", "HV", "K", "V")
# What shapes are written in: sizes of a key, tokens of a chunk, chunks, sequences.
SYMBOLS = (*SIZES, "BT", "NT", "N")
DTYPES = ("float32", "bfloat16", "float16")
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "f32": "float32", "f16": "float16"}
CHUNK_SIZES = (16, 32, 64)
WIDEST = 256


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A tensor an op takes.

    Attributes:
        name: Argument name.
        dims: Its shape in the symbols `B T H HV K V BT NT N`, or a number.
        optional: Whether the caller may leave it out.
        time_axis: Whether it is a `[B, T, HV]` or `[B, T, HV, C]` tensor whose layout is a choice.
        fill: How synthetic values are drawn, a name in `inputs.FILLS`.
        dtypes: Accepted dtypes; empty means those of the main tensor.
        must_match: Whether its dtype has to be the main tensor's.
        dims_v_first: Its shape where an option that `turns_states` is set, if another.
        as_it_lies: Whether its layout is no choice of a plan, though its kernels read either: so few of its rows are
            read that no copy pays.
        given_with: Options that, all set, bring it, though no caller passes it: the gradient of an output, which
            autograd hands over later. Forms do not name it.
    """

    name: str
    dims: str
    optional: bool = False
    time_axis: bool = False
    fill: str = "normal"
    dtypes: tuple[str, ...] = DTYPES
    must_match: bool = True
    dims_v_first: str = ""
    as_it_lies: bool = False
    given_with: tuple[str, ...] = ()

    def shape_symbols(self, v_first: bool) -> list[str]:
        """The symbols of its shape; `v_first`: whether an option that `turns_states` is set."""
        return (self.dims_v_first or self.dims if v_first else self.dims).split()


@dataclass(frozen=True, kw_only=True)
class Output:
    """A tensor an op returns.

    Attributes:
        name: As in the formula.
        dims: Its shape, as an operand's; empty for `d` and the name of an operand, whose gradient and shape it is.
        time_axis: Whether it is a `[B, T, HV]` or `[B, T, HV, C]` tensor whose layout is a choice.
        needs: The optional operand without which it is None.
    """

    name: str
    dims: str = ""
    time_axis: bool = False
    needs: str = ""


@dataclass(frozen=True, kw_only=True)
class Option:
    """An argument that is no tensor and changes which work is done: a flag, a size or the name of a dtype.

    Attributes:
        name: Argument name.
        default: Its default; flags at their default are left out of a form.
        entry: The name under which a form shows it.
        size: The symbol of shapes that it gives a size to.
        turns_states: Whether, set, operands have the shapes of their `dims_v_first`.
        differentiates: Whether it is no argument of the public function and says instead that gradients are wanted:
            without it, the outputs that are gradients of operands are absent.
        names_dtype: Whether its text is the name of a dtype, where the public function takes torch's own.
    """

    name: str
    default: Value
    entry: str = ""
    size: str = ""
    turns_states: bool = False
    differentiates: bool = False
    names_dtype: bool = False

    @property
    def label(self) -> str:
        """The name under which a form shows it."""
        return self.entry or self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The arguments of one call, in the order an op declares them.

    Attributes:
        tensors: One for each operand, None where left out.
        options: One for each option.
        scalars: One for each scalar, None for its default.
        cu_seqlens: `[N + 1]` sequence starts of a packed batch, else None.
        chunk_indices: `[NT, 2]` chunks of a packed batch, where the caller has them.
    """

    tensors: tuple[torch.Tensor | None, ...]
    options: tuple[Value, ...] = ()
    scalars: tuple[float | None, ...] = ()
    cu_seqlens: torch.Tensor | None = None
    chunk_indices: torch.Tensor | None = None


def dtype_name(tensor: torch.Tensor | None) -> str:
    """A tensor's dtype as forms and keys write it: `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.") if tensor is not None else ""
