"""The studies of size: what they promise, that they fit, and that their small twins run."""

from __future__ import annotations

import pytest

from tests.study.run.test_studies import study_of
from zpp_lab.config.compose import compose
from zpp_lab.train.memory.buffers import GIB
from zpp_lab.train.memory.outlook import Outlook

H200 = 139.8  # GiB


def outlook_of(study: str, arm: str, *more: str) -> Outlook:
    overrides = next(a.overrides for a in study_of(study).arms if a.name == arm)
    # the GPUs of one host read each other's memory, and its links are alike
    host = ["engine.transport=peer", "engine.gather=flat", "data.tokenizer=bytes"]
    host += ["data.tokenizer_path=null", "data.end_token=null"]
    config = compose([*study_of(study).overrides, *overrides, *host, *more])
    return Outlook.of(config, int(H200 * GIB))


@pytest.mark.parametrize(
    ("study", "arm"),
    [("pretrain_13b", "zeropp"), ("finetune_30b", "w2"), ("finetune_30b", "zeropp")],
)
def test_four_gpus_hold_it(study: str, arm: str) -> None:
    outlook = outlook_of(study, arm)
    assert outlook.fits
    assert outlook.estimate.peak < 0.95 * outlook.device  # room for the allocator's holes
