"""Kills real trainings at random moments; each must end with the undisturbed run's files.

    python experiments/parity/kills.py --out results [--cpu] [--engines virtual fsdp]
        [--recipes loco sdp4bit w8_then_w4 --nodes 2 --ranks 2]

Several runs train side by side, each killed again and again: a random rank alone, or everything at
once. After each kill every checkpoint that is there must be the undisturbed run's, byte by byte,
and in the end so must every file of the run's folder (times aside).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from zpp_lab.runs.metrics import read, unmeasured  # noqa: E402
from zpp_lab.runs.provenance import commit, machine_facts, versions  # noqa: E402

SETTINGS = (
    "model.dim=64", "model.layers=2", "model.ffn=128", "data.seq_len=32",
    "train.batch_size=2", "train.eval_every=1000", "train.eval_tokens=64", "tracking.wandb=off",
    "tracking.telemetry_every=0",
)  # fmt: skip
TIMES = ("checkpoint_seconds", "start_up", "peak_memory_bytes", "peak_gib", "telemetry")
KEPT = 2  # checkpoints of a run; the undisturbed one keeps all
Files = dict[str, Any]


@dataclass(frozen=True)
class Chain:
    """One run of `steps` steps, killed `kills` times."""

    folder: Path
    recipe: str
    engine: str
    nodes: int
    ranks: int
    steps: int
    every: int
    kills: int
    seed: int
    cpu: bool
    keep: int = KEPT

    def command(self) -> list[str]:
        settings = [*SETTINGS, f"run.dir={self.folder}", f"train.steps={self.steps}"]
        settings += [f"recipe={self.recipe}", f"engine={self.engine}"]
        cluster = {"nodes": self.nodes, "gpus_per_node": self.ranks // self.nodes}
        settings += [f"cluster.{key}={value}" for key, value in cluster.items()]
        settings += [f"train.checkpoint_every={self.every}", f"train.keep_checkpoints={self.keep}"]
        settings += ["engine.device=cpu"] if self.cpu else []
        return [sys.executable, "-m", "zpp_lab.cli", "train", *settings]

    def start(self) -> subprocess.Popen[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with Path(f"{self.folder}.log").open("ab") as log:
            return subprocess.Popen(self.command(), stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)

    def lines(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    def run(self, undisturbed: Files | None = None) -> list[dict[str, Any]]:
        """All kills of this chain, then to the end; of each when, at which step and what was
        there."""
        rng, done = random.Random(f"{self.recipe} {self.engine} {self.seed}"), []
        for number in range(1, self.kills + 1):
            process, began = self.start(), time.monotonic()
            now = self.lines()
            goal = rng.randint(now, max(now, number * self.steps // (self.kills + 1)))
            ranks: list[int] = []
            while process.poll() is None and (self.lines() < goal or len(ranks) < self.processes):
                ranks = self.ranks_of(process.pid)
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.3))
            if process.poll() is None and ranks:
                alone = rng.random() < 0.5
                victims = [rng.choice(ranks)] if alone else [process.pid, *ranks]
                for victim in victims:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(victim, signal.SIGKILL)
                killed, lines = time.monotonic(), self.lines()
                code = process.wait(timeout=300)
                while any(Path(f"/proc/{rank}").exists() for rank in ranks):
                    time.sleep(0.01)
                done.append(
                    {"rank": ranks.index(victims[0]) if alone else "all", "line": lines,
                     "seconds": round(killed - began, 2), "exit code": code,
                     "seconds to end": round(time.monotonic() - killed, 2),
                     **self.left(undisturbed or {})}
                )  # fmt: skip
                print(f"{self.folder.name}: {done[-1]}", flush=True)
        assert self.start().wait(timeout=900) == 0, f"{self.folder} did not end; see its log"
        print(f"{self.folder.name}: ended", flush=True)
        return done

    @property
    def processes(self) -> int:
        return self.ranks if self.engine == "fsdp" else 1

    def ranks_of(self, parent: int) -> list[int]:
        """The launcher's children that are ranks; without a launcher the one process."""
        return children(parent) if self.engine == "fsdp" else [parent]

    def left(self, undisturbed: Files) -> dict[str, Any]:
        """What a kill has left: the checkpoints, how many of them are not the undisturbed run's,
        and whether one was half written."""
        folder = self.folder / "checkpoints"
        names = sorted(p.name for p in folder.glob("step-*"))
        wrong = [n for n in names if contents(folder / n) != contents_of(undisturbed, n)]
        return {
            "checkpoints": names,
            "checkpoints that differ": wrong,
            "half written": any(folder.glob(".partial-*")),
        }


