"""Configs: every group composes, and a typo is answered with the valid names."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from zpp_lab.cli.main import main
from zpp_lab.config.compose import OWNERS, compose, load_study, to_config
from zpp_lab.config.flat import EVERY_WIRE, flat_config, stored_config
from zpp_lab.config.load import ELSEWHERE, REMOVED, load, unknown_key, valid_names
from zpp_lab.config.load import written as as_word
from zpp_lab.config.schema import Config
from zpp_lab.config.wires import wires_among
from zpp_lab.files import conf_dir
from zpp_lab.tools.plan.cost.machine import Machine, load_machine

SAVED = ["model.weights=pretrained", "model.path=somewhere"]
# what an option cannot do without
NEEDED = {"model=hf": ["model.path=somewhere"], "lora=raw": SAVED, "lora=q4": SAVED}


def options(group: str) -> list[str]:
    return sorted(p.stem for p in (conf_dir() / group).glob("*.yaml"))


@pytest.mark.parametrize("group", ["model", "lora", "cluster", "engine", "recipe"])
def test_every_option_composes(group: str) -> None:
    assert options(group)
    for name in options(group):
        compose([f"{group}={name}", *NEEDED.get(f"{group}={name}", [])])


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["train.steps=3", "train.steps=4", "recipe=w4", "recipe.weights.bits=6", "recipe=zeropp"],
        ["recipe.weights.bits=6", "experiment=smoke", "model=125m", "model.ffn=64", "lora=none"],
        [
            "recipe.rules=[{name: 'embed*', exempt: true}]",
            "recipe.grads={bits: 8}",
            "recipe.grads.hadamard=32",
        ],
        [
            "data=text",
            "data.path='some texts, [2]'",
            "train.lr=1e-3",
            "model.start=null",
            "seed=7",
        ],
        ["engine=fsdp", "++engine.graph=true", "recipe={hops: 2}", "cluster.nodes=2"],
    ],
    ids=len,
)
def test_words_are_taken_as_hydra_takes_them(words: list[str]) -> None:
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        whole = to_config(hydra_compose("config", words))
    assert compose(words) == whole


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("train.steps=null", "train.steps=null: use a whole number"),
        ("train.lr=inf", "train.lr=inf: use a finite number"),
        ("train.eps=-1", "train.eps=-1: use 0 or more"),
        ("model.rope_theta=0", "model.rope_theta=0: use more than 0"),
        ("recipe.weights.bits=none", "bits='none': use a whole number, or null"),
        ("recipe.exempt=norms", "recipe.exempt.max_ndim, recipe.exempt.names"),
        ("lroa=q4", "engine, experiment, hardware, hparams_search, lora, model"),
        ("engine.graph=maybe", "use true or false"),
        ("train.steps@engine=3", "looks like a config group"),
        ("recipe.weights.bitz=4", "Did you mean bits"),
        ("lr=0.1", r"\btrain\.lr\b"),
        ("optimizer.lr=0.1", r"\btrain\.lr\b"),
        ("recipe.weight.bits=4", r"\brecipe\.weights\.bits\?"),
        ("resume=true", r"\brun\.resume\b"),
        ("logger=wandb", r"\btracking\.wandb\b"),
        ("lora_rank=4", r"mean model\.lora\.rank\?"),
        ("dtype=bf16", r"mean .*\btrain\.param_dtype\b"),
        ("grad_clip=1", r"mean train\.clip\?"),
        ("optim=adam", r"mean train\.lr or"),
        ("train.learningrate=1", r"mean train\.lr\?"),
        ("+recipe.weights.new=4", "recipe.weights.new"),
        ("engine.blocks_per_unit=0", "blocks_per_unit=0: use 1 or more"),
        ("++engine.pull=kernel", "^engine.pull was removed in November 2026; leave it out"),
        ("data=text", "needs data.path"),
    ],
)
def test_mistakes_are_answered(override: str, answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        compose([override])


def test_names_of_other_programs_lead_to_settings() -> None:
    every = flat_config(Config())
    for word, settings in ELSEWHERE.items():
        assert word not in valid_names(Config, [])
        assert set(settings) <= set(every)
        assert settings[0] in unknown_key(Config, word)


@pytest.mark.parametrize("name", REMOVED)
def test_what_was_written_with_a_setting_that_is_gone_is_read(name: str) -> None:
    """Where it said what is done today; else one line names it."""
    *groups, key = name.split(".")
    cls = Config if groups[0] in valid_names(Config, []) else Machine
    assert key not in valid_names(cls, groups)
    assert "\n" not in unknown_key(cls, name)
    if cls is Config:
        for value in REMOVED[name].kept or ():
            stored = asdict(Config())
            stored[groups[0]][key] = value
            assert load(Config, stored) == Config()
            assert flat_config(stored) == flat_config({name: value}) == flat_config(Config())
        stored[groups[0]][key] = "something else"
        with pytest.raises(ValueError, match=f"^{name} "):
            load(Config, stored)
    else:
        told = json.loads((conf_dir() / "machine" / "h200.json").read_text())
        told[groups[0]][key] = [{"anything": 1}]
        assert load(Machine, told) == load_machine("h200")


def test_rules_of_before_the_fifth_wire_hold_for_it() -> None:
    """So a run whose rule was for every wire goes on; one for some of them stays as it was."""
    config = compose(["recipe.rules=[{name: '*', exempt: true}]"])
    stored = asdict(config)
    stored["recipe"]["rules"][0]["wires"] = EVERY_WIRE
    assert flat_config(stored) == flat_config(config)
    assert flat_config(load(Config, stored)) == flat_config(config)
    stored["recipe"].pop("sharding")
    stored["recipe"]["rules"][0]["wires"] = list(wires_among())
    assert flat_config(stored) == flat_config(config)
    assert stored_config(stored) == config
    stored["recipe"]["rules"][0]["wires"] = ["grads_intra"]
    assert flat_config(stored)["recipe.rules"][0]["wires"] == ["grads_intra"]


def test_every_setting_can_be_given_by_its_name() -> None:
    """Whatever files of conf/ were chosen; what the engine does not heed needs ++."""
    others = {f"engine.{key}" for name in ("fsdp", "deepspeed") for key in OWNERS[name][1]}
    every = flat_config(Config())
    words = [f"{k}={as_word(v)}" for k, v in every.items() if k not in others]
    more = [f"++{k}={as_word(every[k])}" for k in others]
    assert compose([*words, *more]) == compose([]) == Config()
    assert compose(["engine=fsdp", "engine.prefetch=2"]).engine.prefetch == 2
    with pytest.raises(ValueError, match=r"model\.dim"):
        compose(["model=hf", "model.path=somewhere", "model.dim=64"])


def written(folder: Path, name: str, text: str) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return str(path)


def test_a_study_extends_another(tmp_path: Path) -> None:
    text = "extends: smoke\nname: mine\noverrides: [train.steps=3]\nwithout: [broken]\n"
    text += "arms: [{name: w8, describe: mine, overrides: [recipe=w8]}, {name: w6}]\n"
    mine, smoke = load_study(written(tmp_path, "mine", text)), load_study("smoke")
    assert (mine.name, mine.question, mine.seeds) == ("mine", smoke.question, smoke.seeds)
    assert mine.overrides == [*smoke.overrides, "train.steps=3"]
    before = {arm.name: arm for arm in smoke.arms}
    after = {arm.name: arm for arm in mine.arms}
    assert set(after) == set(before) - {"broken"} | {"w8", "w6"}
    assert after["w8"].describe == "mine"
    assert after["zero3"] == before["zero3"]


def test_a_study_may_have_some_arms_of_another_alone(tmp_path: Path) -> None:
    text = "extends: symmetry\nname: {0}\nonly: [{1}]\n"
    grid = [arm.name for arm in load_study("symmetry").arms]
    some = load_study(written(tmp_path, "some", text.format("some", ", ".join(grid[::-2]))))
    assert [arm.name for arm in some.arms] == [name for name in grid if name in grid[::-2]]
    fewer = f"extends: {tmp_path / 'some.yaml'}\nname: fewer\nonly: [zero3]\n"
    assert [arm.name for arm in load_study(written(tmp_path, "fewer", fewer)).arms] == ["zero3"]


def test_composites_of_arms_that_are_left_out_go_with_them(tmp_path: Path) -> None:
    asked = "composites: [{name: some, arms: [w4], minus: [w6]}, {name: bits, arms: [w4]}]\n"
    text = "extends: smoke\nname: mine\nonly: [zero3, w4]\n" + asked
    study = load_study(written(tmp_path, "mine", text))
    assert [one.name for one in study.composites] == ["bits"]
    with pytest.raises(ValueError, match="some"):
        load_study(written(tmp_path, "wrong", text.replace("w6", "w5")))


def test_two_grids_may_share_their_arms_pattern(tmp_path: Path) -> None:
    start = "{name: 'x{bits}', overrides: ['recipe.weights.bits={bits}'], factors: {bits: "
    text = f"extends: smoke\nname: mine\narms: [{start}[4]}}}}, {start}[2, 6]}}}}]\n"
    names = [arm.name for arm in load_study(written(tmp_path, "mine", text)).arms]
    assert names[-3:] == ["x4", "x2", "x6"]
    twice = text.replace("[2, 6]", "[4, 6]")
    with pytest.raises(ValueError, match="x4"):
        load_study(written(tmp_path, "mine", twice))


def test_a_rehearsal_is_the_study_with_other_settings_and_folders() -> None:
    whole, mini = (load_study(f"finetune_30b_x2{end}") for end in ("", "_mini"))
    assert (mini.name, mini.seeds, mini.arms) == ("finetune_30b_x2_mini", [1], whole.arms)
    config = compose(mini.overrides)
    assert config.model.start == "runs/finetune_30b_x2_mini_base"
    assert (config.cluster, config.engine.device) == (compose(whole.overrides).cluster, "cpu")
    assert (config.train.steps, config.model.dim) == (8, compose(["model=tiny"]).model.dim)


def test_hardware_behind_a_studys_name_is_in_place_of_its_own() -> None:
    study = load_study("pretrain_13b", {}, ["hardware=1gpu"])
    config = compose(study.overrides)
    assert (config.cluster.nodes, config.cluster.gpus_per_node) == (1, 8)
    assert (config.engine.name, config.engine.compile) == ("virtual", True)
    with pytest.raises(ValueError, match=r"finetune_1b hardware=4gpus"):
        load_study("finetune_1b_x4")


def test_a_setting_that_only_the_run_before_the_arms_would_have_is_heard(tmp_path: Path) -> None:
    arm = "{name: zero3, role: baseline, overrides: [recipe=zero3, train.lr=1e-3]}"
    text = f"name: mine\nquestion: q\nbaseline: zero3\nseeds: [1]\narms: [{arm}]\n"
    first = "prepare: [{name: base, overrides: [recipe=zero3]}]\n"
    with pytest.raises(ValueError, match=r"train\.lr"):
        load_study(written(tmp_path, "alone", text), {}, ["train.lr=2e-3"])
    prepared = written(tmp_path, "prepared", text + first)
    assert load_study(prepared, {}, ["train.lr=2e-3"]).overrides == ["train.lr=2e-3"]
    with pytest.raises(ValueError, match="recipe"):
        load_study(prepared, {}, ["recipe=w4"])


@pytest.mark.parametrize(
    ("more", "answer"),
    [
        ("without: [w9]", "without: .*w9.*zero3"),
        ("only: [zero3, w9]", "only=w9.*zero3, zero3_reordered"),
        ("arms: [w8]", "arms: "),
    ],
)
def test_what_extends_wrongly_is_told(tmp_path: Path, more: str, answer: str) -> None:
    name = written(tmp_path, "mine", f"extends: smoke\nname: mine\n{more}\n")
    with pytest.raises(ValueError, match=answer):
        load_study(name)


@pytest.mark.parametrize(
    "name", ["../../x", "/x", "", ".", "..", ".x", "a/b", "a\\b", "a b", "a\n", "a\tb", "\x1b[2J"]
)
def test_no_name_leaves_the_folder_of_all_studies(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a study's own nor one that `extends` gives, and --dir changes nothing; nor an arm's
    or a prepared run's."""
    monkeypatch.chdir(tmp_path)
    short = yaml.safe_dump({"name": name})
    one = written(tmp_path, "one", f"extends: smoke\n{short}")
    heir = written(tmp_path, "heir", f"extends: {one}\n")
    arm = written(tmp_path, "arm", yaml.safe_dump({"extends": "smoke", "arms": [{"name": name}]}))
    first = {"extends": "smoke", "prepare": [{"name": name}]}
    for file in (one, heir, arm, written(tmp_path, "first", yaml.safe_dump(first))):
        for more in ([], ["--dir", "here"], ["--dry-run"], ["--watch"]):
            assert main(["study", file, *more]) == 2
            said = capsys.readouterr()
            (line,) = said.err.splitlines()
            assert "use letters, digits and _ . , + = -" in line
            assert line.isprintable()
            assert not said.out
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".yaml"]


def test_an_arm_whose_runs_would_not_be_found_is_refused(tmp_path: Path) -> None:
    for name in ("figures", "prepare", "wandb", "checkpoints"):
        text = f"extends: smoke\nname: mine\narms: [{{name: {name}}}]\n"
        with pytest.raises(ValueError, match=f"arm '{name}'"):
            load_study(written(tmp_path, "mine", text))


def test_a_study_does_not_extend_itself(tmp_path: Path) -> None:
    name = written(tmp_path, "mine", f"extends: {tmp_path}/mine.yaml\nname: mine\n")
    with pytest.raises(ValueError):
        load_study(name)


def test_a_tilde_is_the_users_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = compose(["run.dir=~/runs/a", "data=text", "data.path='~/some texts'"])
    assert (config.run.dir, config.data.path) == ("/home/me/runs/a", "/home/me/some texts")


def test_a_cluster_that_has_no_file_can_be_given_by_its_two_numbers() -> None:
    with pytest.raises(ValueError, match=r"cluster\.nodes=3 cluster\.gpus_per_node=4"):
        compose(["cluster=3x4"])
    assert compose(["cluster.nodes=3", "cluster.gpus_per_node=4"]).cluster.world == 12
