"""Rollouts between steps on real ranks and on virtual ones, compared to the bit."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import redirect_stderr
from functools import reduce
from io import StringIO
from operator import or_
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tests.engines.fsdp_parity import BF16, DIFFERENCES, KEPT, Q4, Q8, STOCHASTIC, kept
from zpp_lab.api import shard
from zpp_lab.collectives.transport import ProcessGroups
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.config.load import load
from zpp_lab.config.schema import ClusterConfig, Config
from zpp_lab.config.wires import ROLLOUT
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.fsdp.comm import managed
from zpp_lab.engines.fsdp.engine import FsdpEngine
from zpp_lab.engines.optim.shards import local
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.models import build_model
from zpp_lab.models.generate import generate

VOCAB, END, NEW = 41, 40, 4
GATHERS: tuple[Literal["rollout", "token"], ...] = ("rollout", "token")
S4 = {**Q4, **STOCHASTIC}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "raw": ({}, {}),
    "stochastic": ({"weights_rollout": S4}, BF16),
    "hops": ({"hops": 2, "secondary": True, "weights": Q8, "weights_rollout": S4}, {}),
    "stage2": ({"stage": 2, "weights_rollout": Q4}, {"micro_steps": 2}),
    "kept": ({**KEPT, "weights_update": Q8, "weights_rollout": S4}, BF16),
    "differences": ({**DIFFERENCES, "weights_update": S4, "weights_rollout": Q4}, BF16),
    "whole": (
        {"sharding": {"weights": "none", "update": "differences"}, "weights_update": Q4},
        BF16,
    ),
    "copies": ({"shard": "node", "weights_rollout": S4}, {}),
    "phases": ({"weights_rollout": S4, "phases": [{"after": 1, "weights": Q4}]}, {}),
    "placed": ({"weights_rollout": S4}, {**BF16, "masters": "split"}),
}
PLACES: dict[str, Any] = {"placed": {"weights": 3, "masters": 1}}
ONE_NODE = ("raw", "stochastic", "hops", "stage2", "phases")
LONE_RANKS = ("raw", "stochastic", "stage2")  # in nodes of one GPU
LONE_KEPT = {"differences": ({**DIFFERENCES, "hops": 1, "weights_update": S4}, BF16)}


def configured(case: str, nodes: int, local: int, **engine: Any) -> Config:
    table = CASES | (LONE_KEPT if local == 1 else {})
    recipe, train = table[case]
    values = {
        "recipe": {"name": case, **recipe},
        "model": {"dim": 24, "layers": 2, "heads": 3, "kv_heads": 3, "ffn": 40},
        "cluster": {"nodes": nodes, "gpus_per_node": local},
        "train": {"lr": 1e-2, "steps": 10, **train},
        "engine": {"device": "cpu", "ordered": True, "place": PLACES.get(case, "device"), **engine},
    }
    return load(Config, values)


def model_of(config: Config) -> Any:
    return build_model(config.model, VOCAB, device="cpu", seed=config.seed)


def virtual(config: Config) -> VirtualEngine:
    model = model_of(config)
    return VirtualEngine(model, build_plan(model, config, rollouts=True), config)


def real(config: Config, transport: Any = None) -> FsdpEngine:
    model = model_of(config)
    plan = build_plan(model, config, rollouts=True)
    return FsdpEngine(model, plan, config, torch.device("cpu"), transport)


def batch(rank: int, micro: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(10 * rank + micro)
    tokens = torch.randint(0, END, (2, 9), generator=numbers)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def prompts(rank: int, call: int) -> dict[str, Tensor]:
    """Of other shapes in the second call."""
    numbers = torch.Generator().manual_seed(100 * rank + call)
    rows, width = 3 - call, 5 + call
    return {
        "prompts": torch.randint(0, END, (rows, width), generator=numbers),
        "lengths": torch.randint(1, width + 1, (rows,), generator=numbers),
        "ids": torch.arange(rows) + 10 * rank,
        "samples": torch.full((rows,), call),
    }


def roll(engine: Any, step: int, gather: str, end: int = END) -> dict[int, list[Tensor]]:
    """Rank → tokens, lengths and log-probabilities of two calls, of the ranks that are here."""
    found: dict[int, list[Tensor]] = {}
    with engine.rollout(step, gather) as policy:
        for rank in policy.ranks:
            own = policy.turn(rank)
            for call in range(2):
                settings = (1, step), NEW, 1.0, end, policy.all_done, policy.graphs
                made = generate(own, *prompts(rank, call).values(), *settings)
                found.setdefault(rank, []).extend((made.tokens, made.lengths, made.logprobs))
    return found


def run(engine: Any, gather: str) -> tuple[list[dict[int, list[Tensor]]], list[Any]]:
    """Rollouts before two steps, and one after them; and each step's numbers."""
    rolled, steps = [], []
    for step in range(3):
        rolled.append(roll(engine, step, gather, end=7))
        if step < 2:
            result = engine.step(step, 1e-2, batch, telemetry=False)
            steps.append([result.loss, result.grad_norm, sorted(result.bytes.items())])
    return rolled, steps


Outcome = tuple[list[dict[int, list[Tensor]]], list[Any], dict[str, Tensor]]


