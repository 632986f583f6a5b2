"""What transformers computes with is what training computed with, to the bit."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.models.hf_cases import settings
from tests.small_runs import newest, small
from tests.tools.export.checkpoints import gathered, heldout_losses, leave, restored
from tests.tools.export.test_model import heldout_loss, llama, loaded
from zpp_lab.config.schema import Config
from zpp_lab.models.llama_hf import hf_name, to_halves, turned
from zpp_lab.runs.checkpoint.read import Saved
from zpp_lab.runs.checkpoint.write import Checkpoints, Saving
from zpp_lab.tools.evaluate import evaluate
from zpp_lab.tools.export import export_quantized
from zpp_lab.tools.export.model import open_run
from zpp_lab.tools.export.wire import WireWeights, parse_codec
from zpp_lab.train.trainer import run

CODECS = {
    "4 bits over several rows": ["recipe=w4"],
    "8 bits of a random draw": ["recipe=qsdp", "recipe.weights.block_size=16"],
    "6 bits, bf16 scales": ["recipe=w6", "recipe.weights.scale_dtype=bf16"],
    "2 bits, the head as it is": ["recipe=w2", "recipe.exempt.names=[head*]", "cluster=1x8"],
    "two widths": ["recipe=w4", "recipe.rules=[{name: '*mlp*', set: {bits: 8}}]"],
}


def theirs(weights: dict[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """The built-in decoder's weights under LlamaForCausalLM's names."""
    return {hf_name(n): to_halves(w, head_dim) if turned(n) else w for n, w in weights.items()}


@torch.no_grad()
def check_model(folder: Path, want: dict[str, Tensor], **how: Any) -> Any:
    """Every weight and every logit of the folder's model are those of a model made of `want`."""
    model = loaded(folder, **how)
    tokens = torch.arange(12)[None]
    logits = model(input_ids=tokens).logits  # unpacks the weights
    state = model.state_dict()
    differing = [n for n in want if not torch.equal(state[n], want[n])]
    assert not differing
    dtype = next(iter(want.values())).dtype
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    plain.load_state_dict(want, strict=False)
    plain.tie_weights()
    assert torch.equal(plain(input_ids=tokens).logits, logits)
    return model


@pytest.mark.parametrize("case", CODECS)
def test_the_built_in_decoder(case: str, tmp_path: Path) -> None:
    config = llama(tmp_path, "grouped", *CODECS[case])
    engine = leave(config)
    made = export_quantized(tmp_path / "run", tmp_path / "out", limit=8000)
    assert (made.step, made.requantized) == (3, 0)
    want = theirs(gathered(engine), 8)
    check_model(tmp_path / "out", want)
    text = (tmp_path / "out" / "README.md").read_text()
    assert ("takes one kind of group for all" in text) == (case == "two widths")
    if case != "two widths":
        at_once = transformers.CompressedTensorsConfig(dequantize=True)
        check_model(tmp_path / "out", want, quantization_config=at_once)


def test_a_trained_run_keeps_its_heldout_loss(tmp_path: Path) -> None:
    config = llama(tmp_path, "tied", "recipe=zeropp", "recipe.weights.bits=4")
    summary = run(config)
    export_quantized(tmp_path / "run", tmp_path / "out")
    model = loaded(tmp_path / "out")
    assert heldout_loss(model, config) == pytest.approx(summary["heldout_loss"], rel=1e-6)
    assert summary["heldout_loss"] != summary["heldout_loss_master"]
    said = json.loads((tmp_path / "out" / "zpp_lab.json").read_text())
    assert said["exact"]
    assert said["decoded"] == ["model.embed_tokens.weight"]
    assert said["run"] == {"recipe": "zeropp", "seed": 1, "step": 12}
    assert "as training used them" in (tmp_path / "out" / "README.md").read_text()


BETWEEN_NODES = [
    "recipe.weights={bits:8,scale_dtype:bf16}",
    "recipe.weights_update={bits:4,block_size:16}",
    "train.param_dtype=bf16",
]
PARTS = {  # shards of parts have padded rows
    "8 bits": ["recipe=w8", "cluster=1x8", "cluster.gpus_per_node=6"],
    "4 bits": ["recipe=w4", "cluster=1x4", "recipe.weights.block_size=16"],
    "drawn": ["recipe=qsdp", "cluster=2x4", "recipe.exempt={max_ndim:0,below_numel:600}"],
    "4 bits between nodes": ["recipe=amsp_node", "cluster=2x4", *BETWEEN_NODES],
    "drawn differences": ["recipe=sdp4bit", "cluster=2x4", "recipe.weights={bits:6}"],
}


