"""Writes run folders as the trainer would, with invented numbers, to test everything after it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from zpp_lab.config.codec import CodecConfig
from zpp_lab.config.schema import Config, RecipeConfig, RunConfig, TrainConfig
from zpp_lab.config.study import ArmConfig, StudyConfig
from zpp_lab.config.wires import wires_among

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
CLASSES = ("embedding", "attention", "mlp", "norm", "head")
FULL_BYTES = {"weights_forward": 3_000_000, "weights_backward": 3_000_000}
FULL_BYTES |= {"grads_intra": 2_000_000, "grads_inter": 2_000_000}


@dataclass(frozen=True)
class FakeArm:
    """An invented arm: its bits on weights and gradients, and its true loss gap in nats."""

    name: str
    describe: str
    gap: float
    noise: float = 0.002
    weight_bits: int | None = None
    grad_bits: int | None = None
    weights: Mapping[str, Any] = field(default_factory=dict)  # more settings of both weight wires

    @property
    def overrides(self) -> list[str]:
        bits = {"weights": self.weight_bits, "grads": self.grad_bits}
        changed = [f"recipe.{k}.bits={v}" for k, v in bits.items() if v]
        return [f"recipe={self.name}", *changed]


ARMS = (
    FakeArm("zero3", "fp32 on every wire", 0.0),
    FakeArm("zero3_reordered", "sums in another rank order", 0.0, 0.0004),
    FakeArm("zeropp", "8-bit weights, hpZ, 4-bit gradients", 0.011, 0.004, 8, 4),
    FakeArm("qsdp", "8-bit weights and gradients, stochastic", 0.0008, 0.0015, 8, 8),
    FakeArm("w6", "6-bit weights", 0.002, 0.0045, 6),
    FakeArm("w4", "4-bit weights", 0.045, 0.004, 4),
    FakeArm("w2", "2-bit weights", 0.62, 0.03, 2),
    FakeArm("g8_4_hadamard", "8- and 4-bit gradients, Hadamard", 0.0005, 0.0012, None, 4),
    FakeArm("broken", "negative control: 2 bits everywhere", 1.35, 0.05, 2, 2),
)


def fake_study(arms: tuple[FakeArm, ...] = ARMS, seeds: int = 3) -> StudyConfig:
    return StudyConfig(
        name="fake",
        question="Do quantized collectives of 8, 6, 4 and 2 bits reach the loss of ZeRO-3?",
        arms=[ArmConfig(a.name, a.overrides, a.describe) for a in arms],
        seeds=list(range(1, seeds + 1)),
        overrides=["model=tiny", "train.steps=300"],
    )


def fake_config(arm: FakeArm, seed: int, steps: int, folder: Path, study: str | None) -> Config:
    weights = {"bits": arm.weight_bits, "block_size": 256 if arm.weight_bits else None}
    recipe = RecipeConfig(
        name=arm.name,
        order="reversed" if arm.name == "zero3_reordered" else "rank",
        weights=CodecConfig(**weights | dict(arm.weights)),
        grads=CodecConfig(bits=arm.grad_bits, block_size=128 if arm.grad_bits else None),
    )
    run = RunConfig(dir=str(folder), study=study, arm=arm.name if study else None)
    return Config(seed=seed, recipe=recipe, train=TrainConfig(steps=steps), run=run)


def write_study_runs(root: Path, study: StudyConfig, steps: int = 300) -> None:
    """Every arm × seed of `study` below `root`, in the folders of the launcher."""
    known = {arm.name: arm for arm in ARMS}
    for arm in study.arms:
        for seed in study.seeds:
            write_run(root / arm.name / f"seed{seed}", known[arm.name], seed, steps, study.name)


def write_run(
    folder: Path, arm: FakeArm, seed: int, steps: int = 300, study: str | None = None
) -> Config:
    """One finished run folder; the same arguments give the same bytes."""
    folder.mkdir(parents=True)
    config = fake_config(arm, seed, steps, folder, study)
    (folder / "config.yaml").write_text(yaml.dump(asdict(config), Dumper=_DUMPER))
    rows = _metrics(arm, seed, config.train)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps(_summary(arm, config, rows)))
    return config


def change_metrics(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Write a run's metrics anew, each step's row as `change` leaves it."""
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        change(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_failure(folder: Path, arm: FakeArm, seed: int, outcome: str, error: str) -> None:
    """A run folder that failed after a third of its steps."""
    write_run(folder, arm, seed, study="fake")
    (folder / "summary.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[: len(lines) // 3]))
    failure = {"outcome": outcome, "error": error, "step": len(lines) // 3, "traceback": ""}
    (folder / "failure.json").write_text(json.dumps(failure))


def heldout_at_end(arm: FakeArm, seed: int) -> float:
    """The arm's final held-out loss; a seed shifts every arm by the same."""
    shared = np.random.default_rng(seed).normal(0, 0.02)
    own = np.random.default_rng([seed, *arm.name.encode()]).normal(0, arm.noise)
    return 2.31 + shared + (arm.gap + own if arm.name != "zero3" else 0.0)


def _metrics(arm: FakeArm, seed: int, train: TrainConfig) -> list[dict[str, Any]]:
    noise = np.random.default_rng([7, seed]).normal(0, 0.05, train.steps)
    end, rows = heldout_at_end(arm, seed), []
    for step in range(1, train.steps + 1):
        left = (math.exp(-step / 40) - math.exp(-train.steps / 40)) / (
            1 - math.exp(-train.steps / 40)
        )
        level = end + (5.545 - end) * left
        row: dict[str, Any] = {
            "step": step,
            "loss": level - 0.05 + noise[step - 1],
            "lr": train.lr,
            "grad_norm": 1.0,
            "tokens": step * 1024,
            "seconds": step * 0.1,
            "bytes": _bytes(arm),
        }
        if step % train.eval_every == 0 or step == train.steps:
            row["heldout_loss"] = level
        if step == 1 or step % 50 == 0:
            row["telemetry"] = _telemetry(arm, step)
        rows.append(row)
    return rows


def _bytes(arm: FakeArm) -> dict[str, dict[str, int]]:
    sent = {}
    for wire, full in FULL_BYTES.items():
        bits = arm.weight_bits if wire.startswith("weights") else arm.grad_bits
        total = int(full * (bits + 0.25) / 32) if bits else full
        inter = 0 if wire == "grads_intra" else total * 2 // 3
        sent[wire] = {"intra": total - inter, "inter": inter}
    return sent


def _telemetry(arm: FakeArm, step: int) -> Mapping[str, Any]:
    wires: dict[str, Any] = {}
    for w, wire in enumerate(wires_among()):
        bits = arm.weight_bits if wire.startswith("weights") else arm.grad_bits
        if bits is None:
            continue
        wires[wire] = {}
        for c, name in enumerate(CLASSES):
            if name == "norm" and arm.name != "broken":
                continue
            error = 4.0**-bits * (1 + 0.3 * c + 0.2 * w) * (1 + step / 600)
            wires[wire][name] = {
                "nmse": error,
                "bias": error / 50,
                "cosine": 1 - error / 2,
                "saturated": 0.001,
                "zeroed": min(0.9, 2.0 ** (1 - bits)),
            }
    return wires


def _summary(arm: FakeArm, config: Config, rows: list[dict[str, Any]]) -> dict[str, Any]:
    steps, sent = len(rows), _bytes(arm)
    last = rows[-1]
    return {
        "outcome": "finished",
        "study": config.run.study,
        "arm": config.run.arm,
        "recipe": arm.name,
        "seed": config.seed,
        "steps": steps,
        "loss": last["loss"],
        "heldout_loss": last["heldout_loss"],
        "heldout_loss_master": last["heldout_loss"] - 0.3 * arm.gap,
        "tokens": last["tokens"],
        "seconds": last["seconds"],
        "bytes": {w: {h: b * steps for h, b in hops.items()} for w, hops in sent.items()},
        "quantized_share": {
            wire: 0.987 if (arm.weight_bits if "weights" in wire else arm.grad_bits) else 0.0
            for wire in FULL_BYTES
        },
        "bytes_per_step": sum(b for hops in sent.values() for b in hops.values()),
        "data": {"name": "stdlib", "hash": "5f1a" * 16, "tokens": 12_345_678},
        "model_parameters": 542_336,
        "cluster": {"nodes": 2, "gpus_per_node": 2},
        "machine": {"host": "box", "cpu": "Some CPU", "cores": 2, "gpu": None, "os": "Linux"},
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "versions": {"python": "3.11.7", "torch": "2.13.0", "zpp_lab": "0.1.0"},
    }
