"""The training steps that `zpp-lab bench step` times, one class an engine of its own.

A maker takes a config and this rank's device and returns a `Timed`. Weights are drawn on the
device: what they are costs no time in a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from zpp_lab.codecs.numerics import clip_factor
from zpp_lab.collectives.peer.choose import connect
from zpp_lab.collectives.plan import Bytes
from zpp_lab.collectives.recipe import DTYPES
from zpp_lab.collectives.transport import Transport
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.config.schema import Config
from zpp_lab.engines.base import Batch, Batches, Engine
from zpp_lab.engines.build import build_engine, build_plan, model_of
from zpp_lab.engines.fsdp.engine import FsdpEngine
from zpp_lab.engines.fsdp.graph import WARM_UP
from zpp_lab.engines.optim.build import adamw
from zpp_lab.engines.units import named_units
from zpp_lab.models import build_model
from zpp_lab.models.start import materialize

VOCABULARY = 32000  # where the model takes the tokenizer's
LR = 1e-4
TRANSPORTS: dict[tuple[object, ...], Transport] = {}  # communicators are made once a process


class Timed(Protocol):
    """waiting: seconds in which the host, done with the last step, waited for the device; None
    where an engine does not tell. Near 0 the host was what bounded that step. replays: how many
    steps so far came from a CUDA graph."""

    waiting: float | None

    @property
    def replays(self) -> int: ...

    def step(self, number: int, batches: Batches, ahead: Batches | None = None) -> Bytes | None:
        """Do one optimizer step; return the bytes of all ranks by wire, None if unknown. `ahead`:
        batches of the next one, which follows at once: this step's loss may be read in it."""
        ...


Maker = Callable[[Config, torch.device], Timed]


def vocabulary(config: Config) -> int:
    return config.model.vocab_size or VOCABULARY


def meta_model(config: Config, **options: bool) -> Any:
    """Return the model on the meta device, compiled if the config says so, with these options."""
    model = build_model(config.model, vocabulary(config), device="meta")
    if config.engine.compile:
        from zpp_lab.engines.compile import compile_units

        compile_units(model.units(), config.engine.deterministic, **options)
    return model


@torch.no_grad()
def draw(model: nn.Module, device: torch.device | str) -> None:
    """Draw weights of about the usual size, this rank's shards alone."""
    materialize(model, device)
    for p in model.parameters():
        own = p.to_local() if isinstance(p, DTensor) else p
        own.copy_(torch.empty_like(own, device=device).normal_(0, 0.02))


class QuickStart(FsdpEngine):
    """Our engine with drawn weights."""

    def _initialize(self) -> None:
        draw(self.model, "cpu" if self.residence.offloads else self.device)


