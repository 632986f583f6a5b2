"""Kills ranks of real trainings at random moments; each must go on to the undisturbed run's bits.

    python experiments/parity/kills.py --out results [--cpu]

Several runs train side by side, each killed in turn, one rank at a time; the last one of all is
left alone. In the end metrics (times aside) and weights of each must equal the undisturbed run's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from zpp_lab.machine import commit, machine_facts, versions  # noqa: E402
from zpp_lab.tracking import read  # noqa: E402

SETTINGS = (
    "engine=fsdp", "recipe=zeropp", "model.dim=64", "model.layers=2", "model.ffn=128",
    "data.seq_len=32", "train.batch_size=2", "train.eval_every=1000", "train.eval_tokens=64",
    "train.checkpoint_every=5", "tracking.wandb=off", "tracking.telemetry_every=0",
)  # fmt: skip


@dataclass(frozen=True)
class Chain:
    """One run of `steps` steps, killed `kills` times."""

    folder: Path
    ranks: int
    steps: int
    kills: int
    seed: int
    cpu: bool

    def command(self) -> list[str]:
        settings = [*SETTINGS, f"run.dir={self.folder}", f"train.steps={self.steps}"]
        settings += ["cluster.nodes=1", f"cluster.gpus_per_node={self.ranks}"]
        settings += ["engine.device=cpu"] if self.cpu else []
        return [sys.executable, "-m", "zpp_lab.cli", "train", *settings]

    def start(self) -> subprocess.Popen[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with Path(f"{self.folder}.log").open("ab") as log:
            return subprocess.Popen(self.command(), stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)

    def lines(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    def run(self) -> list[dict[str, float]]:
        """All kills of this chain, then to the end; when and at which step each was."""
        rng, done = random.Random(self.seed), []
        for number in range(1, self.kills + 1):
            process, began = self.start(), time.monotonic()
            now = self.lines()
            goal = rng.randint(now, max(now, number * self.steps // (self.kills + 1)))
            ranks: list[int] = []
            while process.poll() is None and (self.lines() < goal or len(ranks) < self.ranks):
                ranks = ranks_of(process.pid)
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.1))
            if process.poll() is None and ranks:
                victim = rng.randrange(len(ranks))
                os.kill(ranks[victim], signal.SIGKILL)
                killed, lines = time.monotonic(), self.lines()
                code = process.wait(timeout=90)
                done.append(
                    {"rank": victim, "line": lines, "seconds": round(killed - began, 2),
                     "seconds to end": round(time.monotonic() - killed, 2), "exit code": code}
                )  # fmt: skip
                print(f"{self.folder.name}: {done[-1]}", flush=True)
        assert self.start().wait(timeout=300) == 0, f"{self.folder} did not end; see its log"
        print(f"{self.folder.name}: ended", flush=True)
        return done


def ranks_of(parent: int) -> list[int]:
    """The launcher's children that are ranks."""
    found: list[int] = []
    try:
        for task in Path(f"/proc/{parent}/task").iterdir():
            for child in (task / "children").read_text().split():
                command = Path(f"/proc/{child}/cmdline").read_bytes()
                found += [int(child)] if b"zpp_lab.launcher" in command else []
    except OSError:
        return []
    return sorted(found)


def outcome(folder: Path, steps: int) -> tuple[list[dict[str, object]], dict[str, object]]:
    """Metrics without times, and the last checkpoint's tensors."""

    drop = ("seconds", "telemetry")
    lines = read(folder / "metrics.jsonl")
    metrics = [{k: v for k, v in line.items() if k not in drop} for line in lines]
    return metrics, Saved(folder / f"checkpoints/step-{steps:08d}").state()


def same(a: object, b: object) -> bool:
    import torch

    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b  # type: ignore[arg-type]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--chains", type=int, default=10, help="runs side by side")
    parser.add_argument("--kills", type=int, default=1, help="of each")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    args.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="kills-"))
    make = lambda name, kills, seed: Chain(  # noqa: E731
        work / name, args.ranks, args.steps, kills, seed, args.cpu
    )
    chains = [make(f"killed-{i}", args.kills, i) for i in range(args.chains)]
    whole = make("whole", 0, 0)
    with ThreadPoolExecutor(args.chains + 1) as pool:
        found = list(pool.map(Chain.run, [*chains, whole]))[:-1]
    wanted, wrong = outcome(whole.folder, args.steps), []
    for chain in chains:
        equal = same(dict(enumerate(outcome(chain.folder, args.steps))), dict(enumerate(wanted)))
        wrong += [] if equal else [chain.folder.name]
        print(f"{chain.folder.name}: {'equal' if equal else 'DIFFERENT'}", flush=True)
    count = sum(len(kills) for kills in found)
    print(f"kills: {count}; runs that differ from the undisturbed one: {wrong or 'none'}")
    facts = {"machine": machine_facts(), "commit": commit(), "versions": versions()}
    results = {"kills": found, "runs that differ": wrong}
    (args.out / "kills.json").write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
    return 1 if wrong or count < args.chains * args.kills else 0


if __name__ == "__main__":
    sys.exit(main())
