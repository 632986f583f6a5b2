"""Scripts of experiments/ as modules."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


@cache
def loaded(path: str) -> ModuleType:
    """The script at `path` below the project's root, which finds its neighbours as when it is
    started."""
    file = ROOT / path
    assert file.is_file(), f"there is no {path}"
    spec = importlib.util.spec_from_file_location(f"script_{path.replace('/', '_')[:-3]}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it
    before = sys.path[:]
    sys.path[:0] = [str(file.parent), str(ROOT / "experiments")]
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module
