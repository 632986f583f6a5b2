"""Every setting of zpp_lab as a frozen dataclass, validated when it is built.

The larger parts have files of their own (`model.py`, `recipe.py` …), and are found here as well.
Nothing of them imports torch: a study of a thousand runs reads configs only.
`load` turns the nested mapping that Hydra composed into a `Config`; an unknown
key, a wrong type or an impossible value is a `ValueError` that names the place
and the valid choices.
"""

from __future__ import annotations

import re
from dataclasses import field, replace
from typing import Annotated, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from zpp_lab.config.cluster import ClusterConfig
from zpp_lab.config.codec import STRICT as _STRICT
from zpp_lab.config.codec import AboveZero, Count, NotNegative, Positive
from zpp_lab.config.codec import need as _need
from zpp_lab.config.data import DataConfig
from zpp_lab.config.model import ModelConfig
from zpp_lab.config.recipe import PhaseConfig as PhaseConfig
from zpp_lab.config.recipe import RecipeConfig
from zpp_lab.config.recipe import RuleConfig as RuleConfig
from zpp_lab.config.recipe import ShardingConfig as ShardingConfig
from zpp_lab.config.rl import RlConfig

# Held-out tokens below which no verdict is given, and below which there is a warning. All seeds
# share the held-out text, and few documents say little of how much others differ. By the documents
# of w4 and zeropp (`tiny`, 150 steps, gaps 0.063 and 0.022) that is 0.9 to 1.0 / sqrt(tokens) nats:
# 0.03 at 1,000 tokens, more than the smaller gap; 0.01 at 10,000, two margins.
LEAST_HELDOUT, FEW_HELDOUT = 1_000, 10_000
STUDY_HELDOUT = 2**21  # of a study on GPUs that does not say: 0.0007 nats, by the same

# of pipelines; stages of a rank
SCHEDULES = {"1f1b": 1, "1f1b_overlap": 1, "gpipe": 1, "interleaved": 2}
Plane = Literal["masters", "moments", "gradients", "weights"]  # what engine.place places
Gib = Annotated[float, Field(gt=0, le=1e6)]
TrainDtype = Literal["fp32", "bf16", "fp16"]  # fp16: engine=deepspeed, which scales the loss


