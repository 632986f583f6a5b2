"""Faults of runs whose steps come from a CUDA graph, next to the same runs without one, on two
GPUs; and the tests of users' loops there.

    python experiments/parity/graph_faults.py --out OUT [--cpu] [--only kill,nan] [--beside 12]

    loops    tests/test_loop_kinds.py over NCCL and peer memory
    whole    undisturbed runs, phases and residuals among them: all files equal
    kill     kill -9 of a rank; the second start ends as the undisturbed run
    across   stopped with a graph, resumed without, and the other way round; from 1x2 to 2x1
    nan      a planted value (graph_nan.py): the same error, and nothing has changed
    stop     SIGSTOP of a rank: the other one names it, with wire and unit
    cut      a cut link between nodes that are network namespaces (root, iproute2): likewise
    memory   peak at most 3 % higher

Runs go side by side. Prints a line a check; OUT/graph_faults.json has them all, logs are in
OUT/logs. Without a GPU (--cpu) both kinds of run are eager, over gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kills import children, outcome  # noqa: E402
from links import Case, Trial  # noqa: E402

from tests.small_runs import SHAPE, corpus  # noqa: E402
from zpp_lab.runs.provenance import commit, machine_facts, versions  # noqa: E402
from zpp_lab.train.launch.processes import EmulationError  # noqa: E402

LIMIT = float(os.environ.get("LIMIT", "150"))  # seconds of one start
PAUSED = 75  # exit code of a run that stopped after run.piece_steps
WORST = 1.03  # a peak with a graph over one without
PHASES = "recipe.phases=[{after: 0.5, weights: {bits: 4}}]"
# shape, recipe, more settings
ARMS = {
    "zeropp-1x2": ("1x2", "recipe=zeropp"),
    "sdp4bit-2x1": ("2x1", "recipe=sdp4bit"),
    "loco-2x1": ("2x1", "recipe=loco"),
    "phases-1x2": ("1x2", "recipe=w8_then_w4", PHASES),
}
LARGE = ["model.dim=1024", "model.layers=8", "model.ffn=2816", "model.heads=8", "model.kv_heads=8"]
LARGE += ["data.seq_len=256", "train.steps=12", "train.checkpoint_every=0"]
EAGER = "without a CUDA graph"


class Check(AssertionError):
    """What is not as it must be."""


class Runs:
    """Starts runs in `work`, a folder each."""

    def __init__(self, work: Path, out: Path, cpu: bool, steps: int) -> None:
        self.work, self.out, self.cpu, self.steps = work, out, cpu, steps
        self.texts = corpus(work)

    def command(self, name: str, arm: str, graph: bool, *more: str) -> list[str]:
        shape, *settings = ARMS[arm]
        every = [w for w in SHAPE if not w.startswith("engine.")]
        every += ["model.dim=64", "model.layers=2", "model.ffn=128", "engine=fsdp"]
        every += [f"data.path={self.texts}", f"data.cache_dir={self.work / 'cache'}"]
        every += [f"engine.device={'cpu' if self.cpu else 'cuda'}", "engine.threads=1"]
        every += [f"engine.graph={'auto' if graph else 'false'}", f"cluster={shape}", *settings]
        every += [f"train.steps={self.steps}", f"train.checkpoint_every={self.steps // 8}"]
        every += ["train.eval_every=1000000", "train.eval_tokens=64", "train.keep_checkpoints=9999"]
        every += ["tracking.telemetry_every=0", f"run.dir={self.work / name}", *more]
        return [sys.executable, "-m", "zpp_lab.cli", "train", *every]

    def begin(self, name: str, arm: str, graph: bool, *more: str) -> subprocess.Popen[bytes]:
        with self.log(name).open("ab") as log:
            command = self.command(name, arm, graph, *more)
            return subprocess.Popen(
                command, stdout=log, stderr=log, cwd=ROOT, start_new_session=True
            )

    def run(self, name: str, arm: str, graph: bool, *more: str, code: int = 0) -> Path:
        """Start a run and wait for its end; Check where it ends otherwise than with `code`."""
        ended(self.begin(name, arm, graph, *more), self.log(name), code)
        if not self.cpu and graph and EAGER in self.log(name).read_text(errors="replace"):
            raise Check(f"{name}: {EAGER}")
        return self.work / name

    def log(self, name: str) -> Path:
        return self.out / "logs" / f"{name}.txt"

    def lines(self, name: str) -> int:
        path = self.work / name / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    def under_way(self, process: subprocess.Popen[bytes], name: str, lines: int) -> list[int]:
        """The ranks, once the run has so many steps behind it."""
        deadline, ranks = time.monotonic() + LIMIT, []
        while self.lines(name) < lines or len(ranks) < 2:
            if process.poll() is not None or time.monotonic() > deadline:
                end(process)
                raise Check(f"{name} had {self.lines(name)} lines: {tail(self.log(name))}")
            ranks = children(process.pid)
            time.sleep(0.005)
        return ranks


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a run with all its ranks."""
    ranks = children(process.pid)
    for one in [process.pid, *ranks]:
        if process.poll() is None or one in ranks:
            os.kill(one, signal.SIGKILL)
    process.wait()


