"""A study's runs as the files of its page."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path
from runpy import run_path

import pytest

from tests.experiments.scripts import loaded
from tests.study.fake_runs import ARMS, fake_study, write_study_runs
from zpp_lab.runs.reader import write_study

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


def test_a_page_keeps_the_figures_that_it_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an archive, as the page's own command gives it; all of them go to another folder."""
    study, page = fake_study((ARMS[0], ARMS[5]), seeds=2), tmp_path / "page"
    write_study_runs(tmp_path / "fake", study, steps=5)
    write_study(tmp_path / "fake", study)
    with tarfile.open(tmp_path / "runs.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "fake", "fake")
    page.mkdir()
    (page / "README.md").write_text("# One\n\n![loss](figures/loss.svg)\n")
    publish = loaded("experiments/publish.py")
    for words in ([str(page)], ["--figures", str(tmp_path / "whole")]):
        words.insert(-1, str(tmp_path / "runs.tar.xz"))
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
        assert publish.main() == 0
    assert [path.name for path in (page / "figures").iterdir()] == ["loss.svg"]
    assert list(publish.broken_links(page / "report.md")) == []
    assert "figures/loss.svg" in (page / "report.md").read_text()
    whole = {path.name for path in (tmp_path / "whole" / "figures").glob("*.svg")}
    assert {"loss.svg", "gap.svg", "gap_vs_bytes.svg"} <= whole
    assert list(publish.broken_links(tmp_path / "whole" / "report.md")) == []


def test_one_study_of_an_archive_of_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its name, and with another, the message lists them."""
    publish = loaded("experiments/publish.py")
    with tarfile.open(tmp_path / "runs.tar.xz", "w:xz") as archive:
        for name in ("one", "two"):
            study = fake_study((ARMS[0], ARMS[5]), seeds=2)
            write_study_runs(tmp_path / name, study, steps=5)
            write_study(tmp_path / name, study)
            archive.add(tmp_path / name, name)
    for given, code in (("", 1), ("/three", 1), ("/two", 0)):
        words = [str(SCRIPT), f"{tmp_path / 'runs.tar.xz'}{given}", str(tmp_path / "page")]
        monkeypatch.setattr(sys, "argv", words)
        assert publish.main() == code
        assert not code or "one, two" in capsys.readouterr().err
    assert (tmp_path / "page" / "results.csv").is_file()


def test_a_report_loses_a_figure_with_its_caption_and_heading() -> None:
    """But not what else stands below the heading."""
    kept = "## Figures\n\n### Two\n\n![b](figures/b.svg)\n\nIts caption.\n\n### Four"
    kept += "\n\nA note.\n\n| a |\n| --- |\n"
    gone = "### One\n\n![a](figures/a.svg)\n\nA caption.\n\n"
    fourth = kept.replace("A note.", "![d](figures/d.svg)\n\nA caption.\n\nA note.")
    last = "\n## Others\n\n### Five\n\n![e](figures/e.svg)\n"
    publish = loaded("experiments/publish.py")
    text = fourth.replace("### Two", gone + "### Two") + last
    assert publish.without_figures(text, {"b.svg"}) == kept
