"""The report's page in headless Chromium: it asks for nothing, draws, filters, sorts and prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.study.fake_sweep import grid, write_sweep
from tests.study.report import chromium
from zpp_lab.study.report.report import Report, build_report

browser = chromium.browser  # a fixture
pytestmark = chromium.needed
VISIBLE = "rows => rows.filter(row => !row.hidden).map(row => row.dataset.arm)"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    root = tmp_path_factory.mktemp("sweep")
    cells = grid(bits=(4, 8), blocks=(32, 1024), roundings=("nearest",))
    write_sweep(root, cells, seeds=3, steps=100)
    with chromium.without_files():
        return build_report(root)


@pytest.fixture(scope="module")
def page(report: Report, browser: Any) -> Iterator[Any]:
    """The page on a desktop, loaded once for all tests, which leave it as a reader might."""
    with chromium.opened(browser, report.html, 1400, 5) as page:
        yield page


@pytest.mark.parametrize(("width", "height"), [(1400, 900), (390, 844)], ids=["desktop", "phone"])
def test_answer_first_then_every_chart_and_legend(page: Any, width: int, height: int) -> None:
    chromium.resize(page, width, 5, height)
    chromium.first_screen(page)
    assert page.locator("#contents details").evaluate("fold => fold.open") == (width > 1000)
    assert page.evaluate("document.documentElement.scrollHeight") < (3600, 5600)[width < 1000]
    page.locator("#unfold").evaluate("button => button.click()")
    assert page.locator("main details:not([open])").count() == 0
    charts = page.locator(".chart")
    assert charts.count() == 12
    for name, drawn in charts.evaluate_all(chromium.PATHS):
        assert any(len(d) > 20 for d in drawn), name
        assert not any("NaN" in d for d in drawn), name
    chromium.fits(page)
    # two of bytes, three of pairs, one of each over training
    assert chromium.legends_answer(page) == 13
    page.locator("#unfold").evaluate("button => button.click()")
    assert page.locator("main details[open]").count() == 0


def test_dark_pages_invert_their_charts(page: Any) -> None:
    shown = """() => [document.body, document.querySelector("#chart-gap svg")]
        .flatMap(e => [getComputedStyle(e).backgroundColor, getComputedStyle(e).filter])"""
    day = page.evaluate(shown)
    page.emulate_media(color_scheme="dark")
    night = page.evaluate(shown)
    page.emulate_media(color_scheme="light")
    assert (day[0], day[3]) == ("rgb(255, 255, 255)", "none")
    assert sum(map(int, re.findall(r"\d+", night[0])[:3])) < 80
    assert night[2].endswith(", 0)")  # see-through
    assert night[3].startswith("invert(")


def test_the_filter_hides_rows_and_curves(page: Any) -> None:
    rows = page.locator("#verdicts tbody tr")
    every = rows.evaluate_all(VISIBLE)
    points = page.locator("#chart-gap .mark-symbol path")
    before = points.count()
    assert before == len(every) - 1
    page.get_by_label("Show arms with").fill("B1024 worse")
    shown = rows.evaluate_all(VISIBLE)
    assert shown
    assert all("b1024" in name for name in shown)
    page.wait_for_function(
        "n => document.querySelectorAll('#chart-gap .mark-symbol path').length === n",
        arg=len(shown),
    )
    pairs = page.locator("#whole tbody tr").evaluate_all(VISIBLE)
    assert sorted(pairs) == sorted(shown)
    assert (
        page.locator("#filter-count").text_content() == f"{len(shown)} of {len(every)} arms shown"
    )
    page.get_by_label("Show arms with").fill("")
    assert rows.evaluate_all(VISIBLE) == every
    page.wait_for_function(
        "n => document.querySelectorAll('#chart-gap .mark-symbol path').length === n", arg=before
    )


def test_tables_are_sorted_by_keyboard(page: Any) -> None:
    column = page.locator("#verdicts thead th", has_text="Held-out loss")
    place = column.evaluate("cell => cell.cellIndex")
    page.get_by_label("Show arms with").focus()
    for _ in range(2 + place):  # the table's scroll region, then the buttons of its columns
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.parentElement.cellIndex") == place
    for key, direction in (("Enter", "ascending"), ("Space", "descending")):
        page.keyboard.press(key)
        assert column.get_attribute("aria-sort") == direction
        cells = page.locator(f"#verdicts tbody tr > :nth-child({place + 1})").all_text_contents()
        losses = list(map(float, cells))
        assert losses == sorted(losses, reverse=direction == "descending")
    assert page.locator("#verdicts th[aria-sort]").count() == 1


def test_it_prints_without_cut_tables(page: Any, tmp_path: Path) -> None:
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 703, "height": 1000})  # A4 between its margins
    folded = page.locator("main details:not([open])")
    assert folded.count() > 8
    hidden = "fs => fs.filter(f => !f.lastElementChild.checkVisibility()).length"
    assert folded.evaluate_all(hidden) == 0
    cut = "ts => ts.filter(t => t.getBoundingClientRect().right > innerWidth + 1).map(t => t.id)"
    assert page.eval_on_selector_all("table", cut) == []
    assert page.eval_on_selector_all(".chart svg", cut) == []
    assert not page.locator("#filter").is_visible()
    data = page.pdf(path=tmp_path / "page.pdf", format="A4")
    assert data.startswith(b"%PDF-")
