"""Tensor parts of transformers' models: logits, gradients, first weights, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.engines.test_parts import ACTS8, Exact, check_gradients, made, shared_alike, train
from tests.engines.test_parts import batch as own_batch
from tests.engines.test_reshard import hashes
from tests.models.hf_cases import settings
from zpp_lab.config.model import ModelConfig
from zpp_lab.engines.build import plan_of
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.models import build_model, build_parts
from zpp_lab.models.cut import merged, part_of
from zpp_lab.models.loss import IGNORED
from zpp_lab.runs.checkpoint.read import Saved
from zpp_lab.runs.checkpoint.write import Checkpoints

VOCAB, TP = 40, 2
SHAPE = {"vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3, "pad_token_id": 3},
    "mistral": {"sliding_window": 12, "pad_token_id": VOCAB - 1},
    "qwen2": {"tie_word_embeddings": True, "pad_token_id": 7},
    "qwen3": {"head_dim": 8},
}


def config(kind: str, **options: Any) -> ModelConfig:
    base = "llama" if kind == "mistral" else kind
    return settings(base, {"model_type": kind, **SHAPE, **KINDS[kind], **options})


def exact(self: Any, x: Tensor) -> Tensor:
    """A norm in the dtype of `x`; transformers' rounds to fp32."""
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * (x * scale)


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCAB, (2, 13), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1], tokens[:, 1:].masked_fill(torch.arange(12) == 3, IGNORED)


def pair(kind: str, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, list[Any]]:
    """transformers' own model and our parts of it, in fp64, every weight drawn, joined."""
    parts: list[Any] = build_parts(config(kind), VOCAB, TP, "cpu")
    whole = transformers.AutoModelForCausalLM.from_config(parts[0].config).double()
    for module in whole.modules():
        if type(module).__name__.endswith("RMSNorm"):
            monkeypatch.setattr(type(module), "forward", exact)
    torch.manual_seed(1)
    own = [dict(part.double().named_parameters()) for part in parts]
    with torch.no_grad():
        for name, p in whole.named_parameters():
            p.normal_(float("norm" in name), 0.2)
            for i, named in enumerate(own):
                named[name].copy_(part_of(name, p, TP, i))
    assert own[0].keys() == dict(whole.named_parameters()).keys()
    parts[0].join(parts, Exact())
    return whole, parts


@pytest.mark.parametrize("kind", KINDS)
def test_parts_have_the_logits_and_gradients_of_transformers(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = pair(kind, monkeypatch)
    tokens, targets = batch()
    logits = whole(input_ids=tokens, use_cache=False).logits
    assert float((parts[0](tokens) - logits).abs().max().detach()) < 1e-12
    check_gradients(whole, parts, tokens, targets, logits)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_parts_start_with_the_weights_of_the_whole(kind: str) -> None:
    whole = build_model(config(kind), VOCAB, seed=4)
    parts = [
        dict(part.named_parameters()) for part in build_parts(config(kind), VOCAB, 2, "cpu", 4)
    ]
    for name, p in whole.named_parameters():
        assert torch.equal(merged(name, [own[name] for own in parts]), p), name


@pytest.mark.parametrize(
    ("cfg", "name"),
    [
        (settings("gpt_neox", {"vocab_size": VOCAB}), "gpt_neox"),
        (settings("opt", {"vocab_size": VOCAB}), "opt"),
        (config("qwen3", model_type="gemma"), "model_type=gemma"),
        (config("llama", attention_bias=True), "o_proj.bias"),
        (config("llama", mlp_bias=True), "down_proj.bias"),
        (config("llama", num_key_value_heads=1), "num_key_value_heads"),
        (config("llama", num_attention_heads=2, num_key_value_heads=1), "num_key_value_heads"),
        (config("qwen3", intermediate_size=25), "intermediate_size"),
        (config("qwen3", vocab_size=41), "model.vocab_size"),
    ],
    ids=str,
)
def test_what_has_no_parts_is_refused_by_name(cfg: ModelConfig, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        build_parts(cfg, VOCAB, TP, "meta")


@pytest.mark.parametrize(
    ("options", "name"),
    [({"sliding_window": 8}, "sliding_window"), ({"max_position_embeddings": 8}, "max_position")],
    ids=str,
)
def test_a_sequence_longer_than_attention_sees_is_refused(
    options: dict[str, Any], name: str
) -> None:
    parts: list[Any] = build_parts(config("mistral", **options), VOCAB, TP, "cpu")
    parts[0].join(parts, Exact())
    with pytest.raises(ValueError, match=name):
        parts[0](*batch())


def engine_of(
    kind: str, shape: tuple[int, int, int], recipe: dict[str, Any] | None = None, **options: Any
) -> VirtualEngine:
    model = {"name": "hf", "options": config(kind, vocab_size=256, **options).options}
    return made(shape, recipe or {}, model=model)


def test_plans_know_a_models_width_and_blocks() -> None:
    engine = engine_of("qwen2", (1, 4, 2), ACTS8)
    train(engine, 0, 1)  # compares what moved
    assert engine.plan.parts is not None
    assert (engine.plan.parts.dim, engine.plan.parts.blocks) == (16, 2)
    assert engine.plan.step_bytes() == plan_of(engine.config).step_bytes()


@pytest.mark.parametrize("kind", [pytest.param("mistral", marks=pytest.mark.slow), "qwen3"])
def test_raw_parts_train_and_are_evaluated_as_the_whole_model(kind: str) -> None:
    options = {"sliding_window": 16} if kind == "mistral" else {}
    one, two = engine_of(kind, (1, 2, 1), **options), engine_of(kind, (1, 4, 2), **options)
    for a, b in zip(train(one, 0, 3), train(two, 0, 3), strict=True):
        assert b == pytest.approx(a, rel=1e-4)
    assert shared_alike(two)
    held = [own_batch(99, i, 0) for i in range(3)]
    scores = [engine.token_scores(3, held, True) for engine in (one, two)]
    assert scores[1][0].tolist() == pytest.approx(scores[0][0].tolist(), rel=1e-4)
    assert torch.equal(scores[0][1], scores[1][1])  # which targets are predicted


def test_files_of_a_checkpoint_do_not_depend_on_parts(tmp_path: Path) -> None:
    two, one = engine_of("qwen2", (1, 4, 2), ACTS8), engine_of("qwen2", (1, 2, 1))
    train(two, 0, 2)
    found = []
    for engine in (two, one):
        store = Checkpoints(tmp_path / str(engine.tp), 1)
        store.save(2, engine.state_dict())
        store.wait()
        one.load_state_dict(Saved(store.path(2)).state())
        found.append(hashes(store.path(2)))
    assert found[0] == found[1]
    assert any(name.endswith(".safetensors") for name in found[0])


def test_parts_start_from_a_folder(tmp_path: Path) -> None:
    """Of safetensors: each part reads its own rows and columns."""
    whole: Any = build_model(config("qwen3"), VOCAB, seed=6)
    whole.save_pretrained(tmp_path)
    folder = ModelConfig(name="hf", path=str(tmp_path), weights="pretrained")
    parts = [dict(part.named_parameters()) for part in build_parts(folder, VOCAB, TP, "cpu")]
    for name, p in whole.named_parameters():
        assert torch.equal(merged(name, [own[name] for own in parts]), p), name
