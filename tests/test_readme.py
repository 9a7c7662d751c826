"""The README's examples run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def examples(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(examples("README.md"))))
def test_an_example_of_the_readme_runs(number, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(examples("README.md")[number], encoding="utf-8")
    alone = [sys.executable, "-W", "error", str(script)]
    both = [str(Path(sys.executable).with_name("plait")), "federate", str(script), str(script)]
    done = subprocess.run(
        both if "FederalModel" in script.read_text(encoding="utf-8") else alone,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("*/ckpt-*")), "each example saves checkpoints"


def test_every_door_has_its_example():
    found = [re.findall(r"from plait import (\w+)", text) for text in examples("README.md")]
    assert found == [["efl"], ["mox"], ["train"], ["openks"], ["efl"]]


def test_both_readmes_show_the_same_examples():
    assert examples("README.md") == examples("README.zh.md")
