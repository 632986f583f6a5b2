"""A run's held-out tokens, and when a loss that is still finite counts as lost.

Held-out windows are the same for every arm, seed, engine and cluster. They are spread evenly over
the held-out text, so a document has as many tokens among them as its length gives it. The losses of
the documents are what a study resamples to ask whether a gap holds for other text too.

Beside the loss stand two readouts of the same tokens: how many of them the model predicts, an
integer, and the loss in bits a byte of text, which models with other tokenizers share.

A run that has left the loss it had reached for good would otherwise go on for hours
(`DivergenceRule`). The rule looks at the losses alone, so that a run which was killed and resumed
ends at the same step.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from zpp_lab.config.rl import RlConfig
from zpp_lab.config.schema import Config, TrainConfig
from zpp_lab.data import PackedData, TokenData
from zpp_lab.data.packed import IGNORED
from zpp_lab.data.tokenizer import text_bytes
from zpp_lab.engines.base import Batch, Engine
from zpp_lab.models.loss import heldout_size, mean_loss, total_loss
from zpp_lab.runs.metrics import Record

_WINDOW = 20  # steps that the smoothed loss is the mean of


@dataclass(frozen=True)
class Heldout:
    """Batches of held-out windows, and the document of every target that counts. documents: int64
    [counted targets], places in the held-out split, never decreasing. bytes: int64 [counted
    targets], of text; None where the tokenizer does not tell. pairs: documents are preferences."""

    batches: list[Batch]
    documents: np.ndarray
    bytes: np.ndarray | None = None
    pairs: bool = False

    @cached_property
    def hash(self) -> str:
        """sha256 of every input and target: equal hashes mean that losses can be compared."""
        digest = hashlib.sha256()
        for part in (t for batch in self.batches for t in batch):
            digest.update(str(tuple(part.shape)).encode() + part.numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    def accuracy(self, scores: Tensor) -> dict[str, Any]:
        """Return how many tokens were predicted, and their share; scores: fp32 [2, tokens]."""
        right = int(scores[1].count_nonzero())
        return {"heldout_correct": right, "heldout_accuracy": right / scores.shape[1]}

    def per_byte(self, scores: Tensor) -> dict[str, Any]:
        """Return the bytes of text, and the loss in bits a byte; {} where unknown."""
        count = 0 if self.bytes is None else int(self.bytes.sum())
        if not count:
            return {}
        bits = total_loss(scores[0]) / math.log(2)
        return {"heldout_bytes": count, "heldout_bits_per_byte": bits / count}

    def by_document(self, scores: Tensor) -> dict[str, Any]:
        """Return the contents of heldout.json, from scores fp32 [2, tokens] in the batches'
        order. hash; and for each document its place in the held-out split, its tokens, the sum of
        their losses in nats, rounded once, how many were predicted, and their bytes of text where
        known."""
        losses, right = scores[0], scores[1].numpy()
        assert losses.shape == self.documents.shape
        places, first = np.unique(self.documents, return_index=True)
        ends = [*first[1:], len(self.documents)]
        found = {
            "hash": self.hash,
            "documents": places.tolist(),
            "tokens": [int(b - a) for a, b in zip(first, ends, strict=True)],
            "nats": [total_loss(losses[a:b]) for a, b in zip(first, ends, strict=True)],
            "correct": np.add.reduceat(right, first, dtype=np.int64).tolist(),
        }
        if self.bytes is not None:
            found["bytes"] = np.add.reduceat(self.bytes, first).tolist()
        return found


def open_heldout(config: Config, data: TokenData | PackedData) -> Heldout:
    """Open about `train.eval_tokens` held-out tokens in windows of `data.seq_len`."""
    length, tokens = config.data.seq_len, config.train.eval_tokens
    batches: list[Batch] = list(data.heldout(tokens, heldout_size(length), length))
    pairs = config.data.pairs
    sizes = None if pairs else text_bytes(config.data, data.folder)
    if sizes is not None:
        targets = np.concatenate([batch[1].numpy().ravel() for batch in batches])
        sizes = sizes[targets[targets != IGNORED]]
    return Heldout(batches, data.heldout_documents(tokens, length), sizes, pairs)


def perplexity(loss: float) -> float:
    """Return e to the loss, in nats a token."""
    return math.exp(loss) if loss < 700 else math.inf


class LossReadout:
    """The held-out loss of an engine's weights, and what else follows from the same scores. Of a
    reward model: the loss of pairs, and how many of them it prefers as given; a pair's two texts
    have the pair's scores, and stand where other data has tokens."""

    def __init__(self, config: Config, engine: Engine, data: TokenData | PackedData) -> None:
        self.engine, self.heldout = engine, open_heldout(config, data)
        self.scores: Tensor | None = None  # of the held-out tokens at the last evaluation

    def __len__(self) -> int:
        return len(self.heldout.documents)

    def evaluate(self, step: int) -> Record:
        """Return held-out loss and accuracy with the wire's weights, and keep the scores."""
        self.scores = self.engine.token_scores(step, self.heldout.batches, wire=True)
        share = self.heldout.accuracy(self.scores)["heldout_accuracy"]
        return {"heldout_loss": mean_loss(self.scores[0]), "heldout_accuracy": share}

    def final(self, step: int) -> tuple[Record, dict[str, Any]]:
        """Evaluate after the last step, if needed, and once with the master weights. Returns what
        the summary has of it, and heldout.json."""
        if self.scores is None:
            self.evaluate(step)
        assert self.scores is not None
        loss = mean_loss(self.scores[0])
        facts = {
            "heldout_loss_master": self.engine.evaluate(step, self.heldout.batches, wire=False),
            **({} if self.heldout.pairs else {"perplexity": perplexity(loss)}),
            **self.heldout.accuracy(self.scores),
            **self.heldout.per_byte(self.scores),
        }
        return facts, self.heldout.by_document(self.scores)


