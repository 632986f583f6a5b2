"""Quantized collectives in a user's training loop.

    zpp_lab.init()                              # or torch's own init_process_group
    sharded = zpp_lab.shard(model, "zeropp")    # or mesh=mesh, a DeviceMesh
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for batch in loader:
        loss = model(batch)
        loss.backward()
        sharded.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

`shard` wraps the units and the root in FSDP2 and gives each the recipe's gather and reduction. The
model stays an ordinary module: its parameters are DTensors, its forward takes the same arguments.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zpp_lab.codecs.numerics import clip_factor
from zpp_lab.collectives.peer.choose import Choice, connect
from zpp_lab.collectives.plan import Bytes, Plan, add_bytes, leg_bytes, no_bytes
from zpp_lab.collectives.recipe import DTYPES, Recipe
from zpp_lab.collectives.transport import Transport
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.config.codec import Dtype
from zpp_lab.config.compose import compose
from zpp_lab.config.load import load
from zpp_lab.config.schema import (
    ClusterConfig,
    Config,
    Plane,
    RecipeConfig,
)
from zpp_lab.engines.build import parts_plan
from zpp_lab.engines.fsdp.loops.graphed import Graphed
from zpp_lab.engines.fsdp.loops.hugging_face import mark
from zpp_lab.engines.fsdp.loops.loop import Loop
from zpp_lab.engines.fsdp.loops.optimizer import PlacedAdamW
from zpp_lab.engines.fsdp.loops.placed import Placing
from zpp_lab.engines.fsdp.mesh import Ranks
from zpp_lab.engines.fsdp.wrap import Wrapped, wrap
from zpp_lab.engines.optim.shards import local
from zpp_lab.engines.parts import LoopParts, cell_of
from zpp_lab.engines.units import Block, cut_units
from zpp_lab.files import amount, missing, percents, read_yaml
from zpp_lab.models import cut_model
from zpp_lab.models.cut import Parted
from zpp_lab.train.launch.place import enter, placed, prepare_graphs
from zpp_lab.train.memory.outlook import described_state, placed_state

T = TypeVar("T")
TOKENS = 4096  # of a tensor part, for which the summary takes the bytes of one


def recipe(name: str, *overrides: str) -> RecipeConfig:
    """Return a recipe of conf/recipe, with overrides such as "recipe.weights.bits=6"."""
    return compose([f"recipe={name}", *overrides]).recipe


def init(backend: str | None = None) -> torch.device:
    """Join the ranks that torchrun or srun started and return this rank's device."""
    if not (dist.is_initialized() or placed(os.environ)):
        raise ValueError(
            "zpp_lab.init joins ranks that are running already: start the script with torchrun "
            "or srun, such as `torchrun --standalone --nproc-per-node 4 SCRIPT`"
        )
    enter(os.environ)
    on_gpu = torch.cuda.is_available() and backend != "gloo"
    if on_gpu:
        prepare_graphs(os.environ)
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group(backend or ("cpu:gloo,cuda:nccl" if on_gpu else "gloo"))
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


