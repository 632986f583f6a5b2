"""`zpp_lab.shard` with tensor parts in users' loops, and beside torch's tensor parallelism."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from tests.engines.fsdp_world import run_world
from tests.loop_base import RECIPES, everyone, refused
from tests.small_runs import corpus
from tests.test_loops import BATCH, CLIP, LENGTH, STEPS, adamw, config, trained, whole
from zpp_lab.api import Sharded, shard
from zpp_lab.config.schema import ClusterConfig, Config
from zpp_lab.data import open_data
from zpp_lab.engines.frozen import mark

QUANTIZED: dict[str, Any] = {
    "weights": {"bits": 8, "block_size": 16},
    "grads": {"bits": 8, "block_size": 16, "rounding": "stochastic"},
    "acts_forward": {"bits": 8, "block_size": 16, "rounding": "stochastic"},
    "acts_backward": {"bits": 8, "block_size": 16},
}
WIRES = [f"recipe.{wire}.{k}={v}" for wire, own in QUANTIZED.items() for k, v in own.items()]
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 250}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES = {
    "llama": {"pad_token_id": 7},
    "mistral": {"sliding_window": 6},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
}


def family(kind: str = "llama", seed: int = 0, **more: Any) -> Any:
    """A tiny model of transformers, whose vocabulary's parts are odd."""
    torch.manual_seed(seed)
    settings = transformers.AutoConfig.for_model(kind, **{**TINY, **FAMILIES[kind], **more})
    return transformers.AutoModelForCausalLM.from_config(settings)


def tokens(step: int, reader: int) -> Tensor:
    made = torch.Generator().manual_seed(100 * step + reader)
    return torch.randint(8, 250, (2, 12), generator=made)


def by_labels(model: Any, ids: Tensor) -> Tensor:
    found: Tensor = model(ids, labels=ids).loss
    return found


def by_logits(model: Any, ids: Tensor) -> Tensor:
    """A loss of the user's own, of logits that it changes in place."""
    logits = model(ids).logits
    logits *= 1.0
    logits = logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, ids[:, 1:].flatten())


def steps(
    model: Any,
    sharded: Sharded,
    optimizer: Any,
    some: range,
    micros: int = 1,
    loss_of: Callable[[Any, Tensor], Tensor] = by_labels,
) -> list[float]:
    """Losses of a loop, and the norm of each step."""
    found = []
    for step in some:
        for micro in range(micros):
            ids = tokens(10 * step + micro, sharded.reader)
            loss = loss_of(model, ids)
            optimizer.zero_grad() if micro == 0 else None  # users do it here, too
            (loss / micros).backward()
            found.append(loss.item())
        found.append(sharded.clip_grad_norm_(CLIP).item())
        optimizer.step()
    return found


# ---------------------------------------------------------------------- as a run, as a whole model


def as_run(chosen: Config, model: Any, **how: Any) -> list[list[float]]:
    """Losses of `zpp-lab train` with cluster.tp, and of a user's loop around its model."""
    start = {name: p.clone() for name, p in whole(chosen).state_dict().items()}
    model.load_state_dict(start, strict=False)
    sharded = shard(model, chosen.recipe, **how)
    return [trained(chosen), losses_of(chosen, model, sharded, adamw(model), range(STEPS))]


def losses_of(
    chosen: Config, model: Any, sharded: Sharded, optimizer: Any, some: range
) -> list[float]:
    """Losses of these steps of the run, as it says them."""
    data, losses = open_data(chosen.data), []
    for step in some:
        inputs, targets = data.step(chosen.seed, step, sharded.readers, 1, BATCH, LENGTH)(
            sharded.reader, 0
        )
        if hasattr(model, "lm_head"):
            loss = model(inputs, labels=targets, shift_labels=targets).loss
        else:
            loss = model(inputs, targets)
        loss.backward()
        sharded.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.zero_grad()
        every = everyone(loss.item())[:: chosen.cluster.tp]
        losses.append(sum(every) / len(every))
    return losses


