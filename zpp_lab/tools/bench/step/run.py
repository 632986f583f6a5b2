"""`zpp-lab bench step`: training steps of several recipes over links of several speeds.

    zpp-lab bench step --nodes 2 --gpus-per-node 2 --link-gbps 12,25,50,max \\
        --recipes fsdp2,zeropp model=1_3b data.seq_len=2048 train.batch_size=1

Several nodes are network namespaces of this host (Linux, root), joined by links of each named speed
in turn; GPUs of a node keep NVLink. Each link is measured first. Words of --recipes: a recipe of
conf/recipe, fsdp2, fsdp2+node, hsdp, fsdp2+groups, tp, tp+async, compute, and these with +graph:
from one CUDA graph a step; for anything else `--arm "NAME: overrides"`. What follows are overrides
of `zpp-lab train`; tokens are random. With cluster.tp the plain arms are tp and tp+async, torch's
own compiled tensor parallelism; with cluster.pp there is none.

Speeds are compared with the strongest plain FSDP2 and with an arm's raw twin, which has the same
sharding and no codec. Both are added unless --no-twins is given. Arms take turns in the same
processes, several rounds for each link: one step that is not counted, then some that are.
Where arms replay a CUDA graph (engine.graph), plain FSDP2 is timed with and without one.

--share-gpus lets nodes share GPUs where these are fewer than ranks, through MPS (a private daemon)
or, with =time-slices, without it. Computing then takes as many times longer, and links do not; rows
say so in ranks_per_gpu.

Into --out go results.csv (a row an arm and link, with its floor), one JSON file a shape with every
step, and the ranks' logs; `zpp-lab report` shows them, with a study's losses by `--speed OUT`. An
arm that fails or exceeds --limit costs only itself. --apart gives each arm processes of its own,
for models of which a GPU cannot hold several.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from zpp_lab.config.parser import Parser, link_name, links, whole
from zpp_lab.config.schema import ClusterConfig
from zpp_lab.runs.provenance import commit, machine_facts, versions
from zpp_lab.tools.bench.step import results
from zpp_lab.tools.bench.step.arms import (
    COMPUTE,
    FLOORS,
    KERNELS,
    Arm,
    arms,
    compared,
    paired,
    sessions,
    with_compute,
)
from zpp_lab.tools.bench.step.session import Session, SessionError
from zpp_lab.tools.links.network import MTU, bucket
from zpp_lab.tools.links.nodes import EmulatedNodes, hosts
from zpp_lab.tools.links.probe import LinkReport, probe
from zpp_lab.train.launch.gpus import (
    OPTION,
    SHARES,
    Placement,
    place,
    served,
    share_words,
    visible_gpus,
)
from zpp_lab.train.launch.mps import find_control
from zpp_lab.train.launch.ranks import Hosts, nccl_settings

Link = float | None
MEMORY = "out of memory"  # in what torch says when a GPU has none left
TIMING = 1 / 3  # of a session's time is kept from building arms
LATE = "no time was left to build it: use a larger --budget, fewer arms or --apart"
APART = "all arms of a session are in memory together: add --apart, which times one at a time"


@dataclass(frozen=True)
class Pace:
    """How much is timed: see `tools/bench/step/run.py`. ValueError for what cannot be."""

    steps: int
    rounds: int
    turn_seconds: float
    limit: float
    budget: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ValueError(f"--{name.replace('_', '-')} {value:g}: use more than 0")

    def steps_of(self, seconds: float) -> int:
        """Return how many steps of so many seconds a turn times."""
        return max(1, min(self.steps, int(self.turn_seconds / max(seconds, 1e-9))))


class OutOfTime(Exception):
    """The whole bench has used its budget."""


class StepBench:
    """Times `arms` on `hosts` and writes into `folder` after every turn."""

    def __init__(
        self,
        hosts: Hosts,
        placement: Placement,
        arms: Sequence[Arm],
        pace: Pace,
        folder: Path,
        probes: bool = True,
        tag: str = "",
    ) -> None:
        self.hosts, self.placement, self.arms, self.pace = hosts, placement, list(arms), pace
        self.cluster = cluster = placement.cluster
        self.folder, self.probes = folder, probes and isinstance(hosts, EmulatedNodes)
        self.shape = f"{cluster.nodes}x{cluster.gpus_per_node}"
        shared = "shared" if placement.share else ""
        self.name = "-".join(word for word in (self.shape, shared, tag) if word)  # of files
        self.compute_known = bool(tag) and self._has_compute(
            results.read_rows(folder / "results.csv")
        )
        self.cells: dict[tuple[str, Link], results.Cell] = {}
        self.turns: dict[tuple[str, Link], int] = {}
        self.links: dict[Link, LinkReport] = {}
        self.failed: dict[str, str] = {}
        self.facts: dict[str, Any] = {}
        self.stopped = False
        self.call = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.serving = ExitStack()
        self.served: Placement | None = None  # with MPS running, where ranks share GPUs by it
        self.machine = machine_facts()  # asks the driver: once is enough
        self.deadline = time.monotonic() + pace.budget
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, links: Sequence[Link]) -> None:
        """Time all cells. Failures of arms are kept in `failed`; a used-up budget in `stopped`."""
        for link in links:  # what this kernel cannot limit is told before ranks start
            self.hosts.limit(link)
        try:
            for arms in sessions(self.arms):
                left = arms
                while left:
                    left = self._session(left, links)
        except OutOfTime:
            self.stopped = True
            print(
                f"stopped after {self.pace.budget:g} s (--budget); finished measurements are saved"
            )
        finally:
            self._end_service()
            self._write()

    def _session(self, arms: list[Arm], links: Sequence[Link]) -> list[Arm]:
        """Time the arms in processes of their own; those that are left when one has failed."""
        self._patience()  # no ranks start after the budget's end
        self.hosts.limit(None)  # until the arms are built
        active: list[str] = [arms[0].name]  # who is to blame
        try:
            session = self._started(arms)
        except SessionError as error:
            self.failed.update({arm.name: str(error) for arm in arms})
            return []
        try:
            self.facts = session.ask(self._patience(), "facts")[0]
            kept = self._left() * TIMING
            for number, arm in enumerate(arms):
                if number and self._left() < kept:
                    self.failed.update({late.name: LATE for late in arms[number:]})
                    arms = arms[:number]
                    break
                active[:] = [arm.name]
                session.ask(self._patience(), "build", arm=number)
                if arm.name in FLOORS:
                    for round_ in range(self.pace.rounds):
                        self._turn(session, number, arm, None, round_)
                    session.ask(self._patience(), "drop", arm=number)
            for link in links:
                self._limit(link)
                for round_ in range(self.pace.rounds):
                    for number, arm in enumerate(arms):
                        if arm.name in FLOORS:
                            continue
                        active[:] = [arm.name]
                        self._turn(session, number, arm, link, round_)
                self._show(link)
        except SessionError as error:
            session.kill()
            self._end_service()
            self.failed[active[0]] = _reason(error, alone=len(arms) == 1)
            return [arm for arm in arms if arm.name != active[0] and not self._timed_compute(arm)]
        except BaseException:
            session.kill()
            raise
        session.close()
        return []

    def _timed_compute(self, arm: Arm) -> bool:
        return arm.name in FLOORS and self.turns.get((arm.name, None), 0) >= self.pace.rounds

    def _started(self, arms: list[Arm]) -> Session:
        """Ranks that have met. Sessions that end well share one MPS daemon, as ranks that start
        while another daemon ends may not find theirs; where they do not, a new one serves a second
        attempt. SessionError when that fails, too."""
        session = arms[0].session.replace(" ", "-")
        folder = self.folder / "logs" / f"{self.name}-{session}-{len(self.failed)}"
        for again in (self.placement.share == "mps", False):
            try:
                return Session(self.hosts, self._service(), arms, folder)
            except SessionError:
                self._end_service()
                if not again:
                    raise
        raise AssertionError("unreachable: the second attempt returns or raises")

    def _service(self) -> Placement:
        """The placement with MPS running, where its ranks share GPUs by it."""
        if self.served is None:
            self.served = self.serving.enter_context(served(self.placement))
        return self.served

    def _end_service(self) -> None:
        """A daemon whose clients were killed may not serve others."""
        self.serving.close()
        self.served = None

    def _patience(self) -> float:
        """Seconds that a command may take."""
        left = self._left()
        if left <= 0:
            raise OutOfTime
        return min(self.pace.limit, left + 5.0)

    def _left(self) -> float:
        return self.deadline - time.monotonic()

    def _limit(self, link: Link) -> None:
        self.hosts.limit(link)
        if self.probes and link not in self.links and isinstance(self.hosts, EmulatedNodes):
            report = self.links[link] = probe(self.hosts, link)
            print(
                f"link {link_name(link)}: {report.gbps_there:.2f} there, {report.gbps_back:.2f} "
                f"back, {report.gbps_both:.2f} Gb/s both ways, {report.latency_us:.0f} us",
                flush=True,
            )
            if report.warning:
                print(f"warning: {report.warning}", flush=True)

    def _turn(self, session: Session, number: int, arm: Arm, link: Link, round_: int) -> None:
        """One turn of one arm; skipped when an earlier session has had it."""
        if self.turns.get((arm.name, link), 0) > round_:
            return
        # the last step of the arm before may still send its new weights, on this arm's link
        session.ask(self._patience(), "drain")
        warm = session.ask(self._patience(), "steps", arm=number, steps=1)
        steps = self.pace.steps_of(max(a["seconds"][0] for a in warm))
        nodes = range(self.cluster.nodes)
        before = [self.hosts.sent(node) for node in nodes]
        again = sum(self.hosts.resent(node) for node in nodes)
        answers = session.ask(self._patience(), "steps", arm=number, steps=steps)
        sent = max(self.hosts.sent(node) - before[node] for node in nodes) / steps
        cell = self.cells.setdefault((arm.name, link), results.Cell())
        cell.seconds += [max(times) for times in zip(*(a["seconds"] for a in answers), strict=True)]
        waited = zip(*(a["waiting"] for a in answers), strict=True)
        cell.waiting += [min(times) for times in waited if None not in times]
        cell.wires = answers[0]["bytes"]
        cell.replayed &= all(a["replayed"] for a in answers)
        if self.hosts.interface is not None:
            cell.sent.append(sent)
            again = sum(self.hosts.resent(node) for node in nodes) - again
            cell.resent.append(again / steps)
        peaks = [a["peak"] for a in answers if a["peak"] is not None]
        cell.peak = max([*peaks, cell.peak or 0]) if peaks else None
        self.turns[arm.name, link] = round_ + 1
        self._write()

    # ------------------------------------------------------------------ what came out

    def rows(self) -> list[results.Row]:
        by_name = {arm.name: arm for arm in self.arms}
        return [self._row(by_name[name], link, cell) for (name, link), cell in self.cells.items()]

    def _row(self, arm: Arm, link: Link, cell: results.Cell) -> results.Row:
        config, step = arm.config, median(cell.seconds)
        train, nodes = config.train, self.cluster.nodes
        tokens = train.batch_size * config.data.seq_len * train.micro_steps * config.cluster.readers
        own = None  # a floor computes with the whole model
        if not config.cluster.split:
            own = self.cells.get((self._floor_of(cell), None))
        compute = median(own.seconds) if own else None
        on_link = None if arm.name in FLOORS else results.seconds_on_link(cell, nodes, link)
        least, report = results.floor(on_link, compute), self.links.get(link)
        ledger = results.ledger_bytes(cell, nodes)
        measured = median(cell.sent) if cell.sent else None
        return results.Row(
            engine=arm.engine,
            recipe=arm.recipe,
            model=config.model.preset,
            nodes=nodes,
            gpus_per_node=self.cluster.gpus_per_node,
            link_gbps=link_name(link),
            tokens_per_s=tokens / step,
            floor_s=least,
            step_s=step,
            peak_gib=None if cell.peak is None else cell.peak / results.GIB,
            arm=arm.name,
            share_of_floor=None if least is None else least / step,
            link_s=on_link,
            compute_s=compute,
            step_min_s=min(cell.seconds),
            step_max_s=max(cell.seconds),
            steps=len(cell.seconds),
            gb_sent_ledger=None if ledger is None else ledger / 1e9,
            gb_sent_measured=None if measured is None else measured / 1e9,
            measured_gbps=report.gbps_both if report else None,
            latency_us=report.latency_us if report else None,
            tokens_per_step=tokens,
            seq_len=config.data.seq_len,
            batch_size=train.batch_size,
            wire_bytes=results.wires_text(cell.wires),
            commit=commit() or "",
            machine=machine_name(self.machine, self.placement),
            config=results.config_text(config),
            ranks_per_gpu=self.placement.ranks_per_gpu,
            waiting_s=median(cell.waiting) if cell.waiting else None,
            twin=arm.twin,
            call=self.call,
            tp=config.cluster.tp,
            pp=config.cluster.pp,
        )

    def _floor_of(self, cell: results.Cell) -> str:
        """Which step without communication bounds the arm: the kernels' where its steps came from a
        graph, else the one that the host starts kernel by kernel."""
        return KERNELS if cell.replayed and (KERNELS, None) in self.cells else COMPUTE

    def _has_compute(self, rows: Sequence[dict[str, str]]) -> bool:
        """Whether a table has this shape's step without communication, for this model."""
        shape = self.cluster.nodes, self.cluster.gpus_per_node, self.placement.ranks_per_gpu
        own = (COMPUTE, self.arms[0].config.model.preset, *map(str, shape))
        names = ("arm", "model", "nodes", "gpus_per_node", "ranks_per_gpu")
        return any(tuple(row[name] for name in names) == own for row in rows)

    def _write(self) -> None:
        rows = self.rows()
        if not rows:
            return
        machine = self.machine
        # a call with a tag adds arms; what they share was measured before, with the first ones
        chosen = [row for row in rows if row.arm not in FLOORS or not self.compute_known]
        results.write_rows(self.folder, chosen)
        facts = {"machine": machine, "commit": commit(), "versions": versions(), **self.facts}
        details = {
            **facts,
            "network": self._network(),
            "gpus": self._gpus(),
            "links": [asdict(report) for report in self.links.values()],
            "failed": self.failed,
            "config": {arm.name: asdict(arm.config) for arm in self.arms},
            "cells": [
                {"arm": name, "link_gbps": link_name(link), **asdict(cell)}
                for (name, link), cell in self.cells.items()
            ],
        }
        results.write_json(self.folder / f"{self.name}.json", details)

    def _network(self) -> dict[str, Any]:
        """How nodes are joined, and how NCCL was told to use it."""
        if self.hosts.interface is None:
            return {}
        rates = {link_name(link): bucket(link) for _, link in self.cells if link is not None}
        assert isinstance(self.hosts, EmulatedNodes), "links are between emulated nodes"
        tcp = {
            "congestion_control": self.hosts.network.congestion,
            "slow_start_after_idle": not self.hosts.windows_kept,
            "in_order": self.hosts.in_order,
        }
        return {"mtu": MTU, "limits": rates, "tcp": tcp, "nccl": nccl_settings(os.environ)}

    def _gpus(self) -> dict[str, Any]:
        """Which GPU each rank had, and how ranks shared one."""
        nodes = [list(self.placement.of_node(node)) for node in range(self.cluster.nodes)]
        return {
            "of_nodes": nodes,
            "ranks_per_gpu": self.placement.ranks_per_gpu,
            "share": self.placement.share,
        }

    def _show(self, link: Link) -> None:
        shared = f" on {len(self.placement.gpus)} GPUs" if self.placement.share else ""
        shape = self.shape + shared
        for row in self.rows():
            if row.link_gbps != link_name(link):
                continue
            reached = "" if row.share_of_floor is None else f"  {row.share_of_floor:6.1%} of floor"
            peak = "" if row.peak_gib is None else f"  {row.peak_gib:6.2f} GiB"
            print(
                f"{shape} {row.link_gbps:>5} Gb/s  {row.arm:28s} {row.step_s:9.4f} s/step  "
                f"{row.tokens_per_s:10,.0f} tokens/s{reached}{peak}",
                flush=True,
            )


