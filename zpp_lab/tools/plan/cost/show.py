"""`zpp-lab plan --machine`: predicted seconds of a step at several speeds of the links.

`predictions` says the same of arms that were measured, for the curves next to their points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from rich.table import Table

from zpp_lab.config.load import load, written
from zpp_lab.config.parser import link_name
from zpp_lab.config.parser import links as links
from zpp_lab.config.residence import Residence
from zpp_lab.config.schema import Config, EngineConfig
from zpp_lab.study.speed.results import BASE, MAX, Measured, Predicted, Setting
from zpp_lab.tools.plan.cost.machine import Machine, load_machine
from zpp_lab.tools.plan.cost.step import predict, replays
from zpp_lab.tools.plan.cost.timeline import HOST, StepTime

Link = float | None  # Gbit/s of a node; None: no limit but the links inside nodes
ROWS = {
    "step": "step_s",
    "  model": "compute_s",
    "  codecs": "codec_s",
    "  norm, update": "optimizer_s",
    "  GPU waits": "exposed_s",
    "busy: in nodes": "intra_s",
    "busy: between": "inter_s",
    "busy: bus": "bus_s",
    "busy: host": "host_s",
    "tensor parts add": "parts_s",
    "stages wait": "stages_s",
}
WHERE_ANY = "bus_s", "parts_s", "stages_s"  # rows of some runs alone
POINTS = 24  # of a curve, evenly spread over the logarithm of the bandwidth


def times(config: Config, machine: Machine, speeds: Sequence[Link]) -> dict[str, StepTime]:
    """Predict by link, in the order given."""
    return {link_name(link): predict(config, machine, link) for link in speeds}


def as_dict(config: Config, found: dict[str, StepTime], machine: Machine) -> dict[str, Any]:
    links = {link: asdict(t) for link, t in found.items()}
    return {"machine": machine.name, "graph": replays(config), "links": links}


def table(found: dict[str, StepTime], machine: Machine) -> Table:
    """Return a column a link. Indented rows add up to the step, which links overlap."""
    made = Table(title=f"predicted on {machine.name}, ms", title_justify="left")
    made.add_column("Gbit/s")
    for link in found:
        made.add_column(link, justify="right")
    for name, attribute in ROWS.items():
        if attribute in WHERE_ANY and not any(getattr(t, attribute) for t in found.values()):
            continue
        made.add_row(name, *(f"{1000 * getattr(t, attribute):.1f}" for t in found.values()))
    made.add_row("tokens/s", *(f"{t.tokens_per_s:,.0f}" for t in found.values()))
    made.add_row("bound by", *(t.bound for t in found.values()))
    return made


def placed_line(
    config: Config, machine: Machine, found: dict[str, StepTime], pinned: int
) -> str | None:
    """Say what state in host memory costs: `pinned` bytes of each rank. None where none passes."""
    if machine.bus is None or not any(time.bus_s for time in found.values()):
        return None
    link, first = next(iter(found.items()))
    engine, train = replace(config.engine, place="device"), config.train
    near = replace(config, engine=engine, train=replace(train, optimizer_place="device"))
    here = predict(near, machine, _gbps(link)).step_s
    text = f"Pinning {pinned / 2**30:.1f} GiB a rank takes about "
    text += f"{machine.bus.pin_s_per_gib * pinned / 2**30:.0f} s at the start. "
    text += f"With all state on the GPU, if it held it, a step would take {1000 * here:.1f} ms"
    if link != MAX:
        text += f" at {link}"
    if first.flush_s:
        text += (
            ". After the last step, and before an evaluation or a checkpoint, the update is hidden "
            f"by no forward: {1000 * first.flush_s:.0f} ms"
        )
    return f"{text}."


def host_lacks(machine: Machine) -> str | None:
    """Say what is assumed for figures of the host that an older file lacks."""
    if not machine.host.lacks:
        return None
    return (
        f"The figures of {machine.name} lack {' and '.join(machine.host.lacks)}: assuming that "
        "recomputing a block takes the host as long as its forward, and that an update takes the "
        "same time at any depth. Where the host is the bound, predicted steps are too short; "
        "`zpp-lab bench calibrate` measures both."
    )


def graph_line(config: Config, machine: Machine, found: dict[str, StepTime]) -> str:
    """Say whether a CUDA graph is assumed and what it gains where the host bounds eager steps."""
    engine, speeds = config.engine, [_gbps(link) for link in found]
    if engine.device == "cpu":
        return "Without a CUDA graph: engine.device=cpu."
    if obstacle := Residence.of(config).obstacle:
        return f"Without a CUDA graph: {obstacle}."
    if config.cluster.pp > 1:
        return "Without a CUDA graph: stages exchange in every step."
    graph: bool | Literal["auto"] = False if replays(config) else "auto"
    other = times(replace(config, engine=replace(engine, graph=graph)), machine, speeds)
    eager = found if graph else other
    text = "Without a CUDA graph" if graph else "With a CUDA graph of forward and backward"
    text += f" (engine.graph={written(engine.graph)})"
    tight = [link for link, time in eager.items() if time.bound == HOST]
    if not tight:
        return f"{text}."
    each, setting = ", ".join(f"{1000 * other[link].step_s:.1f}" for link in tight), written(graph)
    return (
        f"{text}. Eager steps are bound by the host at {', '.join(tight)}: with "
        f"engine.graph={setting}, {each} ms there."
    )


def host_advice(config: Config, machine: Machine, found: dict[str, StepTime]) -> str | None:
    """Return what to do where the host is the bound; None where it is nowhere."""
    tight = [link for link, time in found.items() if time.bound == HOST]
    if not tight:
        return None
    text = (
        f"Bound by the host at {', '.join(tight)}: fewer bits do not help there, and measured "
        "steps were up to 60 % longer than predicted (experiments/speed). More tokens in a pass "
        "(train.batch_size) give each launch more to do"
    )
    engine, speeds = config.engine, [_gbps(k) for k in tight]
    if engine.blocks_per_unit == 1:
        larger = replace(engine, blocks_per_unit=4)
        text += _then("engine.blocks_per_unit=4", larger, config, machine, speeds)
    if not engine.compile and (config.cluster.tp == 1 or config.model.name != "hf"):
        compiled = replace(engine, compile=True)
        text += _then("engine.compile=true", compiled, config, machine, speeds) or (
            "; engine.compile=true needs fewer launches"  # nobody has measured how many
        )
    return f"{text}."


def _gbps(link: str) -> Link:
    return None if link == MAX else float(link)


def _then(
    setting: str, engine: EngineConfig, config: Config, machine: Machine, speeds: Sequence[Link]
) -> str:
    """What a step would take with `engine`; nothing where the machine's file has no figures."""
    try:
        found = times(replace(config, engine=engine), machine, speeds)
    except ValueError:
        return ""
    each = ", ".join(f"{1000 * time.step_s:.1f}" for time in found.values())
    return f"; with {setting}, {each} ms by the same figures"


