"""Out of a run with adapters: merged into the base, or in peft's files."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.lora.models import lora, on_base, save_base, save_hf
from tests.small_runs import small
from tests.tools.export.test_model import heldout_loss, loaded
from zpp_lab.cli.main import main
from zpp_lab.config.schema import Config
from zpp_lab.tools.evaluate import evaluate
from zpp_lab.tools.export import export_hf, export_peft, export_quantized
from zpp_lab.tools.export.wire import parse_codec
from zpp_lab.train.trainer import run


def llama(folder: Path, base: str, *more: str, **adapters: Any) -> Config:
    start = save_base(folder / "base", vocab=256, dim=32, heads=4)
    config = small(folder, "train.lr=0.03", *more)
    return on_base(config, start, lora(base, **adapters))


def of_transformers(folder: Path, kind: str) -> Config:
    """A saved model of `kind` and adapters of rank 2 on it."""
    made = save_hf(folder / "base", kind, vocab=256)
    return replace(small(folder, "train.lr=0.03"), model=replace(made, lora=lora("q4", rank=2)))


@pytest.mark.parametrize("base", [pytest.param("raw", marks=pytest.mark.slow), "q4"])
def test_the_built_in_decoder_merged(base: str, tmp_path: Path) -> None:
    config = llama(tmp_path, base)
    summary = run(config)
    made = export_hf(tmp_path / "run", tmp_path / "out")
    model = loaded(tmp_path / "out", dtype=torch.float32)
    assert made.tensors == 2 * 9 + 3
    assert heldout_loss(model, config) == pytest.approx(summary["heldout_loss_master"], rel=1e-6)


@pytest.mark.parametrize(
    "kind", ["gpt2", *(pytest.param(k, marks=pytest.mark.slow) for k in ("opt", "qwen2"))]
)
def test_models_of_transformers_merged(kind: str, tmp_path: Path) -> None:
    config = of_transformers(tmp_path, kind)
    summary = run(config)
    export_hf(tmp_path / "run", tmp_path / "out")
    model = loaded(tmp_path / "out", dtype=torch.float32)
    assert heldout_loss(model, config) == pytest.approx(summary["heldout_loss_master"], rel=1e-6)


def test_the_wire_brings_the_adapters_and_not_their_sum_with_the_base(tmp_path: Path) -> None:
    config = llama(tmp_path, "q4", "recipe=w4")
    summary = run(config)
    assert summary["heldout_loss"] != summary["heldout_loss_master"]
    master, wire, rounded = evaluate([tmp_path / "run"], codecs=[parse_codec("bits=2")])
    assert (master.weights, wire.weights) == ("master", "wire")
    assert master.heldout_loss == pytest.approx(summary["heldout_loss_master"], abs=1e-7)
    assert wire.heldout_loss == pytest.approx(summary["heldout_loss"], abs=1e-7)
    assert rounded.heldout_loss != pytest.approx(wire.heldout_loss, abs=1e-4)
    with pytest.raises(ValueError, match="--codec bits=4"):
        export_quantized(tmp_path / "run", tmp_path / "out")
    made = export_quantized(tmp_path / "run", tmp_path / "out", codec=parse_codec("bits=4"))
    assert made.packed > 0


# ---------------------------------------------------------------------- peft


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.slow), "gpt2"])
def test_peft_itself(kind: str, tmp_path: Path) -> None:
    import peft  # takes seconds

    config = llama(tmp_path, "raw") if kind == "llama" else of_transformers(tmp_path, kind)
    raw = replace(config, model=replace(config.model, lora=lora("raw", rank=2)))
    summary = run(raw)
    export_peft(tmp_path / "run", tmp_path / "out")
    model = peft.PeftModel.from_pretrained(
        loaded(tmp_path / "base", dtype=torch.float32), str(tmp_path / "out")
    )
    found = heldout_loss(model.eval(), raw)
    assert found == pytest.approx(summary["heldout_loss_master"], rel=1e-6)


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = llama(tmp_path, "q4", "train.steps=2")
    run(config)
    assert (
        main(["export", str(tmp_path / "run"), "--to", "peft", "--out", str(tmp_path / "p")]) == 0
    )
    assert (
        main(["export", str(tmp_path / "run"), "--to", "peft", "--out", str(tmp_path / "p")]) == 2
    )
    assert str(tmp_path / "p") in capsys.readouterr().err
    shutil.rmtree(tmp_path / "base")
    save_base(tmp_path / "base", vocab=256, dim=32, heads=4)
    file = tmp_path / "base" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError):
        export_hf(tmp_path / "run", tmp_path / "out")
