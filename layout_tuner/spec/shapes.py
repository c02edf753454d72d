"""`shapes.json`: the shapes that warm-up tunes."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator

from ..errors import REFUSAL, REFUSED, ConfigError, UnsupportedProblemError
from ..files import read_file
from . import registry
from .declaration import OpSpec
from .keys import Form, Key, bucketed
from .operands import DTYPES, SHORT_DTYPES

Size = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
# One complaint about a bad value, not one as a number and one as a list.
NUMBER, LIST = "a number", "a list of numbers"
Sizes = Annotated[
    Annotated[Size, Tag(NUMBER)] | Annotated[list[Size], Tag(LIST)],
    Discriminator(lambda value: LIST if isinstance(value, list) else NUMBER),
]


class Shape(BaseModel):
    """One entry of a shapes file.

    Attributes:
        op: An op's name; None means every op.
        B, T, H, HV, K, V: Sizes; T may be a list, HV defaults to H and V to K.
        dtype: Torch's name, or `bf16`, `fp16`, `fp32`.
        varlen: Whether the batch is packed.
        cu_seqlens: Sequence starts of a packed batch; sets T and varlen.
        caller: A library whose calls are meant: `transformers`, `fla`, `megatron`, `vllm`; None means every known one.
        forms: Names of an op's forms, or form texts; of a caller, its uses (`training`). None means all that is known
            to be called, or an op's standard forms.
        model: For whoever reads the file: which model has these sizes, and where they are from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    op: str | None = None
    B: Size = 1
    T: Sizes
    H: Size
    HV: Size | None = None
    K: Size
    V: Size | None = None
    dtype: str
    varlen: Annotated[bool, Field(strict=True)] = False
    cu_seqlens: list[Annotated[int, Field(ge=0, strict=True)]] | None = None
    caller: str | None = None
    forms: list[str] | None = None
    model: str | None = None

    @field_validator("caller")
    @classmethod
    def _known_caller(cls, caller: str | None) -> str | None:
        known = callers()
        if caller is not None and caller not in known:
            raise ValueError(f"no such caller (there are {', '.join(known)})")
        return caller

    @field_validator("op")
    @classmethod
    def _known_op(cls, op: str | None) -> str | None:
        if op is not None and op not in registry.names():
            raise ValueError(f"no such op (there are {', '.join(registry.names())})")
        return op

    @field_validator("dtype")
    @classmethod
    def _torch_name(cls, dtype: str) -> str:
        name = SHORT_DTYPES.get(dtype, dtype.removeprefix("torch."))
        if name not in DTYPES:
            raise ValueError(f"no such dtype (one of {', '.join([*DTYPES, *SHORT_DTYPES])})")
        return name

    @property
    def lengths(self) -> Sequence[int]:
        """Every T of the entry."""
        return self.T if isinstance(self.T, list) else [self.T]


def callers() -> list[str]:
    """The libraries whose calls are known."""
    every = [name for op in registry.names() for name in registry.lookup(op).callers]
    return list(dict.fromkeys(name.partition("/")[0] for name in every))


def load_shapes(path: str | os.PathLike[str]) -> list[Shape]:
    """The shapes of a file: `{"shapes": [...]}` or a bare list.

    Raises:
        ConfigError: A file that is missing, not JSON, empty, or has rows that cannot be used; one message names every
            bad row and field.
    """
    file = Path(path)
    try:
        content = json.loads(read_file(file).decode())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        # Bytes that are no text and numbers of thousands of digits among them.
        raise ConfigError(f"{file}: not JSON: {error}") from error
    if isinstance(content, Mapping) and set(content) == {"shapes"}:
        content = content["shapes"]
    if not isinstance(content, list):
        raise ConfigError(f'{file}: wanted {{"shapes": [...]}} or a list of shapes')
    if not content:
        raise ConfigError(f"{file}: no shapes in it")
    return parse_shapes(content, str(file))


def parse_shapes(rows: Sequence[Shape | Mapping[str, Any]], origin: str = "shapes") -> list[Shape]:
    """The shapes that rows describe.

    Raises:
        ConfigError: Rows that cannot be used; one message names every bad row and field.
    """
    shapes = []
    faults = []
    for number, row in enumerate(rows):
        if isinstance(row, Shape):
            shapes.append(row)
            continue
        try:
            shape = Shape.model_validate(row)
        except ValidationError as error:
            faults += [f"{origin}: row {number}: {describe(fault)}" for fault in error.errors()]
            continue
        complaints = check(shape)
        faults += [f"{origin}: row {number}: {complaint}" for complaint in complaints]
        shapes.append(shape)
    if faults:
        raise ConfigError("shapes cannot be used:\n  " + "\n  ".join(dict.fromkeys(faults)))
    return shapes


