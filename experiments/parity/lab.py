"""What the parts of the experiment share: shapes, engines on this rank, and where results go."""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.engines.fsdp_parity import CASES
from zpp_lab.collectives.peer.choose import Choice, connect
from zpp_lab.collectives.recipe import Recipe
from zpp_lab.collectives.transport import Transport
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.config.load import load
from zpp_lab.config.model import ModelConfig
from zpp_lab.config.schema import ClusterConfig, Config
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.fsdp.engine import FsdpEngine
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.models import build_model
from zpp_lab.runs.provenance import commit, machine_facts, versions
from zpp_lab.tools.bench.step.engines import QuickStart

LARGE = ModelConfig(  # 1.26 billion parameters
    dim=2048, layers=22, heads=16, kv_heads=16, ffn=5632, checkpoint_activations=True
)
TELEMETRY, EVALUATED = 4, 6  # steps
Shape = tuple[ModelConfig, int, int, int]  # model, vocabulary, sequences, length
SHAPES: dict[str, Shape] = {
    "tiny": (ModelConfig(dim=96, layers=2, heads=4, kv_heads=2, ffn=150), 259, 2, 64),
    "125m": (ModelConfig(dim=768, layers=12, heads=12, kv_heads=12, ffn=2048), 32003, 2, 512),
    "1b": (LARGE, 32000, 1, 1024),
    "1b-long": (LARGE, 32000, 4, 2048),  # the device is the bound here, not the host's launches
}


class Lab:
    """One rank of the experiment."""

    def __init__(self, device: torch.device, out: Path, choice: Choice = "auto") -> None:
        self.device, self.out, self.choice = device, out, choice
        self.only: list[str] = []  # shapes of clusters; all of them if empty
        self.priced: list[str] = ["auto"]  # engine.transport in `cost`
        self.blocks = 1  # engine.blocks_per_unit of the real engine
        self.replays: dict[str, int] = {}  # steps from a CUDA graph, by case
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.transports: dict[tuple[ClusterConfig, Choice], Transport] = {}

    def sized(self, size: str) -> Shape:
        """Of SHAPES, with layers for two units of `blocks` and a shorter last one."""
        model, *text = SHAPES[size]
        if self.blocks > 1:
            model = replace(model, layers=max(model.layers, 2 * self.blocks + 1))
        return (model, *text)

    def say(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)

    def keep(self, name: str, found: Any) -> None:
        if self.rank == 0:
            self.out.mkdir(parents=True, exist_ok=True)
            facts = {"machine": machine_facts(), "commit": commit(), "versions": versions()}
            text = json.dumps({**facts, "results": found}, indent=1)
            (self.out / f"{name}.json").write_text(text + "\n")

    def clusters(self) -> list[ClusterConfig]:
        """Those asked for, else one node, and two of several ranks."""
        two = [f"2x{self.world // 2}"] if self.world % 2 == 0 and self.world > 2 else []
        shapes = self.only or [f"1x{self.world}", *two]
        found = [ClusterConfig(*map(int, shape.split("x"))) for shape in shapes]
        for shape, cluster in zip(shapes, found, strict=True):
            if cluster.world != self.world:
                raise ValueError(f"--clusters {shape}: has not the {self.world} ranks that run")
        return found

    def shape(self, cluster: ClusterConfig) -> str:
        blocks = f", {self.blocks} blocks a unit," if self.blocks > 1 else ""
        return f"{cluster.nodes}x{cluster.gpus_per_node}{blocks}"

    def transport(self, cluster: ClusterConfig, choice: Choice) -> Transport:
        key = cluster, choice
        if key not in self.transports:
            self.transports[key] = connect(cluster, Watchdog(300.0), choice, self.device)
        return self.transports[key]

    def batch(self, shape: Shape, step: int, rank: int, micro: int) -> Any:
        _, vocab, sequences, length = shape
        generator = torch.Generator().manual_seed(100_000 * step + 100 * rank + micro)
        tokens = torch.randint(0, vocab, (sequences, length + 1), generator=generator)
        tokens[:, 1::2] = (tokens[:, 0:-1:2] * 7 + 3) % vocab
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def real(self, shape: Shape, config: Config, quick: bool = False) -> FsdpEngine:
        """`quick`: with other initial weights, which cost no time."""
        model = build_model(shape[0], shape[1], device="meta")
        config = replace(config, model=shape[0])
        config = replace(config, engine=replace(config.engine, blocks_per_unit=self.blocks))
        choice = config.engine.transport
        transport = self.transport(config.cluster, self.choice if choice == "auto" else choice)
        made = QuickStart if quick else FsdpEngine
        return made(model, build_plan(model, config), config, self.device, transport)

    def virtual(self, shape: Shape, config: Config) -> VirtualEngine:
        model = build_model(shape[0], shape[1], device=str(self.device), seed=config.seed)
        return VirtualEngine(model, build_plan(model, config), config)

    def run(self, engine: Any, shape: Shape, steps: int) -> tuple[list[Any], list[float]]:
        """With telemetry once, and an evaluation once: steps from a CUDA graph come before and
        after both."""
        done: list[Any] = []
        heldout = [self.batch(shape, 10**6, i, 0) for i in range(2 * self.world + 1)]
        for step in range(steps):
            if step == EVALUATED:
                engine.evaluate(step, heldout, True)
            result = engine.step(step, 1e-3, partial(self.batch, shape, step), step == TELEMETRY)
            done.append((result.loss, result.grad_norm, dict(result.bytes)))
            if (step + 1) % 100 == 0:
                self.say(f"step {step + 1} of {steps}")
        return done, [engine.evaluate(steps, heldout, wire) for wire in (True, False)]


def free() -> None:
    """FSDP2's reference cycles hold memory until they are collected."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def configured(case: str, cluster: ClusterConfig, **changes: Any) -> Config:
    recipe, train = CASES[case]
    values = {
        "recipe": {"name": case, **recipe},
        "cluster": {"nodes": cluster.nodes, "gpus_per_node": cluster.gpus_per_node},
        "train": {"clip": 0.5, **train, **changes.pop("train", {})},
        "engine": {
            "name": "fsdp",
            "ordered": True,
            "gather": "hierarchical",
            **changes.pop("engine", {}),
        },
    }
    return load(Config, values)


def applies(case: str, cluster: ClusterConfig) -> bool:
    """Whether the cluster has every wire that the case asks for, in each of its phases."""
    try:
        for phase in configured(case, cluster).phases:
            Recipe.of(phase.config)
    except ValueError:
        return False
    return True
