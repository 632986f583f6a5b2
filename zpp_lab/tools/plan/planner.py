"""`zpp-lab plan`: what a run would send and hold, before anything is allocated.

The model is built on the meta device, so 32.5 billion parameters are planned on a laptop. What is
shown is a real run: engine=fsdp, one GPU a rank, whatever engine the settings name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from zpp_lab.collectives.plan import Plan
from zpp_lab.config.compose import compose
from zpp_lab.config.load import written
from zpp_lab.config.schema import Config, RecipeConfig
from zpp_lab.config.wires import INTER, INTRA, WIRES
from zpp_lab.engines.build import plan_of
from zpp_lab.engines.units import is_untouched
from zpp_lab.files import percents
from zpp_lab.runs.provenance import gpu_memory, memory_bytes
from zpp_lab.tools.plan import law
from zpp_lab.tools.plan.cost import show as time_shown
from zpp_lab.tools.plan.cost.machine import load_machine
from zpp_lab.tools.plan.cost.state import NoFigures
from zpp_lab.train.memory.advice import Advice, advise
from zpp_lab.train.memory.buffers import GIB, MOMENTS, Estimate, Moment
from zpp_lab.train.memory.outlook import DEFAULT_GIB, Outlook, deepest, host_part

# columns of the table: of a block that computes and is then reduced, the larger moment
SHOWN: tuple[tuple[Moment, ...], ...] = (
    ("loss",),
    ("early", "early sent"),
    ("late", "late sent"),
    ("root",),
    ("update",),
    ("eval", "eval loss"),
)
REMEMBERS = "No gap is predicted: the scaling law was fitted to recipes without error feedback."
NOTES = (
    "Counted: tensors, also compiled blocks', and peer memory, unknown to torch's allocator.",
    "Assumed: context and NCCL. Not counted: fragmentation of the allocator, workspaces of "
    "libraries. Assumed as well: zpp_lab's CUDA kernels are used (`zpp-lab doctor` checks that).",
    "Moments: the loss goes back; an early and the last (late) block goes back; the root unit's "
    "gradients are reduced; norm, clipping and optimizer; evaluation, or its losses.",
    "Bytes on the wires: all ranks together, one step.",
)
NO_GPU = f"No GPU was found: assuming {DEFAULT_GIB:g} GiB a GPU; --memory-gib changes that."
TIGHT = int(5 * GIB)  # see RESERVED
RESERVED = (
    "Only {spare} GiB to spare, and torch's allocator had reserved 4 GiB beyond its tensors "
    "where that was measured (experiments/plan). When memory runs short it frees and "
    "reallocates, which takes time: with 4.4 GiB to spare a step took 1.5 times as long "
    "(experiments/speed)."
)
HOPS = (
    "With one hop every GPU of a node sends its own gradient rows, {one_hop:.3f} GB between "
    "nodes. recipe.hops=2 sums inside nodes first and sends {two_hops:.3f} GB; it rounds those "
    "sums, so its loss differs."
)
VIRTUAL = "Memory is that of one of {world} GPUs; engine=virtual holds all ranks in one process."
LAST = "Predicted: a step of the last phase, after {first} steps."
NO_LAW = (
    "Memory: of the phase that holds most. The loss gap is not predicted: the scaling law was "
    "fitted to recipes without phases."
)
ONE_HOST = (
    "Assuming {nodes} hosts. Ranks of one host read each other's memory: plan such a run with "
    "engine=fsdp engine.transport=peer. There engine.gather=flat gathers in one hop."
)


def plan_command(
    overrides: Sequence[str],
    gpu_gib: float | None,
    as_json: bool,
    machine: str | None = None,
    link_gbps: str = "max",
) -> int:
    """Print the table or JSON. Returns 0 when the run fits, else 1. `machine`: a file or a ready
    one's name, for predicted times at `link_gbps`."""
    config = compose(list(overrides))
    device, assumed = device_memory(gpu_gib or config.engine.gpu_gib)
    outlook = Outlook.of(config, device, host_memory(config, gpu_gib))
    advice = [] if outlook.fits else list(advise(outlook))
    known = load_machine(machine) if machine else None
    speeds = time_shown.links(link_gbps)
    timed_as = outlook.config.phases[-1].config  # of several phases the last
    times, lacking = {}, ""
    try:
        times = time_shown.times(timed_as, known, speeds) if known else {}
    except NoFigures as error:
        lacking = f"No step time: {error}."
    if as_json:
        timed = {"time": time_shown.as_dict(timed_as, times, known)} if known else {}
        print(json.dumps(as_dict(outlook, advice) | timed, indent=1))
        return 0 if outlook.fits else 1
    console = Console()
    _show_verdict(outlook, assumed, console)
    show(outlook, advice, console)
    if outlook.config.engine.name == "virtual":
        console.print(VIRTUAL.format(world=outlook.config.cluster.world), style="dim")
    if lacking:
        console.print(lacking)
    elif known:
        if outlook.phases:
            console.print(LAST.format(first=outlook.config.phases[-1].first))
        console.print(time_shown.table(times, known))
        console.print(time_shown.graph_line(timed_as, known, times))
        pinned = outlook.estimate.host
        if placed := time_shown.placed_line(timed_as, known, times, pinned):
            console.print(placed)
        if lacks := time_shown.host_lacks(known):
            console.print(lacks)
        if advised := time_shown.host_advice(timed_as, known, times):
            console.print(advised)
    return 0 if outlook.fits else 1


