"""Options of every command: a mistake among them is one line that names the fix."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

_BEGINNING = 2**16  # bytes of a file, in which its mark is looked for
_MINUS = re.compile(r"-[\d.]")  # begins a value, no option


class Parser(argparse.ArgumentParser):
    """argparse's parser, raising ValueError; `type=int` and `type=float` take finite numbers."""

    def __init__(self, *args: object, **settings: object) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **settings)  # type: ignore[arg-type]
        self.register("type", int, whole())
        self.register("type", float, number())
        self._negative_number_matcher = _MINUS  # of -5m too: the option says what is wrong with it

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def whole(least: int | None = None) -> Callable[[str], int]:
    """Return the `type` of an option that takes whole numbers, of `least` or more."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: use a whole number") from None
        if least is not None and value < least:
            raise argparse.ArgumentTypeError(f"{text}: use {least} or more")
        return value

    return read


def number(above: float | None = None, least: float | None = None) -> Callable[[str], float]:
    """Return the `type` of an option for finite numbers, more than `above`, `least` or more."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text!r}: use a number")
        if above is not None and value <= above:
            raise argparse.ArgumentTypeError(f"{text}: use more than {above:g}")
        if least is not None and value < least:
            raise argparse.ArgumentTypeError(f"{text}: use {least:g} or more")
        return value

    return read


def listed(
    one: Callable[[str], object], known: Collection[object] = ()
) -> Callable[[str], list[Any]]:
    """Return the `type` of an option of several values by commas, among `known` if given."""

    def read(text: str) -> list[Any]:
        values = [one(word.strip()) for word in text.split(",")]
        wrong = [value for value in values if known and value not in known]
        if wrong:
            there = ", ".join(map(str, known))
            raise argparse.ArgumentTypeError(f"{wrong[0]!r}: valid names: {there}")
        return values

    return read


def check_own(option: str, path: Path, mark: str) -> None:
    """ValueError when `path` exists without `mark` near its beginning: not the command's own."""
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            begins = file.read(_BEGINNING)
        if mark.encode() not in begins:
            raise ValueError(f"{option} {path} exists, and is not this command's; use another name")


def new_file(text: str) -> Path:
    """Parse an option that names a file to write: checked before the work, not after."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file")
    if part := next((p for p in path.parents if p.exists() and not p.is_dir()), None):
        raise argparse.ArgumentTypeError(f"{part} is a file; name a folder")
    return path


def links(text: str) -> list[float | None]:
    """Parse `12,25,max` as Gbit/s of a node; max, without a limit, is None."""
    found: list[float | None] = []
    for word in text.split(","):
        try:
            found.append(None if word.strip() == "max" else float(word))
        except ValueError:
            raise ValueError(f"--link-gbps {text}: use Gbit/s or max, such as 12,25,max") from None
        if found[-1] is not None and not 0 < found[-1] < float("inf"):
            raise ValueError(f"--link-gbps {text}: use more than 0")
    return found


def one_link(text: str) -> float | None:
    """Parse one such speed."""
    first, *more = links(text)
    if more:
        raise ValueError(f"--link-gbps {text}: use one speed, or max")
    return first


def link_name(link: float | None) -> str:
    return "max" if link is None else f"{link:g}"