def as_transformers(kind: str) -> dict[str, float]:
    """How far losses, gradients, norms, and logits lie from transformers' own; padded and packed
    sequences, too."""
    own, model = family(kind), family(kind)
    sharded = shard(model, {"order": "reversed"}, tp=2)
    ids = tokens(0, sharded.reader)
    one, two = (m(ids, labels=ids).loss for m in (own, model))
    found = {"loss": float((one - two).detach().abs()), "gradients": 0.0}
    for loss in (one, two):
        loss.backward()
    grads = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    for name, p in own.named_parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
        far = float((grads[name] - p.grad).abs().max() / p.grad.abs().max())
        found["gradients"] = max(found["gradients"], far)
    norm = torch.nn.utils.clip_grad_norm_(own.parameters(), 1e9)
    theirs: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    found["norm"] = float((sharded.clip_grad_norm_(1e9) - norm).abs())
    found["torch's norm"] = float((theirs.full_tensor() - norm).abs())
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    packed = torch.cat((torch.arange(5), torch.arange(7)))[None].expand(2, -1)
    for more in ({}, {"attention_mask": mask}, {"position_ids": packed}):
        with torch.no_grad():
            a, b = (m.eval()(ids, labels=ids, **more) for m in (own, model))
        there = mask.bool() if "attention_mask" in more else slice(None)
        found[f"logits {list(more)}"] = float((a.logits - b.logits)[there].abs().max())
        found[f"loss {list(more)}"] = float((a.loss - b.loss).abs())
    return found


def with_evaluation(model: Any, ids: Tensor) -> Tensor:
    """The same, with an evaluation between forward and backward."""
    loss = by_labels(model, ids)
    with torch.no_grad():
        model(ids)
    return loss


def counted() -> list[Any]:
    """What all ranks sent in a step, in one with an evaluation, and the plan of a step."""
    model = family("qwen2")
    sharded, found = shard(model, QUANTIZED, tp=2), []
    for loss_of in (by_labels, with_evaluation):
        sharded.reset_bytes()
        steps(model, sharded, adamw(model), range(1), loss_of=loss_of)
        every = everyone({wire: list(sent) for wire, sent in sharded.bytes.items()})
        found.append({w: [sum(own[w][i] for own in every) for i in (0, 1)] for w in every[0]})
    return [*found, {wire: list(sent) for wire, sent in sharded.plan.step_bytes().items()}]


def accumulated() -> list[list[float]]:
    """Two micro-steps over as many readers of a whole model, of one in two parts, and of this with
    a loss of the user's own."""
    found, mesh = [], init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for tp, loss_of in ((1, by_labels), (None, by_labels), (2, by_logits)):
        model = family()
        sharded = shard(model, {"order": "reversed"}, mesh=mesh, tp=tp)
        assert (sharded.parts is None) == (tp == 1)
        found.append(steps(model, sharded, adamw(model), range(2), 2, loss_of))
    return found


def with_checkpointing(which: str, model: Any, ids: Tensor) -> Tensor:
    """Activations of the whole model, or of what layers consist of, are computed again, after a
    forward without gradients."""
    if which == "model":
        loss: Tensor = checkpoint(partial(by_labels, model), ids, use_reentrant=False)
    else:
        kinds = {type(getattr(model.model.layers[0], name)) for name in ("self_attn", "mlp")}
        apply_activation_checkpointing(model, check_fn=lambda m: type(m) in kinds)
        loss = by_labels(model, ids)
    with torch.no_grad():
        model(ids[:1])
    return loss


def recomputed() -> list[Any]:
    """Losses and norms of two steps of two micro-steps without and with activation checkpointing,
    and what activations sent."""
    found = []
    for loss_of in (by_labels, *(partial(with_checkpointing, which) for which in ("model", "in"))):
        model = family()
        sharded = shard(model, {**QUANTIZED, "grads": {}}, tp=2)
        losses = steps(model, sharded, adamw(model), range(2), 2, loss_of)
        found.append([losses, sharded.bytes["acts_forward"].intra])
    return found


# ---------------------------------------------------------------------- checkpoints


