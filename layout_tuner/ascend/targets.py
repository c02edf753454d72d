"""The targets of Ascend's compiler: SoCs, with their cores and on-chip memories.

The numbers are the compiler's own: what `bishengir-compile` 1.2.0 attaches to a module compiled for the target
(`dlti.target_system_spec`). The memory of a vector core is UB, those of a cube core are L1 and L0C.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from ..errors import ConfigError

Generation = Literal["A2", "A3", "A5"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One SoC as the compiler sees it."""

    name: str
    generation: Generation
    cube_cores: int
    vector_cores: int
    ub_bytes: int
    l1_bytes: int
    l0c_bytes: int


# SoC names by generation and number of cube cores.
_NAMES: Final[Mapping[tuple[Generation, int], str]] = {
    ("A2", 20): "Ascend910B3 Ascend910B4 Ascend910B4-1",
    ("A2", 24): "Ascend910B1 Ascend910B2 Ascend910B2C",
    ("A3", 20): "Ascend910_9362 Ascend910_9372",
    ("A3", 24): "Ascend910_9381 Ascend910_9382 Ascend910_9391 Ascend910_9392",
    ("A5", 4): "Ascend910_950z Ascend950PR_950z",
    ("A5", 8): "Ascend950DT_950x Ascend950DT_950y",
    ("A5", 28): (
        "Ascend910_9579 Ascend910_957b Ascend910_957d "
        "Ascend950PR_9579 Ascend950PR_957a Ascend950PR_957b Ascend950PR_957c Ascend950PR_957d "
        "Ascend950DT_9571 Ascend950DT_9572 Ascend950DT_9573 Ascend950DT_9574 "
        "Ascend950DT_9575 Ascend950DT_9576 Ascend950DT_9577 Ascend950DT_9578"
    ),
    ("A5", 32): (
        "Ascend910_9581 Ascend910_9589 Ascend910_958a Ascend910_958b "
        "Ascend950PR_9589 Ascend950PR_958a Ascend950PR_958b Ascend950PR_958c Ascend950PR_958d "
        "Ascend950DT_9581 Ascend950DT_9582 Ascend950DT_9583 Ascend950DT_9584 "
        "Ascend950DT_9585 Ascend950DT_9586 Ascend950DT_9587 Ascend950DT_9588"
    ),
    ("A5", 36): (
        "Ascend910_9599 Ascend950PR_9599 Ascend950PR_959a Ascend950PR_959b "
        "Ascend950DT_9591 Ascend950DT_9592 Ascend950DT_9595 Ascend950DT_9596 Ascend950DT_95A1 Ascend950DT_95A2"
    ),
}

_KIB: Final = 1024
_MEMORIES_KIB: Final[Mapping[Generation, tuple[int, int, int]]] = {
    "A2": (192, 512, 128),
    "A3": (192, 512, 128),
    "A5": (248, 512, 256),
}


def _table() -> dict[str, Target]:
    table = {}
    for (generation, cube_cores), names in _NAMES.items():
        ub, l1, l0c = _MEMORIES_KIB[generation]
        for name in names.split():
            table[name] = Target(
                name=name,
                generation=generation,
                cube_cores=cube_cores,
                vector_cores=2 * cube_cores,
                ub_bytes=ub * _KIB,
                l1_bytes=l1 * _KIB,
                l0c_bytes=l0c * _KIB,
            )
    return dict(sorted(table.items()))


TARGETS: Final[Mapping[str, Target]] = _table()


def target_named(name: str) -> Target:
    """The target of a SoC name.

    Raises:
        ConfigError: the compiler does not know the name; the message lists those it knows.
    """
    try:
        return TARGETS[name]
    except KeyError:
        raise ConfigError(f"unknown Ascend target {name!r}; known targets: {', '.join(TARGETS)}") from None
