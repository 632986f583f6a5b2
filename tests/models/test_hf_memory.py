"""What a plan says of transformers' models, against models that are really built and run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines.fsdp_jobs import real
from tests.engines.fsdp_parity import configured
from tests.engines.fsdp_world import run_world
from tests.models.hf_cases import CASES, NAMED_OTHERWISE, VOCAB, settings
from tests.train.test_memory import Live
from zpp_lab.config.load import load
from zpp_lab.config.model import ModelConfig
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import build_plan, model_of
from zpp_lab.models import build_model
from zpp_lab.models.llama_hf import hf_config
from zpp_lab.train.memory.buffers import Estimate
from zpp_lab.train.memory.estimate import estimate
from zpp_lab.train.memory.trace import TracedActivations, trace

KINDS = [*CASES, *NAMED_OTHERWISE]
SHAPE = (3, 30)
TOKENS = SHAPE[0] * SHAPE[1]
WIDE = {  # so that no count is lost in another
    "gpt2": {"n_embd": 48, "n_head": 4},
    "opt": {"hidden_size": 48, "num_attention_heads": 4, "ffn_dim": 160, "word_embed_proj_dim": 48},
}
OTHERS = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 160}


def wide(kind: str, dtype: torch.dtype, device: str) -> Any:
    options = WIDE.get(kind) or OTHERS
    model = build_model(settings(kind, dict(options)), VOCAB, device, seed=1)
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model


def seen(model: Any) -> tuple[int, int, int, int]:
    """Of a real run on the CPU: bytes that one block keeps, that its backward holds beyond them,
    that are kept when the head begins, and that a block holds which runs without gradients."""
    units, given, at_head = [u for _, u in model.units()], [], []
    hook = units[-1].register_forward_pre_hook(
        lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True
    )
    tokens = torch.randint(0, VOCAB, SHAPE)
    model(tokens)
    hook.remove()
    with Live() as live:
        model.get_output_embeddings().register_forward_pre_hook(lambda *_: at_head.append(live.now))
        model(tokens, tokens)
    (hidden, *args), kwargs = given[0]
    with Live() as live:
        x = hidden.detach().clone().requires_grad_()
        comes_in = torch.ones_like(x)
        there = live.now
        made = units[-1](x, *args, **kwargs)
        out = made[0] if isinstance(made, tuple) else made
        del made
        before = live.most = live.now
        out.backward(comes_in)
    flow = live.most - before + x.nbytes
    with Live() as passing, torch.no_grad():
        units[-1](x, *args, **kwargs)
    return before - there, flow, at_head[0], passing.most + x.nbytes


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.bfloat16) for kind in KINDS),
        ("gpt2", torch.float32),
        *(pytest.param(k, torch.float32, marks=pytest.mark.slow) for k in KINDS if k != "gpt2"),
    ],
)
def test_shapes_alone_tell_what_a_run_keeps(kind: str, dtype: torch.dtype) -> None:
    """On the CPU LayerNorm keeps its two numbers a token in the input's dtype."""
    model = wide(kind, dtype, "cpu")
    norms = sum(isinstance(m, torch.nn.LayerNorm) for m in model.units()[0][1].modules())
    other = norms * 2 * TOKENS * (4 - dtype.itemsize)
    block, flow, at_head, passing = seen(model)
    found = trace(wide(kind, dtype, "meta"), SHAPE)
    assert found.row == TOKENS * 48 * dtype.itemsize
    assert found.block + (0 if found.keeps_input else found.row) == block + other
    assert found.flow == flow
    assert passing <= found.passing <= passing + 2 * other
    acts = TracedActivations(**vars(found), layers=2, checkpointed=False)
    last = other // max(norms, 1)  # the norm behind the blocks
    few = 5 * TOKENS * 8  # integers: positions and the like
    assert 0 <= acts.kept - (at_head + 2 * other + last) + few <= 2 * few


# ---------------------------------------------------------------------- whole plans


def planned(model: ModelConfig, vocab: int = VOCAB, **groups: Any) -> Estimate:
    shape = {"cluster": {"nodes": 1, "gpus_per_node": 2}, "data": {"seq_len": 24}}
    config = load(Config, {"train": {"param_dtype": "bf16"}, **shape, **groups})
    return of(config, model, vocab)


