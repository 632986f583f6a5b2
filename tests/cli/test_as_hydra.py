"""What users of Hydra know: its flags, + and ~, files of one's own, sweepers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from _pytest.logging import LogCaptureHandler

from tests.small_runs import SHAPE, corpus
from zpp_lab.cli.main import main
from zpp_lab.config.compose import PLUGINS, compose, explain
from zpp_lab.config.flat import (
    arm_name,
    carried,
    every_setting,
    flat_config,
    flatten,
    stored_config,
)
from zpp_lab.config.load import load
from zpp_lab.config.schema import Config, TrainConfig
from zpp_lab.files import BEGIN_WITH, conf_names
from zpp_lab.runs.reader import find_runs
from zpp_lab.study.run.multirun import planned_sweep

Said = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hydra's --info and --multirun set up logging for the whole process."""
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    level, handlers = root.level, set(root.handlers)
    yield
    root.setLevel(level)
    for handler in set(root.handlers) - handlers:
        if not isinstance(handler, LogCaptureHandler):  # pytest's own come and go by themselves
            root.removeHandler(handler)


def said(capsys: Said, *words: str, code: int = 0) -> str:
    assert main([*words]) == code
    out, err = capsys.readouterr()
    return err if code else out


def test_cfg_and_info_show_what_hydra_composes(capsys: Said) -> None:
    smoke = ["train", "experiment=smoke", "recipe=w4"]
    job = yaml.safe_load(said(capsys, *smoke, "--cfg", "job", "--resolve"))
    assert load(Config, job) == compose(smoke[1:])
    assert yaml.safe_load(said(capsys, *smoke, "--cfg", "job", "-p", "train"))["steps"] == 40
    assert "launcher:" in said(capsys, *smoke, "--cfg", "hydra")
    assert "experiment: smoke" in said(capsys, *smoke, "--info", "defaults-tree")
    assert "Did you mean smoke" in said(capsys, "train", "experiment=smok", "--cfg=job", code=2)
    assert "--cfg" in said(capsys, "train", "--resolve", code=2)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["recipe=zeropp", "model=1m", "seed=3", "data.suffixes=[.h]"],
        ["recipe=w8_then_w4", "run.dir=x"],
        ["recipe=tagc_topk", "cluster=2x2"],
        ["experiment=pretrain_13b", "hardware=8gpus", "recipe=g2_ef"],
        ["recipe=w8", "recipe.rules=[{name: head*, wires: [weights_forward], set: {bits: 4}}]"],
    ],
)
def test_a_dry_run_shows_what_differs_and_full_shows_all(words: list[str], capsys: Said) -> None:
    short, full = (said(capsys, "train", *words, "--dry-run", *more) for more in ([], ["--full"]))
    found = yaml.safe_load(short) or {}
    assert load(Config, found) == compose(words)
    own, usual = flatten(found), flatten(asdict(Config()))
    assert all(value != usual.get(key) for key, value in own.items())
    assert len(short.splitlines()) < 60 < len(full.splitlines())
    every = flatten(yaml.safe_load(full))
    only_where_set = {"cluster.tp", "cluster.pp"}
    assert set(usual) - set(own) - only_where_set <= set(every)
    assert "--full" in said(capsys, "train", *words, "--full", code=2)


def test_plus_adds_and_tilde_takes_out() -> None:
    words = ["recipe.weights.codec=none", "+recipe.weights.options.radius=2"]
    assert compose(words).recipe.weights.options == {"radius": 2}
    steps = compose(["experiment=smoke", "~train.steps"]).train.steps
    assert steps == TrainConfig.steps != compose(["experiment=smoke"]).train.steps
    for group in ("recipe", "train"):
        with pytest.raises(ValueError, match=rf"~{group}\.SETTING"):
            compose(["experiment=smoke", "recipe=w4", f"~{group}"])
    assert compose(["~experiment"]) == compose([])
    for word in ("+recipe=w4", "++recipe=w4"):
        with pytest.raises(ValueError, match=r"recipe=NAME"):
            compose([word])


def test_files_of_ones_own(tmp_path: Path, capsys: Said) -> None:
    own = tmp_path / "mine"
    files = {"recipe/six": "name: six\nweights: {bits: 6}", "experiment/short": SHORT}
    for name, text in {**files, "study/both": BOTH}.items():
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / f"{name}.yaml").write_text(text)
    words = ["--config-dir", str(own)]
    found = yaml.safe_load(said(capsys, "train", *words, "experiment=short", "--dry-run"))
    assert (found["recipe"]["name"], found["train"]["steps"]) == ("six", 7)
    assert "six: weights_forward" in said(capsys, "study", "both", *words, "--dry-run")
    sweep = ["train", "-m", *words, "recipe=six,w4", "--dry-run"]
    assert "recipe=six/seed1" in said(capsys, *sweep)
    assert "recipe=six" in said(capsys, "train", "recipe=six", code=2)  # told once
    (own / "recipe" / "w4.yaml").write_text("name: other")
    assert "conf/ has recipe/w4.yaml too" in said(capsys, *sweep, code=2)
    assert "nowhere" in said(capsys, "train", "--config-dir", "nowhere", code=2)


