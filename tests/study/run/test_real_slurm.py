"""A study under a real Slurm: its controller and two node daemons on this machine.

Debian's slurmctld, slurmd, slurm-client and munge, as root; ports and files are the test's own.
There is no accounting database, so `sacct`, which submitit asks, is a script over `scontrol`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.study.run.test_kill import write_study
from tests.train.launch.test_srun import port
from tests.waiting import until
from zpp_lab.cli.main import main
from zpp_lab.runs.reader import find_runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))),
        reason="needs root and Slurm: apt-get install slurmctld slurmd slurm-client munge",
    ),
]
SIDES = ("real", "virtual")
NODES = ("n1", "n2")
CONF = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={top}/munge.socket,cred_expire=5
SlurmctldPort={port}
StateSaveLocation={top}/state
SlurmdSpoolDir={top}/spool-%n
SlurmctldPidFile={top}/controller.pid
SlurmdPidFile={top}/%n.pid
SlurmctldLogFile={top}/controller.log
SlurmdLogFile={top}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=5
KillWait=5
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs=8 RealMemory=64000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
SACCT = """#!{python}
import re, subprocess
print("JobID|State|NodeList")
for line in subprocess.check_output(["scontrol", "-o", "show", "job"], text=True).splitlines():
    job = dict(re.findall(r"(\\w+)=(\\S*)", line))
    of = (job.get("ArrayJobId"), job.get("ArrayTaskId"))
    print("_".join(of) if of[0] else job["JobId"], job["JobState"], job["NodeList"], sep="|")
