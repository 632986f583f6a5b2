"""Evaluation gives a run's own losses back to the bit, and refuses to compare other tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.small_runs import CORPUS, small
from tests.tools.export.checkpoints import leave
from zpp_lab.cli.main import main
from zpp_lab.tools.evaluate import evaluate
from zpp_lab.tools.export import export_hf
from zpp_lab.train.trainer import run


def test_a_run_and_its_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = run(small(tmp_path, "recipe=qsdp", "train.param_dtype=bf16"))
    own, packed, whole = (str(tmp_path / n) for n in ("run", "packed", "whole"))
    words = ["export", own, "--to", "hf", "--out"]
    assert main([*words, packed, "--quantized"]) == 0
    assert main([*words, whole]) == 0
    assert "8 weights packed (0 of them rounded again), 1 stored as they" in capsys.readouterr().out
    out = tmp_path / "made" / "rows.json"
    said = ["evaluate", packed, own, whole, "--codec", "bits=4", "--out", str(out)]
    capsys.readouterr()
    assert main(said) == 0
    shown = capsys.readouterr()
    assert "256 held-out tokens" in shown.out
    assert "it/s" not in shown.err  # progress bars of transformers and compressed-tensors
    rows = json.loads(out.read_text())
    kinds = ["transformers", "master", "wire", "nearest bits=4", "transformers"]
    assert [row["weights"] for row in rows] == kinds
    losses = [row["heldout_loss"] for row in rows]
    assert losses[1:3] == [summary["heldout_loss_master"], summary["heldout_loss"]]
    for key in ("heldout_accuracy", "heldout_bits_per_byte"):
        assert rows[2][key] == summary[key]
    assert losses[0] == pytest.approx(losses[2], rel=2e-3)  # bf16 on both sides, not alike
    assert rows[0]["dtype"] == "bfloat16"
    assert rows[4]["dtype"] == "float32"
    assert (rows[0]["recipe"], rows[0]["step"], rows[4]["recipe"]) == ("qsdp", 12, "")
    assert len({row["heldout_hash"] for row in rows}) == 1
    assert rows[2]["dtype"] == "bfloat16"


def test_a_corpus_that_has_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A BPE that is trained anew has other tokens; of bytes the held-out ones may be known."""
    run(small(tmp_path, "train.steps=2"))
    bpe = ("data.tokenizer=bpe", "data.vocab_size=280", f"run.dir={tmp_path}/bpe")
    run(small(tmp_path, "train.steps=2", *bpe))
    evaluate([tmp_path / "run"])
    evaluate([tmp_path / "bpe"])
    assert "other tokens" not in capsys.readouterr().err
    for file in (tmp_path / "texts").iterdir():
        file.write_text(CORPUS.replace("def", "class").replace("return", "yield"))
    evaluate([tmp_path / "run"])
    assert "other tokens" in capsys.readouterr().err
    with pytest.raises(ValueError, match="tokenizer"):
        evaluate([tmp_path / "bpe"])


def test_only_tokens_that_count_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    record = {"prompt": "what is it?", "completion": "no"}
    file.write_text("".join(json.dumps(record) + "\n" for _ in range(200)))
    config = small(tmp_path, "train.steps=2")
    data = replace(config.data, name="jsonl", path=str(file), seq_len=24, heldout_every=2)
    run(replace(config, data=data))
    (row,) = evaluate([tmp_path / "run"])
    said = json.loads((tmp_path / "run" / "heldout.json").read_text())
    assert row.tokens == sum(said["tokens"])


def test_folders_need_somebody_s_tokens(tmp_path: Path) -> None:
    leave(small(tmp_path))
    own, folder = tmp_path / "run", tmp_path / "folder"
    export_hf(own, folder)
    with pytest.raises(ValueError, match="--data RUN"):
        evaluate([folder])
    (row,) = evaluate([folder], data=own)
    assert row.heldout_loss == pytest.approx(evaluate([own])[0].heldout_loss, rel=1e-6)
    leave(small(tmp_path, "data.tokenizer=bpe", "data.vocab_size=280", f"run.dir={tmp_path}/bpe"))
    with pytest.raises(ValueError, match=r"256 .*280"):
        evaluate([folder], data=tmp_path / "bpe")


def test_a_folder_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    """transformers would draw them at random and give a loss for that."""
    from safetensors.torch import load_file, save_file

    leave(small(tmp_path))
    own, folder = tmp_path / "run", tmp_path / "folder"
    export_hf(own, folder)
    file = folder / "model.safetensors"
    state = load_file(file)
    gone = "model.layers.0.mlp.up_proj.weight"
    save_file({n: t for n, t in state.items() if n != gone}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=gone):
        evaluate([folder], data=own)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match="transformers"):
        evaluate([folder], data=own)
