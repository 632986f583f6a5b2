"""A study's runs as the files of its page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest

SCRIPT = Path(__file__).parents[2] / "experiments" / "publish.py"


def test_without_runs_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    words = [sys.executable, str(SCRIPT), str(tmp_path / "empty"), str(tmp_path / "page")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "page").exists()


def test_a_page_is_checked_against_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["arm,seed,step,heldout_loss", "w4,1,20,9.0", "w4,1,40,2.0", "w4,2,40,2.5", "w4,3,20,9"]
    (tmp_path / "results.csv").write_text("\n".join(rows) + "\n")
    page = tmp_path / "README.md"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--check", str(tmp_path)])
    text = "# One\n\n| Arm | Held-out loss |\n|---|---|\n| `w4` | {} |\n\n[x]({})\n"
    page.write_text(text.format("2.250", "#one"))
    assert run_path(str(SCRIPT))["main"]() == 0
    page.write_text(text.format("2.251", "gone.md"))
    assert run_path(str(SCRIPT))["main"]() == 1
    said = capsys.readouterr().out
    assert "w4: 2.251, but 2.250 in results.csv" in said
    assert "gone.md: no such file" in said
