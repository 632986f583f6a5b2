"""The reward `learned`: scores by a run of `task=reward`, or by a reward model of transformers.

Rank 0 holds it whole, in fp32. It reads the very tokens that were sampled, so it has to have the
policy's tokenizer, and gives the score at a completion's last token, where training has read it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zpp_lab.config.flat import stored_config
from zpp_lab.config.schema import Config
from zpp_lab.data import PackedData, TokenData
from zpp_lab.data.prepare import TOKENIZER
from zpp_lab.data.tokenizer import check_folder, open_outside
from zpp_lab.files import (
    CONFIG,
    below,
    damaged,
    missing,
    package,
    parse_json,
    read_yaml,
    write_atomic,
)
from zpp_lab.models import build_model
from zpp_lab.models.start import WeightFiles, differences, materialize
from zpp_lab.runs.checkpoint.read import open_saved
from zpp_lab.train.memory.activations import FP32, Activations
from zpp_lab.train.resume import check_start, vocab_size

_DIGEST = "learned.sha256"
_ROWS = 64  # that are scored at once
Score = Callable[[Tensor], Tensor]  # int64 [N, T] → fp32 [N, T]
_FIX = "set rl.learned to a run of task=reward, or to what it was exported to"


class Learned:
    """A reward by a model's scores: what they mean is their order for one prompt."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.model, self.score = (_run if _is_run(path) else _folder)(path, device)
        self.path, self.device = path, device

    def check_same(self, run: Path, resumes: bool) -> None:
        """Write a digest of the weights to the folder `run`; ValueError where it `resumes` with
        others."""
        digest = hashlib.sha256()
        for p in self.model.parameters():
            digest.update(p.detach().cpu().numpy().tobytes())
        file, found = run / _DIGEST, digest.hexdigest()
        if resumes and file.is_file() and file.read_text().strip() != found:
            raise ValueError(
                f"rl.learned={self.path} has other weights than when {run} began: restore them, or "
                "start over (run.resume=false)"
            )
        write_atomic(file, found + "\n")

    @torch.no_grad()
    def __call__(
        self,
        prompts: list[str],
        completions: list[str],
        prompt_ids: list[list[int]],
        completion_ids: list[list[int]],
        **columns: Any,
    ) -> list[float]:
        """Return each completion's score; without the end marker, which prompts begin with."""
        pairs = zip(prompt_ids, completion_ids, strict=True)
        rows = [[*p, *(c[:-1] if c and c[-1] == p[0] else c)] for p, c in pairs]
        lengths = np.array([len(row) for row in rows])
        tokens = np.zeros((len(rows), lengths.max()), np.int64)
        for own, row in zip(tokens, rows, strict=True):
            own[: len(row)] = row
        found: list[float] = []
        for first in range(0, len(rows), _ROWS):
            part = slice(first, first + _ROWS)
            scores = self.score(torch.from_numpy(tokens[part]).to(self.device)).cpu()
            last = torch.from_numpy(lengths[part, None] - 1)
            found += scores.float().gather(1, last)[:, 0].tolist()
        return found


def check_learned(path: Path) -> None:
    """ValueError where `rl.learned` is neither a run of task=reward nor a folder with a scalar
    head. Reads its settings alone."""
    named = f"rl.learned={path}"
    if not path.is_dir():
        raise ValueError(f"{named}: {missing(path)}; {_FIX}")
    if _is_run(path):
        task = stored_config(read_yaml(path / CONFIG)).task
        if task != "reward":
            raise ValueError(f"{named} is a run of task={task}, without a scalar head; {_FIX}")
        if not (path / "checkpoints").is_dir():
            raise ValueError(f"{named} has no checkpoints (train.keep_checkpoints=0); {_FIX}")
        return
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{named} is neither a run ({CONFIG}) nor a model (config.json)"
            f"{below(path, CONFIG)}; {_FIX}"
        )
    found = _settings(path)
    kinds = found.get("architectures") or ["none"]
    if not str(kinds[0]).endswith("ForSequenceClassification"):
        raise ValueError(f"{named} is a {kinds[0]}, without a scalar head; {_FIX}")
    named_labels = found.get("id2label")  # transformers leaves it out for two, its default
    labels = len(named_labels) if named_labels else found.get("num_labels", 2)
    if labels != 1:
        raise ValueError(f"{named} is a classifier with num_labels={labels}, not 1; {_FIX}")


def check_tokenizer(config: Config, data: TokenData | PackedData) -> None:
    """ValueError where the reward model has another tokenizer than the policy's `data`, or fewer
    tokens. Of a folder without a tokenizer the number of tokens is all that is known."""
    if not config.rl.learned:
        return
    path = Path(config.rl.learned)
    if _is_run(path):
        check_start("rl.learned", path, data)
        return
    kind, own = config.data.tokenizer, data.folder / TOKENIZER
    file = open_outside(config.data).file if kind == "hf" else own if kind == "bpe" else None
    check_folder(path, file, f"{_FIX}, with the policy's tokenizer")
    count = int(_settings(path).get("vocab_size", 0))
    if count < data.vocab_size:
        raise ValueError(
            f"rl.learned={path} has {count} tokens, the policy {data.vocab_size}: {_FIX}, with the "
            "policy's tokenizer"
        )


def held_bytes(config: Config) -> int:
    """Return what rank 0 holds while `rl.learned` scores: weights, and what a forward of the
    built-in decoder takes."""
    path = Path(str(config.rl.learned))
    check_learned(path)
    if not _is_run(path):
        stored = WeightFiles(path)
        return FP32 * sum(math.prod(stored.shape(name)) for name in stored.files)
    model = stored_config(read_yaml(path / CONFIG)).model
    made = build_model(model, vocab_size(path) or 0, "meta")
    tokens = _ROWS * config.data.seq_len
    passing = Activations(model, made.vocab_size, tokens, FP32).passing
    return FP32 * sum(p.numel() for p in made.parameters()) + int(passing)


def _is_run(path: Path) -> bool:
    return (path / CONFIG).is_file()


def _settings(path: Path) -> dict[str, Any]:
    file, fix = path / "config.json", "export the run again"
    found = parse_json(file, fix)
    if not isinstance(found, dict):
        raise damaged(file, "no mapping", fix)
    return found


def _run(path: Path, device: torch.device) -> tuple[nn.Module, Score]:
    config, saved = stored_config(read_yaml(path / CONFIG)), open_saved(path)
    model = build_model(config.model, vocab_size(path) or 0, "meta")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if faults := differences(shapes, saved.shapes):
        raise ValueError(f"rl.learned={path}: its checkpoint is of another model: {faults}; {_FIX}")
    materialize(model, device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(saved.read(name))
    return model, lambda tokens: model(tokens)


def _folder(path: Path, device: torch.device) -> tuple[nn.Module, Score]:
    kind = package("transformers", f"rl.learned={path}").AutoModelForSequenceClassification
    model, found = kind.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    head = getattr(model, "score", None)
    if found["missing_keys"] or model.config.num_labels != 1 or head is None:
        raise ValueError(
            f"rl.learned={path} ({type(model).__name__}) has no `score` of one number "
            f"(num_labels={model.config.num_labels}); {_FIX}"
        )
    model.eval().to(device)

    def score(tokens: Tensor) -> Tensor:
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return head(hidden)[..., 0]

    return model, score
