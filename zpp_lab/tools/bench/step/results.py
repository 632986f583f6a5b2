"""What `zpp-lab bench step` writes: results.csv, which reports read, and all the rest.

results.csv keeps the rows of earlier calls into the same folder; a cell that is measured again is
replaced. Its last columns say what was measured: reports find a study's arms by `config`.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from zpp_lab.config.flat import flat_config
from zpp_lab.config.schema import Config
from zpp_lab.config.wires import WIRES
from zpp_lab.files import write_atomic

KEY = ("arm", "model", "nodes", "gpus_per_node", "link_gbps", "ranks_per_gpu", "tp", "pp")
# From these columns on, older files have none; what they mean by that. Without `twin` an arm was
# timed without its raw twin.
OLDER = ("machine", "ranks_per_gpu", "waiting_s", "twin", "tp")
LATER = {"machine": "", "config": "", "ranks_per_gpu": "1", "waiting_s": "", "twin": "", "call": ""}
GIB = 2**30


@dataclass
class Cell:
    """One arm at one speed of the links.

    seconds: of each timed step, the slowest rank's. waiting: those of them in which the host waited
    for the device, of the rank that waited least; none where an engine does not tell. wires: bytes
    of one step that all ranks sent, by wire [inside nodes, between nodes], as the ledger counted
    them. sent: bytes that left a node's interface in a step, headers included, the busiest node's.
    resent: packets that TCP sent again in a step, all nodes'. replayed: whether all steps came from
    a CUDA graph, on all ranks.
    """

    seconds: list[float] = field(default_factory=list)
    wires: dict[str, list[int]] | None = None
    sent: list[float] = field(default_factory=list)
    resent: list[float] = field(default_factory=list)
    peak: int | None = None
    waiting: list[float] = field(default_factory=list)
    replayed: bool = True


@dataclass(frozen=True)
class Row:
    """A line of results.csv; None is an empty field.

    link_s is the bytes that a node sends between nodes at the link's speed: the ledger's, or,
    where nothing of ours counts them, those of the interface. compute_s is a step without any
    communication. floor_s is the larger one: with all overlapped no step can be shorter.
    share_of_floor is floor_s / step_s. step_s is the median; gb_* are 10^9 bytes a step. waiting_s
    is the median of what the host waited for the device in a step: near 0 the host was the bound.
    twin names the arm's raw twin, timed by turns with it; "" for arms without a codec, or without a
    twin. call is when the call began (UTC): only rows of one call are compared.
    """

    engine: str
    recipe: str
    model: str
    nodes: int
    gpus_per_node: int
    link_gbps: str  # the named speed, or max
    tokens_per_s: float
    floor_s: float | None
    step_s: float
    peak_gib: float | None
    arm: str
    share_of_floor: float | None
    link_s: float | None
    compute_s: float | None
    step_min_s: float
    step_max_s: float
    steps: int
    gb_sent_ledger: float | None  # of one node, to other nodes
    gb_sent_measured: float | None  # through its interface
    measured_gbps: float | None  # of the link, both ways at once
    latency_us: float | None
    tokens_per_step: int
    seq_len: int
    batch_size: int
    wire_bytes: str  # wire: inside nodes + between nodes, all ranks
    commit: str
    machine: str
    config: str  # `config_text`
    ranks_per_gpu: int  # above 1 the nodes shared GPUs; 1 on the CPU too
    waiting_s: float | None
    twin: str
    call: str
    tp: int
    pp: int


def config_text(config: Config) -> str:
    """Return the settings that are not the defaults of `Config`, by dotted name, as JSON on one
    line.

    Where a run lies and who watches it is left out: it takes no time in a step.
    """
    standard = flat_config(Config())
    own = {
        name: value
        for name, value in flat_config(config).items()
        if value != standard.get(name) and not name.startswith(("run.", "tracking."))
    }
    return json.dumps(own, sort_keys=True, ensure_ascii=False)


def seconds_on_link(cell: Cell, nodes: int, gbps: float | None) -> float | None:
    """Return what the link needs for the bytes of a step; None where it is not limited."""
    each = bytes_sent(cell, nodes)
    return None if gbps is None or each is None else each * 8e-9 / gbps


def bytes_sent(cell: Cell, nodes: int) -> float | None:
    """Return bytes that a node sends to others in a step: the ledger's, else the interface's."""
    ledger = ledger_bytes(cell, nodes)
    if ledger is not None:
        return ledger
    return statistics.median(cell.sent) if cell.sent else None


def ledger_bytes(cell: Cell, nodes: int) -> float | None:
    if cell.wires is None or nodes == 1:
        return None
    return sum(inter for _, inter in cell.wires.values()) / nodes


def floor(link: float | None, compute: float | None) -> float | None:
    known = [seconds for seconds in (link, compute) if seconds is not None]
    return max(known) if compute is not None and known else None


def wires_text(wires: dict[str, list[int]] | None) -> str:
    if wires is None:
        return ""
    return " ".join(f"{wire}:{wires[wire][0]}+{wires[wire][1]}" for wire in WIRES if wire in wires)


def write_rows(folder: Path, rows: Sequence[Row]) -> None:
    """Put the rows into results.csv, next to those of other cells."""
    put_rows(folder, [{name: _text(value) for name, value in asdict(row).items()} for row in rows])


def put_rows(folder: Path, new: Sequence[dict[str, str]]) -> None:
    """Do the same for rows as `read_rows` gives them."""
    path = folder / "results.csv"
    keys = {_key(row) for row in new}
    every = [*(row for row in read_rows(path) if _key(row) not in keys), *new]
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(every)
    write_atomic(path, text.getvalue())


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=1) + "\n")


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read a file with today's columns, or an older file's. ValueError for others."""
    if not path.is_file():
        return []
    names = [f.name for f in fields(Row)]
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        known = list(reader.fieldnames or [])
        if known not in [names, *(names[: names.index(first)] for first in OLDER)]:
            raise ValueError(f"{path} has other columns: use another --out, or move it away")
        return [_completed(LATER | row) for row in reader]


def _completed(row: dict[str, str]) -> dict[str, str]:
    """The row with parts and stages, of which an older file's config tells."""
    config = json.loads(row["config"] or "{}")
    return {axis: str(config.get(f"cluster.{axis}", 1)) for axis in ("tp", "pp")} | row


def _key(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in KEY)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
