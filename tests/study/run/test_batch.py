"""A study through Hydra's launchers, and the Slurm config that users edit."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.study.run.test_kill import write_study
from tests.train.launch.test_srun import port
from zpp_lab.cli.main import main
from zpp_lab.config.compose import compose, load_study
from zpp_lab.config.study import StudyConfig
from zpp_lab.runs.reader import find_runs
from zpp_lab.study.run.batch import needs
from zpp_lab.study.run.launch import Launch, run_study


def small_study(folder: Path) -> StudyConfig:
    study = load_study(str(write_study(folder)), {"seeds": [1]}, ["train.steps=6"])
    return study


def run_with(launcher: str, folder: Path) -> str:
    out = io.StringIO()
    outcome = run_study(small_study(folder), folder / "out", Launch(launcher=launcher), stream=out)
    assert outcome.exit_code == 0
    return out.getvalue()


def test_hydras_own_launcher_runs_the_list_and_repeats_nothing(tmp_path: Path) -> None:
    text = run_with("basic", tmp_path)
    assert "through Hydra's launcher basic" in text
    runs = find_runs(tmp_path / "out")
    assert [(run.arm, run.seed, run.outcome) for run in runs] == [
        ("qsdp", 1, "finished"),
        ("zero3", 1, "finished"),
    ]
    assert runs[0].config["run"]["study"] == "killed"
    before = [(run.dir / "summary.json").stat().st_mtime_ns for run in runs]
    assert "2 finished already" in run_with("basic", tmp_path)
    assert before == [(run.dir / "summary.json").stat().st_mtime_ns for run in runs]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["submitit_local", "joblib"])
def test_other_launchers_run_the_same_study(tmp_path: Path, launcher: str) -> None:
    run_with(launcher, tmp_path)
    assert [run.outcome for run in find_runs(tmp_path / "out")] == ["finished"] * 2


def test_a_job_that_fails_is_one_outcome_of_several(tmp_path: Path) -> None:
    study = small_study(tmp_path)
    values = {**vars(study), "overrides": [*study.overrides, "recipe.stage=3"]}
    arms = [study.arms[0], type(study.arms[1])("lost", ["recipe=zero3", "train.lr=1e30"])]
    outcome = run_study(
        StudyConfig(**{**values, "arms": arms}),
        tmp_path / "out",
        Launch(launcher="basic"),
        stream=io.StringIO(),
    )
    assert outcome.diverged == ["lost seed 1"]
    assert outcome.finished == ["zero3 seed 1"]
    failure = json.loads((tmp_path / "out" / "lost" / "seed1" / "failure.json").read_text())
    assert failure["outcome"] == "diverged"


# Slurm on one machine, as far as submitit asks of it: sbatch starts the tasks of its script in the
# background, one job of an array after the other, and sacct tells when all have ended.
SBATCH = """#!{python}
import os, re, subprocess, sys
if len(sys.argv) == 2:
    script = open(sys.argv[1]).read()
    number = str(70 + len(os.listdir("{log}")))
    open(f"{log}/{{number}}", "w").write(script)
    said = open("{log}.txt", "a")  # not sbatch's own pipes: who called it waits for their end
    job = [sys.executable, __file__, "run", number]
    subprocess.Popen(job, stdout=said, stderr=said, start_new_session=True)
    print("Submitted batch job", number)
    sys.exit()
number = sys.argv[2]
asked = dict(re.findall(r"#SBATCH --([\\w-]+)=(\\S+)", open(f"{log}/{{number}}").read()))
last = asked["array"].partition("%")[0].split("-")[1] if "array" in asked else None
for job in range(int(last or 0) + 1):
    own = {{"ARRAY_JOB_ID": number, "ARRAY_TASK_ID": job}} if last else {{}}
    own["JOB_ID"] = number + str(job) if last else number
    own |= {{"JOB_NUM_NODES": asked["nodes"], "NNODES": asked["nodes"]}}
    own["TASKS_PER_NODE"] = asked["ntasks-per-node"]
    own["CPUS_PER_TASK"] = asked["cpus-per-task"]
    environment = {{f"SLURM_{{k}}": str(v) for k, v in own.items()}}
    subprocess.run(["bash", f"{log}/{{number}}"], env={{**os.environ, **environment}})
