"""What a run leaves behind, loaded by transformers, has the run's own held-out loss."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engines.fsdp_world import run_world
from tests.models.hf_cases import settings
from tests.small_runs import small
from zpp_lab.config.model import ModelConfig
from zpp_lab.config.schema import Config
from zpp_lab.data import open_data
from zpp_lab.tools.export import export_hf
from zpp_lab.train.evaluation import open_heldout
from zpp_lab.train.trainer import run

LLAMAS = {
    "plain": ["model.kv_heads=2"],
    "grouped": ["model.heads=4", "model.kv_heads=2", "model.rope_theta=500.0"],
    "tied": ["model.tied_head=true", "model.norm_eps=1e-4", "model.vocab_size=260"],
    "normed": ["model.heads=4", "model.kv_heads=2", "model.qk_norm=true", "model.z_loss=1e-3"],
}
SHORT = ("train.steps=3", "train.warmup_steps=1")
KINDS = ["llama", "gpt_neox", "opt", "qwen2", "qwen3", "gpt2"]


def llama(folder: Path, case: str, *more: str) -> Config:
    return small(folder, "model.layers=2", "model.dim=32", "train.lr=0.03", *LLAMAS[case], *more)


def loaded(folder: Path, **how: Any) -> Any:
    """The model in `folder`; every tensor must have found its place."""
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **how
    )
    assert not any(told[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    return model.eval()


@torch.no_grad()
def heldout_loss(model: Any, config: Config) -> float:
    """Mean nats of the run's held-out tokens by a model of transformers."""
    batches = open_heldout(config, open_data(config.data)).batches
    losses = [
        torch.nn.functional.cross_entropy(
            model(input_ids=x).logits.float().flatten(0, 1), y.flatten(), reduction="none"
        )
        for x, y in batches
    ]
    return float(torch.cat(losses).double().mean())


@pytest.mark.parametrize("case", LLAMAS)
def test_the_built_in_decoder(case: str, tmp_path: Path) -> None:
    config = llama(tmp_path, case)
    summary = run(config)
    assert summary["heldout_loss_master"] < 5.0  # it has learnt: positions matter
    made = export_hf(tmp_path / "run", tmp_path / "out")
    model = loaded(tmp_path / "out", dtype=torch.float32)
    assert type(model).__name__ == f"{'Qwen3' if case == 'normed' else 'Llama'}ForCausalLM"
    assert made.step == 12
    assert heldout_loss(model, config) == pytest.approx(summary["heldout_loss_master"], rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_transformers(kind: str, tmp_path: Path) -> None:
    own = settings(kind, {"vocab_size": 256})
    config = replace(small(tmp_path, *SHORT), model=own)
    summary = run(config)
    export_hf(tmp_path / "run", tmp_path / "out", limit=8000)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    model = loaded(tmp_path / "out", dtype=torch.float32)
    assert heldout_loss(model, config) == pytest.approx(summary["heldout_loss_master"], rel=1e-6)
    again = replace(own, options=None, path=str(tmp_path / "out"), weights="pretrained")
    assert start_loss(replace(config, model=again)) == summary["heldout_loss_master"]


def test_tensor_parts_of_a_model_of_transformers(tmp_path: Path) -> None:
    options = {"vocab_size": 256, "num_key_value_heads": 2}
    config = small(tmp_path, "cluster=1x2", "cluster.tp=2", "recipe.acts.bits=8", *SHORT)
    config = replace(config, model=settings("qwen2", options))
    summary = run(config)
    export_hf(tmp_path / "run", tmp_path / "out")
    model = loaded(tmp_path / "out", dtype=torch.float32)
    assert heldout_loss(model, config) == pytest.approx(summary["heldout_loss_master"], rel=1e-6)
    again = ModelConfig(name="hf", path=str(tmp_path / "out"), weights="pretrained")
    assert start_loss(replace(config, model=again)) == summary["heldout_loss_master"]


@pytest.mark.parametrize("case", LLAMAS)
def test_a_folder_starts_the_built_in_decoder(case: str, tmp_path: Path) -> None:
    config = llama(tmp_path, case, *SHORT)
    summary = run(config)
    export_hf(tmp_path / "run", tmp_path / "out", limit=4000)
    again = replace(config.model, path=str(tmp_path / "out"), weights="pretrained")
    assert start_loss(replace(config, model=again)) == summary["heldout_loss_master"]


def start_loss(config: Config) -> float:
    """Held-out loss before any step."""
    from zpp_lab.engines.build import build_engine

    data = open_data(config.data)
    engine = build_engine(config, data.vocab_size, torch.device("cpu"))
    return engine.evaluate(0, open_heldout(config, data).batches, wire=False)


def trained_on_ranks(config: Config) -> float | None:
    import torch.distributed as dist

    return run(config, dist.get_rank()).get("heldout_loss_master")


def test_shards_of_ranks_are_read_one_tensor_at_a_time(tmp_path: Path) -> None:
    config = llama(
        tmp_path, "grouped", "engine=fsdp", "engine.device=cpu", "cluster.nodes=1", "recipe=zeropp"
    )
    loss = run_world(2, partial(trained_on_ranks, config), seconds=300)
    export_hf(tmp_path / "run", tmp_path / "out")
    model = loaded(tmp_path / "out", dtype=torch.float32)
    assert heldout_loss(model, config) == pytest.approx(loss, rel=1e-6)
    again = replace(config.model, path=str(tmp_path / "out"), weights="pretrained")
    three = replace(config.cluster, gpus_per_node=3)  # their rows cut heads, the last rank has few
    assert run_world(3, partial(start_loss, replace(config, model=again, cluster=three))) == loss
