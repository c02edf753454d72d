"""Settings: `tuner.toml`, `LAYOUT_TUNER_*`, and what overrides what. The only module that reads `os.environ`.

An explicit argument wins over an environment variable, that over `tuner.toml`, that over the default. A setting
`[section] name` is also the variable `LAYOUT_TUNER_SECTION_NAME`. `tuner.toml` is found by argument, by
`LAYOUT_TUNER_CONFIG`, or in the working directory. Unknown names are errors that list the known ones.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from . import files
from .errors import REFUSAL, REFUSED, ConfigError

PREFIX = "LAYOUT_TUNER_"
FILE = "tuner.toml"

Policy = Literal["auto", "tune", "default", "error", "sync"]


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_SECRETS = (
    re.compile(r"(?<=://)[^/\s]*@"),
    re.compile(r"(?<=password=)[^&\s'\"]*", re.IGNORECASE),
)


def absolute(path: str) -> str:
    """A path as it is from now on, wherever the process goes; raises `ValueError` where it is none."""
    if _URL.match(path):
        raise ValueError("a file is wanted; a server is named by [cache] url")
    if "\0" in path:
        raise ValueError("a path holds no NUL character")
    try:
        return str(Path(path).expanduser().absolute())
    except (OSError, RuntimeError) as error:
        raise ValueError(str(error)) from None


def without_secrets(text: str) -> str:
    """A text in which URLs show neither users nor passwords."""
    for secret, shown in zip(_SECRETS, ("***@", "***"), strict=True):
        text = secret.sub(shown, text)
    return text


class Section(BaseModel):
    """A section of `tuner.toml`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Tuning(Section):
    """What happens on a miss, and when a candidate replaces the default."""

    on_miss: Policy = "auto"
    min_gain: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.02
    budget_s: Annotated[float, Field(gt=0.0)] = 120.0
    bit_exact: bool = False
    isolate: Literal["auto", "process", "none"] = "auto"
    pin: str = ""

    @field_validator("pin")
    @classmethod
    def _absolute(cls, value: str) -> str:
        return absolute(value) if value else value


class Measure(Section):
    """How candidates are timed."""

    warmup_rounds: Annotated[int, Field(ge=1)] = 10
    min_rounds: Annotated[int, Field(ge=5)] = 15
    max_rounds: Annotated[int, Field(ge=5)] = 100
    interval: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.01
    l2: Literal["warm", "cold"] = "warm"
    oracle_mib: Annotated[int, Field(ge=1, le=1 << 20)] = 1024

    @model_validator(mode="after")
    def _ordered(self) -> Measure:
        if self.min_rounds > self.max_rounds:
            raise ValueError(f"min_rounds = {self.min_rounds} is more than max_rounds = {self.max_rounds}")
        return self


class Keys(Section):
    """How packed lengths share a key."""

    bucket: Literal["exact", "pow2", "log2_8"] = "pow2"
    max_keys: Annotated[int, Field(ge=1)] = 256


