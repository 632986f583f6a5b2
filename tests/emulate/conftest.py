from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.emulate.fake_mps import fake_mps


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the recorder in MPS's place, which is first on PATH."""
    folder = tmp_path / "bin"
    fake_mps(folder)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder
