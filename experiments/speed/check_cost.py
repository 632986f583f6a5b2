"""Is the cost model right? Predictions beside measurements, and projections to larger clusters.

    check_cost.py check RESULTS.csv... [--machine h200] [--set "overrides of all rows"] [--out FILE]
                  [--host-as-before BLOCKS]
    check_cost.py project [--machine h200] [--model 13b] [--out FILE]
    check_cost.py arms [--machine h200] [--out FILE]
    check_cost.py published
    check_cost.py shapes RESULTS.csv [--machine h200]

`check` takes rows with the columns of results.csv: settings are those of the column `config`, or,
where a table has none, what the other columns say with `overrides` and --set on top.
Engines without a plan of ours are left out and counted; rows of shared GPUs (ranks_per_gpu) are
predicted for such, and calls from before CUDA graphs as eager steps. Rows in which the host hardly
waited (waiting_s) are counted by themselves too: they test the host's figures, and what the
machine's file lacks of these is said. --host-as-before leaves out the two newest, as models of one
and BLOCKS blocks gave the others before. `arms`: those of run.sh at 1.3B on 2 x 2, beside the plain
FSDP2 of rows.csv. `published` asks for the shape only: the speed-up of ZeRO++ over ZeRO-3 on 384
V100 (arXiv 2306.10209), on a machine of published rates.
`shapes`: the lead of each arm over its raw twin, as measured and as predicted for the shapes of
SHAPES, as Markdown.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zpp_lab.config.compose import compose
from zpp_lab.config.load import load
from zpp_lab.config.schema import ClusterConfig, Config
from zpp_lab.files import write_atomic
from zpp_lab.study.speed.results import MAX, Measured, read_speeds, replaying
from zpp_lab.study.speed.speeds import speed_ups
from zpp_lab.tools.bench.step.arms import merged
from zpp_lab.tools.bench.step.engines import vocabulary
from zpp_lab.tools.plan.cost.machine import Machine, load_machine
from zpp_lab.tools.plan.cost.show import NODE, as_planned, host_lacks, links
from zpp_lab.tools.plan.cost.step import predict
from zpp_lab.tools.plan.cost.timeline import StepTime

HERE = Path(__file__).parent
BASE = ["engine=fsdp", "engine.graph=false", "train.param_dtype=bf16", "train.reduce_dtype=bf16"]
HARDLY = 0.05  # of a step: a host that waited less for its device was what bounded the step
RECIPES = ["zero3", "w8", "w8_2hops", "zeropp", "w4_g84h"]
Row = dict[str, str]


@dataclass(frozen=True)
class Checked:
    """A row, measured and predicted, in tokens a second."""

    row: Row
    measured: float
    predicted: float
    bound: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def check(paths: list[Path], machine: Machine, words: list[str], out: Path | None) -> int:
    """Prints each row and the median error. 1 where nothing could be checked."""
    found, left = [], []
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
            graphs = replaying(rows)
            for row in rows:
                try:
                    found.append(checked(row, machine, words, row.get("call") in graphs))
                except ValueError as error:
                    left.append(f"{row['engine']} {row['recipe']}: {error}")
    for one in found:
        print(line(one))
    for text in sorted(set(left)):
        print(f"left out: {text} ({left.count(text)})")
    if not found:
        return 1
    print(f"{len(found)} rows: {errors(found)}")
    if tight := [one for one in found if host_bound(one.row)]:
        lacks = f"; {host_lacks(machine)}" if machine.host.lacks else ""
        print(f"of these bound by the host, {len(tight)} rows: {errors(tight)}{lacks}")
    if out:
        write(out, [{**one.row, **columns(one)} for one in found])
    return 0


def errors(found: list[Checked]) -> str:
    sizes = [abs(one.error) for one in found]
    mean = statistics.mean(one.error for one in found)
    return f"median error {statistics.median(sizes):.1%}, most {max(sizes):.1%}, mean {mean:+.1%}"


def host_bound(row: Row) -> bool:
    """As the bench saw it; False in tables from before waiting_s."""
    waited = row.get("waiting_s")
    return bool(waited) and float(waited or 0) < HARDLY * float(row["step_s"])


def columns(one: Checked) -> Row:
    return {"predicted": f"{one.predicted:.6g}", "error": f"{one.error:.4f}", "bound": one.bound}


def line(one: Checked) -> str:
    row = one.row
    where = f"{row['nodes']}x{row['gpus_per_node']} {row['link_gbps']:>4} Gbit/s"
    if ranks_per_gpu(row) > 1:
        where += f", {ranks_per_gpu(row)} ranks a GPU"
    name = f"{row['engine']:6s} {row.get('arm') or row['recipe']:26s} {row['model']:6s} {where}"
    speeds = f"measured {one.measured:9,.0f} predicted {one.predicted:9,.0f} tokens/s"
    return f"{name}  {speeds} {one.error:+7.1%}  {one.bound}"


def checked(row: Row, machine: Machine, words: list[str], graphs: bool) -> Checked:
    """ValueError for a row of an engine or recipe without a plan of ours. graphs: whether its call
    replayed CUDA graphs where engine.graph says so."""
    config, speed = config_of(row, words), bandwidth(row)
    if not graphs:
        config = replace(config, engine=replace(config.engine, graph=False))
    shared = machine.shared(ranks_per_gpu(row))
    found = predict(config, shared, speed, own_loop=row["engine"] == "fsdp")
    tokens = found.tokens_per_s * found.step_s
    measured = float(row["tokens_per_s"] or tokens / float(row["step_s"]))
    return Checked(row, measured, found.tokens_per_s, found.bound)


def bandwidth(row: Row) -> float | None:
    """Gbit/s between nodes. A link without a limit is as fast as it was found to be, where the
    table says that; None: it costs no time."""
    named = links(row["link_gbps"])[0]
    if named is not None or int(row["nodes"]) == 1 or not row.get("measured_gbps"):
        return named
    return float(row["measured_gbps"])


def ranks_per_gpu(row: Row) -> int:
    """Above 1 where nodes shared GPUs; tables from before that say nothing of it."""
    return int(row.get("ranks_per_gpu") or 1)


def config_of(row: Row, more: list[str]) -> Config:
    engine, recipe = row["engine"], row["recipe"]
    if engine not in ("fsdp2", "fsdp"):
        raise ValueError("no plan of ours")
    if row.get("config"):
        return recorded(row)
    words = [*BASE, f"model={row['model']}"]
    words += [f"cluster.nodes={row['nodes']}", f"cluster.gpus_per_node={row['gpus_per_node']}"]
    words += [f"data.seq_len={row['seq_len']}", f"train.batch_size={row['batch_size']}"]
    own = (row.get("overrides") or "").split()
    return compose(merged(words, recipe_words(engine, recipe), own, more))


def recorded(row: Row) -> Config:
    """The config of a row of `bench step`, which has a vocabulary of its own for small models."""
    config = as_planned(load(Config, nested(json.loads(row["config"]))), row["recipe"])
    return replace(config, model=replace(config.model, vocab_size=vocabulary(config)))


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Dotted names as groups."""
    found: dict[str, Any] = {}
    for name, value in flat.items():
        *groups, key = name.split(".")
        place = found
        for group in groups:
            place = place.setdefault(group, {})
        place[key] = value
    return found


