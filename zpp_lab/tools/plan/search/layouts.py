"""`zpp-lab plan --gpus N`: every dp × tp × pp of so many GPUs, and what each dimension costs.

The recipe and the tokens of a step are the user's. Tensor parts take as many times more sequences a
pass, which need about as much memory in each, or more micro-steps where these do not fit; stages
take more micro-steps. With several stages weights stay for a step (recipe.stage=2).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

from rich.console import Console
from rich.table import Table

from zpp_lab.collectives.traffic import NOTHING, Traffic
from zpp_lab.config.compose import compose
from zpp_lab.config.load import setting_of
from zpp_lab.config.schema import ClusterConfig, Config
from zpp_lab.config.wires import ACTS_PIPE, WIRES
from zpp_lab.tools.plan.cost import show as time_shown
from zpp_lab.tools.plan.cost.machine import Machine, load_machine
from zpp_lab.tools.plan.cost.timeline import StepTime
from zpp_lab.tools.plan.planner import NO_GPU, device_memory, host_memory, sequences
from zpp_lab.train.inputs import check_shape
from zpp_lab.train.memory.buffers import GIB
from zpp_lab.train.memory.outlook import Outlook

PER_NODE = 8  # GPUs, where the settings name no cluster
WIDTH = 112
COSTS = (
    "What each dimension costs, in ms of a step at {link} Gbit/s: dp what gathers, reductions and "
    "state in host memory add, tp exchanges of activations, pp the bubble and crossings."
)
UNTIMED = (
    "Sorted by bytes between nodes, then inside nodes, so the first may not be the fastest: "
    "sort by time with --machine h200, or a file of `zpp-lab bench calibrate`, and --link-gbps."
)
BUBBLE = (
    "Of the first layout's passes {share:.0%} is the bubble, (pp - 1) / (n + pp - 1) with n "
    "forwards a rank."
)


@dataclass(frozen=True)
class Layout:
    """A way to split the model over the GPUs: what `zpp-lab train` needs for it, its memory, and
    times by link."""

    overrides: tuple[str, ...]
    outlook: Outlook
    times: dict[str, StepTime] = field(default_factory=dict)

    @property
    def cluster(self) -> ClusterConfig:
        return self.outlook.config.cluster

    @property
    def name(self) -> str:
        return f"{self.cluster.readers} × {self.cluster.tp} × {self.cluster.pp}"

    def sent(self, activations: bool) -> Traffic:
        """Return the bytes of a step that all ranks send: of activations and what goes with them,
        or all others."""
        every = self.outlook.plan.step_bytes().items()
        own = (t for wire, t in every if (WIRES[wire].short == "acts") == activations)
        return sum(own, NOTHING)

    @property
    def order(self) -> tuple[bool, float, int]:
        """Return what sorts layouts: those that fit, then the fastest, or without times what sends
        least."""
        first = next(iter(self.times.values()), None)
        sent = self.sent(True) + self.sent(False)
        return not self.outlook.fits, first.step_s if first else sent.inter, sent.intra

    @property
    def bubble(self) -> float:
        """Return the share of passes in which a stage has nothing to do, by the closed form."""
        ranks, config = self.cluster.pp, self.outlook.config
        return (ranks - 1) / (config.train.micro_steps * config.engine.chunks + ranks - 1)


def layouts_command(
    overrides: Sequence[str],
    gpus: int,
    gpu_gib: float | None,
    as_json: bool,
    machine: str | None,
    link_gbps: str,
) -> int:
    """Print all layouts, the best first; return 0 where one fits, else 1."""
    known = load_machine(machine) if machine else None
    speeds = time_shown.links(link_gbps)
    found, refused, assumed = layouts(overrides, gpus, gpu_gib, known, speeds)
    if as_json:
        print(json.dumps(as_dict(found, refused), indent=1))
    else:
        _show(found, refused, known, assumed, Console(width=max(WIDTH, Console().width)))
    return 0 if found[0].outlook.fits else 1


def layouts(
    overrides: Sequence[str],
    gpus: int,
    gpu_gib: float | None,
    machine: Machine | None = None,
    speeds: Sequence[float | None] = (None,),
) -> tuple[list[Layout], list[str], bool]:
    """Return the layouts of so many GPUs, the best first; why others are none; and whether a GPU's
    memory is assumed (`device_memory`). ValueError where nodes do not divide the GPUs, or there is
    no layout at all."""
    base, every = _clusters(overrides, gpus)
    check_shape(base)
    gpu_gib = gpu_gib or base.engine.gpu_gib
    device, assumed = device_memory(gpu_gib)
    found, why = list[Layout](), dict[str, list[str]]()
    for cluster in every:
        try:
            layout = _largest_pass(overrides, base, cluster, device, gpu_gib)
            times = time_shown.times(layout.outlook.config, machine, speeds) if machine else {}
        except ValueError as error:
            why.setdefault(str(error), []).append(f"tp={cluster.tp} pp={cluster.pp}")
            continue
        found.append(replace(layout, times=times))
    refused = [f"{', '.join(own)}: {reason}" for reason, own in why.items()]
    if not found:
        raise ValueError(f"--gpus {gpus}: no layout; " + "; ".join(refused))
    return sorted(found, key=lambda layout: layout.order), refused, assumed


def _largest_pass(
    given: Sequence[str],
    base: Config,
    cluster: ClusterConfig,
    device: int,
    gpu_gib: float | None,
) -> Layout:
    """Return the layout with the most sequences a pass that fit, or else with the fewest."""
    for times in (n for n in range(cluster.tp, 0, -1) if cluster.tp % n == 0):
        own = _overrides(given, base, cluster, times)
        config = compose(own)
        found = Layout(tuple(own), Outlook.of(config, device, host_memory(config, gpu_gib)))
        if found.outlook.fits:
            break
    return found


def _clusters(overrides: Sequence[str], gpus: int) -> tuple[Config, list[ClusterConfig]]:
    """Return the settings with whole models, and every cluster: the user's tp and pp, or all."""
    named = {setting_of(word): word.partition("=")[2] for word in overrides}
    if "deepspeed" in (named.get("engine"), named.get("engine.name")):
        raise ValueError("engine=deepspeed: --gpus plans engine=fsdp: leave it out")
    whole = [w for w in overrides if not (_absent(w, ClusterConfig(1, 1)) or _replaced(w))]
    base = compose([*whole, "cluster.tp=1", "cluster.pp=1", "engine=fsdp"])
    given = any(name.split(".")[0] == "cluster" for name in named if not _replaced(name))
    each = base.cluster.gpus_per_node if given else min(PER_NODE, gpus)
    if gpus % each:
        raise ValueError(
            f"--gpus {gpus} is not a multiple of cluster.gpus_per_node={each}: change either"
        )
    nodes = gpus // each
    fixed = {axis: named.get(f"cluster.{axis}") for axis in ("tp", "pp")}
    for axis, value in fixed.items():
        if value is not None and not (value.isdecimal() and int(value)):
            raise ValueError(f"cluster.{axis}={value}: use a number from 1 with --gpus")
    sizes = {
        axis: [int(value)] if value else [n for n in range(1, gpus + 1) if gpus % n == 0]
        for axis, value in fixed.items()
    }
    found, errors = list[ClusterConfig](), list[ValueError]()
    for tp, pp in product(sizes["tp"], sizes["pp"]):
        try:
            found.append(ClusterConfig(nodes, each, tp, pp))
        except ValueError as error:
            errors.append(error)
    if not found:  # the user's own axis divides nothing
        raise errors[0]
    return base, found


