"""The README's example of finetuning, at the size of a test."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import tokenizers
import transformers

from tests.models.hf_cases import SMALL
from zpp_lab.cli.main import main

README = Path(__file__).parents[2] / "README.md"
LETTERS = [chr(i) for i in range(32, 127)]
TINY = (
    "data.seq_len=48 data.heldout_every=4 train.steps=3 train.eval_tokens=512 train.batch_size=1 "
    "engine.device=cpu engine.threads=1 tracking.wandb=off data.cache_dir=cache"
)


def commands() -> tuple[str, list[str]]:
    """(what `mine` holds, the commands below it)."""
    section = README.read_text().split("## Finetune on your own records")[1]
    block = re.search(r"```sh\n(.*?)```", section, re.S)
    assert block
    mine, rest = re.fullmatch(r'mine="(.*?)"\n(.*)', block[1], re.S).groups()  # type: ignore[union-attr]
    return " ".join(mine.split()), [line.split("#")[0] for line in rest.splitlines()]


def write_model(folder: Path) -> None:
    """A Llama of two layers with a tokenizer of single letters."""
    words = {letter: i for i, letter in enumerate(["<end>", "<odd>", *LETTERS])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<odd>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    model.add_special_tokens(["<end>"])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")
    made.save_pretrained(folder)
    shape = {**SMALL, "vocab_size": len(words), "intermediate_size": 24}
    config = transformers.LlamaConfig(**shape, num_key_value_heads=1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.slow
def test_three_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "MODEL")
    lines = [{"prompt": f"{i} plus 1?", "completion": f" {i + 1}"} for i in range(40)]
    (tmp_path / "RECORDS").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    mine, rest = commands()
    assert len(rest) == 3
    for command in rest:
        name, *words = shlex.split(command.replace("$mine", f"{mine} {TINY}"))
        assert name == "zpp-lab"
        merged = {w.partition("=")[0]: w for w in words}  # the last one of a setting wins
        assert main(list(merged.values())) == 0, command
    said = capsys.readouterr().out
    assert re.search(r"held-out loss \d\.\d{4}, perplexity \d+(\.\d+)?, after 3 steps", said)
    assert re.search(r"Arm +Verdict +Gap +Bytes +Seeds", said)
    for arm in ("zero3", "w4"):
        summary = json.loads((tmp_path / "runs" / "mine" / arm / "summary.json").read_text())
        assert summary["steps"] == 3
        documents = json.loads((tmp_path / "runs" / "mine" / arm / "heldout.json").read_text())
        wanted = sum(len(line["completion"]) + 1 for line in lines[3::4])
        assert sum(documents["tokens"]) == wanted
