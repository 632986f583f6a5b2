"""A mistyped path is told from a name on the Hub, and the one that was meant is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from zpp_lab.files import below, looks_like_folder, missing, nearest


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ("gpt2", False),
        ("owner/name", False),
        ("./gpt2", True),
        ("../gpt2", True),
        (".", True),
        ("~/models", True),
        ("/models/x", True),
        ("a/b/c", True),
        ("owner/", True),
        ("models/lama", True),  # models is a folder here
        ("models", True),
        (".hidden-name", False),
    ],
)
def test_paths_are_told_from_names(
    text: str, folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    assert looks_like_folder(text) is folder


def test_the_nearest_name_is_found_at_any_depth(tmp_path: Path) -> None:
    (tmp_path / "models" / "llama").mkdir(parents=True)
    (tmp_path / "models" / "other").mkdir()
    assert nearest(tmp_path / "modles" / "llama") == tmp_path / "models" / "llama"
    assert nearest(tmp_path / "modles" / "opt") == tmp_path / "models"
    assert nearest(tmp_path / "models" / "lama") == tmp_path / "models" / "llama"
    assert nearest(tmp_path / "zzz") is None


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models/llama").mkdir(parents=True)
    Path("models/llama/config.json").touch()
    Path("file").touch()
    assert missing(Path("models/lama")) == "no such folder (did you mean models/llama?)"
    assert missing(Path("models/qqq")) == "no such folder; in models: llama"
    assert missing(Path("qqq"), "file") == f"no such file in {tmp_path}"
    assert missing(Path("file")) == "a file, not a folder"
    assert below(Path("models"), "config.json") == " (did you mean models/llama?)"
    assert below(Path("models"), "nothing") == below(Path("nowhere"), "x") == ""
