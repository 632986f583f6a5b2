"""The doctor sees what is here, what is not, and what must be."""

from __future__ import annotations

import sys
from collections import namedtuple
from types import SimpleNamespace

import pytest

from zpp_lab.tools import doctor


def test_this_machine_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.doctor() == 0
    out = capsys.readouterr().out
    for name in ("python", "torch", "packages", "cuda device", "nvcc", "cutlass", "wandb", "cpu"):
        assert f"\n{name} " in f"\n{out}"
    assert "gloo" in out
    assert "extra report" in out
    assert "Ready" in out


def test_rows_that_are_not_ok_name_a_fix() -> None:
    rows = doctor.checks()
    assert all(row.fix for row in rows if row.state != "ok")
    text = doctor.table([doctor.Check("nvcc", "absent", "no CUDA compiler", "install it")])
    assert text.splitlines() == ["nvcc  absent  no CUDA compiler", "              → install it"]


def test_old_python_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    version = namedtuple("version", "major minor micro")
    monkeypatch.setattr(sys, "version_info", version(3, 10, 1))
    assert doctor.python().state == "broken"
    monkeypatch.setattr(doctor, "checks", lambda: [doctor.python()])
    assert doctor.doctor() == 1
    assert "broken: python" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gpus", "state", "found"),
    [(1, "absent", "fewer than two"), (2, "ok", "all 2 GPUs"), (3, "absent", "0-2")],
)
def test_peer_memory(monkeypatch: pytest.MonkeyPatch, gpus: int, state: str, found: str) -> None:
    def reaches(a: int, b: int) -> bool:
        return (a, b) != (2, 0)  # in one direction only

    cuda = SimpleNamespace(device_count=lambda: gpus, can_device_access_peer=reaches)
    monkeypatch.setattr(doctor, "_torch", lambda: SimpleNamespace(cuda=cuda))
    row = doctor.peer_memory()
    assert row.state == state
    assert found in row.found
