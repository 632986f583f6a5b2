"""Reads a .wandb file of an offline run: blocks of framed protocol-buffer records."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER, FRAME = 32768, 7, 7


def payloads(data: bytes) -> Iterator[bytes]:
    """A record is one frame (type 1), or a first (2), middle (3) and last (4) one."""
    position, record = HEADER, b""
    while position + FRAME <= len(data):
        left = BLOCK - position % BLOCK
        if left < FRAME:  # too small for a frame: padding
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + FRAME])
        if kind == 0:
            position += left
            continue
        record += data[position + FRAME : position + FRAME + length]
        position += FRAME + length
        if kind in (1, 4):
            yield record
            record = b""


class OfflineRun:
    """`history` and `system` (flat rows), `summary`, `config`, `metrics` (name or glob →
    definition), the `console`'s text, the `run` record and the exit code."""

    def __init__(self, run_dir: Path) -> None:
        from wandb.proto.wandb_internal_pb2 import Record

        (file,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {}
        self.artifacts: list[Any] = []
        self.system: list[dict[str, Any]] = []
        self.console = ""
        self.exit: int | None = None
        for payload in payloads(file.read_bytes()):
            record = Record()
            record.ParseFromString(payload)
            self._take(record)

    def _take(self, record: Any) -> None:
        kind = record.WhichOneof("record_type")
        if kind == "run":
            self.run = record.run
            self.config = _values(record.run.config.update)
        elif kind == "history":
            self.history.append(_values(record.history.item))
        elif kind == "summary":
            self.summary.update(_values(record.summary.update))
        elif kind == "config":
            self.config.update(_values(record.config.update))
        elif kind == "metric":
            self.metrics[record.metric.name or record.metric.glob_name] = record.metric
        elif kind == "stats":
            self.system.append(_values(record.stats.item))
        elif kind == "output_logger":
            self.console += record.output_logger.line
        elif kind == "artifact":
            self.artifacts.append(record.artifact)
        elif kind == "exit":
            self.exit = record.exit.exit_code


def _values(items: Any) -> dict[str, Any]:
    named = (
        (item.key or "/".join(getattr(item, "nested_key", ())), item.value_json) for item in items
    )
    return {key: json.loads(value) for key, value in named}