class Through:
    """Any engine of the package."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.waiting: float | None = None

    @property
    def replays(self) -> int:
        return self.engine.graph.replays if isinstance(self.engine, FsdpEngine) else 0

    def step(self, number: int, batches: Batches, ahead: Batches | None = None) -> Bytes | None:
        result = self.engine.step(number, LR, batches, False, ahead)
        sent, self.waiting = result.bytes, result.seconds.get("waiting")
        # an untouched FSDP2 has no ledger: its figures would be the plan's, unless it sends nothing
        own = self.engine
        seen = not isinstance(own, FsdpEngine) or own.wrapped.installed or own.cluster.world == 1
        return sent if seen and any(sum(t) for t in sent.values()) else None


def quick(config: Config, device: torch.device) -> Timed:
    """Build engine=fsdp; arms of one process share their communicators."""
    if config.cluster.split:  # each cell has groups of its own
        own = model_of(config, vocabulary(config), "meta", dist.get_rank())
        return Through(QuickStart(own, build_plan(own, config), config, device))
    cluster, choice = config.cluster, config.engine.transport
    key = cluster.nodes, cluster.gpus_per_node, choice
    if key not in TRANSPORTS:
        watchdog = Watchdog(config.engine.timeout_seconds)
        TRANSPORTS[key] = connect(cluster, watchdog, choice, device)
    model = meta_model(config)
    return Through(QuickStart(model, build_plan(model, config), config, device, TRANSPORTS[key]))


def built(config: Config, device: torch.device) -> Timed:
    """Build any other engine, as `zpp-lab train` would build it."""
    return Through(build_engine(config, vocabulary(config), device))


class Replayed:
    """Runs forward and backward of a plain loop: `run` on all batches of a step → their losses.
    graph: from a CUDA graph, after some eager steps. Batches are then copied to where it reads
    them, and gradients put back to where it leaves them."""

    def __init__(
        self, run: Callable[[list[Batch]], list[Tensor]], model: nn.Module, graph: bool
    ) -> None:
        self.run, self.model, self.wanted = run, model, graph
        self.calls = self.replays = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batches: list[Batch]) -> list[Tensor]:
        self.calls += 1
        if not self.wanted or self.calls <= WARM_UP:
            return self.run(batches)
        if self.graph is None:
            self.inputs = [tuple(t.clone() for t in batch) for batch in batches]
            graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.current_stream()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self.losses = self.run(self.inputs)
            self.graph, self.grads = graph, [p.grad for p in self.model.parameters()]
        for own, new in zip(self.inputs, batches, strict=True):
            for mine, theirs in zip(own, new, strict=True):
                mine.copy_(theirs)
        self.graph.replay()
        self.replays += 1
        for p, grad in zip(self.model.parameters(), self.grads, strict=True):
            p.grad = grad
        return self.losses


class PlainFsdp2:
    """FSDP2 as its users write it, with its own defaults and nothing of ours around it.

    reshard: as `fully_shard` takes it; a number of ranks gathers backward's weights among so many.
    groups: gradients get a communicator of their own. ValueError when this torch has none such.
    copies: a two-dimensional mesh, sharded inside a node and replicated across nodes (HSDP).
    """

    waiting: float | None = None

    def __init__(
        self,
        config: Config,
        device: torch.device,
        reshard: bool | int = True,
        groups: bool = False,
        copies: bool = False,
    ) -> None:
        if groups and not hasattr(FSDPModule, "set_separate_reduce_scatter_group"):
            raise ValueError("this torch has no separate reduce-scatter groups: leave the arm out")
        cluster = config.cluster
        shape = (cluster.nodes, cluster.gpus_per_node) if copies else (cluster.world,)
        names = ("replicate", "shard") if copies else ("shard",)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        self._start(config, device, meta_model(config), mesh, reshard)
        if groups:
            self.model.set_separate_reduce_scatter_group(True)

    def _start(
        self,
        config: Config,
        device: torch.device,
        model: Any,
        mesh: DeviceMesh,
        reshard: bool | int = True,
    ) -> None:
        """Shard the model over the mesh, draw its weights, make the optimizer."""
        self.train, self.device, self.model = config.train, device, model
        self.reader = dist.get_rank()
        policy = MixedPrecisionPolicy(
            DTYPES[self.train.param_dtype], DTYPES[self.train.reduce_dtype]
        )
        for blocks in named_units(self.model, config.engine.blocks_per_unit):
            fully_shard(
                list(blocks.values()), mesh=mesh, mp_policy=policy, reshard_after_forward=reshard
            )
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        draw(self.model, device)
        self.optimizer = adamw(dict(self.model.named_parameters()), config.optimization)
        self.passes = Replayed(self._passes, self.model, _graph(config))
        self.read = Read()

    def _passes(self, batches: list[Batch]) -> list[Tensor]:
        return _passes(self.model, batches)

    @property
    def replays(self) -> int:
        return self.passes.replays

    def step(self, number: int, batches: Batches, ahead: Batches | None = None) -> Bytes | None:
        losses = self.passes(_on(self.device, batches, self.reader, self.train.micro_steps))
        if self.train.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.train.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.waiting = self.read(losses, ahead is None)
        return None


class PlainTp(PlainFsdp2):
    """torch's tensor and sequence parallelism with a vocabulary in parts, as torchtitan applies it,
    under FSDP2 over the data-parallel ranks. overlapped: the compiler makes matrix products of
    chunks, which symmetric memory brings meanwhile (async TP). ValueError where that cannot be.
    """

    def __init__(self, config: Config, device: torch.device, overlapped: bool = False) -> None:
        cluster, options = config.cluster, {"_micro_pipeline_tp": True} if overlapped else {}
        shape = cluster.dp.world, cluster.tp
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
        if overlapped:
            if device.type != "cuda" or not config.engine.compile:
                raise ValueError("async TP needs GPUs and engine.compile=true: leave the arm out")
            # here, so that a torch without it costs this arm alone
            from torch.distributed._symmetric_memory import enable_symm_mem_for_group

            enable_symm_mem_for_group(mesh["tp"].get_group().group_name)
        model = meta_model(config, **options)
        _cut(model, mesh["tp"])
        self._start(config, device, model, mesh["dp"])
        self.reader = mesh["dp"].get_local_rank()

    def _passes(self, batches: list[Batch]) -> list[Tensor]:
        with loss_parallel():  # backward, too
            return [loss.to_local() for loss in _passes(self._loss, batches)]  # type: ignore[attr-defined]

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(inputs).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten())


def _cut(model: Any, mesh: DeviceMesh) -> None:
    """Give the decoder torch's tensor and sequence parallelism."""
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    rows, columns = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
    block: dict[str, Any] = {"attention": whole, "mlp": whole}
    block |= dict.fromkeys(("attention_norm", "mlp_norm"), SequenceParallel())
    block |= {f"attention.{name}": rows for name in ("wq", "wk", "wv")}
    block |= {"mlp.w_gate": rows, "mlp.w_up": rows, "attention.wo": columns, "mlp.w_down": columns}
    for _, unit in model.units():
        parallelize_module(unit, mesh, block)
    embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    root: dict[str, Any] = {"embed": embed, "norm": SequenceParallel()}
    parallelize_module(model, mesh, root if model.head is None else {**root, "head": rows})
    # compiled code would wait for a collective's result outside of the graph: no gradient came back
    model.embed.register_forward_hook(lambda _, __, out: out.clone())
    # the head's weight is used without a call of its module, whose style would gather its input
    model.norm.register_forward_hook(lambda _, __, out: out.redistribute(placements=[Replicate()]))


