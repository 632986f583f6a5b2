"""A study on GPUs that says nothing of it holds out two million tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.study.fake_trainer import fake_compose
from zpp_lab.config.compose import compose, load_study
from zpp_lab.config.study import ArmConfig, StudyConfig
from zpp_lab.runs.reader import write_study
from zpp_lab.study.run.plan import Planner, heldout_default


def study(*overrides: str, arm: tuple[str, ...] = ()) -> StudyConfig:
    arms = [ArmConfig("zero3"), ArmConfig("a", ["recipe.exempt.max_ndim=0", *arm])]
    return StudyConfig("mine", "Does it hold?", arms, [1], ["engine.device=auto", *overrides])


def tokens(what: StudyConfig, root: Path) -> set[int]:
    return {run.config.train.eval_tokens for run in Planner(what, root, fake_compose).first()}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    return monkeypatch


def test_it_goes_by_where_the_runs_are(tmp_path: Path, gpu: pytest.MonkeyPatch) -> None:
    def of(what: StudyConfig, slurm: bool = False) -> set[int]:
        return tokens(heldout_default(what, tmp_path, fake_compose, slurm), tmp_path)

    assert of(study()) == {2**21}
    assert of(study("engine.device=cpu")) == {32768}
    assert of(study("train.eval_tokens=5000")) == {5000}
    assert of(study(arm=("train.eval_tokens=5000",))) == {32768, 5000}, "each as it says"
    gpu.setenv("CUDA_VISIBLE_DEVICES", "")
    assert of(study()) == {32768}
    assert of(study(), slurm=True) == {2**21}


@pytest.mark.parametrize("name", ["bits", "smoke", "reference_10m", "finetune_wires"])
def test_published_studies_keep_their_own(name: str, tmp_path: Path, gpu: object) -> None:
    what = load_study(name)
    assert heldout_default(what, tmp_path, compose) is what


def test_one_that_has_begun_goes_on_with_what_it_has(
    tmp_path: Path, gpu: pytest.MonkeyPatch
) -> None:
    for name in ("older", "newer"):
        (tmp_path / name).mkdir()
    write_study(tmp_path / "older", study())
    write_study(tmp_path / "newer", heldout_default(study(), tmp_path, fake_compose))
    kept = [heldout_default(study(), tmp_path / at, fake_compose) for at in ("older", "newer")]
    assert [tokens(one, tmp_path) for one in kept] == [{32768}, {2**21}]
    gpu.setenv("CUDA_VISIBLE_DEVICES", "")
    assert heldout_default(study(), tmp_path / "newer", fake_compose) == kept[1]
