r"""`zpp-lab bench calibrate --out machine.json`: the figures that `zpp-lab plan --machine` needs.

About two minutes on the GPUs of one host: a block's forward and backward at several widths, eager
and compiled; what the host needs to start them, FSDP2's gathers and reductions included; codec
kernels; pinned host memory and the bus to it; transfers between the ranks, unless there is one GPU.
Rank 0's figures count, for transfers and the bus the slowest rank's.

Links between nodes are measured where torchrun has started ranks on several hosts (two or more a
host), or on emulated nodes, and `--link-gbps` names the nominal speed of a node's link:

    zpp-lab emulate --nodes 2 --gpus-per-node 2 --link-gbps 25 -- \
        zpp-lab bench calibrate --link-gbps 25 --out machine.json

Elsewhere `--efficiency` and `--latency-us` say what they are, and the file says that nobody
measured them.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from zpp_lab.config.codec import BITS
from zpp_lab.config.parser import Parser, check_own, listed, new_file, number, whole
from zpp_lab.config.schema import ClusterConfig
from zpp_lab.runs.provenance import commit, machine_facts, versions
from zpp_lab.tools.bench.calibrate_steps import Links, bus, codecs, copy_rate, curve, host
from zpp_lab.tools.bench.ranks import join, start
from zpp_lab.tools.plan.cost.machine import MODES, Between, Machine, Mode

MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    """How much is measured. widths: dim, ffn, heads, tokens of a block. transfer_sizes: bytes a
    rank receives. numel: elements that a codec kernel takes. layers and width: of the model
    that shows the host's time. bus: bytes of each way."""

    widths: tuple[tuple[int, int, int, int], ...]
    compiled: tuple[tuple[int, int, int, int], ...]
    transfer_sizes: tuple[int, ...]
    numel: int
    copied: int
    layers: int
    width: int
    normed: int
    bus: int


LARGE = Sizes(
    widths=(
        (1024, 2816, 8, 1024),
        (2048, 5504, 16, 2048),
        (4096, 11008, 32, 4096),
        (5120, 13824, 40, 4096),
        (6656, 17920, 52, 4096),
    ),
    compiled=((2048, 5504, 16, 2048), (5120, 13824, 40, 4096)),
    transfer_sizes=tuple(n * MIB for n in (1, 4, 16, 64, 256, 512)),
    numel=128 * MIB,
    copied=512 * MIB,
    layers=16,
    width=256,
    normed=1024,
    bus=2048 * MIB,
)
TINY = Sizes(
    widths=((32, 64, 2, 16), (64, 128, 2, 32)),
    compiled=(),
    transfer_sizes=(4096, 65536),
    numel=4096,
    copied=MIB,
    layers=2,
    width=32,
    normed=32,
    bus=MIB,
)


def parser() -> argparse.ArgumentParser:
    made = Parser("zpp-lab bench calibrate", description=__doc__)
    made.add_argument(
        "--out", type=new_file, required=True, help="the machine's JSON file to write"
    )
    made.add_argument("--name", help="the machine's name (default: the file's)")
    made.add_argument("--ranks", type=whole(1), help="processes (default: one a GPU, or 2)")
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
        start(["-m", "zpp_lab.tools.bench.calibrate", *argv], ranks)
        return 0
    _measure(args, gpus > 0)
    return 0


def _measure(args: argparse.Namespace, on_gpu: bool) -> None:
    device = join(on_gpu)
    machine = measured(args, TINY if args.tiny else LARGE, device)
    if dist.get_rank() == 0:
        machine.save(args.out)
        print(f"{args.out}: use it with `zpp-lab plan --machine {args.out} ...`", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # communicators that peer memory uses need not be taken apart


def modes_of(args: argparse.Namespace) -> list[Mode]:
    """Raise ValueError for one that there is not, and without eager."""
    words = args.modes.split(",")
    if not {"eager"} <= set(words) <= set(MODES):
        raise ValueError(f"--modes {args.modes}: use eager or eager,compiled")
    return [mode for mode in MODES if mode in words]


def measured(args: argparse.Namespace, sizes: Sizes, device: torch.device) -> Machine:
    """Measure this machine. Every rank calls it; all get rank 0's figures."""
    modes = [m for m in modes_of(args) if m == "eager" or device.type == "cuda"]
    world = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if local < 2 and (world > 1 or args.link_gbps):
        raise ValueError("bench calibrate needs two ranks a host, to measure what joins them")
    cluster = ClusterConfig(nodes=world // local, gpus_per_node=local)
    links = Links(cluster, device) if world > 1 else None
    same: list[Any] = [_machine(args, sizes, device, modes, links)]
    dist.broadcast_object_list(same, 0)
    machine: Machine = same[0]
    return machine


def _machine(
    args: argparse.Namespace,
    sizes: Sizes,
    device: torch.device,
    modes: list[Mode],
    links: Links | None,
) -> Machine:
    shapes = {"eager": sizes.widths, "compiled": sizes.compiled}
    _say("compute")
    compute = {mode: curve(shapes[mode], mode, device) for mode in modes}
    _say("host")
    started = host(sizes.layers, sizes.width, sizes.normed, modes, device)
    _say("bus to host memory")
    to_host = bus(sizes.bus, device)
    if links is not None:
        _say("links inside nodes")
    inside = None if links is None else links.inside(sizes.transfer_sizes)
    _say("codecs")
    kernels = codecs(args.bits, sizes.numel, device)
    _say("memory and links between nodes")
    between, source = _between(args, links, sizes)
    return Machine(
        name=args.name or args.out.stem,
        compute=compute,
        memory_bytes_per_s=copy_rate(sizes.copied, device),
        host=started,
        intra=inside,
        inter=between,
        codec=kernels,
        comment=_comment(sizes, source),
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        bus=to_host,
    )


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"calibrate: {text}", flush=True)


def _between(args: argparse.Namespace, links: Links | None, sizes: Sizes) -> tuple[Between, str]:
    """Return the links between nodes, and the source of their figures."""
    if args.link_gbps and links is not None:
        gbps = args.link_gbps
        source = f"measured over links of {gbps:g} Gbit/s a node"
        return links.between(sizes.transfer_sizes, gbps), source
    if args.efficiency is None and args.latency_us is None:
        return Between(0.0, 1.0), "not measured: the nominal speed without latency, a lower bound"
    given = Between((args.latency_us or 0.0) * 1e-6, args.efficiency or 1.0)
    return given, "given on the command line, not measured"


def _comment(sizes: Sizes, between: str) -> dict[str, str]:
    facts = machine_facts()
    where = f"{len(facts['gpus'])} × {facts['gpus'][0]}" if facts["gpus"] else facts["cpu"]
    made = "zpp-lab bench calibrate"
    return {
        "made by": f"{made} on {where}, versions {versions()}, commit {commit()}, {asdict(sizes)}",
        "compute": f"{made}: a third of forward and backward of one block, by its FLOPs",
        "memory_bytes_per_s": f"{made}: a copy, read and written",
        "host": f"{made}: a small model alone and under FSDP2, so that the host is the bound",
        "intra": f"{made}: transfers alone, engine.transport=auto; null: one GPU has none",
        "bus": f"{made}: pinned memory, all GPUs of the host together",
        "inter": between,
        "codec": f"{made}: kernels on bf16, blocks of 256; launch_s: an encode of 16 elements",
    }


if __name__ == "__main__":
    main(sys.argv[1:])