def of(config: Config, model: ModelConfig, vocab: int = VOCAB) -> Estimate:
    config = replace(config, model=model)
    return estimate(build_plan(model_of(config, vocab, "meta", 0), config), config, vocab)


def held(kind: str) -> dict[str, int]:
    """Bytes of one rank's weights, moments and gradients in a step of a real run."""
    engine = real(configured("zero3_bf16", 1, 2), build_model(settings(kind), VOCAB, seed=3))
    found, update = {}, engine._update

    def noting(*args: Any) -> None:
        found["gradients, fp32"] = sum(p.grad.to_local().nbytes for p in engine.parameters.values())
        update(*args)

    engine._update = noting  # type: ignore[method-assign]
    engine.step(0, 1e-2, batch, telemetry=False)
    found["master weights, fp32"] = sum(
        p.to_local().untyped_storage().nbytes() for p in engine.parameters.values()
    )
    state = engine.optimizer.state.values()
    found["optimizer state, fp32"] = sum(
        s[key].to_local().nbytes for s in state for key in ("exp_avg", "exp_avg_sq")
    )
    return found


def batch(rank: int, micro: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(rank))
    return tokens, tokens.clone()


def all_held() -> dict[str, dict[str, int]]:
    return {kind: held(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_the_built_model_has_what_was_planned(kind: str) -> None:
    """Ties, biases, grouped queries, learned positions: rank 0's rows of real tensors."""
    built = build_model(settings(kind), VOCAB, seed=1)
    for ranks in (1, 2, 3):
        cluster = {"nodes": 1, "gpus_per_node": ranks}
        items = planned(settings(kind), cluster=cluster)
        rows = [p.detach().chunk(ranks)[0] for p in built.parameters()]
        nbytes = sum(4 * row.numel() for row in rows)
        assert items.item("master weights, fp32").most == nbytes
        assert items.item("optimizer state, fp32").most == 2 * nbytes
        assert items.item("gradients, fp32").nbytes["update"] == nbytes


@pytest.mark.slow
def test_a_real_run_of_each_family_holds_what_was_planned() -> None:
    config = configured("zero3_bf16", 1, 2)
    config = replace(config, data=replace(config.data, seq_len=9))
    for kind, found in run_world(2, all_held).items():
        items = of(config, settings(kind))
        assert {name: items.item(name).most for name in found} == found, kind


OURS = {"dim": 48, "layers": 3, "heads": 4, "kv_heads": 2, "ffn": 160, "vocab_size": VOCAB}


def both(folder: Path, tied: bool = False, **size: int) -> tuple[ModelConfig, ModelConfig]:
    """The built-in decoder, and its export read as a model of transformers."""
    own = ModelConfig(**{**OURS, **size}, tied_head=tied)
    (folder / "config.json").write_text(json.dumps(hf_config(own, own.vocab_size, 64, None)))
    return own, ModelConfig(name="hf", path=str(folder))


@pytest.mark.parametrize(("tied", "tp"), [(False, 1), (True, 1), (False, 2)])
def test_our_decoder_and_its_export_are_planned_alike(tied: bool, tp: int, tmp_path: Path) -> None:
    """But for what transformers' norms and rotations keep when they are not compiled."""
    cluster, vocab = {"nodes": 1, "gpus_per_node": 2 * tp, "tp": tp}, VOCAB + VOCAB % tp
    for recipe in (
        {"name": "zero3"},
        {"secondary": True, "weights": {"bits": 8}, "grads": {"bits": 4}},
        *([{"acts": {"bits": 4}}] if tp > 1 else []),
    ):
        models = both(tmp_path, tied, vocab_size=vocab)
        ours, theirs = (planned(m, vocab, recipe=recipe, cluster=cluster) for m in models)
        differing = {
            "activations": "early",
            "a block's backward": "early",
            "logits and loss": "loss",
        }
        a, b = ({i.name: i for i in e.items if i.name not in differing} for e in (ours, theirs))
        assert a == b
        for name, moment in differing.items():
            own, other = (e.item(name).nbytes[moment] for e in (ours, theirs))  # type: ignore[index]
            assert 0.99 * own < other < 2.5 * own