@dataclass(frozen=True)
class Sharded:
    """A model whose collectives follow a recipe."""

    model: nn.Module
    planned: Plan
    wrapped: Wrapped
    watchdog: Watchdog
    loop: Loop
    whole: bool  # whether it is cut over all ranks
    transport: Transport
    parts: LoopParts | None = None  # of a model in tensor parts

    def __repr__(self) -> str:
        recipe, units = self.planned.recipe, len(self.planned.units)
        ranks = f"{recipe.cluster.nodes} × {recipe.cluster.gpus_per_node}"
        tp = f", tp={self.parts.tp}" if self.parts is not None else ""
        return f"Sharded(recipe={recipe.config.name!r}, ranks={ranks}{tp}, units={units})"

    @property
    def plan(self) -> Plan:
        """The plan of a step of one micro-batch. With tensor parts it is one of as many tokens as
        the last forward had, whose loss the model computes from labels."""
        parts = self.planned.parts
        if self.parts is None or parts is None:
            return self.planned
        return replace(self.planned, parts=replace(parts, tokens=self.parts.tokens))

    @property
    def reader(self) -> int:
        """Which of the micro-batches that `readers` read is this rank's: all tensor parts of a
        group read the same."""
        return self.transport.rank

    @property
    def readers(self) -> int:
        """How many micro-batches are read at once."""
        return self.planned.recipe.cluster.world

    @property
    def bytes(self) -> Bytes:
        """Bytes that this rank sent since the last `reset_bytes`, by wire."""
        total = no_bytes()
        for unit in self.wrapped.installed:
            add_bytes(total, unit.ledger.step)
        if self.parts is not None:
            add_bytes(total, self.parts.ledger.step)
        return total

    def graphed(self, function: Callable[[Any], T]) -> Graphed[T]:
        """Return a callable that replays `function` from one CUDA graph, with all transfers, once
        two calls were equal; with the same bits.

        function: forward and backward of all micro-steps of a step, of one batch: tensors of equal
            shapes in each call, in lists and dicts as you like. It returns tensors, such as the
            loss; the callable returns copies of them, detached.

        Call it before the model first runs, and optimizer.zero_grad(set_to_none=True) before each
        step. Clipping and the optimizer's step come after the call, as usual. A forward outside of
        it gives the graph's memory back, and the next step captures again. `drop()` comes before
        torch.distributed ends. Where steps cannot be captured, as the model waits for the GPU, they
        stay eager, and one line says why.

        ValueError on a CPU, in a mesh with other dimensions, where gradients are there before a
        call, where a rank's batch has another shape, and where the function changes weights.
        """
        return Graphed(function, self.loop, self.transport)

    def adamw(
        self,
        params: Iterable[Any] | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        clip: float | None = None,
    ) -> torch.optim.Optimizer:
        """Return AdamW for the model, before its first forward with gradients. With what `shard`
        was asked for by place, masters, optimizer_state or clip_by no other optimizer can update
        it; without any of these it is torch's.

        params: parameters or groups of them, as torch's optimizers take; None: all. A group may
            have lr, betas, eps and weight_decay of its own.
        clip: with clip_by="unit" each unit's largest gradient norm.

        Its `step` takes gradients away: `p.grad` is None afterwards. It waits for the device once
        and raises NonFiniteError, an ArithmeticError, before any weight changes, where the norm is
        not finite. With state in host memory a unit is updated just before its next forward. A
        look at a parameter or at the optimizer's state updates all units first; one through a
        tensor that was taken before, such as `p.to_local()`, is not seen: take it again.

        With masters="split" parameters are bf16: averages of them need fp32 copies, and weights
        that are loaded after `shard` are rounded. What bf16 leaves of masters is
        `state[p]["low"]`, the bytes of int16 numbers, in a last dimension.
        """
        placing, own = self.loop.placing, self.model.parameters() if params is None else params
        if (clip is not None) != (placing is not None and placing.residence.by_unit):
            raise ValueError(
                f"sharded.adamw(clip={clip}): clip_by='unit' of zpp_lab.shard needs it, and "
                "nothing else has it: clip by sharded.clip_grad_norm_"
            )
        how: Any = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        if placing is None:
            return torch.optim.AdamW(own, **how)
        if self.loop.placed is not None:
            raise ValueError("sharded.adamw was called before: a model has one optimizer")
        self.loop.placed = PlacedAdamW(own, self.loop, placing, clip or 0.0, **how)
        return self.loop.placed

    def step(self) -> None:
        """Tell the loop that an optimizer outside of torch has updated the weights."""
        self.loop.updated()

    @contextmanager
    def rollout(self) -> Iterator[nn.Module]:
        """Hold the model's weights whole, as `recipe.weights_rollout` sends them (by default
        uncompressed), without gradients: for `model.generate` and other forwards. Every rank enters
        it; the weights may not change meanwhile. Ranks may run unequally many forwards: those that
        call the `generate` of transformers unequally often pass it synced_gpus=False.

        ValueError with tensor parts."""
        if self.parts is not None:
            raise ValueError(
                f"tp={self.parts.tp} has no rollout: save the weights, and generate from a model "
                "with tp=1"
            )
        with self.loop.rollout():
            yield self.model

    def reset_bytes(self) -> None:
        for unit in self.wrapped.installed:
            unit.ledger.start_step()
        if self.parts is not None:
            self.parts.ledger.start_step()

    @torch.no_grad()
    def clip_grad_norm_(self, limit: float) -> Tensor:
        """Clip to `limit` and return the norm, fp64. Sums in rank order, the same in every run. In
        a mesh with other dimensions torch's own clips, over all of them. With the
        optimizer of `adamw` nothing is scaled here: its next step clips. ValueError for a limit
        that is negative or NaN."""
        if not limit >= 0:
            raise ValueError(f"sharded.clip_grad_norm_({limit}): use a limit from 0 on")
        if self.loop.placed is not None:
            return self.loop.placed.clip(limit)
        if not (self.whole or self.parts is not None):
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
            return norm.full_tensor() if isinstance(norm, DTensor) else norm
        norm = self.loop.norm()
        factor = clip_factor(norm, limit)
        for p in self.model.parameters():
            if p.grad is not None:
                local(p.grad).mul_(factor.to(local(p.grad).device))
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return the step, residuals and node-replicated weights, so that training resumes with the
        same bits. torch.distributed.checkpoint takes this object. ValueError where the model was
        converted after `shard`."""
        return self.loop.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load such a state, before or after the model gets its weights."""
        self.loop.load(state)


