"""Where nvcc is present every kernel compiles for sm_90a, GPU or not.

Most of a compiler's time goes into optimizing, so by default it hardly does: files with kernels
of every kind become objects, the others PTX, in which every template is instantiated.
"""

from __future__ import annotations

import re
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

from zpp_lab.codecs.kernels import build, wheel
from zpp_lab.files import cuda_dir

WHOLE = {"adamw", "encode", "ship"}  # all of our inline assembly, and TMA
PARTLY = {"decode", "errors", "memory", "reduce", "reencode", "squares"}
SLOW = PARTLY - {"decode", "squares"}


def tools() -> build.Toolchain:
    try:
        return build.Toolchain.find()
    except RuntimeError as error:
        pytest.skip(str(error))


def hasty(found: build.Toolchain) -> list[str]:
    """The build's flags, but for the least optimizing that this nvcc offers."""
    text = subprocess.run([found.nvcc, "--help"], capture_output=True, text=True, check=True)
    kept = [f for f in build.KERNEL_FLAGS if f != "-O3"]
    return [*kept, "--Ofast-compile=max"] if "--Ofast-compile" in text.stdout else kept


def source_of(name: str) -> Path:
    (found,) = cuda_dir().rglob(f"{name}.cu")
    return found


def test_no_kernel_is_forgotten() -> None:
    assert sorted(s.stem for s in cuda_dir().rglob("*.cu")) == sorted(WHOLE | PARTLY)


@pytest.mark.parametrize("name", ["adamw", "ship", pytest.param("encode", marks=pytest.mark.slow)])
def test_it_compiles_for_sm_90a(name: str, tmp_path: Path) -> None:
    found, target = tools(), tmp_path / f"{name}.o"
    flags = [*hasty(found), *build.arch_flags(("90a",))]
    build._compile(found, flags, source_of(name), target)
    assert target.stat().st_size > 8_000


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in sorted(PARTLY)]
)
def test_it_becomes_ptx_for_sm_90a(name: str, tmp_path: Path) -> None:
    found, target = tools(), tmp_path / f"{name}.ptx"
    command = [found.nvcc, "-std=c++17", *hasty(found), "-arch=compute_90a", "-ptx"]
    includes = ["-I", str(cuda_dir()), "-I", str(found.cutlass)]
    build._run([*command, *includes, str(source_of(name)), "-o", str(target)])
    text = target.read_text()
    assert ".entry" in text


@pytest.mark.slow
@pytest.mark.timeout(3600)  # eight minutes of two busy cores
def test_every_kernel_compiles_as_it_is_built(tmp_path: Path) -> None:
    objects = build.compile_kernels(tools(), ("90a",), tmp_path, jobs=2)
    assert {o.stem for o in objects} == WHOLE | PARTLY
    assert all(o.stat().st_size > 8_000 for o in objects)


@pytest.mark.parametrize(
    "names",
    [["codec"], pytest.param(["adamw", "codec", "ship", "squares"], marks=pytest.mark.slow)],
    ids=len,
)
def test_the_bindings_compile_against_this_torch(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (Path(torch.__file__).parent / "include" / "torch" / "csrc" / "stable").is_dir():
        pytest.skip("this torch has no stable headers")
    sources = build._files("*.cpp")
    assert [s.stem for s in sources] == ["adamw", "codec", "ship", "squares"]
    monkeypatch.setattr(build, "_files", lambda _: [s for s in sources if s.stem in names])
    objects = build.compile_bindings(tools(), tmp_path)
    assert [o.stem for o in objects] == [f"{name}_cpp" for name in names]
    assert all(o.stat().st_size > 10_000 for o in objects)


def test_a_wheel_asks_for_torch_by_name_and_for_no_folder_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def little(found: build.Toolchain, out: Path) -> list[Path]:
        (out / "little.cpp").write_text("int little() { return 1; }")
        build._compile(found, [], out / "little.cpp", out / "little.o")
        return [out / "little.o"]

    tools()
    monkeypatch.setattr(build, "compile_bindings", little)
    monkeypatch.setattr(build, "compile_kernels", lambda *_: [])
    monkeypatch.setenv("ZPP_CACHE_DIR", str(tmp_path / "cache"))
    assert build.main(["--wheel", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        library = archive.extract(f"{wheel.NAME}/{wheel.LIBRARY}", tmp_path)
    read = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    assert {"libtorch_cpu.so", "libtorch_cuda.so"} <= set(re.findall(r"\[(\S+)\]", read.stdout))
    assert "PATH" not in read.stdout


def test_the_key_changes_with_the_architecture() -> None:
    found = tools()
    assert build._key(found, ("90a",)) != build._key(found, ("80",))


def test_flags_name_each_architecture_and_keep_ptx_for_newer_ones() -> None:
    flags = build.arch_flags(("80", "90a", "100"))
    assert flags[-1] == "-gencode=arch=compute_100,code=compute_100"
    assert "-gencode=arch=compute_90a,code=sm_90a" in flags


def test_headers_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZPP_CUTLASS_INCLUDE", "/nowhere")
    with pytest.raises(RuntimeError, match="ZPP_CUTLASS_INCLUDE"):
        build._cutlass_include()
