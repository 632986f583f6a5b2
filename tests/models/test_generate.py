"""Sampling and generation: distribution, keys, cache against whole forwards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from tests.models import hf_cases
from zpp_lab.config.model import ModelConfig
from zpp_lab.models import build_model
from zpp_lab.models.generate import Completions, Graphs, generate
from zpp_lab.models.sampling import sample
from zpp_lab.train.memory.activations import cached_width

VOCAB, END, NEW = 37, 36, 9
KEY = (3, 5)
OWN_SHAPE = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn=64)


def model_of(**settings: Any) -> nn.Module:
    return build_model(replace(OWN_SHAPE, **settings), VOCAB, device="cpu", seed=1)


def rows(order: list[int], width: int = 8) -> dict[str, Tensor]:
    """Four prompts of other lengths, two samples each, in the order of `order`."""
    numbers = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, END, (4, width), generator=numbers).repeat_interleave(2, 0)
    lengths = torch.tensor([3, 5, 1, 6]).repeat_interleave(2)
    ids, samples = torch.tensor([7, 2, 11, 4]).repeat_interleave(2), torch.tensor([0, 1] * 4)
    every = {"prompts": prompts, "lengths": lengths, "ids": ids, "samples": samples}
    return {name: tensor[order] for name, tensor in every.items()}


def run(model: Any, batch: dict[str, Tensor], **other: Any) -> Completions:
    settings = {"key": KEY, "max_new": NEW, "end": END, "temperature": 1.0} | other
    return generate(model, **batch, **{"all_done": bool} | settings)


def whole(model: Any, found: Completions, batch: dict[str, Tensor]) -> Tensor:
    """The completions' log-probabilities by uncached forwards, [B, NEW]."""
    logits = model(found.tokens).float().log_softmax(-1)
    places = (batch["lengths"][:, None] + torch.arange(NEW)).clamp(max=found.tokens.shape[1] - 1)
    tokens = found.tokens.gather(1, places)
    each = logits.gather(1, (places - 1)[..., None].expand(-1, -1, logits.shape[-1]))
    return each.gather(2, tokens[..., None])[..., 0]


def drawn(found: Completions, batch: dict[str, Tensor]) -> Tensor:
    """Which log-probabilities are of tokens of a completion, bool [B, NEW]."""
    return torch.arange(NEW) < (found.lengths - batch["lengths"])[:, None]


def test_a_million_draws_follow_the_softmax() -> None:
    logits = torch.linspace(-2.0, 2.0, 10)
    temperature, each = 0.8, 1000
    counts = torch.zeros(10, dtype=torch.int64)
    for prompt in range(each):
        samples = torch.arange(each)
        ids = torch.full((each,), prompt)
        tokens, _ = sample(logits.expand(each, -1), temperature, KEY, 2, samples, ids)
        counts += tokens.bincount(minlength=10)
    expected = (logits / temperature).double().softmax(0) * each * each
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert chi2 < 27.88  # 9 degrees of freedom, p = 0.001


def test_neighbouring_draws_are_independent() -> None:
    """Pairs of tokens over positions, samples and prompts, and entries of one counter."""
    logits = torch.zeros(20_000, 5)
    n = torch.arange(20_000)
    zero = torch.zeros_like(n)
    first = sample(logits, 1.0, KEY, 0, n, zero)[0]
    others = {
        "position": sample(logits, 1.0, KEY, 1, n, zero)[0],
        "sample": sample(logits, 1.0, KEY, 0, n + 1, zero)[0],
        "prompt": sample(logits, 1.0, KEY, 0, n, zero + 1)[0],
        "step": sample(logits, 1.0, (KEY[0], KEY[1] + 1), 0, n, zero)[0],
        "seed": sample(logits, 1.0, (KEY[0] + 1, KEY[1]), 0, n, zero)[0],
    }
    for name, other in others.items():
        pairs = (first * 5 + other).bincount(minlength=25).double()
        chi2 = float(((pairs - 800) ** 2 / 800).sum())
        assert chi2 < 51.18, name  # 24 degrees of freedom, p = 0.001


def test_temperature_zero_takes_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    tokens, found = sample(logits, 0.0, KEY, 0, torch.zeros(1).long(), torch.zeros(1).long())
    assert tokens.tolist() == [1]
    assert found.item() == pytest.approx(logits[0].log_softmax(0)[1].item())


OWN: dict[str, dict[str, Any]] = {"own": {}, "tied": {"tied_head": True, "qk_norm": True}}
FAMILIES = ("llama", "gpt_neox", "opt", "qwen3", "gpt2")  # of transformers


def hf_model(kind: str, **options: Any) -> Any:
    """One whose logits differ enough from each other."""
    model = build_model(hf_cases.settings(kind, options), VOCAB, seed=1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0) if p.dim() > 1 else None
    return model


