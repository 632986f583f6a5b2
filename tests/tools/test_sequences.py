"""What text a step had, beside the batches that the step got."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from zpp_lab.cli.main import main
from zpp_lab.config.compose import compose
from zpp_lab.config.schema import Config
from zpp_lab.data import open_data
from zpp_lab.data.prepare import open_tokenizer
from zpp_lab.tools.sequences import sequences
from zpp_lab.train.resume import note_data

LINES = [f"{word} = {word} + {i}\n" for i, word in enumerate(["one", "two", "three", "more"] * 60)]


def run(folder: Path, *words: str) -> tuple[Path, Config]:
    """A run's folder as far as its text needs it."""
    text = folder / "text"
    text.mkdir(exist_ok=True)
    for i in range(4):
        (text / f"f{i}.py").write_text("".join(LINES[40 * i :]))
    place = [f"data.path={text}", f"data.cache_dir={folder / 'cache'}", "tracking.wandb=off"]
    shape = ["data.seq_len=24", "train.batch_size=2", "cluster=1x2", "train.steps=5"]
    config = compose(["data=text", *place, *shape, *words])
    own = folder / "run"
    own.mkdir()
    (own / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    note_data(own, config.data, open_data(config.data))
    return own, config


@pytest.mark.parametrize(
    "words",
    [
        ["data.tokenizer=bytes"],
        ["data.tokenizer=bpe", "data.vocab_size=270", "train.micro_steps=2"],
        ["data.tokenizer=bytes", "data.draw_ranks=4"],
    ],
)
def test_sequences_are_those_of_the_step(tmp_path: Path, words: list[str]) -> None:
    own, config = run(tmp_path, *words)
    data = open_data(config.data)
    shown = list(sequences(own, [2, 4]))
    assert len(shown) == 2 * 2 * config.train.micro_steps * 2
    decode = open_tokenizer(config.data, data.folder).decode
    for s in shown:
        turns = (config.seed, s.step - 1, 2, config.train.micro_steps, 2, 24)
        inputs = data.step(*turns)(s.rank, s.micro)[0][s.row]
        assert s.text == decode(inputs.tolist())
        assert s.distinct == len(set(inputs.tolist()))
        whole = [(tmp_path / "text" / name).read_text() for name in s.documents]
        inside = s.text.replace("<|end|>", "\0").split("\0")
        assert all(any(piece in text for text in whole) for piece in inside)


def test_records_are_numbered(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"add {i}:", "completion": f" {i + 1}"}) for i in range(40)]
    (tmp_path / "all.jsonl").write_text("\n".join(lines))
    more = ["data=jsonl", f"data.path={tmp_path / 'all.jsonl'}", "data.tokenizer=bytes"]
    own, _ = run(tmp_path, *more)
    shown = list(sequences(own, [1]))
    assert len(shown) == 4
    for s in shown:
        assert all(name.startswith("record ") for name in s.documents)
        assert s.text.count("add ") == len(s.documents)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, _ = run(tmp_path, "data.tokenizer=bytes")
    assert main(["batch", str(own), "1,3-4", "--characters", "5"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split()[-3:] == ["repeats", "documents", "text"]
    assert [line.split()[0] for line in said[2:]] == ["1"] * 4 + ["3"] * 4 + ["4"] * 4


def test_a_changed_corpus_is_refused(tmp_path: Path) -> None:
    own, _ = run(tmp_path, "data.tokenizer=bytes")
    (tmp_path / "text" / "f1.py").write_text("".join(LINES))
    with pytest.raises(ValueError):
        list(sequences(own, [1]))
