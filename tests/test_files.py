"""A file is whole or it is not there."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from zpp_lab.files import is_full, text_table, write_atomic


def test_replaces_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, "one\n")
    first = path.stat().st_ino
    write_atomic(path, "zwölf\n")
    assert path.read_text(encoding="utf-8") == "zwölf\n"
    assert path.stat().st_ino != first
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, "old")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=r"a\.json: No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"none.a.json"):
        write_atomic(tmp_path / "none" / "a.json", "x")


def test_a_limit_on_files_counts_as_a_full_disk(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="too large") as caught:
            write_atomic(tmp_path / "a.json", "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert is_full(caught.value)
    assert not is_full(FileNotFoundError(2, "no such file"))
    assert not list(tmp_path.iterdir())


def test_a_table_fits_a_terminal() -> None:
    """Heads and words break where it would be too wide, numbers never."""
    few = text_table(["Arm", "Bytes between nodes"], [["a b", "1"], ["zero3", "100%"]], left=1)
    assert few.splitlines()[0] == "Arm    Bytes between nodes"
    heads = ["Arm", "Verdict of the arm", *["Loss of so many tokens"] * 3]
    arm = "recipe.weights.bits=4,recipe.grads.bits=2,train.lr=0.0003"
    row = [arm, "undecided (needs about 123 seeds)", *["+0.0042 ± 0.0013"] * 3]
    text = text_table(heads, [row], left=2)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert "  ".join(row[2:]) in text
    rule = next(i for i, line in enumerate(lines) if line.startswith("─"))
    width = lines[rule].index(" ")
    assert "".join(line[:width].strip() for line in lines[rule + 1 :]) == arm
