"""Pages in headless Chromium, and what each of them must keep."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright import sync_api

from zpp_lab.study.report import report

LIMIT = 240e3  # milliseconds; only a failing test waits that long
NAMES = ("chromium", "google-chrome", "chromium-browser")
CHROMIUM = next((path for path in map(shutil.which, NAMES) if path), "")
needed = pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine")
widths = pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
PATHS = """charts => charts.map(chart => [chart.id,
    [...chart.querySelectorAll("svg .mark-line path, svg .mark-symbol path")]
        .map(path => path.getAttribute("d") || "")])"""

TEXTS = """chart => [...chart.querySelectorAll("svg text")].map(t => {
    const r = t.getBoundingClientRect();
    return [t.textContent, r.left, r.top, r.right, r.bottom]; }).filter(t => t[0].trim())"""
CUT = """[...document.querySelectorAll("body *")].filter(e => {
    const r = e.getBoundingClientRect();
    if (!r.width || !e.checkVisibility() || r.right <= innerWidth + 1 && r.left >= -1) return false;
    return !e.closest(".wide, pre") || e.matches(".wide, .chart, .chart svg"); })
    .map(e => e.outerHTML.slice(0, 90))"""
CLICKS = """async () => {
  const rest = () => new Promise(done => setTimeout(done, 12));
  const opacities = chart => [...chart.querySelectorAll(
      "svg .mark-line path, svg .mark-symbol:not(.role-legend-symbol) path")]
    .map(path => path.getAttribute("opacity") || "1");
  async function click(x, y, chart, before) {  // waits for what is drawn, a second at most
    const at = {clientX: x, clientY: y, bubbles: true, view: window};
    const hit = document.elementFromPoint(x, y);
    for (const kind of ["mousedown", "mouseup", "click"])
      hit.dispatchEvent(new MouseEvent(kind, at));
    for (let i = 0; i < 80 && String(opacities(chart)) === String(before); i++) await rest();
    return hit;
  }
  document.querySelectorAll("main details").forEach(fold => fold.open = true);
  const found = [];
  for (const legend of document.querySelectorAll(".chart .role-legend")) {
    const chart = legend.closest(".chart"), entries = [];
    const first = opacities(chart);
    let before = first;
    for (const text of legend.querySelectorAll(".role-legend-label text")) {
      text.scrollIntoView({block: "center"});
      const r = text.getBoundingClientRect();
      const hit = await click((r.left + r.right) / 2, (r.top + r.bottom) / 2, chart, before);
      const seen = opacities(chart);
      entries.push([text.textContent, legend.contains(hit), seen]);
      before = seen;
    }
    chart.scrollIntoView({block: "end"});
    const edge = chart.querySelector("svg").getBoundingClientRect();
    await click(edge.left + 2, edge.bottom - 2, chart, before);
    found.push([chart.id, first, entries, opacities(chart)]);
  }
  return found; }"""


@contextmanager
def without_files() -> Iterator[None]:
    """The page alone: SVG and PDF beside it are test_report's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write_pictures", lambda *_: [])
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as play:
        args = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        args += ["--disable-dev-shm-usage"]  # a container's may be small
        browser = play.chromium.launch(executable_path=CHROMIUM, args=args, timeout=LIMIT)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, file: Path, width: int, charts: int) -> Iterator[Any]:
    """A page of more than so many charts, which never complains and asks for nothing but itself."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.set_default_timeout(LIMIT)
    faults: list[str] = []
    page.on("console", lambda m: faults.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    address = file.resolve().as_uri()
    page.goto(address)
    drawn(page, charts)
    yield page
    assert faults == []
    assert [url for url in asked if url != address and not url.startswith("data:")] == []
    page.close()


def resize(page: Any, width: int, charts: int, height: int = 900) -> None:
    """The page anew, where its window is not of this size."""
    if page.viewport_size == {"width": width, "height": height}:
        return
    page.set_viewport_size({"width": width, "height": height})
    page.reload()
    drawn(page, charts)
    page.evaluate("scrollTo(0, 0)")  # a reader's place is kept


def drawn(page: Any, charts: int) -> None:
    """Returns when all charts are there, more than so many, those in folds too."""
    page.wait_for_function(
        "n => [...views.values()].every(Boolean) && views.size > n && "
        "views.size === document.querySelectorAll('.chart').length",
        arg=charts,
    )


def fits(page: Any) -> None:
    """Nothing is wider than the window, but for what a scroll region of its own holds; folds are
    open or not."""
    room = page.evaluate("document.documentElement.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") == room
    assert page.evaluate(CUT) == []


def first_screen(page: Any) -> None:
    """The answer and the figure of gaps lie in it, without scrolling, each verdict by its arm."""
    for place in ("#answer > h2 + p", "#chart-gap svg"):
        box = page.locator(place).bounding_box()
        size = page.viewport_size
        assert 0 <= box["y"] < box["y"] + box["height"] <= size["height"], place
        assert box["x"] + box["width"] <= size["width"], place
    rows = page.locator("#chart-gap .role-axis-label text").all_text_contents()
    words = page.locator("#chart-gap .mark-text.role-mark text").all_text_contents()
    arms = page.locator("#verdicts tbody th").all_text_contents()[1:]
    assert [name.rstrip("…") for name in rows if name.rstrip("…") in "\n".join(arms)][-len(arms) :]
    wide = page.viewport_size["width"] > 1000
    assert len(words) == (3 * len(arms) + 3 if wide else len(arms))  # gap, bytes, verdict; heads
    apart(page, "gap")


def apart(page: Any, chart: str) -> None:
    """No two texts of a chart overlap."""
    texts = page.locator(f"#chart-{chart}").evaluate(TEXTS)
    assert len(texts) > 5
    for i, (one, left, top, right, bottom) in enumerate(texts):
        for other, x0, y0, x1, y1 in texts[:i]:
            free = left >= x1 - 1 or x0 >= right - 1 or top >= y1 - 1 or y0 >= bottom - 1
            assert free, (chart, one, other)


def legends_answer(page: Any) -> int:
    """Clicks every entry of every legend where a hand would: each singles out marks of its chart,
    which stay bright, and others fade; a click beside the panels takes it back. Returns how many
    legends there are."""
    legends = page.evaluate(CLICKS)
    for chart, first, entries, last in legends:
        assert entries, chart
        before = first
        for entry, hit, seen in entries:
            assert hit, (chart, entry, "lies under something else")
            assert seen != before, (chart, entry)
            assert len(entries) == 1 or "1" in seen, (chart, entry)
            before = seen
        assert last == first, chart
    return len(legends)