def recipe_words(engine: str, recipe: str) -> list[str]:
    if engine == "fsdp2" and recipe == NODE:
        return ["recipe=zero3", "recipe.secondary=true"]
    if engine == "fsdp2":
        return ["recipe=zero3"]
    return BEYOND.get(recipe, [f"recipe={recipe}"])


BEYOND = {  # no recipes of conf/, but arms of run.sh or of projections
    "w8_2hops": ["recipe=w8", "recipe.hops=2"],
    "w4_g84h": [
        "recipe=zeropp",
        "recipe.weights.bits=4",
        "recipe.grads_intra.bits=8",
        "recipe.grads_inter.bits=4",
        "recipe.grads.hadamard=64",
    ],
}


def project(machine: Machine, model: str, out: Path | None) -> int:
    """Tokens a second and GPU by recipe, for 16 to 1024 GPUs in nodes of eight."""
    rows: list[Row] = []
    for gpus in (16, 32, 64, 128, 256, 512, 1024):
        for gbps in (100.0, 400.0, 3200.0):
            row = {"model": model, "gpus": str(gpus), "link_gbps": f"{gbps:g}"}
            for recipe in RECIPES:
                words = [*BASE, f"model={model}", *recipe_words("fsdp", recipe)]
                words += ["cluster.gpus_per_node=8"]
                words += [f"cluster.nodes={gpus // 8}", "data.seq_len=2048", "train.batch_size=2"]
                found = predict(compose(words), machine, gbps)
                row[recipe] = f"{found.tokens_per_s / gpus:.0f}"
            rows.append(row)
            print("  ".join(f"{key} {value:>6}" for key, value in row.items()), flush=True)
    if out:
        write(out, rows)
    return 0


