"""The project's pages: links lead somewhere, studies and results are listed, texts stay short,
and README's figures are those of their sources."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from tests.experiments.scripts import ROOT, loaded
from zpp_lab.config.compose import compose, load_study

PAGES = [
    *(ROOT / name for name in ("README.md", "GUIDE.md", "ARCHITECTURE.md")),
    *sorted(ROOT.glob("experiments/**/*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert list(loaded("experiments/publish.py").broken_links(page)) == []


def test_every_study_and_every_page_of_results_is_listed() -> None:
    results = (ROOT / "experiments" / "README.md").read_text()
    for path in (ROOT / "conf" / "study").glob("*.yaml"):
        name = path.stem.removesuffix("_x2")
        assert f"`{name}`" in results, name
    listed = re.findall(r"^\| \[(\w+)\]\(\1\) \|", results, re.M)
    assert sorted(listed) == sorted(p.parent.name for p in ROOT.glob("experiments/*/README.md"))


def test_answers_in_the_table_of_results_are_short() -> None:
    rows = tables((ROOT / "experiments" / "README.md").read_text())["page"]
    assert rows[0] == ["page", "question", "answer", "n", "scale"]
    for page, _, answer, *_ in rows[1:]:
        assert len(words(answer)) <= 15, page


@pytest.mark.parametrize(("page", "most"), [("README.md", 1800), ("GUIDE.md", 8000)])
def test_pages_stay_short(page: str, most: int) -> None:
    """Code blocks and tables count."""
    assert len(words((ROOT / page).read_text())) <= most


@pytest.mark.parametrize("page", ["README.md", "experiments/README.md", "GUIDE.md"])
def test_sentences_stay_short(page: str) -> None:
    long = [s for s in sentences((ROOT / page).read_text()) if len(words(s)) > 30]
    assert not long, long


def test_the_readme_begins_with_few_words_and_one_small_table() -> None:
    page = (ROOT / "README.md").read_text()
    assert len(words(page.partition("```")[0])) <= 120
    assert len(re.findall(r"^!\[", page, re.M)) == 1
    rows = tables(page)["recipe: what it sends"]
    assert len(rows) - 1 <= 6
    assert len(rows[0]) <= 5
    assert rows[0][-1] == "verdict"


def test_the_readmes_figures_are_those_of_their_sources() -> None:
    """Speeds of headline.csv, losses and verdicts of the page on loss."""
    page = (ROOT / "README.md").read_text()
    loss = (ROOT / "experiments" / "reference" / "LOSS.md").read_text()
    script = loaded("experiments/speed/headline.py")
    found = script.read()
    assert script.with_speeds(page, found) == page, f"run {script.__file__}"
    assert script.FIGURE.read_text() == script.draw(found), f"run {script.__file__}"
    lead = next(f.text for f in found if (f.arm, f.link_gbps) == ("diff_g84h", 12))
    assert f"{lead.replace('–', ' to ')} times as fast" in page.partition("```")[0]
    gaps = [row[-2] for row in tables(page)["recipe: what it sends"] if "±" in row[-2]]
    assert len(gaps) >= 4
    for gap in gaps:
        assert gap in loss, gap


def test_the_headlines_recipe_is_the_arm_that_was_measured() -> None:
    arm = next(a for a in load_study("reference_10m").arms if a.name == "diff_g84h")
    assert compose(["recipe=diff_g84h"]).recipe == compose(arm.overrides).recipe


def test_the_page_on_time_to_loss_is_short_and_says_what_its_table_says() -> None:
    """The page begins with few bullets and one figure; times in text are those of the csv."""
    folder = ROOT / "experiments" / "reference"
    page = (folder / "README.md").read_text()
    before = page.partition("](time_to_loss.svg)")[0]
    answer = before.partition("**Answer.**")[2]
    assert 1 <= len(re.findall(r"^- ", answer, re.M)) <= 5
    assert len(re.findall(r"!\[", page)) == 1
    assert len(tables(page)) == 1
    for heading in ("**Question.**", "**Limits**", "## How to run", "## What a run costs"):
        assert heading in page, heading
    assert "emulated on one host" in answer.partition(". ")[0]
    listed = (ROOT / "experiments" / "README.md").read_text()
    line = next(row for row in listed.splitlines() if row.startswith("| [reference](reference) |"))
    cells = list(csv.DictReader((folder / "time_to_loss.csv").open(newline="")))
    for arm, link, texts in [
        ("diff_g84h", "12 Gb/s", (answer, line)),
        ("zeropp", "12 Gb/s", (answer, line)),
        ("diff3_g83", "12 Gb/s", (answer,)),
        ("diff_g84h", "25 Gb/s", (answer,)),
        ("zeropp", "25 Gb/s", (answer,)),
        ("diff3_g83", "25 Gb/s", (answer,)),
        ("diff_g84h", "50 Gb/s", (answer,)),
        ("zeropp", "50 Gb/s", (answer,)),
    ]:
        own = [c for c in cells if (c["arm"], c["link"], c["shape"]) == (arm, link, "2 × 2")]
        time = f"{100 * float(min(own, key=lambda c: int(c['steps']))['time']):.0f}"
        for text in texts:
            said = next(s for s in text.split("\n") if link in s)
            assert re.search(rf"\b{time}\b", said), (arm, link, time)


def words(text: str) -> list[str]:
    """What stands between spaces and has a letter or a digit."""
    return [word for word in text.split() if re.search(r"\w", word)]


def sentences(page: str) -> list[str]:
    """Those outside of code blocks; an item of a list and a cell of a table end theirs."""
    prose = re.sub(r"^```.*?^```$", "\n", page, flags=re.M | re.S)
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )|\n(?=\|)|\|", prose)
    return [s for part in parts for s in re.split(r"(?<=[.!?])[*)\"]*\s+", part)]


def tables(page: str) -> dict[str, list[list[str]]]:
    """Rows of each table, its head first, by the first column's head."""
    found: dict[str, list[list[str]]] = {}
    for block in re.findall(r"(?:^\|.*\|\n)+", page, re.M):
        rows = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()
        ]
        found[rows[0][0]] = [row for row in rows if set("".join(row)) - set("-: ")]
    return found