def device_memory(gpu_gib: float | None) -> tuple[int, bool]:
    """Return a GPU's bytes: `gpu_gib`, else of the GPU seen here, else DEFAULT_GIB; and whether
    they are that last one, which a user must hear of (NO_GPU). ValueError for no memory."""
    if gpu_gib is not None and not 0 < gpu_gib <= 1e6:
        raise ValueError(
            f"--memory-gib {gpu_gib:g} (also --gpu-gib): use more than 0 and at most 1000000"
        )
    seen = gpu_gib * GIB if gpu_gib else gpu_memory()
    return int(seen or DEFAULT_GIB * GIB), not seen


def host_memory(config: Config, gpu_gib: float | None) -> int | None:
    """Return a rank's part of its host's memory: by engine.host_gib, else with engine.place=auto
    and this machine's GPUs of this machine; None: unknown."""
    engine = config.engine
    if engine.host_gib:
        return host_part(config, engine.host_gib * GIB, planned=True)
    here = engine.place == "auto" and not (gpu_gib or engine.gpu_gib) and gpu_memory()
    return host_part(config, memory_bytes(), planned=True) if here else None


def gap_of(outlook: Outlook) -> law.Prediction | None:
    """Return what the recipe's bits will cost; None where it has none, or the law says nothing."""
    shares = outlook.plan.quantized_share()
    acts = any(share for wire, share in shares.items() if WIRES[wire].carries == "activations")
    if outlook.phases or acts or not any(shares.values()):
        return None
    return law.predicted(outlook.config, outlook.plan)


def two_hops(outlook: Outlook) -> dict[str, int] | None:
    """Return bytes of gradients between nodes with one hop and with two, all ranks together; None
    where the recipe has two, or FSDP2's own ring serves, or a node has one GPU."""
    config, recipe = outlook.config, outlook.plan.recipe
    if outlook.phases:
        return None
    if len(recipe.hops) != 1 or min(config.cluster.nodes, config.cluster.gpus_per_node) == 1:
        return None
    if is_untouched(outlook.plan, config.engine.ordered):
        return None
    other = plan_of(replace(config, recipe=replace(config.recipe, hops=2)))
    one, two = (p.step_bytes()[INTER].inter for p in (outlook.plan, other))
    return {"one_hop": one, "two_hops": two} if two < one else None


# ---------------------------------------------------------------------- shown