def arms(machine: Machine, out: Path | None) -> int:
    """Tokens a second, over the measured FSDP2, and the share of the floor: the larger of compute
    and the links' bytes at their named speed."""
    with (HERE / "rows.csv").open() as file:
        plain = [r for r in csv.DictReader(file) if (r["model"], r["nodes"]) == ("1_3b", "2")]
    measured = {
        r["link_gbps"]: r for r in plain if (r["engine"], r["recipe"]) == ("fsdp2", "zero3")
    }
    rows: list[Row] = []
    for arm in ("zeropp", "w4_g84h"):
        for gbps, fsdp2 in measured.items():
            words = [*BASE, "model=1_3b", "cluster=2x2", *recipe_words("fsdp", arm)]
            words += ["data.seq_len=2048", "train.batch_size=1", *fsdp2["overrides"].split()]
            found = predict(compose(words), machine, float(gbps))
            floor = max(found.compute_s, found.inter_s * machine.inter.efficiency)
            row = {"recipe": arm, "link_gbps": gbps, "tokens_per_s": f"{found.tokens_per_s:.0f}"}
            row["over_fsdp2"] = f"{found.tokens_per_s / float(fsdp2['tokens_per_s']):.2f}"
            row |= {"step_s": f"{found.step_s:.4f}", "floor_s": f"{floor:.4f}"}
            rows.append(row | {"of_floor": f"{floor / found.step_s:.3f}"})
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if out:
        write(out, rows)
    return 0


SHAPES = ((2, 1), (4, 1), (2, 4), (8, 8))  # nodes, GPUs of each


def shapes(path: Path, machine: Machine) -> int:
    """Prints the table. 1 where no arm has a twin."""
    measured = read_speeds(path)
    pairs = [(up.at, up.twin) for up in speed_ups(measured) if up.twin and up.at.link != MAX]
    if not pairs:
        print(f"{path}: no arm has a raw twin; measure again with `zpp-lab bench step`")
        return 1
    names = [f"{nodes} × {gpus}, predicted" for nodes, gpus in SHAPES]
    head = ["arm over its twin", "Gb/s", "measured on", "measured", *names]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    left_out: dict[str, str] = {}
    for arm, raw in pairs:
        cells = [f"{arm.arm} over {raw.arm}", arm.link, shape_of(arm)]
        cells.append(f"{arm.tokens_per_s / raw.tokens_per_s:.2f}")
        try:
            cells += [f"{lead(arm, raw, shape, machine):.2f}" for shape in SHAPES]
        except ValueError as error:  # a codec that the machine's file lacks
            left_out[arm.arm] = str(error)
            cells += [""] * len(SHAPES)
        print("| " + " | ".join(cells) + " |")
    for name, why in left_out.items():
        print(f"not predicted: {name}: {why}")
    return 0


