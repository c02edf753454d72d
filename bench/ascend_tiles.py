"""Sweep the tiles of an op: what Ascend's compiler plans of each memory, beside what `kernels/tiling.py` predicts.

    python bench/ascend_tiles.py chunk_fwd_o [--width 256,256] [--dtype bfloat16] [--packed] [--python PATH]

The row that `kernels/tiling.py` chose is marked with an asterisk. A prediction above a memory's size is a plan with
fewer copies; one above twice the size is refused before launch.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from layout_tuner.kernels import tiling

from layout_tuner import ops
from layout_tuner.ascend import matrix
from layout_tuner.ascend.candidates import cases_of, chip_of, launches
from layout_tuner.ascend.compile.compiler import Compiler
from layout_tuner.ascend.compile.toolchain import find_toolchain
from layout_tuner.ascend.lowering import Launch
from layout_tuner.ascend.targets import target_named
from layout_tuner.spec import registry
from layout_tuner.spec.declaration import Problem

LEAST, WIDEST = 16, 512
# Tiles are the constexprs named B and one letter, except the chunk size, which is the caller's.
CHUNK: Final = "BT"
SUB_BLOCK: Final = "BC"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each combination of tiles."""
    parser = argparse.ArgumentParser(description="Sweep the tiles of an op on Ascend's compiler.")
    parser.add_argument("op")
    parser.add_argument("--width", default="64,64", help="K,V")
    parser.add_argument("--dtype", default="bfloat16", choices=matrix.DTYPES)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--candidate", default="", help="only candidates whose id contains this")
    parser.add_argument("--target", default=matrix.TARGET)
    parser.add_argument("--python", help="Python of the Ascend toolchain")
    parser.add_argument("--cache", type=Path, default=Path(".cache/ascend"), help="kept results of the compiler")
    parsed = parser.parse_args(arguments)
    assert ops, "importing the ops registers them"
    spec, target = registry.lookup(parsed.op), target_named(parsed.target)
    K, V = (int(width) for width in parsed.width.split(","))
    key = matrix.key(spec, K, V, parsed.dtype, parsed.packed, spec.every_form[0])
    with Compiler(find_toolchain(parsed.python), target, cache=parsed.cache.absolute()) as compiler:
        for case in cases_of(spec, key):
            if parsed.candidate not in case.candidate.id:
                continue
            made, _ = launches(case, target)
            for launch in made:
                swept = [
                    (launch if tiles == tiles_of(launch) else with_tiles(launch, tiles), tiles)
                    for tiles in combinations(launch)
                ]
                answers = compiler.lower_all([variant.request() for variant, _ in swept])
                sys.stdout.write(f"{case.candidate.id} {launch.name}\n")
                for (variant, tiles), answer in zip(swept, answers, strict=True):
                    mark = "*" if tiles == tiles_of(launch) else " "
                    text = " ".join(f"{name}={size}" for name, size in tiles.items())
                    expected = predicted(variant, Problem(key=key, chip=chip_of(target)).element_bytes)
                    if not answer.ok:
                        memory, wanted, limit = answer.overflow or ("", 0, 0)
                        why = f"{memory} {wanted:,} of {limit:,}" if memory else answer.error[:100]
                        sys.stdout.write(f" {mark} {text}: does not compile: {why}; predicted {expected}\n")
                        continue
                    facts = variant.facts(answer, target=target.name, compiler=compiler.version)
                    given_up = "  downgraded" if facts.notes else ""
                    sys.stdout.write(
                        f" {mark} {text}: UB {facts.ub_bytes:,}, L1 {facts.l1_bytes:,}, L0C {facts.l0c_bytes:,}; "
                        f"predicted {expected}{given_up}\n"
                    )


def predicted(launch: Launch, element_bytes: int) -> str:
    """What `kernels/tiling.py` says of a launch's tiles."""
    tiles = {name: size for name, size in launch.constexprs.items() if name in ("BT", "BK", "BV")}
    if len(tiles) < 3:
        return "nothing"
    found = tiling.on_chip_bytes(launch.name, element_bytes, **tiles)  # type: ignore[arg-type]
    if found is None:
        return "nothing"
    return ", ".join(f"{memory} {size:,}" for memory, size in zip(("UB", "L1", "L0C"), found, strict=True))


def tiles_of(launch: Launch) -> dict[str, int]:
    """The tile sizes among a launch's constexprs."""
    return {
        name: value
        for name, value in launch.constexprs.items()
        if len(name) == 2 and name[0] == "B" and name != CHUNK and isinstance(value, int)
    }


def combinations(launch: Launch) -> Iterator[dict[str, int]]:
    """Every choice of tiles among the chosen ones, half and twice as wide."""
    chosen = tiles_of(launch)
    chunk = launch.constexprs.get(CHUNK)

    def sizes(name: str) -> list[int]:
        # Sub-blocks divide the chunk; other tiles may cover more than there is.
        most = chunk if name == SUB_BLOCK and isinstance(chunk, int) else WIDEST
        return sorted({size for size in (chosen[name] // 2, chosen[name], 2 * chosen[name]) if LEAST <= size <= most})

    for found in itertools.product(*(sizes(name) for name in chosen)):
        yield dict(zip(chosen, found, strict=True))


def with_tiles(launch: Launch, tiles: Mapping[str, int]) -> Launch:
    """The launch with other tiles."""
    return dataclasses.replace(launch, constexprs={**launch.constexprs, **tiles})


if __name__ == "__main__":
    main()