@pytest.mark.parametrize("kind", [*OWN, *FAMILIES])
def test_cached_passes_agree_with_whole_forwards(kind: str) -> None:
    model = model_of(**OWN[kind]) if kind in OWN else hf_model(kind)
    batch = rows(list(range(8)))
    found = run(model, batch)
    real = drawn(found, batch)
    assert (found.logprobs != 0).equal(real)
    torch.testing.assert_close(
        found.logprobs[real], whole(model, found, batch)[real], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("kind", ["own", "llama", "qwen3", "gpt2"])
def test_keys_and_values_are_as_many_as_estimated(kind: str) -> None:
    model, held = model_of() if kind == "own" else hf_model(kind), []

    def policy(tokens: Tensor, *, cache: Any) -> Tensor:
        found: Tensor = model(tokens, cache=cache)
        past = [(layer.keys, layer.values) for layer in cache.past.layers] if cache.past else []
        held.append(sum(t.numel() for pair in (*past, *cache.layers.values()) for t in pair))
        return found

    tokens = run(policy, rows(list(range(8)))).tokens
    settings = OWN_SHAPE if kind == "own" else hf_cases.settings(kind)
    slots = tokens.numel() - (0 if kind == "own" else len(tokens))  # the last one is not entered
    assert held[-1] == slots * cached_width(settings)


def test_a_window_that_would_count_padding_is_refused() -> None:
    narrow = {"sliding_window": 12, "use_sliding_window": True, "max_window_layers": 0}
    for options in (narrow, {"max_position_embeddings": 12}):
        with pytest.raises(ValueError, match="17 tokens"):
            run(hf_model("qwen2", **options), rows([0]))


def test_rows_do_not_depend_on_order_or_padding() -> None:
    model, order = model_of(), [5, 0, 7, 2, 1, 6, 3, 4]
    found, turned = run(model, rows(list(range(8)))), run(model, rows(order))
    one = run(model, rows([5], width=8))
    for i, place in enumerate(order):
        assert found.tokens[place].equal(turned.tokens[i])
        assert found.lengths[place].equal(turned.lengths[i])
    assert found.tokens[5].equal(one.tokens[0])
    wide = rows(list(range(8)))
    wide["prompts"] = torch.cat((wide["prompts"], wide["prompts"]), 1)
    for row, length in enumerate(found.lengths):
        assert run(model, wide).tokens[row, :length].equal(found.tokens[row, :length])


class Repeats:
    """In place of `Graphs`, without a GPU: a capture runs nothing."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        return run


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", OWN)
def test_captured_passes_draw_the_same_bits(kind: str) -> None:
    model, calls, graphs = model_of(**OWN[kind]).cuda(), [], Graphs(torch.device("cuda"))
    batch = {name: t.cuda() for name, t in rows(list(range(8))).items()}

    def policy(tokens: Tensor, *, cache: Any) -> Tensor:
        calls.append(tokens.shape)
        found: Tensor = model(tokens, cache=cache)
        return found

    for seed in (1, 2):  # the second capture takes the first one's memory
        key = (seed, 5)
        first = run(policy, batch, key=key)
        calls.clear()
        again = run(policy, batch, key=key, graphs=graphs)
        assert len(calls) == 3
        for name in ("tokens", "lengths", "logprobs"):
            assert getattr(first, name).equal(getattr(again, name)), name


@pytest.mark.parametrize(
    ("first", "raised", "named"),
    [
        (RuntimeError("first"), ValueError, "first.*engine.graph=false"),
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError, "full"),
        (KeyboardInterrupt("stop"), KeyboardInterrupt, "stop"),
        (None, ValueError, "end.*engine.graph=false"),
    ],
)
def test_a_capture_that_fails_names_its_first_error(
    first: BaseException | None, raised: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def capture_begin(self, **how: Any) -> None:
            pass

        def capture_end(self) -> None:
            raise RuntimeError("end")

    def run() -> None:
        if first is not None:
            raise first

    graphs: Any = object.__new__(Graphs)
    graphs.stream, graphs.pool = Mock(), None
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Broken)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", Mock())
    with pytest.raises(raised, match=named):
        graphs.capture(run)


def test_what_a_captured_pass_reads_stays_where_it_is() -> None:
    graphs: Any = Repeats()
    first, again = (run(model_of(), rows([0, 3]), graphs=g) for g in (None, graphs))
    assert first.tokens.equal(again.tokens)
    assert first.logprobs.equal(again.logprobs)


def test_a_row_ends_with_the_end_token() -> None:
    model, batch = model_of(), rows(list(range(8)))
    found = run(model, batch, end=int(run(model, batch).tokens[0, 5]))
    end = int(found.tokens[0, found.lengths[0] - 1])
    sizes = found.lengths - batch["lengths"]
    assert sizes.equal((found.logprobs != 0).sum(1))
    assert sizes[0] < NEW
    for row, (start, length) in enumerate(zip(batch["lengths"], found.lengths, strict=True)):
        new = found.tokens[row, start:length]
        assert found.tokens[row, :start].equal(batch["prompts"][row, :start])
        assert end not in new[:-1]
        assert len(new) == NEW or new[-1] == end
        assert (found.tokens[row, length:] == end).all()


def test_other_ranks_keep_a_batch_going_without_effect() -> None:
    model, batch, told = model_of(), rows([0, 1]), []
    end = int(run(model, batch).tokens[0, 3])
    short = run(model, batch, end=end, max_new=40)

    def never(done: bool) -> bool:
        told.append(done)
        return False

    long = run(model, batch, end=end, max_new=40, all_done=never)
    assert short.tokens.equal(long.tokens)
    assert short.logprobs.equal(long.logprobs)
    assert len(told) == 39


@pytest.mark.parametrize("wrong", ["lengths", "max_new", "temperature"])
def test_bad_input_is_named(wrong: str) -> None:
    batch = rows([0])
    other: dict[str, Any] = {"max_new": {"max_new": 0}, "temperature": {"temperature": -1.0}}.get(
        wrong, {}
    )
    if wrong == "lengths":
        batch["lengths"] = torch.tensor([9])
    with pytest.raises(ValueError, match=wrong):
        run(model_of(), batch, **other)
