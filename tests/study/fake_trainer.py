"""A trainer that only writes a run folder, and fails in the ways that the arm's name says."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

import yaml

from zpp_lab.config.schema import Config

STEPS = 4


def fake_compose(overrides: list[str]) -> Config:
    """Reads `key=value` overrides; a ValueError for an unknown key, as the real one."""
    from zpp_lab.config.load import load

    values: dict = {"train": {"steps": STEPS}, "tracking": {"wandb": "off"}}
    values |= {"recipe": {"name": "zero3"}, "engine": {"device": "cpu"}}
    for override in overrides:
        key, _, text = override.partition("=")
        *path, last = key.split(".")
        place = values
        for part in path:
            place = place.setdefault(part, {})
        place[last] = yaml.safe_load(text)
    return load(Config, values)


def run(config: Config) -> None:
    assert config.run.dir is not None
    folder = Path(config.run.dir)
    root = folder.parents[1]
    with open(root / "started.txt", "a") as file:
        file.write(f"{config.run.arm} {config.seed}\n")
    print("hello from", config.run.arm, flush=True)
    (folder / "pid.txt").write_text(str(os.getpid()))
    if not (root / "healed").exists():
        _fail(config, folder, root)
    _finish(config, folder)


def _finish(config: Config, folder: Path) -> None:
    (folder / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    _write(config, folder)


def _fail(config: Config, folder: Path, root: Path) -> None:
    match config.run.arm:
        case "raises":
            raise RuntimeError("the weights are gone")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exits":
            sys.exit(3)
        case "silent":
            os._exit(0)
        case "diverges":
            failure = {"outcome": "diverged", "error": "loss is NaN", "step": 2, "traceback": ""}
            (folder / "failure.json").write_text(json.dumps(failure))
            raise ValueError("loss is NaN")
        case "full":
            number, _, told = (root / "errno").read_text().partition(" ")
            error = OSError(int(number), os.strerror(int(number)))
            if told == "True":
                failure = {"outcome": "crashed", "error": f"OSError: {error}"}
                (folder / "failure.json").write_text(json.dumps(failure))
            raise error
        case "late":  # ends by itself just when it is asked to
            signal.signal(signal.SIGTERM, lambda *_: (_finish(config, folder), os._exit(0)))
            (root / f"waiting{config.seed}").touch()
            time.sleep(600)
        case "slow":
            (root / f"waiting{config.seed}").touch()
            time.sleep(600)


def _noise(config: Config) -> float:
    return 0.05 * (-1) ** config.seed if config.run.arm == "noisy" else 0.0


def fail(config: Config) -> None:
    raise RuntimeError("always")


def _write(config: Config, folder: Path) -> None:
    steps = range(1, config.train.steps + 1)
    rows = [{"step": s, "loss": 3.0, "tokens": s, "seconds": 0.1 * s} for s in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        "outcome": "finished",
        "arm": config.run.arm,
        "seed": config.seed,
        "steps": config.train.steps,
        "heldout_loss": 2.5 + 0.01 * config.seed + _noise(config),
        "seconds": 0.4,
        "threads": config.engine.threads,
        "bytes": {"weights_forward": {"intra": 4, "inter": 2}},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
