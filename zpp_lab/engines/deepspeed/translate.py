"""A DeepSpeed config file as settings of ours, with what DeepSpeed silently does there.

Facts about DeepSpeed are of 0.19.8: read in its sources, or measured (experiments/deepspeed). Every
key of the file ends in one of three places: a setting, a line that says why it needs none, or the
list of what was not carried over.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zpp_lab.config.flat import flatten
from zpp_lab.config.load import written
from zpp_lab.files import parse_json

AUTO = "auto"  # what transformers' Trainer fills in: no setting follows from it
_ZERO = "zero_optimization."
_TUNING = (  # of DeepSpeed's own buckets, streams and logs: no number of a run depends on them
    *("overlap_comm", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size"),
    *("allgather_partitions", "allgather_bucket_size", "sub_group_size", "round_robin_gradients"),
    *("prefetch_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters"),
    *("stage3_max_reuse_distance", "stage3_model_persistence_threshold", "memory_efficient_linear"),
    *("max_live_parameters", "max_reuse_distance", "ignore_unused_parameters"),
    *("offload_param.pin_memory", "offload_optimizer.pin_memory", "offload_param.buffer_count"),
    *("offload_param.buffer_size", "offload_param.max_in_cpu", "offload_optimizer.buffer_count"),
    *("offload_optimizer.pipeline_read", "offload_optimizer.pipeline_write"),
    *("offload_optimizer.fast_init", "stage3_module_granularity_threshold"),
)
_LOGS = ("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level")
_FILLED = {  # what transformers' Trainer fills in for AUTO → the setting here
    "train_batch_size": "train.batch_size",
    "train_micro_batch_size_per_gpu": "train.batch_size",
    "gradient_accumulation_steps": "train.micro_steps",
    "gradient_clipping": "train.clip",
    "bf16.enabled": "train.param_dtype",
    "fp16.enabled": "train.param_dtype",
    "optimizer.params.lr": "train.lr",
    "optimizer.params.betas": "train.beta1 and train.beta2",
    "optimizer.params.eps": "train.eps",
    "optimizer.params.weight_decay": "train.weight_decay",
    "scheduler.params.total_num_steps": "train.steps",
    "scheduler.params.warmup_num_steps": "train.warmup_steps",
    "scheduler.params.warmup_max_lr": "train.lr",
}
_WIRES = ("zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size")
_SAVING = ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save")
_DTYPES = {"fp16": "fp16", "fp32": "fp32", "bf16": "bf16", "bfp16": "bf16"}
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


@dataclass
class Translation:
    """`settings` for the command line, `silent`: what DeepSpeed silently does, `notes` and `left`:
    keys that need no setting, or were not carried over, each with its reason."""

    settings: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def text(self) -> str:
        parts = {
            "DeepSpeed 0.19.8 would silently:": self.silent,
            "Carried over in another form, or not needed here:": self.notes,
            "Not carried over:": self.left,
        }
        lists = ["\n  - ".join([head, *lines]) for head, lines in parts.items() if lines]
        return "\n\n".join(["zpp-lab train " + shlex.join(self.settings), *lists])


def translate(path: Path, nodes: int | None, gpus_per_node: int | None) -> Translation:
    """Translate the config file at `path`, on a cluster as far as it is given or follows from the
    file. ValueError for an invalid file, or one that contradicts itself."""
    given = parse_json(path, "use a DeepSpeed config file (JSON)", once=True)
    if not isinstance(given, dict):
        raise ValueError(f"{path}: expected a mapping, as in DeepSpeed's config")
    return _Reading(path, flatten(given), nodes, gpus_per_node).translation()


class _Reading:
    def __init__(
        self, path: Path, given: dict[str, Any], nodes: int | None, gpus_per_node: int | None
    ) -> None:
        self.path, self.given, self.nodes, self.gpus = path, dict(given), nodes, gpus_per_node
        self.made, self.asked = Translation(), set[str]()
        self.auto: set[str] = set()  # keys that were dealt with

    def translation(self) -> Translation:
        self.bf16, self.fp16 = (self._flag(f"{d}.enabled") for d in ("bf16", "fp16"))
        self.bf16 = self._flag("bfloat16.enabled") or self.bf16
        self.dtype_open = bool(self.auto) and not (self.bf16 or self.fp16)
        self._set("engine=fsdp")
        self._wires()
        self._cluster()
        self._precision()
        self._training()
        self._schedule()
        self._offload()
        self._tracking()
        self._rest()
        return self.made

    # ------------------------------------------------------------------ reading

    def _take(self, key: str, usual: Any = None) -> Any:
        """Pop a key's value; `usual` where the file leaves it open."""
        self.asked.add(key)
        value = self.given.pop(key, usual)
        if value == AUTO:
            self.auto.add(key)
            ours = f"set {_FILLED[key]}" if key in _FILLED else "no setting follows from it"
            self.made.left.append(f"{key}=auto: transformers' Trainer fills it in; {ours}")
            return usual
        return value

    def _number(self, key: str, usual: Any = None, least: float = 0) -> Any:
        value = self._take(key, usual)
        fits = isinstance(value, int | float) and not isinstance(value, bool) and value >= least
        if value is not None and not fits:
            raise ValueError(f"{self.path}: {key}={value!r}: use a number from {least:g} on")
        return value

    def _flag(self, key: str, usual: bool = False) -> bool:
        value = self._take(key, usual)
        if not isinstance(value, bool):
            raise ValueError(f"{self.path}: {key}={value!r}: use true or false")
        return value

    def _set(self, *settings: str, of: str = "") -> None:
        """Add `settings`, unless the key `of`, of which they follow, is left open."""
        if of not in self.auto:
            self.made.settings += settings

    # ------------------------------------------------------------------ parts

    def _wires(self) -> None:
        """Translate recipe and sharding."""
        silent = self.made.silent
        for key in ("stage", *_WIRES):
            if self.given.get(_ZERO + key) == AUTO:
                raise ValueError(f"{self.path}: {_ZERO}{key}=auto: write its value")
        stage = self._number(f"{_ZERO}stage", 0)
        weights = self._flag(f"{_ZERO}zero_quantized_weights")
        grads = self._flag(f"{_ZERO}zero_quantized_gradients")
        self.hpz = int(self._number(f"{_ZERO}zero_hpz_partition_size", 1))
        if self._flag(f"{_ZERO}zero_quantized_nontrainable_weights"):
            self.made.left.append(
                "zero_quantized_nontrainable_weights: lora=q4 keeps the frozen base encoded"
            )
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"{self.path}: zero_optimization.stage={stage}: use 0 to 3")
        switches = {"weights": weights, "gradients": grads}
        asked = [f"zero_quantized_{name}" for name, on in switches.items() if on]
        asked += ["zero_hpz_partition_size"] if self.hpz > 1 else []
        if stage < 3 and asked:
            silent.append(f"leave {', '.join(asked)} alone, which only stage 3 reads, not {stage}")
            weights, grads, self.hpz = False, False, 1
        loco = {k: self._number(f"{_ZERO}zeropp_loco_param.{k}") for k in ("err_beta", "reset_T")}
        if self.given.pop(f"{_ZERO}zeropp_loco_param", None) == {}:
            loco["err_beta"] = None
        remembers = any(value is not None for value in loco.values())
        if remembers and not grads:
            self.made.left.append("zeropp_loco_param: it goes with zero_quantized_gradients")
        if remembers:
            self.made.notes.append("zeropp_loco_param: DeepSpeed 0.19.8 has removed it, and stops")
        self._recipe(weights, grads, loco if remembers and grads else None)
        self._mics(stage)
        if stage < 3:
            self._set(f"recipe.stage={max(stage, 1)}")
        if stage == 0:
            self.made.notes.append("stage 0: the nearest here is ZeRO-1, with the same weights")
        if weights:
            silent.append(
                "quantize embeddings and head as well, and no parameter that it keeps whole "
                "(stage3_param_persistence_threshold, 100,000 elements by default); its blocks "
                "follow from tensor and world"
            )
        kept = self._take(f"{_ZERO}stage3_param_persistence_threshold")
        kept = self._take(f"{_ZERO}param_persistence_threshold", kept)
        if kept is not None:
            self.made.notes.append(
                f"stage3_param_persistence_threshold={kept}: every matrix is gathered here; "
                "recipe.exempt.below_numel leaves small ones without a codec"
            )
        if grads:
            self._of_gradients()

    def _recipe(self, weights: bool, grads: bool, loco: dict[str, Any] | None) -> None:
        if loco is not None:
            self._set("recipe=loco", *(["recipe.weights.bits=8"] if weights else []))
            named = {"err_beta": "average", "reset_T": "reset_every"}
            given = {named[key]: value for key, value in loco.items() if value is not None}
            self._set(*(f"recipe.grads.memory.{key}={value}" for key, value in given.items()))
        elif grads:
            self._set("recipe=zeropp", *([] if weights else ["recipe.weights.bits=null"]))
        else:
            self._set("recipe=w8" if weights else "recipe=zero3")
        if (self.hpz > 1) != (grads and loco is None):  # as recipe=zeropp has it
            self._set(f"recipe.secondary={'true' if self.hpz > 1 else 'false'}")

    def _mics(self, stage: int) -> None:
        """Translate MiCS: groups of ranks with a copy of the model each."""
        size = self._number(f"{_ZERO}mics_shard_size", -1, -1)
        if self._flag(f"{_ZERO}mics_hierarchical_params_gather"):
            self.made.notes.append(
                "mics_hierarchical_params_gather: with recipe.shard=node all gathers stay in a node"
            )
        if size < 1:
            return
        self.made.notes.append("mics_shard_size: DeepSpeed 0.19.8 has removed MiCS, and stops")
        if self.gpus is None and self.hpz == 1:
            self.gpus = size
        if stage < 3 or self.hpz > 1 or self.gpus != size:
            self.made.left.append(
                f"mics_shard_size={size}: recipe.shard=node shards inside each node, over all its "
                "GPUs, with stage 3 and without zero_hpz_partition_size"
            )
        else:
            self._set("recipe.shard=node")

    def _of_gradients(self) -> None:
        """List what its quantized reduction does to gradients."""
        silent = self.made.silent
        if self.dtype_open:
            silent.append("read bf16 or fp32 gradients as fp16 numbers (experiments/deepspeed)")
        elif self.bf16:
            silent.append(
                "read bf16 gradients as fp16 numbers: 202 times the norm and a cosine of 0.50 to "
                "the exact mean, at 10.8M parameters on four H200s (experiments/deepspeed)"
            )
        elif not self.fp16:
            silent.append(
                "read fp32 gradients as fp16 numbers: 98 % of the elements came out not finite "
                "(experiments/deepspeed)"
            )
        silent += [
            "leave a node's sum undivided, so that gradients are as many times too large as a node "
            "has GPUs (2.0 times with two)",
            "reduce without bits where a process sees all GPUs of the cluster, as on one host",
            "lose rows of a matrix whose rows the ranks do not divide",
        ]

    def _cluster(self) -> None:
        batch = self._number("train_batch_size", None, 1)
        own = self._number("train_micro_batch_size_per_gpu", None, 1)
        micro = self._number("gradient_accumulation_steps", None, 1)
        world = self.nodes * self.gpus if self.nodes and self.gpus else None
        if self.gpus is None and self.hpz > 1:
            self.gpus = self.hpz
        if self.hpz > 1 and self.gpus != self.hpz:
            self.made.left.append(
                f"zero_hpz_partition_size={self.hpz} on nodes of {self.gpus} GPUs: "
                "recipe.secondary=true keeps a copy in each node, of all its GPUs"
            )
        if world is None and batch and own and micro:
            world = batch // (own * micro)
        if own is None and batch and world:
            own = batch // (world * (micro or 1))
        micro = batch // (own * world) if micro is None and batch and own and world else micro or 1
        if None not in (batch, own, world) and batch != own * micro * world:
            raise ValueError(
                f"{self.path}: train_batch_size={batch} is not {own} × {micro} × {world} ranks "
                "(train_micro_batch_size_per_gpu, gradient_accumulation_steps, GPUs): correct it, "
                "or give the cluster with --nodes and --gpus-per-node"
            )
        if self.nodes is None and world and self.gpus and world % self.gpus == 0:
            self.nodes = world // self.gpus
        if self.nodes and self.gpus:
            self._set(f"cluster.nodes={self.nodes}", f"cluster.gpus_per_node={self.gpus}")
        else:
            ranks = f" ({world} ranks)" if world else ""
            self.made.notes.append(
                f"the cluster is not in the file{ranks}: give --nodes and --gpus-per-node"
            )
        if own is None:
            self.made.notes.append("no batch size per GPU in the file: set train.batch_size")
        else:
            self._set(f"train.batch_size={own}")
        self._set(*([f"train.micro_steps={micro}"] if micro > 1 else []))

    def _precision(self) -> None:
        if self.bf16 and self.fp16:
            raise ValueError(f"{self.path}: bf16 and fp16 are both enabled: choose one")
        own = "bf16" if self.bf16 or self.fp16 else "fp32"
        if not self.dtype_open:
            self._set(f"train.param_dtype={own}")
        given = self._take("communication_data_type")
        sent = _DTYPES.get(str(given), "") if given is not None else own
        if sent not in ("bf16", "fp32"):
            self.made.left.append(f"communication_data_type={given}: replaced by bf16")
            sent = "bf16"
        if given is not None or not self.dtype_open:
            self._set(f"train.reduce_dtype={sent}")
        if self.fp16:
            self.made.left.append(
                "fp16: replaced by bf16, which needs no loss scale; engine=deepspeed supports "
                "fp16 (train.param_dtype=fp16)"
            )
        for key in [key for key in self.given if key.startswith(("fp16.", "bf16."))]:
            self.made.left.append(f"{key}={self.given.pop(key)!r}: no equivalent setting")

    def _training(self) -> None:
        clip = self._number("gradient_clipping", 0.0)
        self._set(f"train.clip={clip:g}", of="gradient_clipping")
        kind = self._take("optimizer.type")
        name = str(kind or "").lower()
        if kind is None:
            self.made.notes.append("no optimizer in the file: train.lr keeps its default")
            return
        if name not in ("adam", "adamw"):
            self.made.left.append(f"optimizer.type={kind}: replaced by AdamW")
            return
        if not self._flag("optimizer.params.adam_w_mode", True) and name == "adam":
            self.made.left.append("optimizer.params.adam_w_mode=false: weight decay is AdamW's")
        elif name == "adam":
            self.made.silent.append("take Adam for AdamW (adam_w_mode is true by default)")
        torch_adam = self._flag("optimizer.params.torch_adam")
        self._take("optimizer.params.fused")
        betas = self._take("optimizer.params.betas", [0.9, 0.999])
        if not (isinstance(betas, list) and len(betas) == 2):
            raise ValueError(f"{self.path}: optimizer.params.betas={betas!r}: use two numbers")
        lr = self._number("optimizer.params.lr", 1e-3)
        eps = self._number("optimizer.params.eps", 1e-8)
        decay = self._number("optimizer.params.weight_decay", 0.01 if torch_adam else 0.0)
        if decay:
            self.made.notes.append("weight_decay: of matrices only; DeepSpeed's of all parameters")
        if "optimizer.params.lr" not in self.auto:
            self.lr = lr
        given = "optimizer.params."
        self._set(f"train.lr={lr:g}", of=f"{given}lr")
        self._set(f"train.beta1={betas[0]:g}", f"train.beta2={betas[1]:g}", of=f"{given}betas")
        self._set(f"train.eps={eps:g}", of=f"{given}eps")
        self._set(f"train.weight_decay={decay:g}", of=f"{given}weight_decay")

    def _schedule(self) -> None:
        kind, key = self._take("scheduler.type"), "scheduler.params."
        if kind is None:
            self._set("train.schedule=constant", "train.warmup_steps=0")
            return
        if kind not in _SCHEDULES:
            self._set("train.schedule=constant", "train.warmup_steps=0")
            self.made.left.append(f"scheduler.type={kind}: replaced by a constant learning rate")
            return
        total = self._number(f"{key}total_num_steps", None, 1)
        warm = self._number(f"{key}warmup_num_steps", 1000)
        if warm < 1:
            self.made.notes.append(
                f"warmup_num_steps={warm}: DeepSpeed takes 2, and refuses it from 0.19.6 on"
            )
        self._set(*([f"train.steps={total}"] if total else []))
        self._set(f"train.schedule={_SCHEDULES[kind]}")
        self._set(f"train.warmup_steps={max(2, warm)}", of=f"{key}warmup_num_steps")
        if kind != "WarmupCosineLR":
            most = self._number(f"{key}warmup_max_lr", None if kind == "WarmupLR" else 1e-3)
            if most is not None and f"{key}warmup_max_lr" not in self.auto:
                self.made.settings = [s for s in self.made.settings if s[:9] != "train.lr="]
                self._set(f"train.lr={most:g}")
                if getattr(self, "lr", most) != most:
                    self.made.silent.append(
                        f"train at warmup_max_lr={most:g}, not at the optimizer's lr={self.lr:g}"
                    )
        if kind != "WarmupLR":
            least = self._number(f"{key}cos_min_ratio", 1e-4) if "Cosine" in kind else 0
            self._set(f"train.min_lr_ratio={least:g}", of=f"{key}cos_min_ratio")
        for start in ("warmup_min_lr", "warmup_min_ratio"):
            if value := self._number(f"{key}{start}", 0):
                self.made.left.append(f"{key}{start}={value:g}: the rate rises from 0")
        if self._take(f"{key}warmup_type", "log") != "linear":
            self.made.silent.append("warm up along a logarithm (warmup_type, unless it is linear)")
            self.made.left.append("a logarithmic warm-up: replaced by a linear one")

    def _offload(self) -> None:
        on = False
        for part in ("offload_param", "offload_optimizer"):
            device = self._take(f"{_ZERO}{part}.device", "none")
            if device == "nvme":
                self.made.left.append(f"{part}.device=nvme: only host memory is supported")
            on = on or device == "cpu"
        for old in ("cpu_offload", "cpu_offload_param"):
            on = self._flag(f"{_ZERO}{old}") or on
        if on:
            self._set("engine.offload=true")
            self.made.notes.append(
                "offload: engine.offload keeps masters and optimizer in host memory together; "
                "train.optimizer_place=host moves the moments alone"
            )

    def _tracking(self) -> None:
        if self._flag("tensorboard.enabled"):
            self._set("tracking=tensorboard")
        if self._flag("wandb.enabled"):
            self._set("tracking.wandb=auto")
            for theirs, ours in (("team", "entity"), ("group", "group"), ("project", "project")):
                if (value := self._take(f"wandb.{theirs}")) is not None:
                    self._set(f"tracking.{ours}={written(value)}")

    def _rest(self) -> None:
        """Place every remaining key. ValueError for a value where a section belongs: its settings
        would silently be those of a file without it."""
        for key, value in self.given.items():
            short = key.removeprefix(_ZERO)
            inner = sorted(k for k in self.asked if k.startswith(f"{key}."))
            if inner and value not in (None, {}):
                named = inner[0].removeprefix(f"{key}.").split(".")[0]
                raise ValueError(
                    f"{self.path}: {key}={value!r}: use a mapping with its settings, such as "
                    f'{{"{named}": …}}'
                )
            if key != short and short in _TUNING:
                self.made.notes.append(f"{short}: buckets of DeepSpeed; FSDP2 has none")
            elif key in _LOGS:
                self.made.notes.append(f"{key}: every step is in metrics.jsonl")
            elif short in _SAVING:
                self.made.notes.append(f"{short}: zpp-lab export writes whole weights")
            elif key.startswith("activation_checkpointing."):
                self.made.left.append(f"{key}={value!r}: set model.checkpoint_activations=true")
            else:
                self.made.left.append(f"{key}={value!r}: no equivalent setting")