open(f"{log}.{{number}}.ended", "w")
"""
SRUN = """#!{python}
import os, subprocess, sys
nodes, each = (int(os.environ["SLURM_" + k]) for k in ("NNODES", "TASKS_PER_NODE"))
shared = {{"NTASKS": nodes * each, "NPROCS": nodes * each, "STEP_ID": 0}}
command = sys.argv[sys.argv.index("-u") - 1 :]
tasks = []
for rank in range(nodes * each):
    node, local = divmod(rank, each)
    own = {{**shared, "PROCID": rank, "NODEID": node, "LOCALID": local}}
    own["CPUS_PER_TASK"] = os.environ.get("SRUN_CPUS_PER_TASK", 1)  # as of Slurm 22.05
    environment = {{**os.environ, **{{f"SLURM_{{k}}": str(v) for k, v in own.items()}}}}
    said = open("{log}.txt", "a")
    tasks.append(subprocess.Popen(command, env=environment, stdout=said, stderr=said))
codes = [task.wait() for task in tasks]
print(codes, own["CPUS_PER_TASK"], file=open("{log}.codes", "a"))
sys.exit(max(map(abs, codes)))
"""
SACCT = """#!{python}
import os, sys
print("JobID|State|NodeList")
for number in (word for word in sys.argv if word.isdigit()):
    state = "COMPLETED" if os.path.exists(f"{log}.{{number}}.ended") else "RUNNING"
    for job in ("", *(f"_{{i}}" for i in range(9))):
        print(f"{{number}}{{job}}|{{state}}|here")
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the scripts that sbatch was given."""
    programs, log = tmp_path / "bin", tmp_path / "slurm"
    programs.mkdir()
    log.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "sacct": SACCT}.items():
        (programs / name).write_text(text.format(python=sys.executable, log=log))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(port()))
    return log


def mixed(folder: Path, *real: str) -> Path:
    """A study with an arm on the virtual engine and one on real ranks."""
    path = write_study(folder)
    study = yaml.safe_load(path.read_text())
    study["seeds"] = [1]
    study["overrides"].append("train.steps=4")
    overrides = ["recipe=zero3", "engine=fsdp", "engine.ordered=true", *real]
    study["arms"][1] = {"name": "real", "overrides": overrides}
    path.write_text(yaml.safe_dump(study))
    return path


@pytest.mark.slow
def test_slurm_starts_a_task_for_each_rank(tmp_path: Path, slurm: Path) -> None:
    """Both kinds of jobs, each with its own header; real ranks find each other and do one run."""
    file, root = mixed(tmp_path, "cluster=2x1", "engine.device=cpu"), tmp_path / "out"
    words = ["--launcher", "slurm", "--dir", str(root), "hydra.launcher.partition=mine"]
    words.append("hydra.launcher.setup=['export MINE=\"a, $HOME\"']")
    assert main(["study", str(file), "cluster=2x1", *words, "--no-report"]) == 0
    scripts = sorted(path.read_text() for path in slurm.iterdir())
    found = [dict(re.findall(r"#SBATCH --([\w-]+)=(\S+)", script)) for script in scripts]
    assert sorted((f["nodes"], f["ntasks-per-node"], f["partition"]) for f in found) == [
        ("1", "1", "mine"), ("2", "1", "mine"),
    ]  # fmt: skip
    real, virtual = find_runs(root)
    assert [real.outcome, virtual.outcome] == ["finished", "finished"]
    assert real.heldout_loss == virtual.heldout_loss  # the engines agree, so all ranks were there
    assert real.config["engine"]["name"] == "fsdp"
    codes = slurm.with_suffix(".codes").read_text().split("\n")
    assert sorted(codes) == ["", "[0, 0] 8", "[0] 8"]
    assert all('export MINE="a, $HOME"\n' in script for script in scripts)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (1, 1, 1)),
        (["cluster=2x8"], (1, 1, 1)),
        (["cluster=2x8", "engine=fsdp"], (2, 8, 8)),
        (["cluster=1x8", "engine=fsdp"], (1, 8, 8)),
        (["cluster=2x8", "engine=deepspeed"], (2, 8, 8)),
        (["cluster=2x2", "engine=fsdp", "engine.device=cpu"], (2, 2, 0)),
        (["cluster=2x2", "engine=fsdp", "engine.share_gpus=mps"], (1, 1, 2)),
    ],
)
def test_what_a_run_asks_of_slurm(overrides: list[str], expected: tuple[int, int, int]) -> None:
    config = compose(overrides)
    found = needs(config)
    assert (found.nodes, found.tasks_per_node, found.gpus_per_node) == expected
    larger = replace(config.model, dim=2560, ffn=10240, layers=20)  # copied before it is written
    more = needs(replace(config, model=larger))
    assert more.mem_gb > found.mem_gb or config.engine.name == "deepspeed"
    assert (found.mem_gb == 0) == (config.engine.name == "deepspeed")  # 0: all that a node has


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["hydra.launcher.gpus_per_node=1"], "hydra.launcher.gpus_per_node=1, but engine="),
        (
            ["hydra.launcher.nodes=1"],
            "nodes=1, but engine=fsdp on cluster 2x8 needs 2",
        ),
        (["hydra.launcher.tasks_per_node=1"], "tasks_per_node=1, but engine=fsdp on cluster 2x8"),
        (["hydra.launcher.mem_gb=1"], "hydra.launcher.mem_gb=1, but engine="),
        (["hydra.launcher.gres='gpu:4'"], "hydra.launcher.gres=gpu:4, but engine="),
        (["+hydra.launcher.additional_parameters.nodes=3"], "gpus_per_task"),
        (
            ["+hydra.launcher.additional_parameters.ntasks_per_node=1"],
            "gpus_per_task",
        ),
        (["+hydra.launcher.additional_parameters.distribution=cyclic"], "block"),
        (["hydra.launcher.partitoin=x"], "partitoin"),
        (["hydra.sweep.dir=x"], "hydra.launcher"),
    ],
)
def test_what_contradicts_a_run_is_refused(
    words: list[str],
    answer: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one line, before anything is written: of studies and of sweeps."""
    monkeypatch.chdir(tmp_path)
    file = mixed(tmp_path, "cluster=2x8", "engine.device=cuda")
    real = ["engine=fsdp", "cluster=2x8", "seed=1,2"]
    dry = [["--dry-run"]] if words == ["hydra.launcher.nodes=1"] else []
    commands = [["study", str(file), "--launcher", "slurm", *more] for more in ([], *dry)]
    if words[0].startswith(("hydra.launcher.gpus", "hydra.launcher.mem", "hydra.launcher.part")):
        commands.append(["train", "-m", "hydra/launcher=slurm", *real])
    for command in commands:
        assert main([*command, *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert answer in line
    assert not (tmp_path / "runs").exists()


def test_a_distribution_in_blocks_is_the_users_choice(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--launcher", "slurm", "--dry-run"]
    words.append("+hydra.launcher.additional_parameters.distribution=block:cyclic")
    assert main(["study", str(mixed(tmp_path, "cluster=2x8", "engine.device=cuda")), *words]) == 0
    assert "#SBATCH --distribution=block:cyclic" in capsys.readouterr().out


def test_jobs_of_a_sweep_that_ask_for_different_things_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["engine=fsdp", "cluster=1x4,2x4", "seed=1,2"]
    assert main(["train", "-m", "hydra/launcher=slurm", *words]) == 2
    assert "these jobs ask for different nodes" in capsys.readouterr().err
    assert main(["study", "smoke", "hydra.launcher.partition=x"]) == 2
    assert "--launcher" in capsys.readouterr().err
    monkeypatch.setattr("zpp_lab.study.run.batch.shutil.which", lambda _: None)
    for command in (
        ["train", "-m", "hydra/launcher=slurm", "seed=1,2", "engine.device=cpu"],
        ["study", "smoke", "--launcher", "slurm"],
    ):
        assert main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "sbatch" in line
    assert not list(tmp_path.iterdir())
