"""Sweep the tiles of an op and print the memory that Ascend's compiler plans for each.

    python -m layout_tuner.ascend.tiles chunk_fwd_o [--width 256,256] [--dtype bfloat16] [--packed] [--python PATH]

`kernels/tiling.py` chooses among these; the row it chose is marked with an asterisk.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from layout_tuner import ops, registry
from layout_tuner.ascend import gate
from layout_tuner.ascend.candidates import cases_of, launches
from layout_tuner.ascend.compiler import Compiler, Constexpr
from layout_tuner.ascend.lowering import Launch
from layout_tuner.ascend.targets import target_named
from layout_tuner.ascend.toolchain import find_toolchain

SIZES: Final = (16, 32, 64, 128, 256)
# Tiles are the constexprs named B and one letter, except the chunk size, which is the caller's.
CHUNK: Final = "BT"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each combination of tiles."""
    parser = argparse.ArgumentParser(description="Sweep the tiles of an op on Ascend's compiler.")
    parser.add_argument("op")
    parser.add_argument("--width", default="64,64", help="K,V")
    parser.add_argument("--dtype", default="bfloat16", choices=gate.DTYPES)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--target", default=gate.TARGET)
    parser.add_argument("--python", help="Python of the Ascend toolchain")
    parser.add_argument("--cache", type=Path, default=Path(".cache/ascend"), help="kept results of the compiler")
    parsed = parser.parse_args(arguments)
    assert ops, "importing the ops registers them"
    spec, target = registry.lookup(parsed.op), target_named(parsed.target)
    K, V = (int(width) for width in parsed.width.split(","))
    key = gate.key(spec, K, V, parsed.dtype, parsed.packed, next(iter(spec.forms.values())))
    with Compiler(find_toolchain(parsed.python), target, cache=parsed.cache.absolute()) as compiler:
        for case in cases_of(spec, key):
            made, _ = launches(case, target)
            for launch in made:
                swept = [
                    (launch if tiles == tiles_of(launch) else with_tiles(launch, tiles), tiles)
                    for tiles in combinations(launch, K, V)
                ]
                answers = compiler.lower_all([variant.request() for variant, _ in swept])
                sys.stdout.write(f"{case.candidate.id} {launch.name}\n")
                for (variant, tiles), answer in zip(swept, answers, strict=True):
                    mark = "*" if tiles == tiles_of(launch) else " "
                    text = " ".join(f"{name}={size}" for name, size in tiles.items())
                    if not answer.ok:
                        memory, wanted, limit = answer.overflow or ("", 0, 0)
                        why = f"{memory} {wanted:,} of {limit:,}" if memory else answer.error[:100]
                        sys.stdout.write(f" {mark} {text}: does not compile: {why}\n")
                        continue
                    facts = variant.facts(answer, target=target.name, compiler=compiler.version)
                    given_up = "  downgraded" if facts.notes else ""
                    sys.stdout.write(
                        f" {mark} {text}: UB {facts.ub_bytes:,} of {target.ub_bytes:,}, L1 {facts.l1_bytes:,}, "
                        f"L0C {facts.l0c_bytes:,}{given_up}\n"
                    )


def tiles_of(launch: Launch) -> dict[str, int]:
    """The tile sizes among a launch's constexprs."""
    return {
        name: value
        for name, value in launch.constexprs.items()
        if len(name) == 2 and name[0] == "B" and name != CHUNK and isinstance(value, int)
    }


def combinations(launch: Launch, K: int, V: int) -> Iterator[dict[str, int]]:
    """Every choice of tiles up to what covers K, V and the chunk."""
    chosen = tiles_of(launch)
    most: Mapping[str, int] = {"BK": K, "BV": V, "BC": _integer(launch.constexprs.get(CHUNK), 64)}

    def sizes(name: str) -> list[int]:
        limit = max(most.get(name, chosen[name]), chosen[name])
        below = [size for size in SIZES if size < limit]
        return sorted({*below, next((size for size in SIZES if size >= limit), limit), chosen[name]})

    for found in itertools.product(*(sizes(name) for name in chosen)):
        yield dict(zip(chosen, found, strict=True))


def _integer(value: Constexpr, default: int) -> int:
    return value if isinstance(value, int) else default


def with_tiles(launch: Launch, tiles: Mapping[str, int]) -> Launch:
    """The launch with other tiles."""
    return dataclasses.replace(launch, constexprs={**launch.constexprs, **tiles})


if __name__ == "__main__":
    main()
