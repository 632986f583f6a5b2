"""Exports: smaller dtypes, the command's grammar, and what is refused."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.small_runs import newest, small, tear, tensor_file
from zpp_lab.cli.main import main
from zpp_lab.runs.checkpoint.tensor_file import read_layout
from zpp_lab.tools.export import export_hf
from zpp_lab.tools.export.shards import write_safetensors
from zpp_lab.train.trainer import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of the built-in decoder in `run`."""
    folder = tmp_path_factory.mktemp("trained")
    run(small(folder))
    return folder / "run"


def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(small(tmp_path))
    file = tensor_file(newest(tmp_path / "run"))
    place = read_layout(file)["weights.norm.weight"]
    content = bytearray(file.read_bytes())
    content[place.start] ^= 1
    file.write_bytes(content)
    (tmp_path / "run" / "checkpoints" / ".partial-00000015").mkdir()  # a kill left it
    assert export_hf(tmp_path / "run", tmp_path / "out").step == 9
    said = capsys.readouterr().err
    assert "step-00000012 is damaged" in said
    assert "partial" not in said
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        tear(path)
    with pytest.raises(ValueError, match="step-00000012"):
        export_hf(tmp_path / "run", tmp_path / "again")
    assert not list(tmp_path.glob("*again*"))


def test_numbers_beyond_fp16_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\bw .*float16"):
        write_safetensors(tmp_path, {"w": (1,)}, lambda _: torch.tensor([1e5]), torch.float16)


def test_a_full_disk_is_said_and_leaves_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", str(folder), "--to", "hf", "--out", str(tmp_path / "out")]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # as a disk that fills up
    try:
        assert main(words) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot write" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main(words) == 0


def test_a_small_disk_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3999))

    def read(name: str) -> torch.Tensor:
        raise AssertionError(name)

    with pytest.raises(OSError, match=r"4,000 bytes .*3,999"):
        write_safetensors(tmp_path, {"w": (1000,)}, read, torch.float32)
