"""Pin files: decisions that are used and nothing else, as readable JSON that a hash holds to its content."""

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from layout_tuner.errors import CacheError
from layout_tuner.files import read_file

from ..atomic import replacing, require_replaceable
from ..records import DecisionRecord
from ..validation import DECISION, RefusedRowError, check_decision, explain

FORMAT = "layout_tuner pins 1"
_START_BYTES = 4096
MAX_PIN_BYTES = 256 * 1024 * 1024
_TOO_LARGE = (
    f"would be larger than {MAX_PIN_BYTES >> 20} MiB, and no job reads such a pin file; pin one environment or op alone"
)


def content_hash(decisions: Iterable[Any]) -> str:
    """SHA-256 over the canonical JSON of a pin file's decisions: sorted names, no blanks: layout does not count."""
    digest = hashlib.sha256(b"[")
    for number, each in enumerate(decisions):
        digest.update(b"," * (number > 0) + _canonical(each))
    digest.update(b"]")
    return digest.hexdigest()


def _canonical(decision: Any) -> bytes:
    text = json.dumps(decision, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii")


def write_pins(path: str | os.PathLike[str], decisions: Iterable[DecisionRecord]) -> str:
    """Writes a pin file, replacing an old one at once; the same decisions give the same file.

    Samples and counts stay behind: a pin says what to run and how it compared, not how that was measured.

    Args:
        path: The file.
        decisions: What to pin; one for each key and environment.

    Returns:
        The hash.

    Raises:
        CacheError: Two decisions pin one key, the file cannot be written or would be larger than any that is read, or
            something else lies in its place.
    """
    target = Path(path)
    _refuse_other_files(target)
    # By place, compressed: as many as the largest file holds fit in memory, in whatever order they come.
    pinned: dict[str, bytes] = {}
    size = 0
    for record in decisions:
        plain = DECISION.dump_python(check_decision(record), mode="json")
        plain["source"] = "pinned"
        for measurement in plain["measurements"]:
            del measurement["samples"], measurement["counts"]
        place = json.dumps([plain["environment"], plain["key"]])
        whole = json.dumps(plain, ensure_ascii=False).encode()
        packed = zlib.compress(whole, 1)
        if pinned.setdefault(place, packed) != packed:
            raise CacheError(f"{path}: two decisions for one key: {record.key}")
        size += len(whole)
        if size > MAX_PIN_BYTES:
            raise CacheError(f"{path}: {_TOO_LARGE}")
    digest = content_hash(_unpacked(pinned))
    with replacing(target) as scratch, scratch.open("w", encoding="utf-8") as file:
        # As `json.dumps` with an indent of 1 lays it out.
        file.write(f'{{\n "format": {json.dumps(FORMAT)},\n "sha256": "{digest}",\n "decisions": [')
        for number, plain in enumerate(_unpacked(pinned)):
            text = json.dumps(plain, indent=1, ensure_ascii=False).replace("\n", "\n  ")
            file.write(("," if number else "") + "\n  " + text)
        file.write("\n ]\n}\n" if pinned else "]\n}\n")
        if file.tell() > MAX_PIN_BYTES:
            raise CacheError(f"{path}: {_TOO_LARGE}")
    return digest


def _unpacked(pinned: dict[str, bytes]) -> Iterator[Any]:
    """The decisions of a pin file, in its order."""
    for place in sorted(pinned):
        yield json.loads(zlib.decompress(pinned[place]))


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
