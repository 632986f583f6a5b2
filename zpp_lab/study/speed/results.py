"""Measured speeds as reports read them: a table of arms, links between nodes and tokens/s.

`zpp-lab bench step` writes such a table, its results.csv. One from elsewhere needs the columns
NEEDED; each other column of results.csv is read where it is there. Speeds never come from a
study's own runs: the engine that simulates a cluster says nothing about time.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zpp_lab.config.flat import flat_config
from zpp_lab.config.load import load
from zpp_lab.config.schema import Config, RecipeConfig
from zpp_lab.files import read_text, write_atomic

FILE = "results.csv"
NEEDED = ("arm", "nodes", "gpus_per_node", "link_gbps", "tokens_per_s")
BASE = (
    "fsdp2"  # FSDP2 with nothing of this package: as an engine all its ways, as an arm its defaults
)
HSDP = "hsdp"
COMPUTE = "compute", "compute+graph"  # no arms, but the floors of all
MAX = "max"
_SECONDS = ("step_s", "step_min_s", "step_max_s", "floor_s", "waiting_s")
_KNOWN = (*_SECONDS, "share_of_floor", "peak_gib")


@dataclass(frozen=True, order=True)
class Setting:
    """What was trained on which cluster; only speeds of one setting are compared.

    ranks_per_gpu: above 1 the nodes shared the host's GPUs, so that computing took as many times
    longer than on a GPU a rank.
    """

    model: str
    nodes: int
    gpus_per_node: int
    seq_len: int
    batch_size: int
    tokens_per_step: int
    ranks_per_gpu: int = 1

    @property
    def text(self) -> str:
        """Model and shape; see `labels`."""
        shape = f"{self.nodes} × {self.gpus_per_node}"
        if self.ranks_per_gpu > 1:
            shape += f", {self.ranks_per_gpu} ranks a GPU"
        return f"{self.model}, {shape}" if self.model else shape


@dataclass(frozen=True)
class Measured:
    """One arm at one speed of the links. Seconds are those of a step; None: not known.

    link: the named speed in Gb/s, or max (no limit). waiting_s: what the host waited for the
    device; near 0 the host was the bound. config: the arm's whole config. twin: the name of its raw
    twin; "" where it has no codec, or was timed without a twin. call: when its call began; "" in
    tables from before twins, whose rows count as one call.
    """

    setting: Setting
    arm: str
    engine: str
    recipe: str
    link: str
    tokens_per_s: float
    step_s: float | None
    step_min_s: float | None
    step_max_s: float | None
    floor_s: float | None
    share_of_floor: float | None
    peak_gib: float | None
    waiting_s: float | None
    measured_gbps: float | None
    machine: str
    config: Mapping[str, Any] | None
    commit: str = ""
    twin: str = ""
    call: str = ""

    @property
    def cell(self) -> tuple[Setting, str, str]:
        """Setting, link and call: only arms of one cell are compared."""
        return self.setting, self.link, self.call

    @property
    def recipe_config(self) -> RecipeConfig | None:
        """Of an arm of this package whose settings the table says."""
        known = self.engine == "fsdp" and self.config is not None
        return load(RecipeConfig, self.config["recipe"]) if known and self.config else None

    @property
    def plain(self) -> bool:
        """Whether FSDP2 trains so by itself, run by this package or not."""
        recipe = self.recipe_config
        return self.engine == BASE or self.arm == BASE or (recipe is not None and recipe.plain)

    @property
    def coded(self) -> bool:
        """Whether an arm of this package has codecs; False where the table does not say."""
        recipe = self.recipe_config
        return recipe is not None and recipe.coded

    @property
    def split(self) -> str:
        """Tensor parts and stages, such as " tp=2"; "" where there are none, or none is known."""
        own = (self.config or {}).get("cluster", {})
        return "".join(f" {axis}={own[axis]}" for axis in ("tp", "pp") if own.get(axis, 1) > 1)

    @property
    def gbps(self) -> float | None:
        """Its place on an axis of bandwidths: the named speed, else the link's as measured."""
        if self.setting.nodes == 1:
            return None
        return self.measured_gbps if self.link == MAX else float(self.link)

    @property
    def place(self) -> str:
        """The link in words."""
        if self.setting.nodes == 1:
            return "inside a host"
        return "no limit" if self.link == MAX else f"{self.link} Gb/s"


def speed_file(path: Path) -> Path:
    """Return `path`, or the results.csv in a folder. ValueError without one."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file}: no such file; `zpp-lab bench step --out FOLDER` makes one")
    return file


def is_speed_table(path: Path) -> bool:
    """Return whether `path` is a table of speeds, or a folder with one."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        return False
    try:
        return set(NEEDED) <= set(next(csv.reader(_lines(file)), []))
    except ValueError:
        if path.is_dir():
            raise
        return False  # any file that somebody named


def read_speeds(path: Path) -> list[Measured]:
    """Read all measurements in the file's order. ValueError names line and column."""
    file = speed_file(path)
    rows = read_table(file)
    graphs = replaying(rows)
    measured = [
        _measured(row, f"{file}, line {n}", row.get("call") in graphs)
        for n, row in enumerate(rows, 2)
    ]
    found = [m for m in measured if m.arm not in COMPUTE]
    if not found:
        raise ValueError(f"{file}: no arm was measured; see `zpp-lab bench step --help`")
    return _name_layouts(found)


def _name_layouts(found: Sequence[Measured]) -> list[Measured]:
    """Name tensor parts and stages where arms of one name and setting have different ones."""
    split: dict[tuple[Setting, str], set[str]] = {}
    for m in found:
        split.setdefault((m.setting, m.arm), set()).add(m.split)

    def named(m: Measured, arm: str) -> str:
        return f"{arm}{m.split}" if len(split.get((m.setting, arm), ())) > 1 else arm

    return [replace(m, arm=named(m, m.arm), twin=named(m, m.twin)) for m in found]