def children(parent: int) -> list[int]:
    found: list[int] = []
    try:
        for task in Path(f"/proc/{parent}/task").iterdir():
            for child in (task / "children").read_text().split():
                command = Path(f"/proc/{child}/cmdline").read_bytes()
                found += [int(child)] if b"zpp_lab.train.launch.launcher" in command else []
    except OSError:
        return []
    return sorted(found)


def contents(folder: Path) -> Files:
    """Every file below a folder, as bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def contents_of(files: Files, checkpoint: str) -> Files:
    """A checkpoint's among a run's files."""
    start = f"checkpoints/{checkpoint}/"
    return {n.removeprefix(start): data for n, data in files.items() if n.startswith(start)}


def outcome(folder: Path) -> Files:
    """Every file of a run: bytes, or what they say without times. config.yaml names its folder, and
    console.log has what each start has said."""
    files = contents(folder)
    for name in ("config.yaml", "console.log", ".lock"):
        files.pop(name, None)
    files["metrics.jsonl"] = [timeless(line) for line in read(folder / "metrics.jsonl")]
    files["summary.json"] = timeless(json.loads(files["summary.json"]))
    return files


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in unmeasured(record).items() if k not in TIMES}


def newest_alone(files: Files, steps: int, every: int) -> Files:
    """The files of a run that keeps `KEPT` checkpoints, out of those of one that keeps all."""
    due = [s for s in range(1, steps + 1) if s % every == 0 or s == steps][-KEPT:]
    kept = tuple(f"checkpoints/step-{s:08d}/" for s in due)
    return {
        n: f for n, f in files.items() if not n.startswith("checkpoints/") or n.startswith(kept)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engines", nargs="+", default=["fsdp"], choices=["virtual", "fsdp"])
    parser.add_argument("--recipes", nargs="+", default=["zeropp"])
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4, help="of all nodes")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--chains", type=int, default=10, help="runs of each recipe and engine")
    parser.add_argument("--kills", type=int, default=1, help="of each run")
    parser.add_argument("--beside", type=int, help="runs side by side; else all")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("ZPP_COMMIT", commit() or "")
    args.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="kills-"))
    chains, wanted = [], {}
    for recipe, engine in itertools.product(args.recipes, args.engines):
        folder = work / f"{recipe}-{engine}-whole"
        size = args.nodes, args.ranks, args.steps, args.every
        whole = Chain(folder, recipe, engine, *size, kills=0, seed=0, cpu=args.cpu, keep=9999)
        whole.run()
        wanted[recipe, engine] = outcome(whole.folder)
        for i in range(args.chains):
            folder = work / f"{recipe}-{engine}-{i}"
            chains.append(replace(whole, folder=folder, kills=args.kills, seed=i, keep=KEPT))
    with ThreadPoolExecutor(args.beside or len(chains)) as pool:
        found = list(pool.map(lambda c: c.run(wanted[c.recipe, c.engine]), chains))
    results, count, half, equal = [], 0, 0, 0
    for chain, kills in zip(chains, found, strict=True):
        there = outcome(chain.folder)
        expected = newest_alone(wanted[chain.recipe, chain.engine], args.steps, args.every)
        names = sorted({*there, *expected})
        differ = [n for n in names if there.get(n) != expected.get(n)]
        torn = [k for k in kills if k["checkpoints that differ"]]
        print(f"{chain.folder.name}: {differ or 'equal'}", flush=True)
        count, half = count + len(kills), half + sum(k["half written"] for k in kills)
        equal += 0 if differ else len(kills) - len(torn)
        ran = {"recipe": chain.recipe, "engine": chain.engine}
        results.append({**ran, "kills": kills, "files that differ": differ})
    said = {"kills": count, "amid a write": half, "equal file by file": equal}
    print(said)
    facts = {"machine": machine_facts(), "commit": commit(), "versions": versions()}
    settings = {k: v for k, v in vars(args).items() if k != "out"}
    text = json.dumps({**facts, "settings": settings, **said, "results": results}, indent=1)
    (args.out / "kills.json").write_text(text + "\n")
    return 0 if equal == count == len(chains) * args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
