"""The figures of a machine that a prediction of time needs, as one JSON file.

Every figure is measured: `zpp-lab bench calibrate` writes such a file for the machine it runs on,
and `comment` says where each came from. Nothing has a default; a figure that a recipe needs and
the file lacks is an error, never a guess.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked

from zpp_lab.config.codec import AboveZero, NotNegative, need
from zpp_lab.config.load import load
from zpp_lab.files import conf_dir, parse_json, write_atomic

_STRICT = ConfigDict(extra="forbid")
OPERATORS = ("encode", "decode", "reduce", "decode_sum_encode")
Mode = Literal["eager", "compiled"]
MODES: tuple[Mode, ...] = get_args(Mode)
ByMode = Annotated[Mapping[Mode, NotNegative], Field(min_length=1)]


@checked(frozen=True, config=_STRICT)
class Curve:
    """Seconds by amount (bytes or FLOPs), from measured points.

    Between points it is linear. Beyond the last the last point's rate holds, before the first the
    first one's. A first point of amount 0 is a latency.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        need(bool(self.points), "a curve needs at least one point [amount, seconds]")
        amounts, seconds = [a for a, _ in self.points], [s for _, s in self.points]
        need(
            amounts == sorted(set(amounts)) and amounts[0] >= 0 and amounts[-1] > 0,
            f"amounts {amounts}: use ascending numbers of 0 or more",
        )
        need(
            seconds == sorted(seconds) and seconds[0] >= 0 and seconds[-1] > 0,
            f"seconds {seconds} must not fall: a larger amount never takes less; measure again",
        )

    def slower(self, times: float) -> Curve:
        return Curve(tuple((amount, seconds * times) for amount, seconds in self.points))

    def seconds(self, amount: float) -> float:
        """Return the seconds of an amount; 0 for nothing."""
        if amount <= 0:
            return 0.0
        i = bisect_right(self.points, (amount, float("inf")))
        if i == 0 or i == len(self.points):
            near, own = self.points[min(i, len(self.points) - 1)]
            return own * amount / near
        (a, s), (b, t) = self.points[i - 1], self.points[i]
        return s + (t - s) * (amount - a) / (b - a)


@checked(frozen=True, config=_STRICT)
class Host:
    """Seconds that a rank's host thread needs to start work, without waiting for the GPU.

    Files from before the last two were measured load: then a recomputation is taken as a forward,
    and what a block adds once a step is inside step_s, as much at any depth.
    """

    block_forward_s: ByMode
    block_backward_s: ByMode
    gather_s: NotNegative  # a unit's gather and copy-out
    reduce_s: NotNegative  # a unit's reduction
    step_s: NotNegative  # once a step: embedding, head and loss, optimizer, reading the loss
    norm_s: NotNegative  # once a step: the gradient norm in its fixed order (engines/norm.py)
    block_again_s: ByMode | None = None  # what recomputing a block adds
    # What a block adds to FSDP2's whole step beyond the above: clipping, update, hooks.
    block_rest_s: NotNegative | None = None

    def again_s(self, mode: Mode) -> float:
        """Return the seconds of a block whose backward computes it again."""
        by_mode = self.block_forward_s if self.block_again_s is None else self.block_again_s
        return by_mode[mode]

    def once_s(self, blocks: int) -> float:
        """Return the seconds once a step, of a model of so many blocks, without the norm."""
        return self.step_s + blocks * (self.block_rest_s or 0.0)

    @property
    def lacks(self) -> list[str]:
        """Figures that a calibration measures and this file does not have."""
        names = ("block_again_s", "block_rest_s")
        return [f"host.{name}" for name in names if getattr(self, name) is None]


@checked(frozen=True, config=_STRICT)
class Inside:
    """The links inside a node: seconds by bytes that one rank receives. gpu_share: of a transfer's
    seconds, those that the model loses meanwhile."""

    gather: Curve
    reduce: Curve
    gpu_share: Annotated[float, Field(ge=0, le=1)]


@checked(frozen=True, config=_STRICT)
class Between:
    """The links between nodes. `efficiency`: of a node's nominal rate, what payloads get."""

    latency_s: NotNegative  # of one message
    efficiency: Annotated[float, Field(gt=0, le=1)]

    def seconds(self, nbytes: float, gbps: float, messages: int = 1) -> float:
        """Return the seconds of `nbytes` over `gbps` Gbit/s, in `messages` one by one."""
        if nbytes <= 0:
            return 0.0
        return messages * self.latency_s + nbytes * 8e-9 / (gbps * self.efficiency)


