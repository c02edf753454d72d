"""What ptxas made of kernels for a Hopper GPU: which uniform registers are read that no instruction wrote before.

ptxas 12.8, which Triton 3.6 brings, at times drops the instruction that gives a uniform register its first value. Such
a register is part of the address of a product's operand in shared memory, so that the product reads anywhere: "an
illegal memory access was encountered", or wrong numbers. ptxas 12.9 and 13.0 make the right code of the same PTX.
Nothing of it shows in PTX, and no GPU is needed to see it in the machine code. Run as a program as `shared_memory` is,
with the same argument.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from shared_memory import TARGET, cases, launches, source_of

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")
UNIFORM = re.compile(r"\bUR(\d+)\b")
# Instructions that are no part of the uniform datapath and write a uniform register.
WRITES = ("R2UR", "S2UR", "CS2UR", "LDCU", "REDUX", "VOTEU")
# Uniform instructions that write a predicate.
COMPARES = ("UISETP", "UPLOP3", "UFSETP")


def registers(operand: str, wide: bool) -> set[int]:
    """Numbers of the uniform registers that a source operand names."""
    found: set[int] = set()
    for match in UNIFORM.finditer(operand):
        first = int(match.group(1))
        before = operand[: match.start()]
        if before.endswith("gdesc["):  # two addresses of 64 bits; see `unwritten` for one
            found |= set(range(first, first + 4))
        else:
            found |= set(range(first, first + (2 if wide or before.endswith("desc[") else 1)))
    return found


def unwritten(code: str) -> list[str]:
    """Instructions of a kernel, disassembled, that read a uniform register before any wrote it."""
    written: set[int] = set()
    found = []
    for mnemonic, rest in INSTRUCTION.findall(code):
        name, *kinds = mnemonic.split(".")
        operands = [operand.strip() for operand in rest.split(",")]
        writes = (name.startswith("U") and name not in COMPARES) or name in WRITES
        targets = [operands[0]] if writes and operands[0].startswith("UR") and operands[0] != "URZ" else []
        sources = operands[len(targets) :]
        wide = "64" in kinds
        read = set().union(*(registers(operand, wide) for operand in sources))
        if "HGMMA" in name and re.match(r"R\d+$", operands[1]):  # the left operand is in registers: one address
            read -= {min(read), min(read) + 1} if read else set()
        if read - written:
            found.append(f"{mnemonic} {rest.strip()}: UR{', UR'.join(map(str, sorted(read - written)))}")
        for target in targets:
            first = int(target.removeprefix("UR").split(".")[0])
            written |= set(range(first, first + (2 if wide or "WIDE" in kinds else 4 if "128" in kinds else 1)))
    return found


def disassembled(cubin: bytes) -> str:
    """A kernel's machine code as text, by the tool that Triton brings."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True, check=True).stdout


def survey(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each kernel that is compiled, once, with what it reads unwritten."""
    known: set[str] = set()
    for spec, key, candidate in cases(asked):
        for record in launches(spec, key, candidate):
            source = source_of(record)
            same = repr((record.kernel.__name__, source.signature, source.constants, source.attrs))
            if same in known:
                continue
            known.add(same)
            compiled = triton.compile(source, target=TARGET)
            code = disassembled(compiled.asm["cubin"])
            yield {
                "key": str(key),
                "candidate": candidate.id,
                "kernel": record.kernel.__name__,
                "instructions": len(INSTRUCTION.findall(code)),
                "unwritten": unwritten(code),
            }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for found in survey(json.loads(sys.argv[1])):
        print(json.dumps(found), flush=True)
