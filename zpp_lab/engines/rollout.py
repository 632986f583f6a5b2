"""A model during a rollout, as every engine hands it to `models/generate.py`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.config.schema import EngineConfig
from zpp_lab.models import Llama
from zpp_lab.models.generate import Cache, Graphs

STALE = (
    "the weights changed during a rollout, so what it generates is of older ones: end `rollout` "
    "before a step, an optimizer or a checkpoint changes the weights"
)


def check_mark(before: Tensor, now: Tensor) -> None:
    """RuntimeError where masters have other bits (`engines/frozen.py`) than when a rollout began.
    Their gathered copies do not show it: few bits can be the same after a step."""
    if not before.equal(now):
        raise RuntimeError(STALE)


def eager(compiled: bool) -> AbstractContextManager[Any]:
    """Run compiled blocks without their compiled code, which would be made again for each shape."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def captures(model: nn.Module, config: EngineConfig, device: torch.device) -> Graphs | None:
    """Return what captures an engine's passes of generation, if it may: of the built-in model, as
    the key-value caches of others grow."""
    takes = config.graph and device.type == "cuda" and isinstance(model, Llama)
    if config.graph == "auto" and expandable_segments():
        return None
    return Graphs(device) if takes else None


def expandable_segments() -> bool:
    """Whether torch's allocator has such segments, of which no CUDA graph may take memory."""
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", ""))
    return "expandable_segments:True" in settings


class Policy:
    """The gathered weights of a rollout, called as `policy(tokens, cache=cache)`.

        for rank in policy.ranks:
            generate(policy.turn(rank), ..., all_done=policy.all_done, graphs=policy.graphs)

    ranks: whose rows this process generates, all of a virtual cluster, one of a real one. Every
    rank makes equally many calls of `generate`.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: Sequence[int],
        all_done: Callable[[bool], bool] = bool,
        after: Callable[[], None] = lambda: None,
        graphs: Graphs | None = None,
    ) -> None:
        """all_done: whether all ranks are done, of whether this one is. after: called behind each
        pass. graphs: what may capture passes, which are not counted then, where all weights stay
        until the end."""
        self.model, self.ranks, self.all_done, self.after = model, tuple(ranks), all_done, after
        self.graphs = graphs
        self.rank, self.open = self.ranks[0], True
        self.counts: dict[int, list[int]] = {rank: [] for rank in ranks}  # passes of each call

    def turn(self, rank: int) -> Policy:
        """Begin a rank's turn."""
        assert rank in self.ranks
        self.rank = rank
        return self

    def __call__(self, tokens: Tensor, *, cache: Cache) -> Tensor:
        if not self.open:
            raise RuntimeError("the rollout has ended, and with it its weights: begin another one")
        own = self.counts[self.rank]
        if cache.passes == 1:
            own.append(0)
        own[-1] += 1
        logits: Tensor = self.model(tokens, cache=cache)
        self.after()
        return logits

    @property
    def passes(self) -> int:
        """Return the passes of the slowest rank, call by call."""
        if len({len(own) for own in self.counts.values()}) > 1:
            raise ValueError(
                "ranks called generate unequally often in a rollout, so those of a real cluster "
                "would wait for each other forever: give each rank as many calls"
            )
        return sum(map(max, zip(*self.counts.values(), strict=True)))