def describe(fault: Any) -> str:
    """One line for one of pydantic's complaints about a row."""
    field = ".".join(str(part) for part in fault["loc"] if part not in (NUMBER, LIST))
    if not field:
        return f"wanted an object, got {fault['input']!r}"
    if any(part in REFUSED for part in fault["loc"]):
        return f"{field}: {REFUSAL}"
    if fault["type"] == "extra_forbidden":
        return f"{field}: unknown field (known: {', '.join(Shape.model_fields)})"
    if fault["type"] == "missing":
        return f"{field}: missing"
    return f"{field}: {fault['msg'].removeprefix('Value error, ')}, got {fault['input']!r}"


def check(shape: Shape) -> list[str]:
    """What is wrong with a row beyond its fields."""
    faults = []
    HV = shape.HV or shape.H
    if HV % shape.H:
        faults.append(f"HV: wanted a multiple of H={shape.H}, got {HV}")
    if (shape.varlen or shape.cu_seqlens) and shape.B != 1:
        faults.append(f"B: wanted 1 for a packed batch, got {shape.B}")
    if isinstance(shape.T, list) and not shape.T:
        faults.append("T: wanted a number or a list of numbers, got an empty list")
    starts = shape.cu_seqlens
    if starts is not None:
        if len(starts) < 2 or any(b < a for a, b in itertools.pairwise(starts)):
            faults.append("cu_seqlens: wanted at least two numbers that never fall")
        elif shape.lengths and max(starts) > max(shape.lengths):
            faults.append(f"cu_seqlens: ends at {starts[-1]}, past T={shape.T}")
    if shape.forms is not None and not shape.forms:
        faults.append("forms: wanted names of forms, or none of this field for all of them, got an empty list")
    for form in asked_forms(shape):
        complaints = [complaint for spec in specs(shape) if (complaint := form_complaint(spec, form))]
        if len(complaints) == len(specs(shape)):  # without an op, a form is for those that have it
            faults.append(f"forms: {complaints[0] if shape.op else f'no op has a form {form!r}'}")
    return faults


def form_complaint(spec: OpSpec, form: str) -> str:
    """Why an op has no such form; empty where it has."""
    try:
        spec.forms_named(form)
    except ConfigError as error:
        return str(error)
    return ""


def specs(shape: Shape) -> list[OpSpec]:
    """The ops that an entry is for."""
    return [registry.lookup(name) for name in ([shape.op] if shape.op else registry.names())]


def keys(shapes: Sequence[Shape], bucket: str) -> tuple[list[tuple[OpSpec, Key]], list[str]]:
    """Every key that shapes ask for, each once, in order, and why some are left out.

    Args:
        shapes: The entries.
        bucket: The rule by which packed lengths share a key.

    Returns:
        Ops with their keys, and a sentence for each key that no kernel serves.
    """
    wanted: dict[Key, OpSpec] = {}
    refused: list[str] = []
    for shape in shapes:
        for spec, T in itertools.product(specs(shape), shape.lengths):
            for form in forms_of(spec, shape):
                key = bucketed(key_of(spec, shape, T, form), bucket)
                try:
                    spec.require(key)
                except UnsupportedProblemError as error:
                    refused.append(str(error))
                    continue
                wanted.setdefault(key, spec)
    return [(spec, key) for key, spec in wanted.items()], refused


def asked_forms(shape: Shape) -> list[str]:
    """The names and texts of forms that an entry asks for; none where it leaves that to the op."""
    if shape.caller is None:
        return shape.forms or []
    if shape.forms is None:
        return [shape.caller]
    return [form if "=" in form else f"{shape.caller}/{form}" for form in shape.forms]


def forms_of(spec: OpSpec, shape: Shape) -> Sequence[Form]:
    """The forms of an op that an entry asks for: those it names and the op has, else what warm-up tunes anyhow."""
    names = asked_forms(shape)
    if not names:
        return spec.warmed_forms
    named = [spec.forms_named(name) for name in names if not form_complaint(spec, name)]
    return list(dict.fromkeys(itertools.chain.from_iterable(named)))


def key_of(spec: OpSpec, shape: Shape, T: int, form: Form) -> Key:
    """The exact key of one entry."""
    sizes = {"B": shape.B, "T": T, "H": shape.H, "HV": shape.HV or shape.H, "K": shape.K, "V": shape.V or shape.K}
    return spec.key_for(sizes, dtype=shape.dtype, form=form, varlen=shape.varlen or shape.cu_seqlens is not None)
