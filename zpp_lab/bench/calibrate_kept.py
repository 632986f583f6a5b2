"""What a calibration has measured so far, beside the machine file that it is to become.

`machine.json.part` is written whole after each part. It is no machine file and has no name of one,
so nothing takes half a machine for a whole; it goes when machine.json is there. The same command
on the same machine goes on from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from zpp_lab.cost.machine import PART
from zpp_lab.files import write_atomic
from zpp_lab.machine import commit, cpu_model

Place = Mapping[str, Any]


def place_of(sizes: Any, device: torch.device) -> Place:
    """What figures must have in common to stand in one file, as JSON gives it back. Every rank
    calls it. sizes: a dataclass of how much is measured."""
    own = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, f"{own}, {cpu_model()}")
    facts = {"ranks": ranks, "torch": torch.__version__, "commit": commit(), "sizes": asdict(sizes)}
    made: Place = json.loads(json.dumps(facts, default=str))
    return made


class Kept:
    """Parts by name, as rank 0 measured them. Every rank makes one and asks it alike."""

    def __init__(self, out: Path, place: Place) -> None:
        self.path = out.with_name(out.name + PART)
        self.place = place
        self.writes = dist.get_rank() == 0
        same: list[Any] = [self._read() if self.writes else None]
        dist.broadcast_object_list(same, 0)
        self.calls, self.parts = same[0]  # how many calls had a share, this one included

    def part(self, name: str, kind: Any, measure: Callable[[], Any]) -> Any:
        """The value of type `kind` under this name, measured where no earlier call has."""
        adapter = TypeAdapter(kind)
        if name in self.parts:
            try:
                return adapter.validate_python(self.parts[name])
            except ValidationError:
                self._say(f"{self.path}: {name} cannot be read, so it is measured again")
        self._say(name)
        value = measure()
        dist.barrier()
        self.parts[name] = adapter.dump_python(value, mode="json")
        self._write()
        return value

    def done(self) -> None:
        """The machine file is there: no parts are needed any more."""
        if self.writes:
            self.path.unlink(missing_ok=True)

    def _read(self) -> tuple[int, dict[str, Any]]:
        """(which call this is, parts of those before); says what becomes of a file that is there"""
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            place, calls, parts = stored["place"], int(stored["calls"]), dict(stored["parts"])
        except FileNotFoundError:
            self._say(f"parts are kept in {self.path}; after a break the same command goes on")
            return 1, {}
        except (ValueError, KeyError, TypeError) as error:
            self._say(f"{self.path} is damaged ({error!r}): all is measured anew")
            return 1, {}
        if place != self.place:
            self._say(f"{self.path}: {_difference(place, self.place)}: all is measured anew")
            return 1, {}
        self._say(f"goes on from {self.path}, which has: {'; '.join(parts)}")
        return calls + 1, parts

    def _write(self) -> None:
        if not self.writes:
            return
        stored = {"place": self.place, "calls": self.calls, "parts": self.parts}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, json.dumps(stored, indent=1) + "\n")

    def _say(self, text: str) -> None:
        if self.writes:
            print(f"calibrate: {text}", flush=True)


def _difference(there: Any, here: Place) -> str:
    """The first fact that is another one."""
    there = there if isinstance(there, dict) else {}
    for name, value in here.items():
        if there.get(name) != value:
            return f"{name} was {there.get(name)} and is {value}"
    return "it was measured for something else"