NODE = "zero3 + reshard to node"  # FSDP2's own hpZ: backward gathers in the node


def predictions(measured: Sequence[Measured], machine: str) -> tuple[list[Predicted], list[str]]:
    """Return (predictions, why others have none): at every measured link and between the outer
    ones.

    machine: a file of figures, or the name of one in conf/machine; ValueError where it is neither.
    Predicted are plain FSDP2 and the arms of this package's own engine, where nodes shared GPUs
    on GPUs shared alike.
    """
    figures = load_machine(machine)
    groups: dict[tuple[Setting, str], list[Measured]] = {}
    for one in measured:
        groups.setdefault((one.setting, one.arm), []).append(one)
    found: list[Predicted] = []
    faults: dict[str, None] = {}
    for (setting, arm), group in groups.items():
        try:
            found += _curve(setting, arm, group, figures.shared(setting.ranks_per_gpu))
        except ValueError as error:
            faults[f"{arm} has no prediction: {error}."] = None
    return found, list(faults)


def _curve(
    setting: Setting, arm: str, group: Sequence[Measured], machine: Machine
) -> list[Predicted]:
    one = group[0]
    if one.engine not in ("fsdp", BASE):
        raise ValueError("the cost model covers only FSDP2 and engine=fsdp")
    if one.config is None:
        raise ValueError("the table does not say its config")
    config = as_planned(load(Config, one.config), one.recipe)
    from zpp_lab.tools.bench.step.engines import vocabulary  # loads FSDP

    config = replace(config, model=replace(config.model, vocab_size=vocabulary(config)))
    links, own_loop = _links([m.gbps for m in group]), one.engine != BASE
    return [
        Predicted(setting, arm, link, predict(config, machine, link, own_loop).tokens_per_s)
        for link in links
    ]


def as_planned(config: Config, recipe: str) -> Config:
    """Return the config of a measured arm as the cost model knows it."""
    if recipe.startswith(NODE):  # with a graph or without
        config = replace(config, recipe=replace(config.recipe, secondary=True))
    return config


def _links(measured: Sequence[float | None]) -> list[float | None]:
    """The measured bandwidths, rising, with points between them; None where there is no link."""
    known = sorted(gbps for gbps in measured if gbps is not None)
    links: list[float | None] = [None] if None in measured else []
    if not known:
        return links
    low, high = math.log(known[0]), math.log(known[-1])
    between = [math.exp(low + (high - low) * i / POINTS) for i in range(1, POINTS)]
    return [*links, *sorted({*known, *between})]