class Cache(Section):
    """Where decisions are kept."""

    path: str = ""
    shared: tuple[str, ...] = ()
    url: str = ""

    @field_validator("path")
    @classmethod
    def _absolute(cls, value: str) -> str:
        return absolute(value) if value else value

    @field_validator("shared")
    @classmethod
    def _all_absolute(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(absolute(each) for each in value)

    @field_validator("shared", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Split a text of an environment variable into files, as a search path is split."""
        return [part for part in value.split(os.pathsep) if part] if isinstance(value, str) else value


class Routing(Section):
    """Whose calls are routed, and what becomes of those for which no kernel here is right."""

    fla: bool = True
    serving: bool = False
    on_wrong: Literal["reference", "error"] = "reference"
    sync_every: Annotated[int, Field(ge=1)] = 100


class Ascend(Section):
    """Ascend's compiler on a machine without an NPU."""

    python: str = ""
    processes: Annotated[int, Field(ge=1)] = 2
    timeout_s: Annotated[float, Field(gt=0.0)] = 120.0


class Config(BaseModel):
    """Every setting, frozen. `Config.load()` reads file and environment; `Config()` is the defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tuning: Tuning = Tuning()
    measure: Measure = Measure()
    keys: Keys = Keys()
    cache: Cache = Cache()
    routing: Routing = Routing()
    ascend: Ascend = Ascend()

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None, **explicit: Mapping[str, object]) -> Config:
        """The settings that hold: explicit over environment over file over default.

        Args:
            path: The file; None looks at `LAYOUT_TUNER_CONFIG`, then for `tuner.toml` in the working directory.
            explicit: By section, settings that win over everything else.

        Raises:
            ConfigError: A file that cannot be read or parsed, or settings that are unknown or out of range; one
                message names them all.
            TypeError: A path that is none.
        """
        if path is not None and not isinstance(path, (str, os.PathLike)):
            hint = "; a function is decorated with enable()(function)" if callable(path) else ""
            raise TypeError(f"config: wanted a Config, the path of a {FILE} or None, got {path!r}{hint}")
        content, origin = read_file(path)
        sections: dict[str, dict[str, object]] = {}
        origins: dict[tuple[str, str], str] = {}
        faults = refused(content, origin)
        for name, settings in content.items():
            if isinstance(settings, Mapping):
                sections[name] = dict(settings)
            else:
                faults.append(f"{origin}: {name}: wanted a section [{name}], got {settings!r}")
        from_environment, more = read_environment()
        faults += more
        for layer, source in ((from_environment, variable), (explicit, argument)):
            for name, settings in layer.items():
                sections[name] = sections.get(name, {}) | dict(settings)
                origins |= {(name, setting): source(name, setting) for setting in settings}
        config = cls()
        try:
            config = cls.model_validate(sections)
        except ValidationError as error:
            faults += [describe(fault, origins, origin) for fault in error.errors()]
        if faults:
            raise ConfigError("settings cannot be used:\n  " + "\n  ".join(dict.fromkeys(faults)))
        return config


def with_cache(settings: Config, path: str | os.PathLike[str] | None) -> Config:
    """The settings with another file of decisions; raises `ConfigError` where the path is none."""
    if path is None:
        return settings
    try:
        place = absolute(os.fsdecode(path))
    except ValueError as error:
        raise ConfigError(f"cache: {error}, got {without_secrets(repr(os.fsdecode(path)))}") from None
    section = settings.cache.model_copy(update={"path": place})
    return settings.model_copy(update={"cache": section})


@functools.cache
def taken(path: str) -> str:
    """What an environment variable's path meant when it was first read, wherever the process has gone since."""
    try:
        return absolute(path)
    except ValueError as error:
        raise ConfigError(f"{PREFIX}CONFIG: {error}, got {without_secrets(repr(path))}") from None


def read_file(path: str | os.PathLike[str] | None) -> tuple[dict[str, object], str]:
    """The parsed settings file and its name; nothing where none is named and the working directory has none."""
    stated = os.environ.get(PREFIX + "CONFIG")
    named = path or (taken(stated) if stated else None)
    file = Path(named) if named else Path(FILE)
    if not named and not file.is_file():
        return {}, FILE
    if "\0" in str(file):
        raise ConfigError(f"{str(file)!r}: a path holds no NUL character")
    try:
        return tomllib.loads(files.read_file(file).decode()), str(file)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        # Bytes that are no text, numbers of thousands of digits and endless brackets among them.
        raise ConfigError(f"{file}: not TOML that can be read: {error}") from error


def read_environment() -> tuple[dict[str, dict[str, object]], list[str]]:
    """Settings from `LAYOUT_TUNER_SECTION_NAME` variables, and complaints about unknown ones."""
    known = {
        variable(section, setting): (section, setting)
        for section, field in Config.model_fields.items()
        for setting in field.default.__class__.model_fields
    }
    settings: dict[str, dict[str, object]] = {}
    faults = []
    for name, value in os.environ.items():
        if not name.startswith(PREFIX) or name in OTHER_VARIABLES:
            continue
        if name in known:
            section, setting = known[name]
            settings.setdefault(section, {})[setting] = value
        elif any(word.upper() in name for word in REFUSED):
            faults.append(f"{name}: {REFUSAL}")
        elif not name.startswith(PREFIX + "TEST_"):
            faults.append(f"{name}: unknown variable (known: {', '.join([*OTHER_VARIABLES, *known])})")
    return settings, faults


OTHER_VARIABLES = (PREFIX + "CONFIG", PREFIX + "FORCE", PREFIX + "DISABLE")


def forced() -> str:
    """What `LAYOUT_TUNER_FORCE` says: candidates by op, for debugging, see `forcing`; read once for each `enable`."""
    return os.environ.get(PREFIX + "FORCE", "").strip()


def variables_like(*patterns: str) -> dict[str, str]:
    """The environment variables whose names match a pattern, such as `TRITON_*`, without users and passwords."""
    found = {}
    for name, value in sorted(os.environ.items()):
        if any(fnmatch.fnmatchcase(name, each) for each in patterns):
            found[name] = without_secrets(value)
    return found


def pager() -> list[str]:
    """The command that shows long texts: `PAGER`, else `less`, which gives way where one page is enough."""
    return shlex.split(os.environ.get("PAGER", "")) or ["less", "-FRX"]


def disabled() -> bool:
    """Whether `LAYOUT_TUNER_DISABLE=1` turns every `enable` off, for debugging.

    Raises:
        ConfigError: Neither 0 nor 1.
    """
    value = os.environ.get(PREFIX + "DISABLE", "").strip()
    if value not in ("", "0", "1"):
        raise ConfigError(f"{PREFIX}DISABLE: wanted 0 or 1, got {value!r}")
    return value == "1"


def refused(content: Mapping[str, object], origin: str) -> list[str]:
    """A complaint where `num_warps` or `num_stages` stands anywhere in a file."""
    faults = []
    for name, value in content.items():
        if name in REFUSED:
            faults.append(f"{origin}: {name}: {REFUSAL}")
        elif isinstance(value, Mapping):
            faults += refused(value, origin)
    return faults


def variable(section: str, setting: str) -> str:
    """The environment variable of a setting."""
    return f"{PREFIX}{section}_{setting}".upper()


def argument(section: str, setting: str) -> str:
    """What a message calls a setting that was passed in."""
    return "argument"


def describe(fault: Mapping[str, object], origins: Mapping[tuple[str, str], str], file: str) -> str:
    """One line for one of pydantic's complaints, with the known names where a name is unknown.

    Args:
        fault: The complaint.
        origins: Where settings come from, by section and name, that are not the file's.
        file: The file's name.
    """
    location = fault["loc"]
    assert isinstance(location, tuple)
    section, *rest = (str(part) for part in location)
    where = f"[{section}] {rest[0]}" if rest else f"[{section}]"
    origin = origins.get((section, rest[0]), file) if rest else file
    if (rest and rest[0] in REFUSED) or section in REFUSED:
        return f"{origin}: {rest[0] if rest else section}: {REFUSAL}"
    if fault["type"] != "extra_forbidden":
        complaint = str(fault["msg"]).removeprefix("Value error, ")
        return f"{origin}: {where}: {complaint}" + (f", got {without_secrets(repr(fault['input']))}" if rest else "")
    fields = Config.model_fields
    known = list(fields[section].default.__class__.model_fields) if rest else [f"[{name}]" for name in fields]
    return f"{origin}: {where}: unknown (known: {', '.join(known)})"


def variables(names: Iterable[str]) -> dict[str, str]:
    """Variables of other programs that are set, by name, without the spaces around their values."""
    return {name: os.environ[name].strip() for name in names if name in os.environ}


def torchrun() -> dict[str, str]:
    """What torchrun, or another launcher of torch.distributed, says of this process; empty where none started it."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    stated = variables((*names, "LOCAL_RANK"))
    return stated if set(names) <= stated.keys() and stated["WORLD_SIZE"].isdigit() else {}


def enable_interpreter() -> None:
    """Make Triton run kernels in its interpreter; has to come before the first import of Triton."""
    os.environ["TRITON_INTERPRET"] = "1"
