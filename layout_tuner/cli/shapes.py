"""`tuner shapes`: the shapes file of a model, from the model's own configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def shapes(
    model: Annotated[Path, typer.Argument(metavar="CONFIG", help="A model's config.json, or the folder it lies in.")],
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks that share the heads.")] = 1,
    batch: Annotated[int, typer.Option(help="Sequences of a dense batch.")] = 1,
    lengths: Annotated[str, typer.Option(help="Tokens of a sequence (of the whole batch if packed).")] = "2048,4096",
    packed: Annotated[bool, typer.Option("--packed", help="Batches are packed (cu_seqlens).")] = False,
    caller: Annotated[
        str | None, typer.Option(help="What runs it: transformers, fla, megatron, vllm; several with commas.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32; default: what the configuration says.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; default: stdout.")] = None,
) -> None:
    """Write the shapes that a model calls, for `tuner warmup --shapes`. Reads the file alone; no network.

    Example: tuner shapes Qwen3-Next/config.json --tp 4 --lengths 4096,16384 -o shapes.json
    """
    from .. import ops as _ops  # noqa: F401  registers every op
    from ..errors import ConfigError
    from ..integrations.architectures import load_model, shapes_of

    parts = [part.strip() for part in lengths.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"--lengths: wanted numbers with commas between them, got {lengths!r}")
    rows = shapes_of(
        load_model(model),
        tp=tp,
        batch=batch,
        lengths=[int(part) for part in parts],
        packed=packed,
        callers=[name.strip() for name in caller.split(",")] if caller else (),
        dtype=dtype,
    )
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    text = f'{{\n  "shapes": [\n{lines}\n  ]\n}}\n'
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text)
    except OSError as error:
        raise ConfigError(f"{output}: {error.strerror or error}") from error
    typer.echo(f"{len(rows)} rows written; next: tuner warmup --shapes {output}", err=True)
