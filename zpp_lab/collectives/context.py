"""Where in training a collective runs, who looks at what it carries, and what is remembered of it.

Noise is keyed by (seed, step, micro-step, wire), so a collective must know the moment. The
engine, or the hooks of a wrapped model, move the clock; collectives only read it.

A memory (`codecs/kernels/memory.py`) belongs to its encoder: it is kept for each wire, parameter,
encoding rank and row. A step writes its memories beside the old ones, and these go when the step
has turned out finite. So a step that is repeated under a watch meets what the first try met, and
one that fails leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zpp_lab.codecs import Noise, noise_key
from zpp_lab.codecs.base import Domain
from zpp_lab.codecs.kernels.memory import Memory
from zpp_lab.codecs.layout import Layout
from zpp_lab.config.wires import Wire

Key = tuple[Wire, str]  # of a memory: wire and parameter


class EncodeObserver(Protocol):
    """Sees the errors of what one rank encodes: `kernels.encode` fills what `room` gives, and
    `encoded` takes it."""

    def room(self, wire: Wire, layout: Layout, payload: Tensor) -> Tensor | None:
        """For the `errors` of `kernels.encode` of this payload, where they are wanted."""
        ...

    def encoded(self, wire: Wire, layout: Layout, errors: Tensor | None) -> None:
        """What `room` has given, filled."""
        ...


class Observer(EncodeObserver, Protocol):
    """Sees one rank's values, too, before they go on a wire, with the payload that carries them.
    Values are for those that look (`looks`); telemetry needs none."""

    @property
    def looks(self) -> bool: ...

    def weights(self, wire: Wire, layout: Layout, shards: Sequence[Tensor], row: Tensor) -> None:
        """This rank's padded shards, and its payload row uint8 [1, nbytes]."""
        ...

    def gradients(self, layout: Layout, grads: Sequence[Tensor]) -> None:
        """Whole gradients before any wire."""
        ...

    def rows(
        self, wire: Wire, layout: Layout, before: Sequence[Tensor], payload: Tensor, rank: int
    ) -> None:
        """Rows [R, n] of each segment that `rank` sends, and their payload uint8 [R, nbytes].
        For sums that were encoded again, without `room`, this is telemetry's place too."""
        ...


@dataclass
class Clock:
    """The present moment of training."""

    seed: int
    step: int = 0
    micro: int = 0
    last: bool = True  # the step's last micro-step
    grad: bool = True  # a backward follows this forward: keep what it needs
    master: bool = False  # gathers bring the master weights' own bytes, not the recipe's
    rolling: bool = False  # gathers outside of backward are for generation
    observer: Observer | None = None
    # of a step that a CUDA graph captures: (micro-step, wire, ranks, rows) → noise on the device
    drawn: Callable[[int, Wire, tuple[int, ...], tuple[int, ...]], Noise] | None = None

    def weights_noise(self, wire: Wire, *ranks: int) -> Noise:
        """Of the shards of `ranks`. Every micro-step of a step gathers the same weights with the
        same noise."""
        return self._noise(0, wire, ranks, ranks)

    def rows_noise(self, wire: Wire, rank: int, rows: Sequence[int]) -> Noise:
        """Of gradients and activations: `rank` encodes one row for each receiver in `rows`."""
        return self._noise(self.micro, wire, (rank,) * len(rows), tuple(rows))

    def _noise(
        self, micro: int, wire: Wire, ranks: tuple[int, ...], rows: tuple[int, ...]
    ) -> Noise:
        if self.drawn is not None:
            return self.drawn(micro, wire, ranks, rows)
        return Noise(noise_key(self.seed, self.step, micro, wire), ranks, rows)


@dataclass(frozen=True)
class RowMemory:
    """What each encoding rank remembers of one parameter on one wire: `rows` rows of `numel`
    elements."""

    memory: Memory
    rows: int
    numel: int
    domain: Domain | None = None  # of sums between hops that stay rotated

    @property
    def shape(self) -> tuple[int, int]:
        """Of a rank's tensor, in the store's dtype."""
        return self.rows, self.memory.width(self.numel)

    @property
    def nbytes(self) -> int:
        """Of a rank."""
        return self.rows * self.memory.nbytes(self.numel)


