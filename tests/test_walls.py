"""The rooms of the package, which of them a room may import, and how large they may grow."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from zpp_lab.config.wires import WIRES

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
STUDY = (  # of study/, in order: each may import what stands before it
    *("judge", "words", "speed", "judge.answer", "judge.certainty", "run", "report"),
    *("wandb_pages", "frames", "__init__"),
)
TORCH_FREE = ("files", "config", "study", "cli")
SOURCES = sorted(PACKAGE.rglob("*.py"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """The nodes of a file's tree; five tests read all files."""
    return list(ast.walk(ast.parse(path.read_text())))


def imported(path: Path) -> set[str]:
    """What of the package a file imports when it is loaded or called, names in modules too."""
    nodes = nodes_of(path)
    parts = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
    found = {n.module for n in parts} | {f"{n.module}.{a.name}" for n in parts for a in n.names}
    found |= {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    return {name for name in found if name.startswith("zpp_lab.")}


def drawn() -> dict[str, set[str]]:
    """Module → modules that it imports, at the top or in a function; of a package that is named
    for a module in it the module alone."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES}
    names = {path: name.removesuffix(".__init__") for path, name in names.items()}
    modules, found = {*names.values()}, {}
    for path, name in names.items():
        nodes = nodes_of(path)
        parts = [
            (n.module, a.name) for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names
        ]
        whole = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
        split = {f"{m}.{part}" if f"{m}.{part}" in modules else str(m) for m, part in parts}
        found[name] = (whole | split) & modules - {name}
    return found


def circles(imports: Mapping[str, set[str]]) -> set[str]:
    """Modules that import each other, and those between them: what is left when modules that import
    no other, and those that none imports, are taken away until there are none."""
    left = {name: set(theirs) for name, theirs in imports.items()}
    while True:
        wanted = set().union(*left.values())
        ends = {name for name, theirs in left.items() if not theirs or name not in wanted}
        if not ends:
            return {*left}
        left = {name: theirs - ends for name, theirs in left.items() if name not in ends}


def test_no_module_imports_itself_through_others() -> None:
    assert circles(drawn()) == set()
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == {"b", "c"}


def test_a_study_is_run_and_judged_before_it_is_shown() -> None:
    def place(module: str) -> int:
        own = module.removeprefix("zpp_lab.study").removeprefix(".") or "__init__"
        fits = [name for name in STUDY if f"{own}.".startswith(f"{name}.")]
        assert fits, f"{module} has no place in STUDY"
        return STUDY.index(max(fits, key=len))

    inside = {m: theirs for m, theirs in drawn().items() if m.startswith("zpp_lab.study")}
    wrong = [
        (m, t) for m, every in inside.items() for t in every & {*inside} if place(t) > place(m)
    ]
    assert wrong == []


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


def test_the_table_alone_names_wires() -> None:
    """Beside it the recipe, which has a setting for each, and checks of two in particular."""
    found = set()
    for path in SOURCES:
        nodes = nodes_of(path)
        texts = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
        constants = [n for n in nodes if isinstance(n, ast.Constant)]
        said = " ".join(str(n.value) for n in constants if id(n) not in texts)
        if any(wire in said for wire in WIRES):
            found.add(path.relative_to(PACKAGE).as_posix())
    assert found == {"config/wires.py", "config/recipe.py", "collectives/recipe.py"}


def test_sizes() -> None:
    """A reader stays in one place and finds it."""
    folders = Counter(p.parent for p in SOURCES)
    folders += Counter(d.parent for d in {p.parent for p in SOURCES} if d != PACKAGE)
    assert {f for f, n in folders.items() if n > 20 and f != PACKAGE} == set()
    for path in [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "cuda").rglob("*.cu*")]:
        assert path.read_text().count("\n") <= 600, path


def test_no_test_is_skipped_for_a_missing_package() -> None:
    """The extra `dev` has what tests import: a skip would look like a pass."""
    skip = "import" + "orskip"
    assert [p for p in (ROOT / "tests").rglob("*.py") if skip in p.read_text()] == []