def ended(
    process: subprocess.Popen[bytes], log: Path, code: int | None, seconds: float = LIMIT
) -> int:
    try:
        found = process.wait(seconds)
    except subprocess.TimeoutExpired:
        end(process)
        raise Check(f"no end in {seconds:g} s: {tail(log)}") from None
    if code is not None and found != code:
        raise Check(f"exit code {found}: {tail(log)}")
    return found


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:] if log.exists() else "no log"


def equal(folder: Path, wanted: Path) -> None:
    own, other = outcome(folder), outcome(wanted)
    differing = sorted(n for n in {**own, **other} if own.get(n) != other.get(n))
    if differing:
        raise Check(f"{folder.name} and {wanted.name} differ in {differing}")


# ---------------------------------------------------------------------- checks


def arm_checks(runs: Runs, arm: str, tell: Callable[..., None], wanted: set[str]) -> None:
    """Undisturbed with a graph and without; killed; and stopped and resumed the other way."""
    whole = f"{arm}-graph"

    def undisturbed() -> str:
        with ThreadPoolExecutor(2) as pool:
            names = {True: whole, False: f"{arm}-eager"}
            jobs = [pool.submit(runs.run, names[on], arm, on) for on in names]
            on, off = [job.result() for job in jobs]
        equal(on, off)
        return f"{runs.steps} steps, all files equal"

    tell(f"whole {arm}", undisturbed)
    more: dict[str, Callable[[], str]] = {}
    if "kill" in wanted:
        more[f"kill {arm}"] = partial(killed, runs, arm, runs.work / whole)
    if "across" in wanted:
        for first in (True, False):
            how = "graph to eager" if first else "eager to graph"
            more[f"across {arm}, {how}"] = partial(across, runs, arm, first, runs.work / whole)
    if "across" in wanted and arm == "zeropp-1x2":
        more["across zeropp, 1x2 to 2x1"] = partial(other_shape, runs, runs.work / whole)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(tell, more.keys(), more.values()))


