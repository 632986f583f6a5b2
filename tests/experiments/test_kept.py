"""What is kept under experiments/: paths and commits that it names are there, each archive of runs
is listed with its hash, and all of it stays small."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.experiments.scripts import ROOT, loaded

PAGES = sorted(ROOT.glob("experiments/**/*.md"))
# Studies' and measurements' pages; those of speed and reference have a shape of their own.
SHAPED = [
    page
    for page in sorted(ROOT.glob("experiments/*/**/README.md"))
    if page.parent.name not in ("speed", "reference")
]
MOST_FILES, MOST_BYTES, MOST_WORDS = 450, 27_000_000, 700
FOLDERS = "experiments|conf|tests|zpp_lab|cuda|docs"


def git(*words: str) -> str:
    """What git says in a checkout with all of its history; skips elsewhere."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("needs a checkout")
    return done.stdout


@cache
def commits() -> list[str]:
    if git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("a shallow clone knows few commits")
    return git("rev-list", "HEAD").split()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_lead_to_files(page: Path) -> None:
    """Those from the root, in sentences and commands; * stands for any name."""
    found = re.findall(rf"(?<![\w./-])((?:{FOLDERS})/[\w./*-]+[\w*/])", page.read_text())
    assert [path for path in found if not list(ROOT.glob(path.rstrip("/")))] == []


@pytest.mark.parametrize("page", SHAPED, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_answers_before_its_details(page: Path) -> None:
    """Question, answer, at most one figure, one table, how to run it again, limits; short."""
    top = page.read_text().partition("<details>")[0]
    heads = ["**Question.**", "**Answer", "**Run it again.**", "**Limits.**"]
    places = [top.find(head) for head in heads]
    assert min(places) > 0
    assert places == sorted(places)
    assert top.count("\n![") <= 1
    assert len(re.findall(r"^\|[ :-]*-[ :|-]*\|$", top, re.M)) == 1
    assert len(top.split()) <= MOST_WORDS


def test_figures_drawn_from_tables_show_them() -> None:
    """`python experiments/figures.py` draws them again."""
    figures = loaded("experiments/figures.py")
    for name in figures.PLOTS:
        svg = (ROOT / "experiments" / name / "figure.svg").read_text()
        shown = re.findall(r">([^<>]+)</text>", svg)
        for point in figures.points(name):
            assert {point["text"], point["row"]} <= set(shown), (name, point)


def test_commits_are_in_the_history() -> None:
    """Every hex word behind "commit", in pages, logs and the files of runs."""
    unknown = []
    for name in git("ls-files", "experiments").split():
        data = (ROOT / name).read_bytes()
        if b"\0" in data:  # an archive
            continue
        for word in re.findall(rb"\bcommits?\b\W{0,6}\b([0-9a-f]{7,40})\b", data, re.I):
            if not any(known.startswith(word.decode()) for known in commits()):
                unknown.append(f"{name}: {word.decode()}")
    assert unknown == []


def test_archives_of_runs_are_those_of_the_list() -> None:
    """`python experiments/publish.py --archives` renews it."""
    publish = loaded("experiments/publish.py")
    assert publish.archives(ROOT / "experiments") == publish.ARCHIVES.read_text()


def test_results_stay_small() -> None:
    """Figures that no page links are drawn by `publish.py --figures`, and not kept."""
    files = git("ls-files", "experiments").split()
    assert len(files) <= MOST_FILES
    assert sum((ROOT / name).stat().st_size for name in files) <= MOST_BYTES