def saved(folder: Path) -> dict[str, Any]:
    """A checkpoint of torch's of dp=2 × tp=2, read with other parts: whether all of them have the
    same weights and states, and the norms of the next steps."""

    def state(model: Any, optimizer: Any, full: bool) -> dict[str, Any]:
        options = dcp_state.StateDictOptions(full_state_dict=full)
        weights, states = dcp_state.get_state_dict(model, optimizer, options=options)
        return {"model": weights, "optimizer": states}

    def new(tp: int, seed: int) -> Any:
        model = family("qwen2", seed, num_key_value_heads=4, vocab_size=252)
        sharded = shard(model, {"order": "reversed"}, tp=tp)
        return model, sharded, torch.optim.AdamW(model.parameters(), lr=1e-2)

    first = new(2, 0)
    steps(*first, range(2))
    own = copy.deepcopy(state(first[0], first[2], True))
    dcp.save({**state(first[0], first[2], False), "sharded": first[1]}, checkpoint_id=folder)
    found: dict[str, Any] = {"went on": steps(*first, range(2, 4))}
    for tp in (1, 2, 4):
        model, sharded, optimizer = new(tp, 1)
        read = state(model, optimizer, False)
        dcp.load({**read, "sharded": sharded}, checkpoint_id=folder)
        dcp_state.set_state_dict(
            model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"]
        )
        found[f"the same {tp}"] = alike(state(model, optimizer, True), own)
        found[f"step {tp}"] = sharded.state_dict()["step"]
        if tp == 2:
            found["resumed"] = steps(model, sharded, optimizer, range(2, 4))
    model = new(2, 1)[0]
    options = dcp_state.StateDictOptions(full_state_dict=True)
    dcp_state.set_model_state_dict(model, dict(own["model"]), options=options)
    gathered = {n: p.full_tensor() for n, p in model.state_dict().items()}
    found["whole"] = alike(gathered, own["model"])
    model.save_pretrained(folder / "hf")
    dist.barrier()
    exported = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf").state_dict()
    found["exported"] = alike(dict(exported), own["model"])
    return found


def kept(folder: Path, chosen: Config) -> list[Any]:
    """Losses of a run and of a loop with node-replicated weights, which another one resumes after
    two steps; what the state says to other weights; whether its marks are the whole weights'."""

    def new() -> Any:
        model = whole(chosen)
        return model, shard(model, chosen.recipe, "2x4", tp=2), adamw(model)

    first = new()
    losses = losses_of(chosen, *first, range(2))
    weights, states = dcp_state.get_state_dict(first[0], first[2])
    state = {"model": weights, "optimizer": states}
    marks = first[1].state_dict()["marks"]
    full = {name: weights[name].full_tensor() for name in marks}
    right = {n: torch.equal(marks[n], mark(p, 0, tuple(p.shape))) for n, p in full.items()}
    dcp.save({**state, "sharded": first[1]}, checkpoint_id=folder)
    model, sharded, optimizer = new()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    dcp.load({"sharded": sharded}, checkpoint_id=folder)
    said = refused(partial(losses_of, chosen, model, sharded, optimizer, range(1)), ValueError)
    weights, states = dcp_state.get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    dcp_state.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    losses += losses_of(chosen, model, sharded, optimizer, range(2, STEPS))
    return [trained(chosen), losses, said[0][0], right]


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


# ---------------------------------------------------------------------- beside torch's own


def torchtitan() -> list[list[float]]:
    """A model under torch's tensor and sequence parallelism, as torchtitan cuts it: with FSDP2,
    and with recipes over the other dimension."""
    found = []
    for recipe in (None, {"order": "reversed"}, {"grads": {"bits": 8, "block_size": 16}}):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = family()
        parallelize_module(model, mesh["tp"], TITAN)
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tp"], TITANS_LAYER)
        if recipe is None:
            for module in (*model.model.layers, model):
                fully_shard(module, mesh=mesh["dp"])
        else:
            sharded = shard(model, recipe, mesh=mesh["dp"])
            assert sharded.parts is None
        optimizer, losses = adamw(model), []
        for step in range(2):
            ids = tokens(step, mesh.get_local_rank("dp"))
            logits = model(ids, position_ids=torch.arange(ids.shape[1])[None]).logits
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            losses += [loss.item(), norm.full_tensor().item()]
        found.append(losses)
    return found


