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

OPACITIES = """legend => [...legend.closest(".chart").querySelectorAll(
    "svg .mark-line path, svg .mark-symbol:not(.role-legend-symbol) path")]
    .map(path => path.getAttribute("opacity") || "1")"""


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


def resize(page: Any, width: int, charts: int) -> None:
    """The page anew, in a window of this width."""
    page.set_viewport_size({"width": width, "height": 900})
    page.reload()
    drawn(page, charts)


def drawn(page: Any, charts: int) -> None:
    """Returns when all charts are there, more than so many."""
    page.wait_for_function(f"[...views.values()].every(Boolean) && views.size > {charts}")


def fits(page: Any) -> None:
    """Neither the page nor a chart is wider than the window."""
    room = page.evaluate("document.documentElement.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") == room
    wide = "cs => cs.filter(c => c.scrollWidth > c.clientWidth + 1).map(c => c.id)"
    assert page.eval_on_selector_all(".chart", wide) == []


def legends_answer(page: Any) -> int:
    """Clicks the ends of every legend, as a hand would: each singles out marks of its chart, which
    stay bright, and others fade; a click beside the panels takes it back. Returns how many
    legends there are."""
    legends = page.locator(".chart .role-legend")
    for legend in legends.all():
        every = legend.locator(".role-legend-label text").all()
        assert every
        entries = [every[0], *every[1:][-1:]]
        first = before = legend.evaluate(OPACITIES)
        for entry in entries:
            entry.evaluate("text => text.scrollIntoView({block: 'center'})")
            box = entry.bounding_box()
            page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
            page.wait_for_function(
                f"([legend, before]) => String(({OPACITIES})(legend)) !== String(before)",
                arg=[legend.element_handle(), before],
            )
            before = legend.evaluate(OPACITIES)
            if len(entries) > 1:
                assert {"1"} < set(before), entry.text_content()
        legend.evaluate("legend => legend.closest('svg').scrollIntoView({block: 'end'})")
        edge = legend.locator("xpath=ancestor::*[name()='svg'][last()]").bounding_box()
        page.mouse.click(edge["x"] + 2, edge["y"] + edge["height"] - 2)
        page.wait_for_function(
            f"([legend, first]) => String(({OPACITIES})(legend)) === String(first)",
            arg=[legend.element_handle(), first],
        )
    return legends.count()
