"""Compiles kernels for a Hopper GPU, on a machine without one, and prints how much shared memory each asks for.

Run as a program, in a process whose kernels are not made for the interpreter:

    python tests/support/shared_memory.py '{"ops": ["chunk_fwd_o"], "dtypes": ["bfloat16"], "widths": [[64, 64]],
                                            "heads": [[1, 1]], "every_form": false, "every_plan": false}'

Tiles, grids and arguments are those of the real host code, whose launches are recorded. `make` stops the compiler once
the kernel is LLVM IR, by when its memory is laid out: what comes after is most of the time and cannot change it.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from layout_tuner.kernels import tiling
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

import layout_tuner.ops
from layout_tuner.ascend.candidates import launch_of
from layout_tuner.device.driver import Chip
from layout_tuner.launch import launcher
from layout_tuner.launch.prepared import Prepared
from layout_tuner.spec import registry
from layout_tuner.spec.declaration import Candidate, OpSpec, Problem
from layout_tuner.spec.keys import Key
from layout_tuner.tuning.inputs import synthesize

TARGET = GPUTarget("cuda", 90, 32)
CHIP = Chip(kind="cuda", name="sm_90", cube_programs=4224, vector_programs=4224, cores=132)
LIMIT = 232448  # bytes that a block may have on sm_90


def source_of(record: launcher.LaunchRecord) -> ASTSource:
    """A recorded launch as Triton compiles it."""
    request = launch_of(record).request()
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(record.kernel.params):
        kind = None if parameter.is_constexpr else request.signature[parameter.name]
        signature[parameter.name] = kind or "constexpr"
        if kind is None:
            constants[(i,)] = record.constants[parameter.name] if parameter.is_constexpr else None
        elif parameter.name in request.divisible_by_16:
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(record.kernel, signature, constants, attributes)


def make(source: ASTSource) -> int:
    """Bytes of shared memory that a program asks for."""
    from triton._C.libtriton import ir

    backend = make_backend(TARGET)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    generators = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(TARGET, options, *generators, context)
    metadata = {"target": TARGET, **options.__dict__}
    for name in ("ttir", "ttgir", "llir"):
        module = stages[name](module, metadata)
    return int(metadata["shared"])


def launches(spec: OpSpec, key: Key, candidate: Candidate) -> list[launcher.LaunchRecord]:
    """What a candidate launches for a key."""
    call = synthesize(spec, key, "cpu")
    prepared = Prepared(spec, Problem(key=key, chip=CHIP), candidate, call)
    with launcher.recording() as records:
        prepared(call.tensors, call.scalars, call.cu_seqlens, call.chunk_indices)
    return records


def cases(asked: dict[str, Any]) -> Iterator[tuple[OpSpec, Key, Candidate]]:
    """Every candidate of every key that is asked for; of a variant's layouts the first, unless all are."""
    for name in asked["ops"]:
        spec = registry.lookup(name)
        for form in spec.every_form if asked["every_form"] else spec.standard_forms.values():
            for dtype in asked["dtypes"]:
                for K, V in asked["widths"]:
                    for H, HV in asked["heads"]:
                        sizes = {"B": 1, "T": 96, "H": H, "HV": HV, "K": K, "V": V}
                        key = spec.key_for(sizes, dtype=dtype, form=form)
                        seen = set()
                        for candidate in spec.candidates(key):
                            if asked["every_plan"] or candidate.variant not in seen:
                                seen.add(candidate.variant)
                                yield spec, key, candidate


def survey(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each kernel that is compiled, once, with what it asks for."""
    known: dict[str, int] = {}
    for spec, key, candidate in cases(asked):
        for record in launches(spec, key, candidate):
            source = source_of(record)
            same = repr((record.kernel.__name__, source.signature, source.constants, source.attrs))
            if same not in known:
                known[same] = make(source)
                kernel = record.kernel.__name__
                yield {"key": str(key), "candidate": candidate.id, "kernel": kernel, "shared": known[same]}


def planted() -> dict[str, int]:
    """What a kernel asks for whose tiles leave no loop in a task, here and by Triton's own account."""
    tiling.chunk_bwd_dqkwg_tiles = lambda *_: (32, 64, 64, False)
    spec = registry.lookup("chunk_bwd_dqkwg")
    sizes = {"B": 1, "T": 96, "H": 1, "HV": 1, "K": 64, "V": 64}
    key = spec.key_for(sizes, dtype="bfloat16", form=spec.form_named("BT=64,dv=1,w=1"))
    (record,) = launches(spec, key, spec.candidates(key)[0])
    source = source_of(record)
    return {"here": make(source), "triton": triton.compile(source, target=TARGET).metadata.shared}


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    if asked == "planted":
        print(json.dumps(planted()))
    else:
        asked["ops"] = asked["ops"] or layout_tuner.spec.registry.names()
        for found in survey(asked):
            print(json.dumps(found), flush=True)
