"""The key of a call: what a decision is remembered under, and how packed lengths share one.

A key holds everything that changes the work and nothing else: sizes, whether the batch is packed, the dtype, and a
`Form` of the rest (optional operands, their dtypes, the layout each time-axis operand arrives in, chunk size, flags).
Values of `cu_seqlens`, data and pointer alignment are never part of it. A form is text only where it enters or leaves
the process: in the cache, in a shapes file, on the command line, and in an op's declaration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import ConfigError
from .layouts import Layout

BUCKETS = ("exact", "pow2", "log2_8")


@dataclass(frozen=True, init=False, eq=False, slots=True)
class Form:
    """Everything that changes the work beside the sizes, the packing and the dtype; its text is what is stored.

    Attributes:
        entries: Name to value. For a time-axis tensor `dtype@ARRIVAL`; for another `1` where its dtype is the key's,
            else its dtype; for a flag `1`; for a number its digits.
        text: The canonical text: `name=value` by name, joined by commas, without blanks.
    """

    entries: Mapping[str, str]
    text: str

    def __init__(self, entries: Mapping[str, str] | None = None) -> None:
        ordered = dict(sorted((entries or {}).items()))
        object.__setattr__(self, "entries", ordered)
        object.__setattr__(self, "text", ",".join(f"{name}={value}" for name, value in ordered.items()))

    @classmethod
    def parse(cls, text: str) -> Form:
        """The form a text describes.

        Raises:
            ConfigError: The text is not `name=value` pairs joined by commas, or names a thing twice or a layout that
                does not exist.
        """
        entries: dict[str, str] = {}
        faults = []
        for part in filter(None, text.split(",")):
            name, equals, value = part.partition("=")
            if not equals or not name or not value:
                faults.append(f"{part!r} is not name=value")
            elif name in entries:
                faults.append(f"{name!r} stands twice")
            elif "@" in value and value.partition("@")[2] not in Layout.__members__:
                faults.append(f"{part!r} names no layout (one of {', '.join(Layout.__members__)})")
            else:
                entries[name] = value
        if faults:
            raise ConfigError(f"form {text!r}: " + "; ".join(faults))
        return cls(entries)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __str__(self) -> str:
        return self.text

    def dtype(self, operand: str) -> str | None:
        """The dtype of an operand the form names, by torch's name; None where that is the key's."""
        value = self.entries.get(operand, "1")
        return None if value == "1" else value.partition("@")[0]

    def arrival(self, operand: str) -> Layout | None:
        """The layout a time-axis operand arrives in; None where the form does not say."""
        _, _, layout = self.entries.get(operand, "").partition("@")
        return Layout(layout) if layout else None

    def integer(self, name: str, default: int = 0) -> int:
        """The number of that name."""
        return int(self.entries.get(name, default))

    def flag(self, name: str) -> bool:
        """Whether the flag of that name is set."""
        return self.entries.get(name) == "1"

    def changed(self, **entries: str) -> Form:
        """The form with these entries in place of its own."""
        return Form({**self.entries, **entries})

    def arriving(self, layout: Layout) -> Form:
        """The form with every time-axis operand arriving in a layout."""
        moved = {name: value.partition("@") for name, value in self.entries.items()}
        return Form({name: f"{dtype}@{layout.value}" if at else dtype for name, (dtype, at, _) in moved.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """What a decision is remembered under.

    Attributes:
        op: Name of the op.
        B, T, H, HV, K, V: Sizes; 0 where the op has no such size. T of a packed batch is a bucket's upper length.
        varlen: Whether the batch is packed (`cu_seqlens` given).
        dtype: Of the op's first tensor, by torch's name (`bfloat16`).
        form: Everything else.
    """

    op: str
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    varlen: bool
    dtype: str
    form: Form

    @property
    def sizes(self) -> str:
        """The sizes as people write them: `B=2 T=2048 H=4 HV=8 K=64 V=64`."""
        named = ((name, getattr(self, name)) for name in ("B", "T", "H", "HV", "K", "V"))
        return " ".join(f"{name}={size}" for name, size in named if size)

    def plain(self) -> dict[str, Any]:
        """The key in plain values, its form as text: for a cache, for JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"form": self.form.text}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Key:
        """The key of what `plain` gave.

        Raises:
            ConfigError: A form that cannot be read.
        """
        return cls(**{**plain, "form": Form.parse(plain["form"])})

    def __str__(self) -> str:
        return f"{self.op} {self.sizes} {'packed' if self.varlen else 'dense'} {self.dtype} [{self.form}]"


def bucket(T: int, rule: str) -> int:
    """The upper length of the bucket that `T` tokens of a packed batch fall into.

    Args:
        T: Tokens, at least 1.
        rule: `exact` (T itself), `pow2` (the next power of two) or `log2_8` (eight buckets an octave).
    """
    if rule == "exact" or T <= 1:
        return T
    octave = 1 << (T - 1).bit_length()  # the smallest power of two >= T
    if rule == "pow2":
        return octave
    if rule == "log2_8":
        step = max(octave // 16, 1)
        return -(-T // step) * step
    raise ConfigError(f"bucket rule {rule!r}: wanted one of {', '.join(BUCKETS)}")


def bucketed(key: Key, rule: str) -> Key:
    """The key under which a call with `key` is tuned, stored and looked up: the only place where T is rounded."""
    if not key.varlen:
        return key
    return replace(key, T=bucket(key.T, rule))
