"""Every figure that a page takes from a study is what the committed results give."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "studies"))
import findings  # noqa: E402

TEXTS = [path for path in findings.PAGES if "<!-- findings:" in path.read_text()]


def test_there_are_findings() -> None:
    assert len(TEXTS) >= 2


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_pages_say_what_the_results_say(path: Path) -> None:
    text = path.read_text()
    assert findings.renew(text) == text, f"run `python studies/findings.py`, {path} is out of date"