class DivergedError(ArithmeticError):
    """The loss stayed far above the best one for long."""


class DivergenceRule:
    """Ends a run when `train.diverge_steps` losses in a row lie more than `train.diverge_above`
    nats above the lowest mean of any 20 steps before. `diverge_above=0` never does. With rewards,
    of which one calls a loss what they lack, `rl.diverge_below` takes its place."""

    def __init__(
        self, train: TrainConfig, losses: Iterable[float] = (), rl: RlConfig | None = None
    ) -> None:
        """losses: those of the steps before this start of the run, in nats per token."""
        self._above = rl.diverge_below if rl else train.diverge_above
        self._steps, self._rewards = train.diverge_steps, rl is not None
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._best = float("inf")
        self._lost = 0  # steps in a row
        for loss in losses:
            self._add(loss)

    def look(self, step: int, loss: float) -> None:
        """Take the loss of `step`; DivergedError when the rule is met."""
        self._add(loss)
        if self._above and self._lost >= self._steps:
            if self._rewards:
                raise DivergedError(
                    f"step {step}: the reward is {-loss:.3f} and was more than {self._above:g} "
                    f"below its best mean of {_WINDOW} steps ({-self._best:.3f}) for {self._lost} "
                    "steps (rl.diverge_below, train.diverge_steps)"
                )
            raise DivergedError(
                f"step {step}: the loss is {loss:.3f} and was more than {self._above:g} nats above "
                f"its best mean of {_WINDOW} steps ({self._best:.3f}) for {self._lost} steps "
                "(train.diverge_above, train.diverge_steps)"
            )

    def _add(self, loss: float) -> None:
        self._lost = self._lost + 1 if loss > self._best + self._above else 0
        self._recent.append(loss)
        if len(self._recent) == _WINDOW:
            self._best = min(self._best, sum(self._recent) / _WINDOW)
