"""The reference study's queue: what a call leaves behind."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from tests.experiments.scripts import loaded

corpus = loaded("experiments/reference/corpus.py")
FITTED = ("reference_10m", "reference_3m", "reference_10m_12m", "reference_30m")  # as its page


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
