"""Runs of reinforcement learning: both engines, kills, rewards that fail or hang."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.fsdp_world import forks, run_world
from tests.engines.place_jobs import start
from tests.small_runs import newest
from zpp_lab.cli.main import main
from zpp_lab.config.compose import compose
from zpp_lab.config.schema import Config
from zpp_lab.files import COMPLETIONS, HELDOUT
from zpp_lab.runs.checkpoint.read import Saved, flat
from zpp_lab.runs.metrics import read, unmeasured
from zpp_lab.runs.tracker import Tracker
from zpp_lab.train.rl import rewards, source
from zpp_lab.train.rl.rewards import RewardError
from zpp_lab.train.trainer import run

SMALL = (
    *("experiment=rl_addition", "model.dim=16", "model.layers=1", "model.heads=2"),
    *("model.kv_heads=2", "model.ffn=24", "data.max_bytes=4000", "cluster=1x2"),
    *("rl.prompts=4", "rl.samples=4", "train.batch_size=4", "rl.steps_per_rollout=2"),
    *("train.steps=6", "train.eval_every=3", "train.checkpoint_every=3", "train.lr=0.01"),
    *("tracking.wandb=off", "engine.threads=1", "tracking.telemetry_every=2", "rl.rewards=[mine]"),
)


def mine(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """What a model without training can do: it likes some bytes more than others."""
    return [sum(text.encode()) % 7 / 4 for text in completions]


def small(folder: Path, name: str, *overrides: str) -> Config:
    place = [f"run.dir={folder / name}", f"data.cache_dir={folder / 'cache'}"]
    ours = "model=hf" not in overrides  # which has other sizes
    usual = [setting for setting in SMALL if ours or not setting.startswith("model.")]
    return compose([*usual, *place, *overrides])


@pytest.fixture(autouse=True)
def _mine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rewards._SHIPPED, "mine", mine)


def folder_of(config: Config) -> Path:
    assert config.run.dir is not None
    return Path(config.run.dir)


def lines(config: Config) -> list[dict[str, Any]]:
    found = read(folder_of(config) / "metrics.jsonl")
    other = ("bytes", "telemetry")
    return [{k: v for k, v in unmeasured(line).items() if k not in other} for line in found]


def end_of(config: Config) -> dict[str, torch.Tensor]:
    """Return the last state, masters in one piece."""
    saved = Saved(newest(folder_of(config)))
    state = {n: t for n, t in flat(saved.state()) if not n.startswith(("weights.", "low."))}
    return state | {f"weights.{name}": saved.read(name) for name in saved.shapes}


def same_end(one: Config, other: Config) -> bool:
    """Whether held-out failures, completions and all states at the end are equal to the bit."""
    files = [(folder_of(c) / n).read_bytes() for n in (HELDOUT, COMPLETIONS) for c in (one, other)]
    states = [end_of(c) for c in (one, other)]
    assert states[0].keys() == states[1].keys()
    assert any(name.startswith("optimizer") for name in states[0])
    same = all(torch.equal(t, states[1][n]) for n, t in states[0].items())
    return same and files[0::2] == files[1::2]


def in_each_rank(*configs: Config) -> None:
    import torch.distributed as dist

    start()  # what has left for host memory turns NaN where it lay
    rewards._SHIPPED["mine"] = mine
    for config in configs:
        run(config, dist.get_rank())


ARMS = {
    "raw": ("rl.algorithm=rloo", "rl.correction=sequence", "rl.kl=0.1"),
    "w4": (
        *("recipe=w4", "recipe.weights.block_size=16", "recipe.weights_rollout.bits=4"),
        *("recipe.weights_rollout.block_size=16", "recipe.weights_rollout.rounding=stochastic"),
        *("rl.kl=0.1", "rl.correction=token", "rl.gather=token", "rl.temperature=0.8"),
    ),
    "differences": (
        *("recipe=sdp4bit", "cluster=2x1", "recipe.weights_update.block_size=16", "rl.kl=0.1"),
    ),
}


ALONE = ("cluster.nodes=3", "cluster.gpus_per_node=1", "rl.prompts=6")
TOGETHER = ("cluster.nodes=1", "cluster.gpus_per_node=3", "rl.prompts=6")
WORLDS = {
    "two": (2, (), (*ARMS,)),
    "2x2": (4, ("cluster=2x2", "train.batch_size=2"), (*ARMS,)),
    "3x1": (3, ALONE, (*ARMS,)),
    "1x3": (3, TOGETHER, ("raw", "w4")),  # one node has no differences
}


@pytest.mark.parametrize(
    "world", ["two", *(pytest.param(name, marks=pytest.mark.slow) for name in [*WORLDS][1:])]
)
def test_both_engines_agree(tmp_path: Path, world: str) -> None:
    ranks, cluster, arms = WORLDS[world]
    real = ("engine=fsdp", "engine.ordered=true", "engine.device=cpu", "engine.threads=1")
    there = [small(tmp_path, f"{arm}_fsdp", *ARMS[arm], *cluster, *real) for arm in arms]
    run_world(ranks, in_each_rank, *there)
    for arm, other in zip(arms, there, strict=True):
        config = small(tmp_path, arm, *ARMS[arm], *cluster)
        run(config)
        assert lines(config) == lines(other), arm
        first, *_, last = lines(config)
        assert first["rl"]["reward"] != last["rl"]["reward"]
        assert (first["rl"]["mismatch"] > 1e-4) == (arm == "w4")
        assert same_end(config, other), arm


PLACES = {
    "place": ("train.masters=split", "train.param_dtype=bf16", "engine.place=host"),
    "some": (
        *("train.masters=split", "train.param_dtype=bf16"),
        "engine.place={masters: 1, moments: 2, gradients: 1}",
    ),
    "offload": ("engine.offload=true",),
}


@pytest.mark.parametrize(
    "places",
    [
        pytest.param(("some", "offload"), id="quick"),
        pytest.param(("place",), id="rest", marks=pytest.mark.slow),
    ],
)
def test_state_in_host_memory_gives_the_same_bits(tmp_path: Path, places: tuple[str, ...]) -> None:
    """Updates that wait for their unit's next forward are done before weights are gathered."""
    real = ("engine=fsdp", "engine.ordered=true", "engine.device=cpu", "engine.threads=1")
    there = {name: small(tmp_path, name, *ARMS["w4"], *real, *PLACES[name]) for name in places}
    run_world(2, in_each_rank, *there.values())
    for name, other in there.items():
        own = [setting for setting in PLACES[name] if not setting.startswith("engine.")]
        config = small(tmp_path, f"{name}_virtual", *ARMS["w4"], *own)
        run(config)
        assert lines(config) == lines(other), name
        assert same_end(config, other), name


