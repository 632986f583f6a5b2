"""Planned memory: closed forms against what a real run allocates on the CPU, and known peaks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.engines.fsdp_jobs import real
from tests.engines.fsdp_parity import RAW_GRID, configured
from tests.engines.fsdp_world import run_world
from tests.engines.uneven import batch
from zpp_lab.collectives.reduce import Reduce
from zpp_lab.config.compose import compose
from zpp_lab.config.load import load
from zpp_lab.config.model import ModelConfig
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import build_plan, plan_of
from zpp_lab.models import build_model
from zpp_lab.models.loss import chunked_losses, token_losses
from zpp_lab.runs.checkpoint.write import parts_of
from zpp_lab.train.memory.activations import Activations, cached_width
from zpp_lab.train.memory.buffers import GIB, Estimate
from zpp_lab.train.memory.estimate import estimate, secondary_bytes
from zpp_lab.train.memory.trace import Live

VOCAB = 37
SMALL = ModelConfig(dim=16, layers=3, heads=2, kv_heads=1, ffn=23, vocab_size=VOCAB)
ANEW = "error-feedback residuals, this step's"
CASES = ["zero3_bf16", "zeropp_bf16", "backward_other_codec", "stage2", "raw_secondary"]
CASES += ["bf16_states", "8bit_states", "memory_8bit", "memory_bf16"]
NODES = ["kept", "differences"]  # of one GPU each
GRID = ["grid_node_node_node", "grid_none_node_world", "grid_none_none_none", "grid_memory"]
GRID += [*RAW_GRID, "raw_secondary"]
RUNS = {(1, 2): CASES, (2, 1): NODES, (2, 2): GRID}
QUICK = {(1, 2): ["zeropp_bf16", "stage2", "8bit_states", "memory_8bit"], (2, 1): NODES}
QUICK[2, 2] = ["grid_node_node_node", "grid_none_node_world", "grid_none_none_none", "grid_memory"]


def test_a_rollout_has_its_line() -> None:
    """All weights and the cache, in an evaluation; none without reinforcement learning."""
    text, rl = (compose(words) for words in ([], ["experiment=rl_addition"]))
    assert not [i for i in estimate(plan_of(text), text, 256).items if i.name == "rollout"]
    plan = plan_of(rl)
    found = estimate(plan, rl, 256)
    more = estimate(plan, replace(rl, data=replace(rl.data, seq_len=2 * rl.data.seq_len)), 256)
    rows = rl.rl.prompts * rl.rl.samples // rl.cluster.world
    cache = rows * rl.data.seq_len * cached_width(rl.model) * 4
    both = [e.item("rollout").nbytes["eval"] for e in (found, more)]
    assert both[1] - both[0] == cache
    blocks = sum(p.numel for u in plan.units[1:-1] for p in u.unit.parameters)
    assert both[0] - cache == 4 * blocks


GENERATES = ["experiment=rl_addition", "engine.device=auto"]


def test_a_graph_of_generation_keeps_its_memory_in_training() -> None:
    rl = compose([*GENERATES, "rl.max_new_tokens=6"])
    kept = estimate(plan_of(rl), rl, 256).item("rollout's CUDA graph")
    assert kept.nbytes["loss"] == kept.nbytes["eval"] > 0
    for words in (["rl.max_new_tokens=5"], ["engine.graph=false"], ["engine.device=cpu"]):
        other = compose([*GENERATES, "rl.max_new_tokens=6", *words])
        names = {item.name for item in estimate(plan_of(other), other, 256).items}
        assert "rollout" in names
        assert kept.name not in names


# ---------------------------------------------------------------------- a real run


def nbytes(tensors: Any) -> int:
    return sum(t.to_local().untyped_storage().nbytes() for t in tensors)


def counted(config: Config) -> dict[str, Any]:
    """Bytes of one rank in a step of a real run."""
    engine = real(config, build_model(SMALL, VOCAB, seed=3))
    found: dict[str, Any] = {}
    stays, update = Reduce._stays, engine._update
    waiting: dict[str, int] = {}

    def noting_sums(self: Any, *args: Any) -> bool:
        held = stays(self, *args)
        waiting[self.spec.unit] = 0 if self.sums is None else self.sums.nbytes
        found["sums"] = max(found.get("sums", 0), sum(waiting.values()))
        return held

    def noting_update(*args: Any) -> None:
        found["grads"] = sum(p.grad.to_local().nbytes for p in engine.parameters.values())
        found["remembering"] = sum(t.nbytes for t in engine.memories.new.values())
        update(*args)

    engine._update = noting_update  # type: ignore[method-assign]
    Reduce._stays = noting_sums  # type: ignore[method-assign]
    try:
        engine.step(0, 1e-2, partial(batch, 0), telemetry=False)
    finally:
        Reduce._stays = stays  # type: ignore[method-assign]
    found["saved"] = sum(p.nbytes for p in parts_of(engine.state_dict()))
    found["weights"] = nbytes(engine.parameters.values())
    state = engine.optimizer.state.values()
    found["optimizer"] = sum(
        value.to_local().nbytes for s in state for key, value in s.items() if key != "step"
    )
    kept = [u.gather.secondary for u in engine.wrapped.installed]
    every = [u.update.rows() for u in engine.wrapped.installed if u.update is not None]
    found["kept"] = sum(t.nbytes for rows in every for t in rows)
    found["secondary"] = sum(t.nbytes for t in kept if t is not None)
    found["remembered"] = sum(t.nbytes for t in engine.memories.state().values())
    return found


def all_counted(cases: list[str], nodes: int, local: int) -> dict[str, Any]:
    return {c: counted(configured(c, nodes, local)) for c in cases}


def check(found: dict[str, Any], case: str, nodes: int, local: int) -> None:
    config = configured(case, nodes, local, transport="groups")
    config = replace(config, model=SMALL)
    plan = build_plan(build_model(SMALL, VOCAB, "meta"), config)
    planned = estimate(plan, config, VOCAB)
    assert found["weights"] == planned.item("master weights, fp32").most
    assert (
        found["optimizer"] == planned.item(f"optimizer state, {config.train.optimizer_state}").most
    )
    scalars = 4 * (SMALL.layers + 1) * 20  # numbers of steps
    assert 0 < found["saved"] - planned.item("checkpoint, being written").most // 2 < scalars
    assert found["grads"] == planned.item("gradients, fp32").nbytes["update"]
    assert found["secondary"] == secondary_bytes(plan)
    assert found["kept"] == sum(
        i.most for i in planned.items if i.name == "node-replicated weights"
    )
    assert found["remembered"] == found["remembering"] == plan.memory_bytes
    remembered = [i for i in planned.items if i.name in ("error-feedback residuals", ANEW)]
    assert len(remembered) == 2 * bool(plan.memories)
    assert all(i.nbytes["update"] == plan.memory_bytes for i in remembered)
    assert found.get("sums", 0) == sum(
        i.most for i in planned.items if i.name == "gradient sums in the node"
    )


@pytest.mark.parametrize(
    "runs", [QUICK, pytest.param(RUNS, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_a_real_run_holds_what_was_planned(runs: dict[tuple[int, int], list[str]]) -> None:
    for cluster, cases in runs.items():
        found = run_world(cluster[0] * cluster[1], all_counted, cases, *cluster)
        for case, facts in found.items():
            check(facts, case, *cluster)


# ---------------------------------------------------------------------- activations


def kept(block: torch.nn.Module, x: Tensor, run: Any) -> int:
    """Bytes that autograd saves in one forward, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    saved: dict[int, Tensor] = {}

    def note(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            saved.setdefault(t.untyped_storage().data_ptr(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        run(x)
    return sum(t.untyped_storage().nbytes() for t in saved.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "qk_norm"), [(4, False), (2, False), (4, True), (2, True)])
def test_a_block_keeps_what_autograd_saves(
    dtype: torch.dtype, kv_heads: int, qk_norm: bool
) -> None:
    cfg = ModelConfig(dim=64, layers=1, heads=4, kv_heads=kv_heads, ffn=176, qk_norm=qk_norm)
    block = build_model(cfg, 97).to(dtype).layers[0]
    x = torch.randn(2, 128, 64, dtype=dtype, requires_grad=True)
    tokens, size = 256, dtype.itemsize
    # On the CPU each norm keeps its input and the normed input in fp32, where a fused one keeps
    # its input as it is; the rotations are shared by all blocks.
    normed = 2 * 64 + qk_norm * (64 + kv_heads * 16)
    norms = tokens * normed * (4 + 4 - size)
    planned = Activations(cfg, 97, tokens, size).block
    assert kept(block, x, block) == planned + norms + ROTATIONS


@pytest.mark.parametrize(
    "shape",  # by default without grouped heads and with them, and both sides of dim = ffn
    [
        (64, 4, 4, 64, False),
        (32, 2, 1, 256, False),
        pytest.param((64, 4, 4, 176, False), marks=pytest.mark.slow),
        pytest.param((64, 4, 2, 176, False), marks=pytest.mark.slow),
        (32, 2, 1, 256, True),
        pytest.param((64, 4, 2, 176, True), marks=pytest.mark.slow),
    ],
)
def test_a_compiled_block_keeps_what_its_partition_says(
    shape: tuple[int, int, int, int, bool],
) -> None:
    """By the partition of torch.compile's default backend, without its code."""
    dim, heads, kv_heads, ffn, qk_norm = shape
    cfg = ModelConfig(dim=dim, layers=1, heads=heads, kv_heads=kv_heads, ffn=ffn, qk_norm=qk_norm)
    block = build_model(cfg, 97).to(torch.bfloat16).layers[0]
    x = torch.randn(2, 128, dim, dtype=torch.bfloat16, requires_grad=True)
    block.attention.rope.table(128, x.device)  # as the model does before its first block
    torch._dynamo.reset()
    run = torch.compile(block._compute, backend="aot_eager_decomp_partition", dynamic=False)
    planned = Activations(cfg, 97, 256, 2, compiled=True).block
    assert kept(block, x, run) == planned + ROTATIONS


ROTATIONS = 128 * 8 * 8  # of 128 positions, fp32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("chunk", "z_loss"), [(0, 0), (64, 0), (64, 1e-4), (512, 1e-4)])
def test_the_loss_takes_what_was_planned(dtype: torch.dtype, chunk: int, z_loss: float) -> None:
    tokens, dim, vocab = 512, 32, 2000
    asked = 0 if chunk == tokens else chunk  # a z-loss of whole logits is one chunk
    cfg = ModelConfig(dim=dim, heads=4, kv_heads=4, loss_chunk=asked, z_loss=z_loss)
    hidden = torch.randn(tokens, dim).to(dtype).requires_grad_()
    head = torch.randn(vocab, dim).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,))
    with Live() as live:
        if chunk:
            loss = chunked_losses(hidden, head, targets, chunk, z_loss).mean()
        else:
            loss = F.cross_entropy(F.linear(hidden, head).float(), targets)
        loss.backward()
    wanted = Activations(cfg, vocab, tokens, dtype.itemsize).loss
    if chunk and dtype == torch.bfloat16:  # on the CPU a softmax widens what comes in first
        wanted += 4 * chunk * vocab
    if not chunk and dtype == torch.bfloat16:  # and backward's gradients are fp32
        wanted += 2 * tokens * vocab
    assert 0.8 * wanted < live.most <= 1.001 * wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [0, 64])
