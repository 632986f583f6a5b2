"""Kernels that are installed as a wheel: what it holds, where it serves, and why not elsewhere."""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

from zpp_lab.codecs import kernels
from zpp_lab.codecs.kernels import backend, build, wheel
from zpp_lab.tools import doctor

DIGEST = build.digest()
FACTS = wheel.Facts("0.1.0", DIGEST, build.ALL_ARCHS, build.TORCH, "13.0")


@pytest.fixture(autouse=True)
def none_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine's own wheel is not what these tests are about."""
    find = importlib.util.find_spec
    own = find(wheel.NAME)

    def without(name: str, package: str | None = None) -> ModuleSpec | None:
        spec = find(name, package)
        return None if spec and own and spec.origin == own.origin else spec

    monkeypatch.setattr(importlib.util, "find_spec", without)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with such a GPU and no compiler."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(backend, "_state", backend._State())
    monkeypatch.setenv("ZPP_NVCC", shutil.which("false") or "")
    monkeypatch.setenv("ZPP_CACHE_DIR", str(tmp_path / "cache"))


def made(folder: Path, facts: wheel.Facts = FACTS) -> Path:
    library = folder / "compiled.so"
    library.write_bytes(b"no library " * 1000)
    return wheel.write(library, facts, folder / "dist")


def install(path: Path, site: Path) -> None:
    """As pip does, which takes seconds."""
    with zipfile.ZipFile(path) as archive:
        archive.extractall(site)


@pytest.mark.parametrize(
    ("capability", "archs", "runs"),
    [
        ((8, 0), ("80", "90a", "100"), True),
        ((8, 9), ("80", "90a", "100"), True),
        ((9, 0), ("80", "90a", "100"), True),
        ((10, 3), ("80", "90a", "100"), True),
        ((12, 1), ("80", "90a", "100"), True),  # from PTX
        ((7, 5), ("80", "90a", "100"), False),
        ((9, 0), ("80",), True),  # from PTX
        ((9, 0), ("80", "100"), False),
        ((8, 0), ("86",), False),
        ((10, 0), ("90a",), False),  # for 9.0 alone
        ((10, 3), ("100f",), True),
        ((12, 0), ("100f",), False),
    ],
)
def test_the_gpus_that_its_code_runs_on(capability, archs, runs) -> None:
    assert replace(FACTS, archs=archs).runs_on(capability) is runs


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"digest": "0" * 64}, DIGEST[:12]),
        ({"torch": "2.99"}, f"needs torch 2.99 or newer, not {torch.__version__}"),
        ({"cuda": "14.0"}, "needs a torch for CUDA 14 or newer, not 13.2"),
        ({"cuda": "12.8"}, None),
        ({"archs": ("100",)}, "no code for compute capability 9.0"),
    ],
)
def test_one_that_fits_serves_and_another_says_why_not(
    change, why, h200, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(made(tmp_path, replace(FACTS, **change)), tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    row = doctor.kernels()
    if why is None:
        assert build.serving()[0] == tmp_path / "site" / wheel.NAME / wheel.LIBRARY
        assert row.state == "ok"
        assert f"wheel {wheel.NAME} 0.1.0 (digest {DIGEST[:12]}" in row.found
        with pytest.raises(ValueError):
            kernels.configure("cuda")  # what this one holds is no library
        return
    with pytest.raises(RuntimeError, match=f"{re.escape(why)}.*--version"):
        build.serving()
    assert row.state == "absent"
    assert "does not fit" in row.fix


def test_without_one_that_fits_the_cache_serves_or_is_filled(
    h200, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = tmp_path / "cutlass"
    headers.mkdir()
    for name in ("cutlass.h", "version.h"):
        (headers / name).touch()
    tools = build.Toolchain("nvcc", "release 13.0", tmp_path)
    monkeypatch.setattr(build.Toolchain, "find", lambda: tools)
    assert doctor.kernels().found == "to be built when first used, or by `zpp-lab build`"
    path = build.place(tools, ("90a",))
    path.parent.mkdir(parents=True)
    path.touch()
    install(made(tmp_path, replace(FACTS, digest="0" * 64)), tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    found, what = build.serving()
    assert found == path
    assert "does not fit: " in what
    assert what.endswith(f"; cache {path}")


def test_one_that_is_not_whole_is_named(
    h200, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(made(tmp_path), tmp_path / "site")
    (tmp_path / "site" / wheel.NAME / wheel.FACTS).write_text('{"version": "0.1.0"}')
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(RuntimeError, match=wheel.AGAIN):
        build.serving()


def test_without_a_gpu_doctor_still_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.kernels().found == "no GPU"
    install(made(tmp_path), tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert doctor.kernels().found == f"no GPU for the {FACTS}"


def test_its_files_are_those_of_its_record(tmp_path: Path) -> None:
    path = made(tmp_path)
    assert path.name.startswith(f"{wheel.NAME}-0.1.0-py3-none-linux_")
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    info = f"{wheel.NAME}-0.1.0.dist-info"
    rows = list(csv.reader(content[f"{info}/RECORD"].decode().splitlines()))
    assert sorted(row[0] for row in rows) == sorted(content)
    assert rows[-1] == [f"{info}/RECORD", "", ""]
    for name, digest, size in rows[:-1]:
        found = urlsafe_b64encode(hashlib.sha256(content[name]).digest()).decode().rstrip("=")
        assert (digest, size) == (f"sha256={found}", str(len(content[name])))
    assert f"Tag: {path.stem.split('-', 2)[2]}\n" in content[f"{info}/WHEEL"].decode()
    first = path.read_bytes()
    assert made(tmp_path).read_bytes() == first


def test_pip_installs_it_and_knows_what_it_needs(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    pip += ["--disable-pip-version-check", "--target", str(tmp_path / "site")]
    subprocess.run([*pip, str(made(tmp_path))], check=True, capture_output=True)
    (found,) = distributions(name=wheel.NAME, path=[str(tmp_path / "site")])
    assert found.version == "0.1.0"
    assert found.requires == ["torch>=2.11", "zpp_lab==0.1.0"]
    assert (tmp_path / "site" / wheel.NAME / wheel.LIBRARY).is_file()
