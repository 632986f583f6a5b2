"""`zpp-lab plan`, `doctor`, `bench`, `emulate`, `mps` and `build`."""

from __future__ import annotations

import argparse
from pathlib import Path

from zpp_lab.cli.adding import Add, takes_settings
from zpp_lab.config.parser import number, whole

PLAN = """Nothing is allocated or trained.

    run="model=13b cluster=2x8 train.param_dtype=bf16 data.seq_len=2048 train.batch_size=2"
    zpp-lab plan $run                                        # bytes, memory, does it fit
    zpp-lab plan $run --machine h200 --link-gbps 100,max     # seconds a step too
    zpp-lab plan $run --machine h200 --link-gbps 100 --fastest --study runs/bits
    zpp-lab plan $run --machine h200 --link-gbps 100 --gpus 64        # dp × tp × pp of 64 GPUs"""
MEMORY = "memory of a GPU in GiB (default: this machine's, or 80)"
TIMES = "predict times: a file written by `bench calibrate`, or a name such as h200"
LINKS = "with --machine: link speeds of a node in Gbit/s, such as 12,25,max (default: max)"
GPUS = (
    "compare all splits of the model, dp × tp × pp, over so many GPUs on nodes of the cluster; by "
    "time with --machine, else by bytes"
)
GAP = "loss margin as a share of the baseline's loss, such as 0.01 (default: the study's margin)"
ALLOW = "undecided: also the study's undecided arms; untested: without --study, any bits"
NO_MACHINE = "--link-gbps works only with --machine, whose figures predict times"
BENCHES = {
    "step": "time training steps of several recipes at several link speeds",
    "calibrate": "measure the figures that `zpp-lab plan --machine` reads",
}


def add_machine(add: Add) -> None:
    _add_plan(add)
    add("doctor", "list what this machine can do, and what to install for the rest", _doctor)
    text = "measure training steps, or a machine for predictions"
    bench = add("bench", text, _bench, passes_on=True)
    bench.add_argument("what", nargs="?")
    add("emulate", "run a command on emulated nodes of this host", _emulate, passes_on=True)
    add("mps", "run a command whose processes share GPUs through MPS", _mps, passes_on=True)
    add("build", "compile the CUDA kernels ahead of time", _build, passes_on=True)


def _add_plan(add: Add) -> None:
    plan = add(
        "plan", "predict a run's traffic and memory, and whether it fits its GPUs", _plan, PLAN
    )
    memory = ("--gpu-gib", "--memory-gib")
    plan.add_argument(*memory, dest="gpu_gib", metavar="GIB", type=number(above=0), help=MEMORY)
    plan.add_argument("--json", action="store_true", help="print JSON for scripts; sizes in bytes")
    plan.add_argument("--machine", metavar="FILE", help=TIMES)
    plan.add_argument("--link-gbps", metavar="SPEEDS", help=LINKS)
    plan.add_argument("--fastest", action="store_true", help="search the fastest plan that fits")
    plan.add_argument("--gpus", type=whole(1), metavar="N", help=GPUS)
    search = plan.add_argument_group("with --fastest")
    search.add_argument(
        "--study", type=Path, metavar="DIR", help="only recipes that this study found on par"
    )
    search.add_argument("--max-gap", type=number(least=0), metavar="SHARE", help=GAP)
    search.add_argument("--allow", choices=["undecided", "untested"], help=ALLOW)
    takes_settings(plan)


def _plan(args: argparse.Namespace, overrides: list[str]) -> int:
    from zpp_lab.config.compose import compose
    from zpp_lab.train.inputs import check_shape

    if args.gpus is not None:
        return _layouts(args, overrides)
    ranked = ["engine=fsdp"] if args.fastest else []
    check_shape(compose([*overrides, *ranked]))  # a typo is answered before torch is imported
    names = ("study", "max_gap", "allow")
    if args.fastest:
        from zpp_lab.tools.plan.search.command import Wanted, fastest_command

        own = {name: getattr(args, name) for name in (*names, "machine", "link_gbps", "gpu_gib")}
        return fastest_command(overrides, Wanted(**own, as_json=args.json))
    for name in names:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} works only with --fastest")
    if args.link_gbps is not None and args.machine is None:
        raise ValueError(NO_MACHINE)
    from zpp_lab.tools.plan.planner import plan_command

    return plan_command(overrides, args.gpu_gib, args.json, args.machine, args.link_gbps or "max")


def _layouts(args: argparse.Namespace, overrides: list[str]) -> int:
    if args.fastest:
        raise ValueError("--gpus and --fastest are two searches: leave out one")
    if args.link_gbps is not None and args.machine is None:
        raise ValueError(NO_MACHINE)
    from zpp_lab.tools.plan.search.layouts import layouts_command

    speeds = args.link_gbps or "max"
    return layouts_command(overrides, args.gpus, args.gpu_gib, args.json, args.machine, speeds)


def _doctor(_: argparse.Namespace, __: list[str]) -> int:
    from zpp_lab.tools.doctor import doctor

    return doctor()


def _bench(args: argparse.Namespace, rest: list[str]) -> int:
    if args.what is None:
        if "-h" in rest or "--help" in rest:
            rows = [f"  {name:14} {text}" for name, text in BENCHES.items()]
            print("usage: zpp-lab bench WHAT [option ...]\n", *rows, sep="\n")
            print("zpp-lab bench WHAT --help lists its options.")
            return 0
        raise ValueError(
            f"bench needs WHAT to measure: zpp-lab bench WHAT; valid names: {', '.join(BENCHES)}"
        )
    if args.what not in BENCHES:
        raise ValueError(f"bench {args.what!r}: unknown; valid names: {', '.join(BENCHES)}")
    from importlib import import_module

    return int(import_module(f"zpp_lab.tools.bench.{args.what}").main(rest))


def _emulate(_: argparse.Namespace, rest: list[str]) -> int:
    from zpp_lab.tools.links import nodes

    return nodes.main(rest)


def _mps(_: argparse.Namespace, rest: list[str]) -> int:
    from zpp_lab.train.launch import mps

    return mps.main(rest)


def _build(_: argparse.Namespace, rest: list[str]) -> int:
    from zpp_lab.codecs.kernels import build

    return build.main(rest)