def _replaced(word: str) -> bool:
    """Return whether an override is of what each layout sets itself."""
    return setting_of(word) in ("cluster.tp", "cluster.pp", "engine", "engine.name")


def _absent(word: str, cluster: ClusterConfig) -> bool:
    """Return whether an override is of a wire or of stages that the cluster does not have."""
    group, _, rest = setting_of(word).partition(".")
    if (group, rest) == ("engine", "schedule"):
        return cluster.pp == 1
    name = rest.split(".")[0]
    if group != "recipe" or (name not in WIRES and name != "acts"):
        return False
    if name == "acts":
        return cluster.tp == cluster.pp == 1
    size = cluster.pp if name == ACTS_PIPE else cluster.tp
    return WIRES[name].carries == "activations" and size == 1  # type: ignore[index]


def _overrides(given: Sequence[str], base: Config, cluster: ClusterConfig, times: int) -> list[str]:
    """Return the settings of a layout: the user's, without what it replaces, and its own, with so
    many times the user's sequences a pass."""
    model, train = base.model, base.train
    own = {
        "cluster.nodes": cluster.nodes,
        "cluster.gpus_per_node": cluster.gpus_per_node,
        "train.batch_size": train.batch_size * times,
        "train.micro_steps": train.micro_steps * cluster.tp * cluster.pp // times,
        "engine": "fsdp",
    }
    own |= {
        name: n for name, n in (("cluster.tp", cluster.tp), ("cluster.pp", cluster.pp)) if n > 1
    }
    if cluster.pp > 1 and base.recipe.again:
        own["recipe.stage"] = 2
    if cluster.tp > 1:  # not built
        own |= {"model.loss_chunk": 0} if model.loss_chunk else {}
        own |= {"model.checkpoint_activations": "false"} if model.checkpoint_activations else {}
    kept = [
        word
        for word in given
        if setting_of(word) not in {*own, "cluster"}
        and not (_replaced(word) or _absent(word, cluster))
    ]
    return [*kept, *(f"{name}={value}" for name, value in own.items())]


