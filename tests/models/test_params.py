import pytest

from zpp_lab.config.model import ModelConfig
from zpp_lab.models import PARAM_CLASSES, build_model, param_class
from zpp_lab.models.params import feeds_residual


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("embed.weight", "embedding"),
        ("layers.3.attention.wq.weight", "attention"),
        ("layers.3.mlp.w_gate.weight", "mlp"),
        ("head.weight", "head"),
        ("model.layers.0.self_attn.q_proj.weight", "attention"),
        ("model.layers.0.post_attention_layernorm.weight", "norm"),
        ("transformer.wte.weight", "embedding"),
        ("transformer.h.0.attn.c_attn.bias", "attention"),
        ("transformer.ln_f.weight", "norm"),
        ("conv.weight", "other"),
    ],
)
def test_param_class(name: str, kind: str):
    assert param_class(name) == kind


def test_every_parameter_of_the_decoder_has_a_kind():
    names = [n for n, _ in build_model(ModelConfig(), 256, "meta").named_parameters()]
    assert {param_class(n) for n in names} == set(PARAM_CLASSES) - {"other"}


def test_two_projections_of_a_block_are():
    names = [n for n, _ in build_model(ModelConfig(layers=3), 256, "meta").named_parameters()]
    assert len([n for n in names if feeds_residual(n)]) == 6
