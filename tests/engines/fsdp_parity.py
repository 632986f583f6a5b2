"""The table of recipes on which the real engine must equal the virtual one, and the comparison."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from tests.engines.uneven import batch, build_uneven
from zpp_lab.codecs.planes import joined
from zpp_lab.collectives.recipe import Recipe
from zpp_lab.collectives.transport import ProcessGroups
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.config.load import load
from zpp_lab.config.recipe import POINTS, SHARDED, Parts
from zpp_lab.config.schema import ClusterConfig, Config
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.fsdp.engine import FsdpEngine
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.files import conf_dir

SMALL = {"block_size": 16}
Q8, Q6, Q4, Q3, Q2 = ({"bits": b, **SMALL} for b in (8, 6, 4, 3, 2))
TOP = {"codec": "topk", "block_size": 64, "keep": 3}
TOP4 = {"codec": "topk", "block_size": 32, "keep": 16, "bits": 4}
H4 = {"bits": 4, "block_size": 32, "hadamard": 16}
NORMAL = {"codec": "normal", **SMALL}
ZEROPP = {"secondary": True, "hops": 2, "weights": Q8, "grads": Q4}
BF16 = {"param_dtype": "bf16"}
SPLIT = {**BF16, "masters": "split"}
STOCHASTIC = {"rounding": "stochastic"}
KEPT = {"sharding": {"weights": "node"}, "hops": 2}
DIFFERENCES = {"sharding": {"weights": "node", "update": "differences"}, "hops": 2}

# name → (recipe, train settings)
Cases = dict[str, tuple[dict[str, Any], dict[str, Any]]]
PLAIN: Cases = {
    "zero3": ({}, {}),
    "zero3_bf16": ({}, BF16),
    "zero3_bf16_reduce": ({}, {**BF16, "reduce_dtype": "bf16"}),
    "zero3_two_hops": ({"hops": 2}, {}),
    "zero3_reversed": ({"order": "reversed"}, {}),
    "stage2": ({"stage": 2, "weights": Q8, "grads": Q8}, {"micro_steps": 2}),
    "stage1": ({"stage": 1, "weights": Q8, "grads": Q4}, {"micro_steps": 2}),
    "weights8": ({"weights": Q8}, {}),
    "weights6": ({"weights": Q6}, BF16),
    "weights4": ({"weights": Q4}, {}),
    "weights3": ({"weights": Q3, "grads": {**Q3, "symmetric": False}}, BF16),
    "weights2": ({"weights": Q2}, {}),
    "grads8": ({"grads": Q8}, {}),
    "grads4_two_hops": ({"hops": 2, "grads": Q4}, BF16),
    "one_hop": ({"weights": Q4, "grads": Q8}, {"clip": 0.0}),
    "zeropp": (ZEROPP, {}),
    "zeropp_bf16": (ZEROPP, {**BF16, "reduce_dtype": "bf16"}),
    "zeropp_every": (ZEROPP, {**BF16, "micro_steps": 2, "accumulate": "every"}),
    "zeropp_last": (ZEROPP, {**BF16, "micro_steps": 3, "accumulate": "last"}),
    "raw_secondary": ({"secondary": True}, BF16),
    "stochastic_secondary": (
        {**ZEROPP, "weights": {**Q4, "rounding": "stochastic"}},
        {**BF16, "micro_steps": 2},
    ),
    "asymmetric_bf16_scales": (
        {
            "hops": 2,
            "weights": {**Q4, "symmetric": False, "scale_dtype": "bf16"},
            "grads": {**Q8, "symmetric": False},
        },
        {},
    ),
    "stochastic": (
        {
            "hops": 2,
            "weights": {**Q8, "rounding": "stochastic"},
            "grads": {**Q4, "rounding": "stochastic"},
        },
        {"micro_steps": 2},
    ),
    "sham": (
        {"hops": 2, "weights": {**Q4, "codec": "sham"}, "grads": {**Q8, "codec": "sham"}},
        BF16,
    ),
    "sparse": ({"hops": 2, "grads_intra": TOP, "grads_inter": Q8}, BF16),
    "backward_other_codec": ({"weights_forward": Q6, "weights_backward": Q4}, {}),
    "hadamard_kept": ({"hops": 2, "grads": H4}, {}),
    "hadamard_left": ({"hops": 2, "grads_intra": H4, "grads_inter": Q8}, {}),
    "hadamard_signs": ({"grads": {**H4, "random_signs": True, "rounding": "stochastic"}}, BF16),
    "reversed_two_hops": ({"hops": 2, "order": "reversed", "grads": Q4}, {}),
    "bf16_states": (ZEROPP, {**BF16, "optimizer_state": "bf16"}),
    "8bit_states": ({}, {"optimizer_state": "8bit", "micro_steps": 2}),
    "host_states": (ZEROPP, {"optimizer_state": "8bit", "optimizer_place": "host"}),
    "split": (ZEROPP, {**SPLIT, "micro_steps": 2}),
    "split_fp32_states": ({}, SPLIT),
    "split_zero3": ({}, {**SPLIT, "optimizer_state": "8bit", "reduce_dtype": "bf16"}),
    "split_last": (ZEROPP, {**SPLIT, "micro_steps": 2, "accumulate": "last", "clip": 0.0}),
    "split_host_states": ({"hops": 2}, {**SPLIT, "optimizer_place": "host"}),
    "split_kept": (KEPT, {**SPLIT, "optimizer_state": "bf16"}),
    "split_differences": ({**DIFFERENCES, "weights_update": Q4, "grads": Q4}, SPLIT),
    "residual_rate": (ZEROPP, {"residual_lr": 0.1}),
    "residual_rate_8bit_states": ({}, {"residual_lr": 0.1, "optimizer_state": "8bit"}),
    "everything": (
        {
            "hops": 2,
            "exempt": {"max_ndim": 0},
            "weights": {"bits": 2, "block_size": 8192},
            "grads": {**Q6, "symmetric": False},
            "rules": [{"name": "embed*", "exempt": True}, {"name": "*up*", "set": {"bits": 2}}],
        },
        {"reduce_dtype": "bf16", "micro_steps": 2, "accumulate": "last"},
    ),
    "kept": ({"sharding": {"weights": "node"}}, {**BF16, "micro_steps": 2}),
    "kept_other_bits": (
        {**KEPT, "weights": Q8, "weights_update": Q4, "grads": Q4},
        {**BF16, "clip": 0.0},
    ),
    "kept_drawn": (
        {**KEPT, "weights": {**Q4, **STOCHASTIC, "symmetric": False}, "grads": Q4},
        BF16,
    ),
    "differences": (
        {**DIFFERENCES, "weights_update": Q4, "grads": H4},
        {**BF16, "micro_steps": 2, "accumulate": "last"},
    ),
    "differences_fp32": (
        {
            **DIFFERENCES,
            "weights_update": {**Q4, "symmetric": False},
            "weights_forward": {**Q8, "symmetric": False},
        },
        {"clip": 0.0},
    ),
    "differences_drawn": (
        {
            **DIFFERENCES,
            "weights_update": {**Q4, **STOCHASTIC},
            "weights_forward": {**Q8, **STOCHASTIC},
            "weights_backward": {**Q6, **STOCHASTIC},
        },
        {**BF16, "micro_steps": 2},
    ),
    "differences_whole": (
        {
            "sharding": {"weights": "none", "update": "differences"},
            "weights_update": Q4,
            "grads": H4,
        },
        {**BF16, "micro_steps": 2},
    ),
    "differences_sparse": ({**DIFFERENCES, "weights_update": TOP, "grads": Q4}, BF16),
    "differences_normal": (
        {
            **DIFFERENCES,
            "weights_update": {"bits": 4, **NORMAL},
            "weights_forward": {"bits": 3, **NORMAL},
            "grads_intra": {**H4, "codec": "normal"},
            "grads_inter": H4,
        },
        BF16,
    ),
}


def grid_case(point: Parts) -> dict[str, Any]:
    """With bits on every wire that there is, drawn at random."""
    weights, _, optimizer = point
    recipe: dict[str, Any] = {
        "grads_intra": {**H4, **STOCHASTIC},
        "grads_inter": {**Q4, **STOCHASTIC},
    }
    if optimizer != "none":
        recipe["weights"] = {**Q8, **STOCHASTIC}
    if weights == "node" and optimizer == "world":
        recipe["weights_update"] = {**Q4, **STOCHASTIC}
    return recipe | {"hops": 2, "sharding": dict(zip(SHARDED, point, strict=True))}


# Every point of the grid as it is, and with codecs. Raw ones sum in the same order.
RAW_GRID = {
    "raw_" + "_".join(point): (
        {"hops": 2, "sharding": dict(zip(SHARDED, point, strict=True))},
        {**BF16, "micro_steps": 2},
    )
    for point in POINTS
}
GRID: Cases = RAW_GRID | {
    "grid_" + "_".join(point): (grid_case(point), {**BF16, "micro_steps": 2}) for point in POINTS
}
GRID["grid_reversed"] = (
    {"shard": "node", "order": "reversed", "grads": Q4},
    {},
)
GRID["grid_memory"] = (
    {"shard": "node", "grads": {**H4, "memory": {"kind": "residual"}}},
    {"micro_steps": 2},
)
GRID["grid_memory_alone"] = (
    {
        "sharding": {"weights": "none", "grads": "none", "optimizer": "none"},
        "grads": {**Q4, "memory": {"kind": "residual"}},
    },
    {"reduce_dtype": "bf16", "micro_steps": 2},
)


def residual(**settings: Any) -> dict[str, Any]:
    return {"memory": {"kind": "residual", **settings}}


S4 = {**Q4, "rounding": "stochastic"}
RAW_UP = {"name": "*up*", "exempt": True}
LOCO = {"store": "8bit", "average": 0.8, "reset_every": 2}
TWICE = {"micro_steps": 2, "accumulate": "every"}
# The same for wires that remember, on clusters of one and of two hops; what is set for one hop
# of two (`HOPS_REMEMBER`) needs nodes of several ranks.
REMEMBER: Cases = {
    "memory_fp32": ({"grads": {**Q2, **residual(store="fp32")}}, TWICE),
    "memory_bf16": ({"grads": {**Q2, **residual(decay=0.9)}}, {**BF16, "reduce_dtype": "bf16"}),
    "memory_8bit": ({"hops": 2, "grads": {**Q4, **residual(store="8bit")}}, TWICE),
    "memory_stochastic": ({"hops": 2, "grads": {**S4, **residual()}}, TWICE),
    "memory_loco": ({"hops": 2, "grads": {**Q4, **residual(**LOCO)}}, {**BF16, **TWICE}),
    "memory_last": (
        {"hops": 2, "grads": {**Q4, **residual()}},
        {"micro_steps": 2, "accumulate": "last"},
    ),
    "memory_reversed": ({"hops": 2, "order": "reversed", "grads": {**Q3, **residual()}}, {}),
    "memory_asymmetric": ({"grads": {**Q2, "symmetric": False, **residual()}}, {"clip": 0.0}),
    "memory_hadamard": ({"hops": 2, "grads": {**H4, "random_signs": True, **residual()}}, {}),
    "memory_topk": ({"grads": {**TOP, **residual()}}, TWICE),
    "memory_topk_bits": (
        {"hops": 2, "grads": {**TOP4, **STOCHASTIC, **residual(store="8bit")}},
        {**BF16, "reduce_dtype": "bf16"},
    ),
    "memory_rules": (
        {
            "hops": 2,
            "grads": Q8,
            "exempt": {"max_ndim": 0},
            "rules": [
                {
                    "name": "*up*",
                    "wires": ["grads_intra", "grads_inter"],
                    "set": {"bits": 2, **residual()},
                },
                {"name": "*down*", "exempt": True},
            ],
        },
        BF16,
    ),
}
HOPS_REMEMBER: Cases = {
    "memory_first": ({"hops": 2, "grads": Q4, "grads_intra": residual(store="8bit")}, TWICE),
    "memory_second": ({"hops": 2, "grads": S4, "grads_inter": residual(store="fp32")}, TWICE),
    "memory_second_raw_first": ({"hops": 2, "grads_inter": {**Q2, **residual()}}, BF16),
    "memory_hadamard_left": (
        {"hops": 2, "grads_intra": H4, "grads_inter": {**Q8, **residual(store="8bit")}},
        TWICE,
    ),
    "memory_hadamard_mixed": (
        {
            "hops": 2,
            "grads": H4,
            "grads_inter": residual(),
            "rules": [{"name": "*up*", "wires": ["grads_inter"], "set": {"hadamard": 0}}],
        },
        {},
    ),
    "memory_hadamard_second": (
        {"hops": 2, "grads_intra": Q8, "grads_inter": {**H4, **residual()}},
        {},
    ),
}


def after(steps: int, **changes: Any) -> dict[str, Any]:
    return {"after": steps, **changes}


# Recipes that change on the way, in each of the steps that are compared.
PHASED: Cases = {
    "phases_raw_first": ({"phases": [after(1, grads=S4), after(2, grads=Q2)]}, {**BF16, **TWICE}),
    "phases_raw_last": (
        {**ZEROPP, "phases": [after(1, weights={**Q4, **STOCHASTIC}), after(2, weights={})]},
        {**BF16, "micro_steps": 2},
    ),
    "phases_own_backward": (
        {"weights": Q8, "phases": [after(1, weights_backward=Q4), after(2, rules=[RAW_UP])]},
        {},
    ),
    "phases_hops": (
        {"grads": {**H4, **residual()}, "phases": [after(1, hops=2), after(2, grads=H4, hops=1)]},
        {},
    ),
    "phases_memory": (
        {
            "hops": 2,
            "grads": {**Q4, **residual()},
            "phases": [
                after(1, grads={**Q2, **residual()}),
                after(2, grads={**Q2, **residual()}, grads_inter=residual(store="fp32")),
            ],
        },
        TWICE,
    ),
    "phases_kept": (
        {**KEPT, "weights": Q8, "phases": [after(1, weights_update=Q4), after(2, weights={})]},
        BF16,
    ),
    "phases_differences": (
        {
            **DIFFERENCES,
            "weights_update": Q8,
            "phases": [after(1, weights_update={**Q4, **STOCHASTIC}), after(2, weights=Q8)],
        },
        BF16,
    ),
}

CASES = PLAIN | REMEMBER | HOPS_REMEMBER | PHASED | GRID
SHIPPED = sorted(p.stem for p in (conf_dir() / "recipe").glob("*.yaml") if p.stem != "base")


def configured(case: str, nodes: int, local: int, **engine: Any) -> Config:
    """A case of the table, or a shipped recipe, whose blocks are as large as it says."""
    if case in SHIPPED and case not in CASES:
        recipe = yaml.safe_load((conf_dir() / "recipe" / f"{case}.yaml").read_text())
        train: dict[str, Any] = {**BF16, "micro_steps": 2}
    else:
        recipe, train = CASES[case]
    values = {
        "recipe": {"name": case} | recipe,
        "cluster": {"nodes": nodes, "gpus_per_node": local},
        "train": {"lr": 1e-2, "clip": 0.5, "steps": 10, **train},  # shares of them end early
        "engine": {"name": "fsdp", "device": "cpu", "ordered": True, **engine},
    }
    return load(Config, values)


def lacks_a_wire(case: str, nodes: int, local: int) -> bool:
    """Whether a cluster has not every wire that the case asks for."""
    try:
        for phase in configured(case, nodes, local).phases:
            Recipe.of(phase.config)
    except ValueError as error:
        if re.search("would (carry nothing|have no effect)|needs several nodes", str(error)):
            return True
        raise
    return False


def beyond_zero3(case: str) -> bool:
    """Whether it has memories, a partition of its own, or phases."""
    recipe = configured(case, 2, 2).recipe
    return recipe.remembers or bool(recipe.phases) or recipe.parts != ("world",) * 3


def compare(cases: list[str], nodes: int, local: int, steps: int) -> dict[str, str]:
    """Case → what differs between the engines ("" when nothing); to be run on every rank."""
    torch.use_deterministic_algorithms(True)
    cluster = ClusterConfig(nodes=nodes, gpus_per_node=local)
    transport = ProcessGroups(cluster, Watchdog(100.0))
    real = {case: run_real(configured(case, nodes, local), steps, transport) for case in cases}
    mine = cases[transport.rank :: cluster.world]
    found = {c: differs(real[c], run_virtual(configured(c, nodes, local), steps)) for c in mine}
    every: list[Any] = [None] * cluster.world
    dist.all_gather_object(every, found)
    return {case: text for part in every for case, text in part.items()}


Outcome = tuple[list[tuple[Any, ...]], list[float], dict[str, Tensor]]


def run_real(config: Config, steps: int, transport: ProcessGroups) -> Outcome:
    model = build_uneven()
    engine = FsdpEngine(model, build_plan(model, config), config, torch.device("cpu"), transport)
    return *_run(engine, steps), kept(engine)


def run_virtual(config: Config, steps: int) -> Outcome:
    model = build_uneven()
    engine = VirtualEngine(model, build_plan(model, config), config)
    return *_run(engine, steps), kept(engine)


def kept(engine: Any) -> dict[str, Tensor]:
    """Master weights, the optimizer's states and what nodes and encoders remember, whole: all that
    later steps depend on. To be called on every rank."""
    state = engine.state_dict()
    every = {"weights": state["weights"], **state["optimizer"]}
    every |= {kind: state.get(kind, {}) for kind in ("kept", "memory", "low")}
    found = gathered({f"{key} of {n}": t for key, named in every.items() for n, t in named.items()})
    for name in state.get("low", {}):  # the virtual engine has such masters whole
        found[f"weights of {name}"] = joined(
            found[f"weights of {name}"], found.pop(f"low of {name}")
        )
    return found


def gathered(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors whole, all that are cut in one exchange."""
    cut = {n: t for n, t in named.items() if isinstance(t, DTensor)}
    if cut:
        assert all(t.placements == (Shard(0),) for t in cut.values())
        every: list[Any] = [None] * dist.get_world_size()
        local = {n: t.to_local().detach().contiguous().cpu() for n, t in cut.items()}
        # as arrays: tensors take ten times as long to pickle
        dist.all_gather_object(every, {n: t.view(torch.uint8).numpy() for n, t in local.items()})
        for name, tensor in cut.items():
            parts = [torch.from_numpy(own[name]).view(tensor.dtype) for own in every]
            shards = tensor.device_mesh.size()
            assert all(map(torch.equal, parts, parts[:shards] * (len(parts) // shards)))
            cut[name] = torch.cat(parts[:shards])
    return {n: cut[n] if n in cut else t.detach().cpu() for n, t in named.items()}


def _run(engine: Any, steps: int) -> tuple[list[tuple[Any, ...]], list[float]]:
    """Steps with evaluations between them, in which one rank has a batch more than the others:
    with the masters after the first step, with the wires' weights at the end. In longer runs with
    both each time."""
    done, evaluated = [], []
    for step in range(steps):
        result = engine.step(step, 1e-2, partial(batch, step), telemetry=step == 1)
        done.append((result.loss, result.grad_norm, dict(result.bytes), result.telemetry))
        if step in (0, steps - 1):
            heldout = [batch(999, i, 0) for i in range(engine.plan.recipe.cluster.world + 1)]
            wires = (True, False) if steps > 3 else (step > 0,)
            evaluated += [engine.evaluate(step + 1, heldout, wire) for wire in wires]
    return done, evaluated


def differs(real: Outcome, virtual: Outcome) -> str:
    for step, (a, b) in enumerate(zip(real[0], virtual[0], strict=True)):
        for what, x, y in zip(("loss", "gradient norm", "bytes", "telemetry"), a, b, strict=False):
            if x != y:
                return f"{what} at step {step}: {x} real, {y} virtual"
    if real[1] != virtual[1]:
        return f"held-out losses: {real[1]} real, {virtual[1]} virtual"
    if real[2].keys() != virtual[2].keys():
        return f"one of them alone has {sorted(real[2].keys() ^ virtual[2].keys())}"
    for name, tensor in virtual[2].items():
        mine, other = (t.contiguous().view(-1).view(torch.uint8) for t in (tensor, real[2][name]))
        if not torch.equal(mine, other):
            return name
    return ""
