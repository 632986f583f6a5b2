"""`zpp-lab plan`: what a run would send and hold, before anything is allocated.

The model is built on the meta device, so 32.5 billion parameters are planned on a laptop. What is
shown is a real run: engine=fsdp, one GPU a rank, whatever engine the settings name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from zpp_lab.collectives.plan import Plan
from zpp_lab.config.compose import compose
from zpp_lab.config.load import load
from zpp_lab.config.residence import Residence
from zpp_lab.config.schema import Config, RecipeConfig
from zpp_lab.config.wires import INTER, INTRA
from zpp_lab.engines.build import build_plan, vocabulary
from zpp_lab.engines.units import is_untouched
from zpp_lab.files import percents
from zpp_lab.models import build_model
from zpp_lab.study.run.places import gpu_memory
from zpp_lab.tools.plan import law
from zpp_lab.tools.plan.cost import show as time_shown
from zpp_lab.tools.plan.cost.machine import load_machine
from zpp_lab.tools.plan.cost.state import NoBus
from zpp_lab.train.memory.buffers import GIB, MOMENTS, Estimate, Moment
from zpp_lab.train.memory.estimate import estimate

DEFAULT_GIB = 80.0  # of a device where none is seen
MOST_RANKS = 4096
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


@dataclass(frozen=True)
class Outlook:
    """A run's plan and estimate against a device's memory in bytes. Of several phases those of
    the one that holds most, and each phase's own."""

    config: Config
    plan: Plan
    estimate: Estimate
    device: int
    phases: tuple[Outlook, ...] = ()

    @classmethod
    def of(cls, config: Config, device: int) -> Outlook:
        if config.recipe.phases:
            phases = tuple(cls.of(phase.config, device) for phase in config.phases)
            most = max(phases, key=lambda phase: phase.estimate.peak)
            return replace(most, config=config, phases=phases)
        vocab = vocabulary(config)
        plan = build_plan(build_model(config.model, vocab, "meta"), config)
        return cls(config, plan, estimate(plan, config, vocab), device)

    @property
    def fits(self) -> bool:
        return self.estimate.peak <= self.device

    @property
    def parameters(self) -> int:
        return sum(p.parts * p.numel for u in self.plan.units for p in u.unit.parameters)

    @cached_property
    def gap(self) -> law.Prediction | None:
        """What the recipe's bits will cost; None where it has none, or the law says nothing."""
        if self.phases or not any(self.plan.quantized_share().values()):
            return None
        return law.predicted(self.config, self.plan)


@dataclass(frozen=True)
class Advice:
    """Overrides that lower the peak, with all advice so far; `instead`: of the last one."""

    overrides: tuple[str, ...]
    outlook: Outlook
    instead: bool = False


def plan_command(
    overrides: Sequence[str],
    gpu_gib: float | None,
    as_json: bool,
    machine: str | None = None,
    link_gbps: str = "max",
) -> int:
    """Print the table or JSON. Returns 0 when the run fits, else 1. `machine`: a file or a ready
    one's name, for predicted times at `link_gbps`."""
    device, assumed = device_memory(gpu_gib)
    outlook = Outlook.of(compose(list(overrides)), device)
    advice = [] if outlook.fits else list(advise(outlook))
    known = load_machine(machine) if machine else None
    speeds = time_shown.links(link_gbps)
    timed_as = outlook.config.phases[-1].config  # of several phases the last
    times, lacking = {}, ""
    try:
        times = time_shown.times(timed_as, known, speeds) if known else {}
    except NoBus as error:
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
        if lacks := time_shown.host_lacks(known):
            console.print(lacks)
        if advised := time_shown.host_advice(timed_as, known, times):
            console.print(advised)
    return 0 if outlook.fits else 1


def device_memory(gpu_gib: float | None) -> tuple[int, bool]:
    """Return a GPU's bytes: `gpu_gib`, else of the GPU seen here, else DEFAULT_GIB; and whether
    they are that last one, which a user must hear of (NO_GPU). ValueError for no memory."""
    if gpu_gib is not None and gpu_gib <= 0:
        raise ValueError(f"--memory-gib {gpu_gib:g} (also --gpu-gib): use more than 0")
    seen = gpu_gib * GIB if gpu_gib else gpu_memory()
    return int(seen or DEFAULT_GIB * GIB), not seen


# ---------------------------------------------------------------------- advice


def advise(outlook: Outlook) -> Iterator[Advice]:
    """Yield what to change, the cheapest first, each on top of those before it, until the run fits.

    Smaller optimizer states are the first to change what is learnt. In host memory they cost time,
    and are advised where that is enough. The last two are alternatives: offload costs more time,
    more ranks cost GPUs.
    """
    for overrides in _cheap(outlook.config):
        try:
            tried = _with(outlook, overrides)
        except ValueError:  # a head that takes no loss in chunks: what cannot run is no advice
            continue
        if tried.estimate.peak < outlook.estimate.peak:
            outlook = tried
            yield Advice(overrides, outlook)
        if outlook.fits:
            return
    config = outlook.config
    if config.train.optimizer_state != "fp32" and not Residence.of(config).offloads:
        moved = ("train.optimizer_place=host",)
        tried = _with(outlook, moved)
        if tried.fits:
            yield Advice(moved, tried)
            return
    placed = _placed(outlook)
    if placed is not None:
        yield placed
        return
    offloaded = ("engine.offload=true",)
    spared = not Residence.of(config).offloads and not config.model.lora.on
    if spared:
        yield Advice(offloaded, _with(outlook, offloaded))
    more = _more_ranks(outlook)
    if more:
        yield replace(more, instead=spared)