def shard(
    model: nn.Module,
    recipe: RecipeConfig | Mapping[str, Any] | Path | str = "zeropp",
    cluster: ClusterConfig | str | None = None,
    *,
    mesh: DeviceMesh | None = None,
    tp: int | None = None,
    units: Sequence[nn.Module] | None = None,
    param_dtype: Dtype | None = None,
    reduce_dtype: Dtype = "fp32",
    seed: int = Config.seed,
    steps: int | None = None,
    ordered: bool = False,
    gather: Literal["auto", "flat", "hierarchical"] = "auto",
    timeout_seconds: float = 300.0,
    transport: Choice = "auto",
    place: Literal["device", "host", "auto"] | Mapping[Plane, int] = "device",
    masters: Literal["fp32", "split"] = "fp32",
    optimizer_state: Literal["fp32", "bf16", "8bit"] = "fp32",
    clip_by: Literal["norm", "unit"] = "norm",
    gpu_gib: float | None = None,
    host_gib: float | None = None,
) -> Sharded:
    """Shard `model` in place and return it with its plan; every rank makes the same call.

    Rank 0 prints to stderr what a step sends, and how much of it is quantized. A model in host
    memory goes to this rank's GPU; one on the meta device needs `to_empty` and weights afterwards.
    Both are as with FSDP2.

    recipe: a recipe's name, its YAML file, its settings.
    mesh: over which ranks: its dimensions `nodes` and `gpus`, or one `dp`; others are left alone.
        Without a mesh all ranks. Along a further one, `tp`, the matrices of a model whose
        parameters are no DTensors yet are cut into tensor parts.
    tp: into how many parts, on neighbouring ranks, which read the same batch (`Sharded.reader`).
        None: as the mesh says, without one 1. For the built-in decoder and transformers' Llama,
        Mistral, Qwen2 and Qwen3. 1 leaves the mesh's `tp` alone.
    cluster: how one dimension lies in nodes, such as "2x4"; without it as torchrun says, else in
        one node. With tensor parts it counts all ranks.
    units: the modules whose parameters travel together, each used in forward as a whole;
        default: `model.units()`, else every module of a class that a list repeats.
    param_dtype: in which weights travel and compute; None: the model's own.
    seed: of noise; `zpp-lab train` takes its run's.
    steps: of the run, for a recipe whose phases begin after a share of them.
    transport: how bytes get to other ranks (engine.transport).
    place, masters, optimizer_state, clip_by: as engine.place (without weights) and train.* of these
        names, with the same bits; the optimizer is then `Sharded.adamw`.
    gpu_gib, host_gib: with place="auto" what training state may take of a GPU, without activations,
        and a host's memory, of all its ranks.

    ValueError when the recipe does not fit the cluster, units overlap or share a parameter, the
    model has no tensor parts, or settings do not go together.
    """
    config = _recipe(recipe)
    if isinstance(model, FSDPModule):
        raise ValueError(
            "the model is sharded already, by zpp_lab.shard or fully_shard: shard a new model, once"
        )
    train: dict[str, Any] = {"steps": sys.maxsize if steps is None else steps}
    train |= {"param_dtype": param_dtype or "fp32", "reduce_dtype": reduce_dtype}
    engine = {"gather": gather, "transport": transport, "timeout_seconds": timeout_seconds}
    _loaded(engine, train, seed=seed)
    cluster = _cluster(cluster) if isinstance(cluster, str) else cluster
    if cluster is not None and cluster.pp > 1:
        raise ValueError(
            f"cluster.pp={cluster.pp}: shard makes no stages: cut the model yourself, and pass a "
            "mesh of the ranks that have the same stage"
        )
    asked = (place, masters, optimizer_state, clip_by, gpu_gib, host_gib)
    places = asked != ("device", "fp32", "fp32", "norm", None, None)
    whole = Ranks.parts(model, mesh, cluster, tp)
    part = whole.place(dist.get_rank())["tp"] if whole is not None else 0
    if whole is not None:
        _check_parts(config, whole.tp, places)
        cut_model(model, whole.tp, part)
        found = cell_of(whole, _device(model, mesh))
        assert found is not None
        picked = found
    else:
        picked = Ranks.pick(mesh, cluster)
    cut = [{name: module} for name, module in _named(model, units)]
    param_dtype = param_dtype or _own_dtype(model)
    sent = DTYPES[param_dtype], DTYPES[reduce_dtype]
    phases = {first: Recipe(c, picked.cluster, *sent) for first, c in _phases(config, steps)}
    checked, own = phases[0], cut_units(model, cut, phases[0].shards)
    between = parts_plan(own, checked, whole.tp, 0, 1) if whole is not None else None
    plan = Plan.build(own, checked, gather=gather, rollouts=whole is None, parts=between)
    plans = {first: plan.under(each) if first else plan for first, each in phases.items()}
    if not picked.whole and any(each.memories for each in plans.values()):
        raise ValueError(
            f"recipe {config.name}: memory.kind=residual needs a mesh of all ranks without other "
            "dimensions: leave it out, or shard over all of them"
        )
    cells = {first: each.cell(part) for first, each in plans.items()}
    placing = None
    if places:
        if not picked.whole:
            raise ValueError(
                "place, masters, optimizer_state and clip_by need a mesh of all ranks without "
                "other dimensions: leave them out, or shard over all of them"
            )
        where = {"place": dict(place) if isinstance(place, Mapping) else place}
        train |= {"param_dtype": param_dtype, "masters": masters, "clip_by": clip_by}
        settings = _loaded(
            where | {"gpu_gib": gpu_gib, "host_gib": host_gib},
            train | {"optimizer_state": optimizer_state},
            seed=seed,
            recipe=config,
            cluster=picked.cluster,
        )
        settings = placed_state(settings, plan)
        if settings.engine.place != "device" or asked[1:4] != ("fp32", "fp32", "norm"):
            placing = Placing.of(settings, plan, model, dist.get_rank() % checked.shards)
    device = _device(model, mesh)
    watchdog = Watchdog(timeout_seconds)
    ranks = connect(picked.cluster, watchdog, transport, device, picked.ranks)
    if dist.get_rank() == 0:
        print(_summary(plan, param_dtype, reduce_dtype), file=sys.stderr, flush=True)
        if placing is not None:
            told = described_state(placing.config, plan)
            print(f"zpp_lab.shard: {told}", file=sys.stderr, flush=True)
    wrapped = wrap(
        model, cut, cells, ranks, device, seed=seed, ordered=ordered, cast_inputs=True, ranks=picked
    )
    parts = None
    if whole is not None:
        parts = LoopParts(cast(Parted, model), plans, whole, wrapped.clock, watchdog)
        parts.place(wrapped, device)
    mark(model, picked.cluster.world)
    loop = Loop(model, wrapped, device, ranks, parts)
    if placing is not None:
        loop.place(placing)
    return Sharded(model, plan, wrapped, watchdog, loop, picked.whole, ranks, parts)