def _reason(error: SessionError, alone: bool) -> str:
    """What an arm failed by; where others took the memory, the way out too."""
    text = str(error)
    return f"{text}; {APART}" if MEMORY in text.lower() and not alone else text


def machine_name(facts: dict[str, Any], placement: Placement) -> str:
    gpus = facts["gpus"]
    name = f"{len(gpus)} × {gpus[0]}" if gpus else f"{facts['cores']} CPU cores"
    if placement.share:
        how = {"mps": "through MPS", "time-slices": "in time slices"}[placement.share]
        name += f", {placement.ranks_per_gpu} ranks a GPU {how}"
    return f"one host of {name}"


def parser() -> argparse.ArgumentParser:
    made = Parser("zpp-lab bench step", description=__doc__)
    made.add_argument("--nodes", type=whole(1), default=2)
    made.add_argument("--gpus-per-node", type=whole(1), default=2)
    made.add_argument(
        "--link-gbps", default="max", help="link speeds in Gbit/s, such as 12,25,max (unlimited)"
    )
    made.add_argument(
        "--recipes",
        default="fsdp2,zeropp",
        help="recipes to time, separated by commas; '' for none",
    )
    made.add_argument("--arm", action="append", default=[], metavar="'NAME: OVERRIDES'")
    made.add_argument("--out", type=Path, default=Path("runs/bench-step"))
    made.add_argument("--steps", type=int, default=4, help="steps timed in one turn, at most")
    made.add_argument("--rounds", type=int, default=3, help="turns of each arm at each link speed")
    made.add_argument(
        "--turn-seconds",
        type=float,
        default=8.0,
        help="time limit of a turn; fewer steps are timed beyond it",
    )
    made.add_argument(
        "--limit", type=float, default=120.0, help="seconds before a turn or a start counts as hung"
    )
    made.add_argument(
        "--budget", type=float, default=3600.0, help="seconds in all, after which it stops"
    )
    made.add_argument(
        "--apart", action="store_true", help="start one arm at a time, which needs less memory"
    )
    made.add_argument(
        "--no-twins", action="store_true", help="only the named arms, without baselines and twins"
    )
    made.add_argument(
        "--no-compute", action="store_true", help="do not time steps without communication"
    )
    made.add_argument("--no-probe", action="store_true", help="do not probe the links first")
    made.add_argument(OPTION, choices=SHARES, help="let nodes share GPUs (default: mps)")
    made.add_argument("--tag", default="", help="a second call's JSON file: 2x2-TAG.json")
    made.add_argument("--cpu", action="store_true", help="run CPU processes over gloo")
    made.add_argument("--iproute", help="a folder with iproute2, if it is not installed")
    made.add_argument("overrides", nargs="*", help="Hydra overrides of `zpp-lab train`")
    return made


