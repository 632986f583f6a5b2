"""The doctor sees what is here, what is not, and what must be."""

from __future__ import annotations

import email.message
import importlib.metadata
import importlib.util
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

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


def test_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    row = doctor.torch()
    assert row.state == "broken"
    assert row.fix.startswith("pip install 'torch")
    assert doctor.cuda_device().state == "absent"
    assert doctor.distributed().state == "absent"


def test_torch_is_compiled_once_or_at_every_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))  # nothing there yet
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    row = doctor.bytecode()
    assert row.state == "absent"
    assert "PYTHONDONTWRITEBYTECODE" in row.found
    assert "compileall" in row.fix
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert "read-only" in doctor.bytecode().found
    monkeypatch.setattr(doctor.os, "access", lambda *_: True)
    assert doctor.bytecode().state == "ok"
    cached = Path(importlib.util.cache_from_source(torch.__file__))
    cached.parent.mkdir(parents=True)
    cached.touch()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert doctor.bytecode().found == "of torch is there"


def test_missing_and_outdated_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["numpy>=1", "no-such-package>=2", "pyyaml>=999"]
    groups = {"all": ["zpp_lab[some]", "numpy"], "some": ["no-such-extra"]}
    monkeypatch.setattr(doctor, "_declared", lambda: (wanted, groups))
    assert doctor.missing(doctor.requirements()) == ["no-such-package>=2", "pyyaml>=999"]
    row = doctor.packages()
    assert row.state == "broken"
    assert "pyyaml>=999" in row.found
    assert [(row.name, row.state) for row in doctor.extras()] == [
        ("extra all", "absent"),
        ("extra some", "absent"),
    ]


def test_requirements_of_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = email.message.Message()
    metadata["Provides-Extra"] = "hf"
    metadata["Requires-Dist"] = "torch>=2.11"
    metadata["Requires-Dist"] = 'tomli>=1; python_version < "3.0"'
    metadata["Requires-Dist"] = "datasets>=3; extra == 'hf'"
    metadata["Requires-Dist"] = "old>=1; python_version < '3.0' and extra == 'hf'"
    monkeypatch.setattr(importlib.metadata, "metadata", lambda _: metadata)
    needs, groups = doctor._installed()
    assert needs == ["torch>=2.11", 'tomli>=1; python_version < "3.0"']
    assert groups == {"hf": ["datasets>=3", "old>=1; python_version < '3.0'"]}
    monkeypatch.setattr(doctor, "_declared", lambda: (needs, groups))
    assert [str(line) for line in doctor.requirements()] == ["torch>=2.11"]
    assert [str(line) for line in doctor.requirements("hf")] == ["datasets>=3"]


def test_no_compiler_and_no_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda _: None)
    assert doctor.nvcc().state == "absent"
    assert doctor.cutlass().state == "absent"
    assert doctor.compiler().state == "absent"
    assert "nvidia" in doctor.cutlass().fix or "cuda" in doctor.cutlass().fix
    assert doctor.wandb().state == "absent"


@pytest.mark.parametrize(
    ("gpus", "state", "found"),
    [(1, "absent", "fewer than two"), (2, "ok", "all 2 GPUs"), (3, "absent", "apart: 0-2")],
)
def test_peer_memory(monkeypatch: pytest.MonkeyPatch, gpus: int, state: str, found: str) -> None:
    def reaches(a: int, b: int) -> bool:
        return (a, b) != (2, 0)  # in one direction only

    cuda = SimpleNamespace(device_count=lambda: gpus, can_device_access_peer=reaches)
    monkeypatch.setattr(doctor, "_torch", lambda: SimpleNamespace(cuda=cuda))
    row = doctor.peer_memory()
    assert row.state == state
    assert found in row.found


def test_compiling_for_a_gpu_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_available=lambda: True)
    monkeypatch.setattr(doctor, "_torch", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(doctor.shutil, "which", lambda _: "/usr/bin/g++")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda _: None)
    assert "Triton" in doctor.compiler().found
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda _: object())
    assert doctor.compiler().state == "ok"


def test_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda _: None)
    assert doctor.deepspeed().state == "absent"
    assert "[deepspeed]" in doctor.deepspeed().fix
    monkeypatch.setattr(doctor, "_version", lambda _: "0.19.8")
    monkeypatch.setattr(doctor, "nvcc", lambda: doctor.Check("nvcc", "absent", "none", "get it"))
    assert "quantizer needs" in doctor.deepspeed().found
