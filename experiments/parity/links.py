"""Cuts links and stops ranks of real trainings on two emulated nodes of one rank each.

    python experiments/parity/links.py --out results [--cpu] [--cases cut-5,loss] [--beside 4]

Each case trains, meets its fault after some steps, and must either go on to the undisturbed run's
bits, or end on every rank within the limits, with one line that names wire, unit and silent rank,
and go on to those bits when it is started again. A limit is engine.timeout_seconds for a transfer
or engine.silence_seconds for a rank; ends may take GRACE longer. Nodes are network namespaces: the
network is real, so this needs root and iproute2. A case is a process of its own, and its nodes are
apart from all others', so that cases run side by side. OUT/links.json has a row for each.
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
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from faults import cut, lose, mend  # noqa: E402
from kills import outcome  # noqa: E402

from tests.small_runs import SHAPE, corpus  # noqa: E402
from zpp_lab.config.schema import ClusterConfig  # noqa: E402
from zpp_lab.runs.provenance import commit, machine_facts, versions  # noqa: E402
from zpp_lab.tools.links.network import Tools  # noqa: E402
from zpp_lab.tools.links.nodes import EmulatedNodes  # noqa: E402
from zpp_lab.train.launch.cause import SILENT  # noqa: E402
from zpp_lab.train.launch.gpus import Placement, visible_gpus  # noqa: E402
from zpp_lab.train.launch.processes import EmulationError  # noqa: E402
from zpp_lab.train.launch.ranks import free_port, rank_environment  # noqa: E402

CLUSTER = ClusterConfig(nodes=2, gpus_per_node=1)
VICTIM = 1  # the rank that is stopped; the link is that of its node
GRACE = 25.0  # seconds after a limit: rank 0 asks again, hears the others and lets them hear
BEFORE = 13  # steps before the fault, and so a checkpoint
START = 240.0  # seconds until the first steps, on a busy machine
FOREVER = 10_000.0
WIRES = "weights_forward|weights_backward|grads_intra|grads_inter|weights_update"
PLACE = rf"(?:{WIRES}) of unit \S+ \(\w+\)|losses and gradient norm \(world\)"
LINE = re.compile(
    rf"rank (\d): ((?:{PLACE})(?: failed| has not finished after [\d.]+ s)?): rank (\d) "
    rf"(?:{SILENT}|has ended|hangs).*"
)


@dataclass(frozen=True)
class Case:
    """fault: cut (packets vanish), down (both ends see no carrier), stop (SIGSTOP) or loss (1 %
    of packets). seconds: how long it lasts. goes_on: whether the run must, as the limits are
    longer than what TCP needs after an outage: as long again, for it waits ever longer between
    its attempts."""

    name: str
    fault: str
    seconds: float
    timeout: float
    silence: float
    goes_on: bool

    @property
    def limit(self) -> float:
        return min(self.timeout, self.silence)

    @property
    def stays_stopped(self) -> bool:
        return self.fault == "stop" and self.seconds >= FOREVER


DEFAULT, PATIENT = (300.0, 40.0), (200.0, 150.0)  # engine.timeout_seconds, engine.silence_seconds
CASES = (
    Case("whole", "none", 0, *DEFAULT, True),
    Case("cut-5", "cut", 5, *DEFAULT, True),
    Case("cut-60", "cut", 60, *DEFAULT, False),
    Case("cut-60-patient", "cut", 60, *PATIENT, True),
    Case("cut-forever", "cut", FOREVER, *DEFAULT, False),
    Case("down-5", "down", 5, *DEFAULT, True),
    Case("down-60-patient", "down", 60, *PATIENT, True),
    Case("down-forever", "down", FOREVER, *DEFAULT, False),
    Case("stop-60", "stop", 60, *DEFAULT, False),
    Case("stop-60-patient", "stop", 60, *PATIENT, True),
    Case("stop-forever", "stop", FOREVER, *DEFAULT, False),
    # a transfer's limit comes first: the silent rank is asked for, not waited for
    Case("cut-forever-timeout", "cut", FOREVER, 30.0, 600.0, False),
    Case("stop-forever-timeout", "stop", FOREVER, 30.0, 600.0, False),
    Case("loss", "loss", FOREVER, *DEFAULT, True),
)


class Trial:
    """One case in `work`: its run, the fault, what became of it, and a second start."""

    def __init__(self, case: Case, work: Path, steps: int, cpu: bool) -> None:
        self.case, self.work, self.steps, self.cpu = case, work, steps, cpu
        self.folder = work / case.name
        self.gpus = () if cpu else visible_gpus(os.environ)[: CLUSTER.world]
        if not cpu and len(self.gpus) < CLUSTER.world:
            raise EmulationError(f"two GPUs are needed, and {len(self.gpus)} are here; or --cpu")

    def command(self) -> list[str]:
        case = self.case
        settings = [word for word in SHAPE if not word.startswith(("engine.", "model.layers"))]
        settings += ["engine=fsdp", "recipe=zeropp", "cluster=2x1", "model.layers=2"]
        texts = self.work / "texts"  # written once: other cases may be reading them
        texts = texts if texts.is_dir() else corpus(self.work)
        settings += [f"data.path={texts}", f"data.cache_dir={self.work / 'cache'}"]
        settings += [f"train.steps={self.steps}", "train.checkpoint_every=10"]
        settings += ["train.eval_every=1000000", "train.eval_tokens=64", f"run.dir={self.folder}"]
        settings += [f"engine.timeout_seconds={case.timeout}", "engine.threads=1"]
        settings += [f"engine.silence_seconds={case.silence}", "tracking.telemetry_every=0"]
        settings += [f"engine.device={'cpu' if self.cpu else 'cuda'}"]
        return [sys.executable, "-m", "zpp_lab.cli", "train", *settings]

    def start(self, nodes: EmulatedNodes, name: str) -> list[subprocess.Popen[bytes]]:
        port, placement = free_port(), Placement(CLUSTER, self.gpus)
        ranks = []
        for rank in range(CLUSTER.world):
            environment = rank_environment(nodes, placement, rank, port, os.environ)
            environment["OMP_NUM_THREADS"] = "1"
            with self.log(name, rank).open("wb") as log:
                more = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": ROOT}
                ranks.append(nodes.start(rank, self.command(), environment, **more))
        return ranks

    def log(self, name: str, rank: int) -> Path:
        return self.work / f"{self.case.name}-{name}-rank{rank}.txt"

    def lines(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    def run(self) -> dict[str, Any]:
        """The case's row."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        row: dict[str, Any] = asdict(self.case) | {"limit": self.case.limit, "problem": None}
        try:
            row |= self._disturbed()
            if row["happened"] == "ended":
                row["resumed"] = self._again()
        except EmulationError as error:  # this machine lacks what the case needs
            row |= {"happened": "not possible here", "problem": str(error)}
        return row

    def _disturbed(self) -> dict[str, Any]:
        with EmulatedNodes(2, Tools.find()) as nodes:
            found: dict[str, Any] = {}
            if self.case.fault == "loss":
                found["loss_by"] = lose(nodes, 0.01)
            ranks = self.start(nodes, "first")
            wait(lambda: self.lines() >= BEFORE or ended(ranks), START)
            if ended(ranks):
                return self._tell(found | {"happened": "ended"}, ranks, [0.0, 0.0])
            began = time.monotonic()
            heal = self._fault(nodes, ranks)
            found["line"] = self.lines()
            ends: dict[int, float] = {}
            deadline = began + self._longest()
            while len(ends) < len(ranks) and time.monotonic() < deadline:
                time.sleep(0.05)
                passed = time.monotonic() - began
                if heal and passed > self.case.seconds:
                    heal()
                    heal = None
                for rank, process in enumerate(ranks):
                    if rank not in ends and process.poll() is not None:
                        ends[rank] = round(passed, 1)
                if self.case.stays_stopped and set(ends) == set(range(len(ranks))) - {VICTIM}:
                    ranks[VICTIM].kill()  # as who runs the job does with what does not end
            if self.case.fault == "loss":
                found["resent"] = [nodes.resent(node) for node in range(2)]
            codes = [process.poll() for process in ranks]
            happened = "went on" if codes == [0, 0] else "ended" if None not in codes else "hung"
            found |= {"happened": happened, "codes": codes}
            return self._tell(found, ranks, [ends.get(rank) for rank in range(len(ranks))])

    def _longest(self) -> float:
        """Seconds from the fault in which everything must be over."""
        if self.case.goes_on:
            lasts = self.case.seconds if self.case.seconds < FOREVER else 0.0
            return max(START, 3 * lasts)
        back = self.case.seconds if self.case.seconds < FOREVER and self.case.fault == "stop" else 0
        return max(self.case.limit, back) + GRACE

    def _fault(
        self, nodes: EmulatedNodes, ranks: list[subprocess.Popen[bytes]]
    ) -> Callable[[], Any] | None:
        """The fault; returns what takes it back."""
        if self.case.fault in ("cut", "down"):
            told = self.case.fault == "down"
            cut(nodes, VICTIM, told)
            return lambda: mend(nodes, VICTIM, told)
        if self.case.fault == "stop":
            ranks[VICTIM].send_signal(signal.SIGSTOP)
            return lambda: ranks[VICTIM].send_signal(signal.SIGCONT)
        return None

    def _tell(self, row: dict[str, Any], ranks: list[Any], ends: list[Any]) -> dict[str, Any]:
        if row["happened"] == "went on":
            return row | {"seconds": max(ends), **self._compared()}
        said = [self.log("first", rank).read_text(errors="replace") for rank in range(len(ranks))]
        found = [[m for m in map(LINE.fullmatch, text.splitlines()) if m] for text in said]
        row |= {"seconds": ends, "lines": [[m[0] for m in each] for each in found]}
        must = [r for r in range(len(ranks)) if not (self.case.stays_stopped and r == VICTIM)]
        # whoever lives names the other one; a rank that stays stopped cannot say a word
        named = all(len(found[r]) == 1 and int(found[r][0][3]) == 1 - r for r in must)
        row["named"] = named
        if not named:
            row["said"] = [text[-2000:] for text in said]
        return row

    def _again(self) -> dict[str, Any]:
        began = time.monotonic()
        with EmulatedNodes(2, Tools.find()) as nodes:
            ranks = self.start(nodes, "again")
            wait(lambda: all(p.poll() is not None for p in ranks), START)
            codes = [process.poll() for process in ranks]
        from_step = re.search(r"resuming after step (\d+)", self.log("again", 0).read_text())
        facts = {"codes": codes, "after": int(from_step[1]) if from_step else None}
        facts["seconds"] = round(time.monotonic() - began, 1)
        return facts | (self._compared() if codes == [0, 0] else {"equal": False})

    def _compared(self) -> dict[str, Any]:
        """Whether all files, times aside, are the undisturbed run's; which are not."""
        own, wanted = outcome(self.folder), outcome(self.work / "whole")
        differing = [n for n in {**own, **wanted} if own.get(n) != wanted.get(n)]
        return {"equal": not differing, "differing": sorted(differing)}


