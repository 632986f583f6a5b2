"""Where conf/ and cuda/ lie: inside an installed wheel, or beside the package in a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _folder(name: str) -> Path:
    for place in (_PACKAGE / name, _PACKAGE.parent / name):
        if place.is_dir():
            return place
    raise FileNotFoundError(f"{name}/ is missing beside and inside {_PACKAGE}: reinstall zpp_lab")


def conf_dir() -> Path:
    return _folder("conf")


def cuda_dir() -> Path:
    return _folder("cuda")
