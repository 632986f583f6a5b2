"""The rooms of the package, which of them a room may import, and how large they may grow."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "zpp_lab"
ROOMS = {  # room or loose file: what it may import
    "files": "",
    "config": "files",
    "data": "files config",
    "codecs": "files config",
    "runs": "files config codecs",
    "models": "files config data codecs runs",
    "collectives": "files config codecs runs",
    "engines": "files config data codecs runs models collectives",
    "train": "files config data codecs runs models collectives engines",
    "api": "files config data codecs runs models collectives engines train",
    "study": "files config runs train",
    "tools": "files config data codecs runs models collectives engines train api study",
    "cli": "files config data codecs runs engines train study tools",
}
TORCH_FREE = ("files", "config", "study", "cli")
SOURCES = sorted(PACKAGE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """What of the package a file imports when it is loaded or called, names in modules too."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    parts = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
    found = {n.module for n in parts} | {f"{n.module}.{a.name}" for n in parts for a in n.names}
    found |= {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    return {name for name in found if name.startswith("zpp_lab.")}


@pytest.mark.parametrize("room", ROOMS)
def test_imports_run_one_way(room: str) -> None:
    for path in [p for p in SOURCES if p.relative_to(PACKAGE).parts[0] in (room, f"{room}.py")]:
        wrong = {name.split(".")[1] for name in imported(path)} - {room, *ROOMS[room].split()}
        assert not wrong, f"{path.relative_to(PACKAGE)} must not import {wrong}"


def test_no_torch_in_configs_and_studies() -> None:
    names = [p.relative_to(ROOT).with_suffix("") for p in SOURCES if p.stem != "__main__"]
    free = [".".join(n.parts) for n in names if n.parts[1] in TORCH_FREE and n.stem != "__init__"]
    code = f"import sys, importlib; [importlib.import_module(m) for m in {free}]"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_eleven_rooms_and_three_loose_files_of_which_the_command_line_alone_has_tools() -> None:
    assert [room for room, may in ROOMS.items() if "tools" in may.split()] == ["cli"]
    there = {p.name.removesuffix(".py") for p in PACKAGE.iterdir() if p.suffix in ("", ".py")}
    assert there - {"__pycache__", "conf", "cuda"} == {*ROOMS, "__init__"}


def test_sizes() -> None:
    """A reader stays in one place and finds it; no file is there for one helper."""
    folders = Counter(p.parent for p in SOURCES)
    folders += Counter(d.parent for d in {p.parent for p in SOURCES} if d != PACKAGE)
    assert {f for f, n in folders.items() if n > 12 and f != PACKAGE} == set()
    for path in [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "cuda").rglob("*.cu*")]:
        assert path.read_text().count("\n") <= 600, path
    imports = Counter(name for path in SOURCES for name in imported(path))
    for path in SOURCES:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        assert path.read_text().count("\n") >= 60 or imports[name] != 1, path


def test_no_test_is_skipped_for_a_missing_package() -> None:
    """The extra `dev` has what tests import: a skip would look like a pass."""
    skip = "import" + "orskip"
    assert [p for p in (ROOT / "tests").rglob("*.py") if skip in p.read_text()] == []
