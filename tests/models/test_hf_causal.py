"""Models that see the tokens which they shall predict are refused before they train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.models.hf_cases import CASES, NAMED_OTHERWISE, SMALL, VOCAB, settings
from tests.small_runs import SHAPE, corpus
from zpp_lab.cli.main import main
from zpp_lab.config.model import LoraConfig, ModelConfig
from zpp_lab.models import build_model

NO_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
ENCODER = {**SMALL, "intermediate_size": 24, "pad_token_id": 1, **NO_DROPOUT}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": ENCODER,
    "roberta": ENCODER,
    "electra": ENCODER | {"embedding_size": 16},
    "camembert": ENCODER,
}


def model_of(kind: str, options: dict[str, Any], **changes: Any) -> ModelConfig:
    return ModelConfig(name="hf", options={"model_type": kind, **options}, **changes)


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize(
    "changes", [{}, {"loss_chunk": 4}, {"lora": LoraConfig(rank=2), "start": "a_run"}]
)
def test_what_sees_the_next_token_is_refused(kind: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is_decoder: true"):
        build_model(model_of(kind, ENCODERS[kind], **changes), VOCAB, "meta")


@pytest.mark.parametrize("kind", ENCODERS)
def test_the_setting_that_is_named_helps(kind: str) -> None:
    made = build_model(model_of(kind, ENCODERS[kind] | {"is_decoder": True}), VOCAB)
    tokens = torch.arange(8).view(1, 8) + 4
    other = tokens.clone()
    other[0, -1] = 20
    assert torch.equal(made(tokens)[:, :-1], made(other)[:, :-1])


@pytest.mark.parametrize("kind", [*CASES, *NAMED_OTHERWISE])
def test_causal_models_pass_without_a_word_and_draw_nothing(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from zpp_lab.models import hf

    hf._check.cache_clear()
    before = torch.get_rng_state()
    build_model(settings(kind), VOCAB, "meta")
    assert torch.equal(torch.get_rng_state(), before)
    assert "not known" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_run_of_one_does_not_begin(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    transformers.BertConfig(**ENCODER | {"vocab_size": 300}).save_pretrained("bert")
    own = [word for word in SHAPE if not word.startswith("model.")]
    own += ["model=hf", "model.path=./bert", f"data.path={corpus(tmp_path)}"]
    before = sorted(tmp_path.rglob("*"))
    assert main([command, *own, f"data.cache_dir={tmp_path / 'cache'}", "run.dir=run"]) == 2
    assert sorted(tmp_path.rglob("*")) == before
    said = capsys.readouterr().err.strip()
    assert "is_decoder: true to model.options" in said.splitlines()[-1]
