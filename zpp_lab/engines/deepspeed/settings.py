"""A config as DeepSpeed's settings, or an error that names what it cannot express.

DeepSpeed 0.19 has three switches for the wires, none of which takes a number of bits or a block:

    zero_quantized_weights      8-bit symmetric gathers (qwZ); the block follows from the tensor
    zero_hpz_partition_size     the backward's gather stays in the node (hpZ)
    zero_quantized_gradients    4-bit symmetric reduction in two hops (qgZ), across nodes only

A recipe that asks for anything else is refused rather than run as something near it.
"""

from __future__ import annotations

from typing import Any

from zpp_lab.collectives.recipe import Recipe
from zpp_lab.config.codec import CodecConfig, ExemptConfig
from zpp_lab.config.schema import Config, EngineConfig
from zpp_lab.config.wires import BACKWARD, FORWARD, INTER, INTRA, WIRES, Wire, wires_among

WEIGHT_BITS, GRAD_BITS = 8, 4
# What a codec may set besides its bits: DeepSpeed's own values, or nothing.
_ONLY: dict[str, tuple[Any, ...]] = {
    "codec": (None, "block"),
    "block_size": (None,),
    "symmetric": (None, True),
    "rounding": (None, "nearest"),
    "scale_dtype": (None, "fp32"),
    "hadamard": (None, 0),
    "random_signs": (None, False),
    "options": (None, {}),
}
_OURS = (
    *("gather", "ordered", "prefetch", "blocks_per_unit", "offload", "place", "compile"),
    "transport",
)


def deepspeed_settings(config: Config, longest_vector: int = 0) -> dict[str, Any]:
    """Return DeepSpeed's configuration; ValueError names the setting that it cannot follow.
    longest_vector: elements of the model's largest vector. Parameters up to DeepSpeed's threshold
    are never quantized on the weights' wires; where there are codecs it is set to this, so that all
    matrices are quantized and no vector is, as the recipe says."""
    _check_engine(config.engine)
    _check_recipe(config)
    train, weights = config.train, quantizes_weights(config)
    zero = {
        "stage": 3,
        "zero_quantized_weights": weights,
        "zero_hpz_partition_size": config.cluster.gpus_per_node if config.recipe.secondary else 1,
        "zero_quantized_gradients": quantizes_grads(config),
    }
    if weights:
        zero["stage3_param_persistence_threshold"] = longest_vector
    return {
        "train_micro_batch_size_per_gpu": train.batch_size,
        "gradient_accumulation_steps": train.micro_steps,
        "gradient_clipping": train.clip,
        "steps_per_print": 2**31,
        "bf16": {"enabled": train.param_dtype == "bf16"},
        "fp16": {"enabled": train.param_dtype == "fp16"},  # with DeepSpeed's dynamic loss scale
        "communication_data_type": train.reduce_dtype,
        "data_types": {"grad_accum_dtype": "fp32"},  # as ours: reduced gradients add up in fp32
        "zero_optimization": zero,
    }


def quantizes_weights(config: Config) -> bool:
    return _bits(Recipe(config.recipe, config.cluster.dp), FORWARD) is not None


def quantizes_grads(config: Config) -> bool:
    return _bits(Recipe(config.recipe, config.cluster.dp), INTER) is not None


def _bits(recipe: Recipe, wire: Wire) -> int | None:
    return recipe.wire(wire).bits


def _check_engine(engine: EngineConfig) -> None:
    for key in _OURS:
        value, usual = getattr(engine, key), getattr(EngineConfig(), key)
        if value != usual:
            raise ValueError(
                f"engine.{key}={value}: engine=deepspeed ignores it; leave engine.{key}={usual}"
            )


