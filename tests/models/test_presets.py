from pathlib import Path

import pytest
from omegaconf import OmegaConf

from zpp_lab.config.load import load
from zpp_lab.config.model import ModelConfig
from zpp_lab.models import build_model

FOLDER = Path(__file__).parents[2] / "conf" / "model"

PARAMETERS = {
    "tiny": 393_856,
    "1m": 1_035_360,
    "3m": 3_295_488,
    "10m": 10_818_432,
    "30m": 28_730_880,
    "125m": 134_105_856,
    "350m": 367_969_280,
    "1_3b": 1_345_423_360,
    "6_7b": 6_738_415_616,  # as published for Llama 7B
    "13b": 13_015_864_320,  # as published for Llama 13B
    "32_5b": 32_528_943_616,  # as published for Llama 33B
}


def preset(name: str) -> ModelConfig:
    return load(ModelConfig, OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml")))


def test_every_preset_is_listed_here():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {*PARAMETERS, "hf"}


@pytest.mark.parametrize("name", PARAMETERS)
def test_preset(name: str):
    assert preset(name).preset == name
    model = build_model(preset(name), 256, "meta")
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
