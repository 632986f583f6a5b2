from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engines.fsdp_world import run_world
from tests.small_runs import small
from zpp_lab.data import open_data
from zpp_lab.data.prepare import open_tokenizer
from zpp_lab.data.tokenizer import text_bytes
from zpp_lab.files import HELDOUT, METRICS
from zpp_lab.models.loss import mean_loss, total_loss
from zpp_lab.train.evaluation import Heldout, open_heldout
from zpp_lab.train.trainer import run


def heldout(folder: Path, **changes: int) -> Heldout:
    config = small(folder, *(f"{key}={value}" for key, value in changes.items()))
    return open_heldout(config, open_data(config.data))


def test_every_target_knows_its_document(tmp_path: Path) -> None:
    config = small(tmp_path, "train.eval_tokens=100000")
    data = open_data(config.data)
    whole = open_heldout(config, data)
    offsets = data.offsets["heldout"]
    targets = torch.cat([y.flatten() for _, y in whole.batches]).numpy()
    stream = data.streams["heldout"][1 : len(targets) + 1]  # all of it, once
    assert np.array_equal(targets, stream)
    for document, (first, end) in enumerate(pairwise(offsets)):
        places = np.flatnonzero(whole.documents == document)
        assert places.min() == max(first - 1, 0)
        assert places.max() == min(end - 2, len(targets) - 1)
    assert all(a <= b for a, b in pairwise(whole.documents.tolist()))


def test_the_token_set_is_fixed_and_named_by_its_hash(tmp_path: Path) -> None:
    one, same = heldout(tmp_path), heldout(tmp_path, seed=7)
    assert one.hash == same.hash
    assert one.hash != heldout(tmp_path, **{"train.eval_tokens": 128}).hash
    assert one.hash != heldout(tmp_path, **{"data.seq_len": 8}).hash


def test_losses_are_added_by_document() -> None:
    documents = np.array([2, 2, 3, 7, 7, 7])
    batches = [(torch.arange(6).view(2, 3), torch.arange(6).view(2, 3))]
    losses = torch.tensor([0.1, 0.2, 3.0, 1.0, 1e8, 1.0])
    scores = torch.stack((losses, torch.tensor([1.0, 0, 0, 1, 1, 0])))
    found = Heldout(batches, documents).by_document(scores)
    assert found["documents"] == [2, 3, 7]
    assert found["tokens"] == [2, 1, 3]
    assert found["nats"] == [float(losses[:2].double().sum()), 3.0, 1e8 + 2]
    assert found["correct"] == [1, 0, 2]
    assert "bytes" not in found  # of a tokenizer that does not tell
    sizes = np.array([4, 0, 2, 1, 1, 1])
    assert Heldout(batches, documents, sizes).by_document(scores)["bytes"] == [4, 2, 3]


def test_sums_do_not_depend_on_order_or_batches() -> None:
    losses = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 10
    shuffled = losses[torch.randperm(1000, generator=torch.Generator().manual_seed(1))]
    assert mean_loss(losses) == mean_loss(shuffled)
    assert total_loss(losses) == math.fsum(losses.tolist())
    losses[3] = math.nan
    assert math.isnan(mean_loss(losses))
    assert mean_loss(torch.tensor([1.0, math.inf])) == math.inf


def test_a_run_tells_how_many_tokens_it_predicts_and_its_bits_a_byte(tmp_path: Path) -> None:
    summary = run(small(tmp_path))
    found = json.loads((tmp_path / "run" / HELDOUT).read_text())
    rows = [json.loads(line) for line in (tmp_path / "run" / METRICS).read_text().splitlines()]
    assert 0 < summary["heldout_correct"] == sum(found["correct"]) < 256
    assert summary["heldout_accuracy"] == summary["heldout_correct"] / 256
    assert [row["heldout_accuracy"] for row in rows if "heldout_loss" in row][-1] == (
        summary["heldout_accuracy"]
    )
    targets = torch.cat([y.flatten() for _, y in heldout(tmp_path).batches])
    count = int((targets != 0).sum())  # a token is a byte, and 0 ends a document
    assert summary["heldout_bytes"] == sum(found["bytes"]) == count
    bits = math.fsum(found["nats"]) / math.log(2) / count
    assert summary["heldout_bits_per_byte"] == pytest.approx(bits, rel=1e-14)


def test_tokens_know_their_bytes_of_text(tmp_path: Path) -> None:
    """Of a BPE, and of the same one as somebody else's file; not of one that is not byte-level."""
    config = small(tmp_path, "data.tokenizer=bpe", "data.vocab_size=280")
    data = open_data(config.data)
    text = "def naïve(x):\n    return x  # ü, 日本\n"
    tokens = open_tokenizer(config.data, data.folder).encode(text.encode())
    sizes = text_bytes(config.data, data.folder)
    assert sizes is not None
    assert len(tokens) < sizes[tokens].sum() == len(text.encode())
    assert sizes[open_tokenizer(config.data, data.folder).end] == 0
    file = data.folder / "tokenizer.json"
    outside = replace(config.data, tokenizer="hf", tokenizer_path=str(file))
    assert np.array_equal(text_bytes(outside, tmp_path), sizes)
    other = tmp_path / "tokenizer.json"
    other.write_text(file.read_text().replace('"ByteLevel"', '"Whitespace"'))
    assert text_bytes(replace(outside, tokenizer_path=str(other)), tmp_path) is None


def test_a_run_writes_its_documents(tmp_path: Path) -> None:
    config = small(tmp_path)
    summary = run(config)
    found = json.loads((tmp_path / "run" / HELDOUT).read_text())
    assert found["hash"] == heldout(tmp_path).hash
    assert sum(found["tokens"]) == 256
    assert len(found["documents"]) == 2  # half of four files
    mean = math.fsum(found["nats"]) / sum(found["tokens"])
    assert mean == pytest.approx(summary["heldout_loss"], rel=1e-14)


def test_a_run_killed_before_its_summary_writes_the_same_documents(tmp_path: Path) -> None:
    config = small(tmp_path, "recipe=qsdp")  # stochastic rounding: the step decides
    run(config)
    folder = tmp_path / "run"
    before = (folder / HELDOUT).read_bytes()
    (folder / HELDOUT).unlink()
    (folder / "summary.json").unlink()
    run(config)
    assert (folder / HELDOUT).read_bytes() == before


# Four batches, the last one shorter: two ranks take them in turn.
BOTH = ("recipe=zeropp", "cluster=2x2", "cluster.gpus_per_node=1", "train.steps=3")
BOTH += ("train.eval_tokens=3200",)


def _files(folder: str) -> str:
    """On every rank of a world: the run of the real engine; rank 0 reads what it wrote."""
    rank = torch.distributed.get_rank()
    real = ("engine=fsdp", "engine.device=cpu", "engine.ordered=true", f"run.dir={folder}/real")
    run(small(Path(folder), *BOTH, *real), rank)
    return (Path(folder) / "real" / HELDOUT).read_text() if rank == 0 else ""


def test_both_engines_write_the_same_bytes(tmp_path: Path) -> None:
    rows = [len(x) for x, _ in heldout(tmp_path, **{"train.eval_tokens": 3200}).batches]
    assert rows == [64, 64, 64, 8]
    run(small(tmp_path, *BOTH))
    real = run_world(2, _files, str(tmp_path))
    assert real == (tmp_path / "run" / HELDOUT).read_text()
