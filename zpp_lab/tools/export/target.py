"""What a run's model is to transformers: config.json, names, the order of rows, the tokenizer.

The built-in decoder becomes a LlamaForCausalLM; a model of transformers keeps its own names. The
run's tokenizer is written next to the weights, as transformers reads it.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zpp_lab.config.data import DataConfig
from zpp_lab.config.schema import Config
from zpp_lab.data.chat import chat_template
from zpp_lab.data.prepare import TOKENIZER
from zpp_lab.data.tokenizer import END, TEMPLATE, files_of, open_outside
from zpp_lab.files import package
from zpp_lab.models import build_model
from zpp_lab.models.llama_hf import hf_config, hf_name, to_halves, turned
from zpp_lab.runs.checkpoint.read import SavedWeights
from zpp_lab.tools.export.packed import linear_weights


def write_tokenizer(run: Path, data: DataConfig, folder: Path) -> None:
    """Write the run's tokenizer; bytes have none, and a missing BPE is named on stderr."""
    if data.tokenizer == "hf":
        for file in files_of(open_outside(data).file):
            shutil.copy(file, folder / file.name)
        if (chats := chat_template(data)) and chats.source:
            (folder / TEMPLATE).write_text(chats.source, encoding="utf-8")
    elif data.tokenizer == "bpe":
        _write_bpe(run / TOKENIZER, folder)


def closing_token(data: DataConfig) -> int:
    """Return the token that ends a document: of bytes it is 0, and a BPE of ours begins with it."""
    return open_outside(data).end if data.tokenizer == "hf" else 0


def _write_bpe(found: Path, folder: Path) -> None:
    if not found.is_file():
        print(f"the run has no {found}: the export has no tokenizer", file=sys.stderr)
        return
    model = package("tokenizers", "data.tokenizer=bpe").Tokenizer.from_file(str(found))
    model.decoder = package("tokenizers", "data.tokenizer=bpe").decoders.ByteLevel()
    model.save(str(folder / TOKENIZER))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(values, indent=2) + "\n", encoding="utf-8"
    )


@dataclass(frozen=True)
class Target:
    """A folder of transformers for the weights of a run."""

    config: dict[str, Any]
    names: dict[str, str]  # our parameter → the folder's tensor
    arrange: Callable[[str, Tensor], Tensor]  # our parameter and its rows → the folder's order
    buffers: dict[str, Tensor]  # what a folder holds besides parameters
    linears: dict[str, str]  # weights of Linears that are not tied → the folder's module
    modules: list[str]  # every Linear of the folder's model


def target_of(config: Config, saved: SavedWeights) -> Target:
    """Raise ValueError when the checkpoint is of another model than the config."""
    return (_hf if config.model.name == "hf" else _llama)(config, saved)


def _llama(config: Config, saved: SavedWeights) -> Target:
    settings = config.model
    vocabulary = saved.shapes["embed.weight"][0]
    model = build_model(settings, settings.vocab_size or vocabulary, "meta")
    _same_names(saved, model)
    linears = {n: hf_name(n).removesuffix(".weight") for n in linear_weights(model)}
    return Target(
        hf_config(settings, vocabulary, config.data.seq_len, closing_token(config.data)),
        {n: hf_name(n) for n in saved.shapes},
        partial(_in_halves, settings.dim // settings.heads),
        {},
        linears,
        sorted({*linears.values(), "lm_head"}),
    )


def _in_halves(head_dim: int, name: str, rows: Tensor) -> Tensor:
    return to_halves(rows, head_dim) if turned(name) else rows


def _hf(config: Config, saved: SavedWeights) -> Target:
    """Weights by their own names, once where they are tied, and the buffers that a folder holds."""
    model = build_model(config.model, 0, "meta")
    _same_names(saved, model)
    parameters = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    chosen = {n: b for n, b in model.state_dict().items() if n not in parameters}
    if chosen:
        start = model.start(config.seed)
        found = {n: start.buffer(n) for n in chosen}
        chosen = {n: b if found[n] is None else found[n] for n, b in chosen.items()}
    return Target(
        {**json.loads(model.config.to_json_string()), "architectures": [type(model).__name__]},
        {n: n for n in saved.shapes},
        lambda _, rows: rows,
        chosen,
        linear_weights(model),
        [n for n, m in model.named_modules() if isinstance(m, nn.Linear)],
    )


def _same_names(saved: SavedWeights, model: Any) -> None:
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    differing = sorted(n for n in {*shapes, *saved.shapes} if shapes.get(n) != saved.shapes.get(n))
    if differing:
        raise ValueError(
            "the checkpoint is of another model than the run's config; these differ: "
            f"{', '.join(differing)}"
        )