def as_dict(outlook: Outlook, advice: Sequence[Advice]) -> dict[str, Any]:
    """Return everything shown, in bytes."""
    found, gap = outlook.estimate, gap_of(outlook)
    return {
        "recipe": outlook.config.recipe.name,
        "model": outlook.config.model.preset,
        "parameters": outlook.parameters,
        "nodes": outlook.config.cluster.nodes,
        "gpus_per_node": outlook.config.cluster.gpus_per_node,
        "micro_steps": outlook.config.train.micro_steps,
        "batch_size": outlook.config.train.batch_size,
        "seq_len": outlook.config.data.seq_len,
        "wires": {w: t._asdict() for w, t in outlook.plan.step_bytes().items()},
        "quantized_share": outlook.plan.quantized_share(),
        "phases": [
            {
                "after": phase.first,
                "steps": phase.steps,
                "wires": {w: t._asdict() for w, t in own.plan.step_bytes().items()},
                "quantized_share": own.plan.quantized_share(),
                "peak": own.estimate.peak,
            }
            for phase, own in zip(outlook.config.phases, outlook.phases, strict=False)
        ],
        "gap": asdict(gap) if gap else None,  # nats a token
        "items": [
            {
                "name": i.name,
                "place": i.place,
                "assumed": i.assumed,
                "outside": i.outside,
                **i.nbytes,
            }
            for i in found.items
        ],
        "gpu": {m: found.at(m) for m in MOMENTS},
        "host": found.host,
        "host_limit": outlook.host,
        "place": outlook.config.engine.place,
        "units_in_host_memory": outlook.placed,
        "deepest": _depth(outlook),
        "peak": found.peak,
        "peak_moment": found.peak_moment,
        "peak_tensors": found.tensors,
        "device": outlook.device,
        "fits": outlook.fits,
        "grads_between_nodes": two_hops(outlook),
        "advice": [
            {
                "overrides": list(a.overrides),
                "instead": a.instead,
                "peak": a.outlook.estimate.peak,
                "host": a.outlook.estimate.host,
                "fits": a.outlook.fits,
            }
            for a in advice
        ],
    }


def show(outlook: Outlook, advice: Sequence[Advice], console: Console) -> None:
    """Print what to change, and the tables."""
    for one in advice:
        line = _advice_line(one, one is advice[0], outlook.estimate.host)
        console.print(line, highlight=False)
    cluster, size = outlook.config.cluster, _size(outlook.parameters)
    split = f" ({cluster.split})" if cluster.split else ""
    console.print(
        f"{outlook.config.model.preset} ({size}), recipe "
        f"{outlook.config.recipe.name}, {cluster.nodes} × {cluster.gpus_per_node} GPUs{split}, "
        f"{sequences(outlook.config)}",
        highlight=False,
    )
    for phase, own in zip(outlook.config.phases, outlook.phases, strict=False):
        last = f"{phase.first + phase.steps}, {_gib(own.estimate.peak)} GiB at their peak"
        console.print(f"Steps {phase.first + 1} to {last}:", highlight=False)
        console.print(_wire_table(own.plan))
    if not outlook.phases:
        console.print(_wire_table(outlook.plan))
    console.print(_memory_table(outlook.estimate))
    if outlook.phases:
        console.print(NO_LAW)
    if gap := gap_of(outlook):
        console.print(_gap_line(gap, outlook.config.recipe), highlight=False)
    elif outlook.plan.memories:
        console.print(REMEMBERS)
    saved = two_hops(outlook)
    if saved:
        console.print(HOPS.format(**{k: n / 1e9 for k, n in saved.items()}), highlight=False)
    settings = outlook.config.engine
    if cluster.nodes > 1 and settings.transport == "auto":
        console.print(ONE_HOST.format(nodes=cluster.nodes), style="dim")
    for note in NOTES:
        console.print(note, style="dim")


def _show_verdict(outlook: Outlook, assumed: bool, console: Console) -> None:
    """The answer, before what it follows from."""
    found, spare = outlook.estimate, outlook.budget - outlook.estimate.peak
    tight = spare < TIGHT and not outlook.auto  # which leaves room to the allocator
    verdict = "does not fit" if not outlook.fits else "fits, tightly" if tight else "fits"
    console.print(
        f"{verdict}: {_gib(found.peak)} of {_gib(outlook.budget)} GiB a GPU at the peak, "
        f"'{found.peak_moment}'; tensors {_gib(found.tensors)}"
    )
    if assumed:
        console.print(NO_GPU)
    if spare >= 0 and tight:
        console.print(RESERVED.format(spare=_gib(spare)))
    if found.host:
        limit = "" if outlook.host is None else f" of {_gib(outlook.host)} that it may pin"
        console.print(f"In host memory, each rank: {_gib(found.host)} GiB{limit}.")
    if outlook.auto or outlook.placed:
        console.print(_place_line(outlook), highlight=False)


