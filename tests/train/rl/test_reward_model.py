"""Reward models: the loss of pairs, both engines, kills, pairs that cannot be used."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engines.fsdp_world import run_world
from tests.small_runs import newest
from tests.train.rl.test_runs import folder_of, kill_and_resume, lines
from zpp_lab.config.compose import compose
from zpp_lab.config.schema import Config
from zpp_lab.data import PackedData, open_data
from zpp_lab.data.packed import IGNORED
from zpp_lab.data.source import TextSource
from zpp_lab.data.tasks import task_files
from zpp_lab.engines.build import plan_of
from zpp_lab.files import HELDOUT
from zpp_lab.models import build_model
from zpp_lab.models.objective import pair_losses
from zpp_lab.runs.checkpoint.read import Saved, flat
from zpp_lab.runs.metrics import read
from zpp_lab.tools.evaluate import evaluate, table
from zpp_lab.tools.plan.law import covers
from zpp_lab.train.memory.estimate import estimate
from zpp_lab.train.speed import step_flops
from zpp_lab.train.trainer import run

SMALL = (
    *("experiment=reward_addition", "model.dim=16", "model.layers=1", "model.heads=2"),
    *("model.kv_heads=2", "model.ffn=24", "data.max_bytes=8000", "cluster=1x2"),
    *("train.batch_size=4", "train.steps=6", "train.eval_every=3", "train.checkpoint_every=2"),
    *("train.eval_tokens=400", "train.lr=0.01", "tracking.wandb=off", "engine.threads=1"),
    *("tracking.telemetry_every=2", "train.warmup_steps=1"),
)


def small(folder: Path, name: str, *overrides: str) -> Config:
    place = [f"run.dir={folder / name}", f"data.cache_dir={folder / 'cache'}"]
    return compose([*SMALL, *place, *overrides])


def pairs_file(folder: Path, records: list[dict[str, Any]]) -> list[str]:
    """Overrides that read these records."""
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return ["data=jsonl", f"data.path={path}", "data.heldout_every=2", "data.seq_len=64"]


# ---------------------------------------------------------------------- the loss


def test_the_loss_is_bradley_terrys() -> None:
    """By its formula, p = e^chosen / (e^chosen + e^rejected), and by TRL's RewardTrainer:
    -nn.functional.logsigmoid(rewards_chosen - rewards_rejected).mean()"""
    made = np.random.default_rng(0)
    places = made.integers(0, 5, 8)
    scores = torch.from_numpy(3 * made.standard_normal((8, 5)).astype(np.float32))
    scores.requires_grad_()
    targets = torch.full((8, 5), IGNORED)
    targets[torch.arange(8), torch.from_numpy(places)] = 7
    own = scores[torch.arange(8), torch.from_numpy(places)]
    theirs = -torch.nn.functional.logsigmoid(own[0::2] - own[1::2]).mean()
    (there,) = torch.autograd.grad(theirs, scores, retain_graph=True)
    chosen, rejected = own.detach().double()[0::2].tolist(), own.detach().double()[1::2].tolist()
    odds = [
        math.exp(a) / (math.exp(a) + math.exp(b)) for a, b in zip(chosen, rejected, strict=True)
    ]
    loss = pair_losses(scores, targets)
    loss.backward()
    assert scores.grad is not None
    assert abs(loss.item() - theirs.item()) < 1e-6
    assert abs(loss.item() + sum(map(math.log, odds)) / 4) < 1e-6
    assert (scores.grad - there).abs().max() < 1e-6
    each = pair_losses(scores.detach(), targets, each=True)[:, targets.flatten() != IGNORED]
    assert torch.equal(each[0, 0::2], each[0, 1::2])
    assert each[0].mean().item() == pytest.approx(loss.item())
    assert each[1, 0::2].tolist() == [float(a > b) for a, b in zip(chosen, rejected, strict=True)]


def test_scores_are_fp32_and_do_not_see_the_padding() -> None:
    config = compose(list(SMALL))
    model = build_model(config.model, 256).to(torch.bfloat16)
    tokens = torch.randint(1, 256, (2, 9))
    padded = torch.cat((tokens, torch.zeros(2, 5, dtype=torch.int64)), 1)
    scores = model(tokens)
    assert scores.dtype == torch.float32
    assert scores.shape == (2, 9)
    torch.testing.assert_close(model(padded)[:, :9], scores, rtol=0.02, atol=1e-4)
    assert "head.weight" not in dict(model.named_parameters())


# ---------------------------------------------------------------------- pairs


def opened(config: Config) -> PackedData:
    data = open_data(config.data)
    assert isinstance(data, PackedData)
    return data


def texts(inputs: torch.Tensor, targets: torch.Tensor) -> list[str]:
    """Each row up to where it is scored."""
    ends = (targets != IGNORED).long().argmax(1).tolist()
    return [
        bytes(row[1 : end + 1].tolist()).decode() for row, end in zip(inputs, ends, strict=True)
    ]


def test_a_pair_is_two_rows_of_one_batch(tmp_path: Path) -> None:
    records = [{"prompt": f"{i}?", "chosen": f"yes{i}", "rejected": f"no{i}"} for i in range(40)]
    config = small(tmp_path, "run", *pairs_file(tmp_path, records), "train.micro_steps=2")
    source, seen = TextSource(config, opened(config)), []
    for step in range(3):
        batches = source.step(step)
        for rank in range(2):
            for micro in range(2):
                inputs, targets = batches(rank, micro)
                assert (targets != IGNORED).sum(1).tolist() == [1] * 4
                rows = texts(inputs, targets)
                numbers = [row.partition("?")[0] for row in rows]
                assert rows[0::2] == [f"{n}?yes{n}" for n in numbers[0::2]]
                assert rows[1::2] == [f"{n}?no{n}" for n in numbers[0::2]]
                seen += numbers[0::2]
    assert len({*seen[:20]}) == 20, "an epoch is every pair once"
    data = opened(config)
    held = [texts(*batch) for batch in data.heldout(10**6, 3, 64)]
    assert {len(rows) % 2 for rows in held} == {0}
    assert sum(map(len, held)) == 40
    assert data.heldout_documents(10**6, 64).tolist() == np.arange(20).repeat(2).tolist()
    assert not {*seen} & {row.partition("?")[0] for rows in held for row in rows}


def test_long_pairs_are_cut_at_the_left_or_dropped_together(tmp_path: Path) -> None:
    records = [
        {"prompt": "ab", "chosen": "c" * (3 + 6 * (i == 2)), "rejected": "d"} for i in range(8)
    ]
    own = [*pairs_file(tmp_path, records), "data.seq_len=8"]
    cut = opened(small(tmp_path, "cut", *own))
    rows = [cut.train.row(i, 8, 0) for i in range(len(cut.train))]
    given = (torch.from_numpy(np.stack([row[i] for row in rows])) for i in (0, 1))
    assert texts(*given)[2:4] == ["c" * 7, "abd"]
    dropped = opened(small(tmp_path, "dropped", *own, "data.records.too_long=drop"))
    assert dropped.train.fitted.records.tolist() == [0, 1, 4, 5, 6, 7]
    with pytest.raises(ValueError, match=r"record 3.*data\.seq_len"):
        opened(small(tmp_path, "refused", *own, "data.records.too_long=refuse"))


@pytest.mark.parametrize("prompt", ["text", "messages", "none", "twice"])
def test_chats_of_a_pair_read_as_those_of_finetuning(tmp_path: Path, prompt: str) -> None:
    asked = {"role": "user", "content": "a"}
    good, bad = ([{"role": "assistant", "content": text}] for text in ("b", "c"))
    given: Any = {"text": "a", "messages": [asked], "none": None, "twice": "a"}[prompt]
    before = [asked] if prompt in ("none", "twice") else []
    pair = {"chosen": [*before, *good], "rejected": [*before, *bad]}
    pair |= {} if given is None else {"prompt": given}
    pair |= {"messages": [asked, *good]} if prompt == "twice" else {}
    data = opened(small(tmp_path, "pairs", *pairs_file(tmp_path, [pair] * 2)))
    chats = [{"messages": [asked, *own]} for own in (good, bad)] * 2
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    tuned = opened(
        compose(["data=jsonl", f"data.path={path}", f"data.cache_dir={tmp_path}", "data.seq_len=64",
                 "data.heldout_every=4"])
    )  # fmt: skip
    assert data.train.tokens.tolist() == tuned.train.tokens[: len(data.train.tokens)].tolist()


@pytest.mark.parametrize("name", ["addition", "sums"])
def test_made_pairs_prefer_the_right_answer(name: str) -> None:
    right = compose([f"data={name}", "data.max_bytes=200000"]).data
    pairs = replace(right, pairs=True)
    sets = [task_files(c).content.splitlines()[:-1] for c in (right, pairs)]
    for line, pair in zip(*sets, strict=False):
        record, own = json.loads(line), json.loads(pair)
        assert (own["prompt"], own["chosen"]) == (record["prompt"], record["completion"])
        differ = [a != b for a, b in zip(own["chosen"], own["rejected"], strict=True)]
        assert sum(differ) == 1
    assert task_files(right).identity() != task_files(pairs).identity()


# ---------------------------------------------------------------------- runs


def in_each_rank(*configs: Config) -> None:
    import torch.distributed as dist

    torch.use_deterministic_algorithms(True)
    for config in configs:
        run(config, dist.get_rank())


def same_end(one: Config, other: Config) -> bool:
    """Whether held-out losses of pairs and all states at the end are equal to the bit."""
    states = [dict(flat(Saved(newest(folder_of(c))).state())) for c in (one, other)]
    assert states[0].keys() == states[1].keys()
    assert "weights.score.weight" in states[0]
    same = all(torch.equal(t, states[1][n]) for n, t in states[0].items())
    files = [(folder_of(c) / HELDOUT).read_bytes() for c in (one, other)]
    return same and files[0] == files[1]


W4 = (
    *("recipe=zeropp", "recipe.weights.block_size=16", "recipe.weights.bits=4"),
    *("recipe.weights.rounding=stochastic", "recipe.grads.block_size=16", "recipe.grads.bits=4"),
    *("recipe.grads.rounding=stochastic", "recipe.exempt.names=[]", "train.micro_steps=2"),
)


@pytest.mark.parametrize("cluster", [pytest.param("1x2", marks=pytest.mark.slow), "2x1"])
def test_both_engines_agree(tmp_path: Path, cluster: str) -> None:
    arms = {"raw": (), "w4": W4}
    real = ("engine=fsdp", "engine.ordered=true", "engine.device=cpu", "engine.threads=1")
    own = (f"cluster={cluster}",)
    there = [small(tmp_path, f"{arm}_fsdp", *arms[arm], *own, *real) for arm in arms]
    run_world(2, in_each_rank, *there)
    for arm, other in zip(arms, there, strict=True):
        config = small(tmp_path, arm, *arms[arm], *own)
        run(config)
        assert lines(config) == lines(other), arm
        both = [read(folder_of(c) / "metrics.jsonl") for c in (config, other)]
        assert [line["bytes"] for line in both[0]] == [line["bytes"] for line in both[1]]
        assert [r.get("telemetry") for r in both[0]] == [r.get("telemetry") for r in both[1]]
        assert any("telemetry" in line for line in both[0])
        assert same_end(config, other), arm


@pytest.mark.parametrize("where", ["line 3", pytest.param("line 4", marks=pytest.mark.slow)])
def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path, where: str) -> None:
    """A checkpoint every two steps: one kill before it, one behind the line that it follows."""
    whole, other = small(tmp_path, "whole", *W4), small(tmp_path, "killed", *W4)
    run(whole)
    kill_and_resume(where, other)
    assert lines(other) == lines(whole)
    assert same_end(other, whole)


def test_evaluate_speaks_of_pairs(tmp_path: Path) -> None:
    summary = run(small(tmp_path, "run"))
    rows = evaluate([tmp_path / "run"])
    assert rows[0].heldout_loss == summary["heldout_loss_master"]
    assert {row.perplexity for row in rows} == {None}
    assert "pairs" in table(rows)


def test_a_run_begins_with_a_language_model(tmp_path: Path) -> None:
    """Everything but the head is the language model's; the head comes from the seed."""
    text = ("task=text", "data.pairs=false", "model.scalar_head=false", "train.steps=2")
    run(small(tmp_path, "text", *text))
    start = f"model.start={tmp_path / 'text'}"
    given = dict(flat(Saved(newest(tmp_path / "text")).state()))
    model = build_model(small(tmp_path, "reward", start).model, 256, seed=1)
    fresh = dict(build_model(small(tmp_path, "fresh").model, 256, seed=1).named_parameters())
    for name, p in model.named_parameters():
        wanted = fresh[name] if name == "score.weight" else given[f"weights.{name}"]
        assert torch.equal(p, wanted), name
    run(small(tmp_path, "reward", start))
    again = build_model(small(tmp_path, "more", f"model.start={tmp_path / 'reward'}").model, 256)
    saved = dict(flat(Saved(newest(tmp_path / "reward")).state()))
    assert torch.equal(again.score.weight, saved["weights.score.weight"])


