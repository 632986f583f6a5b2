"""Whose a checkpoint is: digests of its run's settings and of the steps that led to it.

The index holds both. A resumed run compares them with its own settings and its own metrics.jsonl,
so the state of another run, copied among its checkpoints, is named and passed over. A checkpoint
without them, which an older version or a plain loop wrote, is taken unchecked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from zpp_lab.config.flat import EVERY_WIRE, RULED, flat_config, flatten, is_free, with_wires
from zpp_lab.config.schema import Config
from zpp_lab.files import CONFIG, METRICS, read_yaml
from zpp_lab.runs.metrics import Record, read, to_json

# Where a run's files lie may change between two starts; data.json holds the hash of their tokens.
_PLACES = ("data.path", "data.cache_dir", "data.tokenizer_path")
_STEP = ("step", "loss", "grad_norm")  # of a record: what any start of the run repeats to the bit


@dataclass(frozen=True)
class Origin:
    """SHA-256 of a run's settings, and of its steps up to the checkpoint."""

    settings: str
    history: str


class History:
    """A digest of a run's steps, renewed step by step."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, record: Record) -> None:
        self._hash.update(to_json([record.get(key) for key in _STEP]).encode() + b"\n")

    def digest(self) -> str:
        return self._hash.hexdigest()


def settings_digest(config: Config | Mapping[str, Any]) -> str:
    """Return the digest of the settings that decide a run's numbers and differ from their defaults:
    a setting that a later version adds changes nothing. A rule for every wire counts as one for
    those that there were when digests were first written."""
    usual = flatten(asdict(Config()))
    own = {
        key: with_wires(value, [None], EVERY_WIRE) if key in RULED else value
        for key, value in flat_config(config).items()
        if not is_free(key) and key not in _PLACES and value != usual.get(key)
    }
    return hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).hexdigest()


def history_digest(records: Iterable[Record], step: int) -> str | None:
    """Return the digest of the first `step` steps; None where there are fewer."""
    history, last = History(), 0
    for record in takewhile(lambda r: r["step"] <= step, records):
        history.add(record)
        last = record["step"]
    return history.digest() if last == step else None


def foreign(origin: Origin | None, step: int, run: Path, config: Config | None = None) -> str:
    """Return why a checkpoint of `step` steps is not of the run in the folder `run`; "" where it
    is, or where nothing tells. config: the run's settings; None: those in its config.yaml."""
    if origin is None:
        return ""
    file = run / CONFIG
    own = config or (read_yaml(file) if file.is_file() else None)
    if own is not None and settings_digest(own) != origin.settings:
        return f"its settings are not those of {run}"
    try:
        there = history_digest(read(run / METRICS), step)
    except ValueError:  # a damaged file: a resume says so, and others do not need it
        there = None
    if there is not None and there != origin.history:
        return f"its losses are not the first {step} of {run / METRICS}"
    return ""
