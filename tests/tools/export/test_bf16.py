"""A run in bf16: its folder gives back its weights to the bit, loaded as the folder's card says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.tools.export.checkpoints import gathered, leave
from tests.tools.export.test_model import llama, loaded
from tests.tools.export.test_quantized import theirs
from zpp_lab.tools.evaluate import load_folder
from zpp_lab.tools.export import export_quantized
from zpp_lab.tools.export.model import open_run
from zpp_lab.tools.export.packed import codes_with_zero_points
from zpp_lab.tools.export.wire import WireWeights

BF16 = "train.param_dtype=bf16"
TOKENS = torch.arange(12)[None]


def as_the_card_says(folder: Path) -> Any:
    """The card's own lines, run."""
    text = (folder / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {"FOLDER": str(folder)}
    exec(code, names)
    return names["model"]


@torch.no_grad()
def check(model: Any, folder: Path, want: dict[str, Tensor]) -> None:
    """Weights and logits are those of a plain bf16 model made of `want`, to the bit."""
    logits = model(input_ids=TOKENS).logits  # unpacks what is packed still
    state = model.state_dict()
    assert [n for n in want if state[n].dtype != torch.bfloat16] == []
    assert [n for n in want if not torch.equal(state[n], want[n])] == []
    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    plain.load_state_dict(want)
    assert torch.equal(plain(input_ids=TOKENS).logits, logits)


@pytest.mark.parametrize("scale_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("bits", [8, 6, 4, 2])
def test_every_weight(bits: int, scale_dtype: str, tmp_path: Path) -> None:
    codec = [f"recipe.weights.bits={bits}", f"recipe.weights.scale_dtype={scale_dtype}"]
    want = theirs(gathered(leave(llama(tmp_path, "plain", "recipe=w4", *codec, BF16))), 16)
    made = export_quantized(tmp_path / "run", tmp_path / "out")
    assert (made.packed, made.requantized) == (15, 0)
    said = json.loads((tmp_path / "out" / "config.json").read_text())["dtype"]
    assert said == {"bf16": "bfloat16", "fp32": "float32"}[scale_dtype]
    check(load_folder(tmp_path / "out"), tmp_path / "out", want)
    check(as_the_card_says(tmp_path / "out"), tmp_path / "out", want)
    if scale_dtype == "bf16":
        check(loaded(tmp_path / "out"), tmp_path / "out", want)
    elif bits != 2:  # whose scales are weights of the run, in bf16 already
        with pytest.raises(ValueError, match=r"--dtype.*scale_dtype"):
            export_quantized(tmp_path / "run", tmp_path / "again", dtype="bf16")


@pytest.mark.parametrize("scale_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("bits", [8, 6, 4, 2])
def test_asymmetric(bits: int, scale_dtype: str, tmp_path: Path) -> None:
    """Decoded they are the wire's; requantized, those of the card: decoded in fp32, rounded."""
    codec = [f"recipe.weights.bits={bits}", f"recipe.weights.scale_dtype={scale_dtype}"]
    more = ["recipe=w4", "recipe.weights.symmetric=false", *codec, BF16]
    want = gathered(leave(llama(tmp_path, "plain", *more)))
    run, out, near = (tmp_path / n for n in ("run", "out", "near"))
    export_quantized(run, out, unfit="dense")
    check(load_folder(out), out, theirs(want, 16))
    check(as_the_card_says(out), out, theirs(want, 16))
    export_quantized(run, near, unfit="requantize")
    weights = WireWeights(*open_run(run))
    for name in want:
        if name.split(".")[-2] not in ("embed", "attention_norm", "mlp_norm", "norm"):
            codes = codes_with_zero_points(weights.codecs[name], weights.source(name), 8)
            want[name] = codes.decoded().bfloat16()
    check(load_folder(near), near, theirs(want, 16))
    check(as_the_card_says(near), near, theirs(want, 16))