WHOLE, SLICES = Replicate(), Shard(1)
TITAN: Any = {
    "model.embed_tokens": RowwiseParallel(input_layouts=WHOLE, output_layouts=SLICES),
    "model.norm": SequenceParallel(),
    "lm_head": ColwiseParallel(input_layouts=SLICES, output_layouts=WHOLE),
}
TITANS_LAYER: Any = {
    "input_layernorm": SequenceParallel(),
    "self_attn": PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": SLICES},
        desired_input_kwarg_layouts={"hidden_states": WHOLE},
    ),
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(output_layouts=SLICES),
    "post_attention_layernorm": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=(SLICES,), desired_input_layouts=(WHOLE,)),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(output_layouts=SLICES),
}


# ---------------------------------------------------------------------- refusals


def refusals() -> dict[str, str]:
    """What is said to models, meshes and calls without tensor parts."""
    dp_tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp_dp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    pp_tp = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    nodes_tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "tp"))
    cut, adapted, fine, apart, compiled, fresh, later = (family() for _ in range(7))
    compiled.lm_head.compile()
    parallelize_module(cut, dp_tp["tp"], TITAN)
    adapted.model.layers[0].mlp.up_proj = nn.Sequential(nn.Linear(32, 48, bias=False))
    sharded = shard(fine, "zero3", tp=2)
    for model in (apart, later):
        shard(model, "zero3", tp=2)
    ids = tokens(0, sharded.reader)
    mask = torch.ones_like(ids) if dist.get_rank() % 2 else None
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2))

    def rolled() -> None:
        with sharded.rollout():
            pass

    def wrapped(ids: Tensor) -> Any:  # after shard
        apply_activation_checkpointing(apart, check_fn=lambda m: m is apart.model.layers[0])
        return apart(ids)

    def late() -> None:  # after forwards of the same
        with torch.no_grad():
            for rank in (sharded.reader, dist.get_rank()):
                fine.train()(tokens(0, rank))

    def score(ids: Tensor) -> Any:
        apart.score = lambda ids: apart.model(ids)
        register_fsdp_forward_method(apart, "score")
        return apart.score(ids)

    def scaled(loss_of: Callable[[Any, Tensor], Tensor]) -> None:
        model = family()
        sharded = shard(model, "zero3", tp=2)
        loss = loss_of(model, tokens(0, sharded.reader))
        (loss / (1 + dist.get_rank() % 2)).backward()

    def of_layers(name: str) -> None:
        model = family()
        sharded = shard(model, "zero3", tp=2)
        kind = type(model.model.layers[0])
        run = getattr(kind, name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, name, lambda *x, **k: checkpoint(run, *x, use_reentrant=False, **k))
            by_labels(model, tokens(0, sharded.reader)).backward()

    def compiled_layer() -> Any:
        fine.model.layers[0].compile(backend="eager")
        return fine(ids)

    jobs: dict[str, Callable[[], Any]] = {
        "GPT2LMHeadModel": lambda: shard(gpt2, "zero3", mesh=dp_tp),
        "Linear": lambda: shard(nn.Linear(4, 4), "zero3", tp=2),
        "DTensors": lambda: shard(cut, "zero3", tp=2),
        "up_proj.0": lambda: shard(adapted, "zero3", tp=2),
        "num_key_value_heads": lambda: shard(family(), "zero3", tp=4),
        "all ranks": lambda: shard(family(), "zero3", mesh=tp_dp),
        "dimensions dp and tp": lambda: shard(family(), "zero3", mesh=pp_tp),
        "tp=4": lambda: shard(family(), "zero3", mesh=dp_tp, tp=4),
        "cluster.pp": lambda: shard(family(), "zero3", ClusterConfig(1, 4, pp=2)),
        "lm_head": lambda: shard(compiled, "zero3", tp=2),
        "recipe.acts_pipe": lambda: shard(family(), {"acts_pipe": {"bits": 8}}, tp=2),
        "recipe.acts": lambda: shard(family(), QUANTIZED, tp=1),
        "memory.kind": lambda: shard(family(), RECIPES["loco"], tp=2),
        "place": lambda: shard(fresh, "zero3", tp=2, place="host"),
        "rollout": rolled,
        "graphed": lambda: sharded.graphed(lambda batch: batch),
        "use_cache": lambda: fine(ids, use_cache=True),
        "generate": lambda: fine.generate(ids, use_cache=False, max_new_tokens=1),
        "11 tokens": lambda: fine(ids[:1, :11]),
        "Sharded.reader": lambda: apart(tokens(0, dist.get_rank())),
        "different labels": lambda: fine(ids, labels=tokens(0, dist.get_rank())),
        "different attention_mask": lambda: fine(ids, attention_mask=mask, labels=ids),
        "different position_ids": lambda: fine(ids, position_ids=ids + dist.get_rank()),
        "different other arguments": lambda: fine(
            ids, labels=ids, num_items_in_batch=1 + dist.get_rank()
        ),
        "different gradients of the loss": lambda: scaled(by_labels),
        "gradients of the loss:": lambda: scaled(by_logits),
        "checkpointing of layers": lambda: of_layers("forward"),
        "activation checkpointing of": lambda: of_layers("__call__"),
        "builtin_function_or_method": lambda: fine(ids, attention_mask=print),
        "CheckpointWrapper": lambda: wrapped(ids),
        "tokens from 250": lambda: fine(torch.full_like(ids, 250)),
        "labels from -1": lambda: fine(ids, labels=torch.full_like(ids, -1)),
        "labels from -100": lambda: fine(ids, labels=ids * 0 - 100, ignore_index=-1),
        "20 labels": lambda: fine(ids, labels=ids[:, :10]),
        "shape (0, 12)": lambda: fine(ids[:0]),
        "shape (12,)": lambda: fine(ids[0]),
        "by name, such as labels": lambda: fine(ids, None, None, None, None, ids),
        "different tokens": lambda: fine.eval()(tokens(0, dist.get_rank())),
        "have different tokens": late,
        "model's model ": lambda: later.model(ids),
        "model's model was called": lambda: score(ids % 100),  # which all parts have rows for
        "model's lm_head": lambda: later.lm_head(torch.zeros(2, 12, 32)),
        "model's model.layers.1": lambda: later.model.layers[1](torch.zeros(12, 32)),
        "resize_token_embeddings": lambda: later.resize_token_embeddings(256),
        "of the model": lambda: torch.compile(later, backend="eager")(ids),
        "of model.layers.0": compiled_layer,
        "tp=0": lambda: shard(family(), "zero3", tp=0),
        "tp=True": lambda: shard(family(), "zero3", tp=True),
        "tp='2'": lambda: shard(family(), "zero3", tp="2"),  # type: ignore[arg-type]
        "cluster.tp=4": lambda: shard(family(), "zero3", ClusterConfig(1, 4, tp=4), tp=2),
        "nodes, gpus and tp": lambda: shard(family(), "zero3", mesh=nodes_tp),
    }
    found = {name: refused(job, ValueError)[0][1] for name, job in jobs.items()}
    assert fresh.lm_head.weight.shape[0] == 250, "it is not cut"
    return found