@checked(frozen=True, config=_STRICT)
class Codec:
    """Of the codec kernels: seconds an element by operator and codec, and of a launch.

    Elements are those of the inputs: of a sum, over all its rows. Codecs are named by `codec_key`:
    bits, then r for stochastic rounding, h for a Hadamard rotation; `raw` sends its own bytes.
    """

    launch_s: NotNegative
    seconds: Mapping[str, Mapping[str, AboveZero]]

    def __post_init__(self) -> None:
        unknown = sorted(set(self.seconds) ^ set(OPERATORS))
        need(not unknown, f"codec.seconds: {', '.join(unknown)}; give {', '.join(OPERATORS)}")

    def each(self, op: str, codec: str) -> float:
        """Return seconds an element. ValueError when nobody measured it."""
        found = self.seconds[op].get(codec)
        if found is None:
            raise ValueError(
                f"the machine's file has no codec.seconds.{op}.{codec}; measure it with `zpp-lab "
                "bench calibrate`, or use a codec that it has: "
                f"{', '.join(sorted(self.seconds[op]))}"
            )
        return found


@checked(frozen=True, config=_STRICT)
class Bus:
    """Pinned host memory as each GPU reads and writes it while all do: bytes a second. `both`: of
    both ways together, beside matrix products."""

    to_device: AboveZero
    to_host: AboveZero
    both: AboveZero
    pin_s_per_gib: NotNegative  # until the system has given the pages and the driver knows them

    def shared(self, ranks: int) -> Bus:
        """Return what each of `ranks` ranks has that share a GPU."""
        return Bus(
            self.to_device / ranks, self.to_host / ranks, self.both / ranks, self.pin_s_per_gib
        )


@checked(frozen=True, config=_STRICT)
class Machine:
    """One kind of host and GPU. `compute`: by mode (eager, compiled), seconds on the device by the
    FLOPs of one block's forward in bf16; its backward is twice that. `intra`: None where one GPU
    was measured. `bus`: None in files from before it was measured."""

    name: str
    compute: Annotated[Mapping[Mode, Curve], Field(min_length=1)]
    memory_bytes_per_s: AboveZero  # read and written, of a large copy
    host: Host
    intra: Inside | None
    inter: Between
    codec: Codec
    comment: Mapping[str, str]  # where each number comes from
    gpu: str = ""  # its name as torch says it
    bus: Bus | None = None

    def __post_init__(self) -> None:
        host = self.host
        for name in ("block_forward_s", "block_backward_s", "block_again_s"):
            by_mode = getattr(host, name)
            missing = set() if by_mode is None else set(self.compute) - set(by_mode)
            need(not missing, f"host.{name}: missing {', '.join(missing)}")

    def mode(self, compiled: bool) -> Mode:
        """Return the key of `compute`. ValueError where this file has no figures for it."""
        wanted = MODES[compiled]
        if wanted not in self.compute:
            raise ValueError(
                f"machine {self.name} has no {wanted} figures (compute.{wanted}): set "
                f"engine.compile={'false' if compiled else 'true'}, or measure them with "
                "`zpp-lab bench calibrate`"
            )
        return wanted

    @property
    def inside(self) -> Inside:
        """The links inside a node. ValueError where none were measured."""
        if self.intra is None:
            raise ValueError(
                f"machine {self.name} was measured on one GPU and has no links (intra): set "
                "cluster.nodes=1 cluster.gpus_per_node=1, or run `zpp-lab bench calibrate` on "
                "several GPUs"
            )
        return self.intra

    def shared(self, ranks: int) -> Machine:
        """Return this machine as one of `ranks` ranks sees it that share each GPU and work at the
        same time, each in a node of its own: kernels, copies and the links inside nodes take
        `ranks` times longer. A rank keeps its host thread, and a node its link to the others."""
        need(ranks >= 1, f"{ranks} ranks a GPU: use 1 or more")
        if ranks == 1:
            return self
        codec = self.codec
        each = {op: {k: s * ranks for k, s in by.items()} for op, by in codec.seconds.items()}
        links = self.inside
        return replace(
            self,
            compute={mode: curve.slower(ranks) for mode, curve in self.compute.items()},
            memory_bytes_per_s=self.memory_bytes_per_s / ranks,
            intra=Inside(links.gather.slower(ranks), links.reduce.slower(ranks), links.gpu_share),
            codec=Codec(codec.launch_s * ranks, each),
            bus=self.bus and self.bus.shared(ranks),
        )

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(asdict(self), indent=1) + "\n")


def load_machine(name: str) -> Machine:
    """Return a file, or the name of one in conf/machine. ValueError names what is wrong with it."""
    folder, path = conf_dir() / "machine", Path(name)
    if not path.suffix and not path.is_file():
        path = folder / f"{name}.json"
    if not path.is_file():
        ready = ", ".join(sorted(p.stem for p in folder.glob("*.json")))
        raise ValueError(
            f"machine {name!r}: file not found; use one that `zpp-lab bench calibrate` wrote, or "
            f"a shipped name: {ready}"
        )
    stored = parse_json(path, "use another file, or write it again with `zpp-lab bench calibrate`")
    try:
        return load(Machine, stored)
    except ValueError as error:
        text = str(error).replace("\n", "; ")
        raise ValueError(f"{path}: {text}; use one that `zpp-lab bench calibrate` wrote") from None
