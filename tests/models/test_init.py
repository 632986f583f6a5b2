import pytest
import torch

from zpp_lab.config import ModelConfig
from zpp_lab.models import build_model, initial_value

SMALL = ModelConfig(dim=32, layers=2, heads=4, kv_heads=4, ffn=48)


def test_a_parameter_depends_on_seed_name_and_shape_alone():
    deeper = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn=96)
    one, other = (dict(build_model(c, 61, seed=9).named_parameters()) for c in (SMALL, deeper))
    same = [n for n in one if one[n].shape == other[n].shape]
    assert len(same) > 5
    assert all(torch.equal(one[n], other[n]) for n in same)


def test_a_sharded_engine_can_make_each_parameter_by_itself():
    for name, parameter in build_model(SMALL, 61, seed=4).named_parameters():
        value = initial_value(name, tuple(parameter.shape), 4, SMALL.layers)
        assert value.dtype == torch.float32
        assert torch.equal(value, parameter), name


def test_seeds_and_names_differ():
    def value(name: str, seed: int) -> torch.Tensor:
        return initial_value(name, (16, 16), seed, 2)

    base = value("layers.0.attention.wq.weight", 1)
    assert not torch.equal(base, value("layers.0.attention.wq.weight", 2))
    assert not torch.equal(base, value("layers.0.attention.wk.weight", 1))
    assert torch.equal(base, value("layers.0.attention.wq.weight", 1))


def test_largest_seed_works():
    assert initial_value("layers.0.mlp.w_up.weight", (4, 4), 2**63 - 1, 1).isfinite().all()


def test_building_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    build_model(SMALL, 61)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "deviation"),
    [
        ("embed.weight", 0.02),
        ("head.weight", 0.02),
        ("layers.0.attention.wq.weight", 256**-0.5),
        ("layers.0.attention.wo.weight", 256**-0.5 / 8**0.5),
        ("layers.0.mlp.w_down.weight", 256**-0.5 / 8**0.5),
    ],
)
def test_deviation(name: str, deviation: float):
    value = initial_value(name, (512, 256), 0, 4)
    assert value.std().item() == pytest.approx(deviation, rel=0.02)
    assert abs(value.mean().item()) < deviation / 50


def test_norms_start_at_one():
    assert torch.equal(initial_value("norm.weight", (7,), 0, 2), torch.ones(7))
