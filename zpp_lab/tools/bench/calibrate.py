r"""`zpp-lab bench calibrate --out machine.json`: the figures that `zpp-lab plan --machine` needs.

About two minutes on the GPUs of one host: a block's forward and backward at several widths, eager
and compiled; what the host needs to start them, FSDP2's gathers and reductions included; codec
kernels; transfers between the ranks. Rank 0's figures count, for transfers the slowest rank's.

Links between nodes are measured where torchrun has started ranks on several hosts (two or more a
host), or on emulated nodes, and `--link-gbps` names the nominal speed of a node's link:

    zpp-lab emulate --nodes 2 --gpus-per-node 2 --link-gbps 25 -- \
        zpp-lab bench calibrate --link-gbps 25 --out machine.json

Elsewhere `--efficiency` and `--latency-us` say what they are, and the file says that nobody
measured them.

The file is written once all is measured. What a call that was ended has measured lies beside it, in
machine.json.part; the same command goes on from there, on the same kind of CPU, as many GPUs of the
same names, with the same torch and code. Else it says what differs and measures all.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from zpp_lab.config.codec import BITS
from zpp_lab.config.parser import Parser, check_own, listed, new_file, number, whole
from zpp_lab.config.schema import ClusterConfig
from zpp_lab.files import write_atomic
from zpp_lab.runs.provenance import commit, cpu_model, machine_facts, versions
from zpp_lab.tools.bench.calibrate_steps import Links, codecs, copy_rate, curve, host
from zpp_lab.tools.bench.ranks import join, start
from zpp_lab.tools.plan.cost.machine import (
    MODES,
    PART,
    Between,
    Codec,
    Curve,
    Host,
    Inside,
    Machine,
    Mode,
)

Place = Mapping[str, Any]
MIB = 2**20


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
    """Parts by name, as rank 0 measured them. Every rank makes one and asks it alike.

    `machine.json.part` is written whole after each part. It is no machine file and has no name of
    one, so nothing takes half a machine for a whole; it goes when machine.json is there.
    """

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
                self._say(f"{self.path}: {name} cannot be read; measuring it again")
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
            self._say(
                f"parts are saved in {self.path}; after an interruption the same command resumes"
            )
            return 1, {}
        except (ValueError, KeyError, TypeError) as error:
            self._say(f"{self.path} is damaged ({error!r}); measuring everything again")
            return 1, {}
        if place != self.place:
            self._say(f"{self.path}: {_difference(place, self.place)}; measuring everything again")
            return 1, {}
        self._say(f"resuming from {self.path}, which has: {'; '.join(parts)}")
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
    return "it was measured for other settings"


@dataclass(frozen=True)
class Sizes:
    """How much is measured. widths: dim, ffn, heads, tokens of a block. shipments: bytes that a
    rank receives. numel: elements that a codec kernel takes. layers and width: of the model
    that shows the host's time."""

    widths: tuple[tuple[int, int, int, int], ...]
    compiled: tuple[tuple[int, int, int, int], ...]
    shipments: tuple[int, ...]
    numel: int
    copied: int
    layers: int
    width: int
    normed: int


LARGE = Sizes(
    widths=(
        (1024, 2816, 8, 1024),
        (2048, 5504, 16, 2048),
        (4096, 11008, 32, 4096),
        (5120, 13824, 40, 4096),
        (6656, 17920, 52, 4096),
    ),
    compiled=((2048, 5504, 16, 2048), (5120, 13824, 40, 4096)),
    shipments=tuple(n * MIB for n in (1, 4, 16, 64, 256, 512)),
    numel=128 * MIB,
    copied=512 * MIB,
    layers=16,
    width=256,
    normed=1024,
)
TINY = Sizes(
    widths=((32, 64, 2, 16), (64, 128, 2, 32)),
    compiled=(),
    shipments=(4096, 65536),
    numel=4096,
    copied=MIB,
    layers=2,
    width=32,
    normed=32,
)


def parser() -> argparse.ArgumentParser:
    made = Parser("zpp-lab bench calibrate", description=__doc__)
    made.add_argument(
        "--out", type=new_file, required=True, help="the machine's JSON file to write"
    )
    made.add_argument("--name", help="the machine's name (default: the file's)")
    made.add_argument("--ranks", type=whole(2), help="processes (default: one a GPU, or 2)")
    made.add_argument(
        "--bits", type=listed(whole(), BITS), default=list(BITS), help="of the codecs"
    )
    made.add_argument(
        "--modes", default="eager,compiled", help="modes of blocks; compiled: only on GPUs"
    )
    made.add_argument("--tiny", action="store_true", help="small shapes, to try it without GPUs")
    made.add_argument(
        "--cpu", action="store_true", help="run on the CPU over gloo, even if there are GPUs"
    )
    made.add_argument(
        "--link-gbps",
        type=number(above=0),
        help="nominal link speed of a node; needs several hosts",
    )
    made.add_argument(
        "--efficiency",
        type=number(above=0),
        help="share of the nominal speed between nodes (default: 1)",
    )
    made.add_argument(
        "--latency-us", type=number(least=0), help="latency between nodes (default: 0)"
    )
    return made