def compare(
    cases: list[str], nodes: int, local: int, twins: Collection[str] = GATHERS
) -> dict[str, str]:
    """Case → what differs ("" when nothing); to be run on every rank. `twins`: with which gathers
    virtual ranks do the same."""
    torch.use_deterministic_algorithms(True)
    cluster = ClusterConfig(nodes=nodes, gpus_per_node=local)
    transport = ProcessGroups(cluster, Watchdog(100.0))
    reals = {c: _real(configured(c, nodes, local, name="fsdp"), transport) for c in cases}
    mine = cases[transport.rank :: cluster.world]
    found = {c: _compare(configured(c, nodes, local), twins, *reals[c]) for c in mine}
    every: list[Any] = [None] * cluster.world
    dist.all_gather_object(every, found)
    return {case: text for part in every for case, text in part.items()}


def _real(config: Config, transport: ProcessGroups) -> list[Outcome]:
    """Of both gathers: what all ranks generated, their steps' numbers, and the state."""
    found = []
    for gather in GATHERS:
        engine = real(config, transport)
        every: list[Any] = [None] * config.cluster.world
        dist.all_gather_object(every, run(engine, gather))
        rolled = [reduce(or_, parts) for parts in zip(*(part[0] for part in every), strict=True)]
        assert all(steps == every[0][1] for _, steps in every)
        found.append((rolled, every[0][1], kept(engine)))
    return found


def _compare(config: Config, twins: Collection[str], *outcomes: Outcome) -> str:
    wrong = []
    for gather, outcome in zip(GATHERS, outcomes, strict=True):
        if gather not in twins:
            continue
        twin = virtual(config)
        wanted = *run(twin, gather), kept(twin)
        wrong += [f"{gather}: {text}" for text in differs(outcome, wanted)]
    tokens = [rolled for rolled, *_ in outcomes]
    wrong += [] if same(*tokens) else ["a token's gathers give others than a rollout's"]
    return "; ".join(wrong)


def differs(one: Outcome, other: Outcome) -> list[str]:
    found = [] if same(one[0], other[0]) else ["tokens, lengths or log-probabilities"]
    found += [] if one[1] == other[1] else [f"steps {one[1]} and {other[1]}"]
    return found + [n for n, t in one[2].items() if not t.equal(other[2][n])]


def same(one: list[dict[int, list[Tensor]]], other: list[dict[int, list[Tensor]]]) -> bool:
    """Whether all ranks generated what they did in `other`."""
    assert [mine.keys() for mine in one] == [theirs.keys() for theirs in other]
    return all(
        a.equal(b)
        for mine, theirs in zip(one, other, strict=True)
        for rank in mine
        for a, b in zip(mine[rank], theirs[rank], strict=True)
    )


# ---------------------------------------------------------------------- users' loops

USERS = {
    "zero3": {},
    "ordered": {"order": "reversed"},
    "zeropp": {"secondary": True, "hops": 2, "weights": Q8, "weights_rollout": S4},
    "differences": {**DIFFERENCES, "weights_update": S4, "weights_rollout": Q8},
}


def user_model(seed: int = 0) -> Any:
    """A Llama of transformers, whose own `generate` serves."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        eos_token_id=END,
        pad_token_id=0,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config)


def generated(model: Any, rank: int) -> list[list[int]]:
    own = prompts(rank, 0)["prompts"]
    made = model.generate(own, max_new_tokens=4 + rank, do_sample=False, synced_gpus=False)
    found: list[list[int]] = made.tolist()
    return found


def user_loop(name: str, rolls: bool) -> dict[str, Any]:
    """What a loop finds that generates between steps: unequally often by rank."""
    model, rank = user_model(), dist.get_rank()
    sharded = shard(model, {"name": name, **USERS[name]}, "2x2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    found: dict[str, Any] = {"losses": [], "as whole": [], "bytes": [], "planned": []}
    for _ in range(2):
        if rolls:
            whole = {n: p.full_tensor() for n, p in model.state_dict().items()}
            sharded.reset_bytes()
            with sharded.rollout() as policy, torch.inference_mode(rank == 1):
                tokens = [generated(policy, rank) for _ in range(rank + 1)]
                same = [p.equal(whole[n]) for n, p in policy.named_parameters()]
            twin = user_model()
            twin.load_state_dict(whole)
            found["as whole"].append([tokens[-1] == generated(twin, rank), all(same)])
            found["bytes"].append(sharded.bytes.get(ROLLOUT))
            planned = sharded.plan.rollout_bytes(None).get(ROLLOUT)
            found["planned"].append(planned and [n // 4 for n in planned])
        tokens = batch(rank, 0)[0]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
    if rolls:
        try:
            with sharded.rollout():
                step_within(model)
        except RuntimeError as error:
            found["stale"] = str(error)
    return found


@torch.no_grad()
def step_within(model: Any) -> None:
    """Change one element of the masters, on one rank."""
    if dist.get_rank() == 3:
        module = next(m for m in model.modules() if isinstance(m, FSDPModule))
        local(managed(module)[0].sharded_param)[0] += 1.0


def user_loops(names: list[str]) -> dict[str, Any]:
    transport = ProcessGroups(ClusterConfig(2, 2), Watchdog(100.0))
    with patch("zpp_lab.api.connect", lambda *_: transport), redirect_stderr(StringIO()):
        found = {}
        for name in names:
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, [user_loop(name, True), user_loop(name, False)])
            found[name] = every
    return found
