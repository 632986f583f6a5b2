"""A study through Hydra's launchers, and the Slurm config that users edit."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from tests.study.test_kill import write_study
from zpp_lab.compose import load_study
from zpp_lab.config import StudyConfig
from zpp_lab.paths import conf_dir
from zpp_lab.study.launch import run_study
from zpp_lab.study.runs import find_runs


def small_study(folder: Path) -> StudyConfig:
    study = load_study(str(write_study(folder)), {"seeds": [1]}, ["train.steps=6"])
    return study


def run_with(launcher: str, folder: Path) -> str:
    out = io.StringIO()
    outcome = run_study(small_study(folder), folder / "out", launcher=launcher, stream=out)
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
        launcher="basic",
        stream=io.StringIO(),
    )
    assert outcome.diverged == ["lost seed 1"]
    assert outcome.finished == ["zero3 seed 1"]
    failure = json.loads((tmp_path / "out" / "lost" / "seed1" / "failure.json").read_text())
    assert failure["outcome"] == "diverged"


def test_a_launcher_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"launcher 'slrum' cannot start.*zpp_lab\[slurm\]"):
        run_with("slrum", tmp_path)
    with pytest.raises(ValueError, match=r"slurm\n[^:]*$"):  # ends with those that there are
        run_with("slrum", tmp_path)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]  # nothing has begun


def test_the_slurm_config_fits_the_plugin() -> None:
    """Composed with the plugin's schema: a name that it does not have would be an error."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        composed = hydra_compose(
            "config", overrides=["hydra/launcher=slurm"], return_hydra_config=True
        )
    launcher = OmegaConf.to_container(composed.hydra.launcher, resolve=False)
    assert isinstance(launcher, dict)
    assert launcher["_target_"].endswith("SlurmLauncher")
    ours = yaml.safe_load((conf_dir() / "hydra" / "launcher" / "slurm.yaml").read_text())
    assert {k: launcher[k] for k in ours if k != "defaults"} == {
        k: v for k, v in ours.items() if k != "defaults"
    }
