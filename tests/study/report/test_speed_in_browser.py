"""The page of measured speeds, and a study's figures of speed, in headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.study.fake_runs import ARMS as STUDY_ARMS
from tests.study.fake_runs import fake_study, write_study_runs
from tests.study.report import chromium
from tests.study.report.fake_speeds import ARMS, rows, write_speeds
from tests.study.report.test_speed_report import bench_of, predict
from zpp_lab.runs.reader import write_study
from zpp_lab.study.report.report import build_report, build_speed_report

browser = chromium.browser  # a fixture
pytestmark = chromium.needed
SPEED = ("speedup", "floor")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A bench of two models and seven settings, and a study with speeds."""
    root = tmp_path_factory.mktemp("bench")
    shapes = {(2, 2): ("12", "25", "50", "max"), (1, 4): ("max",)}
    write_speeds(root, rows(ARMS, shapes) + rows(ARMS, shapes, "13b"))
    runs = tmp_path_factory.mktemp("runs")
    study = fake_study(STUDY_ARMS[:6])
    write_study_runs(runs, study, 60)
    write_study(runs, study)
    with chromium.without_files():
        made = build_report(runs, speed=bench_of(tmp_path_factory.mktemp("speeds")))
        return {"bench": build_speed_report(root, predict).html, "study": made.html}


@pytest.fixture(scope="module", params=["bench", "study"])
def page(pages: dict[str, Path], browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Either page, loaded once for all tests."""
    with chromium.opened(browser, pages[request.param], 1280, 1) as page:
        yield page


@chromium.widths
def test_charts_have_marks_fit_and_overlap_nowhere(page: Any, width: int) -> None:
    chromium.resize(page, width, 1)
    drawn = dict(page.locator(".chart").evaluate_all(chromium.PATHS))
    for name in SPEED:
        assert any(len(d) > 20 for d in drawn[f"chart-{name}"]), name
        assert not any("NaN" in d for d in drawn[f"chart-{name}"]), name
        chromium.apart(page, name)
    chromium.fits(page)


def test_the_legend_singles_an_arm_out_and_tables_sort(page: Any) -> None:
    assert chromium.legends_answer(page) > 1
    button = page.locator("#speeds thead button", has_text="Tokens/s").first
    button.press("Enter")
    rates = page.locator("#speeds tbody tr > :nth-child(4)").all_text_contents()
    numbers = [float(text.replace(",", "")) for text in rates]
    assert numbers == sorted(numbers)