class Memories:
    """The memories of an engine: of one rank, or of all. `planned`: in the plan's order.

    `start` begins a step, `commit` ends one whose norm is finite. Parameters without a gradient
    leave theirs alone, and where a memory is reset all of its wire's parameters are.
    """

    def __init__(self, planned: Mapping[Key, RowMemory], ranks: Sequence[int]) -> None:
        self.planned, self.ranks, self.step = planned, list(ranks), 0
        self.old: dict[Key, Tensor] = {}  # [ranks, rows, width], after the last finished step
        self.new: dict[Key, Tensor] = {}  # the same, of the step under way
        self.written: set[tuple[Key, int]] = set()  # parts of `new`
        self.usual: set[Key] = set()  # what the last finished step wrote
        self.settings: dict[Wire, dict[str, Memory]] = {}
        for (wire, name), own in planned.items():
            self.settings.setdefault(wire, {})[name] = own.memory

    def go_on(self, before: Memories) -> None:
        """In place of `before`, between two steps: what is remembered in the same way stays, the
        rest is left behind."""
        same = {key for key, own in self.planned.items() if before.planned.get(key) == own}
        self.old = {key: kept for key, kept in before.old.items() if key in same}
        before.old = {}

    def steady(self, step: int) -> bool:
        """Whether a step that writes what the last one wrote finds all of it, and none is reset."""
        known = all(key in self.old for key in self.usual)
        resets = any(self.planned[key].memory.resets(step) for key in self.usual)
        return not self.planned or bool(self.usual and known and not resets)

    def start(self, step: int) -> None:
        """Begin the step, or begin it once more."""
        self.new, self.written, self.step = {}, set(), step

    def of(self, wire: Wire, ranks: Sequence[int]) -> RankMemories | None:
        """For rows that lie row by row, and in each of these rank by rank; None: the wire
        remembers nothing."""
        return RankMemories(self, wire, tuple(ranks)) if wire in self.settings else None

    def part(self, key: Key, rank: int) -> Tensor | None:
        """What `rank` remembers now: stored rows [rows, width]."""
        place = self.ranks.index(rank)
        if (key, rank) in self.written:
            return self.new[key][place]
        if key in self.old and not self.planned[key].memory.resets(self.step):
            return self.old[key][place]
        return None

    def room(self, key: Key, rank: int, device: torch.device) -> Tensor:
        """Where what `rank` remembers next goes: [rows, width]."""
        if key not in self.new:
            own = self.planned[key]
            shape = (len(self.ranks), *own.shape)
            self.new[key] = torch.empty(shape, dtype=own.memory.dtype, device=device)
        self.written.add((key, rank))
        return self.new[key][self.ranks.index(rank)]

    def commit(self, in_place: bool = False) -> None:
        """The step is done: what it has written counts from now on. `in_place`: what is remembered
        stays where it is, and what is new is copied there."""
        ranks = {(key, rank) for key in self.new for rank in self.ranks}
        assert self.written == ranks, "some ranks have reduced a gradient that others have not"
        self.usual = set(self.new)
        if in_place and self.new:
            torch._foreach_copy_([self.old[key] for key in self.new], list(self.new.values()))
            self.new = {}
        stay = {k: t for k, t in self.old.items() if not self.planned[k].memory.resets(self.step)}
        self.old = stay | self.new
        self.start(self.step)

    def state(self) -> dict[str, Tensor]:
        """By WIRE.PARAMETER: [ranks, rows, width]."""
        return {".".join(key): self.old[key] for key in self.planned if key in self.old}

    def make(self, names: Container[str], device: torch.device) -> dict[str, Tensor]:
        """`state` anew: zeros for these of its names, nothing for others."""
        self.old = {
            key: torch.zeros(len(self.ranks), *own.shape, dtype=own.memory.dtype, device=device)
            for key, own in self.planned.items()
            if ".".join(key) in names
        }
        self.start(0)
        return self.state()


@dataclass(frozen=True)
class RankMemories:
    """What some ranks remember of one wire: `codecs.kernels.memory.Remembered`."""

    memories: Memories
    wire: Wire
    ranks: tuple[int, ...]

    @property
    def settings(self) -> Mapping[str, Memory]:
        return self.memories.settings[self.wire]

    def stored(self, name: str) -> Tensor | None:
        parts = [self.memories.part((self.wire, name), rank) for rank in self.ranks]
        there = [part for part in parts if part is not None]
        if not there:
            return None
        assert len(there) == len(parts), "ranks of a node remember together"
        return torch.stack(there, dim=1).flatten(0, 1) if len(there) > 1 else there[0]

    def room(self, name: str, device: torch.device) -> Tensor:
        key = self.wire, name
        if len(self.ranks) == 1:
            return self.memories.room(key, self.ranks[0], device)
        rows, width = self.memories.planned[key].shape
        dtype = self.memories.planned[key].memory.dtype
        return torch.empty(rows * len(self.ranks), width, dtype=dtype, device=device)

    def save(self, name: str, room: Tensor) -> None:
        if len(self.ranks) > 1:
            for i, rank in enumerate(self.ranks):
                place = self.memories.room((self.wire, name), rank, room.device)
                place.copy_(room[i :: len(self.ranks)])