@dataclass(frozen=True, config=_STRICT)
class EngineConfig:
    name: Literal["virtual", "fsdp", "deepspeed"] = "virtual"
    device: str = "auto"  # auto, cpu, cuda or cuda:0
    gather: Literal["auto", "flat", "hierarchical"] = "auto"
    threads: Annotated[int, Field(ge=0, le=4096)] = 0  # CPU threads; 0 leaves torch's choice
    deterministic: bool = True
    # on a GPU, forward and backward are replayed from a CUDA graph: of each rank's pass in turn
    # (virtual), or of all passes of a step with their transfers (fsdp: where that can be); with
    # task=rl also the built-in decoder's passes of generation
    graph: bool | Literal["auto"] = "auto"
    lanes: Count = 0  # virtual, on a GPU: ranks side by side; 0 by the size of a pass
    ordered: bool = False  # fsdp: sums in rank order for zero3 too, so that it equals `virtual`
    prefetch: Count = 1  # fsdp: units gathered ahead of the one that computes
    # consecutive blocks whose weights and gradients travel together: fewer and larger transfers,
    # and more weights gathered at a time. No bit depends on it, except where FSDP2 reduces by
    # itself (zero3 without `ordered`): NCCL may add in another order.
    blocks_per_unit: Positive = 1
    offload: bool = False  # fsdp: master weights and optimizer live in CPU memory
    # fsdp: in which memory training state lies, with the same bits. host: moments, gradients and
    # the low planes of masters of all units; or {plane: units}, the last blocks, then the root.
    # They pass through the GPU, which updates a unit before its next forward. weights: the high
    # planes, which come to the GPU before each gather. auto: as few of
    # them as a GPU of gpu_gib needs, where a host has host_gib for all of its ranks; by default
    # those of this machine. A run keeps its first choice.
    place: Literal["device", "host", "auto"] | dict[Plane, Count] = "device"
    gpu_gib: Gib | None = None
    host_gib: Gib | None = None
    compile: bool = (
        False  # torch.compile of each block's forward; other bits, the same in all engines
    )
    # of cluster.pp stages; 1f1b_overlap: computes while it sends, for slow links, and keeps more
    # micro-steps; interleaved: two stages a rank
    schedule: str = "1f1b"
    allow_fallback: bool = False  # go on where FSDP2 or DeepSpeed goes past the recipe
    emulate_nodes: bool = True  # deepspeed: on one host, a rank sees the GPUs of its node only
    # on one host with fewer GPUs than ranks: its nodes share them (train/launch/gpus.py)
    share_gpus: Literal["mps", "time-slices"] | None = None
    # fsdp: a transfer that takes longer, or a rank that is silent so long, ends the run on all
    # ranks, within 15 seconds more. To outlast an outage both must be more than twice as long.
    timeout_seconds: AboveZero = 300.0
    silence_seconds: Annotated[float, Field(ge=5)] = 40.0
    # fsdp: groups are NCCL's or gloo's; peer: ranks of a host read each other's memory
    transport: Literal["auto", "groups", "peer"] = "auto"

    def __post_init__(self) -> None:
        _need(
            bool(re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device)),
            f"engine.device={self.device!r}: use auto, cpu, cuda or cuda:N",
        )
        _need(
            self.place != "auto" or self.share_gpus is None,
            f"engine.place=auto plans whole GPUs, not engine.share_gpus={self.share_gpus}: set "
            "engine.place to a placement, or give each rank a GPU",
        )
        _need(
            self.schedule in SCHEDULES,
            f"engine.schedule={self.schedule}: "
            + (
                "zero-bubble schedules compute gradients of weights apart from those of inputs, "
                "and FSDP2 reduces after whole backwards alone: "
                if re.search(r"zero.?bubble|zbv|dual.?pipe", self.schedule.lower())
                else ""
            )
            + f"use {', '.join(SCHEDULES)}",
        )

    @property
    def chunks(self) -> int:
        """Stages of a rank, where there are several ranks in a pipeline."""
        return SCHEDULES[self.schedule]

    @property
    def ranked(self) -> bool:
        """Whether the engine has a process for every rank."""
        return self.name != "virtual"


@dataclass(frozen=True, config=_STRICT)
class OpsConfig:
    backend: Literal["auto", "cuda", "reference"] = "auto"


def heldout_notes(tokens: int, eval_tokens: int) -> tuple[str, ...]:
    """Return warnings about losses over so few held-out tokens, of at most `eval_tokens`."""
    if tokens >= FEW_HELDOUT:
        return ()
    least = tokens < LEAST_HELDOUT
    effect = "get no verdict" if least else "do not predict the loss on other text"
    return (
        f"losses over {tokens:,} held-out tokens, fewer than "
        f"{LEAST_HELDOUT if least else FEW_HELDOUT:,}, {effect}: {more_heldout(eval_tokens)}",
    )


def more_heldout(eval_tokens: int) -> str:
    """Say what to set for more held-out tokens than `eval_tokens` gave."""
    if eval_tokens < FEW_HELDOUT:
        return f"set train.eval_tokens={TrainConfig.eval_tokens} or more"
    return "hold out more text (data.heldout_every, more documents) and raise train.eval_tokens"