def _cheap(config: Config) -> Iterator[tuple[str, ...]]:
    if not config.model.checkpoint_activations:
        yield ("model.checkpoint_activations=true",)
    if not config.model.loss_chunk:
        yield ("model.loss_chunk=1024",)
    batch, micro = config.train.batch_size, config.train.micro_steps
    while batch % 2 == 0:  # each takes the place of the one before it
        batch, micro = batch // 2, micro * 2  # as many tokens a step as before
        yield (f"train.batch_size={batch}", f"train.micro_steps={micro}")
    yield from _forget(config.recipe)
    kinds = ("fp32", "bf16", "8bit")
    for kind in kinds[kinds.index(config.train.optimizer_state) + 1 :]:
        yield (f"train.optimizer_state={kind}",)
    if config.train.masters == "fp32":
        yield ("train.masters=split",)


def _forget(recipe: RecipeConfig) -> Iterator[tuple[str, ...]]:
    """A first hop remembers a row for every rank, all of a model on each; the second one remembers
    as many times less as a node has ranks. Then in 8 bits."""
    wires = [recipe.wire(wire).memory for wire in (INTRA, INTER)]
    if all(memory.on for memory in wires):
        hops = ("recipe.hops=2",) if not recipe.two_hops else ()
        yield (*hops, f"recipe.{INTRA}.memory.kind=none")
    if any(memory.on and memory.store != "8bit" for memory in wires):
        yield ("recipe.grads.memory.store=8bit",)


def _placed(outlook: Outlook) -> Advice | None:
    """Move as little as suffices to host memory, with the same bits: gradients of some blocks,
    which leave while the bus is idle, then moments, then the low planes of masters. None where that
    is not enough, or cannot be."""
    counts: dict[str, int] = {}
    units = len(outlook.plan.units)

    def tried(plane: str, count: int) -> Advice | None:
        listed = ", ".join(f"{name}: {n}" for name, n in {**counts, plane: count}.items())
        overrides = (f"engine.place={{{listed}}}",)
        found = _with(outlook, overrides)
        return Advice(overrides, found) if found.fits else None

    for plane in ("gradients", "moments", "masters"):
        try:
            best = tried(plane, units)
        except ValueError:  # other settings place state, or these masters stay whole
            return None
        if best is None:
            counts[plane] = units
            continue
        low, high = 1, units  # the least that fits
        while low < high:
            middle = (low + high) // 2
            less = tried(plane, middle)
            best, low, high = (less, low, middle) if less else (best, middle + 1, high)
        return best
    return None


def _more_ranks(outlook: Outlook) -> Advice | None:
    """Twice the nodes, until it fits."""
    cluster = outlook.config.cluster
    while cluster.world < MOST_RANKS:
        cluster = replace(cluster, nodes=2 * cluster.nodes)
        overrides = (f"cluster.nodes={cluster.nodes}",)
        tried = _with(outlook, overrides)
        if tried.fits:
            return Advice(overrides, tried)
    return None


def _with(outlook: Outlook, overrides: Sequence[str]) -> Outlook:
    values = asdict(outlook.config)
    for override in overrides:
        name, _, text = override.partition("=")
        *groups, key = name.split(".")
        inner = values
        for group in groups:
            inner = inner[group]
        inner[key] = yaml.safe_load(text)
    return Outlook.of(load(Config, values), outlook.device)


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
    other = build_plan(
        build_model(config.model, vocabulary(config), "meta"),
        replace(config, recipe=replace(config.recipe, hops=2)),
    )
    one, two = (p.step_bytes()[INTER].inter for p in (outlook.plan, other))
    return {"one_hop": one, "two_hops": two} if two < one else None


# ---------------------------------------------------------------------- shown


def as_dict(outlook: Outlook, advice: Sequence[Advice]) -> dict[str, Any]:
    """Return everything shown, in bytes."""
    found = outlook.estimate
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
        "gap": asdict(outlook.gap) if outlook.gap else None,  # nats a token
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
    cluster, count = outlook.config.cluster, outlook.parameters
    size = f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
    console.print(
        f"{outlook.config.model.preset} ({size}), recipe "
        f"{outlook.config.recipe.name}, {cluster.nodes} × {cluster.gpus_per_node} GPUs, "
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
    if outlook.gap:
        console.print(_gap_line(outlook.gap, outlook.config.recipe), highlight=False)
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
    found, spare = outlook.estimate, outlook.device - outlook.estimate.peak
    verdict = "does not fit" if spare < 0 else "fits" if spare >= TIGHT else "fits, tightly"
    console.print(
        f"{verdict}: {_gib(found.peak)} of {_gib(outlook.device)} GiB a GPU at the peak, "
        f"'{found.peak_moment}'; tensors {_gib(found.tensors)}"
    )
    if assumed:
        console.print(NO_GPU)
    if 0 <= spare < TIGHT:
        console.print(RESERVED.format(spare=_gib(spare)))
    if found.host:
        console.print(f"In host memory, each rank: {_gib(found.host)} GiB.")


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
    train = config.train
    micro = f"{train.micro_steps} × " if train.micro_steps > 1 else ""
    return f"{micro}{train.batch_size} × {config.data.seq_len} tokens a GPU"


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