def ended(ranks: list[subprocess.Popen[bytes]]) -> bool:
    return any(process.poll() is not None for process in ranks)


def wait(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)


def good(row: dict[str, Any]) -> bool:
    """Whether the case came out as it must."""
    if row["happened"] == "went on":
        return row["goes_on"] and row["equal"]
    again = row.get("resumed") or {}
    return row["happened"] == "ended" and not row["goes_on"] and row["named"] and again["equal"]


def shown(row: dict[str, Any]) -> str:
    words = "ok " if good(row) else "-- " if row["happened"].startswith("not") else "BAD"
    line = next((each[0] for each in row.get("lines", []) if each), row["problem"] or "")
    return f"{words} {row['name']:21} {row['happened']}, {row.get('seconds')} s {line}"


def one(name: str, changed: dict[str, float], work: Path, steps: int, cpu: bool) -> dict[str, Any]:
    case = next(case for case in CASES if case.name == name)
    return Trial(replace(case, **changed), work, steps, cpu).run()  # type: ignore[arg-type]


def in_process(name: str, work: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A case in a process of its own, since an owner has one set of nodes."""
    words = ["--one", name, "--work", str(work), "--steps", str(args.steps), "--out", str(args.out)]
    words += ["--cpu"] if args.cpu else []
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, check=False)
    try:
        row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        row = {"name": name, "happened": "no row", "goes_on": None, "problem": None}
        row["problem"] = done.stderr.decode(errors="replace")[-2000:]
    print(shown(row), flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default="", help="names, with commas; all by default")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--beside", type=int, default=16, help="cases side by side")
    parser.add_argument("--cpu", action="store_true", help="gloo in place of NCCL")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one, {}, args.work, args.steps, args.cpu)))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = [case.name for case in CASES if not args.cases or case.name in args.cases.split(",")]
    work = Path(tempfile.mkdtemp(prefix="links-"))
    began = time.monotonic()
    facts = {"machine": machine_facts(), "commit": commit(), "versions": versions()}
    facts |= {"cpu": args.cpu, "steps": args.steps}
    rows = [in_process("whole", work, args)]
    with ThreadPoolExecutor(args.beside) as pool:
        others = [name for name in wanted if name != "whole"]
        under_way = [pool.submit(in_process, name, work, args) for name in others]
        for done in as_completed(under_way):
            rows.append(done.result())
            keep(args.out, work, facts, rows, began)
    bad = [row["name"] for row in rows if not good(row)]
    seconds = round(time.monotonic() - began)
    print(f"{len(rows)} cases in {seconds} s; not as they must be: {', '.join(bad) or 'none'}")
    return 1 if bad else 0


def keep(
    out: Path, work: Path, facts: dict[str, Any], rows: list[dict[str, Any]], began: float
) -> None:
    """What is known, should time end here."""
    found = {**facts, "seconds": round(time.monotonic() - began), "results": rows}
    (out / "links.json").write_text(json.dumps(found, indent=1) + "\n")
    logs = out / "links-logs"
    logs.mkdir(exist_ok=True)
    for log in work.glob("*.txt"):
        shutil.copy(log, logs)


if __name__ == "__main__":
    sys.exit(main())
