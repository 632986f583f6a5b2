"""Trainings whose link is cut, loses packets, or whose rank is stopped: they go on to the same
bits, or end everywhere with one line and go on from there. Over gloo, between real network
namespaces; `experiments/parity/links.py` has the same with longer times and NCCL. Needs root."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.scripts import loaded
from tests.tools.links.shared import refusal
from zpp_lab.train.launch import processes

links = loaded("experiments/parity/links.py")
Case, FOREVER = links.Case, links.FOREVER
DEFAULT, SHORT = (300.0, 40.0), (300.0, 10.0)  # seconds for a transfer, and for a silent rank
CASES = [
    Case("cut", "cut", 3, *DEFAULT, True),
    Case("down", "down", 3, *DEFAULT, True),
    Case("stop", "stop", 3, *DEFAULT, True),
    Case("loss", "loss", FOREVER, *DEFAULT, True),
    Case("cut-forever", "cut", FOREVER, *SHORT, False),
    Case("down-forever", "down", FOREVER, *SHORT, False),
    Case("stop-forever", "stop", FOREVER, *SHORT, False),
    Case("stop-longer-than-the-limit", "stop", 30, *SHORT, False),
    Case("late-transfer", "cut", FOREVER, 8.0, 600.0, False),
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(refusal()), reason=refusal()),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the undisturbed run; a slow machine may take long for anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "GRACE", 200.0)
        folder = tmp_path_factory.mktemp("links")
        assert result(Case("whole", "none", 0, *DEFAULT, True), folder)["happened"] == "went on"
        yield folder


def result(case: Any, work: Path) -> dict[str, Any]:
    found: dict[str, Any] = links.Trial(case, work, steps=120, cpu=True).run()
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_goes_on_or_ends_everywhere_and_goes_on_later(case: Any, work: Path) -> None:
    row = result(case, work)
    if row["happened"] == "not possible here":
        pytest.skip(row["problem"])
    assert links.good(row), row
    assert row.get("line", 0) < 120  # the fault came before the end
    assert processes.marked(lambda owner: owner == processes.mark()) == []  # no process is left
