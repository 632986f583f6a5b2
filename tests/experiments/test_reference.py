"""The reference study's queue: what a call leaves behind."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
import tarfile
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from tests.experiments.scripts import ROOT, loaded
from zpp_lab.config.compose import compose, load_study
from zpp_lab.runs.reader import find_runs, write_study
from zpp_lab.study.run.plan import run_overrides

fill = loaded("experiments/reference/fill.py")
corpus = loaded("experiments/reference/corpus.py")
STUDY = "reference_10m_mini"
FITTED = ("reference_10m", "reference_3m", "reference_10m_12m", "reference_30m")  # as its page


def ended(root: Path, arm: str, loss: float) -> Path:
    """A finished run of the study, as a call leaves it."""
    study = load_study(STUDY)
    folder = root / arm / "seed1"
    folder.mkdir(parents=True)
    write_study(root, study)
    own = next(a for a in study.arms if a.name == arm)
    config = asdict(compose(run_overrides(study, own, 1, folder)))
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [{"step": step, "loss": loss} for step in range(1, 61)]
    rows[29]["heldout_loss"] = rows[59]["heldout_loss"] = loss
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        "arm": arm,
        "seed": 1,
        "steps": 60,
        "heldout_loss": loss,
        "bytes": {},
        "data": {"hash": "h"},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def brought(out: Path, root: Path, folders: list[Path]) -> Path:
    """`root`: the folder of all studies."""
    queue = fill.Queue(root, out, [fill.Gpu(None)], 1)
    queue.finished = folders
    queue.pack()
    return out


def test_kept_runs_are_thin_grow_by_call_and_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    monkeypatch.setenv("RUNS", str(kept))
    for arm, loss in [("zero3", 2.0), ("zeropp", 2.1)]:  # a call each
        root, out = tmp_path / arm, tmp_path / f"{arm}_out"
        out.mkdir()
        brought(out, root, [ended(root / STUDY, arm, loss)])
        script = str(ROOT / "experiments/reference/keep.py")
        subprocess.run([sys.executable, script, str(out)], check=True, cwd=ROOT)
    with tarfile.open(kept / f"{STUDY}.tar.xz") as tar:
        tar.extractall(tmp_path / "runs", filter="data")
    runs = {run.arm: run for run in find_runs(tmp_path / "runs" / STUDY)}
    assert {arm: run.heldout_loss for arm, run in runs.items()} == {"zero3": 2.0, "zeropp": 2.1}
    rows = (runs["zeropp"].dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 25, 30, 50, 60]
    parts = [fill.Part(STUDY, None, range(9))]
    todo = fill.ordered(parts, {STUDY: load_study(STUDY)}, tmp_path / "runs")
    assert {run.arm for run in todo if fill.ended_before(run)} == {"zero3", "zeropp"}


def test_a_text_is_unpacked_only_if_it_is_the_pinned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus, "PINNED", tmp_path / "corpus.sha256")
    (tmp_path / "corpus.sha256").write_text("ab  other.tar\n")
    files = {"a/b.txt": b"one", "c.txt": b"two"}
    text = corpus.Text("tiny", tmp_path / "text", "t.json", 20, lambda: files)
    assert corpus.make(text, tmp_path) == 0  # pins it
    assert corpus.unpack(text, tmp_path) == 0
    assert {name: (tmp_path / "text" / name).read_bytes() for name in files} == files
    files["c.txt"] = b"three"
    assert corpus.make(text, tmp_path) == 1
    (tmp_path / "text.sha256").unlink()
    (tmp_path / "tiny.tar.xz").write_bytes(lzma.compress(corpus.archive(files), preset=0))
    assert corpus.unpack(text, tmp_path) == 1
    assert "another corpus" in capsys.readouterr().err
    assert (tmp_path / "text" / "c.txt").read_bytes() == b"two"


@pytest.mark.slow
def test_the_published_law_is_what_the_kept_runs_give() -> None:
    script = loaded("experiments/reference/law.py")
    found = script.law.fit([c for study in FITTED for c in script.measured(study)])
    assert found == script.law.load_law()