def main(argv: list[str]) -> int:
    """Start the ranks, unless torchrun has; returns the exit code."""
    args = parser().parse_args(argv)
    modes_of(args)
    check_own("--out", args.out, '"memory_bytes_per_s"')
    gpus = 0 if args.cpu else torch.cuda.device_count()
    if not gpus and not args.tiny:
        raise ValueError("bench calibrate measures GPUs, but found none: add --tiny to try it")
    if "RANK" not in os.environ:
        ranks = args.ranks or gpus or 2
        if ranks < 2:
            raise ValueError("bench calibrate measures links: it needs two GPUs, or --cpu --tiny")
        start(["-m", "zpp_lab.tools.bench.calibrate", *argv], ranks)
        return 0
    _measure(args, gpus > 0)
    return 0


def _measure(args: argparse.Namespace, on_gpu: bool) -> None:
    device = join(on_gpu)
    sizes = TINY if args.tiny else LARGE
    kept = Kept(args.out, place_of(sizes, device))
    machine = measured(args, sizes, device, kept)
    if dist.get_rank() == 0:
        machine.save(args.out)
        kept.done()
        print(f"{args.out}: use it with `zpp-lab plan --machine {args.out} ...`", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # communicators that peer memory uses need not be taken apart


def modes_of(args: argparse.Namespace) -> list[Mode]:
    """ValueError for one that there is not, and without eager."""
    words = args.modes.split(",")
    if not {"eager"} <= set(words) <= set(MODES):
        raise ValueError(f"--modes {args.modes}: use eager or eager,compiled")
    return [mode for mode in MODES if mode in words]


def measured(args: argparse.Namespace, sizes: Sizes, device: torch.device, kept: Kept) -> Machine:
    """Every rank calls it; all get rank 0's figures, of which `kept` may have some."""
    modes = [m for m in modes_of(args) if m == "eager" or device.type == "cuda"]
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    if local < 2:
        raise ValueError("bench calibrate needs two ranks a host, to measure what joins them")
    cluster = ClusterConfig(nodes=dist.get_world_size() // local, gpus_per_node=local)
    links = Links(cluster, device)
    made = _machine(args, sizes, device, modes, links, kept)
    same: list[Any] = [made]
    dist.broadcast_object_list(same, 0)
    machine: Machine = same[0]
    return machine


def _machine(
    args: argparse.Namespace,
    sizes: Sizes,
    device: torch.device,
    modes: list[Mode],
    links: Links,
    kept: Kept,
) -> Machine:
    """Part by part; what a part depends on is in its name."""
    bits, part = args.bits, kept.part
    shapes = {"eager": sizes.widths, "compiled": sizes.compiled}
    compute = {m: part(f"compute, {m}", Curve, partial(curve, shapes[m], m, device)) for m in modes}
    wanted = partial(host, sizes.layers, sizes.width, sizes.normed, modes, device)
    started = part(f"host, {' and '.join(modes)}", Host, wanted)
    inside = part("links inside nodes", Inside, lambda: links.inside(sizes.shipments))
    kernels = part(f"codecs, bits {args.bits}", Codec, lambda: codecs(bits, sizes.numel, device))
    memory = part("memory", float, lambda: copy_rate(sizes.copied, device))
    between, source = _between(args, links, sizes, kept)
    return Machine(
        name=args.name or args.out.stem,
        compute=compute,
        memory_bytes_per_s=memory,
        host=started,
        intra=inside,
        inter=between,
        codec=kernels,
        comment=_comment(sizes, source, kept.calls),
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
    )


def _between(
    args: argparse.Namespace, links: Links, sizes: Sizes, kept: Kept
) -> tuple[Between, str]:
    """And where it comes from. ValueError for a speed without hosts to measure."""
    if args.link_gbps:
        gbps = args.link_gbps
        found = kept.part(
            f"links between nodes, {gbps:g} Gbit/s",
            Between,
            lambda: links.between(sizes.shipments, gbps),
        )
        return found, f"measured over links of {gbps:g} Gbit/s a node"
    given = [args.efficiency, args.latency_us]
    if given == [None, None]:
        return Between(0.0, 1.0), "not measured: the nominal speed without latency, a lower bound"
    efficiency, latency = args.efficiency or 1.0, args.latency_us or 0.0
    return Between(latency * 1e-6, efficiency), "given on the command line, not measured"


def _comment(sizes: Sizes, between: str, calls: int) -> dict[str, str]:
    facts = machine_facts()
    where = f"{len(facts['gpus'])} × {facts['gpus'][0]}" if facts["gpus"] else facts["cpu"]
    made = "zpp-lab bench calibrate"
    return {
        "made by": f"{made} on {where}, versions {versions()}, commit {commit()}, {asdict(sizes)}"
        + (f", in {calls} calls" if calls > 1 else ""),
        "compute": f"{made}: a third of forward and backward of one block, by its FLOPs",
        "memory_bytes_per_s": f"{made}: a copy, read and written",
        "host": f"{made}: a small model alone and under FSDP2, so that the host is the bound",
        "intra": f"{made}: transfers alone, engine.transport=auto",
        "inter": between,
        "codec": f"{made}: kernels on bf16, blocks of 256; launch_s: an encode of 16 elements",
    }


if __name__ == "__main__":
    main(sys.argv[1:])
