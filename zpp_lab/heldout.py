"""The held-out tokens of a run: the same for every arm, seed, engine and cluster, by document.

Windows are spread evenly over the held-out text, so a document has as many tokens among them as
its length gives it. The losses of the documents are what a study resamples to ask whether a gap
holds for other text too.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from zpp_lab.config import Config
from zpp_lab.data import PackedData, TokenData
from zpp_lab.engines.base import Batch
from zpp_lab.engines.losses import heldout_size, total_loss

FILE = "heldout.json"


@dataclass(frozen=True)
class Heldout:
    """Batches of held-out windows, and the document of every target that counts.

    documents: int64 [counted targets], places in the held-out split, never decreasing.
    """

    batches: list[Batch]
    documents: np.ndarray

    @cached_property
    def hash(self) -> str:
        """sha256 of every input and target: equal hashes mean that losses can be compared."""
        digest = hashlib.sha256()
        for part in (t for batch in self.batches for t in batch):
            digest.update(str(tuple(part.shape)).encode() + part.numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    def by_document(self, losses: Tensor) -> dict[str, Any]:
        """The contents of heldout.json, from token losses fp32 [tokens] in the batches' order.

        hash; and for each document its place in the held-out split, its tokens and the sum of
        their losses in nats, rounded once.
        """
        assert losses.shape == self.documents.shape
        places, first = np.unique(self.documents, return_index=True)
        ends = [*first[1:], len(self.documents)]
        return {
            "hash": self.hash,
            "documents": places.tolist(),
            "tokens": [int(b - a) for a, b in zip(first, ends, strict=True)],
            "nats": [total_loss(losses[a:b]) for a, b in zip(first, ends, strict=True)],
        }


def open_heldout(config: Config, data: TokenData | PackedData) -> Heldout:
    """About `train.eval_tokens` held-out tokens in windows of `data.seq_len`."""
    length, tokens = config.data.seq_len, config.train.eval_tokens
    batches: list[Batch] = list(data.heldout(tokens, heldout_size(length), length))
    return Heldout(batches, data.heldout_documents(tokens, length))