@pytest.mark.parametrize("case", PARTS)
def test_weights_of_tensor_parts(case: str, tmp_path: Path) -> None:
    config = llama(tmp_path, "grouped", *PARTS[case], "cluster.tp=2", "model.ffn=40")
    summary, want = run(config), gathered(restored(config))
    weights = WireWeights(*open_run(tmp_path / "run"))
    assert [n for n, w in want.items() if not torch.equal(weights.decoded(n), w)] == []
    rows = {row.weights: row.heldout_loss for row in evaluate([tmp_path / "run"])}
    near = partial(pytest.approx, rel=1e-6 if weights.dtype == torch.float32 else 1e-3)
    assert rows["wire"] == near(summary["heldout_loss"])
    assert rows["master"] == near(summary["heldout_loss_master"])
    assert export_quantized(tmp_path / "run", tmp_path / "out", unfit="dense").step == 12
    check_model(tmp_path / "out", theirs(want, 8))


@pytest.mark.parametrize("kind", ["gpt_neox", "opt", "qwen2"])
def test_models_of_transformers(kind: str, tmp_path: Path) -> None:
    config = small(tmp_path, "recipe=w4", "recipe.weights.block_size=16")
    config = replace(config, model=settings(kind, {"vocab_size": 256}))
    engine = leave(config)
    export_quantized(tmp_path / "run", tmp_path / "out")
    model = check_model(tmp_path / "out", gathered(engine))
    own = float(heldout_losses(engine, config).double().mean())
    assert heldout_loss(model, config) == pytest.approx(own, rel=1e-6)


def test_weights_that_are_no_linear(tmp_path: Path) -> None:
    config = small(tmp_path, "recipe=w4", "recipe.weights.hadamard=16")
    config = replace(config, model=settings("gpt2", {"vocab_size": 256}))
    engine = leave(config)
    with pytest.raises(ValueError, match="Linear"):
        export_quantized(tmp_path / "run", tmp_path / "out")
    made = export_quantized(tmp_path / "run", tmp_path / "out", unfit="dense")
    assert made.packed == 0
    state = loaded(tmp_path / "out").state_dict()
    assert all(torch.equal(state[n], w) for n, w in gathered(engine).items())
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize("tp", [1, 2])
def test_rounding_after_training(tp: int, tmp_path: Path) -> None:
    """A plain model, rounded with a wire's codec, is what that wire makes of the same masters."""
    words = ["recipe.exempt.names=[embed*]", "cluster=1x4", f"cluster.tp={tp}"]
    engine = leave(llama(tmp_path, "plain", "recipe=w4", *words))
    leave(llama(tmp_path, "plain", *words, f"run.dir={tmp_path}/plain"))
    export_quantized(tmp_path / "plain", tmp_path / "out", codec=parse_codec("bits=4"))
    check_model(tmp_path / "out", theirs(gathered(engine), 16))
    text = (tmp_path / "out" / "README.md").read_text()
    assert "rounded to nearest with `bits=4`" in text
    assert not json.loads((tmp_path / "out" / "zpp_lab.json").read_text())["exact"]


@pytest.mark.parametrize(
    "more",
    [
        ["recipe.weights.hadamard=16"],
        ["recipe.weights.symmetric=false"],
        ["recipe.weights.codec=normal"],
    ],
)
def test_a_codec_that_does_not_fit(more: list[str], tmp_path: Path) -> None:
    config = llama(tmp_path, "plain", "recipe=w4", *more)
    engine = leave(config)
    with pytest.raises(ValueError, match="--requantize"):
        export_quantized(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    made = export_quantized(tmp_path / "run", tmp_path / "near", unfit="requantize")
    assert (made.packed, made.requantized, made.decoded) == (15, 15, 1)
    assert "Not the numbers of training" in (tmp_path / "near" / "README.md").read_text()
    masters = theirs({n: p.detach() for n, p in engine.cell.master.items()}, 16)
    model = loaded(tmp_path / "near")
    heldout_loss(model, config)
    # of normal levels the outermost lies further inside the range than half a step
    assert_near(model.state_dict(), masters, 9 if "normal" in more[0] else 14)
    export_quantized(tmp_path / "run", tmp_path / "dense", unfit="dense")
    state = loaded(tmp_path / "dense").state_dict()
    want = theirs(gathered(engine), 16)
    assert all(torch.equal(state[n], w) for n, w in want.items())


def assert_near(state: dict[str, Tensor], masters: dict[str, Tensor], steps: int) -> None:
    """Off by no more than a step of so many in the weight's whole range, and off at all."""
    for name, master in masters.items():
        worst = float((state[name] - master).abs().max())
        assert worst <= float(master.max() - master.min()) / steps + 1e-6
    assert any(not torch.equal(state[n], m) for n, m in masters.items())


def left(folder: Path, *overrides: str) -> Config:
    config = llama(folder, "plain", *overrides)
    leave(config)
    return config


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    left(tmp_path, "recipe=w4")
    state = Saved(newest(tmp_path / "run")).state()
    state["weights"]["head.weight"][3, 3] = torch.nan
    Checkpoints(tmp_path / "run" / "checkpoints", 1, Saving(host=None)).save(3, state)
    with pytest.raises(ValueError, match=r"head\.weight"):
        export_quantized(tmp_path / "run", tmp_path / "out")
