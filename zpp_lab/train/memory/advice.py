"""What to change where a run does not fit, and what engine.place=auto means to a run.

A run keeps its first placement: a start that finds a checkpoint reads it from config.yaml.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import yaml

from zpp_lab.config.compose import run_dir
from zpp_lab.config.load import load, written
from zpp_lab.config.residence import Residence, movable
from zpp_lab.config.schema import Config, RecipeConfig
from zpp_lab.config.wires import INTER, INTRA
from zpp_lab.files import CONFIG, read_yaml
from zpp_lab.runs.provenance import gpu_memory, memory_bytes
from zpp_lab.train.memory.buffers import GIB
from zpp_lab.train.memory.outlook import Outlook, described, host_part

MOST_RANKS = 4096


@dataclass(frozen=True)
class Advice:
    """Overrides that lower the peak, with all advice so far; `instead`: of the last one."""

    overrides: tuple[str, ...]
    outlook: Outlook
    instead: bool = False


def advise(outlook: Outlook) -> Iterator[Advice]:
    """Yield what to change, the cheapest first, each on top of those before it, until the run fits.

    Smaller optimizer states are the first to change what is learnt. State in host memory costs
    time, and is advised where that is enough. The last ones are alternatives: offload costs more
    time, clipping by unit is another rule, adapters train less, more ranks cost GPUs.
    """
    gpu = (
        outlook.over[0] > 0 or not outlook.auto
    )  # else host memory lacks, which batches are not in
    for overrides in _cheap(outlook.config, outlook.auto):
        if overrides[0].startswith("train.batch_size") and not gpu:
            continue
        tried = _tried(outlook, overrides)
        if tried is not None and sum(tried.over) < sum(outlook.over):
            outlook = tried
            yield Advice(overrides, outlook)
        if outlook.fits:
            return
    config, auto = outlook.config, ("engine.place=auto",)
    placed = None if outlook.auto else _tried(outlook, auto)
    if placed is not None and placed.fits:
        yield Advice(auto, placed)
        return
    last: list[Advice] = []
    offloaded = ("engine.offload=true",)
    spared = _tried(outlook, offloaded) if not Residence.of(config).offloads else None
    if spared is not None:
        last.append(Advice(offloaded, spared))
    clipped = ("train.clip_by=unit",)
    unstored = _tried(outlook, clipped) if config.train.clip_by == "norm" else None
    if unstored is not None and unstored.fits:
        last.append(Advice(clipped, unstored))
    last += filter(None, [_adapters(outlook)])
    last += filter(None, [_more_ranks(outlook)])
    for i, one in enumerate(last):
        yield replace(one, instead=i > 0)


def too_large(outlook: Outlook) -> str:
    """Say by how much a run with engine.place=auto does not fit, and what would."""
    ways = []
    before: dict[str, str] = {}  # of several values of a setting the last
    same = before
    for one in advise(outlook):
        before = before if one.instead else same
        same = before | {word.partition("=")[0]: word for word in one.overrides}
        if one.outlook.fits:
            need = one.outlook.estimate
            ways.append(
                f"{' '.join(same.values())} ({need.peak / GIB:.1f} GiB a GPU, "
                f"{need.host / GIB:.1f} GiB of host memory a rank)"
            )
    gpu, host = (nbytes / GIB for nbytes in outlook.over)
    short = [f"{gpu:.1f} GiB a GPU"] * (gpu > 0) + [f"{host:.1f} GiB of host memory"] * (host > 0)
    return (
        f"engine.place=auto: the run does not fit: {' and '.join(short)} too many (with "
        f"{described(outlook)}): use {', or '.join(ways) or 'a smaller model'}; `zpp-lab plan` "
        "lists what each rank holds, and engine.gpu_gib and engine.host_gib say what there is"
    )


def _cheap(config: Config, auto: bool) -> Iterator[tuple[str, ...]]:
    if auto and not movable(config.train):  # with two planes host memory can have state
        yield ("train.masters=split",)
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


def _adapters(outlook: Outlook) -> Advice | None:
    """Adapters on the weights that a run begins with, frozen, and if need be in 4 bits."""
    model, rank = outlook.config.model, "model.lora.rank=16"
    for more in ((), ("model.lora.base_codec.bits=4",)):
        if not model.lora.on and (model.weights == "pretrained" or model.start):
            tried = _tried(outlook, (rank, *more))
            if tried is not None and tried.fits:
                return Advice((rank, *more), tried)
    return None


def _more_ranks(outlook: Outlook) -> Advice | None:
    """Twice the nodes, until it fits."""
    cluster = outlook.config.cluster
    while cluster.world < MOST_RANKS:
        cluster = replace(cluster, nodes=2 * cluster.nodes)
        overrides = (f"cluster.nodes={cluster.nodes}",)
        tried = _tried(outlook, overrides)
        if tried is not None and tried.fits:
            return Advice(overrides, tried)
    return None


def _tried(outlook: Outlook, overrides: Sequence[str]) -> Outlook | None:
    """Return the outlook with other settings; None where they are refused, such as a loss in chunks
    by a head that takes none: what cannot run is no advice."""
    values = asdict(outlook.config)
    if outlook.auto:
        values["engine"]["place"] = "auto"
    for override in overrides:
        name, _, text = override.partition("=")
        *groups, key = name.split(".")
        inner = values
        for group in groups:
            inner = inner[group]
        inner[key] = yaml.safe_load(text)
    try:
        return Outlook.of(load(Config, values), outlook.device, outlook.host)
    except ValueError:
        return None


def settled(config: Config) -> tuple[Config, str]:
    """Return a run's settings with what engine.place=auto means on this machine, and a line on it;
    "" where nothing was to be chosen. ValueError where the run does not fit."""
    engine = config.engine
    if engine.place != "auto":
        return config, ""
    kept = _kept(config)
    if kept is not None:
        return _with(config, kept), f"engine.place=auto: {written(kept)}, as this run began"
    seen = torch.cuda.is_available() and engine.device != "cpu"
    gib = engine.gpu_gib or (gpu_memory() or 0) / GIB * seen
    if seen and not gib:
        raise ValueError(
            "engine.place=auto: this machine does not say how large its GPUs are: set "
            "engine.gpu_gib"
        )
    if not gib or engine.name != "fsdp":
        return _with(config, "device"), "engine.place=auto: device, as no GPU is used"
    there = engine.host_gib * GIB if engine.host_gib else memory_bytes()
    outlook = Outlook.of(config, int(gib * GIB), host_part(config, there))
    if not outlook.fits:
        raise ValueError(too_large(outlook))
    return outlook.config, f"engine.place=auto: {described(outlook)}"


def _kept(config: Config) -> Any:
    """Return the placement of a run that has a checkpoint to resume from; None without one."""
    folder = run_dir(config)
    saved = folder / "checkpoints"
    if not config.run.resume or not saved.is_dir() or not any(saved.iterdir()):
        return None
    stored = read_yaml(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    engine = stored.get("engine") if isinstance(stored, Mapping) else None
    place = engine.get("place") if isinstance(engine, Mapping) else None
    return None if place == "auto" else place


def _with(config: Config, place: Any) -> Config:
    return replace(config, engine=replace(config.engine, place=place))
