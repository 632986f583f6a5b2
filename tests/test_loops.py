"""Loops of others around `zpp_lab.shard` lose what `zpp-lab train` loses on the same batches.

The loops are those of GUIDE.md and README.md, run as they stand there but for the recipe's name.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zpp_lab
from tests.engines.fsdp_world import run_world
from tests.small_runs import SHAPE, corpus
from zpp_lab.config.compose import compose
from zpp_lab.config.schema import ClusterConfig, Config
from zpp_lab.data import open_data
from zpp_lab.engines.build import vocabulary
from zpp_lab.files import METRICS
from zpp_lab.models import build_model
from zpp_lab.runs.metrics import read
from zpp_lab.train.trainer import run

README, GUIDE = (
    (Path(__file__).parents[1] / f"{name}.md").read_text() for name in ("README", "GUIDE")
)
STEPS, BATCH, LENGTH = 3, 2, 16
ADAMW = "train.beta1=0.9 train.beta2=0.999 train.eps=1e-8 train.weight_decay=0 train.lr=3e-4"
CLIP = 0.1  # gradients of a tiny model are shorter than 1
# What a run does beside its steps, of which nothing is asked here.
LITTLE = "train.eval_tokens=64 train.keep_checkpoints=0 tracking.telemetry_every=0"
RECIPES: dict[str, dict[str, Any]] = {
    "zeropp": {"weights": {"block_size": 16}, "grads": {"block_size": 16}},
    "sdp4bit": {"weights_update": {"block_size": 32}},  # stochastic, kept, differences
    "loco": {"grads": {"block_size": 16}},  # remembers
    "w8_then_w4": {"weights": {"block_size": 16}, "phases.0": {"after": 2}},
    "zero3": {},
}
SLOW = ("zeropp", "sdp4bit", "w8_then_w4", "zero3")


def guide(n: int) -> str:
    section = GUIDE.split("## In your own training loop")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)[n]


def config(folder: Path, recipe: str, *more: str) -> Config:
    shape = [w for w in (*SHAPE, "model.layers=2") if "model=hf" not in more or "model." not in w]
    words = [f"recipe.{g}.{k}={v}" for g, own in RECIPES[recipe].items() for k, v in own.items()]
    return compose(
        [
            *shape,
            *ADAMW.split(),
            *LITTLE.split(),
            "cluster=2x2",
            "engine=fsdp",
            f"data.path={folder / 'texts'}",
            f"data.cache_dir={folder / 'cache'}",
            f"train.steps={STEPS}",
            f"train.clip={CLIP}",
            "train.warmup_steps=0",
            "train.schedule=constant",
            f"recipe={recipe}",
            *words,
            f"run.dir={folder / f'run-{recipe}-{crc32(repr(more).encode())}'}",
            *more,
        ]
    )


def trained(chosen: Config) -> list[float]:
    """Losses of `zpp-lab train`."""
    run(chosen, dist.get_rank())
    dist.barrier()
    lines = read(Path(chosen.run.dir) / METRICS)
    return [line["loss"] for line in lines if "loss" in line]


def batches(chosen: Config) -> Iterator[tuple[Tensor, Tensor]]:
    data, train = open_data(chosen.data), chosen.train
    for step in range(STEPS):
        turns = data.step(chosen.seed, step, 4, train.micro_steps, BATCH, LENGTH)
        for micro in range(train.micro_steps):
            yield turns(dist.get_rank(), micro)


def mean(losses: list[Tensor]) -> list[float]:
    """Of all ranks, as a run says it."""
    every = [torch.zeros(len(losses), dtype=torch.float64) for _ in range(4)]
    dist.all_gather(every, torch.stack(losses).double())
    return torch.stack(every).mean(0).tolist()


def watched(model: nn.Module) -> list[Tensor]:
    losses: list[Tensor] = []
    model.register_forward_hook(
        lambda _, __, out: losses.append(getattr(out, "loss", out).detach().clone())
    )
    return losses


def run_guide(n: int, chosen: Config, **names: Any) -> None:
    """The n-th loop, with the names that it takes for granted."""
    code = guide(n).replace('"zeropp"', "recipe").replace("_(1.0)", f"_({CLIP})")
    known = {"zpp_lab": zpp_lab, "torch": torch, "init_device_mesh": init_device_mesh}
    exec(code, known | {"recipe": chosen.recipe, "mesh": nested()} | names)


def nested() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "gpus"))


def whole(chosen: Config, device: str = "cpu") -> Any:
    return build_model(chosen.model, vocabulary(chosen), device=device, seed=chosen.seed)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)


def plain(chosen: Config) -> list[float]:
    model = whole(chosen)
    losses = watched(model)
    run_guide(0, chosen, model=model, batches=batches(chosen))
    return mean(losses)


def accumulated(chosen: Config) -> list[float]:
    """Two micro-steps, an evaluation between them, and a gradient that nobody asked for."""
    model = whole(chosen)
    sharded = zpp_lab.shard(model, chosen.recipe, ClusterConfig(nodes=2, gpus_per_node=2))
    optimizer, losses = adamw(model), []
    for i, batch in enumerate(batches(chosen)):
        losses.append(model(*batch))
        (losses[-1] / 2).backward()
        with torch.no_grad():
            model(*batch)
        if i % 2:
            sharded.clip_grad_norm_(CLIP)
            optimizer.step()
            optimizer.zero_grad()
    each = mean([loss.detach() for loss in losses])
    return [(a + b) / 2 for a, b in zip(each[::2], each[1::2], strict=True)]


def interrupted(chosen: Config, folder: Path) -> list[float]:
    """Half of the steps, then the rest by another model, which was on the meta device."""
    given, losses = list(batches(chosen)), []
    for part, device in ((given[: STEPS // 2], "cpu"), (given[STEPS // 2 :], "meta")):
        model = whole(chosen, device)
        sharded = zpp_lab.shard(model, chosen.recipe, mesh=nested())
        if device == "meta":
            model.to_empty(device="cpu")
        optimizer, path = adamw(model), folder / f"saved-{chosen.recipe.name}"
        if device == "meta":
            weights, states = dcp_state.get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": states}
            dcp.load(state, checkpoint_id=path)
            dcp_state.set_state_dict(
                model, optimizer, model_state_dict=weights, optim_state_dict=states
            )
            dcp.load({"sharded": sharded}, checkpoint_id=path)
        for batch in part:
            losses.append(model(*batch))
            losses[-1].backward()
            sharded.clip_grad_norm_(CLIP)
            optimizer.step()
            optimizer.zero_grad()
        if device == "cpu":
            weights, states = dcp_state.get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": states, "sharded": sharded}
            dcp.save(state, checkpoint_id=path)
    return mean([loss.detach() for loss in losses])


def hugging_face(chosen: Config) -> dict[str, list[float]]:
    """The loops of accelerate and of the Trainer, and the latter with torch's own clipping."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500", LOCAL_WORLD_SIZE="4")

    def model() -> tuple[Any, list[Tensor]]:
        made = AutoModelForCausalLM.from_pretrained(chosen.model.path, dtype=torch.float32)
        return made, watched(made)

    def named(inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"input_ids": inputs, "labels": targets, "shift_labels": targets}

    found = {}
    own, losses = model()
    given = (named(*batch) for batch in batches(chosen))
    run_guide(1, chosen, model=own, batches=given, Accelerator=Accelerator)
    found["accelerate"] = mean(losses)
    data = open_data(chosen.data)
    turns = [data.step(chosen.seed, step, 4, 1, BATCH, LENGTH) for step in range(STEPS)]
    rows = [
        named(*pair) for turn in turns for r in range(4) for pair in zip(*turn(r, 0), strict=True)
    ]
    for case, clip in (("trainer", 0.0), ("clipped", CLIP)):
        own, losses = model()
        args = TrainingArguments(
            f"{chosen.run.dir}-{case}",
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            learning_rate=3e-4,
            lr_scheduler_type="constant",
            optim="adamw_torch",
            max_grad_norm=clip,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        run_guide(2, chosen, model=own, args=args, dataset=rows, Trainer=Trainer)
        found[case] = [4 * loss for loss in mean(losses)]  # it divides by all ranks' tokens
    return found


def torchtitan(chosen: Config) -> list[float]:
    """Its Trainer with our decoder. It wants a GPU: this stands in for what it asks of one, and for
    the kernels of experts, which need Triton."""
    os.environ.update(LOCAL_WORLD_SIZE="2")  # as if torchrun had put two ranks on each node
    sys.modules["torchtitan.models.moe.kernels"] = MagicMock()
    torch._utils._get_available_device_type = lambda: "cpu"
    from torchtitan import train
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.config import JobConfig
    from torchtitan.models.llama3.infra.parallelize import disable_fsdp_gradient_division
    from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

    train.dist_utils.set_pg_timeouts = lambda **_: None  # gloo has no device to wait for
    metrics, losses = MagicMock(ntokens_since_last_log=0, data_loading_times=[]), []
    memory = metrics.device_memory_monitor.get_peak_stats.return_value
    memory.max_reserved_gib = memory.max_reserved_pct = 0.0

    @dataclass
    class Settings:
        def update_from_config(self, _: Any) -> None: ...

        def get_nparams_and_flops(self, *_: Any) -> tuple[int, int]:
            return 1, 1

    class Model(type(whole(chosen, "meta"))):  # type: ignore[misc]
        def __init__(self, _: Any) -> None:
            super().__init__(chosen.model, vocabulary(chosen))

        def init_weights(self, buffer_device: Any = None) -> None:
            options = dcp_state.StateDictOptions(full_state_dict=True)
            dcp_state.set_model_state_dict(self, whole(chosen).state_dict(), options=options)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        total = cross_entropy_loss(logits, targets)
        losses.append(total.detach() / targets.numel())
        return total

    class Loader(list):  # type: ignore[type-arg]
        def state_dict(self) -> dict[str, Any]:
            return {}

    spec = TrainSpec(
        model_cls=Model,
        model_args={"ours": Settings()},
        parallelize_fn=None,  # type: ignore[arg-type]
        pipelining_fn=None,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=lambda **_: Loader(({"input": x}, y) for x, y in batches(chosen)),
        build_tokenizer_fn=None,
        build_loss_fn=lambda *_, **__: loss,
        build_metrics_processor_fn=lambda *_: metrics,
    )
    names: dict[str, Any] = {"disable_fsdp_gradient_division": disable_fsdp_gradient_division}
    names |= {"register_train_spec": register_train_spec, "get_train_spec": lambda _: spec}
    run_guide(4, chosen, replace=replace, **names)
    job = JobConfig()
    job.model.name, job.model.flavor = "llama3_zeropp", "ours"
    job.job.dump_folder = chosen.run.dir
    job.training.steps, job.training.local_batch_size, job.training.seq_len = STEPS, BATCH, LENGTH
    job.training.max_norm, job.training.mixed_precision_param = 1e9, "float32"
    job.optimizer.lr, job.optimizer.weight_decay, job.optimizer.beta2 = 3e-4, 0.0, 0.999
    job.optimizer.implementation = "foreach"
    job.lr_scheduler.warmup_steps, job.lr_scheduler.decay_ratio = 0, 0.0
    train.Trainer(job).train()
    return mean(losses)


def beside_tensor_parallel() -> list[list[float]]:
    """A model that is cut over `tp` first: under FSDP2 alone, and with a recipe over the rest."""
    found = []
    for recipe in (None, {"order": "reversed"}, {"grads": {"bits": 8, "block_size": 16}}):
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("nodes", "gpus", "tp"))
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in "ab"]
        model = nn.Sequential(*layers)
        for layer in layers:
            parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if recipe is None:
            for module in (*layers, model):
                fully_shard(module, mesh=mesh["nodes"])
        else:
            sharded = zpp_lab.shard(model, recipe, mesh=mesh)
            assert len(sharded.wrapped.installed) == 2, "both layers were found"
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(3):
            torch.manual_seed(10 * step + mesh.get_local_rank("nodes"))
            losses.append((model(torch.randn(8, 16)) ** 2).mean())
            losses[-1].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
        found.append(mean([loss.detach() for loss in losses]))
    return found


