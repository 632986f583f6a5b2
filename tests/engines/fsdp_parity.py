"""The table of recipes on which the real engine must equal the virtual one, and the comparison."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.engines.uneven import batch, build_uneven
from zpp_lab.collectives.transport import ProcessGroups
from zpp_lab.collectives.watchdog import Watchdog
from zpp_lab.config.compose import compose
from zpp_lab.config.load import load
from zpp_lab.config.schema import ClusterConfig, Config
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.fsdp.engine import FsdpEngine
from zpp_lab.engines.virtual.engine import VirtualEngine
from zpp_lab.files import conf_dir

SMALL = {"block_size": 16}
Q8, Q6, Q4, Q3, Q2 = ({"bits": b, **SMALL} for b in (8, 6, 4, 3, 2))
H4 = {"bits": 4, "block_size": 32, "hadamard": 16}
ZEROPP = {"secondary": True, "hops": 2, "weights": Q8, "grads": Q4}
BF16 = {"param_dtype": "bf16"}

# name → (recipe, train settings)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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
    "backward_other_codec": ({"weights_forward": Q6, "weights_backward": Q4}, {}),
    "hadamard_kept": ({"hops": 2, "grads": H4}, {}),
    "hadamard_left": ({"hops": 2, "grads_intra": H4, "grads_inter": Q8}, {}),
    "hadamard_signs": ({"grads": {**H4, "random_signs": True, "rounding": "stochastic"}}, BF16),
    "reversed_two_hops": ({"hops": 2, "order": "reversed", "grads": Q4}, {}),
    "bf16_states": (ZEROPP, {**BF16, "optimizer_state": "bf16"}),
    "8bit_states": ({}, {"optimizer_state": "8bit", "micro_steps": 2}),
    "host_states": (ZEROPP, {"optimizer_state": "8bit", "optimizer_place": "host"}),
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
}


SHIPPED = sorted(p.stem for p in (conf_dir() / "recipe").glob("*.yaml") if p.stem != "base")


def configured(case: str, nodes: int, local: int, **engine: Any) -> Config:
    """A case of the table, or a shipped recipe, whose blocks are as large as it says."""
    if case in SHIPPED and case not in CASES:
        recipe = asdict(compose([f"recipe={case}"]).recipe)
        train: dict[str, Any] = {**BF16, "micro_steps": 2}
    else:
        recipe, train = CASES[case]
    values = {
        "recipe": {"name": case} | recipe,
        "cluster": {"nodes": nodes, "gpus_per_node": local},
        "train": {"lr": 1e-2, "clip": 0.5, **train},
        "engine": {"name": "fsdp", "device": "cpu", "ordered": True, **engine},
    }
    return load(Config, values)


def compare(cases: list[str], nodes: int, local: int, steps: int) -> dict[str, str]:
    """Case → what differs between the engines ("" when nothing); to be run on every rank."""
    torch.use_deterministic_algorithms(True)
    cluster = ClusterConfig(nodes=nodes, gpus_per_node=local)
    transport = ProcessGroups(cluster, Watchdog(100.0))
    real = {case: _real(configured(case, nodes, local), steps, transport) for case in cases}
    mine = cases[transport.rank :: cluster.world]
    found = {c: differs(real[c], _virtual(configured(c, nodes, local), steps)) for c in mine}
    every: list[Any] = [None] * cluster.world
    dist.all_gather_object(every, found)
    return {case: text for part in every for case, text in part.items()}


Outcome = tuple[list[tuple[Any, ...]], list[float], dict[str, Tensor]]


def _real(config: Config, steps: int, transport: ProcessGroups) -> Outcome:
    model = build_uneven()
    engine = FsdpEngine(model, build_plan(model, config), config, torch.device("cpu"), transport)
    return *_run(engine, steps), kept(engine)


def _virtual(config: Config, steps: int) -> Outcome:
    model = build_uneven()
    engine = VirtualEngine(model, build_plan(model, config), config)
    return *_run(engine, steps), kept(engine)


def kept(engine: Any) -> dict[str, Tensor]:
    """Master weights and the optimizer's states, whole: all that later steps depend on. To be
    called on every rank."""
    state = engine.state_dict()
    every = {"weights": state["weights"], **state["optimizer"]}
    return {f"{key} of {n}": whole(t) for key, named in every.items() for n, t in named.items()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _run(engine: Any, steps: int) -> tuple[list[tuple[Any, ...]], list[float]]:
    """Steps with evaluations between them; every rank's evaluation batches number seven."""
    done, evaluated = [], []
    for step in range(steps):
        result = engine.step(step, 1e-2, partial(batch, step), telemetry=step == 1)
        done.append((result.loss, result.grad_norm, dict(result.bytes), result.telemetry))
        if step in (0, steps - 1):
            heldout = [batch(999, i, 0) for i in range(7)]
            evaluated += [engine.evaluate(step + 1, heldout, wire) for wire in (True, False)]
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