# ---------------------------------------------------------------------- tests


def of_four(folder: str, chosen: dict[str, Config]) -> dict[str, Any]:
    """One start of ranks serves all tests."""
    place = Path(folder)
    found: dict[str, Any] = {"runs": {}}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found["runs"]["decoder"] = as_run(chosen["decoder"], whole(chosen["decoder"]), mesh=mesh)
    plain = whole(chosen["hf"]).config
    model = transformers.AutoModelForCausalLM.from_config(plain)
    found["runs"]["hf"] = as_run(chosen["hf"], model, cluster="1x4", tp=2)
    found["families"] = {kind: as_transformers(kind) for kind in FAMILIES}
    found |= {"recomputed": recomputed()}
    found |= {"counted": counted(), "accumulated": accumulated(), "saved": saved(place / "saved")}
    return found | {"refused": refusals()}


def of_two(chosen: Config) -> dict[str, Any]:
    """Each rank is alone in its cell."""
    return {"run": as_run(chosen, whole(chosen), tp=2)}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("parts")
    corpus(folder)
    own = TINY | {"model_type": "qwen3", "head_dim": 8, "vocab_size": 256}
    words = ", ".join(f"{key}: {value}" for key, value in own.items())
    hf = ["model=hf", f"model.options={{{words}}}"]
    runs = {"decoder": ("cluster=1x4",), "hf": ("cluster=1x4", *hf)}
    chosen = {
        name: config(folder, "zero3", *WIRES, *more, "cluster.tp=2") for name, more in runs.items()
    }
    found: dict[str, Any] = run_world(4, of_four, str(folder), chosen)
    acts = [word for word in WIRES if "acts" in word]
    two = config(folder, "zero3", *acts, "cluster=1x2", "cluster.tp=2")
    return {**found, "alone": run_world(2, of_two, two)}


