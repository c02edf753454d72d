"""README's blocks under `<!-- tested -->` do what they say, in the order they stand in, in a folder of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command import shape, shapes_file

README = Path(__file__).parents[1] / "README.md"
MARK = "<!-- tested -->"
BLOCK = re.compile(re.escape(MARK) + r"\s*\n```(\w+)\n(.*?)\n```", re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    """Language and text of every marked block."""
    return [(found[1], found[2]) for found in BLOCK.finditer(README.read_text())]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder but for `examples/shapes.json`, smaller than the real one."""
    examples = tmp_path / "examples"
    examples.mkdir()
    shapes_file(examples, shape())
    return tmp_path


def test_every_mark_has_its_block() -> None:
    assert README.read_text().count(MARK) == len(blocks()) > 0
    assert {language for language, _ in blocks()} == {"bash", "python"}


def test_the_marked_blocks_run(folder: Path) -> None:
    installed = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{installed}{os.pathsep}{os.environ['PATH']}"}
    for language, text in blocks():
        command = ["bash", "-euo", "pipefail", "-c", text] if language == "bash" else [sys.executable, "-c", text]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        assert done.stdout