def _recipe(given: RecipeConfig | Mapping[str, Any] | Path | str) -> RecipeConfig:
    """Resolve a recipe; ValueError for one that does not exist, or that names no setting."""
    if isinstance(given, RecipeConfig):
        return given
    if isinstance(given, Mapping):
        return load(RecipeConfig, {"name": "given", **given})
    if not isinstance(given, Path | str):
        raise ValueError(
            f"recipe={given!r}: use its name, YAML file or settings; 'zero3' is plain sharding"
        )
    path = Path(given)
    if isinstance(given, str) and path.suffix not in (".yaml", ".yml"):
        return recipe(given)
    if not path.is_file():
        raise ValueError(f"recipe {path}: {missing(path, 'file')}")
    return load(RecipeConfig, {"name": path.stem, **read_yaml(path)})


def _loaded(engine: Mapping[str, Any], train: Mapping[str, Any], **more: Any) -> Config:
    """Return settings as a run has them, checked; ValueError names `shard`'s arguments."""
    try:
        return load(Config, {**more, "engine": {"name": "fsdp", **engine}, "train": {**train}})
    except ValueError as error:
        raise ValueError(re.sub(r"\b(train|engine)\.", "", str(error))) from None


def _own_dtype(model: nn.Module) -> Dtype:
    """Return the dtype of the model's floating-point parameters; ValueError without a valid one."""
    found: dict[torch.dtype, str] = {}
    for name, p in model.named_parameters():
        if p.is_floating_point():
            found.setdefault(p.dtype, name)
    known: tuple[Dtype, ...] = get_args(Dtype)
    own = [name for name in known if found.keys() <= {DTYPES[name]}]
    if not own:
        raise ValueError(
            f"the model has {' and '.join(f'{d} ({n})' for d, n in found.items())}: set in which "
            f"dtype weights travel and compute, param_dtype={' or '.join(map(repr, known))}"
        )
    return own[0]