class Idle(torch.optim.SGD):
    """It leaves the weights as they are."""

    def step(self, closure: Any = None) -> None:
        pass


def readme() -> list[list[float]]:
    """Losses of README's loop as it stands there, and with torch's FSDP2 in place of ours."""
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.splitlines()) == 6
    first, rest = code.split("\n", 1)
    found = []
    for begin in (first, "fully_shard(model)"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        torch.manual_seed(dist.get_rank())
        batches = [(torch.randn(8, 64), torch.randn(8, 64)) for _ in range(STEPS)]
        losses: list[Tensor] = []

        def loss_of(outputs: Tensor, targets: Tensor, losses: list[Tensor] = losses) -> Tensor:
            loss = nn.functional.mse_loss(outputs, targets)
            losses.append(loss.detach())
            return loss

        names = {"model": model, "batches": batches, "loss_of": loss_of}
        tools = {"torch": torch, "zpp_lab": zpp_lab, "fully_shard": fully_shard}
        exec(f"{begin}\n{rest}", tools | names)
        found.append(mean(losses))
    return found


def not_finite(chosen: Config) -> list[bool]:
    """Whether memories move in a usual step; in one with a NaN that an optimizer ends; in one that
    the loop drops."""
    model = whole(chosen)
    sharded = zpp_lab.shard(model, chosen.recipe, mesh=nested())
    optimizer, moved = Idle(model.parameters(), lr=0.1), []
    for factor, steps in ((1.0, True), (float("nan"), True), (float("nan"), False)):
        before = {n: t.to_local().clone() for n, t in sharded.state_dict()["memory"].items()}
        (model(*next(batches(chosen))) * factor).backward()
        if steps:
            optimizer.step()
        optimizer.zero_grad()
        after = sharded.state_dict()["memory"]
        assert before.keys() == after.keys() != set()
        moved.append(any(not torch.equal(t, after[n].to_local()) for n, t in before.items()))
    return moved


def own_jobs(folder: str, chosen: dict[str, Config]) -> dict[str, Any]:
    """One start of ranks serves all tests of loops without a framework."""
    found: dict[str, Any] = {}
    for name in [n for n in RECIPES if n in chosen]:  # the same order on every rank
        found[name] = [trained(chosen[name]), plain(chosen[name])]
        if name in ("sdp4bit", "loco"):
            found[name].append(interrupted(chosen[name], Path(folder)))
    if "accumulated" not in chosen:
        return found
    found["accumulated"] = [trained(chosen["accumulated"]), accumulated(chosen["accumulated"])]
    found["tp"] = beside_tensor_parallel()
    found["readme"] = readme()
    found["not finite"] = not_finite(chosen["loco"])
    return found


def foreign_jobs(folder: str) -> dict[str, Any]:
    """Of frameworks, which take seconds to import."""
    place, found = Path(folder), {}
    more = ["model=hf", f"model.path={place / 'hf'}", "model.weights=pretrained"]
    chosen = config(place, "zeropp", *more)
    found["hf"] = {"train": trained(chosen), **hugging_face(chosen)}
    found["hf"]["unclipped"] = trained(config(place, "zeropp", *more, "train.clip=0"))
    chosen = config(place, "zeropp", "train.clip=0")
    found["torchtitan"] = [trained(chosen), torchtitan(chosen)]  # last: it changes torch
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("loops")
    corpus(folder)
    chosen = {name: config(folder, name) for name in RECIPES if name not in SLOW}
    micro = ("train.micro_steps=2", "recipe.grads.rounding=stochastic")
    chosen["accumulated"] = config(folder, "zeropp", *micro)
    found: dict[str, Any] = run_world(4, own_jobs, str(folder), chosen)
    return found


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("others")
    corpus(folder)
    chosen = {name: config(folder, name) for name in SLOW}
    found: dict[str, Any] = run_world(4, own_jobs, str(folder), chosen)
    return found


@pytest.fixture(scope="module")
def frameworks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("frameworks")
    corpus(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 256}
    made = transformers.LlamaConfig(**shape, **heads)
    transformers.LlamaForCausalLM(made).save_pretrained(folder / "hf")
    found: dict[str, Any] = run_world(4, foreign_jobs, str(folder))
    return found


def agree(ours: list[float], *others: list[float]) -> None:
    assert len(ours) == STEPS
    assert list(others) == [ours] * len(others)


@pytest.mark.parametrize("case", ["loco", "accumulated"])
def test_a_loop_of_ones_own_has_zpp_lab_trains_losses(case: str, answers: dict[str, Any]) -> None:
    """Also with state dicts of torch in the middle, and a model from the meta device."""
    agree(*answers[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_so_it_has_with_other_recipes(case: str, others: dict[str, Any]) -> None:
    agree(*others[case])


def test_the_readmes_loop_trains_with_quantized_collectives(answers: dict[str, Any]) -> None:
    quantized, fsdp2 = answers["readme"]
    assert len(quantized) == STEPS
    assert quantized != fsdp2
    assert quantized == pytest.approx(fsdp2, rel=0.05)


@pytest.mark.slow
def test_accelerate_and_the_trainer_have_them_too(frameworks: dict[str, Any]) -> None:
    ours = frameworks["hf"]
    assert ours["accelerate"] == ours["train"]
    assert ours["trainer"] == ours["unclipped"] != ours["train"]
    # torch takes the norm in fp32 and in another order, so weights may differ in their last bits
    assert ours["clipped"] == pytest.approx(ours["train"], rel=1e-6)


@pytest.mark.slow
def test_torchtitan_has_them(frameworks: dict[str, Any]) -> None:
    """Its ranks are one dimension, cut into nodes as torchrun says."""
    ours, theirs = frameworks["torchtitan"]
    assert ours == theirs


def test_other_dimensions_are_left_alone(answers: dict[str, Any]) -> None:
    fsdp2, reordered, quantized = answers["tp"]
    assert reordered == fsdp2
    assert quantized != fsdp2
    assert quantized == pytest.approx(fsdp2, rel=0.05)


def test_memories_stay_in_steps_that_are_not_finite(answers: dict[str, Any]) -> None:
    assert answers["not finite"] == [True, False, False]
