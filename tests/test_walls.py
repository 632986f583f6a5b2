"""Imports run one way, and configs and studies stay free of torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "zpp_lab"

# From left to right: a file imports from its own layer and from those before it.
LAYERS: list[set[str]] = [
    {"codec_config", "folders"},
    {"lora_config", "data_config", "study_config", "config_load"},
    {"model_config"},
    {
        "config",
        "paths",
        "files",
        "parser",
        "cause",
        "locks",
        "numerics",
        "text",
        "hydra_words",
        "philox",
        "piece",
        "garbage",
    },
    {"moments"},
    {"hub"},
    {"factors", "checkpoint", "emulate"},
    {"compose", "place", "runconfig", "machine", "activations", "codecs"},
    {"inputs"},
    {"models"},
    {"data"},
    {"layout"},
    {"ops"},
    {"optimizers"},
    {"optim", "divergence"},
    {"collectives", "pulse"},
    {"frozen"},
    {"engines"},
    {"buffers"},
    {"tracking", "heldout", "memory", "footprint", "commits"},
    {"resume", "rundata"},
    {"api", "export", "cost"},
    {"preflight"},
    {"trainer"},
    {"host_memory"},
    {"launcher", "evaluate", "sequences"},
    {"bench", "doctor"},
    {"study"},
    {"multirun", "dashboard", "planner", "predicted"},
    {"search"},
    {"commands"},
    {"cli"},
]
TORCH_FREE = [
    "config",
    "factors",
    "hydra_words",
    "paths",
    "compose",
    "runconfig",
    "locks",
    "emulate",
    "cost.machine",
    "study",
    "cli",
]


def layer(module: str) -> int:
    for i, names in enumerate(LAYERS):
        if module in names:
            return i
    raise AssertionError(f"zpp_lab/{module} has no layer: add it to LAYERS")


def files() -> list[Path]:
    return sorted(
        p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py" or p.parent != PACKAGE
    )


def imported(path: Path) -> set[str]:
    """First-level zpp_lab modules that a file imports when it is loaded or called."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module == "zpp_lab":
                names = [f"zpp_lab.{a.name}" for a in node.names]
            else:
                names = [node.module]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("zpp_lab.")}
    return found - {"__version__"}


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for other in imported(path):
        if other != own:
            assert layer(other) < layer(own), f"{own} must not import {other}"


@pytest.mark.parametrize("module", TORCH_FREE)
def test_free_of_torch(module: str) -> None:
    code = f"import sys, zpp_lab.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_file_is_too_long() -> None:
    root = PACKAGE.parent
    for path in [
        *PACKAGE.rglob("*.py"),
        *(root / "tests").rglob("*.py"),
        *(root / "cuda").rglob("*.cu*"),
    ]:
        assert path.read_text().count("\n") <= 500, f"{path.name} has more than 500 lines"
