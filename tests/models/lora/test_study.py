"""The small twin of the study of adapters, arm by arm, on a base of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.lora.models import save_base
from tests.small_runs import corpus
from zpp_lab.config.compose import compose, load_study
from zpp_lab.train.trainer import run


@pytest.mark.slow
def test_every_arm_of_the_mini_study_trains(tmp_path: Path) -> None:
    shape = {"dim": 32, "heads": 4, "kv_heads": 4, "ffn": 256}
    save_base(tmp_path / "hf", vocab=256, **shape)
    study = load_study("lora_mini")
    own = [
        "data=text",
        f"data.path={corpus(tmp_path)}",
        f"data.cache_dir={tmp_path / 'cache'}",
        "data.heldout_every=2",
        f"model.path={tmp_path / 'hf'}",
        "tracking.wandb=off",
        "engine.threads=1",
    ]
    ends, sent = {}, {}
    for arm in study.arms:
        place = f"run.dir={tmp_path / arm.name}"
        summary = run(compose([*study.overrides, *arm.overrides, *own, place]))
        ends[arm.name] = summary["heldout_loss"]
        sent[arm.name] = summary["bytes_per_step"]
    first = 5.5  # nats of 256 even bytes
    assert all(ends[n] < first for n in ("zero3", "lora_raw", "lora_8", "lora_4"))
    assert abs(ends["lora_8"] - ends["lora_raw"]) < abs(ends["lora_2"] - ends["lora_raw"])
    order = ["zero3", "lora_raw", "lora_8", "lora_4", "lora_2"]
    assert [sent[n] for n in order] == sorted((sent[n] for n in order), reverse=True)