def test_names_that_conf_lacks_are_found_in_the_working_folders(capsys: Said) -> None:
    for name, text in {"recipe/six": "name: six\nweights: {bits: 6}", "study/both": BOTH}.items():
        path = Path("conf") / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    Path("conf/recipe/w4.yaml").write_text("name: other")
    assert compose(["recipe=six"]).recipe.weights.bits == 6
    assert arm_name(compose(["recipe=six"])) == "six"
    assert compose(["recipe=w4"]).recipe.name == "w4"  # a name of conf/ means that one
    assert "six: weights_forward" in said(capsys, "study", "both", "--dry-run")
    assert "recipe=six/seed1" in said(capsys, "train", "-m", "recipe=six,w4", "--dry-run")


@pytest.mark.parametrize(("group", "command"), [("recipe", "train"), ("study", "study")])
def test_long_lists_say_what_to_begin_with(group: str, command: str, capsys: Said) -> None:
    first = BEGIN_WITH[group]
    assert len(first) == 3
    assert set(first) <= set(conf_names(group))
    word = "recipe=nothing" if group == "recipe" else "nothing"
    with pytest.raises(SystemExit):
        main([command, "--help"])
    helped = " ".join(capsys.readouterr().out.split())
    for text in (said(capsys, command, word, code=2), helped):
        at = [text.index(f"{', '.join(first)} "), text.index(", ".join(conf_names(group)))]
        assert at == sorted(at)


SHORT = "# @package _global_\ndefaults: [override /recipe: six]\ntrain: {steps: 7}\n"
BOTH = """extends: smoke
name: both
only: [zero3, six]
arms: [{name: six, overrides: [recipe=six]}]
"""


def test_a_sweeps_dry_run_lists_every_run_and_starts_none(capsys: Said) -> None:
    words = ["recipe=zero3,w4", "model=1m", "engine=fsdp", "train.param_dtype=bf16", "seed=1,2"]
    words += ["train.warmup_steps=5", "train.reduce_dtype=bf16"]
    text = said(capsys, "train", "-m", *words, "--dry-run", "--machine", "h200")
    for recipe in ("zero3", "w4"):
        for seed in (1, 2):
            assert f"recipe={recipe}/seed{seed}, unfinished: recipe.name={recipe}" in text
    assert text.count("bits=4 block_size=256 symmetric=true rounding=nearest") == 2
    assert text.count("the ranks send") == text.count(" s a step") == 4
    assert "train.warmup_steps=5" in text
    words += ["hydra/launcher=slurm", "hydra.launcher.partition=gpu"]
    assert "#SBATCH --partition=gpu" in said(capsys, "train", "-m", *words, "--dry-run")
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("recipe=glob(w[24])", None),  # Hydra's grammar has no such pattern
        ("recipe=glob(w?)", ["w2", "w4", "w6", "w8"]),
        ("recipe=glob([w2,w4*],exclude=*_diff)", ["w2", "w4", "w4_normal"]),
        ("recipe=glob(w4*,exclude=[*_diff,*_normal])", ["w4"]),
        ("recipe=glob(six*)", ["six"]),  # of one's own conf/
        ("recipe=glob(nothing*)", None),
        ("train.lr=glob(*)", None),
    ],
)
def test_glob_means_the_names_of_a_group(word: str, names: list[str] | None, capsys: Said) -> None:
    Path("conf/recipe").mkdir(parents=True)
    Path("conf/recipe/six.yaml").write_text("name: six\nweights: {bits: 6}")
    words = [word, "train.steps=20", "seed=1,2"]
    if names is None:
        text = said(capsys, "train", "-m", *words, "--dry-run", code=2)
        assert word.partition("=")[0] in text
        assert len(text.splitlines()) == 1
    else:
        runs = planned_sweep(words).runs
        assert [run.recipe.name for run in runs] == [name for name in names for _ in range(2)]


def test_of_a_sweeps_values_the_one_that_is_refused_is_named(capsys: Said) -> None:
    words = ["train", "-m", "recipe=glob(w8*)", "train.steps=1", "--dry-run"]
    assert "recipe=w8_then_w4: recipe.phases[0]" in said(capsys, *words, code=2)
    with pytest.raises(ValueError, match=r"recipe=glob\(w\*\)"):
        compose(["recipe=glob(w*)"])


