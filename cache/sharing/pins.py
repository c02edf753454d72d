"""Pin files: decisions that are used and nothing else, as readable JSON that a hash holds to its content."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from layout_tuner.errors import CacheError
from layout_tuner.files import read_file

from ..atomic import require_replaceable, write_atomically
from ..records import DecisionRecord
from ..validation import DECISION, RefusedRowError, check_decision, explain

FORMAT = "layout_tuner pins 1"
_START_BYTES = 4096
MAX_PIN_BYTES = 256 * 1024 * 1024


def content_hash(decisions: list[Any]) -> str:
    """SHA-256 over the canonical JSON of a pin file's decisions: sorted names, no blanks: layout does not count."""
    text = json.dumps(decisions, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def write_pins(path: str | os.PathLike[str], decisions: Iterable[DecisionRecord]) -> str:
    """Writes a pin file, replacing an old one at once; the same decisions give the same file.

    Samples and counts stay behind: a pin says what to run and how it compared, not how that was measured.

    Args:
        path: The file.
        decisions: What to pin; one for each key and environment.

    Returns:
        The hash.

    Raises:
        CacheError: Two decisions pin one key, the file cannot be written, or something else lies in its place.
    """
    _refuse_other_files(Path(path))
    pinned: dict[tuple[object, ...], Any] = {}
    for record in decisions:
        plain = DECISION.dump_python(check_decision(record), mode="json")
        plain["source"] = "pinned"
        for measurement in plain["measurements"]:
            del measurement["samples"], measurement["counts"]
        place = (record.environment, record.key)
        if place in pinned and pinned[place] != plain:
            raise CacheError(f"{path}: two decisions for one key: {record.key}")
        pinned[place] = plain
    chosen = sorted(pinned.values(), key=lambda plain: json.dumps([plain["environment"], plain["key"]]))
    digest = content_hash(chosen)
    document = {"format": FORMAT, "sha256": digest, "decisions": chosen}
    write_atomically(Path(path), (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
    return digest


def read_pins(path: str | os.PathLike[str]) -> tuple[str, tuple[DecisionRecord, ...]]:
    """The hash and the decisions of a pin file.

    Raises:
        CacheError: The file cannot be read, is no pin file, or its hash is not that of its content.
    """
    try:
        if os.stat(path).st_size > MAX_PIN_BYTES:
            raise CacheError(f"{path}: larger than {MAX_PIN_BYTES} bytes")
        document = json.loads(read_file(path))
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise CacheError(f"{path}: not a pin file (its format is not {FORMAT!r})")
        plain = document.get("decisions")
        if not isinstance(plain, list):
            raise CacheError(f"{path}: its decisions are no list")
        digest = content_hash(plain)
    except OSError as error:
        raise CacheError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CacheError(f"{path}: not JSON ({error})") from error
    if digest != document.get("sha256"):
        raise CacheError(
            f"{path}: its hash is {document.get('sha256')!r}, its content has {digest!r}: "
            "it was changed after it was written"
        )
    return digest, tuple(_pin(path, number, each) for number, each in enumerate(plain))


def _refuse_other_files(path: Path) -> None:
    """Raises `CacheError` where a file would be written over that is no pin file."""
    require_replaceable(path)
    try:
        if not path.exists():
            return
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(_START_BYTES)
    except OSError as error:
        raise CacheError(f"{path}: {error.strerror or error}") from error
    if size and json.dumps(FORMAT).encode() not in start:
        raise CacheError(f"{path}: is there and no pin file; write elsewhere")


def _pin(path: object, number: int, plain: Any) -> DecisionRecord:
    try:
        record = check_decision(DECISION.validate_json(json.dumps(plain)))
    except (ValidationError, RefusedRowError) as error:
        reason = explain(error) if isinstance(error, ValidationError) else str(error)
        raise CacheError(f"{path}: decision {number}: {reason}") from None
    if record.source != "pinned":
        raise CacheError(f"{path}: decision {number}: its source is {record.source!r}, wanted 'pinned'")
    return record