@dataclass(frozen=True, config=_STRICT)
class TrainConfig:
    steps: Positive = 180
    batch_size: Positive = 4  # sequences of one rank in one micro-step
    micro_steps: Positive = 1  # gradient accumulation
    accumulate: Literal["every", "last"] = "every"  # reduce each micro-step, or the last only
    param_dtype: TrainDtype = "fp32"
    reduce_dtype: TrainDtype = "fp32"
    lr: NotNegative = 3e-3
    # lr times this for projections into the residual stream; 1 / sqrt(2 layers): see GUIDE
    residual_lr: AboveZero = 1.0
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    warmup_steps: Count = 20
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"  # after the warm-up
    decay_steps: Count = 0  # wsd: over so many steps at the end; 0: decay_share of all
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    # in place of beta2: tokens after which a squared gradient weighs half in the second moment
    beta2_tokens: AboveZero | None = None
    eps: NotNegative = 1e-8
    weight_decay: NotNegative = 0.1
    clip: NotNegative = 1.0  # 0 does not clip
    # unit: each unit's gradient by its own norm, within backward: another rule, which stores no
    # gradient. A norm that is not finite then stops the run after other units have changed.
    clip_by: Literal["norm", "unit"] = "norm"
    # split: each in two planes of 16 bits, bf16 and the rest, and gradients in bf16; not quite the
    # same bits (codecs/planes.py)
    masters: Literal["fp32", "split"] = "fp32"
    optimizer_state: Literal["fp32", "bf16", "8bit"] = "fp32"  # AdamW's moments
    optimizer_place: Literal["device", "host"] = "device"  # host: moments pass through the GPU
    eval_every: Positive = 50
    eval_tokens: Positive = 32768
    readout_steps: Count = 0  # a second readout: mean training loss of the last so many; 0: none
    checkpoint_every: Count = 100  # 0 saves at the end only
    keep_checkpoints: Count = 2  # 0: none once the run has finished
    checkpoint_weights_only: bool = False  # weights alone, in bf16: to export, not to resume
    checkpoint_host_gib: NotNegative = 8.0  # fsdp: a copy up to so large is written meanwhile
    checkpoint_staging_mib: Positive = 64  # a rank's buffers on the way to the disk
    checkpoint_full_disk: Literal["stop", "skip"] = "stop"  # skip: train on without a checkpoint
    diverge_above: NotNegative = 3.0  # nats over the best smoothed loss so far; 0 is off
    profile: str | None = None  # steps to trace, such as 10:13: the 10th to the 13th
    diverge_steps: Positive = 50  # so many steps in a row above it end the run as diverged

    def __post_init__(self) -> None:
        _need(
            self.masters == "fp32" or self.param_dtype == "bf16",
            f"train.masters=split gathers bf16, not train.param_dtype={self.param_dtype}: set "
            "train.param_dtype=bf16, or train.masters=fp32",
        )
        own = self.optimizer_state != "fp32" or self.masters == "split"
        _need(
            self.optimizer_place == "device" or own,
            "train.optimizer_place=host needs train.optimizer_state=bf16 or 8bit, or "
            "train.masters=split: torch's AdamW keeps fp32 moments on the weights' device",
        )
        _need(
            self.readout_steps <= self.steps,
            f"train.readout_steps={self.readout_steps} is more than train.steps={self.steps}: use "
            "fewer",
        )
        self._check_decay()
        _need(
            self.profile is None or 1 <= self.profiled.start < self.profiled.stop <= self.steps + 1,
            f"train.profile={self.profile}: use FIRST:LAST, such as 10:13, two steps of 1 to "
            f"train.steps={self.steps} (in a YAML file in quotes)",
        )
        _need(
            self.beta2_tokens is None or self.beta2 == TrainConfig.beta2,
            "train.beta2 and train.beta2_tokens both set beta2: leave one of them out",
        )

    def _check_decay(self) -> None:
        steps, share, least = self.decay_steps, self.decay_share, self.steps - self.warmup_steps
        other = steps > 0 or share != TrainConfig.decay_share
        _need(
            self.schedule == "wsd" or not other,
            "train.decay_steps and train.decay_share are read only by train.schedule=wsd, not "
            f"{self.schedule}: leave them out, or set train.schedule=wsd",
        )
        _need(
            not steps or share == TrainConfig.decay_share,
            "train.decay_steps and train.decay_share both set the decay's length: leave one out",
        )
        _need(
            self.schedule != "wsd" or self.decay <= least,
            f"train.schedule=wsd decays over {self.decay} steps, but train.steps={self.steps} less "
            f"train.warmup_steps={self.warmup_steps} leave {max(0, least)}: set a shorter "
            "train.decay_steps (or decay_share) or train.warmup_steps, or more train.steps",
        )

    @property
    def profiled(self) -> range:
        """The steps that train.profile names, counted from 1."""
        if self.profile is None:
            return range(0)
        first, _, last = self.profile.partition(":")
        return range(int(first), int(last) + 1) if first.isdigit() and last.isdigit() else range(0)

    @property
    def decay(self) -> int:
        """Steps of the decay of train.schedule=wsd."""
        return self.decay_steps or max(1, round(self.decay_share * self.steps))

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings before the first step. No errors: a trial of a few steps keeps the warm-up of
        the run that it tries, and its short evaluation."""
        return (*self._warm_up, *heldout_notes(self.eval_tokens, self.eval_tokens))

    @property
    def _warm_up(self) -> tuple[str, ...]:
        if self.warmup_steps <= self.steps:
            return ()
        return (
            f"train.warmup_steps={self.warmup_steps} is more than train.steps={self.steps}: the "
            f"learning rate ends at {self.lr * self.steps / self.warmup_steps:.3g} and never "
            f"reaches train.lr={self.lr:g}; unless this is a trial, set train.warmup_steps="
            f"{self.steps} or less",
        )


@dataclass(frozen=True, config=_STRICT)
class TrackingConfig:
    wandb: Literal["auto", "online", "offline", "off"] = "auto"  # auto: offline without a key
    tensorboard: bool = False  # event files in the run's folder; tracking=tensorboard
    project: str | None = None  # None: WANDB_PROJECT, else zpp_lab
    entity: str | None = None  # None: WANDB_ENTITY, else the account's own
    group: str | None = None  # None: the study's name, the sweep's folder, else WANDB_RUN_GROUP
    tags: list[str] = field(default_factory=list)  # []: WANDB_TAGS
    telemetry_every: Count = 50  # 0 measures no codec errors
    timeout_seconds: AboveZero = 60.0  # for wandb's server to answer, at the start and at the end
    wait_seconds: NotNegative = 0.0  # at a run's end for wandb; Slurm may kill what stays behind
    console: bool = True  # wandb's Logs: what rank 0 says (console.log)
    system: bool = True  # wandb's system panels: rank 0 and its machine, while it trains
    git: bool = True  # name the run's commit in wandb


@dataclass(frozen=True, config=_STRICT)
class RunConfig:
    dir: str | None = None  # None: runs/<recipe>-seed<seed>
    name: str | None = None
    study: str | None = None
    arm: str | None = None
    resume: bool = True
    until: float | None = None  # unix time before which to stop with a checkpoint; see --for
    piece_steps: Count = 0  # steps of this start, after which to stop too; 0: any number
    start_from: str | None = None  # another run's checkpoint, of any engine and cluster
    memory: Literal["keep", "drop"] = "keep"  # drop: begin without what its encoders remember

    def __post_init__(self) -> None:
        _need(self.dir != "", "run.dir='': name a folder, or null (runs/RECIPE/seedN)")
        _need(self.until is None or self.until > 0, f"run.until={self.until}: use a unix time")


@dataclass(frozen=True, config=_STRICT)
class Config:
    seed: int = 1
    # rl: learn from rewards of sampled completions; reward: a reward model, from pairs
    task: Literal["text", "rl", "reward"] = "text"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    ops: OpsConfig = field(default_factory=OpsConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    rl: RlConfig = field(default_factory=RlConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        _need(0 <= self.seed < 2**63, f"seed={self.seed}: use a number from 0 to 2^63 - 1")
        _need(
            not (self.model.lora.on and self.engine.offload),
            "model.lora keeps its frozen base on the GPU: set engine.offload=false",
        )
        _need(
            self.train.masters == "fp32" or not self.cluster.split,
            f"train.masters=split is not built for {self.cluster.split}, whose gradients are added "
            "up in fp32: use train.masters=fp32",
        )
        self._check_place()
        self._check_clip()
        half = "fp16" in (self.train.param_dtype, self.train.reduce_dtype)
        _need(
            not half or self.engine.name == "deepspeed",
            "train.param_dtype=fp16 and train.reduce_dtype=fp16 need engine=deepspeed; "
            f"engine={self.engine.name} has bf16 and fp32",
        )
        _need(
            self.train.masters == "fp32" or self.engine.name != "deepspeed",
            "train.masters=split: engine=deepspeed has fp32 masters alone; use engine=fsdp",
        )
        _need(
            not (self.model.start_optimizer and self.run.start_from),
            "model.start_optimizer and run.start_from both set the initial state: set one of them",
        )
        _need(
            self.run.memory == "keep" or self.model.start_optimizer or bool(self.run.start_from),
            "run.memory=drop needs another run's state: leave it out, or set run.start_from or "
            "model.start_optimizer",
        )
        self.recipe.check_acts(self.cluster.tp, self.cluster.pp)
        _need(
            self.cluster.pp > 1 or self.engine.schedule == EngineConfig.schedule,
            f"engine.schedule={self.engine.schedule} orders the passes of several stages: set "
            "cluster.pp, or leave it out",
        )
        if self.task == "rl":
            self._check_rl()
        self._check_pairs()
        _ = self.optimization  # beta2_tokens may be out of range
        _ = self.phases

    def _check_pairs(self) -> None:
        on = self.task == "reward"
        for name, value in (
            ("data.pairs", self.data.pairs),
            ("model.scalar_head", self.model.scalar_head),
        ):
            _need(
                value == on,
                f"{name}={str(value).lower()} with task={self.task}: a reward model has a scalar "
                f"head and learns from pairs; set {name}={str(on).lower()}"
                + ("" if on else ", or task=reward"),
            )
        if on:
            _need(
                self.train.batch_size % 2 == 0,
                f"train.batch_size={self.train.batch_size} with task=reward: a pair is two rows of "
                "a batch; set an even number",
            )
            _need(
                self.engine.name != "deepspeed",
                "task=reward: engine=deepspeed is not supported; use engine=fsdp",
            )

    def _check_place(self) -> None:
        place, train = self.engine.place, self.train
        if place == "device":
            return
        _need(
            not self.cluster.split,
            f"engine.place={place} is not built for {self.cluster.split}: tensor parts add up "
            "gradients after they have landed, and stages run several passes at a time; use "
            "engine.place=device",
        )
        other = "engine.offload=true" if self.engine.offload else "train.optimizer_place=host"
        _need(
            not self.engine.offload and train.optimizer_place == "device",
            f"engine.place={place} and {other} both place training state: leave one of them out",
        )
        if place == "auto":
            return
        _need(
            train.masters == "split" or train.optimizer_state != "fp32",
            f"engine.place={place} needs train.masters=split, or train.optimizer_state=bf16 or "
            "8bit: torch's AdamW keeps its state on the GPU",
        )
        _need(
            place == "host"
            or train.masters == "split"
            or not (place.get("masters") or place.get("weights")),
            f"engine.place={place}: masters in fp32 stay on the GPU; set train.masters=split, of "
            "which the low planes (masters) and the high ones (weights) can leave, or leave both "
            "out",
        )

    def _check_clip(self) -> None:
        train, place = self.train, self.engine.place
        if train.clip_by == "norm":
            return
        far = isinstance(place, dict) and place.get("gradients", 0)
        for ok, what in (
            (train.clip > 0, "train.clip=0 clips nothing: set train.clip"),
            (
                train.micro_steps == 1,
                f"train.micro_steps={train.micro_steps}: their sum has to be stored; use "
                "train.micro_steps=1 and a larger train.batch_size",
            ),
            (
                self.engine.name != "deepspeed",
                "engine=deepspeed clips by the whole norm: use engine=fsdp or virtual",
            ),
            (not self.engine.offload, "engine.offload=true: use engine.place=host"),
            (not far, f"engine.place={place}: leave gradients out, as none is stored"),
            (
                not self.cluster.split,
                f"{self.cluster.split}: tensor parts add up gradients after they have landed, and "
                "stages run several passes at a time; use cluster.tp=1 and cluster.pp=1",
            ),
            (
                not self.recipe.kept,
                "recipe.sharding.weights=node: node-replicated weights leave after the step; use "
                "world",
            ),
        ):
            _need(ok, f"train.clip_by=unit does not go with {what}")

    def _check_rl(self) -> None:
        rl, train = self.rl, self.train
        _need(
            self.data.has_records,
            f"task=rl needs prompts, which data.name={self.data.name} has not: use data=jsonl with "
            "data.path, data=addition or data=sums",
        )
        _need(bool(rl.rewards), "task=rl needs rl.rewards, such as rl.rewards=[exact]")
        _need(
            self.engine.name != "deepspeed", "task=rl: engine=deepspeed cannot generate; use fsdp"
        )
        _need(
            not (rl.kl and self.run.start_from),
            f"rl.kl={rl.kl:g} refers to the weights of model.start: set that in place of "
            "run.start_from",
        )
        _need(
            rl.temperature == 1 or self.model.name == "llama",
            f"rl.temperature={rl.temperature:g}: model={self.model.name} has losses at "
            "1 alone; leave it out",
        )
        _need(
            not self.model.z_loss,
            f"model.z_loss={self.model.z_loss:g}: task=rl has no cross-entropy; leave it out",
        )
        _need(
            rl.timeout < self.engine.timeout_seconds or not self.engine.ranked,
            f"rl.timeout={rl.timeout:g}: the other ranks wait for rewards, but at most "
            f"engine.timeout_seconds={self.engine.timeout_seconds:g}; set a shorter rl.timeout",
        )
        asked, each = rl.prompts * rl.samples, train.micro_steps * self.cluster.readers
        held = rl.steps_per_rollout * each * train.batch_size
        _need(
            asked == held,
            f"rl.prompts={rl.prompts} of rl.samples={rl.samples} are {asked} completions, but "
            f"rl.steps_per_rollout={rl.steps_per_rollout} steps of {each} micro-batches of "
            f"train.batch_size={train.batch_size} hold {held}: set them to agree",
        )

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The run's parts in turn, each under a recipe without phases; most runs have one. With
        several, those without codecs go through our collectives too."""
        if not self.recipe.phases:
            return (Phase(0, self.train.steps, self),)
        found = self.recipe.phased(self.train.steps)
        engine = replace(self.engine, ordered=True)
        ends = [*(first for first, _ in found[1:]), self.train.steps]
        return tuple(
            Phase(first, end - first, replace(self, recipe=recipe, engine=engine))
            for (first, recipe), end in zip(found, ends, strict=True)
        )

    def at(self, done: int) -> Config:
        """Return the settings of the step after `done` steps; at the end those of the last one."""
        return next(p.config for p in reversed(self.phases) if p.first <= done)

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings before the first step."""
        return (*self.train.notes, *(self.rl.notes if self.task == "rl" else ()))

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all batches of a step, padding of records included."""
        own = self.train.batch_size * self.train.micro_steps * self.data.seq_len
        return own * self.cluster.readers

    @property
    def optimization(self) -> TrainConfig:
        """`train`, with train.beta2_tokens as the beta2 that it means at these tokens a step. A
        half-life h means beta2 = 2 ** (-tokens_per_step / h). Held constant while the batch
        changes, it keeps over how much text the second moment averages (Marek, Lotfi, Somasundaram,
        Wilson and Goldblum 2025, arXiv:2507.07101)."""
        if self.train.beta2_tokens is None:
            return self.train
        beta2 = 0.5 ** (self.tokens_per_step / self.train.beta2_tokens)
        _need(
            beta2 < 1,
            f"train.beta2_tokens={self.train.beta2_tokens:g}: with {self.tokens_per_step:,} tokens "
            "a step beta2 would round to 1; use fewer",
        )
        return replace(self.train, beta2=beta2, beta2_tokens=None)


class Phase(NamedTuple):
    """A part of a run: the steps done when it begins, its own, and the settings of each."""

    first: int
    steps: int
    config: Config