def killed(runs: Runs, arm: str, whole: Path) -> str:
    name = f"{arm}-killed"
    process = runs.begin(name, arm, True)
    ranks = runs.under_way(process, name, runs.steps // 3)
    os.kill(ranks[1], signal.SIGKILL)
    began = time.monotonic()
    if ended(process, runs.log(name), None) == 0:
        raise Check(f"{name} had ended before the kill")
    seconds, line = time.monotonic() - began, runs.lines(name)
    equal(runs.run(name, arm, True), whole)
    return f"killed at step {line}, ended after {seconds:.1f} s, resumed to the same files"


def across(runs: Runs, arm: str, first: bool, whole: Path) -> str:
    name, half = f"{arm}-{'graph' if first else 'eager'}-first", runs.steps // 2 - 3
    runs.run(name, arm, first, f"run.piece_steps={half}", code=PAUSED)
    folder = runs.run(name, arm, not first)
    shutil.rmtree(folder / "checkpoints" / f"step-{half:08d}")  # the undisturbed run has none then
    equal(folder, whole)
    return f"stopped after step {half}, resumed to the same files"


def other_shape(runs: Runs, whole: Path) -> str:
    """A run on 2x1 that begins with the state of one on 1x2."""
    start = sorted((whole / "checkpoints").glob("step-*"))[3]
    ARMS["zeropp-2x1"] = ("2x1", "recipe=zeropp")
    found = []
    for on in (True, False):
        name = f"zeropp-2x1-{'graph' if on else 'eager'}"
        found.append(runs.run(name, "zeropp-2x1", on, f"run.start_from={start}"))
    equal(*found)
    return f"from {start.name} of 1x2, all files equal"


def nan(runs: Runs, shape: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["experiments/parity/graph_nan.py", "--out", str(runs.out), "--cluster", shape]
    log = runs.log(f"nan-{shape}")
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, *["--cpu"] * runs.cpu],
            cwd=ROOT,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    ended(process, log, 0)
    rows = json.loads((runs.out / f"nan-{shape}.json").read_text())
    wrong = [f"{r['case']} {r['plant']}: {r['problem']}" for r in rows if r["problem"]]
    if wrong:
        raise Check("; ".join(wrong))
    return f"{len(rows)} plants, such as: {rows[0]['said']}"


def stopped(runs: Runs, arm: str, graph: bool, *limits: str) -> str:
    """SIGSTOP of rank 1 by the ordinary launcher."""
    name = f"{arm}-{'graph' if graph else 'eager'}-stopped"
    name += "".join(limits).replace("engine.", "-").replace("=", "")
    more = ("train.steps=1000000", "train.checkpoint_every=0", *limits)
    process = runs.begin(name, arm, graph, *more)
    ranks = runs.under_way(process, name, 30)
    os.kill(ranks[1], signal.SIGSTOP)
    began = time.monotonic()
    if ended(process, runs.log(name), None) == 0:
        raise Check("it ended well")
    seconds = time.monotonic() - began
    text = runs.log(name).read_text(errors="replace")
    found = re.search(r"rank 0: (?:[a-z_]+ of unit \S+ \(\w+\)|losses and gradient norm).*", text)
    if found is None or "rank 1" not in found[0]:
        raise Check(f"not named after {seconds:.0f} s: {text[-1500:]}")
    return f"{seconds:.0f} s: {found[0]}"


class GraphTrial(Trial):
    """A trial of links.py with a graph or without."""

    graph = True

    def command(self) -> list[str]:
        return [*super().command(), f"engine.graph={'auto' if self.graph else 'false'}"]


def cut(runs: Runs, fault: str, graph: bool, timeout: float, silence: float) -> str:
    """A fault between emulated nodes that lasts."""
    limit = "timeout" if timeout < silence else "silence"
    name = f"{fault}-{limit}-{'graph' if graph else 'eager'}"
    command = [sys.executable, __file__, "--one", name, "--out", str(runs.out)]
    command += ["--limits", f"{timeout},{silence}", "--work", str(runs.work)]
    done = subprocess.run(
        [*command, *["--cpu"] * runs.cpu],
        cwd=ROOT,
        capture_output=True,
        check=False,
        timeout=2 * LIMIT,
    )
    runs.log(name).write_bytes(done.stdout + done.stderr)
    for file in runs.work.glob(f"{name}-*.txt"):
        shutil.copy(file, runs.out / "logs")
    if done.returncode:
        raise Check(f"{done.stderr.decode(errors='replace')[-1500:]}")
    row = json.loads(done.stdout.splitlines()[-1])
    if row["happened"] != "ended" or not row.get("named"):
        raise Check(json.dumps(row)[:1500])
    lines = [line for each in row["lines"] for line in each]
    return f"{row['seconds']} s: {lines[0]}"


def one(name: str, limits: str, work: Path, cpu: bool) -> int:
    """A case of `cut`, in a process of its own: an owner has one set of nodes."""
    fault, _, kind = name.split("-")
    timeout, silence = map(float, limits.split(","))
    trial = GraphTrial(Case(name, fault, 10_000.0, timeout, silence, False), work, 1_000_000, cpu)
    trial.graph = kind == "graph"
    print(json.dumps(trial._disturbed()))
    return 0


def memory(runs: Runs, arm: str) -> str:
    found = {}
    for on in (False, True):
        folder = runs.run(f"{arm}-large-{'graph' if on else 'eager'}", arm, on, *LARGE)
        summary = json.loads((folder / "summary.json").read_text())
        found[on] = [summary["peak_memory_bytes"], *(summary["peak_gib"] or [])]
    if runs.cpu:
        return "no GPU, no peak"
    shares = [on / off for on, off in zip(found[True], found[False], strict=True)]
    if max(shares) > WORST:
        raise Check(f"{shares} of the peak without a graph, {found[False]}")
    return f"reserved and each rank's tensors: {', '.join(f'{s:.3f}' for s in shares)}"


def loops(runs: Runs, shape: str) -> str:
    world = f"{'gloo' if runs.cpu else 'nccl' if shape == '2x1' else 'peer'}-{shape}"
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider"]
    command += ["-p", "no:hydra_pytest", "tests/test_loop_kinds.py", "-k", world]
    log = runs.log(f"loops-{shape}")
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    ended(process, log, None, 3 * LIMIT)
    text = log.read_text(errors="replace")
    states = re.findall(r"^(PASSED|FAILED|ERROR) \S+?::(.+?)(?: - .*)?$", text, re.MULTILINE)
    rows = {test: state for state, test in states}
    (runs.out / f"loops-{shape}.json").write_text(json.dumps(rows, indent=1) + "\n")
    bad = [test for test, state in rows.items() if state != "PASSED"]
    if bad or not rows or process.returncode:
        raise Check(f"{len(bad)} of {len(rows)} failed, exit {process.returncode}: {bad}")
    return f"{len(rows)} tests passed"


# ---------------------------------------------------------------------- all of them


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="loops,whole,kill,across,nan,stop,cut,memory")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--beside", type=int, default=12, help="checks side by side")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--limits", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return one(args.one, args.limits, args.work, args.cpu)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("ZPP_COMMIT", commit() or "")
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="graph-faults-"))
    runs, wanted, began = Runs(work, args.out, args.cpu, args.steps), set(args.only.split(",")), 0.0
    facts = {"machine": machine_facts(), "commit": commit(), "versions": versions()}
    rows: list[dict[str, Any]] = []

    places, writing = threading.BoundedSemaphore(args.beside), threading.Lock()

    def tell(name: str, check: Callable[[], str]) -> None:
        with places:
            start = time.monotonic()
            try:
                row = {"name": name, "good": True, "said": check()}
            except (Check, EmulationError, OSError, ValueError, subprocess.TimeoutExpired) as error:
                row = {"name": name, "good": False, "said": f"{type(error).__name__}: {error}"}
            row["seconds"] = round(time.monotonic() - start, 1)
        line = f"{row['said']}".replace("\n", " | ")[:400]
        with writing:
            rows.append(row)
            good = "ok " if row["good"] else "BAD"
            print(f"{good} {name} ({row['seconds']} s): {line}", flush=True)
            text = json.dumps({**facts, "results": rows}, indent=1) + "\n"
            (args.out / "graph_faults.json").write_text(text)

    limits = {"timeout": (20.0, 600.0), "silence": (300.0, 10.0)}
    checks: list[Callable[[], None]] = []
    if "loops" in wanted:
        checks += [partial(tell, f"loops {s}", partial(loops, runs, s)) for s in ("2x1", "1x2")]
    if wanted & {"whole", "kill", "across"}:
        checks += [partial(arm_checks, runs, arm, tell, wanted) for arm in args.arms.split(",")]
    for on in (True, False):
        how = "graph" if on else "eager"
        for limit, (timeout, silence) in limits.items():
            for fault in ("cut", "stop") if "cut" in wanted else ():
                case = partial(cut, runs, fault, on, timeout, silence)
                checks.append(partial(tell, f"{fault} between nodes, {limit}, {how}", case))
            if "stop" in wanted:
                words = f"engine.timeout_seconds={timeout}", f"engine.silence_seconds={silence}"
                case = partial(stopped, runs, "zeropp-1x2", on, *words)
                checks.append(partial(tell, f"stop 1x2, {limit}, {how}", case))
    if "nan" in wanted:
        checks += [partial(tell, f"nan {s}", partial(nan, runs, s)) for s in ("1x2", "2x1")]
    if "memory" in wanted:
        checks.append(partial(tell, "memory", partial(memory, runs, "zeropp-1x2")))
    began = time.monotonic()
    with ThreadPoolExecutor(len(checks)) as pool:
        for job in [pool.submit(check) for check in checks]:
            job.result()
    bad = [row["name"] for row in rows if not row["good"]]
    print(f"{len(rows) - len(bad)} of {len(rows)} ok in {time.monotonic() - began:.0f} s; {bad}")
    shutil.rmtree(work, ignore_errors=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