def _check_recipe(config: Config) -> None:
    recipe, cluster = config.recipe, config.cluster.dp
    checked = Recipe(recipe, cluster)
    for wanted, what in (
        (recipe.again, f"recipe.{recipe.setting('weights')} (use stage 3)"),
        (not recipe.copied, f"recipe.{recipe.setting('optimizer')} (use world)"),
        (not recipe.kept, "recipe.sharding.weights=node (use world)"),
        (recipe.order == "rank", "recipe.order=reversed (use rank)"),
        (recipe.exempt == ExemptConfig(), "recipe.exempt (use its default)"),
        (not recipe.rules, "recipe.rules (use none)"),
        (not recipe.phases, "recipe.phases (use none)"),
        (not recipe.remembers, "memory.kind=residual (leave it out)"),
        (not config.model.lora.on, "model.lora (use lora=none)"),
        (
            config.train.optimizer_state == "fp32",
            f"train.optimizer_state={config.train.optimizer_state} (use fp32)",
        ),
        (config.train.residual_lr == 1, f"train.residual_lr={config.train.residual_lr} (use 1)"),
        (
            not config.data.has_records or not config.data.mask_prompt,
            "masked prompts (use data.mask_prompt=false)",
        ),
        (config.train.accumulate == "every", "train.accumulate=last (use every)"),
        (
            not recipe.secondary or cluster.gpus_per_node > 1,
            "recipe.secondary=true with one GPU a node (use recipe.secondary=false)",
        ),
    ):
        _need(wanted, what)
    for wire in wires_among():
        bits = WEIGHT_BITS if WIRES[wire].carries == "weights" else GRAD_BITS
        _check_codec(wire, checked.wire(wire), bits)
    forward, backward = _bits(checked, FORWARD), _bits(checked, BACKWARD)
    _need(forward == backward, f"different {FORWARD} and {BACKWARD} (set recipe.weights)")
    _check_hops(checked)


def _check_hops(checked: Recipe) -> None:
    """Check qgZ, which is both hops at 4 bits, and nothing else."""
    intra, inter = _bits(checked, INTRA), _bits(checked, INTER)
    hops = checked.config.hops
    _need(intra == inter, f"different {INTRA} and {INTER} (set recipe.grads)")
    _need(
        (hops == 2) == (inter is not None),
        f"recipe.hops={hops} with {'raw' if inter is None else 'quantized'} gradients "
        f"(use recipe.hops={1 if inter is None else 2})",
    )
    _need(
        inter is None or checked.cluster.nodes > 1,
        "quantized gradients on one node: DeepSpeed silently turns them off (use cluster.nodes=2 "
        "or more)",
    )


def _check_codec(wire: str, codec: CodecConfig, bits: int) -> None:
    if codec.bits is None and codec.codec in (None, "none", "block"):
        return  # the tensor's own bytes
    _need(codec.bits in (None, bits), f"{codec.bits} bits on {wire} (use {bits} or null)")
    for key, allowed in _ONLY.items():
        value = getattr(codec, key)
        _need(value in allowed, f"{key}={value} on {wire} (leave it null)")


def _need(ok: bool, what: str) -> None:
    if not ok:
        raise ValueError(f"engine=deepspeed cannot express {what}; engine=fsdp can")


def check_gradients(shapes: dict[str, tuple[int, ...]], config: Config, visible: int) -> list[str]:
    """Return what keeps DeepSpeed from the quantized reduction that the recipe asks for; [] if
    nothing.

    shapes: of all parameters by name. visible: GPUs that a rank sees, which DeepSpeed takes for the
    size of a node. From its sources (0.19.8): with fewer than two such nodes, or elements that 2 ·
    world does not divide, it reduces plainly; and a row count that the world does not divide loses
    the rest.
    """
    if not quantizes_grads(config):
        return []
    world, own = config.cluster.world, config.cluster.gpus_per_node
    found = []
    if visible != own:
        found.append(
            f"a rank sees {visible} GPUs, which DeepSpeed treats as its node, but "
            f"cluster.gpus_per_node={own}: use engine.emulate_nodes=true, or start each node with "
            "its own CUDA_VISIBLE_DEVICES"
        )
    for name, shape in shapes.items():
        if len(shape) < 2:
            continue  # DeepSpeed reduces vectors uncompressed, and so does the recipe
        numel, groups = shape[0] * shape[1], max(*shape[:2], world)
        if numel % (2 * world):
            found.append(f"{name} has {numel} elements, not a multiple of {2 * world}")
        elif groups % world:
            found.append(f"{name} has {groups} blocks, not a multiple of {world} ranks")
    return found
