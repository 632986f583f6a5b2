"""Finetuning end to end: from a run of ours, on records, in both engines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.fsdp_world import run_world
from tests.small_runs import small, tear
from zpp_lab.config.schema import Config
from zpp_lab.models import build_model
from zpp_lab.runs.checkpoint.read import newest, open_saved
from zpp_lab.runs.metrics import read, unmeasured
from zpp_lab.train.trainer import run

ONE_NODE = ("cluster.nodes=1", "cluster.gpus_per_node=2")


def records(folder: Path) -> Path:
    path = folder / "mine.jsonl"
    made = [{"prompt": f"{i} + {i} =", "completion": f" {2 * i}"} for i in range(60)]
    path.write_text("".join(json.dumps(r) + "\n" for r in made))
    return path


def tuning(folder: Path, name: str, *overrides: str) -> Config:
    """Four steps on records, recipe w4, in the folder `name`."""
    ours = ("train.steps=4", "train.micro_steps=2", "train.eval_tokens=4096")
    made = small(folder, *ONE_NODE, *ours, *overrides)
    path = str(records(folder))
    data = replace(made.data, name="jsonl", path=path, seq_len=24, heldout_every=5)
    return replace(made, data=data, run=replace(made.run, dir=str(folder / name)))


def pretrained(folder: Path, engine: str = "virtual") -> Config:
    return small(folder, *ONE_NODE, "train.steps=3", f"engine={engine}", "engine.device=cpu",
                 "engine.ordered=true" if engine == "fsdp" else "seed=1",
                 f"run.dir={folder / engine}")  # fmt: skip


def in_each_rank(*configs: Config) -> None:
    torch.use_deterministic_algorithms(True)
    import torch.distributed as dist

    for config in configs:
        run(config, dist.get_rank())


def lines(config: Config) -> list[dict[str, Any]]:
    assert config.run.dir is not None
    found = read(Path(config.run.dir) / "metrics.jsonl")
    other = ("bytes", "telemetry")
    return [{k: v for k, v in unmeasured(line).items() if k not in other} for line in found]


def test_both_engines_start_alike_from_either_ones_checkpoint(tmp_path: Path) -> None:
    before = {name: pretrained(tmp_path, name) for name in ("virtual", "fsdp")}
    run(before["virtual"])
    tuned: dict[str, Config] = {}
    for start in before:
        for engine in before:
            name = f"{engine}_from_{start}"
            config = tuning(tmp_path, name, "recipe=w4", "recipe.weights.block_size=16")
            made = replace(
                config.engine, name=engine, ordered=True, gather="hierarchical", device="cpu"
            )
            model = replace(config.model, start=str(tmp_path / start))
            tuned[name] = replace(config, engine=made, model=model)
    real = [config for config in tuned.values() if config.engine.name == "fsdp"]
    run_world(2, in_each_rank, before["fsdp"], *real)
    assert lines(before["fsdp"]) == lines(before["virtual"])
    for name, config in tuned.items():
        if config.engine.name == "virtual":
            run(config)
        assert len(lines(config)) == 4, name
    wanted = lines(tuned["virtual_from_virtual"])
    assert [name for name, config in tuned.items() if lines(config) != wanted] == []
    held = [json.loads((tmp_path / name / "heldout.json").read_text()) for name in tuned]
    assert all(one == held[0] for one in held)
    assert sum(held[0]["tokens"]) == sum(len(f" {2 * i}") + 1 for i in range(4, 60, 5))
    _rows_are_those_of_the_whole(tmp_path)


def _rows_are_those_of_the_whole(folder: Path) -> None:
    one, shards = newest(folder / "virtual"), newest(folder / "fsdp")
    for name, shape in one.shapes.items():
        assert shards.shapes[name] == shape
        for first, last in ((0, shape[0]), (shape[0] // 3, shape[0] // 2 + 1), (2, 2)):
            wanted = one.read(name)[first:last]
            assert torch.equal(one.rows(name, first, last), wanted), name
            assert torch.equal(shards.rows(name, first, last), wanted), name


def test_only_the_parts_with_wanted_rows_are_read(tmp_path: Path) -> None:
    """Nothing else is looked at, so nothing else can be found damaged."""
    run_world(2, in_each_rank, pretrained(tmp_path, "fsdp"))
    saved = open_saved(tmp_path / "fsdp")
    (saved.path / "rank-00001-0.safetensors").unlink()
    assert saved.rows("embed.weight", 3, 9).shape == (6, 16), "the first rank has rows 0 to 127"
    with pytest.raises(ValueError, match=r"rank-00001-0\.safetensors"):
        saved.rows("embed.weight", 127, 129)


def test_a_start_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    run(pretrained(tmp_path))
    start = str(tmp_path / "virtual")
    config = tuning(tmp_path, "tuned")
    deeper = replace(config.model, start=start, layers=2, dim=32)
    with pytest.raises(ValueError, match=r"layers\.1\..*embed"):
        build_model(deeper, 256)
    shallow = replace(config.model, start=start, tied_head=True)
    with pytest.raises(ValueError, match=r"head\.weight"):
        build_model(shallow, 256)
    with pytest.raises(ValueError, match=r"model\.start=.*nowhere: "):
        build_model(replace(config.model, start=str(tmp_path / "nowhere")), 256)
    torn = tmp_path / "virtual" / "checkpoints" / "step-00000003"
    tear(torn)
    with pytest.raises(ValueError, match="step-"):
        open_saved(torn)
    with pytest.raises(ValueError, match=r"run\.start_from|model\.start"):
        replace(config.model, start=start, weights="pretrained", path=start)


def test_tokenizers_must_be_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bpe = ("data.tokenizer=bpe", "data.vocab_size=270", "model.vocab_size=300")
    run(small(tmp_path, *ONE_NODE, *bpe, "train.steps=1", f"run.dir={tmp_path / 'bpe'}"))
    start = f"model.start={tmp_path / 'bpe'}"
    with pytest.raises(ValueError, match=r"\b270\b.*\b256\b"):
        run(tuning(tmp_path, "bytes", start, "model.vocab_size=300"))
    kept = tuning(tmp_path, "same", start, "model.vocab_size=300")
    data = replace(kept.data, tokenizer="hf", tokenizer_path=str(tmp_path / "bpe"))
    assert run(replace(kept, data=data))["steps"] == 4
    (tmp_path / "bpe" / "data.json").unlink()
    run(tuning(tmp_path, "unknown", start, "model.vocab_size=300"))
    assert "no data.json, so tokenizers are not compared" in capsys.readouterr().err
