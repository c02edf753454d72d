"""The operator's guide: its tested blocks run as they stand, its names exist."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from layout_tuner.cache.evidence import LIFETIMES
from layout_tuner.cache.sqlite import migrations
from layout_tuner.cache.sqlite.file import Store

GUIDE = (Path(__file__).parents[2] / "docs" / "cache.md").read_text()
BLOCKS = re.findall(r"<!-- tested -->\n```bash\n(.*?)\n```", GUIDE, re.DOTALL)


def test_the_marked_blocks_run(tmp_path, make):
    assert GUIDE.count("<!-- tested -->") == len(BLOCKS) == 2
    for host in ("decisions", "more"):
        with contextlib.closing(Store(tmp_path / f"{host}.sqlite", host=host)) as store:
            store.publish(make.decision(), make.environment)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    assert shutil.which("tuner", path=environment["PATH"])
    for text in BLOCKS:
        command = ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site.sqlite").exists()


def test_the_lifetimes_are_those_of_the_code():
    rows = dict(re.findall(r"^\| ([a-z ,]+) \| (.+) \|$", GUIDE, re.MULTILINE))
    assert rows["out of memory"] == f"{LIFETIMES['memory'].days} day"
    assert rows["crash"] == f"{LIFETIMES['crash'].days} day"
    assert rows["timeout"] == f"{LIFETIMES['timeout'].days} days"
    assert rows["fault of the device"] == "never stored"
    assert not LIFETIMES["device"]
    assert {LIFETIMES[name] for name in ("compile", "overflow", "wrong")} == {None}


def test_no_migration_is_forgotten():
    from layout_tuner.cache.sqlite.models import SCHEMA_VERSION

    assert sorted(migrations.MIGRATIONS) == list(range(1, SCHEMA_VERSION))
