"""The examples of CONTRIBUTING.md that stand for themselves run, each in a folder of its own."""

import re
import textwrap
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "CONTRIBUTING.md"
BLOCKS = [
    textwrap.dedent(block) for block in re.findall(r"^ *```python\n(.*?)^ *```", PAGE.read_text(), re.M | re.S)
]
WHOLE = [block for block in BLOCKS if re.match(r"import |from ", block) and "assert" in block]


def title(block: str) -> str:
    return re.search(r"^class (\w+)", block, re.M)[1]  # type: ignore[index]


@pytest.mark.parametrize("block", WHOLE, ids=title)
def test_an_example_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, PAGE.name, "exec"), {"__name__": title(block)})


def test_there_are_examples() -> None:
    assert {"LinearConfig", "Midpoint", "LogUniform"} <= set(map(title, WHOLE))