# ---------------------------------------------------------------------- bad input

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("records", "overrides", "named"),
    [
        ([PAIR, {"prompt": "a", "chosen": "b"}], [], r"line 2.*data\.records\.rejected"),
        ([PAIR, PAIR | {"rejected": "b"}], [], r"line 2.*rejected"),
        ([PAIR, PAIR | {"rejected": ""}], [], "line 2"),
        ([PAIR], [], r"data\.heldout_every"),
    ],
)
def test_pairs_that_cannot_be_used(
    tmp_path: Path, records: list[dict[str, Any]], overrides: list[str], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        open_data(small(tmp_path, "run", *pairs_file(tmp_path, records), *overrides).data)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["model.scalar_head=false"], r"model\.scalar_head"),
        (["data.pairs=false"], r"data\.pairs"),
        (["task=text"], r"data\.pairs.*task=reward"),
        (["train.batch_size=3"], r"train\.batch_size"),
        (["data.wrong=0.5"], r"data\.wrong"),
        (["data.mask_prompt=false"], r"data\.mask_prompt"),
        (["model.z_loss=1e-4"], r"model\.z_loss"),
        (["data=text", "data.path=x"], r"data\.pairs"),
        (["data.records.rejected=chosen"], r"data\.records"),
        (["engine=deepspeed"], "engine=deepspeed"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path: Path, overrides: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        small(tmp_path, "run", *overrides)


def test_models_of_transformers_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"model\.scalar_head.*model=hf"):
        compose(["model=hf", "model.options={model_type: gpt2}", "model.scalar_head=true"])


def test_memory_and_plan_know_that_there_are_no_logits() -> None:
    """Beside a language model of the same shape: the head is one row, no scaling law applies."""
    text = (*SMALL, "task=text", "data.pairs=false", "model.scalar_head=false")
    for dtype, held in (("fp32", 1), ("bf16", 2)):
        config, other = (compose([*own, f"train.param_dtype={dtype}"]) for own in (SMALL, text))
        plan, plain = plan_of(config), plan_of(other)
        numel = [sum(p.numel for u in p.units for p in u.unit.parameters) for p in (plan, plain)]
        assert numel[1] - numel[0] == (256 - 1) * 16
        tokens = config.train.batch_size * config.data.seq_len
        found = estimate(plan, config, 256).item("logits and loss").nbytes["loss"]
        assert found == 4 * held * tokens * 16
        flops, more = step_flops(plan, config, 256), step_flops(plain, other, 256)
        assert float(more or 0) - float(flops or 0) == 6 * tokens * 255 * 16 * config.cluster.world
        assert not covers(config, plan)
