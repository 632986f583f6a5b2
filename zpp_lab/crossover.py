"""From which size on a kernel that reads its peers' rows costs the model less than copies do.

A figure of a machine's file (`intra.pull` in conf/machine), as `zpp-lab bench calibrate` measured
it there. It holds for one kind of GPU and one number of ranks; nothing is guessed beyond.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as checked

from zpp_lab.codec_config import need
from zpp_lab.config_load import load
from zpp_lab.paths import conf_dir


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class Crossover:
    """Among `ranks` ranks of a node: bytes that a rank receives of the others, from which on the
    kernel costs less. None: copies cost less at every size measured."""

    ranks: int
    gather: float | None = None
    exchange: float | None = None

    def __post_init__(self) -> None:
        need(self.ranks >= 2, f"intra.pull: ranks={self.ranks}: use 2 or more")
        for name in ("gather", "exchange"):
            found = getattr(self, name)
            need(found is None or found >= 0, f"intra.pull.{name}={found}: use 0 or more bytes")


def measured_here(gpu: str, folder: Path | None = None) -> dict[int, Crossover]:
    """What the files in `folder` (conf/machine) say of this GPU, by number of ranks. The first
    file by name counts where several do; none does for a GPU that nobody measured.

    ValueError for a file whose figures are wrong.
    """
    found: dict[int, Crossover] = {}
    for path in sorted((folder or conf_dir() / "machine").glob("*.json")):
        try:
            told = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is no file of `bench calibrate` ({error})") from None
        if not gpu or told.get("gpu") != gpu:
            continue
        for entry in told["intra"].get("pull", ()):
            try:
                one = load(Crossover, entry)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
            found.setdefault(one.ranks, one)
    return found
