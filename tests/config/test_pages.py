"""Links of the project's pages lead somewhere, and its studies and results are listed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.experiments.scripts import ROOT, loaded

PAGES = [
    *(ROOT / name for name in ("README.md", "GUIDE.md", "ARCHITECTURE.md")),
    *sorted(ROOT.glob("experiments/**/[A-Z]*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert list(loaded("experiments/publish.py").broken_links(page)) == []


def test_every_study_and_every_page_of_results_is_listed() -> None:
    readme, results = ((ROOT / name / "README.md").read_text() for name in ("", "experiments"))
    for path in (ROOT / "conf" / "study").glob("*.yaml"):
        name = path.stem.removesuffix("_x2")
        assert f"`{name}`" in readme, name
    listed = re.findall(r"^\| \[(\w+)\]\(\1\) \|", results, re.M)
    assert sorted(listed) == sorted(p.parent.name for p in ROOT.glob("experiments/*/README.md"))