"""


class Cluster:
    """The daemons. `kill(node)` ends a node's daemon with all that it has started."""

    def __init__(self, top: Path) -> None:
        self.top = top
        first = port()
        host = socket.gethostname().partition(".")[0]
        text = CONF.format(top=top, host=host, port=first, ports=f"{first + 1}-{first + 2}")
        (top / "slurm.conf").write_text(text)
        (top / "state").mkdir()
        (top / "key").write_bytes(os.urandom(1024))
        (top / "key").chmod(0o400)
        (top / "sacct").write_text(SACCT.format(python=sys.executable))
        (top / "sacct").chmod(0o755)
        files = {"key-file": "key", "socket": "munge.socket", "pid-file": "munge.pid"}
        files |= {"log-file": "munge.log", "seed-file": "seed"}
        run("munged", "--force", *(f"--{k}={top / v}" for k, v in files.items()))
        run("slurmctld", "-f", str(top / "slurm.conf"))
        for node in NODES:
            self.start(node)
        until(lambda: run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2")

    def start(self, node: str) -> None:
        daemon = ["slurmd", "-N", node, "-f", str(self.top / "slurm.conf")]
        subprocess.run(daemon, check=True, env={**os.environ, "SLURMD_NODENAME": node})

    def kill(self, node: str) -> None:
        """By the environment that the fixture gave them, so never another's process."""
        marks = {f"SLURM_CONF={self.top}/slurm.conf".encode(), f"SLURMD_NODENAME={node}".encode()}
        for place in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if marks <= set(place.read_bytes().split(b"\0")):
                    os.kill(int(place.parent.name), signal.SIGKILL)

    def end(self) -> None:
        subprocess.run(["scancel", "--user=root"], check=False)
        for node in NODES:
            self.kill(node)
        for name in ("controller", "munge"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((self.top / f"{name}.pid").read_text()), signal.SIGTERM)


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def cluster(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    top = tmp_path_factory.mktemp("slurm")
    for folder in (top, top.parent, top.parent.parent):  # munge wants its socket's path open
        folder.chmod(0o755)
    monkeypatch.setenv("SLURM_CONF", str(top / "slurm.conf"))
    monkeypatch.setenv("PATH", f"{top}:{os.environ['PATH']}")
    there = Cluster(top)
    yield there
    there.end()


def steps(root: Path) -> int:
    return sum(path.read_text().count("\n") for path in root.rglob("metrics.jsonl"))


def losses(root: Path) -> dict[tuple[str, int], object]:
    runs = find_runs(root)
    assert [r.outcome for r in runs] == ["finished"] * len(runs)
    return {(r.arm, r.seed): r.heldout_loss for r in runs}


@pytest.mark.timeout(900)
def test_an_array_outlives_a_requeue_and_a_lost_node_to_the_bit(
    tmp_path: Path, cluster: Cluster
) -> None:
    file = str(write_study(tmp_path))
    words = [sys.executable, "-m", "zpp_lab.cli", "study", file, "--seeds", "1", "--no-report"]
    words += ["train.steps=150", "engine.threads=1"]
    root = tmp_path / "out"
    told = ["--dir", str(root), "--launcher", "slurm", "hydra.launcher.timeout_min=30"]
    told += ["hydra.launcher.array_parallelism=2", "hydra.launcher.mem_gb=16"]
    study = subprocess.Popen([*words, *told], cwd=Path(__file__).parents[3])
    try:
        until(lambda: root.is_dir() and steps(root) > 30)
        jobs = re.findall(r"^JobId=(\d+)\s", run("scontrol", "-o", "show", "job"), re.M)
        assert len(jobs) == 2  # one array of two
        run("scontrol", "requeue", jobs[0])
        cluster.kill("n1")  # both began there
        time.sleep(8)  # the controller has seen it
        cluster.start("n1")
        assert study.wait(600) == 0
    finally:
        study.kill()
    assert "Restarts=1" in run("scontrol", "-o", "show", "job")
    alone = ["--dir", str(tmp_path / "alone")]
    assert main([*words[3:], *alone]) == 0
    assert losses(root) == losses(tmp_path / "alone")
    assert len(losses(root)) == 2


def restarts(job: str = "") -> list[int]:
    return list(
        map(int, re.findall(r"Restarts=(\d+)", run("scontrol", "show", "job", *job.split())))
    )


@pytest.mark.timeout(1500)
def test_jobs_that_meet_their_time_limit_go_on_to_the_bit(
    tmp_path: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(write_study(tmp_path))
    words = ["study", file, "--seeds", "1", "train.steps=4000", "engine.threads=1"]
    words.append("train.checkpoint_every=0")  # no checkpoint but the warning's
    root, told = tmp_path / "out", ["--no-report", "--launcher", "slurm"]
    told += ["hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=10"]
    command = [sys.executable, "-m", "zpp_lab.cli", *words, "--dir", str(root), *told]
    study = subprocess.Popen(command, cwd=Path(__file__).parents[3])

    def watched() -> str:
        assert main([*words, "--dir", str(root), "--watch"]) == 0
        return capsys.readouterr().out

    try:
        until(lambda: root.is_dir() and (root / "study.yaml").is_file())
        until(lambda: "queued again at" in watched())
        assert study.wait(1000) == 0
    finally:
        study.kill()
    assert max(restarts()) >= 1
    assert "resuming after step" in "".join(p.read_text() for p in root.glob(".submitit/*/*.out"))
    assert main([*words, "--dir", str(tmp_path / "alone"), "--no-report"]) == 0
    assert losses(root) == losses(tmp_path / "alone")
    assert len(losses(root)) == 2


@pytest.mark.timeout(1500)
def test_the_examples_batch_script_goes_on_after_its_time_limit(
    tmp_path: Path, cluster: Cluster
) -> None:
    """Two ranks, as srun's tasks, on two nodes."""
    given = (Path(__file__).parents[3] / "examples/slurm/train.sbatch").read_text()
    head, found, _ = given.partition("    zpp-lab train")
    assert found
    head = head.replace("source .venv/bin/activate", "").replace("#SBATCH --gpus-per-node", "# ")
    head = head.replace("export MASTER_ADDR", "export MASTER_ADDR=127.0.0.1")  # n1 has no address
    settings = yaml.safe_load(write_study(tmp_path).read_text())["overrides"]
    settings += ["recipe=qsdp", "cluster=2x1", "train.checkpoint_every=0", "engine.threads=1"]
    script = tmp_path / "train.sbatch"
    script.write_text(f'{head}    {sys.executable} -m zpp_lab.cli train engine=fsdp "$@"\n')

    def submit(name: str, *options: str) -> tuple[str, Path]:
        told = ["--ntasks-per-node=1", "--cpus-per-task=1", f"--output={tmp_path / name}.log"]
        own = [*settings, f"run.dir={tmp_path / name}", "train.steps=3000", "engine.device=cpu"]
        told += ["--time=1", "--signal=USR2@10", "--parsable", *options]
        chdir = f"--chdir={Path(__file__).parents[3]}"
        return run("sbatch", chdir, *told, str(script), *own).strip(), tmp_path / f"{name}.log"

    job, log = submit("real")
    until(lambda: "State=COMPLETED" in run("scontrol", "show", "job", job), 1000)
    assert restarts(job)[0] >= 1
    assert "resuming after step" in log.read_text()
    own = ["train.steps=3000", "engine.device=cpu", f"run.dir={tmp_path / 'virtual'}"]
    assert main(["train", *settings, *own]) == 0
    real, virtual = (json.loads((tmp_path / n / "summary.json").read_text()) for n in SIDES)
    assert real["heldout_loss"] == virtual["heldout_loss"]

    job, log = submit("once", "--no-requeue", "--time=10")
    until(lambda: steps(tmp_path / "once") > 5)
    run("scancel", "--signal=USR2", job)
    until(lambda: "submit it with `#SBATCH --requeue`" in log.read_text())
    assert list((tmp_path / "once" / "checkpoints").glob("step-*"))