def tiny_llama(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=264, **sizes, **heads)).save_pretrained(folder)
    return folder


def test_policies_of_hugging_face_with_adapters(tmp_path: Path) -> None:
    """The KL penalty refers to the frozen base: with a step size of 0 there is none."""
    model = ("model=hf", f"model.path={tiny_llama(tmp_path / 'llama')}", "model.weights=pretrained")
    adapters = ("lora=raw", "model.lora.rank=2", "rl.kl=0.1")
    sent = ("recipe.weights_rollout.bits=4", "recipe.weights_rollout.block_size=16")
    own = (*model, *adapters, *sent)
    real = ("engine=fsdp", "engine.ordered=true", "engine.device=cpu", "engine.threads=1")
    other = small(tmp_path, "fsdp", *own, *real)
    run_world(2, in_each_rank, other)
    config = small(tmp_path, "virtual", *own)
    run(config)
    assert lines(config) == lines(other)
    assert same_end(config, other)
    still = small(tmp_path, "still", *own, "train.lr=0")
    run(still)
    assert [line["rl"]["kl"] for line in lines(still)] == [0.0] * 6
    found = [line["rl"]["kl"] for line in lines(config)]
    assert found[0] == 0
    assert found[-1] != 0
    plain = small(tmp_path, "plain", *own, "rl.kl=0")
    run(plain)
    assert lines(plain)[0]["loss"] == lines(config)[0]["loss"]
    assert lines(plain)[-1]["loss"] != lines(config)[-1]["loss"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run that nothing has disturbed."""
    config = small(tmp_path_factory.mktemp("whole"), "whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rewards._SHIPPED, "mine", mine)
        run(config)
    return config


def kill_at(where: str, config: Config) -> None:
    """Run, and kill this process at the n-th time that it gets there; where: "line n" and such."""
    count = [0]

    def dies(function: Callable[..., Any], after: bool = False) -> Callable[..., Any]:
        def called(*args: Any, **named: Any) -> Any:
            count[0] += 1
            found = function(*args, **named) if after else None
            if count[0] == int(where[-1]):
                os.kill(os.getpid(), signal.SIGKILL)
            return found if after else function(*args, **named)

        return called

    rewards._SHIPPED["mine"] = dies(mine) if "reward" in where else mine
    if "rollout" in where:
        source.draw = dies(source.draw)
    if "line" in where:
        Tracker.log = dies(Tracker.log, after=True)  # type: ignore[method-assign]
    run(config)


def kill_and_resume(where: str, config: Config) -> None:
    """Run in a process that is killed, see `kill_at`, then resume here."""
    process = forks().Process(target=kill_at, args=(where, config))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(lines(config)) < 6
    run(config)


@pytest.mark.parametrize(
    "where",
    [
        *("rollout 3", "reward 4", "line 5"),
        *(pytest.param(w, marks=pytest.mark.slow) for w in ("rollout 2", "line 4")),
    ],
)
def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path, where: str, whole: Config) -> None:
    """Two steps a rollout, a checkpoint every three: line 4 and 5 resume between two steps."""
    other = small(tmp_path, "killed")
    kill_and_resume(where, other)
    assert lines(other) == lines(whole)
    assert same_end(other, whole)


@pytest.mark.parametrize(("call", "steps"), [(3, 3), (4, 4)], ids=["heldout", "rollout"])
def test_a_reward_that_raises_stops_the_run_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, steps: int
) -> None:
    whole = small(tmp_path, "whole", "train.checkpoint_every=0")
    run(whole)
    calls = []

    def bad(prompts: list[str], **columns: Any) -> list[float]:
        calls.append(prompts)
        return mine(prompts, **columns) if len(calls) < call else [1 / 0]

    monkeypatch.setitem(rewards._SHIPPED, "mine", bad)
    config = small(tmp_path, "bad", "train.checkpoint_every=0")
    with pytest.raises(RewardError, match="mine"):
        run(config)
    failure = json.loads((folder_of(config) / "failure.json").read_text())
    assert failure["outcome"] == "crashed"
    saved = [p.name for p in (folder_of(config) / "checkpoints").glob("step-*")]
    assert saved == [f"step-{steps:08}"]
    with pytest.raises(RewardError, match="mine"):  # not mended yet
        run(config)
    monkeypatch.setitem(rewards._SHIPPED, "mine", mine)
    run(config)
    assert lines(config) == lines(whole)
    assert same_end(config, whole)


def test_a_reward_that_hangs_is_noted_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def hangs(prompts: list[str], **columns: Any) -> list[float]:
        calls.append(prompts)
        time.sleep(60 if len(calls) == 1 else 0)
        return mine(prompts, **columns)

    monkeypatch.setitem(rewards._SHIPPED, "mine", hangs)
    config = small(tmp_path, "late", "rl.timeout=0.2", "run.piece_steps=2")
    run(config)
    assert "rl.timeout" in capsys.readouterr().err
    assert lines(config)[0]["rl"] | {"reward": 0, "flat_groups": 1} == lines(config)[0]["rl"]
    before = lines(config)
    for path in (folder_of(config) / "checkpoints").iterdir():  # as if none had been written
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    again = small(tmp_path, "late", "rl.timeout=0.2")
    summary = run(again)
    assert lines(again)[:2] == before
    assert summary["reproducible"] is False
    assert run(small(tmp_path, "good"))["reproducible"] is True


def test_clipping_is_inert_with_one_step_a_rollout(tmp_path: Path) -> None:
    def last(k: int, clip: float) -> tuple[dict[str, Any], list[float]]:
        own = (f"rl.steps_per_rollout={k}", f"rl.prompts={2 * k}", f"rl.clip_ratio={clip}")
        config = small(tmp_path, f"{k}-{clip}", *own, "tracking.telemetry_every=1", "train.steps=8")
        run(config)
        found = lines(config)
        return found[-1], [line["rl"]["clipped"] for line in found]

    (one, none), (other, _) = last(1, 0.01), last(1, 0.9)
    assert one == other
    assert not any(none)
    (one, some), (other, _) = last(4, 0.01), last(4, 0.9)
    assert one != other
    assert [share > 0 for share in some] == [False, True, True, True] * 2


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["rl.rewards=[addtion]"], "rl.rewards"),
        (["data.seq_len=10"], "data.seq_len"),
        (["data.max_bytes=200"], "data.heldout_every"),
        (["rl.top_p=0.9"], "rl.top_p"),
        (["cluster.gpus_per_node=4", "cluster.tp=2", "engine=fsdp"], "task=rl"),
        (["cluster.gpus_per_node=4", "cluster.pp=2", "engine=fsdp"], "task=rl"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    tmp_path: Path, overrides: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = [f"run.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    assert main(["train", *SMALL, "rl.rewards=[addition]", *place, *overrides]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert named in said[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_random_rewards_raise_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Success is to have the answer's form, which a short start has now and then."""
    made = torch.Generator().manual_seed(seed)

    def chance(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return torch.rand(len(prompts), generator=made).tolist()

    monkeypatch.setitem(rewards._SHIPPED, "chance", chance)
    own = ("rl.rewards=[format,chance]", "data.max_bytes=0", f"seed={seed}", "train.eval_every=40")
    supervised = ("task=text", "train.steps=40", "train.batch_size=32")
    run(small(tmp_path, "start", *own, *supervised))
    more = (f"model.start={tmp_path / 'start'}", "train.steps=40", "rl.heldout_draws=4")

    def success(name: str, weights: str, lr: float) -> float:
        taught = (f"rl.weights={weights}", f"train.lr={lr}", "rl.steps_per_rollout=1")
        found = run(small(tmp_path, name, *own, *more, *taught, "rl.prompts=2"))
        assert found["heldout_tokens"] == 5000
        return float(found["heldout_success"])

    before = success("none", "[0,1]", 0.0)
    assert 0.2 < before < 0.8
    error = (2 * before * (1 - before) / 5000) ** 0.5
    assert success("chance", "[0,1]", 0.003) <= before + 3 * error
    assert success("form", "[1,0]", 0.003) > before + 10 * error