# ---------------------------------------------------------------------- shown


def as_dict(found: Sequence[Layout], refused: Sequence[str]) -> dict[str, Any]:
    """Return everything shown, in bytes and seconds, and by which of them it is sorted."""
    by = "seconds" if found[0].times else "bytes"
    return {
        "sorted_by": by,
        "layouts": [_row(layout) for layout in found],
        "refused": list(refused),
    }


def _row(layout: Layout) -> dict[str, Any]:
    cluster, plan = layout.cluster, layout.outlook.plan
    return {
        "dp": cluster.readers,
        "tp": cluster.tp,
        "pp": cluster.pp,
        "overrides": list(layout.overrides),
        "fits": layout.outlook.fits,
        "peak": layout.outlook.estimate.peak,
        "host": layout.outlook.estimate.host,
        "wires": {wire: t._asdict() for wire, t in plan.step_bytes().items()},
        "bubble": layout.bubble,
        "links": {
            link: {**asdict(time), "shards_s": time.shards_s} for link, time in layout.times.items()
        },
    }


def _show(
    found: Sequence[Layout],
    refused: Sequence[str],
    machine: Machine | None,
    assumed: bool,
    console: Console,
) -> None:
    best, links = found[0], list(found[0].times)
    config, device = best.outlook.config, best.outlook.device
    console.print(
        f"{config.model.preset}, recipe {config.recipe.name}, {best.cluster.world} GPUs on "
        f"{best.cluster.nodes} × {best.cluster.gpus_per_node}, {config.tokens_per_step:,} tokens a "
        "step",
        highlight=False,
    )
    if assumed:
        console.print(NO_GPU)
    table = Table()
    names = ["dp × tp × pp", "GiB a GPU", "GB, weights and grads", "GB, acts"]
    names += [f"ms at {link}" for link in links]
    for name in [*names, *(("dp", "tp", "pp", "bound by") if links else ())]:
        table.add_column(name, justify="right")
    for layout in found:
        peak = layout.outlook.estimate.peak
        lacks = "too much" if peak > layout.outlook.budget else "host memory lacks"
        cells = [layout.name, f"{peak / GIB:.1f}" + f" ({lacks})" * (not layout.outlook.fits)]
        cells += [_gb(layout.sent(False)), _gb(layout.sent(True))]
        cells += [f"{1000 * time.step_s:.0f}" for time in layout.times.values()]
        if links:
            time = layout.times[links[0]]
            costs = (time.shards_s, time.parts_s, time.stages_s)
            cells += [*(f"{1000 * seconds:.0f}" for seconds in costs), time.bound]
        table.add_row(*cells)
    console.print(table)
    console.print("GB: inside nodes + between nodes, all ranks, one step.", style="dim")
    if machine is not None:
        console.print(COSTS.format(link=links[0]))
        if older := time_shown.host_lacks(machine):
            console.print(older)
    elif len(found) > 1:
        console.print(UNTIMED)
    for reason in refused:
        console.print(f"Not possible: {reason}", highlight=False)
    if not best.outlook.fits:
        host = best.outlook.host
        also = f" and {host / GIB:.1f} GiB of host memory a rank" if host is not None else ""
        console.print(f"No layout fits {device / GIB:.1f} GiB a GPU{also}.")
        return
    if best.cluster.pp > 1:
        console.print(BUBBLE.format(share=best.bubble))
    console.print(f"{sequences(config)}: zpp-lab train {' '.join(best.overrides)}", soft_wrap=True)


def _gb(traffic: Traffic) -> str:
    return f"{traffic.intra / 1e9:.1f} + {traffic.inter / 1e9:.1f}"