def _graph(config: Config) -> bool:
    """Whether a loop that is not this package's shall replay a CUDA graph: if it is told to."""
    return config.engine.graph is True


def _on(device: torch.device, batches: Batches, rank: int, micros: int) -> list[Batch]:
    own = [batches(rank, micro) for micro in range(micros)]
    if device.type == "cuda":
        own = [tuple(t.pin_memory() for t in batch) for batch in own]
    return [tuple(t.to(device, non_blocking=True) for t in batch) for batch in own]


def _passes(model: Callable[..., Tensor], batches: list[Batch]) -> list[Tensor]:
    """Forward and backward of each; gradients are those of the mean loss."""
    losses = []
    for inputs, targets in batches:
        loss = model(inputs, targets)
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    return losses


class Read:
    """Waits for the loss of the step before, so that a device always has a step to do."""

    def __init__(self) -> None:
        self.before: torch.cuda.Event | None = None

    def __call__(self, losses: Sequence[Tensor], last: bool) -> float:
        """Take a step's losses; returns the seconds of waiting. last: for these, too."""
        began, mean = time.perf_counter(), torch.stack(list(losses)).mean()
        if self.before is not None:
            self.before.synchronize()
        self.before = None
        if last or not mean.is_cuda:
            mean.item()
        else:
            self.before = torch.cuda.Event()
            self.before.record()
        return time.perf_counter() - began


def plain(config: Config, device: torch.device) -> Timed:
    return PlainFsdp2(config, device)


def plain_node(config: Config, device: torch.device) -> Timed:
    local, nodes = config.cluster.gpus_per_node, config.cluster.nodes
    reshard: bool | int = local if local > 1 and nodes > 1 else local > 1
    return PlainFsdp2(config, device, reshard)  # FSDP2 has words for one rank and for all


def plain_hsdp(config: Config, device: torch.device) -> Timed:
    return PlainFsdp2(config, device, copies=True)


def plain_groups(config: Config, device: torch.device) -> Timed:
    return PlainFsdp2(config, device, groups=True)


def plain_tp(config: Config, device: torch.device) -> Timed:
    return PlainTp(config, device)


def plain_async_tp(config: Config, device: torch.device) -> Timed:
    return PlainTp(config, device, overlapped=True)


class ComputeOnly:
    """What a rank computes when nothing has to travel: the floor that every arm shares.

    Whole weights in param_dtype on the device, forward and backward of the rank's own batch, and
    AdamW in fp32 on 1/W of every parameter, as in ZeRO. No gather, reduction, encode or decode.
    """

    waiting: float | None = None

    def __init__(self, config: Config, device: torch.device) -> None:
        self.train, self.device, self.world = config.train, device, config.cluster.world
        self.model = meta_model(config).to(DTYPES[config.train.param_dtype])
        draw(self.model, device)
        self.weights = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.master = {n: nn.Parameter(self._own(p).float()) for n, p in self.weights.items()}
        self.optimizer = adamw(self.master, config.optimization)
        self.passes = Replayed(partial(_passes, self.model), self.model, _graph(config))
        self.read = Read()

    @property
    def replays(self) -> int:
        return self.passes.replays

    def _own(self, whole: Tensor) -> Tensor:
        """This rank's part; which part costs no time."""
        return whole.detach().view(-1)[: -(-whole.numel() // self.world)]

    def step(self, number: int, batches: Batches, ahead: Batches | None = None) -> Bytes | None:
        losses = self.passes(_on(self.device, batches, 0, self.train.micro_steps))
        self._update()
        self.waiting = self.read(losses, ahead is None)
        return None

    @torch.no_grad()
    def _update(self) -> None:
        used = [n for n, p in self.weights.items() if p.grad is not None]
        grads = [self._own(self.weights[n].grad).float() for n in used]  # type: ignore[arg-type]
        if self.train.clip:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
            torch._foreach_mul_(grads, clip_factor(norm, self.train.clip))
        for name, grad in zip(used, grads, strict=True):
            self.master[name].grad = grad
        self.optimizer.step()
        own = [self._own(self.weights[n]) for n in used]
        torch._foreach_copy_(own, [self.master[n].detach() for n in used])
        for p in self.weights.values():
            p.grad = None


def compute(config: Config, device: torch.device) -> Timed:
    return ComputeOnly(config, device)


MAKERS: dict[str, Maker] = {
    maker.__name__: maker
    for maker in (
        quick,
        built,
        plain,
        plain_node,
        plain_hsdp,
        plain_groups,
        plain_tp,
        plain_async_tp,
        compute,
    )
}