def test_held_out_losses_take_what_was_planned(dtype: torch.dtype, chunk: int) -> None:
    vocab, dim = 2000, 32
    shape = {"dim": dim, "layers": 1, "heads": 4, "kv_heads": 4, "ffn": 16, "loss_chunk": chunk}
    cfg = ModelConfig(**shape, vocab_size=vocab)  # type: ignore[arg-type]
    model = build_model(cfg, vocab).to(dtype)
    tokens = torch.randint(0, vocab, (4, 128))
    with Live() as live, torch.no_grad():
        token_losses(model, tokens, tokens)
    wanted = Activations(cfg, vocab, 512, dtype.itemsize).heldout_loss
    if dtype == torch.bfloat16 and chunk:  # on the CPU a softmax widens what comes in first
        wanted += 4 * chunk * vocab
    assert live.most == pytest.approx(wanted, rel=0.08)


def norms_of(block: torch.nn.Module) -> list[torch.nn.RMSNorm]:
    return [module for module in block.modules() if isinstance(module, torch.nn.RMSNorm)]


class FusedNorm(torch.autograd.Function):
    """Keeps what a GPU's kernel does; no norm otherwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x[..., :1].float())
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        _, weight, _ = ctx.saved_tensors
        return grad.clone(), torch.zeros_like(weight)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize(
    "shape",
    [
        (64, 4, 4, 176, False),
        (64, 4, 2, 512, False),
        (128, 4, 4, 16, False),
        (128, 4, 1, 16, False),
        (256, 4, 2, 704, False),
        (64, 4, 4, 176, True),
        (128, 4, 4, 16, True),
        (256, 4, 2, 704, True),
    ],
)
def test_a_blocks_backward_holds_what_was_planned(
    shape: tuple[int, int, int, int, bool], batch_size: int
) -> None:
    dim, heads, kv_heads, ffn, qk_norm = shape
    cfg = ModelConfig(dim=dim, layers=1, heads=heads, kv_heads=kv_heads, ffn=ffn, qk_norm=qk_norm)
    block = build_model(cfg, 97).to(torch.bfloat16).layers[0]
    for norm in norms_of(block):
        norm.forward = lambda x, weight=norm.weight: FusedNorm.apply(x, weight)
    x = torch.randn(batch_size, 128, dim, dtype=torch.bfloat16, requires_grad=True)
    comes_in = torch.ones_like(x)
    with Live() as live:
        out = block(x)
        before = live.most = live.now
        out.backward(comes_in)
    acts = Activations(cfg, 97, batch_size * 128, 2)
    assert before == acts.block  # its output in place of its input
    held = live.most - before + acts.row
    grads = sum(p.nbytes for p in block.parameters())
    assert held <= acts.backward(grads) <= held + acts.row


# ---------------------------------------------------------------------- whole estimates


def planned(model: dict[str, Any], **groups: Any) -> Estimate:
    config = load(Config, {"model": model, **groups})
    return estimate(build_plan(build_model(config.model, 256, "meta"), config), config, 32000)


def big(name: str, batch_size: int, **groups: Any) -> Estimate:
    from tests.models.test_presets import preset

    train = {"param_dtype": "bf16", "batch_size": batch_size, **groups.pop("train", {})}
    cluster = {"nodes": 1, "gpus_per_node": 4}
    settings = {"cluster": cluster, "data": {"seq_len": 2048}, "train": train, **groups}
    return planned(dict(preset(name).__dict__) | settings.pop("model", {}), **settings)


def test_near_a_compiled_run_that_keeps_its_activations() -> None:
    """Untouched FSDP2 on four H200s: 64.435 GiB (experiments/plan)."""
    groups = {"engine": {"compile": True}, "train": {"reduce_dtype": "bf16"}}
    config = {"cluster": {"nodes": 2, "gpus_per_node": 2}, **groups}
    found = big("13b", 2, model={"checkpoint_activations": False}, **config)
    assert found.tensors / GIB == pytest.approx(64.435, rel=0.01)
    assert found.peak_moment == "early"


@pytest.mark.parametrize(("name", "batch_size", "gib"), [("13b", 2, 52), ("32_5b", 1, 125)])
def test_near_measured_peaks(name: str, batch_size: int, gib: int) -> None:
    """FSDP2 on four H200s: bf16, fp32 master weights, sequence 2048."""
    found = big(name, batch_size)
    assert found.tensors / GIB == pytest.approx(gib, rel=0.05)
    assert found.peak_moment == "late"


def test_offload_leaves_the_state_in_host_memory() -> None:
    here, there = big("13b", 2), big("13b", 2, engine={"offload": True})
    state = sum(i.most for i in here.items if i.name.endswith("fp32"))
    staging = there.item("checkpoint, being written").most
    assert staging == 64 * 2**20  # too large for a copy
    assert there.host == state + staging
    assert state > 48 * GIB
    assert there.peak < here.peak - 40 * GIB


def test_what_recipes_and_stages_add() -> None:
    hpz = {"secondary": True, "weights": {"bits": 8}}
    nodes = {"cluster": {"nodes": 2, "gpus_per_node": 2}}
    kept = big("1_3b", 4, recipe=hpz, **nodes)
    assert 0 < kept.item("secondary partition").most < 2 * 2 * 1.35e9 / 4
    one = big("1_3b", 4, recipe=hpz)  # in one node backward encodes again what it would keep
    assert "secondary partition" not in {item.name for item in one.items}
    plain = big("1_3b", 4, **nodes)
    early = [e.item("gather buffers").nbytes["early"] for e in (kept, plain)]
    assert early[0] < 0.6 * early[1]
    whole = big("1_3b", 4, recipe={"stage": 2})
    assert whole.item("gathered weights").nbytes["loss"] > 2 * 1.3e9
    once = big("1_3b", 4, train={"micro_steps": 4, "accumulate": "last"})
    every = big("1_3b", 4, train={"micro_steps": 4})
    assert once.item("whole gradients").nbytes["loss"] > 4 * 1.3e9
    assert every.item("whole gradients").nbytes["loss"] == 0
    assert every.item("gradients, fp32").nbytes["loss"] > 1.3e9


def test_moments_in_host_memory_pass_some_at_a_time() -> None:
    here, there = (
        big("13b", 2, train={"optimizer_state": "8bit", "optimizer_place": place})
        for place in ("device", "host")
    )
    moments = here.item("optimizer state, 8bit").most
    assert there.item("optimizer state, 8bit").place == "host"
    passing = there.item("optimizer state, in transfer").nbytes
    assert passing["update"] == 2**28  # a lane's; no parameter's moments are more
    assert passing["late"] == 0
    late = [e.at("late") for e in (here, there)]
    assert late[0] - late[1] == moments
    assert there.at("update") == here.at("update") - moments + 2 * 2**28
    assert there.tensors < there.peak


def test_large_parameters_pass_in_pieces() -> None:
    """But those whose weights a gather reads whole: a quarter of the embedding, with moments."""
    cut, whole = (
        big("13b", 2, train={"masters": "split"}, engine={"place": place}).item("state in transfer")
        for place in ("host", {"moments": 41, "weights": 41})
    )
    assert cut.most == 2 * 2**28
    assert whole.most == 2 * (4 + 4 + 2) * 32000 // 4 * 5120


def test_what_is_placed_in_host_memory_leaves_the_gpu() -> None:
    train = {"optimizer_state": "8bit", "masters": "split"}
    here, there, some = (
        big("13b", 2, train=train, engine={"place": place})
        for place in ("device", "host", {"moments": 10, "gradients": 41})
    )
    low = there.item("master weights, low planes").most
    assert low == pytest.approx(here.item("master weights, bf16 and rest").most / 2, rel=1e-3)
    gradients = "gradients, bf16, in host memory"
    assert there.item(gradients).most == pytest.approx(low, rel=1e-3)
    assert some.item(gradients).most == there.item(gradients).most
    moments = here.item("optimizer state, 8bit").most
    assert there.item("optimizer state, 8bit").most == pytest.approx(moments, rel=1e-3)
    assert there.item("optimizer state, 8bit").place == "host"
    assert 10 / 45 < some.item("optimizer state, 8bit, rest").most / moments < 10 / 40
    assert there.item("state in transfer").most == 2 * 2**28
    saved = here.at("late") - there.at("late")
    waiting = there.item("gradients, leaving").most + 2 * 2**28
    assert saved == pytest.approx(low + low + moments - waiting, rel=0.02)
    assert there.host > here.host + 2 * low + 0.99 * moments
    high = big("13b", 2, train=train, engine={"place": {"weights": 41}})
    assert high.item("master weights, high planes").most == low
    assert high.host == here.host + low
    left = [e.item("master weights, bf16 and rest").most for e in (here, high)]
    assert left[0] - left[1] == pytest.approx(low, rel=1e-3)
    near = high.item("high planes, for gathers").most  # of two units of 41
    assert 2 / 42 < near / low < 2 / 40
    assert here.at("late") - high.at("late") == pytest.approx(low - near - 2 * 2**28, rel=1e-3)
