"""The peer: DeepSpeed's ZeRO-3 and ZeRO++ behind the same interface as our own engines.

Model, initial weights, batches, schedule, AdamW, clipping and evaluation are ours; sharding,
collectives and precision are DeepSpeed's. What it sends cannot be seen from outside, so `bytes` is
empty: unknown.

Two corrections make losses comparable: DeepSpeed makes its fp32 weights from rounded ones, and gets
the exact ones here; and where it would silently depart from the recipe, the engine refuses (unless
engine.allow_fallback=true).

Its flat shards are read and written as whole tensors by name. ZeRO-3 cuts each parameter's
flattened elements into as many chunks as there are ranks, the last one padded. Its fp32 weights and
AdamW's state lie in one flat buffer for each optimizer group, with one count of updates; the public
accessors of `deepspeed.utils` find a parameter in it.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zpp_lab.codecs.numerics import fold_sum
from zpp_lab.collectives.plan import Plan
from zpp_lab.collectives.transport import all_gather
from zpp_lab.config.schema import Config
from zpp_lab.engines.base import Batch, Batches, Engine, NonFiniteError, StepResult
from zpp_lab.engines.deepspeed.settings import (
    check_gradients,
    deepspeed_settings,
    quantizes_grads,
    quantizes_weights,
)
from zpp_lab.engines.optim.build import STATE, Parameters, adamw, set_rate, zero_state
from zpp_lab.engines.optim.states import MOMENTS
from zpp_lab.models.loss import token_scores
from zpp_lab.models.objective import objective

SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def own_part(whole: Tensor, rank: int, world: int) -> Tensor:
    """Copy this rank's chunk of a whole tensor, flat and zero-padded, in its dtype."""
    chunk = -(-whole.numel() // world)
    own = whole.detach().flatten()[rank * chunk : (rank + 1) * chunk]
    part = torch.zeros(chunk, dtype=whole.dtype, device=whole.device)
    part[: own.numel()] = own
    return part


@torch.no_grad()
def states(optimizer: Any, parameters: Parameters, rank: int, world: int) -> dict[str, Any]:
    """Return weights, optimizer and scaler whole on the CPU of rank 0. Every rank calls it."""
    found: dict[str, Any] = {"weights": {}, "optimizer": {key: {} for key in STATE}}
    groups = optimizer.optimizer.state.values()  # flat ones, empty before the first update
    counts = [float(state["step"]) for state in groups if "step" in state]
    for name, p in parameters.items():
        for key in (None, *MOMENTS) if counts else (None,):
            whole = _whole(optimizer.get_local_fp32_param(p, key), p, world)
            if rank == 0:
                into = found["weights"] if key is None else found["optimizer"][key]
                into[name] = whole.cpu()
        if counts:
            found["optimizer"]["step"][name] = torch.tensor(counts[0])
    scaler = {k: getattr(optimizer.loss_scaler, k, None) for k in SCALER}
    scaler = {k: v for k, v in scaler.items() if v is not None}
    found["scaler"] = {k: torch.tensor(v, dtype=torch.float64) for k, v in scaler.items()}
    return found if rank == 0 else {}


def _whole(part: Tensor, p: Any, world: int) -> Tensor:
    every = torch.empty(world * part.numel(), dtype=part.dtype, device=part.device)
    all_gather(every, part.detach().clone())
    return every[: p.ds_numel].view(p.ds_shape)


@torch.no_grad()
def load_states(
    optimizer: Any, parameters: Parameters, rank: int, world: int, state: Mapping[str, Any]
) -> None:
    """Load what `states` returned, from whole tensors on any device."""
    differing = sorted(set(parameters) ^ set(state["weights"]))
    if differing:
        raise ValueError(f"the checkpoint is of another model; {differing[0]} differs")
    _make_state(optimizer, parameters, state["optimizer"]["step"])
    for name, p in parameters.items():
        optimizer.set_local_hp_param(own_part(state["weights"][name], rank, world), p)
        for key in MOMENTS if state["optimizer"]["step"] else ():
            part = own_part(state["optimizer"][key][name], rank, world)
            optimizer.set_local_hp_param(part, p, key)
    for key, value in state.get("scaler", {}).items():
        now = getattr(optimizer.loss_scaler, key, None)
        if now is not None:
            setattr(optimizer.loss_scaler, key, type(now)(float(value)))
    _to_training_dtype(optimizer)


def _make_state(optimizer: Any, parameters: Parameters, steps: Mapping[str, Tensor]) -> None:
    """Allocate AdamW's state, with the count of updates that all parameters share."""
    optimizer.optimizer.state.clear()
    counts = {float(step) for step in steps.values()}
    if not counts:
        return
    if len(counts) > 1 or set(steps) != set(parameters):
        raise ValueError(
            "the checkpoint's parameters have been updated a different number of times, but "
            "DeepSpeed keeps one count: resume with engine=fsdp or engine=virtual"
        )
    for flat in optimizer.fp32_partitioned_groups_flat:
        made = zero_state(optimizer.optimizer, flat.detach())
        made["step"].fill_(counts.copy().pop())
        optimizer.optimizer.state[flat] = made


def _to_training_dtype(optimizer: Any) -> None:
    """Refresh the shards that are gathered from the fp32 weights, as after an update."""
    optimizer._partition_all_parameters()
    for group in range(len(optimizer.fp32_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


_LOWEST_SCALE = "loss scale already at minimum"


def load_deepspeed(device: torch.device) -> Any:
    """Import the package; ValueError says how to get it. Its kernels must not be built on a CPU."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    if archs := os.environ.get("TORCH_CUDA_ARCH_LIST"):  # it cannot read 9.0a, as torch can
        os.environ["TORCH_CUDA_ARCH_LIST"] = re.sub(r"(?<=\d)[af]\b", "", archs)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        raise ValueError(
            f"engine=deepspeed needs {error.name}: DS_BUILD_OPS=0 pip install "
            "--no-build-isolation 'zpp_lab[deepspeed]'"
        ) from None
    deepspeed.utils.logger.setLevel("WARNING")
    if device.type == "cpu":  # else it compiles collectives of its own for shared memory
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class DeepSpeedEngine(Engine):
    """Trains `model` under DeepSpeed; every rank of the default process group has one. `model` is
    whole on this rank's device, in fp32. `plan` is the recipe as zpp_lab would move it, for its
    parameters' names and sizes; DeepSpeed moves its bytes in its own way. ValueError when the
    recipe is not one that DeepSpeed runs."""

    def __init__(self, model: nn.Module, plan: Plan, config: Config, device: torch.device) -> None:
        vectors = [p.numel() for p in model.parameters() if p.ndim < 2]
        settings = deepspeed_settings(config, max(vectors, default=0))
        deepspeed = load_deepspeed(device)
        self.plan, self.config, self.device = plan, config, device
        self.plans = {0: plan}
        self.built: dict[str, float] = {}
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.parameters = dict(model.named_parameters())
        self._check_quantizers()
        exact = {n: own_part(p, self.rank, self.world) for n, p in self.parameters.items()}
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=adamw(self.parameters, config.optimization),
            config=settings,
            dist_init_required=False,
        )
        self.optimizer = self.engine.optimizer
        for name, p in self.parameters.items():
            deepspeed.utils.safe_set_local_fp32_param(p, exact[name])

    def _check_quantizers(self) -> None:
        """ValueError where DeepSpeed would not quantize what the recipe asks for."""
        config, on_gpu = self.config, self.device.type == "cuda"
        frozen = [n for n, p in self.parameters.items() if not p.requires_grad]
        if frozen:
            raise ValueError(f"engine=deepspeed trains all parameters, but {frozen[0]} is frozen")
        if not on_gpu and (quantizes_weights(config) or quantizes_grads(config)):
            raise ValueError("DeepSpeed quantizes only on GPUs: use engine.device=cuda")
        visible = torch.cuda.device_count() if on_gpu else config.cluster.gpus_per_node
        shapes = {n: tuple(p.shape) for n, p in self.parameters.items()}
        found = check_gradients(shapes, config, visible)
        if found and not config.engine.allow_fallback:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise ValueError(
                f"DeepSpeed would not follow the recipe's reduction: {found[0]}{more}; set "
                "engine.allow_fallback=true to accept that"
            )

    # ------------------------------------------------------------------ one step

    def step(
        self,
        step: int,
        lr: float,
        batches: Batches,
        telemetry: bool,
        ahead: Batches | None = None,
    ) -> StepResult:
        """Take one optimizer step. With fp16 a step whose scaled gradient overflowed changes no
        weight and has an infinite norm; DeepSpeed halves its loss scale."""
        set_rate(self.optimizer, lr)
        micros = self.plan.micro_steps
        losses = torch.zeros(micros, dtype=torch.float64, device=self.device)
        for micro in range(micros):
            batch = self._on_device(batches(self.rank, micro))
            loss = objective(self.engine, batch, self.config.rl)
            losses[micro] = loss.detach()
            self.engine.backward(loss)
            self._update(step)
        norm = float(self.engine.get_global_grad_norm())
        if self.optimizer.overflow and self.config.train.param_dtype != "fp16":
            raise NonFiniteError(step, "the gradient is not finite; DeepSpeed does not say where")
        every = torch.empty(self.world, micros, dtype=losses.dtype, device=self.device)
        all_gather(every.view(-1), losses)
        return StepResult(float(fold_sum(every.t().flatten())) / every.numel(), norm, {}, None)

    def _update(self, step: int) -> None:
        try:
            self.engine.step()
        except Exception as error:  # DeepSpeed raises this very class
            if _LOWEST_SCALE not in str(error):
                raise
            raise NonFiniteError(step, "the gradient overflows at the lowest loss scale") from None

    def _on_device(self, batch: Batch) -> Batch:
        if self.device.type != "cuda":
            return batch
        x, y = (t.pin_memory().to(self.device, non_blocking=True) for t in batch)
        return x, y

    # ------------------------------------------------------------------ the rest

    @torch.no_grad()
    def token_scores(self, step: int, batches: Iterable[Batch], wire: bool) -> Tensor:
        """Score batches, which ranks take in turn; all of them join every gather."""
        todo = list(batches)
        rounds, sizes = -(-len(todo) // self.world), [t.numel() for _, t in todo]
        own = torch.zeros(rounds, 2, max(sizes), dtype=torch.float32, device=self.device)
        self.engine.eval()
        self._forget_secondary()
        self._quantize_weights(wire)
        for i in range(rounds):
            batch = todo[min(i * self.world + self.rank, len(todo) - 1)]
            scores = token_scores(self.engine, *self._on_device(batch))
            own[i, :, : scores.shape[1]] = scores
        self._quantize_weights(True)
        self._forget_secondary()
        self.engine.train()
        every = torch.empty(self.world, *own.shape, dtype=own.dtype, device=self.device)
        all_gather(every.view(-1), own.view(-1))
        in_order = every.transpose(0, 1).flatten(0, 1).cpu()
        return torch.cat([row[:, :size] for row, size in zip(in_order, sizes, strict=False)], 1)

    def _forget_secondary(self) -> None:
        """Drop weights that were gathered in another mode, which must not serve the next pass."""
        self.optimizer._partition_all_parameters()
        self.optimizer.invalidate_secondary_tensor()

    def _quantize_weights(self, on: bool) -> None:
        """Let gathers carry the recipe's bits (on), or the weights themselves."""
        asked = self.engine.zero_quantized_weights()
        coordinator = self.optimizer.parameter_offload.get_param_coordinator()
        coordinator.zero_quantized_weights = on and asked

    def state_dict(self) -> dict[str, Any]:
        """Return whole fp32 tensors by name on rank 0, in the form of every engine; {} elsewhere.
        All ranks must call it. `scaler` is the loss scale's state, empty without fp16."""
        return states(self.optimizer, self.parameters, self.rank, self.world)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of any engine and cluster. ValueError when it is another model's, or its
        parameters have been updated a different number of times, which DeepSpeed cannot hold."""
        load_states(self.optimizer, self.parameters, self.rank, self.world, state)
        self._forget_secondary()
