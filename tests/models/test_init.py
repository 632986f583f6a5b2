import math
from dataclasses import replace

import pytest
import torch

from zpp_lab.config.model import ModelConfig
from zpp_lab.models import build_model, initial_value
from zpp_lab.models.init import initial_rows

SMALL = ModelConfig(dim=32, layers=2, heads=4, kv_heads=4, ffn=48)


def test_a_parameter_depends_on_seed_name_and_shape_alone():
    deeper = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn=96)
    one, other = (dict(build_model(c, 61, seed=9).named_parameters()) for c in (SMALL, deeper))
    same = [n for n in one if one[n].shape == other[n].shape]
    assert len(same) > 5
    assert all(torch.equal(one[n], other[n]) for n in same)


def test_a_sharded_engine_can_make_each_parameter_by_itself():
    for name, parameter in build_model(SMALL, 61, seed=4).named_parameters():
        value = initial_value(name, tuple(parameter.shape), 4, SMALL)
        assert value.dtype == torch.float32
        assert torch.equal(value, parameter), name


def test_building_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    build_model(SMALL, 61)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "deviation", "stds"),
    [
        ("embed.weight", 0.02, {}),
        ("embed.weight", 1.0, {"embedding_std": 1.0}),
        ("head.weight", 0.004, {"head_std": 0.004, "embedding_std": 1.0}),
        ("layers.0.attention.wq.weight", 256**-0.5, {"embedding_std": 1.0}),
        ("layers.0.mlp.w_down.weight", 256**-0.5 / 8**0.5, {"head_std": 1.0}),
    ],
)
def test_deviation(name: str, deviation: float, stds: dict[str, float]):
    value = initial_value(name, (512, 256), 0, replace(SMALL, layers=4, **stds))
    assert value.std().item() == pytest.approx(deviation, rel=0.02)
    assert abs(value.mean().item()) < deviation / 50


@pytest.mark.parametrize("init", ["torch", "philox"])
def test_a_model_takes_the_deviations_of_its_config(init: str):
    cfg = replace(SMALL, init=init, embedding_std=1.0, head_std=0.5)
    made, plain = build_model(cfg, 997), build_model(replace(SMALL, init=init), 997)
    assert torch.allclose(made.embed.weight, plain.embed.weight * 50)
    assert torch.allclose(made.head.weight, plain.head.weight * 25)
    assert torch.equal(made.layers[0].mlp.w_up.weight, plain.layers[0].mlp.w_up.weight)


def rows_of(name: str, shape: tuple[int, ...], rows: tuple[int, int], seed: int) -> torch.Tensor:
    return initial_rows(name, shape, rows, seed, SMALL, torch.device("cpu"))


@pytest.mark.parametrize("shape", [(13, 7), (5, 4), (64, 33)])
@pytest.mark.parametrize("world", [1, 3, 4])
def test_ranks_draw_the_whole_parameter_between_them(shape: tuple[int, int], world: int):
    name, each = "layers.0.mlp.w_up.weight", -(-shape[0] // world)
    whole = rows_of(name, shape, (0, shape[0]), 6)
    cuts = [(min(r * each, shape[0]), min((r + 1) * each, shape[0])) for r in range(world)]
    assert torch.equal(torch.cat([rows_of(name, shape, cut, 6) for cut in cuts]), whole)


def test_philox_rows_are_normal():
    name, shape = "layers.0.attention.wq.weight", (1000, 1000)
    values = rows_of(name, shape, (0, 1000), 0).flatten().double() * 1000**0.5
    assert values.mean().abs() < 0.005
    for moment, expected in ((2, 1), (3, 0), (4, 3), (6, 15)):
        assert (values**moment).mean().item() == pytest.approx(expected, abs=0.02 * 2**moment)
    inside = [(values.abs() < x).double().mean().item() for x in (0.5, 1, 2, 3)]
    assert inside == pytest.approx([math.erf(x / 2**0.5) for x in (0.5, 1, 2, 3)], abs=0.002)
    neighbours = torch.corrcoef(torch.stack((values[:-1], values[1:])))[0, 1]
    assert abs(neighbours.item()) < 0.005


def test_philox_keeps_its_numbers_for_ever():
    """A golden value: a change here is another start for every large run."""
    found = rows_of("layers.3.attention.wq.weight", (8, 4), (5, 6), 7)
    assert found.tolist() == [
        [-0.372633159160614, 0.08794786036014557, -1.26717209815979, 0.06155897304415703]
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_philox_is_the_same_on_a_gpu():
    name, shape, rows = "layers.0.mlp.w_up.weight", (4097, 999), (17, 4090)
    own = rows_of(name, shape, rows, 3)
    assert torch.equal(initial_rows(name, shape, rows, 3, SMALL, torch.device("cuda")).cpu(), own)
