"""Sampled success on held-out prompts: the readout of reinforcement learning.

A completion succeeds where the first of `rl.rewards` scores it 1 or more. Completions are sampled
at `rl.temperature` from the master weights, whatever the rollouts' wire carries, with noise that
follows from seed and step: arms of a study share it. The share of failures stands where other runs
have their held-out loss, prompts where those have documents, so it is judged as a loss is.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from zpp_lab.config.schema import Config
from zpp_lab.data.prompts import Prompts, text_of
from zpp_lab.data.tokenizer import Tokenizer
from zpp_lab.engines.base import Engine
from zpp_lab.files import COMPLETIONS, write_atomic
from zpp_lab.runs.metrics import Record
from zpp_lab.train.rl.rollouts import draw
from zpp_lab.train.rl.source import Judge

_ROWS, _SHOWN = 256, 8


class SuccessReadout:
    """Held-out prompts, and how often completions of them succeeded at the last evaluation."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        prompts: Prompts,
        tokenizer: Tokenizer,
        judge: Judge,
        folder: Path,
        width: int,
        offset: int,
    ) -> None:
        """offset: the number of training prompts, so that held-out ones have noise of their own."""
        self.config, self.engine, self.prompts, self.tokenizer = config, engine, prompts, tokenizer
        self.judge, self.path, self.width, self.offset = judge, folder / COMPLETIONS, width, offset
        self.draws = config.rl.heldout_draws
        self.right: np.ndarray | None = None  # of each prompt's draws
        world, rows = config.cluster.readers, len(prompts) * self.draws
        size = min(_ROWS, -(-rows // world))
        count = -(-rows // (world * size))
        # what is missing of the last calls repeats the last row
        self.calls = np.arange(count * world * size).clip(max=rows - 1).reshape(count, world, size)

    def __len__(self) -> int:
        return len(self.prompts) * self.draws

    @cached_property
    def hash(self) -> str:
        """sha256 of every prompt and draw: equal hashes mean that successes can be compared."""
        digest = hashlib.sha256(str(self.draws).encode())
        for tokens in self.prompts.tokens:
            digest.update(str(tokens.shape).encode() + tokens.astype("<i8").tobytes())
        return digest.hexdigest()

    def evaluate(self, step: int) -> Record:
        """Return the share of failures and what else the record has, after `step` steps."""
        places = np.arange(len(self.prompts)).repeat(self.draws)
        samples = np.tile(np.arange(self.draws), len(self.prompts))
        tokens = [self.prompts.tokens[i] for i in places]
        with self.engine.rollout(step, "rollout", counted=False, wire=False) as policy:
            at = (self.width, step, self.tokenizer.end, self.calls)
            made = draw(self.config, policy, tokens, self.offset + places, samples, *at)
        texts = [text_of(self.tokenizer, own) for own in made.completions()]
        given = [self.prompts.texts[i] for i in places]
        columns = self.prompts.of(places.tolist()) | made.ids()
        scores = self.judge.score(f"held out after step {step}", given, texts, columns)
        success = scores.values[0] >= 1
        self.right = success.reshape(-1, self.draws).sum(1)
        if self.judge.rank == 0:
            self._show(step, given, texts, scores.values)
        lengths = (made.lengths - made.prompts).mean()
        failed = int((~success).sum()) / len(success)
        return {
            "heldout_loss": failed,
            "heldout_accuracy": 1 - failed,
            "heldout_length": float(lengths),
        }

    def _show(self, step: int, given: list[str], texts: list[str], values: np.ndarray) -> None:
        """Write examples to completions.jsonl; a repeated step replaces its own."""
        text = self.path.read_text(encoding="utf-8") if self.path.is_file() else ""
        lines = [line for line in text.splitlines() if json.loads(line)["step"] < step]
        for i in range(0, len(given), max(1, -(-len(given) // _SHOWN))):
            own = dict(zip(self.config.rl.rewards, values[:, i].tolist(), strict=True))
            shown = {"step": step, "prompt": given[i], "completion": texts[i], "rewards": own}
            lines.append(json.dumps(shown, ensure_ascii=False))
        write_atomic(self.path, "\n".join(lines) + "\n")

    def final(self, step: int) -> tuple[Record, dict[str, Any]]:
        """Evaluate after the last step, if needed. Returns what the summary has of it, and
        heldout.json: failures of each prompt in place of nats."""
        if self.right is None:
            self.evaluate(step)
        assert self.right is not None
        right = int(self.right.sum())
        facts = {
            "heldout_loss_master": 1 - right / len(self),
            "heldout_correct": right,
            "heldout_accuracy": right / len(self),
            "heldout_success": right / len(self),
            "reproducible": self.judge.reproducible,
        }
        return facts, {
            "hash": self.hash,
            "documents": list(range(len(self.prompts))),
            "tokens": [self.draws] * len(self.prompts),
            "nats": (self.draws - self.right).astype(float).tolist(),
            "correct": self.right.tolist(),
        }
