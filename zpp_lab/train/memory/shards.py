"""Bytes of rank 0's shards, where they lie and on their way to an update. It never has fewer than
others, whose last shards may be shorter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from zpp_lab.codecs.layout import Parameter
from zpp_lab.config.schema import Config, Plane
from zpp_lab.engines.optim import StateKind, state_bytes
from zpp_lab.engines.optim.host import STAGE, pieces, pinned_bytes
from zpp_lab.train.memory.activations import FP32

HALF = 2  # bytes of a plane
HALVES: tuple[Plane, ...] = "masters", "weights"  # planes of so many


def shard_shape(p: Parameter) -> tuple[int, ...]:
    """Return the shape of rank 0's rows."""
    return (-(-p.shape[0] // p.world), *p.shape[1:]) if p.shape else (1,)


def shard_bytes(parameters: Iterable[Parameter], itemsize: int = FP32) -> int:
    """Return the bytes of rank 0's shards, padding included."""
    return itemsize * sum(p.shard_numel for p in parameters)


def pinned_shard_bytes(parameters: Iterable[Parameter], itemsize: int) -> int:
    """Return the pinned bytes of rank 0's shards in host memory."""
    return sum(pinned_bytes(itemsize * p.shard_numel) for p in parameters)


def optimizer_bytes(parameters: Iterable[Parameter], kind: StateKind) -> int:
    """Return the bytes of both moments of rank 0's shards, scales included."""
    return sum(state_bytes(shard_shape(p), kind) for p in parameters)


def passing_bytes(
    p: Parameter, config: Config, far: Mapping[Plane, frozenset[str]]
) -> tuple[int, int]:
    """Return the bytes of rank 0's rows that an update brings from host memory, and those that go
    back to it: all but gradients. far: names of parameters by what of them lies there."""
    both = optimizer_bytes([p], config.train.optimizer_state) * (p.name in far["moments"])
    both += HALF * p.shard_numel * sum(p.name in far[plane] for plane in HALVES)
    each = HALF if config.train.masters == "split" else FP32
    return both + each * p.shard_numel * (p.name in far["gradients"]), both


def passing_rows(p: Parameter, far: Mapping[Plane, frozenset[str]]) -> int:
    """Return into how many pieces rank 0's rows may be cut to pass (`CompactAdamW._cuts`)."""
    return 1 if p.name in far["weights"] else shard_shape(p)[0]


def stage_bytes(
    parameters: Iterable[Parameter], config: Config, far: Mapping[Plane, frozenset[str]]
) -> int:
    """Return how many bytes of these a stream has on the GPU at the most, if they are many."""
    cut = (pieces(p, passing_bytes(p, config, far)[0], passing_rows(p, far)) for p in parameters)
    return max([STAGE, *(piece.nbytes for some in cut for piece in some)])
