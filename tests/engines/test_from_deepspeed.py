"""`zpp-lab from-deepspeed`: settings that mean the same, and not a key lost on the way."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from zpp_lab.cli.main import main
from zpp_lab.collectives.recipe import Recipe
from zpp_lab.config.compose import compose
from zpp_lab.config.wires import wires_among
from zpp_lab.engines.deepspeed.settings import deepspeed_settings
from zpp_lab.engines.deepspeed.translate import Translation, translate

ZEROPP = {
    "stage": 3,
    "zero_quantized_weights": True,
    "zero_hpz_partition_size": 2,
    "zero_quantized_gradients": True,
}
BASE: dict[str, Any] = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 4}


def told(folder: Path, values: Any, nodes: int | None = 2, gpus: int | None = 2) -> Translation:
    file = folder / "ds.json"
    file.write_text(json.dumps(values))
    return translate(file, nodes, gpus)


def said(lines: list[str], words: str) -> bool:
    return any(words in line for line in lines)


@pytest.mark.parametrize("hpz", [1, 2])
@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_its_switches_come_back_as_they_were(
    tmp_path: Path, weights: bool, grads: bool, hpz: int
) -> None:
    zero = {
        "stage": 3,
        "zero_quantized_weights": weights,
        "zero_hpz_partition_size": hpz,
        "zero_quantized_gradients": grads,
    }
    settings = told(tmp_path, {**BASE, "zero_optimization": zero}).settings
    config = compose(settings)
    assert config.engine.name == "fsdp"
    checked = Recipe(config.recipe, config.cluster)
    bits = [checked.wire(wire).bits for wire in wires_among()]
    assert bits == [8 if weights else None] * 2 + [4 if grads else None] * 2
    again = [word.replace("engine=fsdp", "engine=deepspeed") for word in settings]
    made = deepspeed_settings(compose(again))
    assert {key: made["zero_optimization"][key] for key in zero} == zero
    assert (made["train_micro_batch_size_per_gpu"], made["gradient_clipping"]) == (4, 0)


def test_training_is_the_same(tmp_path: Path) -> None:
    values = {
        "train_batch_size": 128,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 90, "warmup_num_steps": 9, "warmup_type": "linear"},
        },
        "zero_optimization": {**ZEROPP, "offload_optimizer": {"device": "cpu"}},
        "tensorboard": {"enabled": True},
    }
    config = compose(told(tmp_path, values, None, None).settings)
    train, cluster = config.train, config.cluster
    assert (cluster.nodes, cluster.gpus_per_node) == (8, 2)  # 128 / (4 · 2), by hpZ's 2 a node
    assert (train.batch_size, train.micro_steps, train.steps) == (4, 2, 90)
    assert (train.lr, train.beta2, train.weight_decay, train.clip) == (3e-4, 0.95, 0.0, 0.5)
    assert (train.param_dtype, train.reduce_dtype) == ("bf16", "fp32")
    assert (train.schedule, train.warmup_steps, train.min_lr_ratio) == ("cosine", 9, 1e-4)
    assert config.engine.offload
    assert config.tracking.tensorboard


@pytest.mark.parametrize(
    ("values", "where", "words"),
    [
        ({}, "silent", "read bf16 gradients as fp16"),
        ({"zero_optimization": {**ZEROPP, "stage": 2}}, "silent", "only stage 3 reads"),
        ({"optimizer": {"type": "Adam", "params": {}}}, "silent", "take Adam for AdamW"),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, "left", "a logarithmic warm-up"),
        ({"optimizer": {"type": "Lion", "params": {"lr": 1}}}, "left", "optimizer.params.lr=1"),
        ({"fp16": {"enabled": True}, "bf16": {}}, "left", "fp16: "),
        ({"a": {"b": {"c": 7}}}, "left", "a.b.c=7: "),
        ({"zero_optimization": {**ZEROPP, "mics_shard_size": 8}}, "left", "mics_shard_size=8"),
    ],
)
def test_what_is_silent_there_or_missing_here_is_said(
    tmp_path: Path, values: dict[str, Any], where: str, words: str
) -> None:
    made = told(tmp_path, {**BASE, "zero_optimization": ZEROPP, **values})
    assert said(getattr(made, where), words), made.text()
    compose(made.settings)


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_a_warm_up_has_two_steps_at_least(tmp_path: Path, kind: str, steps: int) -> None:
    params = {"warmup_num_steps": steps} | ({} if kind == "WarmupLR" else {"total_num_steps": 90})
    made = told(tmp_path, {**BASE, "scheduler": {"type": kind, "params": params}})
    assert compose(made.settings).train.warmup_steps == max(2, steps)
    assert said(made.notes, "warmup_num_steps=0") == (steps == 0)


AUTO: dict[str, Any] = {  # as of transformers' Trainer
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(
            ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"
        ),
    },
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    "gradient_clipping": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


@pytest.mark.parametrize(
    ("values", "given"),
    [
        ({}, {}),
        ({"bf16": {"enabled": True}}, {"param_dtype": "bf16", "reduce_dtype": "bf16"}),
        ({"communication_data_type": "fp32"}, {"reduce_dtype": "fp32"}),
        ({"gradient_clipping": 0.5}, {"clip": "0.5"}),
        ({"train_micro_batch_size_per_gpu": 3}, {"batch_size": "3"}),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": "auto"}}},
            {"lr": "0.1", "eps": "1e-08", "weight_decay": "0"},
        ),
    ],
)
def test_what_is_auto_is_left_out_of_the_command(
    tmp_path: Path, values: dict[str, Any], given: dict[str, str]
) -> None:
    made = told(tmp_path, AUTO | values)
    found = dict(s.removeprefix("train.").split("=") for s in made.settings if s[:6] == "train.")
    assert found == {"schedule": "linear", "min_lr_ratio": "0"} | given
    assert said(made.left, "total_num_steps=auto: transformers' Trainer fills it in; set train.st")
    assert not said(made.silent, "warmup_max_lr")
    compose(made.settings)


@pytest.mark.parametrize("key", ["stage", "zero_quantized_gradients", "zero_hpz_partition_size"])
def test_auto_where_nothing_fills_it_in_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match=rf"zero_optimization\.{key}=auto"):
        told(tmp_path, {**BASE, "zero_optimization": {"stage": 3, key: "auto"}})


@pytest.mark.parametrize(
    ("zero", "gpus", "shard"),
    [
        ({}, 2, "node"),
        ({}, None, "node"),  # a group is a node, where nothing else is known
        ({"mics_hierarchical_params_gather": True}, 2, "node"),
        ({"zero_quantized_weights": True}, 2, "node"),
        ({"zero_quantized_gradients": True}, 2, "node"),
        ({}, 4, "world"),
        ({"zero_hpz_partition_size": 2}, 2, "world"),
        ({"stage": 2}, 2, "world"),
        ({"mics_shard_size": -1}, 2, "world"),
    ],
)
def test_mics_shards_in_the_node(
    tmp_path: Path, zero: dict[str, Any], gpus: int | None, shard: str
) -> None:
    own = {"stage": 3, "mics_shard_size": 2} | zero
    made = told(tmp_path, {**BASE, "zero_optimization": own}, 2, gpus)
    config = compose(made.settings)
    assert (config.recipe.shard, config.cluster.gpus_per_node) == (shard, gpus or 2)
    asked = own["mics_shard_size"] > 0
    assert said(made.notes, "has removed MiCS") == asked
    assert said(made.left, "mics_shard_size=2") == (asked and shard == "world")
    assert not said(made.left, "no equivalent")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"zero_optimization": {"stage": 3}, "zero_optimization": {"stage": 2}}', "zero_opt"),
        ('{"zero_optimization": {"stage": 3, "stage": 3}}', "stage"),
        ('{"optimizer": {"type": "Adam", "params": {"lr": 1, "eps": 1, "lr": 2}}}', "lr"),
    ],
)
def test_a_key_given_twice_is_named(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ValueError, match=rf"ds\.json.*'{name}\w*' appears twice"):
        translate(tmp_path / "ds.json", 2, 2)


def test_loco_is_the_recipe_of_that_name(tmp_path: Path) -> None:
    zero = {**ZEROPP, "zeropp_loco_param": {"err_beta": 0.9, "reset_T": 512}}
    made = told(tmp_path, {**BASE, "zero_optimization": zero})
    recipe = compose(made.settings).recipe
    memory = recipe.wire("grads_inter").memory
    assert (memory.average, memory.reset_every, recipe.secondary) == (0.9, 512, True)
    assert recipe.wire("weights_forward").bits == 8
    assert said(made.notes, "0.19.8 has removed it")


def test_the_command_can_be_pasted(tmp_path: Path) -> None:
    made = told(tmp_path, {**BASE, "wandb": {"enabled": True, "group": "one, two 'x'"}})
    words = shlex.split(made.text().split("\n")[0])
    assert words == ["zpp-lab", "train", *made.settings]
    assert compose(words[2:]).tracking.group == "one, two 'x'"


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(values: Any) -> str:
        file = tmp_path / "ds.json"
        file.write_text(values if isinstance(values, str) else json.dumps(values))
        assert main(["from-deepspeed", str(file), "--nodes=2", "--gpus-per-node=2"]) == 2
        return capsys.readouterr().err

    assert "is not 4 × 2 × 4 ranks" in refused({**BASE, "train_batch_size": 40})
    less = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 16}
    assert "is not 16 × 0 × 4 ranks" in refused(less)
    with pytest.raises(ValueError, match="16 × 1 × 0"):
        told(tmp_path, less | {"gradient_accumulation_steps": 1}, None, None)
    assert "bf16 and fp16 are both enabled" in refused({**BASE, "fp16": {"enabled": True}})
    assert "gradient_clipping='x': use a number" in refused({"gradient_clipping": "x"})
    for section in ("zero_optimization", "bf16", "optimizer", "scheduler", "wandb"):
        assert f"{section}=3: " in refused({section: 3})
        assert told(tmp_path, {section: None}).settings[0] == "engine=fsdp"
    assert "zero_optimization.offload_param='cpu': " in refused(
        {"zero_optimization": {"stage": 3, "offload_param": "cpu"}}
    )
    assert "optimizer.params=3: " in refused({"optimizer": {"type": "AdamW", "params": 3}})
    flag = "zero_quantized_weights"
    assert f"{flag}='false': " in refused({"zero_optimization": {"stage": 3, flag: "false"}})
    assert "DeepSpeed" in refused([1])
    assert "DeepSpeed" in refused("{")
    assert main(["from-deepspeed", str(tmp_path / "none.json")]) == 2