@pytest.mark.parametrize("case", ["decoder", "hf"])
def test_a_loop_has_the_losses_of_a_run_with_parts(case: str, answers: dict[str, Any]) -> None:
    run, loop = answers["runs"][case]
    assert len(run) == STEPS
    assert loop == run


def test_so_it_has_where_no_ranks_share_a_part(answers: dict[str, Any]) -> None:
    run, loop = answers["alone"]["run"]
    assert loop == run


@pytest.mark.slow
def test_node_replicated_weights_are_as_in_runs_and_saved(tmp_path: Path) -> None:
    corpus(tmp_path)
    acts = [word for word in WIRES if "acts" in word]
    chosen = config(tmp_path, "sdp4bit", *acts, "cluster=2x4", "cluster.tp=2")
    run, loop, said, right = run_world(8, kept, tmp_path / "saved", chosen)
    assert loop == run
    assert said == "ValueError"
    assert right == dict.fromkeys(right, True)
    assert len(right) == 16


@pytest.mark.parametrize("kind", FAMILIES)
def test_parts_compute_what_transformers_does(kind: str, answers: dict[str, Any]) -> None:
    found = answers["families"][kind]
    assert len(found) == 10
    assert {name: far for name, far in found.items() if not far < 2e-6} == {}


def test_ledger_and_plan_agree(answers: dict[str, Any]) -> None:
    sent, evaluated, planned = answers["counted"]
    assert sent == planned
    assert sent["acts_forward"][0] > 0
    for wire in ("acts_forward", "acts_backward", "tp_raw"):  # evaluation's are not counted
        assert evaluated[wire] == planned[wire]


def test_micro_steps_and_losses_of_ones_own(answers: dict[str, Any]) -> None:
    one, two, own = answers["accumulated"]
    assert two == pytest.approx(one, rel=1e-5)
    assert own == pytest.approx(two, rel=1e-5)


def test_activations_are_computed_again_to_the_same_bits(answers: dict[str, Any]) -> None:
    (plain, sent), (whole, twice), (inner, once) = answers["recomputed"]
    assert plain == whole == inner
    assert (twice, once) == (2 * sent, sent)


def test_checkpoints_are_read_with_any_parts(answers: dict[str, Any]) -> None:
    found = answers["saved"]
    assert found.pop("went on") == found.pop("resumed")
    assert {found.pop(f"step {tp}") for tp in (1, 2, 4)} == {2}
    assert found == dict.fromkeys(found, True)
    assert len(found) == 5


@pytest.mark.slow  # test_loops.py has a smaller model
def test_torchs_own_parts_are_left_alone() -> None:
    fsdp2, reversed_, quantized = run_world(4, torchtitan)
    assert reversed_ == pytest.approx(fsdp2, rel=1e-6)
    assert quantized != fsdp2
    assert quantized == pytest.approx(fsdp2, rel=0.05)


def test_what_has_no_parts_is_refused_by_name(answers: dict[str, Any]) -> None:
    assert {name: said for name, said in answers["refused"].items() if name not in said} == {}
