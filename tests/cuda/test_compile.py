"""Where nvcc is present every kernel compiles for sm_90a, GPU or not, and none spills."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zpp_lab.ops import build


def tools() -> build.Toolchain:
    try:
        return build.Toolchain.find()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.timeout(600)
def test_every_kernel_compiles_for_sm_90a(tmp_path: Path) -> None:
    objects = build.compile_kernels(tools(), ("90a",), tmp_path, jobs=2)
    names = {"adamw", "encode", "errors", "decode", "reduce", "reencode", "ship", "squares"}
    assert {o.stem for o in objects} == names
    assert all(o.stat().st_size > 8_000 for o in objects)


def test_the_bindings_compile_against_this_torch(tmp_path: Path) -> None:
    if not (Path(torch.__file__).parent / "include" / "torch" / "csrc" / "stable").is_dir():
        pytest.skip("this torch has no stable headers")
    objects = build.compile_bindings(tools(), tmp_path)
    assert [o.stem for o in objects] == [
        "adamw_bindings_cpp",
        "bindings_cpp",
        "ship_cpp",
        "squares_bindings_cpp",
    ]
    assert all(o.stat().st_size > 10_000 for o in objects)


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