def limits(text: str, nodes: int) -> list[Link]:
    """Return the speeds of links between so many nodes. ValueError for impossible ones."""
    found = links(text)
    for link in found:
        if link is not None:
            bucket(link)  # says which speeds a limit can have
    if nodes == 1 and found != [None]:
        raise ValueError("--nodes 1 has no link between nodes: leave out --link-gbps")
    return found


def main(argv: Sequence[str]) -> int:
    """Measure, print and write; return 0, or 1 when an arm failed."""
    args = parser().parse_intermixed_args(share_words(argv))
    cluster = ClusterConfig(nodes=args.nodes, gpus_per_node=args.gpus_per_node)
    speeds = limits(args.link_gbps, args.nodes)
    shape = [f"cluster.nodes={args.nodes}", f"cluster.gpus_per_node={args.gpus_per_node}"]
    device = ["engine.device=cpu"] if args.cpu else []
    words = [word for word in args.recipes.split(",") if word] + args.arm
    overrides = [*args.overrides, *shape, *device]
    every = arms(words, overrides)
    every = paired(every) if args.no_twins else compared(every, overrides)
    if not args.no_compute:
        every = with_compute(every)
    if args.apart:
        every = [replace(arm, session=arm.name) for arm in every]
    pace = Pace(args.steps, args.rounds, args.turn_seconds, args.limit, args.budget)
    placement = _placed(args, cluster)
    with hosts(args.nodes, args.iproute) as made:
        bench = StepBench(made, placement, every, pace, args.out, not args.no_probe, args.tag)
        bench.run(speeds)
    for arm, why in bench.failed.items():
        print(f"zpp-lab bench step: {arm} failed: {why}", file=sys.stderr)
    if bench.cells:
        print(f"the page of these figures: zpp-lab report {args.out}")
    return int(bool(bench.failed) or bench.stopped)


def _placed(args: argparse.Namespace, cluster: ClusterConfig) -> Placement:
    """Where ranks sit; what is missing is said before anything is made."""
    if not args.cpu:
        visible = visible_gpus(os.environ)
        if not visible:
            raise ValueError(
                "bench step measures GPUs, but found none: add --cpu and a small model, such as "
                "model=tiny, to try it"
            )
        placed = place(cluster, visible, args.share_gpus)
        if placed.share == "mps":
            find_control()
        return placed
    if args.share_gpus:
        raise ValueError(f"{OPTION} needs GPUs: leave out it or --cpu")
    return Placement(cluster)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