def _cluster(given: str) -> ClusterConfig:
    nodes, _, gpus = given.partition("x")
    if not (nodes.isdecimal() and gpus.isdecimal()):
        raise ValueError(f'cluster={given!r}: write nodes x GPUs of a node, such as "2x4"')
    return load(ClusterConfig, {"nodes": int(nodes), "gpus_per_node": int(gpus)})


def _phases(config: RecipeConfig, steps: int | None) -> list[tuple[int, RecipeConfig]]:
    shares = [phase.after for phase in config.phases if isinstance(phase.after, float)]
    if shares and steps is None:
        raise ValueError(
            f"recipe {config.name}: recipe.phases begin after a share of the run's steps "
            f"({shares[0]}): pass zpp_lab.shard(..., steps=N), or use steps instead"
        )
    return config.phased(sys.maxsize if steps is None else steps)


def _check_parts(config: RecipeConfig, tp: int, places: bool) -> None:
    """ValueError, naming the setting, for what tensor parts do not have, before a model is cut.
    places: whether state lies elsewhere, or otherwise, than usual."""
    config.check_acts(tp, 1)
    for ok, what in (
        (config.parts[2] != "none", f"recipe.{config.setting('optimizer')}: use node or world"),
        (not config.remembers, "memory.kind=residual: leave it out"),
        (not places, "place, masters, optimizer_state and clip_by: leave them out"),
    ):
        if not ok:
            raise ValueError(f"recipe {config.name}: tp={tp} is not built for {what}")


def _summary(plan: Plan, param_dtype: Dtype, reduce_dtype: Dtype) -> str:
    """Describe what a step of the first phase sends, how the model is sharded, and its dtypes."""
    config, cluster = plan.recipe.config, plan.recipe.cluster
    names = ("weights", "gradients", "optimizer")
    over: dict[str, list[str]] = {}
    for name, place in zip(names, config.parts, strict=True):
        over.setdefault("not sharded" if place == "none" else f"over the {place}", []).append(name)
    sharded = ", ".join(f"{' and '.join(which)} {where}" for where, which in over.items())
    quantized = plan.quantized_share()
    wires = [
        f"{wire} {amount(sum(sent))} ({percents([quantized[wire]])} quantized)"
        for wire, sent in plan.step_bytes().items()
        if wire in quantized
    ]
    total = amount(sum(map(sum, plan.step_bytes().values())))
    phase = ", first phase" if config.phases else ""
    ranks, between = f"{cluster.nodes} × {cluster.gpus_per_node}", ""
    if plan.parts is not None:
        some = replace(plan.parts, tokens=TOKENS * plan.parts.tp)
        each = sum(map(sum, leg_bytes(some.legs()).values())) - sum(
            map(sum, leg_bytes(plan.parts.legs()).values())
        )
        ranks += f" × tp={some.tp}"
        between = f"; tensor parts exchange {amount(each / some.tokens / cluster.world)} a token"
    return (
        f"zpp_lab.shard: recipe {config.name}{phase}, {ranks} "
        f"ranks; {sharded}; computes in {param_dtype}, reduces in {reduce_dtype}; all ranks send "
        f"{total} a step of one micro-batch{': ' if wires else ''}{', '.join(wires)}{between}"
    )


def _named(model: nn.Module, units: Sequence[nn.Module] | None) -> list[Block]:
    names = {id(m): n for n, m in model.named_modules()}
    if units is None:
        own = getattr(model, "units", None)
        if callable(own):
            return list(own())
        units = _repeated(model)
    unknown = [m for m in units if id(m) not in names]
    if unknown:
        one = unknown[0]
        raise ValueError(
            f"units: {type(one).__name__ if isinstance(one, nn.Module) else repr(one)} is not a "
            "module of the model; use its modules, such as list(model.layers)"
        )
    return [(names[id(m)], m) for m in units]


def _repeated(module: nn.Module) -> list[nn.Module]:
    """Return every module of a class that a list has more than once, outer lists first."""
    found: list[nn.Module] = []
    kinds = Counter(type(m) for m in module.children() if any(True for _ in m.parameters()))
    for child in module.children():
        listed = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        found += [child] if listed and kinds[type(child)] > 1 else _repeated(child)
    return found


def _device(model: nn.Module, mesh: DeviceMesh | None) -> torch.device:
    """Return where the model will be: on this rank's GPU, where FSDP2 puts what is elsewhere."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        return device
    if mesh is None:
        on_gpu = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())
    else:
        on_gpu = mesh.device_type == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