def _place_line(outlook: Outlook) -> str:
    """Say which units have what in host memory."""
    each = [f"{plane} of {count}" for plane, count in outlook.placed.items()]
    text = f"{', '.join(each)} of {len(outlook.plan.units)} units" if each else "nothing"
    if "masters" in outlook.placed:
        text += ", of masters the low planes"
    if "weights" in outlook.placed:
        text += ", as weights the high planes"
    text = f"In host memory: {text}."
    if not outlook.auto:
        return text
    if outlook.fits:
        text += f" The same as engine.place={written(outlook.config.engine.place)}."
    if outlook.host is None:
        text += " Assuming that host memory suffices: engine.host_gib limits it."
    if depth := _depth(outlook):
        size = _size(depth["parameters"])
        text += f" The deepest model of this width that fits has {depth['layers']} layers, {size}."
    return text


def _depth(outlook: Outlook) -> dict[str, int] | None:
    """Return layers and parameters of the deepest model that engine.place=auto makes fit."""
    auto = outlook.auto and outlook.config.model.name == "llama"
    most = deepest(outlook) if auto else None
    if most is None:
        return None
    return {"layers": most.config.model.layers, "parameters": most.parameters}


def _size(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def _gap_line(gap: law.Prediction, recipe: RecipeConfig) -> str:
    text = (
        f"From random weights held-out loss is expected {gap.gap:+.4f} nats a token from plain "
        f"ZeRO-3's ({law.CONFIDENCE:.0%}: {gap.low:+.4f} to {gap.high:+.4f}), by a scaling law "
        "fitted to zpp_lab's decoder on Python source (experiments/reference). On English prose "
        "gaps were 1.2 to 1.9 times as large."
    )
    hops = [recipe.wire(INTRA), recipe.wire(INTER)]
    if any((hop.bits or 8) <= 4 and not hop.hadamard for hop in hops):
        text += (
            " After four times the tokens, of one text read four times, that of 4-bit gradients "
            "without a rotation was 3 times as large (recipe.grads.hadamard=64 rotates them)."
        )
    if not gap.beyond:
        return text
    return f"Outside the range of the following scaling law: {'; '.join(gap.beyond)}. {text}"


def _advice_line(one: Advice, first: bool, host: int) -> str:
    """`host`: bytes of host memory that each rank takes without any advice."""
    lead = "or, without the line above:" if one.instead else "try" if first else "then"
    found = one.outlook.estimate
    after = f"{_gib(found.peak)} GiB, {'fits' if one.outlook.fits else 'too much'}"
    if found.host > host:
        after += f", {_gib(found.host)} GiB of host memory a rank"
    return f"  {lead} {' '.join(one.overrides)}  → {after}"


def sequences(config: Config) -> str:
    """Return what a GPU trains on in one step, which nobody leaves at its default."""
    train, ranks = config.train, config.cluster.tp * config.cluster.pp
    micro = f"{train.micro_steps} × " if train.micro_steps > 1 else ""
    where = "a GPU" if ranks == 1 else f"for every {ranks} GPUs"
    return f"{micro}{train.batch_size} × {config.data.seq_len} tokens {where}"


def _wire_table(plan: Plan) -> Table:
    table = Table()
    table.add_column("wire, GB a step")
    for name in ("inside nodes", "between nodes"):
        table.add_column(name, justify="right")
    table.add_column("quantized", justify="right")
    quantized = plan.quantized_share()
    for wire, traffic in plan.step_bytes().items():
        share = percents([quantized[wire]] if wire in quantized else [])
        table.add_row(wire, f"{traffic.intra / 1e9:.3f}", f"{traffic.inter / 1e9:.3f}", share)
    return table


def _memory_table(found: Estimate) -> Table:
    table = Table(title="each rank holds, GiB", title_justify="left", show_footer=True)
    table.add_column("", footer="on the GPU")
    moments = [max(some, key=found.at) for some in SHOWN]
    for moment in moments:
        table.add_column(moment, footer=_gib(found.at(moment)), justify="right")
    for item in found.items:
        if not any(item.nbytes[m] for m in moments):
            continue
        where = " (host)" if item.place == "host" else " (assumed)" if item.assumed else ""
        cells = [_gib(item.nbytes[m]) if item.nbytes[m] else "–" for m in moments]
        table.add_row(item.name + where, *cells)
    return table


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f}"