@pytest.mark.slow
def test_a_sweep_over_glob_trains_each(tmp_path: Path, capsys: Said) -> None:
    own = [*SHAPE, "train.steps=1", "train.warmup_steps=0", f"data.path={corpus(tmp_path)}"]
    said(capsys, "train", "-m", *own, "recipe=glob(w4*,exclude=*_diff)", "hydra.sweep.dir=all")
    assert {run.arm for run in find_runs(Path("all"))} == {"w4", "w4_normal"}


def test_what_wires_carry_is_written_out() -> None:
    """In a run's config.yaml, and so in wandb; it is no setting, and no run differs by it."""
    config = compose(["recipe=zeropp", "recipe.weights.hadamard=64"])
    written = every_setting(config)
    forward = written["wires"]["weights_forward"]
    assert (forward["block_size"], forward["hadamard"]) == (256, 64)
    assert stored_config(written) == config
    assert flat_config(written) == flat_config(config)
    phased = every_setting(compose(["recipe=w8_then_w4", "train.steps=100"]))["wires"]
    assert phased["after 10"]["weights_forward"]["bits"] == 4
    (ruled,) = every_setting(compose(["recipe=tagc_topk"]))["wires"]["grads_intra"]["rules"]
    assert (ruled["name"], ruled["codec"]) == ("*layers.*", "topk")
    for rules in ("[{set:{bits:4}}]", "[{name:'x*',exempt:true},{set:{bits:4}}]"):  # the last holds
        everywhere = compose([f"recipe.rules={rules}"])
        assert carried(everywhere) == carried(compose(["recipe=w4", "recipe.grads.bits=4"]))
    parts = carried(compose(["cluster.tp=2", "recipe.acts.bits=4"]))
    assert "acts_forward, acts_backward " in parts  # and nothing between stages, as there are none
    assert "acts_pipe" not in parts


def test_a_plugin_that_is_not_there_is_named() -> None:
    for name, extra in PLUGINS.items():
        group, _, plugin = name.rpartition("/")
        error = ValueError(f"Could not find '{name}'")
        assert f"pip install 'zpp_lab[{extra}]'" in explain(error, [f"{group}={plugin}"])
    with pytest.raises(ValueError, match=r"hydra/launcher.*\bjoblib, slurm"):
        compose_sweep("hydra/launcher=nothing")


def compose_sweep(*words: str) -> None:
    planned_sweep([*words, "seed=1,2"])


@pytest.mark.parametrize(
    "word",
    [
        "+hydra.sweeper.params.train.lr='0.1,0.2'",
        "hydra.sweeper.params={train.lr: '0.1,0.2'}",
        "+hydra.sweeper.params.seed='1,2'",
    ],
)
def test_a_sweeps_parameters_are_words_of_their_own(word: str, capsys: Said) -> None:
    for more in ([], ["--dry-run"]):
        wrong = said(capsys, "train", "-m", "experiment=smoke", word, *more, code=2)
        assert len(wrong.splitlines()) == 1
        assert "hydra.sweeper.params" in wrong


def test_a_file_may_set_a_sweeps_parameters(capsys: Said) -> None:
    folder = Path("own/hydra/sweeper")
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("defaults: [basic]\nparams: {seed: '4,5'}\n")
    words = ["train", "-m", "experiment=smoke", "hydra/sweeper=mine", "--config-dir", "own"]
    for own, first in ([], 4), (["hydra.sweeper.params.seed='6,7'"], 6):
        assert f"zeropp/seed{first}" in said(capsys, *words, *own, "--dry-run")


@pytest.mark.slow
@pytest.mark.parametrize("word", ["hydra/sweeper=optuna", "hparams_search=optuna"])
def test_optuna_draws_runs(word: str, tmp_path: Path, capsys: Said) -> None:
    own = [*SHAPE, "train.steps=2", "train.warmup_steps=1", f"data.path={corpus(tmp_path)}"]
    own += ["train.warmup_steps=choice(1,2)", "train.lr=interval(0.001,0.01)"]
    own += [word, "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1", "hydra.sweep.dir=drawn"]
    assert "optuna, 2 runs" in said(capsys, "train", "-m", *own, "--dry-run")
    assert not Path("drawn").exists()
    said(capsys, "train", "-m", *own)
    rates = {run.config["train"]["lr"] for run in find_runs(Path("drawn"))}
    assert len(rates) == 2
    assert all(0.001 <= rate <= 0.01 for rate in rates)
