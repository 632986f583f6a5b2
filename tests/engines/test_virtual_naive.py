"""The virtual engine and a naive per-rank run agree bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.engines.naive import NaiveRun
from tests.engines.uneven import batch, build_uneven
from zpp_lab.config.load import load
from zpp_lab.config.schema import Config
from zpp_lab.engines.build import build_plan
from zpp_lab.engines.virtual.engine import VirtualEngine

SMALL = {"block_size": 16}
Q8 = {"bits": 8, **SMALL}
Q4 = {"bits": 4, **SMALL}
H4 = {"bits": 4, "block_size": 32, "hadamard": 16}

CASES: dict[str, dict] = {
    "zero3": {},
    "zero3_reordered": {"order": "reversed"},
    "stage2": {"stage": 2, "weights": Q8, "grads": Q8},
    "stage1": {"stage": 1, "weights": Q8, "grads": Q4},
    "zeropp": {"secondary": True, "hops": 2, "weights": Q8, "grads": Q4},
    "one_hop": {"weights": Q4, "grads": Q8},
    "asymmetric_bf16_scales": {
        "hops": 2,
        "weights": {**Q4, "symmetric": False, "scale_dtype": "bf16"},
        "grads": {**Q8, "symmetric": False},
    },
    "stochastic": {
        "hops": 2,
        "weights": {**Q8, "rounding": "stochastic"},
        "grads": {**Q4, "rounding": "stochastic"},
    },
    "backward_other_codec": {"weights_forward": {"bits": 6, **SMALL}, "weights_backward": Q4},
    "hadamard_kept": {"hops": 2, "grads": H4},
    "hadamard_left": {"hops": 2, "grads_intra": H4, "grads_inter": Q8},
    "hadamard_signs_one_hop": {"grads": {**H4, "random_signs": True, "rounding": "stochastic"}},
    "reversed_two_hops": {"hops": 2, "order": "reversed", "grads": Q4},
    "everything": {
        "hops": 2,
        "exempt": {"max_ndim": 0},
        "weights": {"bits": 2, "block_size": 8192},
        "grads": {"bits": 6, **SMALL, "symmetric": False},
        "rules": [{"name": "embed*", "exempt": True}, {"name": "*up*", "set": {"bits": 2}}],
    },
}
# What encoders remember, on one hop or both. Step 2 of three is past a reset.
CASES |= {
    "memory_fp32": {"grads": {**Q4, "memory": {"kind": "residual", "store": "fp32"}}},
    "memory_bf16": {
        "hops": 2,
        "grads": {**Q4, "rounding": "stochastic", "memory": {"kind": "residual", "decay": 0.9}},
    },
    "memory_loco": {
        "hops": 2,
        "order": "reversed",
        "grads": {
            **Q4,
            "memory": {"kind": "residual", "store": "8bit", "average": 0.8, "reset_every": 2},
        },
    },
    "memory_hadamard": {"hops": 2, "grads": {**H4, "memory": {"kind": "residual"}}},
    "memory_hadamard_left": {
        "hops": 2,
        "grads_intra": {**H4, "memory": {"kind": "residual"}},
        "grads_inter": {**Q8, "memory": {"kind": "residual", "store": "fp32"}},
    },
}
CLUSTERS = [(2, 2), (1, 3), (3, 2), (5, 1), (2, 3)]
TRAIN: list[dict[str, Any]] = [
    {"param_dtype": "bf16"},
    {"param_dtype": "bf16", "reduce_dtype": "bf16"},
    {"param_dtype": "bf16", "micro_steps": 2, "accumulate": "every"},
    {"param_dtype": "bf16", "micro_steps": 3, "accumulate": "last"},
    {"micro_steps": 2, "clip": 0.0},
]


ANYWHERE = ("stochastic",)  # and the others on one cluster each
EVERYWHERE = [
    pytest.param(case, cluster, id=f"{case}-{cluster[0]}x{cluster[1]}")
    for i, case in enumerate(CASES)
    for cluster in (CLUSTERS if case in ANYWHERE else CLUSTERS[i % 3 :][:1])
]
TRAINED = [
    pytest.param(case, train, id="-".join([case, *map(str, train.values())]))
    for i, case in enumerate(("zeropp", "zero3", "hadamard_kept", "stochastic", "memory_bf16"))
    for train in (TRAIN[i : i + 1] if i else TRAIN)  # nearly every setting with two recipes
]


def configured(recipe: dict, nodes: int, local: int, **train: object) -> Config:
    values = {
        "recipe": {"name": "case", **recipe},
        "cluster": {"nodes": nodes, "gpus_per_node": local},
        "train": {"lr": 1e-2, "clip": 0.5, **train},
    }
    return load(Config, values)


def agree(config: Config, steps: int = 2) -> None:
    naive = NaiveRun(config)
    model = build_uneven()
    engine = VirtualEngine(model, build_plan(model, config), config)
    for step in range(steps):
        loss, norm = naive.step(step, 1e-2)
        result = engine.step(step, 1e-2, partial(batch, step), telemetry=step == 0)
        assert result.grad_norm == norm, f"gradient norm at step {step}"
        assert result.loss == loss, f"loss at step {step}"
    for name, whole in naive.weights().items():
        mine = engine.cell.master[name].detach()
        assert torch.equal(mine.view(torch.int32), whole.view(torch.int32)), f"weights of {name}"


@pytest.mark.parametrize(("case", "cluster"), EVERYWHERE)
def test_bit_equal(case: str, cluster: tuple[int, int]) -> None:
    agree(configured(CASES[case], *cluster), steps=3 if case.startswith("memory") else 2)


@pytest.mark.parametrize(("case", "train"), TRAINED)
def test_bit_equal_precision_and_accumulation(case: str, train: dict) -> None:
    agree(configured(CASES[case], 2, 2, **train))