def read_table(file: Path) -> list[dict[str, str]]:
    """Return the rows as text. Where `config` is empty it is taken from the bench's JSON file of
    the shape (2x2.json), if that lies next to the table."""
    reader = csv.DictReader(_lines(file))
    absent = [name for name in NEEDED if name not in (reader.fieldnames or [])]
    if absent:
        raise ValueError(
            f"{file}: no column {', '.join(absent)}; a table of speeds has {', '.join(NEEDED)}"
        )
    rows = list(reader)
    for row in rows:
        if not row.get("config"):
            row["config"] = _config_beside(file, row)
    return rows


def replaying(rows: Sequence[Mapping[str, str | None]]) -> set[str | None]:
    """Return the calls whose arms may have replayed CUDA graphs: those with a plain arm or a floor
    that does. Steps of others were eager, whatever engine.graph=auto means today."""
    return {row.get("call") for row in rows if (row["arm"] or "").endswith("+graph")}


def _lines(file: Path) -> io.StringIO:
    """The table's text. ValueError that names a file that is no text."""
    text = read_text(file, "name a table of speeds, or measure again with `zpp-lab bench step`")
    if "\0" in text:
        raise ValueError(f"{file}: zero bytes, so it is no table; name a table of speeds")
    return io.StringIO(text, newline="")


def copy_table(source: Path, target: Path) -> None:
    """Write the table of `source` with every config that is known, so that it stands alone."""
    rows = read_table(speed_file(source))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else NEEDED, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(target, text.getvalue())


def _config_beside(file: Path, row: Mapping[str, str]) -> str:
    path = file.with_name(f"{row['nodes']}x{row['gpus_per_node']}.json")
    if not path.is_file():
        return ""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))["config"].get(row["arm"])
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path}: not what `zpp-lab bench step` writes: {error}") from None
    known = config is not None and config["model"]["preset"] == row.get("model")
    return json.dumps(config) if known else ""  # another call may have replaced that file


def _measured(row: Mapping[str, str | None], place: str, graphs: bool) -> Measured:
    config = _config(row.get("config") or "", place)
    if config is not None and not graphs:
        config["engine"]["graph"] = False
    setting = Setting(
        row.get("model") or "",
        _whole(row, "nodes", place),
        _whole(row, "gpus_per_node", place),
        _count(row, "seq_len", place),
        _count(row, "batch_size", place),
        _count(row, "tokens_per_step", place),
        _count(row, "ranks_per_gpu", place, absent=1),
    )
    link = row["link_gbps"] or ""
    if link != MAX:
        link = f"{_number(row, 'link_gbps', place):g}"
    known = {name: _number(row, name, place) if row.get(name) else None for name in _KNOWN}
    gbps = _number(row, "measured_gbps", place) if row.get("measured_gbps") else None
    return Measured(
        setting,
        row["arm"] or "",
        row.get("engine") or "",
        row.get("recipe") or "",
        link,
        _number(row, "tokens_per_s", place),
        **known,
        measured_gbps=gbps,
        machine=row.get("machine") or "",
        config=config,
        commit=row.get("commit") or "",
        twin=row.get("twin") or "",
        call=row.get("call") or "",
    )


def _number(row: Mapping[str, str | None], name: str, place: str) -> float:
    try:
        value = float(row[name] or "")
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{place}: {name}={row[name]!r}: use a number above 0")
    return value


def _whole(row: Mapping[str, str | None], name: str, place: str) -> int:
    value = _number(row, name, place)
    if value != int(value):
        raise ValueError(f"{place}: {name}={row[name]!r}: use a whole number")
    return int(value)


def _count(row: Mapping[str, str | None], name: str, place: str, absent: int = 0) -> int:
    """A column that older tables lack, or that is empty."""
    return _whole(row, name, place) if row.get(name) else absent


def _config(text: str, place: str) -> dict[str, Any] | None:
    """The whole config of what is not its default, flat or nested."""
    if not text:
        return None
    try:
        flat = flat_config(json.loads(text))
        return asdict(load(Config, unflatten(flat)))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place}: config: {error}") from None


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"a.b": 1} → {"a": {"b": 1}}; a name that is a group as well gives way to it."""
    nested: dict[str, Any] = {}
    for name in sorted(flat):  # a group's own name comes before the names in it
        *groups, last = name.split(".")
        place = nested
        for group in groups:
            if not isinstance(place.get(group), dict):
                place[group] = {}
            place = place[group]
        place[last] = flat[name]
    return nested


def labels(measured: Sequence[Measured]) -> dict[Setting, str]:
    """Name each setting by model and shape, with its batch where these are shared."""
    found = settings(measured)
    texts = [setting.text for setting in found]
    return {
        s: s.text
        if texts.count(s.text) == 1
        else f"{s.text}, {s.batch_size} × {s.seq_len} of {s.tokens_per_step} tokens"
        for s in found
    }


def settings(measured: Sequence[Measured]) -> list[Setting]:
    """Return the settings in the table's order."""
    return list(dict.fromkeys(m.setting for m in measured))


@dataclass(frozen=True)
class Predicted:
    """What the cost model says of an arm; gbps: None where all GPUs are of one host."""

    setting: Setting
    arm: str
    gbps: float | None
    tokens_per_s: float


# Predictions for what was measured, and why others have none: `tools.plan.cost.show.predictions` of
# a machine. It is handed in, as a prediction needs torch and a report does not.
Predict = Callable[[Sequence[Measured]], tuple[list[Predicted], list[str]]]