def shape_of(one: Measured) -> str:
    return f"{one.setting.nodes} × {one.setting.gpus_per_node}"


def lead(arm: Measured, raw: Measured, shape: tuple[int, int], machine: Machine) -> float:
    """How many times as fast as its twin the cost model has an arm on another shape."""
    rates = []
    for one in (arm, raw):
        config = load(Config, one.config or {})
        config = replace(config, model=replace(config.model, vocab_size=vocabulary(config)))
        config = replace(config, cluster=ClusterConfig(*shape))
        rates.append(predict(config, machine, float(one.link)).tokens_per_s)
    return rates[0] / rates[1]


PUBLISHED = {100.0: (1.77, 2.21), 400.0: (1.41, 1.56)}  # Gbit/s of a node: least and most


def published() -> int:
    """24 nodes of 16 V100, models of 18B and 49B parameters, one or two thousand tokens a GPU:
    with transfers hidden as FSDP2 hides them, and with nothing hidden at all."""
    machine = load_machine(str(HERE / "v100.json"))
    print("Gbit/s  hidden         one by one     published")
    for gbps in (100.0, 200.0, 400.0, 800.0):
        shapes = [(width, depth, batch) for width, depth in V100 for batch in (1, 2)]
        pairs = [[step_v100(machine, r, *s, gbps) for r in ("zero3", "zeropp")] for s in shapes]
        hidden = [plain.step_s / ours.step_s for plain, ours in pairs]
        by_one = [alone(plain) / alone(ours) for plain, ours in pairs]
        said = "{:.2f} to {:.2f}".format(*PUBLISHED[gbps]) if gbps in PUBLISHED else "-"
        ranges = [f"{min(ups):.2f} to {max(ups):.2f}" for ups in (hidden, by_one)]
        print(f"{gbps:6g}  {ranges[0]:13s}  {ranges[1]:13s}  {said}")
    return 0


V100 = ((6144, 40), (8192, 60))  # widths and depths


def alone(step: StepTime) -> float:
    """Seconds when nothing runs beside anything else."""
    return step.compute_s + step.codec_s + step.optimizer_s + step.intra_s + step.inter_s


def step_v100(
    machine: Machine, recipe: str, width: int, depth: int, batch: int, gbps: float
) -> StepTime:
    words = [*BASE, "model=13b", f"model.dim={width}", f"model.layers={depth}", f"recipe={recipe}"]
    words += [f"model.ffn={8 * width // 3 // 64 * 64}", "model.loss_chunk=0", "data.seq_len=1024"]
    words += [f"model.{heads}={width // 128}" for heads in ("heads", "kv_heads")]
    words += ["cluster.nodes=24", "cluster.gpus_per_node=16", f"train.batch_size={batch}"]
    return predict(compose(words), machine, gbps)


def write(path: Path, rows: list[Row]) -> None:
    names = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, text.getvalue())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("what", choices=["check", "project", "arms", "published", "shapes"])
    parser.add_argument("results", type=Path, nargs="*")
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--model", default="13b")
    parser.add_argument("--set", default="", help="check: overrides that all rows were made with")
    parser.add_argument("--host-as-before", type=int, metavar="BLOCKS")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.what == "published":
        return published()
    machine = load_machine(args.machine)
    if args.host_as_before is not None:
        machine = replace(machine, host=machine.host.as_before(args.host_as_before))
    if args.what == "project":
        return project(machine, args.model, args.out)
    if args.what == "arms":
        return arms(machine, args.out)
    if args.what == "shapes":
        return shapes(args.results[0] if args.results else HERE / "results.csv", machine)
    return check(args.results or [HERE / "rows.csv"], machine, args.set.split(), args.out)


if __name__ == "__main__":
    sys.exit(main())
